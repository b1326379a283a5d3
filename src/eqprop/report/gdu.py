"""Figures of the GDU property, and the folder of a comparison: gdu.json, traces.json, figures/.

Figures are drawn from these documents only  [fig:toy-model, RMSE, th-conv, RMSE:conv, saw_teeth].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eqprop.files import read_bytes, write_json
from eqprop.gdu import Report
from eqprop.provenance import provenance
from eqprop.report.figures import (
    BLUE,
    COLOURS,
    GREY,
    MARGIN,
    ORANGE,
    as_text,
    drawn,
    fit_legend,
    new_figure,
    save,
    wrapped,
    write_figure,
)
from eqprop.run.laboratory import FORMAT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = Mapping[str, Any]
LOWEST = 3e-4
"""Lower end of the RMSE axis."""


def symbol(name: str) -> str:
    """s0 -> s^0, W01 -> W_{01}, Wfc01 -> W^{fc}_{01}, b0 -> b_0, without dollar signs; other names upright."""
    stem = name.rstrip("0123456789x")
    letter, kind, number = stem[:1], stem[1:], name[len(stem) :]
    if letter in ("s", "h") and not kind and number.isdigit():
        return f"{letter}^{{{number}}}"
    if letter in ("W", "b") and kind in ("", "fc", "conv") and number.rstrip("x").isdigit():
        above = rf"^{{\rm {kind}}}" if kind else ""
        return f"{letter}{above}_{{{number}}}"
    upright = "".join(c if c.isascii() and (c.isalnum() or c == ".") else " " for c in name)
    return rf"{{\rm {upright}}}"


@drawn
def processes(document: Document, traces: Document) -> Figure:
    """Processes of a few neurons and synapses for one sample: EP dashed, BPTT solid  [fig:toy-model, th-conv]."""
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
    figure.suptitle(_heading(document, 6.8, 10.0, ", one sample"), fontsize=10)
    return figure


@drawn
def rmse_panels(documents: Sequence[Document]) -> Figure:
    """RMSE per layer of the six fully connected nets, energy-based above, prototypical below  [RMSE].

    If some samples have not settled, bars show the settled samples and outlines show all of them.
    """
    figure = new_figure(9.6, 5.6)
    panels = figure.subplots(2, 3, sharey=True)
    for ax, document in zip(panels.flat, documents, strict=True):
        _draw_bars(ax, document)
        ax.set_title(_heading(document, 2.6), fontsize=9)
    for ax in panels[:, 0]:
        ax.set_ylabel("RMSE")
    _bar_legend(figure, any(document["settled"] for document in documents))
    return figure


@drawn
def rmse_single(document: Document) -> Figure:
    """RMSE per layer of one net  [RMSE:conv]."""
    figure = new_figure(max(3.6, 0.62 * (len(document["neurons"]) + len(document["synapses"]))), 3.3)
    ax = figure.subplots()
    _draw_bars(ax, document)
    ax.set_ylabel("RMSE")
    ax.set_title(_heading(document, figure.get_figwidth() - MARGIN), fontsize=9)
    _bar_legend(figure, bool(document["settled"]))
    return figure


def _heading(document: Document, inches: float, size: float = 9.0, more: str = "") -> str:
    settings = f"T = {document['T']}, K = {document['K']}, β = {document['beta']:g}"
    return wrapped(f"{document['name']}: {settings}{more}", inches, size)


def shown_rmse(document: Document, kind: str, name: str, settled: bool = False) -> float | None:
    """The RMSE shown for a group under the document's convention, over all samples or the settled ones."""
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
    fit_legend(figure, handles, 9.0)


def _draw_bars(ax: Axes, document: Document) -> None:
    position, ticks, labels = 0.0, [], []
    for kind, colour in (("neurons", BLUE), ("synapses", ORANGE)):
        for name in document[kind]:
            shown = shown_rmse(document, kind, name)
            if document["settled"]:
                ax.bar(position, shown or 0.0, width=0.78, facecolor="none", edgecolor=colour, linewidth=1.0)
                shown = shown_rmse(document, kind, name, settled=True)
            value = shown or 0.0
            ax.bar(position, value, width=0.78, color=colour)
            ink = "white" if kind == "neurons" else "black"
            ax.annotate(
                "–" if shown is None else f"{shown:.2g}",
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
        handles.append(Patch(facecolor="white", edgecolor="black", label="including unsettled samples"))
    fit_legend(figure, handles, 9.0)


DOCUMENT, TRACES, FIGURES = "gdu.json", "traces.json", "figures"


def write_folder(folder: Path, document: dict[str, Any], traces: dict[str, Any]) -> None:
    """Draw first, then write; gdu.json comes last: if it exists, so does the rest."""
    drawn = {"processes": save(processes(document, traces)), "rmse": save(rmse_single(document))}
    for name, files in drawn.items():
        write_figure(folder / FIGURES / name, files)
    write_json(folder / TRACES, _short(traces))
    write_json(folder / DOCUMENT, document)


def write_comparison(report: Report, folder: Path) -> Path:
    """Write what `eqprop.gdu.compare` returned, under the name of the folder."""
    name = folder.resolve().name
    head = {"name": name, "preset": "own", "batch": report.samples + report.residual.dropped}
    document = {**head, **report.to_dict(), "format": FORMAT, "provenance": provenance()}
    write_folder(folder, document, {"name": name, **report.traces_to_dict()})
    return folder


def read_document(folder: Path) -> dict[str, Any] | None:
    """The document of a folder; None if it is missing or unreadable."""
    return _read(folder / DOCUMENT)


def read_traces(folder: Path) -> dict[str, Any] | None:
    return _read(folder / TRACES)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _short(value: Any) -> Any:
    """Round numbers to four digits, more than a figure shows."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(v) for key, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list | tuple) else value


STEPS = 4
"""Time steps drawn in the graph."""
SHOWN = 10
"""Time steps drawn of the measured processes."""


@drawn
def saw_teeth(prototypical: Mapping[str, Any], energy_based: Mapping[str, Any]) -> Figure:
    """The unfolded graph of a two-layer net, and one sample's processes for each kind of net, from their traces."""
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
    ax.set_title(f"{as_text(traces['name'])}: {remark}", fontsize=9)


PROCESSES = {
    "toy-model": "toy",
    "th-conv": "P-conv",
    **{name.lower(): name for name in ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h")},
}
PANELS = ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h")


def write_gallery(folder: Path) -> list[Path]:
    """Draw every figure whose data exists to folder/figures/*.png and *.pdf; return the PNG files."""
    documents = {name: d for name in PROCESSES.values() if (d := read_document(folder / name))}
    traces = {name: t for name in documents if (t := read_traces(folder / name))}
    drawn = {figure: processes(documents[name], traces[name]) for figure, name in PROCESSES.items() if name in traces}
    if all(name in documents for name in PANELS):
        drawn["rmse"] = rmse_panels([documents[name] for name in PANELS])
    if "P-conv" in documents:
        drawn["rmse-conv"] = rmse_single(documents["P-conv"])
    if "P-1h" in traces and "EB-1h" in traces:
        drawn["saw-teeth"] = saw_teeth(traces["P-1h"], traces["EB-1h"])
    for name, figure in drawn.items():
        write_figure(folder / FIGURES / name, save(figure))
    return [folder / FIGURES / f"{name}.png" for name in drawn]
