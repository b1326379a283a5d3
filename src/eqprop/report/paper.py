"""The 22 figures of the paper in its order, drawn from comparisons with BPTT and from stored training curves.

Training takes hours on a GPU, so the curves of Figures 17 to 22 are those of published runs, in curves.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eqprop import papers
from eqprop.report.figures import Panel, error_curves, save, write_figure
from eqprop.report.gdu import FIGURES as FOLDER
from eqprop.report.gdu import processes, read_document, read_traces, rmse_panels, rmse_single
from eqprop.report.runs import KINDS, Point
from eqprop.report.schematics import conv_net, draw_toy, layered_net, saw_teeth, theorem, toy_net, unfolded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULLY_CONNECTED = ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h")
TRAINED = ("EB-1h", "EB-2h", "P-1h", "P-2h", "P-3h", "P-conv")


class Comparison(NamedTuple):
    """What `eqprop gdu` writes for an experiment: gdu.json and traces.json."""

    document: Mapping[str, Any]
    traces: Mapping[str, Any]


Draw = Callable[[Mapping[str, Comparison]], "Figure"]


class PaperFigure(NamedTuple):
    """A figure of the paper: a name, what draws it, and the experiments whose comparisons or training it shows."""

    name: str
    draw: Draw
    needs: tuple[str, ...] = ()
    trained: str = ""


@cache
def curves() -> Mapping[str, Mapping[str, Any]]:
    """By network, the published run that its training curves are of."""
    text = resources.files("eqprop.report").joinpath("curves.json").read_text(encoding="utf-8")
    return {row["name"]: row for row in json.loads(text)}


def training_curves(name: str) -> Figure:
    """Test and train errors of EP and BPTT over the epochs, mean and one deviation of the trials."""
    row = curves()[name]
    drawn = {
        (estimator, kind): [Point(n, mean, std, row["trials"]) for n, (mean, std) in enumerate(by_kind[kind], start=1)]
        for estimator, by_kind in row["errors"].items()
        for kind in KINDS
    }
    schedule = "" if row["schedule"] == "synchronous" else f", {row['schedule']}"
    note = f"{row['trials']} trials per estimator, stored: {row['device']}, commit {row['commit'][:7]}"
    title = f"{name}, {row['preset']}{schedule}"
    return error_curves([Panel(title, drawn, papers.find(name).results, note)])


def _processes(name: str) -> PaperFigure:
    return PaperFigure(name.lower(), lambda found: processes(*found[name]), (name,))


def _training_curves(name: str) -> PaperFigure:
    return PaperFigure(f"curves-{name.lower()}", lambda found: training_curves(name), trained=name)


FIGURES = (
    PaperFigure("theorem", lambda found: theorem()),
    PaperFigure("toy-model", lambda found: processes(*found["toy"], beside=partial(draw_toy, target=True)), ("toy",)),
    PaperFigure("rmse", lambda found: rmse_panels([found[name].document for name in FULLY_CONNECTED]), FULLY_CONNECTED),
    PaperFigure("th-conv", lambda found: processes(*found["P-conv"]), ("P-conv",)),
    PaperFigure("unfolded", lambda found: unfolded()),
    PaperFigure("toy-net", lambda found: toy_net()),
    PaperFigure("layered-net", lambda found: layered_net()),
    *(_processes(name) for name in FULLY_CONNECTED),
    PaperFigure("saw-teeth", lambda found: saw_teeth(found["P-1h"].traces, found["EB-1h"].traces), ("P-1h", "EB-1h")),
    PaperFigure("conv-net", lambda found: conv_net()),
    PaperFigure("rmse-conv", lambda found: rmse_single(found["P-conv"].document), ("P-conv",)),
    *(_training_curves(name) for name in TRAINED),
)
"""Figure n is the n-th."""


def write_figures(folder: Path) -> list[Path]:
    """Draw every figure whose comparisons are in the folder, as PNG and PDF in figures/; return the PNG files."""
    names = dict.fromkeys(name for figure in FIGURES for name in figure.needs)
    found = {
        name: Comparison(document, traces)
        for name in names
        if (document := read_document(folder / name)) and (traces := read_traces(folder / name))
    }
    written = []
    for number, figure in enumerate(FIGURES, start=1):
        if set(figure.needs) <= set(found):
            path = folder / FOLDER / f"fig-{number:02d}-{figure.name}"
            write_figure(path, save(figure.draw(found)))
            written.append(path.with_name(f"{path.name}.png"))
    return written
