"""What a page is made of: the runs below a folder, read from their files, and GDU figures if there are any."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eqprop.experiments.record import Record, Reported
from eqprop.experiments.training_records import PRESETS, PRINTED, printed_record
from eqprop.training.folder import is_run, sessions
from eqprop.training.metrics import Line, read_metrics
from eqprop.training.plan import read_plan
from eqprop.training.result import deviation, mean
from eqprop.training.settings import Settings

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
