"""eqprop tune: the paper's recipe, or a search with one or several worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from eqprop.cli import command
from eqprop.cli.common import Experiment, Json, Preset, Quiet, check_json, give_json, new_console, one_process
from eqprop.cli.options import factory, with_settings
from eqprop.engines import threads_for
from eqprop.files import write_json, write_text
from eqprop.messages import command as shell_command
from eqprop.run import Session, Stopped, bind
from eqprop.run.distributed import alone, in_torchrun
from eqprop.run.folder import file_name, locked
from eqprop.run.own import is_own, own_code
from eqprop.run.session import chosen
from eqprop.run.spec import Spec
from eqprop.run.toml import to_toml
from eqprop.tuning.effort import prepare_folder, settings_of

if TYPE_CHECKING:
    from eqprop.tuning.search import BestTrial

DECIDED = ("T", "K", "beta", "rates", "estimator", "trials")
"""Settings that tuning decides itself."""


@dataclass(frozen=True)
class Tuning:
    """What the recipe and the search share.

    words       options that `eqprop train` needs beside the tuned file: own network and data
    """

    session: Session
    folder: Path
    budget: float
    validation: int | None
    words: tuple[str, ...]
    quiet: bool
    as_json: str | None

    @property
    def spec(self) -> Spec:
        return self.session.spec

    def request(self, kind: str) -> dict[str, Any]:
        """What is not a matter of the machine."""
        more = {} if self.validation is None else {"validation": self.validation}
        return {kind: settings_of(self.spec), "budget": self.budget, "data": self.session.data, **more}

    def next_command(self, file: str) -> str:
        return shell_command("train", self.folder / file, *self.words)


@command("tune", "eqprop tune P-1h --budget 120", "eqprop tune my.py:build --search 50 --workers 2")
@with_settings(without=DECIDED)
def tune_experiment(
    experiment: Experiment,
    settings: dict[str, Any],
    preset: Preset = None,
    out: Annotated[Path | None, typer.Option(help=r"Output folder. \[default: tuned/NAME]")] = None,
    budget: Annotated[float, typer.Option(help="Seconds that it may take.")] = 600.0,
    search: Annotated[int | None, typer.Option(min=1, help="Search with Optuna instead, N trials in total.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Storage of the search: sqlite:///FILE, or a journal file.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of the search.")] = 1,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """Choose T, K, beta and the learning rates, without looking at the test set.

    Follows the paper's recipe, or searches (--search). Writes an experiment for eqprop train, the curves behind each
    decision, and the reasons. Resumable. --validation N holds out N training samples instead of a sixth.
    """
    check_json(as_json)
    where, validation = settings.get("function"), settings.pop("validation", None)
    words = [word for name in ("function", "data") if name in settings for word in (OPTIONS[name], settings[name])]
    if is_own(experiment):
        words += [OPTIONS["function"], experiment]
    with going_on(), own_code(where or experiment):
        spec, own = chosen(experiment, factory(settings), {"preset": preset, **settings})
        folder = Path("tuned") / file_name(spec.name) if out is None else out
        spec = spec.override(device=in_torchrun().device(spec.run.device))
        session = bind(spec, model=own)
        tuning = Tuning(session, folder, budget, validation, tuple(words), quiet, as_json)
        if search is not None:
            run_search(tuning, search, storage, workers)
        elif storage is not None or workers > 1:
            raise ValueError(
                "--storage and --workers apply to a search only. Give its number of trials, such as --search 50."
            )
        else:
            one_process("tune without --search")
            run_recipe(tuning)


OPTIONS = {"function": "--model", "data": "--data"}


@contextmanager
def going_on() -> Iterator[None]:
    """On a signal, say that the results so far are kept and exit with the shell's code."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        typer.echo("\nStopped. Results so far are kept; run the same command to continue.", err=True)
        raise typer.Exit(interrupt.exit_code if isinstance(interrupt, Stopped) else 130) from interrupt


def run_recipe(tuning: Tuning) -> None:
    """Run the paper's recipe, write its files and show its decisions."""
    from eqprop.report.figures import EXPERIMENT, write_tuned
    from eqprop.tuning.recipe import tune

    prepare_folder(tuning.folder, tuning.request("recipe"))
    problem = tuning.session.problem()
    torch.set_num_threads(tuning.spec.run.threads or threads_for(problem.model, problem.x))
    with locked(tuning.folder), progress(tuning.quiet) as tell:
        tuned = tune(tuning.session, tuning.folder, tuning.budget, tell, tuning.validation)
    reasons = {d["name"]: d["reason"] for d in tuned.document["decisions"]}
    title = f"{tuning.spec.name}, tuned with seed {tuning.spec.run.seed} and a budget of {tuning.budget:g} s"
    write_tuned(tuning.folder, tuned.document, to_toml(tuned.spec, reasons, title))
    give_json(tuned.document, tuning.as_json)
    if not tuning.quiet and tuning.as_json != "-":
        console = new_console()
        for line in decisions(tuned.document):
            console.print(line, soft_wrap=True)
        _warn_unsettled(tuned.document, console)
        console.print(f"Train with it: {tuning.next_command(EXPERIMENT)}", soft_wrap=True, markup=False)


def _warn_unsettled(document: Mapping[str, Any], console: Console) -> None:
    """Warn if many free phases of the chosen training did not settle."""
    phases = document["experiment"]["phases"]
    own = [t for t in document["trainings"] if all(t[name] == phases[name] for name in ("T", "K", "beta"))]
    share = max((t["unsettled"] for t in own), default=0.0)
    if share >= 1.0:
        console.print(f"warning: with these values, {share:.0f} % of the free phases do not settle.", markup=False)


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


def decisions(document: Mapping[str, Any]) -> Iterator[str]:
    """Each decision with the paper's value and the reason, a line each."""
    paper = document["paper"] or {}
    yield (
        f"{document['name']}, seed {document['seed']}: decided in {document['seconds']:.0f} s from "
        f"{len(document['trainings'])} trainings on {document['effort']['samples']} samples"
    )
    for decision in document["decisions"]:
        name = decision["name"]
        printed = f" (paper: {_shown(paper[name])})" if name in paper else ""
        yield f"{name} = {_shown(decision['value'])}{printed}: {decision['reason']}."


def _shown(value: Any) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, Mapping) else f"{value:g}"


JOURNAL, DOCUMENT, EXPERIMENT = "study.journal", "search.json", "best.toml"


def run_search(tuning: Tuning, trials: int, storage: str | None, workers: int) -> None:
    """Search to the end and write the best experiment; every worker writes the same files.

    The processes of a torchrun job are workers too: the study is all that they share.
    """
    from eqprop.tuning.search import Search, result, work

    prepare_folder(tuning.folder, tuning.request("search"))
    where = storage or str(tuning.folder / JOURNAL)
    ranks = in_torchrun()
    threads = tuning.spec.run.threads or max((os.cpu_count() or 1) // (workers * ranks.neighbours), 1)
    torch.set_num_threads(threads)
    tuning.session.spec = tuning.spec.override(threads=threads)
    team = [_start(threads) for _ in range(workers - 1)]
    try:
        with alone(), progress(tuning.quiet or not ranks.leads) as tell:
            wanted = Search(tuning.session, tuning.folder, trials, where, tuning.budget, tell, tuning.validation)
            work(wanted)
    finally:
        _end(team)
    found = result(wanted)
    _write(tuning, found)
    if not ranks.leads:
        return
    give_json(found.document, tuning.as_json)
    if not tuning.quiet and tuning.as_json != "-":
        console = new_console()
        for line in best_trials(found.document):
            console.print(line, soft_wrap=True)
        console.print(f"Train with it: {tuning.next_command(EXPERIMENT)}", soft_wrap=True, markup=False)


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


def _write(tuning: Tuning, found: BestTrial) -> None:
    title = (
        f"{tuning.spec.name}, the best of {len(found.document['trials'])} trials of a search with seed "
        f"{tuning.spec.run.seed}: held-out error {found.document['held_out_error']:.2f} %"
    )
    write_text(tuning.folder / EXPERIMENT, to_toml(found.spec, title=title))
    write_json(tuning.folder / DOCUMENT, found.document)


def best_trials(document: Mapping[str, Any], most: int = 8) -> Iterator[str]:
    """The best trials, a line each."""
    ended = [t for t in document["trials"] if t["held_out_error"] is not None]
    pruned = [t["state"] for t in document["trials"]].count("pruned")
    effort = document["effort"]
    yield (
        f"{document['name']}: {len(ended)} trials finished, {pruned} pruned; "
        f"{effort['samples']} samples, {effort['epochs']} epochs, {effort['validation']} held out"
    )
    for trial in sorted(ended, key=lambda t: (t["held_out_error"], t["number"]))[:most]:
        values = ", ".join(f"{name} {value:.3g}" for name, value in trial["values"].items())
        yield f"trial {trial['number']}: {trial['held_out_error']:.2f} % held out, {values}"
