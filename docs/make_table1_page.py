"""Fill the tables of docs/table1.md from results/table1 and results/table1-tried, and draw the curves over epochs.

python docs/make_table1_page.py            rewrite the marked blocks
python docs/make_table1_page.py --check    say whether they are up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from blocks import write_or_check
from matplotlib import rc_context

from eqprop.experiments.experiment import Experiment, PaperResult
from eqprop.experiments.io import from_dict
from eqprop.experiments.paper import PAPER, PRESETS, named_experiment
from eqprop.report.figures import Panel, error_curves, styled
from eqprop.report.runs import Point, reproduced
from eqprop.training.metrics import ALTERNATING, deviation

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "table1"
TRIED = ROOT / "results" / "table1-tried"
SILENT, HELD_OUT = "silent-outputs", "held-out"
"""Files of TRIED that are not a row of the table."""
PAGE = ROOT / "docs" / "table1.md"
CURVES = ROOT / "docs" / "table1-curves.svg"
ESTIMATORS = ("ep", "bptt")
REST = ("residual_mean", "unsettled")
LAST = 10
"""Epochs whose free phases are looked at."""
NOT_YET = "*Not run yet.*"


@dataclass(frozen=True)
class Published:
    """One file: a row of the table under one preset, with one schedule."""

    experiment: Experiment
    alternating: bool
    found: Mapping[str, Any]

    @property
    def told_as(self) -> str:
        return f"`{self.experiment.preset}`" + (" with alternating steps" if self.alternating else "")

    def method(self, name: str) -> Mapping[str, Any] | None:
        told: Mapping[str, Any] | None = self.found["estimators"].get(name)
        return told if told and told["test_error_mean"] is not None else None

    def epochs(self, name: str) -> int:
        told = self.method(name)
        return 0 if told is None else min(len(trial["test_error"]) for trial in told["trials"])

    def reproduced(self, name: str) -> bool | None:
        """Within two of the paper's standard deviations of the paper's mean, or better; None if it is not finished."""
        told, paper = self.method(name), self.experiment.paper_results.get(name)
        if told is None or paper is None or self.epochs(name) < self.experiment.epochs:
            return None
        return reproduced(told["test_error_mean"], paper)


def published(folder: Path) -> Iterator[Published]:
    """Every file, presets and rows in the order of the experiments."""
    for preset in PRESETS:
        for name in PAPER:
            for end in ("", ALTERNATING):
                path = folder / preset / f"{name}{end}.json"
                if path.is_file():
                    experiment = named_experiment(name, preset)
                    yield Published(experiment, bool(end), json.loads(path.read_text(encoding="utf-8")))


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def spread(told: Mapping[str, Any] | None) -> str:
    if told is None:
        return "–"
    std, train = told["test_error_std"], told["train_error_mean"]
    return f"{told['test_error_mean']:.2f}" + (f" ± {std:.2f}" if std is not None else "") + f" ({train:.2f})"


def paper(paper_results: PaperResult | None) -> str:
    return "–" if paper_results is None else str(paper_results)


def yes_no(reproduced: bool | None) -> str:
    return {True: "yes", False: "no", None: "–"}[reproduced]


def results_block(files: list[Published]) -> str:
    blocks = []
    for preset in PRESETS:
        rows = []
        for file in files:
            if file.experiment.preset != preset or file.alternating:
                continue
            cells = [file.experiment.name]
            for name in ESTIMATORS:
                told, paper_results = file.method(name), file.experiment.paper_results.get(name)
                cells += [spread(told), paper(paper_results), yes_no(file.reproduced(name))]
            trials = max((len(m["trials"]) for m in file.found["estimators"].values()), default=0)
            rows.append([*cells, f"{file.epochs('ep')}, {file.epochs('bptt')}", str(trials)])
        if rows:
            heads = ["network", "EP", "paper", "reproduced", "BPTT", "paper", "reproduced", "epochs", "trials"]
            blocks.append(f"**Preset `{preset}`**\n\n{table(heads, rows)}")
    return "\n\n".join(blocks) or NOT_YET


def reproduced_block(files: list[Published]) -> str:
    """Under which presets each network comes out by each estimator, and where alternating steps alone would do it."""
    rows = []
    for name in dict.fromkeys(file.experiment.name for file in files):
        own = [file for file in files if file.experiment.name == name]
        found = [[file.told_as for file in own if file.reproduced(estimator)] for estimator in ESTIMATORS]
        rows.append([name, *(", ".join(presets) or "none" for presets in found)])
    return table(["network", "EP comes out with", "BPTT"], rows) if rows else NOT_YET


def changes_block(files: list[Published]) -> str:
    rows = []
    for file in files:
        changes = [str(c) for c in file.experiment.changes(PAPER[file.experiment.name])]
        if changes and not file.alternating:
            rows.append([file.experiment.name, f"`{file.experiment.preset}`", "; ".join(changes)])
    return (
        table(["network", "preset", "what is not as printed"], rows)
        if rows
        else "Nothing: only preset `paper` was run."
    )


def tried(folder: Path) -> list[Published]:
    """Settings that were tried for a row and are not a preset; each file carries its experiment."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.stem not in (SILENT, HELD_OUT):
            result = json.loads(path.read_text(encoding="utf-8"))
            experiment = replace(
                from_dict(result["experiment"], str(path)), paper_results=PAPER[result["name"]].paper_results
            )
            found.append(Published(experiment, experiment.schedule == "alternating", result))
    return found


def tried_block(files: list[Published]) -> str:
    rows = []
    for file in tried(TRIED):
        printed = PAPER[file.experiment.name]
        changes = [str(c) for c in file.experiment.changes(printed)]
        cells = [spread(file.method(name)) for name in ESTIMATORS]
        rows.append([file.experiment.name, "; ".join(changes), *cells, str(max(map(file.epochs, ESTIMATORS)))])
    return table(["network", "what is not as printed", "EP", "BPTT", "epochs"], rows) if rows else "Nothing yet."


def silent_block(files: list[Published]) -> str:
    path = TRIED / f"{SILENT}.json"
    if not path.is_file():
        return NOT_YET
    told = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        [f"{row['name']}, `{row['preset']}`", *(", ".join(map(str, row[estimator])) for estimator in ESTIMATORS)]
        for row in told["rows"]
    ]
    seeds = ", ".join(map(str, told["seeds"]))
    note = f"{told['samples']} samples, seeds {seeds}, commit {str(told['provenance']['commit'])[:7]}."
    return f"{table(['network', 'EP: silent outputs of ten', 'BPTT'], rows)}\n\n{note}"


def held_out_block(files: list[Published]) -> str:
    """What images held out of the training set said of settings."""
    path = TRIED / f"{HELD_OUT}.json"
    if not path.is_file():
        return NOT_YET
    told = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in told["rows"]:
        error = f"{row['held_out_mean']:.2f} ± {row['held_out_std']:.2f} ({row['train_error_mean']:.2f})"
        label, changes = f"{row['name']} {row['estimator'].upper()}", "; ".join(row["changes"])
        seeds = ", ".join(str(trial["seed"]) for trial in row["trials"])
        rows.append([label, changes or "nothing", error, str(row["epochs"]), seeds, row["commit"][:7]])
    note = f"{told['samples']:,} images to train on, {told['held_out']:,} held out, {told['provenance']['device']}."
    heads = ["network", "what is not as printed", "error on held-out images", "epochs", "seeds", "commit"]
    return f"{table(heads, rows)}\n\n{note}"


def schedules_block(files: list[Published]) -> str:
    """The P rows with both schedules: the same errors, at what cost."""
    rows = []
    everything = [*files, *tried(TRIED)]
    for file in everything:
        wanted = replace(file.experiment, schedule="alternating")
        twin = next((f for f in everything if replace(_stepped(f), preset=wanted.preset) == wanted), None)
        if twin is None or _stepped(file).schedule == "alternating":
            continue
        for name in ESTIMATORS:
            if file.method(name) and twin.method(name):
                changes = "; ".join(str(c) for c in file.experiment.changes(PAPER[file.experiment.name]))
                cells = [f"{file.experiment.name} {name.upper()}, {file.told_as if file in files else changes}"]
                for f in (file, twin):
                    cells += [spread(f.method(name)), yes_no(f.reproduced(name))]
                rows.append([*cells, *_times(file, twin, name)])
    heads = ["network", "synchronous", "reproduced", "alternating", "reproduced", "time, synchronous", "alternating"]
    return table(heads, rows) if rows else NOT_YET


def _times(file: Published, twin: Published, name: str) -> list[str]:
    """Of the estimator, or of both where a file has one time for all it holds and both hold the same."""
    places = [_place(f.found["provenance"][0]["provenance"]) for f in (file, twin)]
    on = ["", ""] if places[0] == places[1] else [f", {place}" for place in places]
    own = [f.found.get("seconds_by_estimator", {}).get(name) for f in (file, twin)]
    if all(seconds is not None for seconds in own):
        return [f"{seconds:,.0f} s{where}" for seconds, where in zip(own, on, strict=True)]
    ran = [[m for m in ESTIMATORS if f.method(m)] for f in (file, twin)]
    if ran[0] != ran[1]:
        return ["–", "–"]
    both = ", both estimators" if len(ran[0]) > 1 else ""
    return [f"{f.found['seconds']:,.0f} s{both}{where}" for f, where in zip((file, twin), on, strict=True)]


def _place(told: Mapping[str, Any]) -> str:
    """The device, or what kind of processor and how much of it."""
    if told["device"] != "cpu":
        return str(told["device"])
    return f"{told['processor']}, {told['threads']} thread{'s' if told['threads'] != 1 else ''}"


def _stepped(file: Published) -> Experiment:
    """The experiment with the schedule it was run with."""
    return replace(file.experiment, schedule="alternating") if file.alternating else file.experiment


def rest_block(files: list[Published]) -> str:
    """How the free phases of the last epochs ended, where the file of a row has it."""
    rows = []
    for file in files:
        for name, trials in file.found.get("free_phases", {}).items():
            residuals, shares = ([fmean(trial[kind][-LAST:]) for trial in trials] for kind in REST)
            cells = [f"{file.experiment.name} {name.upper()}", file.told_as, spread(file.method(name))]
            low, high = 100 * min(shares), 100 * max(shares)
            rows.append([*cells, f"{min(residuals):.1e} … {max(residuals):.1e}", f"{low:.2g} … {high:.2g}"])
    return table(["network", "preset", "error", "mean residual", "not settled, %"], rows) if rows else NOT_YET


def provenance_block(files: list[Published]) -> str:
    rows = []
    for file in files:
        for session in file.found["provenance"]:
            told = session["provenance"]
            where = f"{_place(told)}, torch {told['torch']}"
            label = file.experiment.name + (" alternating" if file.alternating else "")
            rows.append(
                [
                    label,
                    f"`{file.experiment.preset}`",
                    file.found["engine"],
                    where,
                    str(told["commit"])[:12],
                    told["date"],
                ]
            )
    if not rows:
        return NOT_YET
    totals: dict[tuple[str, str], tuple[float, int]] = {}
    for file in files:
        where = file.told_as, _place(file.found["provenance"][0]["provenance"])
        seconds, trained = totals.get(where, (0.0, 0))
        runs = sum(file.method(name) is not None for name in ESTIMATORS)
        totals[where] = seconds + file.found["seconds"], trained + runs
    times = [[preset, device, str(runs), f"{seconds / 60:.1f}"] for (preset, device), (seconds, runs) in totals.items()]
    together = table(["preset", "where", "runs of a network by an estimator", "minutes, tests included"], times)
    heads = ["network", "preset", "engine", "where", "commit", "begun"]
    return f"{table(heads, rows)}\n\n{together}"


def curves_block(files: list[Published]) -> str:
    return f"![Errors over epochs, EP and BPTT]({CURVES.name})" if files else NOT_YET


def draw(files: list[Published]) -> None:
    """The paper's appendix figures from the published files: a panel for each network, preset and schedule."""
    panels = [Panel(_title(f), _curves(f), f.experiment.paper_results) for f in by_network(files)]
    figure = error_curves(panels)
    with styled(), rc_context({"svg.hashsalt": "eqprop", "svg.fonttype": "none"}):
        figure.savefig(CURVES, metadata={"Date": None, "Creator": "eqprop"})


def _title(file: Published) -> str:
    return f"{file.experiment.name}, {file.experiment.preset}" + (", alternating" if file.alternating else "")


def by_network(files: list[Published]) -> list[Published]:
    """By network and then by preset."""
    names = list(PAPER)
    return sorted(files, key=lambda f: names.index(f.experiment.name))


def _curves(file: Published) -> dict[tuple[str, str], list[Point]]:
    curves = {}
    for name in ESTIMATORS:
        told = file.method(name)
        trials = [] if told is None else [trial for trial in told["trials"] if not trial["diverged"]]
        for kind in ("test", "train"):
            by_epoch = zip(*(trial[f"{kind}_error"] for trial in trials), strict=False)
            points = [Point(n + 1, fmean(v), deviation(v), len(v)) for n, v in enumerate(by_epoch)]
            if points:
                curves[name, kind] = points
    return curves


BLOCKS: dict[str, Callable[[list[Published]], str]] = {
    "curves": curves_block,
    "results": results_block,
    "reproduced": reproduced_block,
    "changes": changes_block,
    "tried": tried_block,
    "silent": silent_block,
    "held-out": held_out_block,
    "schedules": schedules_block,
    "rest": rest_block,
    "provenance": provenance_block,
}


def makers(files: list[Published]) -> dict[str, Callable[[], str]]:
    return {name: partial(make, files) for name, make in BLOCKS.items()}


def main() -> None:
    files, check = list(published(RESULTS)), "--check" in sys.argv
    write_or_check(PAGE, makers(files), check)
    if files and not check:
        draw(files)
    elif files and not CURVES.is_file():
        sys.exit(f"There is no {CURVES.name}. Run: python docs/make_table1_page.py")


if __name__ == "__main__":
    main()
