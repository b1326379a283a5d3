"""eqprop play: a page that shows the theorem on nets to play with."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from eqprop.cli import command


@command("play", "eqprop play --open", "eqprop play --out page.html")
def play(
    out: Annotated[Path, typer.Option(help="The file to write, or a folder for play.html.")] = Path("play.html"),
    open_it: Annotated[bool, typer.Option("--open", metavar="", help="Open it in a browser.")] = False,
) -> None:
    """Write a page to play with: draw a digit, watch a net settle, nudge it, compare EP with BPTT.

    One HTML file that works offline, on a phone too.
    """
    from eqprop.report.play import write_play

    page = write_play(out).resolve()
    typer.echo(page)
    if not open_it:
        typer.echo(f"Open it in any browser: {page.as_uri()}")
    elif not webbrowser.open(page.as_uri()):
        raise OSError(f"No browser could be started here. Open the page yourself: {page.as_uri()}")
