"""eqprop report: one page from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eqprop.cli import command
from eqprop.cli.options import factory, with_settings
from eqprop.run.own import own_code


@command("report", "eqprop report runs/* --out page", "eqprop report runs/mine --model my.py:build")
@with_settings("function")
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="A run folder, a folder of them, or several side by side.")
    ],
    settings: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="Output folder. \\[default: the run folder, or the folder that holds the runs]")
    ] = None,
    cosine: Annotated[
        bool, typer.Option("--cosine", metavar="", help="Compare the gradient of a mini-batch with BPTT's.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", metavar="", help="Use the logs alone: load no weights.")] = False,
) -> None:
    """Write one self-contained HTML page: errors, curves, worst answers, settling, the doctor's verdict, settings.

    Several runs are compared: their errors and every setting in which they differ. Also writes the table as CSV and
    LaTeX, and the curves as PNG and PDF. A run folder names no code to run, so a net of your own needs --model again.
    """
    from eqprop.report.page import write_report

    with own_code(settings.get("function")):
        written = write_report(folders, out, examine=not quick, gradients=cosine, model=factory(settings))
    for reason in written.left_out:
        typer.echo(f"eqprop: left out: {reason}", err=True)
    for path in (written.page, written.csv, written.latex, written.curves):
        if path.exists():
            typer.echo(path)
