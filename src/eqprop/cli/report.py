"""eqprop report: one page from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eqprop.cli import command


@command("report", "eqprop report runs/p1h", "eqprop report runs --out page")
def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of run folders.")],
    out: Annotated[Path | None, typer.Option(help="Output folder. [default: the same folder]")] = None,
) -> None:
    """Write one self-contained HTML page: table, curves, GDU figures, settings.

    Also writes the table as CSV and LaTeX, and the curves as PNG and PDF.
    """
    from eqprop.report.page import write_report

    written = write_report(folder, out)
    for reason in written.left_out:
        typer.echo(f"eqprop: left out: {reason}", err=True)
    for path in (written.page, written.csv, written.latex, written.curves):
        if path.exists():
            typer.echo(path)
