"""Figures of the GDU property, and the folder of a comparison: gdu.json, traces.json, figures/.

Figures are drawn from these documents only  [fig:toy-model, RMSE, th-conv, RMSE:conv].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eqprop.files import read_bytes, write_json
from eqprop.gdu import Report
from eqprop.provenance import provenance
from eqprop.report.figures import (
    BLUE,
    COLOURS,
    MARGIN,
    ORANGE,
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
def processes(document: Document, traces: Document, beside: Callable[[Axes], None] | None = None) -> Figure:
    """Processes of a few neurons and synapses for one sample: EP dashed, BPTT solid  [fig:toy-model, th-conv].

    beside  draws a panel on the right, such as the net
    """
    columns = [traces["neurons"], traces["synapses"]]
    rows = max(len(named) for named in columns)
    figure = new_figure(7.2 + 3.0 * bool(beside), 1.5 * rows + 0.9)
    parts = list(figure.subfigures(1, 2 + bool(beside), squeeze=False)[0])
    if beside:
        beside(parts.pop().subplots())
    for part, named in zip(parts, columns, strict=True):
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
    """The elements of a group: BPTT broad and pale, EP thin and dashed on top."""
    t = range(K)
    marker = "." if K <= 20 else None
    for k, (ep, bptt) in enumerate(zip(trace["ep"], trace["bptt"], strict=True)):
        colour = COLOURS[k % len(COLOURS)]
        ax.plot(t, bptt, color=colour, linewidth=2.6, alpha=0.4, solid_capstyle="round")
        ax.plot(t, ep, color=colour, linewidth=1.1, linestyle=(0, (4, 2)), marker=marker, markersize=3)
    ax.ticklabel_format(style="sci", axis="y", scilimits=(-2, 2), useMathText=True)
    ax.margins(x=0.02)


def _legend(figure: Figure) -> None:
    """What dashed and solid lines are."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color="black", linewidth=1.1, linestyle=(0, (4, 2)), label=r"EP, $\Delta$ (dashed)"),
        Line2D([], [], color="black", linewidth=2.6, alpha=0.4, label=r"BPTT, $-\nabla$ (solid)"),
    ]
    fit_legend(figure, handles, 9.0)


def _draw_bars(ax: Axes, document: Document) -> None:
    """A bar per layer and per weight on a logarithmic axis, its value written at its foot."""
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
                "–" if shown is None else f"{shown:.2g}".replace("0.", ".", 1),
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
    """What the bars' colours are, and the outline of all samples where some have not settled."""
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
    write_json(folder / TRACES, _short({"name": document["name"], **traces}))
    write_json(folder / DOCUMENT, document)


def write_comparison(report: Report, folder: Path) -> Path:
    """Write what `eqprop.gdu.compare` returned, under the name of the folder."""
    name = folder.resolve().name
    head = {"name": name, "preset": "own", "batch": report.samples + report.residual.dropped}
    document = {**head, **report.to_dict(), "format": FORMAT, "provenance": provenance()}
    write_folder(folder, document, report.traces_to_dict())
    return folder


def read_document(folder: Path) -> dict[str, Any] | None:
    """The document of a folder; None if it is missing or unreadable."""
    return _read(folder / DOCUMENT)


def read_traces(folder: Path) -> dict[str, Any] | None:
    return _read(folder / TRACES)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON document that is a table; None otherwise."""
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
