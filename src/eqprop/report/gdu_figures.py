"""Figures of the GDU property, from gdu.json and traces.json alone  [fig:toy-model, RMSE, th-conv, RMSE:conv].

Each function takes the documents it draws as plain values and returns a figure for `eqprop.report.drawing.save`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eqprop.report.drawing import BLUE, COLOURS, ORANGE, grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = Mapping[str, Any]


def symbol(name: str) -> str:
    """s0 -> s^0, W01 -> W_{01}, Wfc01 -> W^{fc}_{01}, b0 -> b_0, without dollar signs; other names upright."""
    layer = re.fullmatch(r"([sh])(\d+)", name)
    if layer:
        return f"{layer[1]}^{{{layer[2]}}}"
    weight = re.fullmatch(r"([Wb])(fc|conv)?(\d+x?)", name)
    if weight:
        above = rf"^{{\rm {weight[2]}}}" if weight[2] else ""
        return f"{weight[1]}{above}_{{{weight[3]}}}"
    return rf"{{\rm {re.sub(r'[^0-9A-Za-z.]', ' ', name)}}}"


def processes(document: Document, traces: Document) -> Figure:
    """Processes of a few neurons and synapses of one sample: EP dashed, BPTT solid  [fig:toy-model, th-conv]."""
    columns = [("neurons", traces["neurons"]), ("synapses", traces["synapses"])]
    rows = max(len(named) for _, named in columns)
    figure, axes = grid(rows, 2, (7.2, 1.55 * rows + 0.75))
    for column, (_, named) in enumerate(columns):
        for row in range(rows):
            ax = axes[row][column]
            if row >= len(named):
                ax.set_axis_off()
                continue
            name, trace = list(named.items())[row]
            _draw_trace(ax, trace, len(trace["rms_ep"]))
            mark = symbol(name)
            ax.set_title(rf"$\Delta_{{{mark}}}^{{\rm EP}}$ and $-\nabla_{{{mark}}}^{{\rm BPTT}}$")
        axes[len(named) - 1][column].set_xlabel("t")
    _legend(figure)
    title = (
        f"{document['name']}: T = {document['T']}, K = {document['K']}, β = {document['beta']:g}, "
        f"one sample, {document['dtype']}"
    )
    figure.suptitle(title, fontsize=10, y=0.995)
    return figure


def rmse_panels(documents: Sequence[Document], settled: Document | None = None) -> Figure:
    """RMSE layer by layer of the six fully connected nets, energy-based above, prototypical below  [RMSE].

    `settled` is the document of one of them without its samples that have not settled; it is drawn into its panel.
    """
    figure, axes = grid(2, 3, (9.0, 5.4))
    for ax, document in zip([ax for row in axes for ax in row], documents, strict=False):
        beside = settled if settled is not None and settled["name"] == document["name"] else None
        _draw_bars(ax, document, beside)
    for row in axes:
        row[0].set_ylabel("RMSE")
    _bar_legend(figure, settled is not None)
    return figure


def rmse_single(document: Document) -> Figure:
    """RMSE layer by layer of one net  [RMSE:conv]."""
    figure, axes = grid(1, 1, (4.4, 3.4))
    _draw_bars(axes[0][0], document, None)
    axes[0][0].set_ylabel("RMSE")
    _bar_legend(figure, False)
    return figure


def shown_rmse(document: Document, kind: str, name: str) -> float | None:
    """The figure that stands for a group under the document's convention."""
    key = document["convention"]["synapses_shown"] if kind == "synapses" else "rmse"
    value: float | None = document[kind][name][key]
    return value


def _draw_trace(ax: Axes, trace: Document, K: int) -> None:
    t = range(K)
    marker = "." if K <= 20 else None
    for k, (ep, bptt) in enumerate(zip(trace["ep"], trace["bptt"], strict=True)):
        colour = COLOURS[k % len(COLOURS)]
        ax.plot(t, bptt, color=colour, linewidth=2.6, alpha=0.4, solid_capstyle="round")
        ax.plot(t, ep, color=colour, linewidth=1.1, linestyle=(0, (4, 2)), marker=marker, markersize=3)
    ax.ticklabel_format(style="sci", axis="y", scilimits=(-2, 2), useMathText=True)
    ax.margins(x=0.02)


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color="black", linewidth=1.1, linestyle=(0, (4, 2)), label=r"EP, $\Delta$ (dashed)"),
        Line2D([], [], color="black", linewidth=2.6, alpha=0.4, label=r"BPTT, $-\nabla$ (solid)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


def _draw_bars(ax: Axes, document: Document, settled: Document | None) -> None:
    position, ticks, labels = 0.0, [], []
    for kind, colour in (("neurons", BLUE), ("synapses", ORANGE)):
        for name in document[kind]:
            value = shown_rmse(document, kind, name)
            if settled is None:
                ax.bar(position, value or 0.0, width=0.75, color=colour)
            else:
                ax.bar(position, value or 0.0, width=0.75, color="white", edgecolor=colour, linewidth=1.2)
                ax.bar(position, shown_rmse(settled, kind, name) or 0.0, width=0.75, color=colour)
            ticks.append(position)
            labels.append(f"${symbol(name)}$")
            position += 1.0
        position += 0.6
    ax.set_yscale("log")
    ax.set_ylim(3e-4, 2.0)
    ax.set_xticks(ticks, labels)
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    ax.set_title(
        f"{document['name']}  (T = {document['T']}, K = {document['K']}, β = {document['beta']:g})", fontsize=9
    )


def _bar_legend(figure: Figure, outlined: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=BLUE, label="neurons"), Patch(color=ORANGE, label="synapses")]
    if outlined:
        handles.append(Patch(facecolor="white", edgecolor="black", label="with the samples that have not settled"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
