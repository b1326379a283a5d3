"""eqprop tune."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from eqprop.cli import app
from eqprop.cli.options import (
    Data,
    Device,
    Engine,
    Init,
    Json,
    Model,
    Preset,
    Quiet,
    RecordName,
    Threads,
    check_json,
    factory,
    give_json,
)
from eqprop.data import Images
from eqprop.experiments.plain import find_record, to_plain
from eqprop.experiments.record import Record
from eqprop.experiments.toml_text import to_toml
from eqprop.training import Stopped
from eqprop.training.folder import locked
from eqprop.training.plan import describe, read_images
from eqprop.training.settings import Settings
from eqprop.tuning.folder import prepare_folder
from eqprop.tuning.trainings import Machine


@dataclass(frozen=True)
class Wish:
    """What the options say, whichever way the values are found."""

    record: Record
    folder: Path
    machine: Machine
    budget: float
    model: str | None
    data: str | None
    quiet: bool
    as_json: str | None

    def images(self) -> Images:
        return read_images(self.data, Settings(device=self.machine.device))


@app.command("tune")
def tune_record(
    record: RecordName,
    preset: Preset = "paper",
    out: Annotated[Path | None, typer.Option(help="The folder for everything. [default: tuned/NAME]")] = None,
    budget: Annotated[float, typer.Option(help="Seconds of training, about.")] = 600.0,
    search: Annotated[int | None, typer.Option(min=1, help="Search with Optuna instead: N trials in all.")] = None,
    storage: Annotated[str | None, typer.Option(help="Of the search: sqlite:///FILE, or a journal file.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that search side by side.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of weights, batches and the search.")] = None,
    init: Init = None,
    model: Model = None,
    data: Data = None,
    engine: Engine = None,
    device: Device = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """Choose T, K, beta and the learning rates as the paper did by hand; the test set is not looked at.

    Writes a record that eqprop train takes, the curves it was decided from, and the reasons. Started again, it goes on.
    """
    check_json(as_json)
    wanted = find_record(record, preset).override(seed=seed, init=init)
    folder = Path("tuned") / wanted.name if out is None else out
    machine = Machine(device or "cpu", engine or "auto", threads)
    wish = Wish(wanted, folder, machine, budget, model, data, quiet, as_json)
    with going_on():
        if search is not None:
            from eqprop.cli.tune_search import run_search

            run_search(wish, search, storage, workers)
        elif storage is not None or workers > 1:
            raise ValueError("--storage and --workers belong to a search; say how many trials it has: --search 50.")
        else:
            run_recipe(wish)


@contextmanager
def going_on() -> Iterator[None]:
    """What was stopped ends the command with the shell's code for the signal, and says that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        typer.echo("\nStopped. What is done is kept; the same command goes on from there.", err=True)
        raise typer.Exit(interrupt.exit_code if isinstance(interrupt, Stopped) else 130) from interrupt


def run_recipe(wish: Wish) -> None:
    """The paper's recipe, its files, and the table of what was decided."""
    from eqprop.report.tune_figures import RECORD, write_tuned
    from eqprop.tuning.recipe import Request, tune

    images = wish.images()
    asked = {"recipe": to_plain(wish.record), "budget": wish.budget, "model": wish.model, "data": describe(images)}
    prepare_folder(wish.folder, asked)
    if wish.machine.threads is not None:
        torch.set_num_threads(wish.machine.threads)
    with locked(wish.folder), progress(wish.quiet) as tell:
        own = factory(wish.model)
        tuned = tune(Request(wish.record, wish.folder, images, own, wish.machine, wish.budget, tell))
    reasons = {d["name"]: d["reason"] for d in tuned.document["decisions"]}
    write_tuned(wish.folder, tuned.document, to_toml(tuned.record, reasons, _title(wish)))
    give_json(tuned.document, wish.as_json)
    if not wish.quiet and wish.as_json != "-":
        console = Console(highlight=False)
        console.print(decisions_table(tuned.document))
        _warn_unsettled(tuned.document, console)
        console.print(f"Train with it: eqprop train {wish.folder / RECORD}", soft_wrap=True, markup=False)


def _warn_unsettled(document: Mapping[str, Any], console: Console) -> None:
    """The free phases of the training with the record's own values, where many had not settled."""
    record = document["record"]
    own = [t for t in document["trainings"] if all(t[name] == record[name] for name in ("T", "K", "beta"))]
    share = max((t["unsettled"] for t in own), default=0.0)
    if share >= 1.0:
        console.print(f"warning: with these, {share:.0f} % of the free phases end before they settle.", markup=False)


def _title(wish: Wish) -> str:
    return f"{wish.record.name}, tuned with seed {wish.record.seed} and a budget of {wish.budget:g} s"


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal, a line a step elsewhere; on standard error."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda text: None
    elif console.is_terminal and not console.is_dumb_terminal:
        with console.status("Looking") as status:
            yield status.update
    else:
        said: list[str] = []

        def tell(text: str) -> None:
            stage = text.partition(":")[0]
            if stage not in said[-1:]:
                said.append(stage)
                print(stage, file=sys.stderr, flush=True)

        yield tell


def decisions_table(document: Mapping[str, Any]) -> Table:
    """Each decision, what the paper has, and the reason."""
    effort, paper = document["effort"], document["paper"]
    table = Table(
        title=f"{document['name']}, seed {document['seed']}: decided in {document['seconds']:.0f} s from "
        f"{len(document['trainings'])} trainings on {effort['samples']} samples",
        show_lines=True,
    )
    for heading in ("", "decided", "paper", "reason"):
        table.add_column(heading)
    for decision in document["decisions"]:
        name = decision["name"]
        printed = "--" if paper is None else _shown(paper[name])
        table.add_row(name.replace("_", "\n"), _shown(decision["value"]), printed, decision["reason"])
    return table


def _shown(value: Any) -> str:
    return "\n".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, Mapping) else f"{value:g}"
