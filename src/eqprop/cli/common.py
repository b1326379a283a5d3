"""Shared by commands: what they take besides settings, results as tables and JSON, exit codes after a signal."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from eqprop.messages import EXPECTED_ERRORS, command

# Training is imported where it is needed: `eqprop gdu` and `eqprop list` do without.
if TYPE_CHECKING:
    from eqprop.report.runs import Row
    from eqprop.run import Result, Watch

Experiment = Annotated[
    str, typer.Argument(help="An experiment by name (see eqprop list), a TOML or JSON file, or FILE.py:FUNCTION.")
]
Examined = Annotated[
    str, typer.Argument(help="An experiment by name, a TOML or JSON file, FILE.py:FUNCTION, or a run folder.")
]
OfRun = Annotated[str | None, typer.Option(hidden=True, help="Of a run folder: whose weights; its first by default.")]
Trial = Annotated[int | None, typer.Option(hidden=True, min=0, help="Of a run folder: which trial; 0 by default.")]
Preset = Annotated[str | None, typer.Option(help="paper, authors, tuned, ... (see eqprop list --all).")]
Folder = Annotated[Path, typer.Argument(help="The run folder.")]
Logger = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", hidden=True, help="A logger by name (see eqprop list --parts); repeatable."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", hidden=True, help="Do not show progress.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        hidden=True,
        help="Write the result as JSON; - writes it to standard output, and nothing else.",
    ),
]


def watcher(quiet: bool, loggers: Sequence[str] | None = None) -> Watch:
    """Report on standard error: live on a terminal, else as lines; also to TensorBoard, if installed.

    Loggers from outside, by name, hear every event as well.
    """
    from eqprop.run.watch import Events, Lines, Several, named_watch

    asked = dict.fromkeys(loggers or ())
    events = named_watch("tensorboard") if "tensorboard" in asked else Events.if_installed()
    shown = None if quiet else _shown()
    there = {"tensorboard", *(["lines"] if isinstance(shown, Lines) else [])}
    more = [named_watch(name) for name in asked if name not in there]
    return Several(*([] if shown is None else [shown]), events, *more)


def _shown() -> Watch:
    """What reports progress on standard error."""
    from eqprop.run.distributed import world_size
    from eqprop.run.watch import Lines

    if world_size() > 1:
        # Several processes cannot share a live display.
        return Lines()
    console = new_console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        from eqprop.cli.display import Display

        return Display()
    return Lines()


@contextmanager
def stopping() -> Iterator[None]:
    """Exit with the shell's code for the signal when a run is stopped."""
    from eqprop.run import Stopped
    from eqprop.run.distributed import rank, world_size

    try:
        yield
    except EXPECTED_ERRORS:
        if world_size() > 1:
            # torchrun sends SIGTERM when the first rank ends. It must not cut off the others' sentence and exit code.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    except Stopped as stopped:
        # The run is saved; another Ctrl-C must not disturb the exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if rank() == 0:
            _say_last(f"\n{stopped}")
        raise typer.Exit(stopped.exit_code) from stopped
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say_last("\nInterrupted. Continue from the last checkpoint, if there is one, with: eqprop resume FOLDER")
        raise typer.Exit(130) from interrupt


def _say_last(text: str) -> None:
    """Write to standard error. After SIGHUP the terminal may be gone; the exit code must not depend on it."""
    try:
        typer.echo(text, err=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)


def one_process(command: str) -> None:
    """Raise if torchrun started several processes for a command that uses one."""
    from eqprop.run.distributed import world_size

    if world_size() > 1:
        raise ValueError(
            f"{command} runs in one process, and torchrun started {world_size()}. Start it without torchrun; train, "
            "resume, reproduce table1 and tune --search divide their work among processes."
        )


def check_out(out: Path | None) -> None:
    """Fail early if --out cannot be written."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out got {out}, which is a file; expected a folder.")
    there = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise PermissionError(f"--out got {out}, but {there} cannot be written. Choose another folder.")


def check_json(where: str | None) -> None:
    """Fail early if --json cannot be written."""
    if where is None or where == "-":
        return
    path = Path(where)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise PermissionError(
            f"--json got {where!r}, which cannot be written; expected a file in a folder that exists, both writable, "
            "or - for standard output."
        )


def give_json(content: object, where: str | None) -> None:
    """Write JSON to a file, or to standard output for "-"."""
    if where is None:
        return
    text = json.dumps(content, indent=2)
    if where == "-":
        typer.echo(text)
    else:
        Path(where).write_text(text + "\n", encoding="utf-8")


def give_result(result: Result, as_json: str | None, quiet: bool) -> None:
    """Show and write the result, in one process of several."""
    from eqprop.run.distributed import rank

    first = rank() == 0
    if first:
        give_json(result.summary, as_json)
    if as_json != "-" and not quiet and first:
        show_result(result.summary, result.folder)
    found = result.summary["estimators"]
    lost = [name for name in found if all(trial["diverged"] for trial in found[name]["trials"])]
    if lost:
        if first:
            where = result.folder / "metrics.jsonl"
            typer.echo(f"eqprop: every trial of {', '.join(lost)} diverged; {where} says where and why.", err=True)
        raise typer.Exit(1)


def show_result(summary: Mapping[str, Any], folder: Path) -> None:
    """Show the result next to the paper's, and what a reader of it should know."""
    from eqprop.report.runs import read_run, rows
    from eqprop.run.own import OwnNet

    run, console = read_run(folder), new_console()
    console.print(results_table(rows([run])))
    for estimator, result in summary["estimators"].items():
        if (top5 := result.get("test_error_top5_mean")) is not None:
            console.print(f"{estimator}: top-5 error {top5:.2f} %.")
        for n, trial in enumerate(result["trials"]):
            said = [f"{estimator}, seed {trial['seed']}"]
            said += [f"diverged, not in the mean: trial {n}"] if trial["diverged"] else []
            work = ", ".join(f"{count:,} {name}" for name, count in trial.get("work", {}).items())
            said += [f"work of the machine: {work}"] if work else []
            said += [away] if (away := not_at_rest(trial.get("settling", {}).get("layers", {}))) else []
            if len(said) > 1:
                console.print(f"{', '.join(said)}.", soft_wrap=True)
    console.print(f"Run folder: {folder}, engine {summary['engine']}, device {summary['device']}", soft_wrap=True)
    own = run.spec.model
    again = ("--model", own.function) if isinstance(own, OwnNet) and ":" in own.function else ()
    console.print(f"Next, write its page: {command('report', folder, *again)}", soft_wrap=True)


def results_table(found: Sequence[Row]) -> Table:
    """Our results, next to the paper's where it has any, within 80 columns."""
    from eqprop.estimators.named import label

    data = ", ".join(dict.fromkeys(row.run.data for row in found))
    runs = {id(row.run): row.run for row in found}.values()
    notes = [f"{run.title}: {'; '.join([run.model, *run.changes])}" for run in runs]
    table = Table(
        title=f"Test error on {data}, % (running train error)",
        caption=escape("\n".join(notes)),
        caption_justify="left",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    beside = any(row.paper_result for row in found)
    for heading in ("network", "estimator", "ours", "epochs", *(("paper", "reproduced") if beside else ())):
        words = heading in ("network", "estimator")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "network")
    for row in found:
        ours = "--" if row.test is None else spread(row.test.mean, row.test.std)[:-2]
        paper = "--" if row.paper_result is None else str(row.paper_result)
        table.add_row(
            row.run.title,
            label(row.estimator),
            ours + ("" if row.train is None else f" ({row.train.mean:.2f})"),
            f"{row.test.epoch if row.test else 0}/{row.run.spec.optimizer.epochs}",
            *((paper, row.verdict if row.verdict in ("yes", "no") else "--") if beside else ()),
        )
    return table


def not_at_rest(layers: Mapping[str, Mapping[str, float]]) -> str:
    """The layers that one more step would still move, with the share of samples and how far they move."""
    away = [
        f"{n} in {100 * a['unsettled']:.0f} % of samples, by up to {a['max']:.1e}"
        for n, a in layers.items()
        if a["unsettled"]
    ]
    return f"one more step after the free phase would move {'; '.join(away)}" if away else ""


def new_console(**options: Any) -> Console:
    """A console that prints text as it is: a name such as [/b] or :x: is not markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def spread(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "--"
    return f"{mean:.2f} %" if deviation is None else f"{mean:.2f} ± {deviation:.2f} %"


def bars() -> Bars:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=new_console(stderr=True), transient=True)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar for one comparison; call the yielded function with the fraction done."""
    with bars() as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)
