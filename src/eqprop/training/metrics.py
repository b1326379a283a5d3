"""metrics.jsonl: one line per method, trial and epoch, rewritten whole each time, so that it is never half a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from eqprop.files import write_text
from eqprop.training.folder import METRICS

Line = dict[str, Any]
"""method, trial, seed, epoch, test_error, train_error, train_error_measured (percent), loss, residual_mean,
residual_worst, unsettled (share of samples), seconds, repeated (the epoch could only be like the one before it, and was
not trained), diverged (None, or where and why)."""

WALL_TIME = "seconds"
"""The one field of a line that differs between two runs of the same record."""


class Metrics:
    """The lines of a run folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.lines: list[Line] = read_metrics(folder)

    def append(self, lines: Iterable[Line]) -> None:
        self.lines.extend(lines)
        self._write()

    def keep(self, wanted: Callable[[Line], bool]) -> None:
        """Drop the lines that are not wanted: those written after the checkpoint a run goes on from."""
        kept = [line for line in self.lines if wanted(line)]
        if len(kept) < len(self.lines):
            self.lines = kept
            self._write()

    def _write(self) -> None:
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))


def read_metrics(folder: Path) -> list[Line]:
    path = folder / METRICS
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}, is damaged ({error}); expected JSON. Remove that line."
            ) from error
        lines.append(line)
    return lines


def free_phases(lines: Iterable[Line]) -> dict[str, list[dict[str, Any]]]:
    """How the free phases of each method and trial ended, epoch by epoch, to three digits.

    residual_mean  mean over samples of max |F(s) - s| after T steps
    unsettled      share of the samples that had not settled
    """
    told: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        if line["diverged"] is None:
            trials = told.setdefault(line["method"], {})
            trial = trials.setdefault(line["trial"], {"seed": line["seed"], "residual_mean": [], "unsettled": []})
            for name in ("residual_mean", "unsettled"):
                trial[name].append(float(f"{line[name]:.3g}"))
    return {method: [trials[n] for n in sorted(trials)] for method, trials in told.items()}
