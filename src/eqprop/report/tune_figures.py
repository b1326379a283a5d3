"""The curves a recipe was decided from, as one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eqprop.files import write_json, write_text
from eqprop.report.drawing import COLOURS, GREY, drawn, new_figure, save
from eqprop.report.gdu_folder import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCUMENT, RECORD, FIGURE = "tune.json", "tuned.toml", "decisions"
STYLES = ("-", "--")
"""At the initial weights, at trained ones."""


def write_tuned(folder: Path, document: Mapping[str, Any], record_text: str) -> None:
    """The figure and the record first; tune.json last, so that where it is, the rest is too."""
    write_figure(folder / FIGURE, save(decisions(document)))
    write_text(folder / RECORD, record_text)
    write_json(folder / DOCUMENT, document)


@drawn
def decisions(document: Mapping[str, Any]) -> Figure:
    """Six panels: residuals, gradient sizes, signs, rates, T and K."""
    figure = new_figure(11.0, 6.4)
    axes = figure.subplots(2, 3)
    record = document["record"]
    _residuals(axes[0][0], document["looks"], _first(document, "T"))
    _sizes(axes[0][1], document["looks"], _first(document, "K"))
    _signs(axes[0][2], document["looks"], record["beta"])
    _rates(axes[1][0], [t for t in document["trainings"] if t["stage"].startswith("rates")], record)
    shrunk = [t for t in document["trainings"] if not t["stage"].startswith("rates")]
    _steps(axes[1][1], shrunk, "T", record["T"])
    _steps(axes[1][2], shrunk, "K", record["K"])
    figure.suptitle(f"{document['name']}: what T, K, beta and the learning rates were decided from")
    return figure


def _first(document: Mapping[str, Any], name: str) -> int:
    """T or K as decided from the curves, before the trainings made it smaller."""
    values = [t[name] for t in document["trainings"] if not t["stage"].startswith("rates")]
    return max([*values, document["record"][name]])


def _residuals(ax: Axes, looks: Sequence[Mapping[str, Any]], T: int) -> None:
    for look, style in zip(looks, STYLES, strict=False):
        for kind, colour in zip(("median", "most", "worst"), COLOURS, strict=False):
            label = {"median": "median", "most": "nine tenths", "worst": "worst"}[kind]
            ax.plot(_positive(look["residuals"][kind]), style, color=colour, label=f"{label}, {look['weights']}")
    _marked(ax, T, f"T {T} at first")
    ax.set(yscale="log", xlabel="step t", ylabel="|F(s) - s|", title="Residual of the free phase")
    ax.set_xlim(0, min(4 * T, max(len(look["residuals"]["median"]) for look in looks)))
    ax.legend(fontsize=6)


def _sizes(ax: Axes, looks: Sequence[Mapping[str, Any]], K: int) -> None:
    for look, style in zip(looks, STYLES, strict=False):
        for (name, norms), colour in zip(look["sizes"]["norms"].items(), COLOURS * 3, strict=False):
            peak = max(norms) or 1.0
            # In a prototypical net every other step is zero for a weight; on a logarithmic axis it has no place.
            alive = [(t, norm / peak) for t, norm in enumerate(norms) if norm > 0.0]
            ax.plot(*zip(*alive, strict=True), style, color=colour, label=f"{name}, {look['weights']}")
    _marked(ax, K, f"K {K} at first")
    ax.set(yscale="log", xlabel="t", ylabel="share of the largest", title=r"$|\nabla_W(t)|$, exact")
    ax.set_ylim(bottom=1e-3)
    ax.legend(fontsize=6)


def _signs(ax: Axes, looks: Sequence[Mapping[str, Any]], beta: float) -> None:
    for look, style in zip(looks, STYLES, strict=False):
        found = look["agreement"]
        for (name, signs), colour in zip(found["sign"].items(), COLOURS * 3, strict=False):
            ax.plot(
                found["betas"],
                [100 * s for s in signs],
                f"o{style}",
                ms=3,
                color=colour,
                label=f"{name}, {look['weights']}",
            )
    _marked(ax, beta, f"beta {beta:g}")
    ax.set(xscale="log", xlabel="beta", ylabel="%", title="Synapses with the sign of the exact gradient")
    ax.legend(fontsize=6)


def _rates(ax: Axes, trainings: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> None:
    points = sorted((max(t["rates"].values()), t["train"], t["held_out"]) for t in trainings)
    chosen = record["learning_rates"]
    _marked(ax, max(chosen.values()), ", ".join(f"{name} {rate:g}" for name, rate in chosen.items()))
    ax.set(xscale="log", xlabel="largest learning rate", title="Short trainings: learning rates")
    tried = [p[0] for p in points]
    ax.set_xticks(tried, [f"{rate:g}" for rate in tried])
    ax.set_xticks([], minor=True)
    _errors(ax, points)


def _steps(ax: Axes, trainings: Sequence[Mapping[str, Any]], name: str, chosen: int) -> None:
    """The lowest error at each T or K, the other being what it was at the time."""
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
    across = [p[0] for p in points]
    ax.plot(across, [p[1] for p in points], "o-", ms=4, color=COLOURS[0], label="training, running")
    ax.plot(across, [p[2] for p in points], "s--", ms=4, color=COLOURS[1], label="held out")
    ax.set_ylabel("error, %")
    ax.legend(fontsize=6)


def _marked(ax: Axes, x: float, label: str) -> None:
    ax.axvline(x, color=GREY, linewidth=1.2, label=label)


def _positive(values: Sequence[float]) -> list[float]:
    return [value if value > 0.0 else float("nan") for value in values]
