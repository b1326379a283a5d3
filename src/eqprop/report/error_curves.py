"""Errors over epochs as figures for a paper: every method, mean and deviation over trials  [subsec-train]."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from eqprop.experiments.record import Reported
from eqprop.report.collect import KINDS, Point, Run
from eqprop.report.drawing import COLOURS, GREY, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES: dict[str, Literal["-", "--"]] = {"test": "-", "train": "--"}
TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Percent, on a logarithmic axis."""
WIDTH, HEIGHT = 3.4, 2.5


@dataclass(frozen=True)
class Panel:
    """The curves of one network under one preset: by method and kind of error ("test", "train")."""

    title: str
    curves: Mapping[tuple[str, str], Sequence[Point]]
    reported: Mapping[str, Reported]


def panel_of(run: Run) -> Panel:
    curves = {(m, kind): run.curve(m, kind) for m in run.settings.methods for kind in KINDS}
    return Panel(run.title, {key: points for key, points in curves.items() if points}, run.reported)


@drawn
def error_curves(panels: Sequence[Panel], columns: int = 3) -> Figure:
    """A panel a network: test errors as lines with a band of one deviation, train errors dashed, the paper's dotted."""
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = new_figure(WIDTH * columns, HEIGHT * lines + 0.3)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    methods = list(dict.fromkeys(method for panel in panels for method, _ in panel.curves))
    colours = dict(zip(methods, COLOURS, strict=False))
    for ax, panel in zip(axes, panels, strict=False):
        _draw(ax, panel, colours)
    for ax in list(figure.axes)[len(panels) :]:
        ax.set_axis_off()
    _legend(figure, colours, any(panel.reported for panel in panels))
    return figure


def _draw(ax: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    for (method, kind), points in panel.curves.items():
        epochs, means = [p.epoch for p in points], [p.mean for p in points]
        ax.plot(epochs, means, STYLES[kind], color=colours[method], linewidth=1.2 if kind == "test" else 0.9)
        if kind == "test" and all(p.std is not None for p in points):
            below, above = ([p.mean + sign * (p.std or 0.0) for p in points] for sign in (-1, 1))
            ax.fill_between(epochs, below, above, color=colours[method], alpha=0.2, linewidth=0)
    for method, paper in panel.reported.items():
        if method in colours:
            ax.axhline(paper.test, linestyle=":", color=colours[method], linewidth=0.9)
    low, high = _limits(panel)
    ax.set(title=panel.title, xlabel="epoch", ylabel="error, %", yscale="log", ylim=(low, high))
    ticks = [t for t in TICKS if low <= t <= high]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()


def _limits(panel: Panel) -> tuple[float, float]:
    """Around the means; what is 0, or lies far below the rest, is cut off."""
    values = [p.mean for points in panel.curves.values() for p in points if p.mean > 0]
    values += [paper.test for paper in panel.reported.values()]
    high = max(values, default=10.0) * 1.2
    return max(min(values, default=0.1) * 0.8, high / 2000.0), high


def _legend(figure: Figure, colours: Mapping[str, str], with_paper: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=method.upper()) for method, colour in colours.items()]
    handles += [Line2D([], [], color=GREY, linestyle=STYLES[kind], label=f"{kind} error") for kind in STYLES]
    if with_paper:
        handles.append(Line2D([], [], color=GREY, linestyle=":", label="the paper's test error"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
