"""Shared by commands: options, results as tables and JSON, and exit codes after a signal."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from eqprop.cli import EXPECTED_ERRORS
from eqprop.dynamics import Dynamics
from eqprop.files import write_text
from eqprop.messages import unknown

# Training is imported where it is needed: `eqprop gdu` and `eqprop list` do without.
if TYPE_CHECKING:
    from eqprop.training import Result, Watch

ExperimentName = Annotated[str, typer.Argument(help="An experiment by name (see eqprop list), or a TOML or JSON file.")]
Preset = Annotated[str, typer.Option(help="paper, authors or tuned.")]
Init = Annotated[str | None, typer.Option(help="Initial weights: glorot or default (PyTorch's).")]
Engine = Annotated[str | None, typer.Option(help="auto, or an engine by name.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
Data = Annotated[str | None, typer.Option(help="mnist, fashion-mnist, kmnist, or a folder of IDX files.")]
Model = Annotated[
    str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Function that builds your own network from a seed.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; - for stdout, and nothing else there."),
]


def with_options(*kinds: type, left_out: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option to a command for every field of these dataclasses that has a help text.

    An option that is not given is None, and keeps the experiment's value.
    """
    made = [p for kind in kinds for p in _options_of(kind) if p.name not in left_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        both = [*own, *made]
        command.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in both} | {"return": None}
        return command

    return decorate


def _options_of(kind: type) -> Iterator[inspect.Parameter]:
    types = get_type_hints(kind)
    for f in fields(kind):
        if "help" in f.metadata:
            # The dataclass checks choices and lists the valid ones; here they are plain strings.
            bare = {k for k in (get_args(types[f.name]) or (types[f.name],)) if k in (int, float, bool)}
            annotation = (bare.pop() if bare else str) | None
            # typer would write --evaluation-t.
            flag = [f"--{f.name.replace('_', '-')}"] if f.name != f.name.lower() else []
            option = typer.Option(*flag, help=f.metadata["help"])
            yield inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
            )


def learning_rates(given: Sequence[str] | None) -> dict[str, float] | None:
    """["W01=0.04", "W12=0.08"], or ["0.05"] for every parameter."""
    from eqprop.experiments.experiment import EVERY_OTHER

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
    """["momentum=0.9", "nesterov=true"] as numbers, booleans or text."""
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
    """Load the function of --model, which builds a network from a seed."""
    return None if where is None else load_function(where)


def load_function(where: str) -> Callable[..., Any]:
    """FILE.py:FUNCTION or package.module:FUNCTION -> the function."""
    source, _, name = where.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(f"{where!r} does not name a function; expected FILE.py:FUNCTION or MODULE:FUNCTION.")
    if source.endswith(".py") and not Path(source).is_file():
        raise FileNotFoundError(f"There is no file {source}. Expected FILE.py:FUNCTION.")
    with own_code(where):
        module = _module(source)
    found = getattr(module, name, None)
    if callable(found):
        return cast("Callable[..., Any]", found)
    there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    what = (
        unknown("function", name, there) if there else f"There is no function {name!r}; no functions are defined there."
    )
    raise ValueError(f"{source}: {what}")


def _module(source: str) -> ModuleType:
    """Import a module by name or file. A file can import its neighbours, as if it were run as a script."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    # A prefix, so that a file called random.py does not replace the standard library's.
    name = f"eqprop_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


@contextmanager
def own_code(where: str) -> Iterator[None]:
    """Turn an error in the user's FILE.py:FUNCTION into one message with its line; keep eqprop's own errors."""
    path = Path(where.rpartition(":")[0])
    try:
        yield
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        if isinstance(error, EXPECTED_ERRORS) and not lines:
            raise
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = f"{path}, line {line}" if line else str(path)
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error


def watcher(quiet: bool) -> Watch:
    """Report on standard error: live on a terminal, else as lines; also to TensorBoard, if installed."""
    from eqprop.training.watch import Events, Lines, Several

    if quiet:
        return Events.if_installed()
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        from eqprop.cli.display import Display

        return Several(Display(), Events.if_installed())
    return Several(Lines(), Events.if_installed())


@contextmanager
def stopping() -> Iterator[None]:
    """Exit with the shell's code for the signal when a run is stopped."""
    from eqprop.training import Stopped

    try:
        yield
    except Stopped as stopped:
        # The run is saved; another Ctrl-C must not disturb the exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        typer.echo(f"\n{stopped}", err=True)
        raise typer.Exit(stopped.exit_code) from stopped
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        typer.echo(
            "\nInterrupted. Continue from the last checkpoint, if there is one, with: eqprop resume FOLDER", err=True
        )
        raise typer.Exit(130) from interrupt


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Cannot use device {device!r}: {reason}. Use cpu, or one this machine has.") from error


def check_out(out: Path | None) -> None:
    """Fail early if --out cannot be written."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out got {out}, which is a file; expected a folder.")
    there = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise PermissionError(f"--out got {out}, but {there} cannot be written. Choose another folder.")


def give_json(content: object, where: str | None) -> None:
    """Write JSON to a file, or to standard output for "-"."""
    text = json.dumps(content, indent=2)
    if where == "-":
        typer.echo(text)
    elif where is not None:
        write_text(Path(where), text + "\n")


def check_json(where: str | None) -> None:
    """Fail early if --json cannot be written."""
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
    """Show the result as a small table, next to the paper's."""
    from eqprop.report.runs import read_run

    table = Table(
        title=f"{summary['name']} ({summary['preset']}), engine {summary['engine']}, device {summary['device']}"
    )
    for heading in ("estimator", "test error", "train error", "paper: test", "paper: train"):
        table.add_column(heading, justify="left" if heading == "estimator" else "right")
    paper_results = read_run(folder).paper_results
    for estimator, result in summary["estimators"].items():
        paper = paper_results.get(estimator)
        table.add_row(
            estimator,
            spread(result["test_error_mean"], result["test_error_std"]),
            spread(result["train_error_mean"], None),
            spread(paper.test, paper.test_std) if paper else "--",
            spread(paper.train if paper else None, None),
        )
    console = Console()
    console.print(table)
    for estimator, result in summary["estimators"].items():
        stopped = [str(n) for n, trial in enumerate(result["trials"]) if trial["diverged"]]
        if stopped:
            console.print(f"{estimator}: diverged, not in the mean: trial {', '.join(stopped)}.")
    console.print(f"Run folder: {folder}", highlight=False, soft_wrap=True)


def spread(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "--"
    return f"{mean:.2f} %" if deviation is None else f"{mean:.2f} ± {deviation:.2f} %"


def bars() -> Bars:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar for one comparison; call the yielded function with the fraction done."""
    with bars() as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)
