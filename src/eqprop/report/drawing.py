"""How every figure looks, and how it becomes a file. matplotlib is loaded when something is drawn, never before."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")

# Okabe and Ito's palette, told apart by every kind of colour vision; its yellow is too light for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
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
    """The look, for as long as something is drawn or saved; a user's own settings stay as they are."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def drawn(function: Callable[P, Figure]) -> Callable[P, Figure]:
    """For functions that draw a figure: they do it in this look."""

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with styled():
            return function(*args, **kwargs)

    return inside


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, size in inches, without any window or global state; its parts make room for each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure) -> dict[str, bytes]:
    """The figure as PNG and PDF, by file ending. The PDF carries no date: equal figures are equal files."""
    # The font subsetter talks about time stamps inside fonts, which is nobody's concern here.
    logging.getLogger("fontTools.subset").setLevel(logging.ERROR)
    logging.getLogger("fontTools.ttLib").setLevel(logging.ERROR)
    out = {}
    for ending, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        with styled():
            figure.savefig(buffer, format=ending, metadata=metadata)
        out[ending] = buffer.getvalue()
    return out
