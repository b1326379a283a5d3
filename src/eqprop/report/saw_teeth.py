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
    from matplotlib.patches import Circle, FancyArrowPatch

    ax.set_xlim(-0.75, STEPS + 0.95)
    ax.set_ylim(-0.65, 1.6)
    ax.set_aspect("equal", adjustable="datalim")
    ax.set_axis_off()
    for t in range(STEPS):
        for layer in (0, 1):
            ends_in_loss = (STEPS - 1 - t) % 2 == layer
            face, edge = (BLUE if layer == 0 else ORANGE, "black") if ends_in_loss else ("#eeeeee", GREY)
            ax.add_patch(Circle((t, 1 - layer), 0.24, facecolor=face, edgecolor=edge, zorder=3))
            back = STEPS - 1 - t
            when = "T" if back == 0 else f"T-{back}"
            ink = "white" if ends_in_loss and layer == 0 else "black" if ends_in_loss else "#777777"
            ax.text(t, 1 - layer, f"$s^{layer}_{{{when}}}$", ha="center", va="center", fontsize=8, color=ink, zorder=4)
            if t + 1 < STEPS:
                arrow = FancyArrowPatch(
                    (t, 1 - layer),
                    (t + 1, layer),
                    arrowstyle="-|>",
                    mutation_scale=9,
                    shrinkA=14,
                    shrinkB=14,
                    color="black" if ends_in_loss else "#cccccc",
                    linewidth=1.3 if ends_in_loss else 0.8,
                )
                ax.add_patch(arrow)
    loss = FancyArrowPatch(
        (STEPS - 1, 1), (STEPS + 0.35, 1), arrowstyle="-|>", mutation_scale=9, shrinkA=14, shrinkB=6, color="black"
    )
    ax.add_patch(loss)
    ax.text(STEPS + 0.45, 1, r"$\mathcal{L}$", ha="center", va="center", fontsize=12)
    ax.set_title("P: grey nodes do not reach the loss,\ntheir gradient is zero", fontsize=9)


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
