"""Error curves as SVG, drawn by hand: no library, no network, sharp at every size.

The drawing is complete without a script. The data it was made from goes with it, for the hover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eqprop.report.collect import KINDS, Point, Run

WIDTH, HEIGHT = 640.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 14.0, 12.0, 54.0
STEPS = (1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Series:
    """A curve: a method and whether it is the test or the train error."""

    method: str
    kind: str
    points: list[Point]

    @property
    def key(self) -> str:
        return f"{self.method}-{self.kind}"

    @property
    def label(self) -> str:
        return f"{self.method.upper()} {self.kind}"


@dataclass(frozen=True)
class Axes:
    """Epochs on a linear axis, errors on a logarithmic one: train errors fall far below test errors."""

    epochs: int
    low: float
    high: float

    def x(self, epoch: float) -> float:
        span = max(self.epochs - 1, 1)
        return LEFT + (epoch - 1) / span * (WIDTH - LEFT - RIGHT)

    def y(self, error: float) -> float:
        clamped = min(max(error, self.low), self.high)
        share = math.log(clamped / self.low) / math.log(self.high / self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten within the axis."""
        powers = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        values = [step * 10.0**power for power in powers for step in STEPS]
        return [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]


def series(run: Run) -> list[Series]:
    found = [Series(m, kind, run.curve(m, kind)) for m in run.settings.methods for kind in KINDS]
    return [s for s in found if s.points]


def axes(curves: Sequence[Series], epochs: int) -> Axes:
    """Around the curves and their bands; an error of 0 lies at the lower edge."""
    values = [v for s in curves for p in s.points for v in (p.mean, p.mean + (p.std or 0.0)) if v > 0]
    low, high = (min(values), max(values)) if values else (0.1, 10.0)
    low, high = max(low, high / 1000.0), max(high, low * 4.0)
    return Axes(epochs, _round(low * 0.9, math.floor), _round(high * 1.05, math.ceil))


def _round(value: float, direction: object) -> float:
    """To a tick, down or up."""
    power = 10.0 ** math.floor(math.log10(value))
    ladder = [power * step for step in (*STEPS, 10.0)]
    if direction is math.floor:
        return max(v for v in ladder if v <= value * 1.000001)
    return min(v for v in ladder if v >= value * 0.999999)


def draw(curves: Sequence[Series], epochs: int, name: str) -> str:
    """The SVG of one figure."""
    frame = axes(curves, epochs)
    inside = [_grid(frame), *(_band(s, frame) for s in curves), *(_line(s, frame) for s in curves)]
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" tabindex="0" '
        f'aria-label="{escape(name)}: errors over epochs">' + "".join(inside) + '<g class="marker"></g></svg>'
    )


def _grid(frame: Axes) -> str:
    parts = []
    for value in frame.ticks():
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8:g}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>')
    for epoch in _epoch_ticks(frame.epochs):
        x = frame.x(epoch)
        foot = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{foot:g}" y2="{foot + 5:g}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{foot + 23:g}" text-anchor="middle">{epoch}</text>')
    foot, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{foot:g}" y2="{foot:g}"/>')
    centre = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" x="{centre:g}" y="{HEIGHT - 6:g}" text-anchor="middle">epoch</text>')
    parts.append(
        f'<text class="name" transform="translate(17 {middle:g}) rotate(-90)" text-anchor="middle">error, %</text>'
    )
    return "".join(parts)


def _epoch_ticks(epochs: int) -> list[int]:
    """About eight, the first epoch among them."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if epochs / s <= 8)
    return sorted({1, *range(step, epochs + 1, step)} - ({step} if step > 1 and step <= 1 + epochs * 0.04 else set()))


def _line(s: Series, frame: Axes) -> str:
    path = " ".join(f"{'L' if n else 'M'}{frame.x(p.epoch):.1f} {frame.y(p.mean):.1f}" for n, p in enumerate(s.points))
    dot = s.points[-1]
    return (
        f'<g class="curve {s.method} {s.kind}" data-series="{s.key}"><path d="{path}"/>'
        f'<circle cx="{frame.x(dot.epoch):.1f}" cy="{frame.y(dot.mean):.1f}" r="3"/></g>'
    )


def _band(s: Series, frame: Axes) -> str:
    """Mean plus/minus one standard deviation."""
    points = [p for p in s.points if p.std is not None]
    if len(points) < 2:
        return ""
    over = [f"{frame.x(p.epoch):.1f},{frame.y(p.mean + (p.std or 0.0)):.1f}" for p in points]
    under = [f"{frame.x(p.epoch):.1f},{frame.y(p.mean - (p.std or 0.0)):.1f}" for p in reversed(points)]
    corners = " ".join([*over, *under])
    return f'<polygon class="band {s.method} {s.kind}" data-series="{s.key}" points="{corners}"/>'


def hover_data(curves: Sequence[Series], epochs: int) -> dict[str, object]:
    """What the script needs: where each epoch is drawn, and the values there."""
    frame = axes(curves, epochs)
    return {
        "series": [
            {
                "key": s.key,
                "label": s.label,
                "points": [
                    {
                        "epoch": p.epoch,
                        "mean": p.mean,
                        "std": p.std,
                        "trials": p.trials,
                        "x": round(frame.x(p.epoch), 1),
                        "y": round(frame.y(p.mean), 1),
                    }
                    for p in s.points
                ],
            }
            for s in curves
        ],
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
    }
