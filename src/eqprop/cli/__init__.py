"""The command line: one library call a command, one module a group of commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eqprop.provenance import __version__

app = typer.Typer(
    name="eqprop",
    help="Equilibrium propagation against backprop through time: check gradients, train, reproduce the paper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eqprop {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Equilibrium propagation against backprop through time: check gradients, train, reproduce the paper."""


EXPECTED_ERRORS = (ValueError, TypeError, OSError, ArithmeticError, ImportError)
"""What bad input, a bad file or a diverging state raises; anything else is a defect and keeps its traceback."""


def load_commands() -> typer.Typer:
    """The application with every command: each module registers its own. Late, so that --version stays quick."""
    # `eqprop --help` names the commands in this order.
    from eqprop.cli import list, train, resume, evaluate, demo, gdu, report, tune, reproduce  # noqa: F401, I001

    return app


def main() -> None:
    """Run the command line; a foreseen error becomes one message on standard error and exit code 2."""
    try:
        load_commands()()
    except EXPECTED_ERRORS as error:
        typer.echo(f"eqprop: {error}", err=True)
        sys.exit(2)
