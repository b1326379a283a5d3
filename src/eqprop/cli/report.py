"""eqprop report: what came out of run folders, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eqprop.cli import app


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, or one that holds run folders.")],
    out: Annotated[Path | None, typer.Option(help="Where to write. [default: the folder itself]")] = None,
) -> None:
    """One self-contained HTML page: table, curves, GDU figures, settings.

    Beside it the table as CSV and LaTeX, and the curves as PNG and PDF.
    """
    from eqprop.report.page import write_report

    written = write_report(folder, out)
    for path in (written.page, written.csv, written.latex, written.curves):
        if path.exists():
            typer.echo(path)
