"""Style and files of every figure; error curves, and the curves behind a tuning recipe's decisions.

matplotlib is only loaded when something is drawn.
"""

from __future__ import annotations

import io
import logging
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from eqprop.estimators.named import label
from eqprop.files import write_bytes, write_json, write_text
from eqprop.report.runs import KINDS, Point, RunFolder
from eqprop.run.published import PaperResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

# Okabe and Ito's palette, safe for colour blindness; without its yellow, which is too light for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
MANY = (*COLOURS, "#000000", GREY)
MARKS = ("", "o", "s", "^", "D", "v")
"""Of curves beyond the number of colours, which share theirs."""
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "mathtext.fontset": "dejavusans",
}


def styled() -> AbstractContextManager[None]:
    """Apply the style while drawing or saving, without changing the user's settings."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def drawn(function: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: draw a figure in this style."""

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with styled():
            return function(*args, **kwargs)

    return inside


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, size in inches, with a constrained layout and no window or global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def as_text(name: str) -> str:
    """A name as matplotlib must get it to draw it as it is: a pair of dollar signs would begin mathematics."""
    return name.replace("$", r"\$")


def wrapped(name: str, inches: float, size: float, most_lines: int = 3) -> str:
    """A name broken into lines no wider than this at this font size; what is left over ends in an ellipsis."""
    share = min(inches / max(_inches(name, size), 1e-9), 1.0)
    characters = len(name) if share == 1.0 else math.ceil(1.3 * share * len(name)) + 1
    while characters > 4:
        lines = textwrap.wrap(name, characters, max_lines=most_lines, placeholder="…")
        if all(_inches(line, size) <= inches for line in lines):
            return as_text("\n".join(lines))
        characters -= 1 + characters // 16
    return as_text(name[:4])


def _inches(line: str, size: float) -> float:
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), as_text(line), size=size).get_extents().width) / 72.0


def fit_legend(figure: Figure, handles: Sequence[Any], size: float = 8.0) -> None:
    """A legend below the figure, in as many columns as fit its width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=size)
        if columns == 1 or legend.get_window_extent(renderer).width <= 0.96 * figure.bbox.width:
            return
        legend.remove()


def save(figure: Figure) -> dict[str, bytes]:
    """The figure as PNG and PDF, by extension. The PDF has no date, so equal figures give equal files."""
    # The font subsetter logs irrelevant messages about time stamps in fonts.
    logging.getLogger("fontTools.subset").setLevel(logging.ERROR)
    logging.getLogger("fontTools.ttLib").setLevel(logging.ERROR)
    out = {}
    for ending, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        with styled():
            figure.savefig(buffer, format=ending, metadata=metadata)
        out[ending] = buffer.getvalue()
    return out


STYLES: dict[str, Literal["-", "--"]] = {"test": "-", "train": "--"}
BAND = {"test": 0.2, "train": 0.1}
"""How dense the band of one deviation is."""
LADDERS = ((1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0))
"""Ticks of a logarithmic axis within a power of ten; the second where the first gives fewer than three."""
WIDTH, HEIGHT = 3.4, 2.5
ALONE = 4.8
"""Width of a panel without others, which a legend fits."""
MARGIN = 0.9
"""Inches of a panel's width that its axes leave to labels."""


@dataclass(frozen=True)
class Panel:
    """The curves of one network and preset, by estimator and kind of error ("test", "train")."""

    title: str
    curves: Mapping[tuple[str, str], Sequence[Point]]
    paper_results: Mapping[str, PaperResult]
    note: str = ""


def panel_of(run: RunFolder) -> Panel:
    curves = {(m, kind): run.curve(m, kind) for m in run.spec.estimators for kind in KINDS}
    note = "; ".join([f"{run.model} on {run.data}", *run.changes])
    return Panel(run.title, {key: points for key, points in curves.items() if points}, run.paper_results, note)


@drawn
def error_curves(panels: Sequence[Panel], columns: int = 3) -> Figure:
    """One panel per network: test errors, train errors dashed, bands of one deviation, the paper's dotted."""
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    width = ALONE if columns == 1 else WIDTH
    figure = new_figure(width * columns, HEIGHT * lines + 0.3)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    estimators = list(dict.fromkeys(estimator for panel in panels for estimator, _ in panel.curves))
    looks = {e: (MANY[n % len(MANY)], MARKS[n // len(MANY) % len(MARKS)]) for n, e in enumerate(estimators)}
    for ax, panel in zip(axes, panels, strict=False):
        _draw(ax, panel, looks, width - MARGIN)
    for ax in list(figure.axes)[len(panels) :]:
        ax.set_axis_off()
    _legend(figure, looks, any(panel.paper_results for panel in panels))
    return figure


def _draw(ax: Axes, panel: Panel, looks: Mapping[str, tuple[str, str]], inches: float) -> None:
    """One panel: lines of means, bands of one deviation, the paper's error dotted, a note under the axis."""
    from matplotlib.ticker import MaxNLocator

    for (estimator, kind), points in panel.curves.items():
        epochs, means = [p.epoch for p in points], [p.mean for p in points]
        colour, mark = looks[estimator]
        mark = mark or ("." if len(points) == 1 else "")
        width = 1.2 if kind == "test" else 0.9
        ax.plot(epochs, means, STYLES[kind], marker=mark, markersize=3, color=colour, linewidth=width)
        if all(p.std is not None for p in points):
            below, above = ([p.mean + sign * (p.std or 0.0) for p in points] for sign in (-1, 1))
            ax.fill_between(epochs, below, above, color=colour, alpha=BAND[kind], linewidth=0)
    for estimator, paper in panel.paper_results.items():
        if estimator in looks:
            ax.axhline(paper.test, linestyle=":", color=looks[estimator][0], linewidth=0.9)
    low, high = _limits(panel)
    ax.set(title=wrapped(panel.title, inches, 10.0), xlabel="epoch", ylabel="error, %", yscale="log", ylim=(low, high))
    if panel.note:
        ax.set_xlabel("epoch\n" + wrapped(panel.note, inches, 7.0, 8), fontsize=7)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ticks = percent_ticks(low, high)
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()


def _limits(panel: Panel) -> tuple[float, float]:
    """Axis limits around the means; zeros and values far below the rest are cut off."""
    values = [p.mean for points in panel.curves.values() for p in points if p.mean > 0]
    values += [paper.test for paper in panel.paper_results.values()]
    high = min(max(values, default=10.0) * 1.2, 100.0)
    return max(min(min(values, default=0.1) * 0.8, 0.8 * high), high / 2000.0), high


def percent_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the limits, on a logarithmic axis."""
    found: list[float] = []
    for ladder in LADDERS:
        values = [step * 10.0**power for power in range(-5, 3) for step in ladder]
        found = [v for v in values if low * 0.999 <= v <= high * 1.001]
        if len(found) >= 3:
            break
    return found


def _legend(figure: Figure, looks: Mapping[str, tuple[str, str]], with_paper: bool) -> None:
    """One legend for all panels: estimators by colour, kinds of error by line."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=mark, markersize=3, label=label(estimator))
        for estimator, (colour, mark) in looks.items()
    ]
    handles += [Line2D([], [], color=GREY, linestyle=STYLES[kind], label=f"{kind} error") for kind in STYLES]
    if with_paper:
        handles.append(Line2D([], [], color=GREY, linestyle=":", label="the paper's test error"))
    fit_legend(figure, handles)


def write_figure(path: Path, files: dict[str, bytes]) -> None:
    """path.png and path.pdf."""
    for ending, content in files.items():
        write_bytes(path.with_name(f"{path.name}.{ending}"), content)


DOCUMENT, EXPERIMENT, FIGURE = "tune.json", "tuned.toml", "decisions"
LOOK_STYLES = ("-", "--")
"""For initial and for trained weights."""


def write_tuned(folder: Path, document: Mapping[str, Any], experiment_text: str) -> None:
    """Write the figure and the experiment first, tune.json last: if it exists, so does the rest."""
    write_figure(folder / FIGURE, save(decisions(document)))
    write_text(folder / EXPERIMENT, experiment_text)
    write_json(folder / DOCUMENT, document)


@drawn
def decisions(document: Mapping[str, Any]) -> Figure:
    """Six panels: residuals, gradient sizes, signs, rates, T and K."""
    figure = new_figure(11.0, 8.4)
    axes = figure.subplots(2, 3)
    experiment = document["experiment"]
    phases = experiment["phases"]
    _residuals(axes[0][0], document["looks"], _first(document, "T"))
    _sizes(axes[0][1], document["looks"], _first(document, "K"))
    _signs(axes[0][2], document["looks"], phases["beta"])
    _rates(axes[1][0], [t for t in document["trainings"] if t["stage"].startswith("rates")], experiment)
    shrunk = [t for t in document["trainings"] if not t["stage"].startswith("rates")]
    _steps(axes[1][1], shrunk, "T", phases["T"])
    _steps(axes[1][2], shrunk, "K", phases["K"])
    figure.suptitle(wrapped(f"{document['name']}: the curves behind T, K, beta and the learning rates", 10.0, 11.0))
    return figure


def _first(document: Mapping[str, Any], name: str) -> int:
    """T or K as decided from the curves, before short trainings reduced it."""
    values = [t[name] for t in document["trainings"] if not t["stage"].startswith("rates")]
    return max([*values, document["experiment"]["phases"][name]])


def _residuals(ax: Axes, looks: Sequence[Mapping[str, Any]], T: int) -> None:
    """How far a step still moves the state, for the median sample, nine tenths of them and the worst."""
    for look, style in zip(looks, LOOK_STYLES, strict=False):
        for kind, colour in zip(("median", "most", "worst"), COLOURS, strict=False):
            label = {"median": "median", "most": "nine tenths", "worst": "worst"}[kind]
            ax.plot(_positive(look["residuals"][kind]), style, color=colour, label=f"{label}, {look['weights']}")
    _marked(ax, T, f"T {T} at first")
    ax.set(yscale="log", xlabel="step t", ylabel="|F(s) - s|", title="Residual of the free phase")
    ax.set_xlim(0, min(4 * T, max(len(look["residuals"]["median"]) for look in looks)))
    _below(ax)


def _sizes(ax: Axes, looks: Sequence[Mapping[str, Any]], K: int) -> None:
    """How large each weight's gradient is at each step of the second phase, as a share of its largest."""
    for look, style in zip(looks, LOOK_STYLES, strict=False):
        for (name, norms), colour in zip(look["sizes"]["norms"].items(), COLOURS * 3, strict=False):
            peak = max(norms) or 1.0
            # In a prototypical net, every other step of a weight is zero, which a logarithmic axis cannot show.
            alive = [(t, norm / peak) for t, norm in enumerate(norms) if norm > 0.0]
            ax.plot(*zip(*alive, strict=True), style, color=colour, label=f"{as_text(name)}, {look['weights']}")
    _marked(ax, K, f"K {K} at first")
    ax.set(yscale="log", xlabel="t", ylabel="share of the largest", title=r"$|\nabla_W(t)|$, exact")
    ax.set_ylim(bottom=1e-3)
    _below(ax)


def _signs(ax: Axes, looks: Sequence[Mapping[str, Any]], beta: float) -> None:
    """The share of synapses whose update has the exact gradient's sign, over beta."""
    for look, style in zip(looks, LOOK_STYLES, strict=False):
        found = look["agreement"]
        for (name, signs), colour in zip(found["sign"].items(), COLOURS * 3, strict=False):
            ax.plot(
                found["betas"],
                [100 * s for s in signs],
                f"o{style}",
                ms=3,
                color=colour,
                label=f"{as_text(name)}, {look['weights']}",
            )
    _marked(ax, beta, f"beta {beta:g}")
    ax.set(xscale="log", xlabel="beta", ylabel="%", title="Synapses with the exact gradient's sign")
    _below(ax)


def _rates(ax: Axes, trainings: Sequence[Mapping[str, Any]], experiment: Mapping[str, Any]) -> None:
    """Errors of the short trainings over the largest learning rate."""
    points = sorted((max(t["rates"].values()), t["train"], t["held_out"]) for t in trainings)
    chosen = experiment["optimizer"]["rates"]
    _marked(ax, max(chosen.values()), ", ".join(f"{as_text(name)} {rate:g}" for name, rate in chosen.items()))
    ax.set(xscale="log", xlabel="largest learning rate", title="Short trainings: learning rates")
    tried = [p[0] for p in points]
    ax.set_xticks(tried, [f"{rate:g}" for rate in tried])
    ax.set_xticks([], minor=True)
    _errors(ax, points)


def _steps(ax: Axes, trainings: Sequence[Mapping[str, Any]], name: str, chosen: int) -> None:
    """The lowest error at each T or K, over the values of the other."""
    from matplotlib.ticker import MaxNLocator

    best: dict[int, Mapping[str, Any]] = {}
    for training in trainings:
        there = best.get(training[name])
        if there is None or training["train"] < there["train"]:
            best[training[name]] = training
    _marked(ax, chosen, f"{name} {chosen}")
    ax.set(xlabel=name, title=f"Short trainings: {name} smaller")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _errors(ax, sorted((steps, t["train"], t["held_out"]) for steps, t in best.items()))


def _errors(ax: Axes, points: Sequence[tuple[float, float, float]]) -> None:
    """Running training error and held-out error over what was varied."""
    across = [p[0] for p in points]
    ax.plot(across, [p[1] for p in points], "o-", ms=4, color=COLOURS[0], label="training, running")
    ax.plot(across, [p[2] for p in points], "s--", ms=4, color=COLOURS[1], label="held out")
    ax.set_ylabel("error, %")
    _below(ax)


def _below(ax: Axes) -> None:
    """The legend under the axis, where it hides no curve; long names are shortened."""
    handles, labels = ax.get_legend_handles_labels()
    short = [wrapped(label.replace(r"\$", "$"), 1.25, 6.0, 1) for label in labels]
    box: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
    ax.legend(handles, short, fontsize=6, ncols=2, handlelength=1.5, columnspacing=1.0, **box)


def _marked(ax: Axes, x: float, label: str) -> None:
    ax.axvline(x, color=GREY, linewidth=1.2, label=label)


def _positive(values: Sequence[float]) -> list[float]:
    return [value if value > 0.0 else float("nan") for value in values]
