"""The picture of a sweep: error after training and cosine of the gradient, over the imperfections of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from eqprop.report.figures import BLUE, drawn, new_figure, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORDS = {
    "state_noise": "noise of neurons per step",
    "read_noise": "noise of readings",
    "state_bits": "bits of neurons",
    "read_bits": "bits of readings",
    "weight_bits": "bits of weights",
    "weight_limit": "limit of weights",
    "mismatch": "mismatch of weights",
    "drift": "drift of weights per write",
    "missing": "share of weights missing",
    "asymmetry": "asymmetry of updates",
}


def cosines_of(point: Mapping[str, Any]) -> list[float]:
    """Of the whole gradient, per trial that has one."""
    return [c["all"] for c in point["cosines"] if "all" in c]


def errors_of(point: Mapping[str, Any]) -> list[float]:
    """In percent, per trial that did not diverge."""
    return [e for e in point["errors"] if e is not None]


PANELS = (("test error, %", errors_of), ("cosine with the exact gradient", cosines_of))


@drawn
def sweep_figure(document: Mapping[str, Any]) -> Figure:
    """Curves over one axis, with a band of one deviation; a table of colours over two."""
    axes = document["axes"]
    figure = new_figure(8.4, 3.2 if len(axes) == 1 else 3.6)
    for ax, (title, values) in zip(figure.subplots(1, 2), PANELS, strict=True):
        found = [values(point) for point in document["points"]]
        if len(axes) == 1:
            _curve(ax, axes, found)
        else:
            _table(ax, axes, found, better_low=values is errors_of)
        ax.set_title(title)
    trials = max(len(point["errors"]) for point in document["points"])
    seeds = f"{trials} seeds each" if trials > 1 else "one seed"
    figure.suptitle(wrapped(f"{document['name']} on imperfect devices, {seeds}", 8.0, 11.0))
    return figure


def _labels(values: Sequence[float | None]) -> list[str]:
    return ["none" if v is None else f"{v:g}" for v in values]


def _curve(ax: Axes, axes: Mapping[str, Sequence[float | None]], found: Sequence[Sequence[float]]) -> None:
    """Means over one axis, with a band of one deviation over seeds."""
    ((name, values),) = axes.items()
    there = [k for k, f in enumerate(found) if f]
    means = [fmean(found[k]) for k in there]
    spread = [stdev(found[k]) if len(found[k]) > 1 else 0.0 for k in there]
    ax.plot(there, means, "o-", color=BLUE, markersize=4)
    low, high = ([m + sign * s for m, s in zip(means, spread, strict=True)] for sign in (-1, 1))
    ax.fill_between(there, low, high, color=BLUE, alpha=0.2, linewidth=0)
    ax.set_xticks(range(len(values)), _labels(values))
    ax.set_xlabel(WORDS.get(name, name))


def _table(
    ax: Axes, axes: Mapping[str, Sequence[float | None]], found: Sequence[Sequence[float]], better_low: bool
) -> None:
    """Means over two axes as a table of colours, better ones light, with each number written in its cell."""
    (down, rows), (across, columns) = axes.items()
    means = [fmean(f) if f else float("nan") for f in found]
    grid = [means[k * len(columns) : (k + 1) * len(columns)] for k in range(len(rows))]
    image = ax.imshow(grid, cmap="viridis_r" if better_low else "viridis", aspect="auto")
    low, high = image.get_clim()
    for i, row in enumerate(grid):
        for j, mean in enumerate(row):
            text = "–" if mean != mean else f"{mean:.1f}" if better_low else f"{mean:.2f}"
            share = (mean - low) / (high - low) if high > low else 0.0  # the upper half of the scale is light
            dark = mean == mean and (share > 0.6 if better_low else share < 0.4)
            ax.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    ax.set_xticks(range(len(columns)), _labels(columns))
    ax.set_yticks(range(len(rows)), _labels(rows))
    ax.set_xlabel(WORDS.get(across, across))
    ax.set_ylabel(WORDS.get(down, down))
    ax.grid(False)
