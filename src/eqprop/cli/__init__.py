"""The command line: one library call per command, one module per group of commands."""

from __future__ import annotations

import copy
import importlib
import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from eqprop.messages import EXPECTED_ERRORS
from eqprop.provenance import __version__


def shown(parameters: list[Any]) -> list[Any]:
    """Copies of parameters as their help shows them.

    A switch takes no value, its opposite stands in its help text (a column for it would cut long names), and
    [default: ...] is text, not markup. Where options stand in groups, --help stands in the last.
    """
    parameters = [copy.copy(parameter) for parameter in parameters]
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) or parameter.name == "help":
            parameter.metavar = ""
        text = getattr(parameter, "help", None) or ""
        if parameter.secondary_opts:
            text, parameter.secondary_opts = f"{text} Or {parameter.secondary_opts[0]}.", []
        if text:
            parameter.help = text.replace("[", r"\[")
    groups = [group for p in parameters if (group := getattr(p, "rich_help_panel", None))]
    if groups and parameters[-1].name == "help":
        parameters[-1].rich_help_panel = groups[-1]
    return parameters


class Helping:
    """A command whose help is shown by `shown`; parsing reads the parameters as they are."""

    helping = False

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        return shown(parameters) if self.helping else parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.helping = True
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            self.helping = False


class Command(Helping, TyperCommand):
    """A command of eqprop."""


class CommandGroup(Helping, TyperGroup):
    """eqprop itself, or a command with commands of its own."""


class App(typer.Typer):
    """An application of such commands."""

    def command(self, *names: Any, **options: Any) -> Any:
        return super().command(*names, **{"cls": Command, **options})


app = App(
    name="eqprop",
    cls=CommandGroup,
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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Equilibrium propagation against backprop through time: check gradients, train, reproduce the paper."""


COMMANDS = ("list", "train", "resume", "evaluate", "demo", "play", "gdu", "doctor", "report", "tune", "reproduce")
"""Modules of this package, each with the command of its name, in the order of `eqprop --help`."""


def load_commands(words: Sequence[str] = ()) -> typer.Typer:
    """The application with the command that these words name, or with every command if they name none.

    Only that command's module is imported, so that `eqprop --version` and `eqprop gdu` start quickly.
    """
    wanted = words[0] if words and words[0] in COMMANDS else None
    for name in COMMANDS if wanted is None else (wanted,):
        importlib.import_module(f"eqprop.cli.{name}")
    return app


def main() -> None:
    """Run the command line; an expected error becomes one message on standard error and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name need not be valid text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        load_commands(sys.argv[1:])()
    except EXPECTED_ERRORS as error:
        typer.echo(f"eqprop: {error}", err=True)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        typer.echo(f"eqprop: Out of memory: {reason}. Use a smaller network, batch or number of trials.", err=True)
        sys.exit(2)


def _out_of_memory(error: Exception) -> bool:
    """Torch raises a RuntimeError where Python raises a MemoryError."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text
