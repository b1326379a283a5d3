"""Charts of the page: values on a logarithmic axis, over epochs or steps on a linear one.

What is drawn there is SVG, which charts.html writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eqprop.estimators.named import label
from eqprop.report.examined import SettlingCurve
from eqprop.report.figures import percent_ticks
from eqprop.report.runs import KINDS, Point, RunFolder

STEPS = (1.0, 2.0, 5.0)


@dataclass(frozen=True)
class LogAxes:
    """Epochs or steps from 1 to `last` across, values from `low` to `high` on a logarithmic axis up, in SVG units."""

    last: int
    low: float
    high: float
    height: float = 360.0

    width = 640.0
    left = 74.0
    right = 626.0
    top = 36.0

    @property
    def foot(self) -> float:
        return self.height - 54.0

    def x(self, step: float) -> float:
        return round(self.left + (step - 1) / max(self.last - 1, 1) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        """Values beyond the axis lie at its ends."""
        share = math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return round(self.foot - share * (self.foot - self.top), 1)

    def points(self, values: Iterable[tuple[float, float]]) -> str:
        """Pairs of step and value as an SVG attribute."""
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in values)


@dataclass(frozen=True)
class ErrorCurve:
    """A curve: an estimator and a kind of error, "test" or "train"."""

    estimator: str
    kind: str
    points: list[Point]

    @property
    def key(self) -> str:
        return f"{self.estimator}-{self.kind}"

    @property
    def label(self) -> str:
        return f"{label(self.estimator)} {self.kind}"

    @property
    def means(self) -> list[tuple[int, float]]:
        return [(p.epoch, p.mean) for p in self.points]

    @property
    def band(self) -> list[tuple[int, float]]:
        """The corners of the mean plus and minus one standard deviation; none for fewer than two epochs."""
        known = [(p.epoch, p.mean, p.std) for p in self.points if p.std is not None]
        if len(known) < 2:
            return []
        return [(e, m + std) for e, m, std in known] + [(e, m - std) for e, m, std in reversed(known)]


def error_series(run: RunFolder) -> list[ErrorCurve]:
    """The curves of a run that have points, estimator by estimator."""
    found = [ErrorCurve(m, kind, run.curve(m, kind)) for m in run.spec.estimators for kind in KINDS]
    return [s for s in found if s.points]


def error_axes(curves: Sequence[ErrorCurve], epochs: int, paper: Iterable[float] = ()) -> LogAxes:
    """Fit the axes to the curves, their bands and the paper's errors; 0 lies at the lower edge, 100 is the largest."""
    values = [v for s in curves for p in s.points for v in (p.mean, p.mean + (p.std or 0.0)) if v > 0]
    values += paper
    low, high = (min(values), max(values)) if values else (0.1, 10.0)
    high = min(min(v for v in _ticks(high) if v >= 0.999999 * max(high * 1.05, low * 1.5)), 100.0)
    low = min(max(low * 0.9, high / 1000.0), high / 2.0)
    return LogAxes(epochs, max(v for v in _ticks(low) if v <= 1.000001 * low), high)


def _ticks(value: float) -> list[float]:
    """Round numbers around a value."""
    power = 10.0 ** math.floor(math.log10(value))
    return [power * step for step in (0.5, *STEPS, 10.0, 20.0)]


def epoch_ticks(epochs: int) -> list[int]:
    """About eight ticks, including the first epoch."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if epochs / s <= 8)
    return sorted({1, *range(step, epochs + 1, step)} - ({step} if step > 1 and step <= 1 + epochs * 0.04 else set()))


def error_chart(curves: Sequence[ErrorCurve], paper: Mapping[str, float]) -> dict[str, Any]:
    """What charts.html draws of error curves.

    curves  of one run
    paper   published test errors by estimator
    """
    epochs = max(p.epoch for s in curves for p in s.points)
    frame = error_axes(curves, epochs, paper.values())
    ticks = [(value, f"{value:g}") for value in percent_ticks(frame.low, frame.high)]
    hover = [
        {
            "key": s.key,
            "estimator": s.estimator,
            "label": s.label,
            "points": [{**vars(p), "x": frame.x(p.epoch), "y": frame.y(p.mean)} for p in s.points],
        }
        for s in curves
    ]
    data = {"series": hover, "top": frame.top, "bottom": frame.foot}
    return {"axes": frame, "up": ticks, "across": epoch_ticks(epochs), "curves": curves, "paper": paper, "data": data}


def settling_chart(curve: SettlingCurve) -> dict[str, Any]:
    """What charts.html draws of a state that settles: the nudged phase follows the free one."""
    free, steps = len(curve.free), [*curve.free, *curve.nudged]
    values = [v for pair in steps for v in pair if v > 0.0]
    top = math.ceil(math.log10(max(values, default=1.0)))
    foot = max(min(math.floor(math.log10(min(values, default=1e-8))), top - 1), top - 10)
    across = [1, free, *([len(steps)] if len(steps) - free > 0.12 * len(steps) else [])]
    return {
        "axes": LogAxes(len(steps), 10.0**foot, 10.0**top, height=260.0),
        "up": [(10.0**n, f"1e{n}") for n in range(foot, top + 1, max(1, math.ceil((top - foot) / 5)))],
        "across": sorted(set(across)),
        "mark": free + 0.5 if curve.nudged else None,
        "most": [(n, most) for n, (_, most) in enumerate(steps, start=1)],
        "median": [(n, median) for n, (median, _) in enumerate(steps, start=1)],
        "curve": curve,
    }
