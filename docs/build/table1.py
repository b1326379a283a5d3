"""Table 1: the blocks of README.md, docs/table1.md and docs/table1-notes.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.collect import compact
from docs.build.results import Document, documents
from docs.build.text import commit, duration, listed, table
from eqprop import papers
from eqprop.estimators.named import label
from eqprop.report.figures import Panel, error_curves
from eqprop.report.runs import KINDS, points
from eqprop.run.published import reproduces
from eqprop.run.spec import Spec

ESTIMATORS = ("ep", "bptt")
MATCHED = {
    "EB-1h": ("tuned", "synchronous"),
    "EB-2h": ("tuned", "synchronous"),
    "P-1h": ("paper", "synchronous"),
    "P-2h": ("tuned", "alternating"),
    "P-3h": ("paper", "alternating"),
    "P-conv": ("tuned", "alternating"),
}
"""By network the preset and the schedule with the fewest changes under which both estimators were trained and none
fails."""
HEADS = ("network", "preset", "steps", "T", "K", "EP", "paper", "BPTT", "paper", "time")
LAST = 10  # epochs whose free phases are looked at


class TrainError(NamedTuple):
    """Our mean and deviation over the trials, and the paper's mean, which it prints without a deviation."""

    mean: float
    std: float | None
    paper: float

    @property
    def differs(self) -> bool:
        """By more than three of our deviations."""
        return self.std is not None and abs(self.mean - self.paper) > 3 * self.std


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
        """Whether the test error is within two of the paper's deviations, on both sides; None if it is not finished."""
        found, paper = self.result(estimator), self.experiment.results.get(estimator)
        if found is None or paper is None or self.epochs(estimator) < self.experiment.optimizer.epochs:
            return None
        return reproduces(found["test_error_mean"], paper)

    def train_error(self, estimator: str) -> TrainError | None:
        """The running train error of the last epoch beside the paper's; None where either is missing."""
        found, paper = self.result(estimator), self.experiment.results.get(estimator)
        if found is None or paper is None or paper.train is None:
            return None
        last = [trial["train_error"][-1] for trial in found["trials"] if not trial["diverged"]]
        return TrainError(fmean(last), stdev(last) if len(last) > 1 else None, paper.train)

    def seconds(self, estimator: str) -> float:
        """Of one estimator where the file says so, else of both."""
        by: dict[str, float] = self.found.get("seconds_by_estimator", {})
        return by.get(estimator, self.found["seconds"])

    @property
    def whole_seconds(self) -> float:
        """Of both estimators together."""
        by: dict[str, float] = self.found.get("seconds_by_estimator", {})
        return sum(by.values()) if set(ESTIMATORS) <= set(by) else self.found["seconds"]


def rows(found: list[Document] | None = None) -> list[Row]:
    """By network, then by preset; the schedule of the preset first."""
    found = documents("table1") if found is None else found
    every = [Row(papers.find(d["name"], d["preset"]), d) for d in found]
    names, presets = list(papers.of_paper()), list(papers.PRESETS)
    key = lambda r: (names.index(r.experiment.name), presets.index(r.experiment.preset), not r.own_schedule)  # noqa: E731
    return sorted(every, key=key)


def matched(every: list[Row] | None = None) -> dict[str, Row]:
    """By network the row of `MATCHED`: one preset, start and schedule for both estimators."""
    found = {(r.experiment.name, r.experiment.preset, r.found["schedule"]): r for r in every or rows()}
    return {name: found[name, *how] for name, how in MATCHED.items() if (name, *how) in found}


def as_printed(every: list[Row] | None = None) -> dict[str, Row]:
    """By network the row with every setting that the paper prints."""
    return {r.experiment.name: r for r in every or rows() if r.experiment.preset == "paper" and r.own_schedule}


def spread(found: Document | None, train: bool = True) -> str:
    if found is None:
        return "–"
    std = "" if found["test_error_std"] is None else f" ± {found['test_error_std']:.2f}"
    return f"{found['test_error_mean']:.2f}{std}" + (f" ({found['train_error_mean']:.2f})" if train else "")


def comparison(shown: Mapping[str, Row], train: bool = True) -> str:
    """A line per network: how it was trained, and the errors of EP and of BPTT beside the paper's."""
    lines = []
    for name, row in shown.items():
        phases = row.experiment.phases
        cells = [name, f"`{row.experiment.preset}`", row.found["schedule"], phases.T, phases.K]
        for estimator in ESTIMATORS:
            paper = row.experiment.results[estimator]
            cells += [_cell(row, estimator, train), paper if train else replace(paper, train=None)]
        lines.append([*cells, duration(row.whole_seconds)])
    return table(HEADS, lines, words=3)


def _cell(row: Row, estimator: str, train: bool = True) -> str:
    """An error, bold if reproduced, with the epoch where it stopped early and a mark where the train error differs."""
    ours, epochs = spread(row.result(estimator), train), row.epochs(estimator)
    error = row.train_error(estimator)
    mark = "†" if train and error is not None and error.differs else ""
    whole = row.experiment.optimizer.epochs
    short = f", epoch {epochs} of {whole}" if 0 < epochs < whole else ""
    return (f"**{ours}**" if row.reproduced(estimator) else ours) + mark + short


def summary_block(every: list[Row] | None = None) -> str:
    """Test errors, like for like, without the times: lines that a terminal shows whole."""
    shown = comparison(matched(every), train=False).splitlines()
    return "\n".join(line.rsplit(" | ", 1)[0] + " |" for line in shown)


def full_block() -> str:
    """Like for like, with the running train errors, and which of them differ from the paper's."""
    return f"{comparison(matched())}\n\n{differences(matched())}\n\n{_convolutional()}"


def _convolutional() -> str:
    """Why the train error of P-conv by EP is not the paper's."""
    ep, bptt = (matched()["P-conv"].found["estimators"][e]["train_error_mean"] for e in ESTIMATORS)
    (authors,) = (r.result("ep") for r in rows() if (r.experiment.name, r.experiment.preset) == ("P-conv", "authors"))
    assert authors is not None, "it was trained"
    return (
        "P-conv by EP trains further here than in the paper, which lays its train error to saturated neurons. Falling "
        "rates and free phases that settle take noise out of the updates; with constant rates and synchronous steps "
        f"(`authors`) it is {authors['train_error_mean']:.2f} %, with a test error of {authors['test_error_mean']:.2f} "
        f"%. Like for like, EP's train error is {'below' if ep < bptt else 'above'} BPTT's."
    )


def printed_block() -> str:
    """Everything as printed, whatever it gives, and how many cells are reproduced."""
    shown = as_printed()
    own = [(row, estimator) for row in shown.values() for estimator in ESTIMATORS]
    count = sum(bool(row.reproduced(estimator)) for row, estimator in own)
    return f"{comparison(shown)}\n\n{count} of {len(own)} cells are reproduced with the printed settings."


def differences(shown: Mapping[str, Row]) -> str:
    """Which train errors differ from the paper's, and by what."""
    found = []
    for name, row in shown.items():
        for estimator in ESTIMATORS:
            error = row.train_error(estimator)
            if error is not None and error.differs:
                found.append(
                    f"{name} by {label(estimator)} {error.mean:.2f} ± {error.std:.2f} (paper {error.paper:.2f})"
                )
    return f"† Train errors more than three of our deviations from the paper's: {listed(found) or 'none'}."


def results_block() -> str:
    """Every row under every preset, with both schedules where both ran."""
    lines = []
    for row in rows():
        lines.append([row.experiment.name, row.label, *(_cell(row, estimator) for estimator in ESTIMATORS)])
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
    panels = []
    for name, row in matched().items():
        drawn = {(e, kind): points(row.found["estimators"][e]["trials"], kind) for e in ESTIMATORS for kind in KINDS}
        panels.append(Panel(f"{name}, {row.label.replace('`', '')}", drawn, row.experiment.results))
    return error_curves(panels)


def stored_curves() -> str:
    """src/eqprop/report/curves.json: errors of the same rows over the epochs, mean and deviation of the trials."""
    stored = []
    for name, row in matched().items():
        trials = {e: row.found["estimators"][e]["trials"] for e in ESTIMATORS}
        errors = {
            e: {kind: [[_short(p.mean), _short(p.std)] for p in points(own, kind)] for kind in KINDS}
            for e, own in trials.items()
        }
        made = row.found["provenance"][-1]
        made = made.get("provenance", made)
        head = {"name": name, "preset": row.experiment.preset, "schedule": row.found["schedule"]}
        more = {"trials": len(trials["ep"]), "device": made["device"], "commit": made["commit"]}
        stored.append({**head, **more, "errors": errors})
    return compact(stored) + "\n"


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
