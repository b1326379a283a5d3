"""The command line: one library call per command, one module per group of commands."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from eqprop.messages import EXPECTED_ERRORS

COMMANDS = {
    "list": "List the experiments, or the parts that they are made of.",
    "show": "Print every setting of an experiment, as a TOML file to copy and edit.",
    "train": "Train an experiment, or your own net, in a run folder.",
    "resume": "Continue a run where it stopped, with its own settings.",
    "evaluate": "Measure the test error of every trial of a run again, from its weights.",
    "demo": "Check gradients on the toy model, train a net by EP and by BPTT, and write a page that shows both.",
    "play": "Write a page to play with: draw a digit, watch a net settle, nudge it, compare EP with BPTT.",
    "gdu": "Does EP compute the gradient of this model, and if not, why?",
    "doctor": "Why does it not learn? The first cause, the number that shows it, and the remedy.",
    "report": "Write one self-contained HTML page of a run or several.",
    "tune": "Choose T, K, beta and the learning rates, without looking at the test set.",
    "sweep": "How good must a device be? Errors and gradients over noise, bits, mismatch, drift, ...",
    "reproduce": "Reproduce the paper's figures and tables.",
}
"""Modules of this package, each with the command of its name, in the order of `eqprop --help`; what each does."""

app = typer.Typer(
    name="eqprop",
    help="Equilibrium propagation against backprop through time: check gradients, train, reproduce the paper.",
    epilog="Examples:\n\neqprop train P-1h --epochs 3\n\neqprop gdu toy",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Function = TypeVar("Function", bound=Callable[..., Any])


def command(name: str, *examples: str, of: typer.Typer = app) -> Callable[[Function], Function]:
    """Make a function a command; its docstring is the help, which ends with the examples."""
    epilog = "\n\n".join(["Examples:", *examples])
    return of.command(name, epilog=epilog)


def _version(wanted: bool) -> None:
    if wanted:
        from eqprop.provenance import __version__

        typer.echo(f"eqprop {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Equilibrium propagation against backprop through time: check gradients, train, reproduce the paper."""


def load_commands(words: Sequence[str] | None = None) -> typer.Typer:
    """The application with the command that these words name; without words, with every command.

    Only that command's module is imported; where the words name none, each command is no more than its line of help.
    """
    if words is None or (words and words[0] in COMMANDS):
        for name in COMMANDS if words is None else words[:1]:
            importlib.import_module(f"eqprop.cli.{name}")
        return app
    known = {*(c.name for c in app.registered_commands), *(g.name for g in app.registered_groups)}
    for name, text in COMMANDS.items():
        if name not in known:
            app.command(name, help=text)(lambda: None)
    return app


def main() -> None:
    """Run the command line; an expected error becomes one message on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name need not be valid text
            stream.reconfigure(errors="backslashreplace")
    try:
        load_commands(sys.argv[1:] or _completed())()
    except EXPECTED_ERRORS as error:
        typer.echo(f"eqprop: {error}", err=True)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        typer.echo(f"eqprop: Out of memory: {reason}. Use a smaller network, batch or number of trials.", err=True)
        sys.exit(2)


def _completed() -> list[str]:
    """The words so far of a command line that the shell completes."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return line.split()[1:]


def _out_of_memory(error: Exception) -> bool:
    """Torch raises a RuntimeError where Python raises a MemoryError."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text
