"""Why processes of prototypical nets are shaped like saw teeth: the graph, and what is measured  [saw_teeth]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eqprop.report.drawing import BLUE, GREY, ORANGE, drawn, new_figure
from eqprop.report.gdu_figures import symbol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = 4
"""Time steps of the graph that is drawn."""
SHOWN = 10
"""Time steps of the measured processes that are drawn."""


@drawn
def saw_teeth(prototypical: Mapping[str, Any], energy_based: Mapping[str, Any]) -> Figure:
    """The unfolded graph of a two-layer net, and the processes of one sample of each kind of net, from their traces."""
    figure = new_figure(10.0, 2.9)
    graph, saw, smooth = figure.subplots(1, 3, width_ratios=(1.35, 1.0, 1.0))
    _draw_graph(graph)
    _draw_processes(saw, prototypical, "every other step is zero")
    _draw_processes(smooth, energy_based, "the leak fills the gaps")
    saw.set_ylabel("root mean square over the layer,\nrelative to its largest")
    saw.legend(loc="upper right", fontsize=8)
    return figure


def _draw_graph(ax: Axes) -> None:
    """s^0 and s^1 unfolded in time; grey nodes do not reach the loss."""
    ax.set_xlim(-0.5, STEPS + 0.4)
    ax.set_ylim(-0.8, 1.6)
    ax.set_axis_off()
    for t in range(STEPS):
        for layer in (0, 1):
            counts = (STEPS - 1 - t) % 2 == layer
            _draw_node(ax, t, layer, counts)
            if t + 1 < STEPS:
                _draw_arrow(ax, (t, 1 - layer), (t + 1, layer), counts)
    _draw_arrow(ax, (STEPS - 1, 1), (STEPS, 1), True)
    ax.text(STEPS + 0.05, 1, r"$\mathcal{L}$", ha="center", va="center", fontsize=12)
    ax.set_title("P: grey nodes do not reach the loss", fontsize=9)


def _draw_node(ax: Axes, t: int, layer: int, counts: bool) -> None:
    face, edge = (BLUE if layer == 0 else ORANGE, "black") if counts else ("#eeeeee", GREY)
    ink = "#777777" if not counts else "white" if layer == 0 else "black"
    when = "T" if t == STEPS - 1 else f"T-{STEPS - 1 - t}"
    ax.scatter([t], [1 - layer], s=620, facecolor=face, edgecolor=edge, zorder=3)
    ax.text(t, 1 - layer, f"$s^{layer}_{{{when}}}$", ha="center", va="center", fontsize=8, color=ink, zorder=4)


def _draw_arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], counts: bool) -> None:
    look = {"color": "black" if counts else "#cccccc", "linewidth": 1.3 if counts else 0.8}
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "shrinkA": 13, "shrinkB": 13, **look})


def _draw_processes(ax: Axes, traces: Mapping[str, Any], remark: str) -> None:
    layers = list(traces["neurons"].items())[:2]
    for (name, trace), colour in zip(layers, (BLUE, ORANGE), strict=False):
        for key, label, line in (("rms_bptt", r"$-\nabla$", "-"), ("rms_ep", r"$\Delta$", "--")):
            values = trace[key][:SHOWN]
            largest = max(trace["rms_bptt"][:SHOWN]) or 1.0
            solid = line == "-"
            ax.plot(
                range(len(values)),
                [v / largest for v in values],
                line,
                color=colour,
                linewidth=2.6 if solid else 1.1,
                alpha=0.4 if solid else 1.0,
                marker=None if solid else "o",
                markersize=3,
                label=f"{label[:-1]}_{{{symbol(name)}}}$",
            )
    ax.set_xlabel("t")
    ax.set_ylim(-0.05, 1.1)
    ax.set_title(f"{traces['name']}: {remark}", fontsize=9)
