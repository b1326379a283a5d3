"""Table 1, ours beside the paper's, as rows, CSV and LaTeX  [table-results]."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eqprop.experiments.experiment import Record, Reported
from eqprop.experiments.paper import PRESETS, PRINTED, printed_record
from eqprop.training.folder import is_run, sessions
from eqprop.training.metrics import Line, deviation, mean, read_metrics
from eqprop.training.plan import Settings, read_plan

KINDS = {"test": "test_error", "train": "train_error"}
"""The curves of a method and the field of the metrics each is drawn from."""


@dataclass(frozen=True)
class Point:
    """One epoch of a curve: mean over trials, standard deviation (ddof 1; None for one trial), number of trials."""

    epoch: int
    mean: float
    std: float | None
    trials: int


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    folder: Path
    record: Record
    settings: Settings
    plain: dict[str, Any]
    lines: list[Line]
    sessions: list[dict[str, Any]]

    @property
    def title(self) -> str:
        schedule = "" if self.record.schedule == "synchronous" else f", {self.record.schedule}"
        nudge = "" if self.record.nudge == "outside" else f", nudge {self.record.nudge}"
        form = "" if self.record.estimator == "one-sided" else f", {self.record.estimator}"
        cost = "" if self.record.cost == "squared-error" else f", {self.record.cost}"
        data = f", {self.other_data}" if self.other_data else ""
        return f"{self.record.name} ({self.record.preset}{form}{schedule}{nudge}{cost}{data})"

    @property
    def reported(self) -> dict[str, Reported]:
        """What the paper has for this row; nothing for another data set than the paper's."""
        printed = printed_record(self.record)
        return {} if printed is None or self.other_data else dict(printed.reported)

    @property
    def other_data(self) -> str | None:
        """The name of the data set, where it is one that is not the paper's."""
        name = self.plain.get("data", {}).get("set")
        return None if name == "mnist" else name

    @property
    def changes(self) -> list[str]:
        return list(self.plain.get("changes_from_paper") or [])

    def curve(self, method: str, kind: str) -> list[Point]:
        """Mean and deviation at every epoch, over the trials that have not diverged."""
        lost = {line["trial"] for line in self.lines if line["method"] == method and line["diverged"]}
        epochs: dict[int, list[float]] = {}
        for line in self.lines:
            if line["method"] == method and line["trial"] not in lost and line[KINDS[kind]] is not None:
                epochs.setdefault(line["epoch"], []).append(line[KINDS[kind]])
        return [Point(e, _mean(values), deviation(values), len(values)) for e, values in sorted(epochs.items())]

    def last(self, method: str, kind: str) -> Point | None:
        curve = self.curve(method, kind)
        return curve[-1] if curve else None

    def diverged(self, method: str) -> list[Line]:
        return [line for line in self.lines if line["method"] == method and line["diverged"]]

    def seconds(self, method: str) -> float:
        """Wall time: trials side by side share theirs, trials one after the other add up."""
        own = [line for line in self.lines if line["method"] == method]
        by_trial = [sum(line["seconds"] for line in own if line["trial"] == t) for t in {x["trial"] for x in own}]
        return max(by_trial, default=0.0) if self.settings.stacked else sum(by_trial)


@dataclass(frozen=True)
class Picture:
    """A figure of a GDU comparison, to be shown as it is."""

    caption: str
    png: bytes

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Contents:
    """Everything a page shows."""

    folder: Path
    runs: list[Run]
    pictures: list[Picture]


def collect(folder: Path) -> Contents:
    """The runs and figures in a folder and below it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Give a run folder, or one that holds run folders.")
    found = [p.parent for p in folder.rglob("record.json") if is_run(p.parent)]
    runs = sorted((read_run(path) for path in found), key=_order)
    pictures = _pictures(folder)
    if not runs and not pictures:
        raise FileNotFoundError(
            f"{folder} holds neither runs nor figures. Train something first: eqprop train P-1h --out {folder}/p-1h."
        )
    return Contents(folder, runs, pictures)


def read_run(folder: Path) -> Run:
    record, settings, plain = read_plan(folder)
    return Run(folder, record, settings, plain, read_metrics(folder), sessions(folder))


def _order(run: Run) -> tuple[int, int, str, str]:
    """As in the paper's table; presets in their order; a user's own behind, by name."""
    names = list(PRINTED)
    place = names.index(run.record.name) if run.record.name in names else len(names)
    preset = PRESETS.index(run.record.preset) if run.record.preset in PRESETS else len(PRESETS)
    return place, preset, run.record.name, str(run.folder)


def _pictures(folder: Path) -> list[Picture]:
    return [Picture(_caption(path, folder), path.read_bytes()) for path in sorted(folder.rglob("figures/*.png"))]


def _caption(path: Path, folder: Path) -> str:
    """What is drawn, and of which comparison where gdu.json says it."""
    place = path.parent.parent
    what = path.stem.replace("-", " ")
    try:
        name = json.loads((place / "gdu.json").read_text(encoding="utf-8")).get("name")
    except (OSError, ValueError, AttributeError):
        name = None
    if name is None and place != folder:
        name = str(place.relative_to(folder))
    return f"{what}, {name}" if name else what


def _mean(values: Sequence[float]) -> float:
    found = mean(values)
    assert found is not None, "there is a value"
    return found


Verdict = Literal["yes", "no", "unfinished", "other settings", "none"]
WITHIN = 2.0
"""A row counts as reproduced within so many of the paper's standard deviations of the paper's mean, or better."""
USUAL_STD = 0.1
"""The deviation taken for a published error that has none: the paper's own rows have 0.04 to 0.21."""


@dataclass(frozen=True)
class Row:
    """One run and one method: what came out, and what the paper has."""

    run: Run
    method: str
    test: Point | None
    train: Point | None
    reported: Reported | None
    diverged: int

    @property
    def verdict(self) -> Verdict:
        """Whether the paper's number was reached, by full training under a preset as it is."""
        if self.reported is None:
            return "none"
        record = self.run.record
        if self.test is None or self.test.epoch < record.epochs:
            return "unfinished"
        if self.run.settings.validation or self.run.settings.samples or _deviates(self.run):
            return "other settings"
        deviation = USUAL_STD if self.reported.test_std is None else self.reported.test_std
        return "yes" if self.test.mean <= self.reported.test + WITHIN * deviation else "no"


def _deviates(run: Run) -> bool:
    """Whether a setting was changed beyond what its preset names."""
    from eqprop.experiments.paper import RECORDS

    preset = RECORDS.get(run.record.preset, {}).get(run.record.name)
    return preset is None or bool(run.record.changes(preset))


def rows(runs: list[Run]) -> list[Row]:
    return [
        Row(
            run,
            method,
            run.last(method, "test"),
            run.last(method, "train"),
            run.reported.get(method),
            len({line["trial"] for line in run.diverged(method)}),
        )
        for run in runs
        for method in run.settings.methods
    ]


HEADINGS = (
    "name",
    "preset",
    "method",
    "estimator",
    "test_error_mean",
    "test_error_std",
    "train_error_mean",
    "trials",
    "diverged",
    "epoch",
    "epochs",
    "paper_test_error_mean",
    "paper_test_error_std",
    "paper_train_error_mean",
    "reproduced",
    "T",
    "K",
    "beta",
    "schedule",
    "changes_from_paper",
)


def to_csv(table: list[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADINGS)
    for row in table:
        record, test, train, paper = row.run.record, row.test, row.train, row.reported
        writer.writerow(
            [
                record.name,
                record.preset,
                row.method,
                record.estimator if row.method == "ep" else "",
                *(["", ""] if test is None else [test.mean, "" if test.std is None else test.std]),
                "" if train is None else train.mean,
                0 if test is None else test.trials,
                row.diverged,
                0 if test is None else test.epoch,
                record.epochs,
                *(["", "", ""] if paper is None else [_or_empty(v) for v in (paper.test, paper.test_std, paper.train)]),
                row.verdict,
                record.T,
                record.K,
                record.beta,
                record.schedule,
                "; ".join(row.run.changes),
            ]
        )
    return out.getvalue()


def to_latex(table: list[Row]) -> str:
    """A table in the form of the paper's: test mean and deviation, train error in parentheses."""
    lines = [
        r"\begin{tabular}{@{}llccccccc@{}} \toprule",
        r"& & \multicolumn{2}{c}{ours (error \%)} & \multicolumn{2}{c}{paper (error \%)} & $T$ & $K$ & Epochs \\",
        r"\cmidrule(r){3-4}\cmidrule(r){5-6}",
        r"& & Test & Train & Test & Train & & & \\ \midrule",
    ]
    for row in table:
        record, paper = row.run.record, row.reported
        cells = [
            _escape(f"{record.name} ({record.preset})"),
            _escape(record.label(row.method)),
            _spread(row.test),
            "--" if row.train is None else f"$({row.train.mean:.2f})$",
            "--" if paper is None else _number(paper.test, paper.test_std),
            "--" if paper is None or paper.train is None else f"$({paper.train:.2f})$",
            str(record.T),
            str(record.K),
            str(row.test.epoch if row.test else 0),
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _spread(point: Point | None) -> str:
    if point is None:
        return "--"
    return _number(point.mean, point.std)


def _number(mean: float, std: float | None) -> str:
    return f"${mean:.2f}$" if std is None else rf"${mean:.2f} \pm {std:.2f}$"


def _or_empty(value: float | None) -> float | str:
    return "" if value is None else value


def _escape(text: str) -> str:
    return "".join(f"\\{c}" if c in "#$%&_{}" else c for c in text)
