"""eqprop report: one page from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eqprop.cli import command


@command("report", "eqprop report runs/p1h", "eqprop report runs/* --out page")
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="A run folder, a folder of them, or several side by side.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Output folder. [default: the same folder, or the one that several lie in]")
    ] = None,
    cosine: Annotated[
        bool, typer.Option("--cosine", metavar="", help="Compare the gradient of a mini-batch with BPTT's.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Only what the logs say: do not look at the nets again.")
    ] = False,
) -> None:
    """Write one self-contained HTML page: errors, curves, worst answers, settling, the doctor's verdict, settings.

    Several runs are compared: their errors and every setting in which they differ. Also writes the table as CSV and
    LaTeX, and the curves as PNG and PDF.
    """
    from eqprop.report.page import write_report

    written = write_report(folders, out, examine=not quick, gradients=cosine)
    for reason in written.left_out:
        typer.echo(f"eqprop: left out: {reason}", err=True)
    for path in (written.page, written.csv, written.latex, written.curves):
        if path.exists():
            typer.echo(path)
