"""What several commands share: options and their values, results as tables and JSON, ending after a signal."""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eqprop.dynamics import Dynamics
from eqprop.experiments.experiment import EVERY_OTHER
from eqprop.experiments.paper import PRINTED
from eqprop.files import write_text
from eqprop.training import Result, Stopped, Watch
from eqprop.training.plan import read_plan
from eqprop.training.watch import Events, Lines, Several

RecordName = Annotated[str, typer.Argument(help="A record by name (see eqprop list), or a TOML or JSON file.")]
Preset = Annotated[str, typer.Option(help="paper, authors or tuned.")]
Init = Annotated[str | None, typer.Option(help="Initial weights: glorot or default (PyTorch's).")]
Engine = Annotated[str | None, typer.Option(help="auto, or an engine by name.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Threads = Annotated[int | None, typer.Option(help="Threads of the CPU.")]
Data = Annotated[str | None, typer.Option(help="mnist, fashion-mnist, kmnist, or a folder of IDX files.")]
Model = Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Builds your own network from a seed.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while it runs.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="The result as JSON; - alone on stdout.")]


def learning_rates(given: Sequence[str] | None) -> dict[str, float] | None:
    """["W01=0.04", "W12=0.08"], or ["0.05"] for every parameter."""
    if not given:
        return None
    rates = {}
    for text in given:
        name, separator, value = text.rpartition("=")
        try:
            rates[name if separator else EVERY_OTHER] = float(value)
        except ValueError:
            raise ValueError(f"--lr got {text!r}; expected NAME=RATE, such as W01=0.04, or one rate for all.") from None
    return rates


def named_values(given: Sequence[str] | None) -> dict[str, Any] | None:
    """["momentum=0.9", "nesterov=true"] as plain values."""
    if not given:
        return None
    out = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--optimizer-option got {text!r}; expected NAME=VALUE, such as momentum=0.9.")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = value
    return out


def factory(where: str | None) -> Callable[[int], Dynamics] | None:
    """FILE.py:FUNCTION or package.module:FUNCTION -> the function, which builds a network from a seed."""
    if where is None:
        return None
    source, _, name = where.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(f"--model got {where!r}; expected FILE.py:FUNCTION or MODULE:FUNCTION.")
    found = getattr(_module(source), name, None)
    if not callable(found):
        raise ValueError(f"--model: {source} has no function {name!r}.")
    return found


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"--model: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def watcher(quiet: bool) -> Watch:
    """A live display on a terminal, plain lines elsewhere, on standard error; TensorBoard events where installed."""
    if quiet:
        return Events.if_installed()
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        from eqprop.cli.display import Display

        return Several(Display(), Events.if_installed())
    return Several(Lines(), Events.if_installed())


@contextmanager
def stopping() -> Iterator[None]:
    """A run that was stopped ends the command with the shell's code for the signal."""
    try:
        yield
    except Stopped as stopped:
        # It is saved; more of the same key must not disturb the way out.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        typer.echo(f"\n{stopped}", err=True)
        raise typer.Exit(stopped.exit_code) from stopped
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        typer.echo("\nInterrupted. The last checkpoint, if there was one, is whole: eqprop resume FOLDER.", err=True)
        raise typer.Exit(130) from interrupt


def give_json(content: object, where: str | None) -> None:
    """To a file, or alone on standard output with "-"."""
    text = json.dumps(content, indent=2)
    if where == "-":
        typer.echo(text)
    elif where is not None:
        write_text(Path(where), text + "\n")


def check_json(where: str | None) -> None:
    """A file that cannot be written is said before the work, not after it."""
    if where is None or where == "-":
        return
    path = Path(where)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ValueError(f"--json got {where!r}; expected a file in a folder that exists, or - for standard output.")


def give_result(result: Result, as_json: str | None, quiet: bool) -> None:
    give_json(result.summary, as_json)
    if as_json != "-" and not quiet:
        show_result(result.summary, result.folder)


def show_result(summary: Mapping[str, Any], folder: Path) -> None:
    """The result as a small table, with what the paper reports beside it."""
    table = Table(title=f"{summary['name']} ({summary['preset']}), {summary['engine']} on {summary['device']}")
    for heading in ("method", "test error", "train error", "paper: test", "paper: train"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    data = read_plan(folder)[2]["data"].get("set") or "mnist"
    printed = PRINTED.get(summary["name"]) if data == "mnist" else None
    for method, result in summary["methods"].items():
        reported = None if printed is None else printed.reported.get(method)
        table.add_row(
            " ".join(filter(None, (method, result.get("estimator")))),
            spread(result["test_error_mean"], result["test_error_std"]),
            spread(result["train_error_mean"], None),
            spread(reported.test, reported.test_std) if reported else "--",
            spread(reported.train if reported else None, None),
        )
    console = Console()
    console.print(table)
    for method, result in summary["methods"].items():
        stopped = [str(n) for n, trial in enumerate(result["trials"]) if trial["diverged"]]
        if stopped:
            console.print(f"{method}: trial {', '.join(stopped)} diverged and is not in the mean.")
    console.print(f"Run folder: {folder}", highlight=False, soft_wrap=True)


def spread(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "--"
    return f"{mean:.2f} %" if deviation is None else f"{mean:.2f} ± {deviation:.2f} %"
