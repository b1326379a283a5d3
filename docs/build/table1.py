"""Table 1: the blocks of README.md, docs/table1.md and docs/table1-notes.md."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from matplotlib.figure import Figure

from docs.build.results import Document, documents
from docs.build.text import commit, duration, listed, table
from eqprop import papers
from eqprop.report.figures import Panel, error_curves
from eqprop.report.runs import KINDS, points, reproduced
from eqprop.run.spec import Spec

ESTIMATORS = ("ep", "bptt")
LAST = 10  # epochs whose free phases are looked at


@dataclass(frozen=True)
class Row:
    """A network trained under one preset with one schedule, as `eqprop reproduce table1` writes it."""

    experiment: Spec
    found: Document

    @property
    def own_schedule(self) -> bool:
        """Whether it ran with the schedule of its preset."""
        return bool(self.found["schedule"] == self.experiment.phases.schedule)

    @property
    def label(self) -> str:
        return f"`{self.experiment.preset}`" + ("" if self.own_schedule else f", {self.found['schedule']}")

    def result(self, estimator: str) -> Document | None:
        found: Document | None = self.found["estimators"].get(estimator)
        return found if found and found["test_error_mean"] is not None else None

    def epochs(self, estimator: str) -> int:
        found = self.result(estimator)
        return min(len(trial["test_error"]) for trial in found["trials"]) if found else 0

    def reproduced(self, estimator: str) -> bool | None:
        """Within two of the paper's standard deviations, or better; None if it is not finished."""
        found, paper = self.result(estimator), self.experiment.results.get(estimator)
        if found is None or paper is None or self.epochs(estimator) < self.experiment.optimizer.epochs:
            return None
        return reproduced(found["test_error_mean"], paper)

    def seconds(self, estimator: str) -> float:
        """Of one estimator where the file says so, else of both."""
        both: float = self.found["seconds"]
        by: dict[str, float] = self.found.get("seconds_by_estimator", {})
        return by.get(estimator, both)


def rows(found: list[Document] | None = None) -> list[Row]:
    """By network, then by preset; the schedule of the preset first."""
    found = documents("table1") if found is None else found
    every = [Row(papers.find(d["name"], d["preset"]), d) for d in found]
    names, presets = list(papers.of_paper()), list(papers.PRESETS)
    key = lambda r: (names.index(r.experiment.name), presets.index(r.experiment.preset), not r.own_schedule)  # noqa: E731
    return sorted(every, key=key)


def chosen(every: list[Row], name: str) -> dict[str, Row]:
    """By estimator the row to show: one preset that brings both within the limit, else the first for each, else any."""
    own = [row for row in every if row.experiment.name == name and row.own_schedule]
    both = [row for row in own if all(row.reproduced(e) for e in ESTIMATORS)]
    out = {}
    for estimator in ESTIMATORS:
        ran = [row for row in own if row.result(estimator)]
        out[estimator] = next(iter([*both, *(row for row in ran if row.reproduced(estimator)), *ran]))
    return out


def spread(found: Document | None, train: bool = True) -> str:
    if found is None:
        return "–"
    std = "" if found["test_error_std"] is None else f" ± {found['test_error_std']:.2f}"
    return f"{found['test_error_mean']:.2f}{std}" + (f" ({found['train_error_mean']:.2f})" if train else "")


def summary_block(every: list[Row] | None = None, train: bool = False) -> str:
    """A line per network: the error with its preset, the paper's, and the time for five trials by both estimators."""
    every = rows() if every is None else every
    lines = []
    for name in papers.of_paper():
        if not any(row.experiment.name == name for row in every):
            continue
        best, cells = chosen(every, name), [name]
        for estimator, row in best.items():
            ours = spread(row.result(estimator), train)
            paper = row.experiment.results[estimator]
            cells += [f"{f'**{ours}**' if row.reproduced(estimator) else ours} `{row.experiment.preset}`"]
            cells += [str(paper) if train else f"{paper.test:.2f} ± {paper.test_std:.2f}"]
        ep, bptt = best["ep"], best["bptt"]
        time = ep.found["seconds"] if ep is bptt else ep.seconds("ep") + bptt.seconds("bptt")
        lines.append([*cells, duration(time)])
    return f"{table(['network', 'EP', 'paper', 'BPTT', 'paper', 'time'], lines)}\n\n{_counted(every)}"


def full_block() -> str:
    """The same with the running train errors."""
    return summary_block(train=True)


def _counted(every: list[Row]) -> str:
    """How many cells of the paper's table come out."""
    own = [row for row in every if row.own_schedule]
    cells = [(r.experiment.name, e, r.experiment.preset) for r in own for e in ESTIMATORS if r.reproduced(e)]
    printed, some = sum(cell[2] == "paper" for cell in cells), len({cell[:2] for cell in cells})
    return f"{printed} of {2 * len(papers.of_paper())} cells come out as printed (`paper`), {some} under some preset."


def results_block() -> str:
    """Every row under every preset, with both schedules where both ran."""
    lines = []
    for row in rows():
        cells = [row.experiment.name, row.label]
        for estimator in ESTIMATORS:
            ours, epochs = spread(row.result(estimator)), row.epochs(estimator)
            whole = row.experiment.optimizer.epochs
            short = f", epoch {epochs} of {whole}" if 0 < epochs < whole else ""
            cells.append((f"**{ours}**" if row.reproduced(estimator) else ours) + short)
        lines.append(cells)
    return table(["network", "preset", "EP", "BPTT"], lines, words=2)


def changes(experiment: Spec) -> str:
    return "; ".join(str(c) for c in experiment.changes(papers.find(experiment.name))) or "nothing"


def changes_block() -> str:
    own = [r.experiment for r in rows() if r.own_schedule and r.experiment.preset != "paper"]
    return table(["network", "preset", "changed"], [[e.name, f"`{e.preset}`", changes(e)] for e in own], words=3)


def tried_block() -> str:
    lines = []
    for found in documents("tried/rows.json"):
        experiment = Spec(**found["experiment"]).override(published=dict(papers.find(found["name"]).published))
        row = Row(experiment, found)
        lines.append([found["name"], changes(experiment), *(spread(row.result(e)) for e in ESTIMATORS)])
    return table(["network", "changed from the paper", "EP", "BPTT"], lines, words=2)


def silent_block() -> str:
    found = documents("tried/silent-outputs.json")[0]
    lines = [[row["name"], f"`{row['preset']}`", *(listed(row[e]) for e in ESTIMATORS)] for row in found["rows"]]
    note = f"Of ten outputs, at the first weights, over {found['samples']} samples; a number per seed "
    note += f"({listed(found['seeds'])}); commit {commit(found['provenance'])}."
    return f"{table(['network', 'preset', 'EP', 'BPTT'], lines, words=2)}\n\n{note}"


def rest_block() -> str:
    """How the free phases of the last epochs ended, lowest and highest of the trials, for EP on the deep P nets."""
    lines = []
    for row in rows():
        if row.experiment.name not in ("P-1h", "P-2h", "P-3h") or "ep" not in row.found.get("free_phases", {}):
            continue
        trials = row.found["free_phases"]["ep"]
        residuals, shares = ([fmean(t[k][-LAST:]) for t in trials] for k in ("residual_mean", "unsettled"))
        rest = f"{min(residuals):.0e} … {max(residuals):.0e}", f"{100 * min(shares):.2g} … {100 * max(shares):.2g}"
        lines.append([row.experiment.name, row.label, row.found["schedule"], spread(row.result("ep")), *rest])
    heads = ["network", "preset", "steps", "EP's error", "mean residual", "not settled, %"]
    return table(heads, lines, words=3)


def curves() -> Figure:
    """Errors over the epochs, a panel per network, of the rows the table shows."""
    every = rows()
    panels = []
    for name in papers.of_paper():
        best = chosen(every, name)
        own = {e: (row.result(e) or {"trials": []})["trials"] for e, row in best.items()}
        drawn = {(e, kind): points(trials, kind) for e, trials in own.items() for kind in KINDS}
        presets = listed(dict.fromkeys(row.experiment.preset for row in best.values()))
        panels.append(Panel(f"{name}, {presets}", drawn, best["ep"].experiment.results))
    return error_curves(panels)
