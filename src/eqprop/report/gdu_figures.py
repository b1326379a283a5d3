"""Figures of the GDU property, from gdu.json and traces.json alone  [fig:toy-model, RMSE, th-conv, RMSE:conv].

Each function takes the documents it draws as plain values and returns a figure for `eqprop.report.drawing.save`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eqprop.report.drawing import BLUE, COLOURS, ORANGE, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = Mapping[str, Any]
LOWEST = 3e-4
"""Where the axis of an RMSE begins."""


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


@drawn
def processes(document: Document, traces: Document) -> Figure:
    """Processes of a few neurons and synapses of one sample: EP dashed, BPTT solid  [fig:toy-model, th-conv]."""
    columns = [traces["neurons"], traces["synapses"]]
    rows = max(len(named) for named in columns)
    figure = new_figure(7.2, 1.5 * rows + 0.9)
    for part, named in zip(figure.subfigures(1, 2, squeeze=False)[0], columns, strict=True):
        panels = part.subplots(len(named), 1, squeeze=False)[:, 0]
        for ax, (name, trace) in zip(panels, named.items(), strict=True):
            _draw_trace(ax, trace, len(trace["rms_ep"]))
            mark = symbol(name)
            ax.set_title(rf"$\Delta_{{{mark}}}^{{\rm EP}}$,  $-\nabla_{{{mark}}}^{{\rm BPTT}}$", fontsize=9)
        panels[-1].set_xlabel("t")
    _legend(figure)
    figure.suptitle(_heading(document) + ", one sample", fontsize=10)
    return figure


@drawn
def rmse_panels(documents: Sequence[Document]) -> Figure:
    """RMSE layer by layer of the six fully connected nets, energy-based above, prototypical below  [RMSE].

    Where samples have not settled, the bars are those of the others, and an outline shows all of them.
    """
    figure = new_figure(9.6, 5.6)
    panels = figure.subplots(2, 3, sharey=True)
    for ax, document in zip(panels.flat, documents, strict=True):
        _draw_bars(ax, document)
        ax.set_title(_heading(document), fontsize=9)
    for ax in panels[:, 0]:
        ax.set_ylabel("RMSE")
    _bar_legend(figure, any(document["settled"] for document in documents))
    return figure


@drawn
def rmse_single(document: Document) -> Figure:
    """RMSE layer by layer of one net  [RMSE:conv]."""
    figure = new_figure(max(3.6, 0.62 * (len(document["neurons"]) + len(document["synapses"]))), 3.3)
    ax = figure.subplots()
    _draw_bars(ax, document)
    ax.set_ylabel("RMSE")
    ax.set_title(_heading(document), fontsize=9)
    _bar_legend(figure, bool(document["settled"]))
    return figure


def _heading(document: Document) -> str:
    return f"{document['name']}: T = {document['T']}, K = {document['K']}, β = {document['beta']:g}"


def shown_rmse(document: Document, kind: str, name: str, settled: bool = False) -> float | None:
    """The figure that stands for a group under the document's convention, of all samples or of the settled ones."""
    key = document["convention"]["synapses_shown"] if kind == "synapses" else "rmse"
    value: float | None = (document["settled"] if settled else document)[kind][name][key]
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


def _draw_bars(ax: Axes, document: Document) -> None:
    position, ticks, labels = 0.0, [], []
    for kind, colour in (("neurons", BLUE), ("synapses", ORANGE)):
        for name in document[kind]:
            value = shown_rmse(document, kind, name) or 0.0
            if document["settled"]:
                ax.bar(position, value, width=0.78, facecolor="none", edgecolor=colour, linewidth=1.0)
                value = shown_rmse(document, kind, name, settled=True) or 0.0
            ax.bar(position, value, width=0.78, color=colour)
            ink = "white" if kind == "neurons" else "black"
            ax.annotate(
                f"{value:.2g}",
                (position, LOWEST),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
                color=ink if value > 1.5 * LOWEST else "black",
            )
            ticks.append(position)
            labels.append(f"${symbol(name)}$")
            position += 1.0
        position += 0.6
    ax.set_yscale("log")
    ax.set_ylim(LOWEST, 2.0)
    ax.set_xticks(ticks, labels)
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")


def _bar_legend(figure: Figure, outlined: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=BLUE, label="neurons"), Patch(color=ORANGE, label="synapses")]
    if outlined:
        handles.append(Patch(facecolor="white", edgecolor="black", label="with the samples that have not settled"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
