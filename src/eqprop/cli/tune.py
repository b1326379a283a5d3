"""eqprop tune: the paper's recipe, or a search with one or several worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eqprop.cli import app
from eqprop.cli.common import (
    Data,
    Device,
    Engine,
    ExperimentName,
    Init,
    Json,
    Model,
    Preset,
    Quiet,
    Threads,
    check_json,
    factory,
    give_json,
    new_console,
    one_process,
)
from eqprop.data import Images
from eqprop.engines import threads_for
from eqprop.experiments.architecture import Own, is_own, own_code
from eqprop.experiments.experiment import Experiment
from eqprop.experiments.io import find_experiment, find_own, to_dict, to_toml
from eqprop.files import write_json, write_text
from eqprop.run import Stopped
from eqprop.run.distributed import alone, in_torchrun
from eqprop.run.folder import file_name, locked
from eqprop.run.plan import Settings, describe, given_data, read_images
from eqprop.tuning.effort import Machine, prepare_folder

if TYPE_CHECKING:
    from eqprop.tuning.search import Found


@dataclass(frozen=True)
class Asked:
    """The options shared by the recipe and the search."""

    experiment: Experiment
    folder: Path
    machine: Machine
    budget: float
    model: str | None
    own: Own | None
    data: str | None
    quiet: bool
    as_json: str | None
    validation: int | None = None

    @property
    def request(self) -> dict[str, Any]:
        """What is not a matter of the machine, where it is not the default."""
        return {} if self.validation is None else {"validation": self.validation}

    def images(self) -> Images:
        given = self.own.data() if self.data is None and self.own is not None else self.data
        given = self.experiment.data if given is None else given
        return read_images(given_data(given), Settings(device=self.machine.device))

    def next_command(self, file: str) -> str:
        own = "" if self.model is None else f" --model {self.model}"
        data = "" if self.data is None else f" --data {self.data}"
        return f"eqprop train {self.folder / file}{own}{data}"


@app.command("tune")
def tune_experiment(
    experiment: ExperimentName,
    preset: Preset = "paper",
    out: Annotated[Path | None, typer.Option(help="Output folder. [default: tuned/NAME]")] = None,
    budget: Annotated[float, typer.Option(help="Approximate seconds of training.")] = 600.0,
    search: Annotated[int | None, typer.Option(min=1, help="Search with Optuna instead, N trials in total.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Storage of the search: sqlite:///FILE, or a journal file.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of the search.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, batches and the search.")] = None,
    init: Init = None,
    model: Model = None,
    data: Data = None,
    validation: Annotated[
        int | None, typer.Option(min=1, help="Training samples to hold out. [default: a sixth at most]")
    ] = None,
    engine: Engine = None,
    device: Device = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """Choose T, K, beta and the learning rates as the paper did by hand, without looking at the test set.

    Writes an experiment for eqprop train, the curves behind each decision, and the reasons. Resumable.
    """
    check_json(as_json)
    model = experiment if is_own(experiment) else model
    found, own = find_own(experiment, None if is_own(experiment) else factory(model))
    wanted = find_experiment(found, preset).override(seed=seed, init=init)
    folder = Path("tuned") / file_name(wanted.name) if out is None else out
    machine = Machine(in_torchrun().device(device or "cpu"), engine or "auto", threads)
    asked = Asked(wanted, folder, machine, budget, model, own, data, quiet, as_json, validation)
    with going_on(), own_code(model):
        if search is not None:
            run_search(asked, search, storage, workers)
        elif storage is not None or workers > 1:
            raise ValueError(
                "--storage and --workers apply to a search only. Give its number of trials, such as --search 50."
            )
        else:
            one_process("tune without --search")
            run_recipe(asked)


@contextmanager
def going_on() -> Iterator[None]:
    """On a signal, say that the results so far are kept and exit with the shell's code."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        typer.echo("\nStopped. Results so far are kept; run the same command to continue.", err=True)
        raise typer.Exit(interrupt.exit_code if isinstance(interrupt, Stopped) else 130) from interrupt


def run_recipe(asked: Asked) -> None:
    """Run the paper's recipe, write its files and show its decisions."""
    from eqprop.report.figures import EXPERIMENT, write_tuned
    from eqprop.tuning.recipe import Request, tune

    images = asked.images()
    request = {
        "recipe": to_dict(asked.experiment),
        "budget": asked.budget,
        "model": asked.model,
        "data": describe(images),
        **asked.request,
    }
    prepare_folder(asked.folder, request)
    x = images.floats(images.train_x[: asked.experiment.batch])
    model = asked.experiment.build(0, x.dtype, asked.own)
    x = x if model.input_shape is None else x.reshape(len(x), *model.input_shape)
    torch.set_num_threads(asked.machine.threads or threads_for(model, x))
    with locked(asked.folder), progress(asked.quiet) as tell:
        given = (asked.experiment, asked.folder, images, asked.own, asked.machine, asked.budget, tell, asked.validation)
        tuned = tune(Request(*given))
    reasons = {d["name"]: d["reason"] for d in tuned.document["decisions"]}
    write_tuned(asked.folder, tuned.document, to_toml(tuned.experiment, reasons, _title(asked)))
    give_json(tuned.document, asked.as_json)
    if not asked.quiet and asked.as_json != "-":
        console = new_console()
        console.print(decisions_table(tuned.document))
        _warn_unsettled(tuned.document, console)
        console.print(f"Train with it: {asked.next_command(EXPERIMENT)}", soft_wrap=True, markup=False)


def _warn_unsettled(document: Mapping[str, Any], console: Console) -> None:
    """Warn if many free phases of the chosen training did not settle."""
    experiment = document["experiment"]
    own = [t for t in document["trainings"] if all(t[name] == experiment[name] for name in ("T", "K", "beta"))]
    share = max((t["unsettled"] for t in own), default=0.0)
    if share >= 1.0:
        console.print(f"warning: with these values, {share:.0f} % of the free phases do not settle.", markup=False)


def _title(asked: Asked) -> str:
    return f"{asked.experiment.name}, tuned with seed {asked.experiment.seed} and a budget of {asked.budget:g} s"


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Report progress on standard error: a status line on a terminal, else one line per step."""
    console = new_console(stderr=True)
    if quiet:
        yield lambda text: None
    elif console.is_terminal and not console.is_dumb_terminal:
        with console.status("Starting") as status:
            yield lambda text: status.update(Text(text))
    else:
        said: list[str] = []

        def tell(text: str) -> None:
            stage = text.partition(":")[0]
            if stage not in said[-1:]:
                said.append(stage)
                print(stage, file=sys.stderr, flush=True)

        yield tell


def decisions_table(document: Mapping[str, Any]) -> Table:
    """Each decision, the paper's value, and the reason."""
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


JOURNAL, DOCUMENT, EXPERIMENT = "study.journal", "search.json", "best.toml"


def run_search(asked: Asked, trials: int, storage: str | None, workers: int) -> None:
    """Search to the end and write the best experiment; every worker writes the same files.

    The processes of a torchrun job are workers too: the study is all that they share.
    """
    from eqprop.tuning.search import Search, result, work

    images = asked.images()
    request = {"search": to_dict(asked.experiment), "model": asked.model, "data": describe(images), **asked.request}
    prepare_folder(asked.folder, request)
    where = storage or str(asked.folder / JOURNAL)
    ranks = in_torchrun()
    threads = asked.machine.threads or max((os.cpu_count() or 1) // (workers * ranks.neighbours), 1)
    torch.set_num_threads(threads)
    machine = replace(asked.machine, threads=threads)
    team = [_start(threads) for _ in range(workers - 1)]
    try:
        with alone(), progress(asked.quiet or not ranks.leads) as tell:
            given = (asked.experiment, asked.folder, images, trials, where, asked.own, machine, asked.budget, tell)
            wanted = Search(*given, asked.validation)
            work(wanted)
    finally:
        _end(team)
    found = result(wanted)
    _write(asked.folder, found, asked)
    if not ranks.leads:
        return
    give_json(found.document, asked.as_json)
    if not asked.quiet and asked.as_json != "-":
        console = new_console()
        console.print(trials_table(found.document))
        console.print(f"Train with it: {asked.next_command(EXPERIMENT)}", soft_wrap=True, markup=False)


def _start(threads: int) -> subprocess.Popen[bytes]:
    """Start another worker: the same command in a separate, quiet process."""
    words = [*_without(sys.argv[1:], ("--workers", "--threads", "--json"))]
    command = [sys.executable, "-m", "eqprop", *words, "--workers", "1", "--threads", str(threads), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _without(words: list[str], options: tuple[str, ...]) -> list[str]:
    """A command line without these options and their values."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


def _end(team: list[subprocess.Popen[bytes]]) -> None:
    """Wait for the other workers; stop them first if this one was stopped or failed."""
    if sys.exc_info()[0] is not None:
        for worker in team:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
    for worker in team:
        code = worker.wait()
        if code not in (0, 130, 143):
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            print(f"A worker ended {how}; the others took over its trials.", file=sys.stderr)


def _write(folder: Path, found: Found, asked: Asked) -> None:
    title = (
        f"{asked.experiment.name}, the best of {len(found.document['trials'])} trials of a search with seed "
        f"{asked.experiment.seed}: held-out error {found.document['held_out_error']:.2f} %"
    )
    write_text(folder / EXPERIMENT, to_toml(found.experiment, title=title))
    write_json(folder / DOCUMENT, found.document)


def trials_table(document: Mapping[str, Any], most: int = 8) -> Table:
    """The best trials."""
    ended = [t for t in document["trials"] if t["held_out_error"] is not None]
    states = [t["state"] for t in document["trials"]]
    effort = document["effort"]
    table = Table(
        title=f"{document['name']}: {len(ended)} trials finished, {states.count('pruned')} pruned; "
        f"{effort['samples']} samples, {effort['epochs']} epochs, {effort['validation']} held out"
    )
    names = list(ended[0]["values"])
    for heading in ("trial", "held out, %", *names):
        table.add_column(heading, justify="right")
    for trial in sorted(ended, key=lambda t: (t["held_out_error"], t["number"]))[:most]:
        values = [f"{trial['values'][name]:.3g}" for name in names]
        table.add_row(str(trial["number"]), f"{trial['held_out_error']:.2f}", *values)
    return table
