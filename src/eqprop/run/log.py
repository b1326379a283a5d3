"""metrics.jsonl: one line per estimator, trial and epoch, appended as they are trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eqprop.files import append_text, read_bytes, write_text
from eqprop.run.checkpoint import Head
from eqprop.run.folder import METRICS
from eqprop.run.session import Leg

Line = dict[str, Any]
"""One line: the fields of `LineFields`; `test_error_top5` if the experiment counts it; below float32, in the first and
the last epoch, `precision`: how far the update of the epoch's first mini-batch agrees with float32's, and in the first
how far float32's agrees with float64's; what keeps the net at rest has found and changed (see `rest.Guard`); and the
watch's own metrics."""

WALL_TIME = "seconds"
"""The only field of a line that differs between two runs of the same experiment."""


class LineFields(msgspec.Struct):
    """What every line has: errors in percent, `unsettled` as a share of samples; None where a trial was stopped."""

    estimator: str
    trial: int
    seed: int
    epoch: int
    test_error: float | None
    train_error: float | None
    train_error_measured: float | None
    loss: float | None
    residual_mean: float | None
    residual_worst: float | None
    unsettled: float | None
    seconds: float
    diverged: dict[str, Any] | None
    test_error_top5: float | None = None
    precision: dict[str, Any] = msgspec.field(default_factory=dict)
    work: dict[str, int] = msgspec.field(default_factory=dict)


RESERVED = ("precision", "test_error_top5", "T", "beta", "rate_factor", "radius", "work")
"""Names that only some lines have: no metric of a user may take them."""


class Log:
    """The lines of a run folder: in memory, and in its file where `writes`."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.path, self.writes = folder / METRICS, writes
        self.lines = read_metrics(folder)

    def append(self, lines: Iterable[Line]) -> None:
        """Add lines to the end of the file, and flush it."""
        new = list(lines)
        self.lines += new
        if self.writes:
            append_text(self.path, "".join(map(_text, new)))

    def cut(self, reached: Mapping[Leg, Head]) -> None:
        """Drop what is newer than the checkpoints, which training writes again. Raise if earlier lines are lost."""
        epochs: dict[tuple[str, int], int] = {}
        for leg, head in reached.items():
            self._check_whole(leg, head)
            epochs |= {(leg.estimator, trial): head.position.epoch for trial in leg.trials}
        self.lines = [line for line in self.lines if line["epoch"] <= epochs.get((line["estimator"], line["trial"]), 0)]
        whole = "".join(map(_text, self.lines))
        if self.writes and self.path.exists() and read_bytes(self.path) != whole.encode():
            write_text(self.path, whole, parents=False)

    def _check_whole(self, leg: Leg, head: Head) -> None:
        """Raise unless there are the lines up to the checkpoint, or until a trial diverged."""
        there = Counter(line["trial"] for line in self.of(leg, head.position.epoch))
        for trial in leg.trials:
            stopped = head.diverged.get(trial)
            expected = head.position.epoch if stopped is None else min(stopped.epoch, head.position.epoch)
            if there[trial] != expected:
                raise ValueError(
                    f"{self.path} does not match the checkpoint of {leg.folder}: trial {trial} has {there[trial]} "
                    f"lines, expected {expected}. Restore it from a copy, or delete {self.path.parent / leg.folder} to "
                    "train that estimator again."
                )

    def of(self, leg: Leg, until: int) -> list[Line]:
        """A leg's lines up to this epoch."""
        return [line for line in self.lines if _belongs(line, leg) and line["epoch"] <= until]


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"


def _belongs(line: Line, leg: Leg) -> bool:
    return line["estimator"] == leg.estimator and line["trial"] in leg.trials


def read_metrics(folder: Path) -> list[Line]:
    """The lines of a run folder. An unfinished last line, which is just being written or never was, does not count."""
    path = folder / METRICS
    if not path.exists():
        return []
    try:
        *texts, _ = read_bytes(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); expected JSON lines. Restore it from a copy.") from error
    lines = [_parsed(text, f"{path}, line {number},") for number, text in enumerate(texts, start=1)]
    _check_order(lines, path)
    return lines


def _check_order(lines: Iterable[Line], path: Path) -> None:
    """Raise unless the epochs of every trial follow one another: lines that are lost or twice would go unseen."""
    reached: Counter[tuple[str, int]] = Counter()
    for line in lines:
        one = line["estimator"], line["trial"]
        reached[one] += 1
        if line["epoch"] != reached[one]:
            raise ValueError(
                f"{path} is damaged: {one[0]}, trial {one[1]} continues with epoch {line['epoch']} where "
                f"{reached[one]} is expected. Restore it from a copy, or delete its lines of {one[0]} and "
                f"{path.parent / one[0]} to train that estimator again."
            )


def _parsed(text: str, where: str) -> Line:
    try:
        line = json.loads(text)
        msgspec.convert(line, LineFields)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is damaged ({error}); expected a line of metrics. Restore it from a copy, or remove that line."
        ) from error
    return dict(line)


def cosines(line: Line, what: str) -> dict[str, float]:
    """How far updates agree, whole and by parameter; empty if unknown. `what`: with_float32, float32_with_float64."""
    found = line.get("precision", {}).get(what)
    if not isinstance(found, dict) or not isinstance(found.get("parameters"), dict):
        return {}
    parts = {"whole": found.get("whole"), **found["parameters"]}
    return {k: v["cosine"] for k, v in parts.items() if isinstance(v, dict) and isinstance(v.get("cosine"), float)}
