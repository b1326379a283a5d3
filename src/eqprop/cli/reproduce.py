"""eqprop reproduce: the paper's figures and Table 1, resumable at any point."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import TaskID
from rich.table import Table

from eqprop.cli import App, CommandGroup, app
from eqprop.cli.common import (
    Data,
    Device,
    Engine,
    Quiet,
    Threads,
    bars,
    check_out,
    new_console,
    one_process,
    spread,
    stopping,
    watcher,
)
from eqprop.data.images import check_device
from eqprop.experiments.experiment import Experiment, label
from eqprop.experiments.gdu import DTYPES, GDU_EXPERIMENTS, GduExperiment, Setup, run, same_settings
from eqprop.experiments.paper import OF_PAPER, named_experiment
from eqprop.files import write_json
from eqprop.gdu import NeverSettlesError
from eqprop.messages import unknown
from eqprop.report.page import Written, write_report
from eqprop.report.runs import Row, read_run
from eqprop.training.api import begin_or_resume, begin_or_resume_all
from eqprop.training.distributed import rank, world_size
from eqprop.training.metrics import Line, Result, StoredTrial, draw, free_phases, mean, stored_trials
from eqprop.training.plan import Leg, Plan, Settings, arithmetic, given_data, make_plan, read_images, split_estimators
from eqprop.training.watch import Progress, Watch, counted

reproduce = App(cls=CommandGroup, help="Reproduce the paper's figures and tables.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")

DTYPE = "float64"


@reproduce.command()
def figures(
    out: Annotated[Path, typer.Option(help="Folder for the figures and their data.")],
    preset: Annotated[str, typer.Option(help="paper: as printed. authors: as in their code.")] = "paper",
    seed: Annotated[int | None, typer.Option(help="Seed of weights and samples.")] = None,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Draw every figure about the GDU property. Run it again to continue where it stopped."""
    from eqprop.report.gdu import write_gallery

    one_process("reproduce figures")
    check_out(out)
    check_device(device)
    if preset not in GDU_EXPERIMENTS:
        raise ValueError(unknown("preset", preset, GDU_EXPERIMENTS))
    experiments = [experiment.override(seed=seed) for experiment in GDU_EXPERIMENTS[preset].values()]
    failed = []
    with bars() as progress:
        task = progress.add_task("", total=sum(weight(experiment) for experiment in experiments))
        for experiment in experiments:
            try:
                _do(experiment, out / experiment.name, device, threads, (progress, task))
            except NeverSettlesError as error:
                failed.append(f"{experiment.name}: {error}")
    for path in write_gallery(out):
        typer.echo(path)
    if failed:
        raise NeverSettlesError("Some figures are missing. " + " ".join(failed) + " Try another --seed.")


def weight(experiment: GduExperiment) -> float:
    """Rough cost of an experiment, in free steps of a small net, for the progress bar."""
    return experiment.T * max(len(experiment.hidden), 0.1) + 25 * experiment.K


def _do(experiment: GduExperiment, folder: Path, device: str, threads: int | None, shown: tuple[Bars, TaskID]) -> None:
    """Compare and write the folder, unless it exists with the same settings."""
    progress, task = shown
    from eqprop.report.gdu import read_document, write_folder

    done, share = progress.tasks[task].completed, weight(experiment)
    before = read_document(folder)
    if before is None or not same_settings(before, experiment, DTYPE, drop_unsettled=False):
        progress.update(task, description=experiment.name)
        setup = Setup.of_experiment(experiment, DTYPES[DTYPE], device)
        document, traces = run(
            setup, progress=lambda part: progress.update(task, completed=done + part * share), threads=threads
        )
        write_folder(folder, document, traces)
        said = f"{experiment.name}: {document['seconds']:.1f} s. {document['budget']['verdict']}"
        progress.console.print(said, markup=False, soft_wrap=True)
    progress.update(task, completed=done + share)


@reproduce.command("table1")
def table1(
    out: Annotated[Path | None, typer.Option(help="Folder for the runs, the table and the page.")] = None,
    check: Annotated[Path | None, typer.Option(help="Folder of published results; retrain one random trial.")] = None,
    rows: Annotated[str | None, typer.Option(help="EB-1h,P-1h, ... [default: all]")] = None,
    preset: Annotated[str | None, typer.Option(help="paper, authors or tuned. [default: paper]")] = None,
    estimator: Annotated[str | None, typer.Option(help="ep or bptt. [default: both]")] = None,
    trials: Annotated[int, typer.Option(help="Networks per row.")] = 5,
    epochs: Annotated[int | None, typer.Option(help="Epochs. [default: the paper's]")] = None,
    schedule: Annotated[str | None, typer.Option(help="synchronous or alternating (in separate runs).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of trial 0.")] = None,
    samples: Annotated[int | None, typer.Option(help="Train on the first N samples only.")] = None,
    data: Data = None,
    engine: Engine = None,
    device: Device = None,
    threads: Threads = None,
    yes: Annotated[bool, typer.Option("--yes", help="Start, however long it takes on a CPU.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train Table 1 of the paper: every row with EP, then with BPTT, from the same weights. Resumable.

    With --check FOLDER, retrain one random trial of one published row and say whether its error lies within the
    published spread (exit code 1 if not); --seed selects the trial, from those of --rows, --preset and --estimator.
    """
    estimators = split_estimators(estimator or "ep,bptt")
    if check is not None:
        one_process("reproduce table1 --check")
        run_options = {"samples": samples, "data": data, "engine": engine, "device": device, "threads": threads}
        among = Among(None if rows is None else rows.split(","), preset, estimators)
        _check(check, out, among, seed, {"watch": watcher(quiet), **run_options})
        return
    preset = preset or "paper"
    if out is None:
        raise ValueError("Nothing to do: expected --out FOLDER to train into, or --check FOLDER of published results.")
    experiments = [
        experiment.override(epochs=epochs, schedule=schedule, seed=seed) for experiment in _rows(rows, preset)
    ]
    _check_out(out)
    options: dict[str, Any] = {"estimators": estimators, "trials": trials, "samples": samples, "data": data}
    options |= {"engine": engine, "device": device, "threads": threads}
    if not yes and (device or "cpu") == "cpu" and not (out / preset).exists():
        hours = sum(_hours(experiment, samples, data) for experiment in experiments) * trials * len(estimators)
        _ask(hours / world_size())
    if world_size() > 1:
        folders = {out / preset / _folder(experiment, schedule): experiment for experiment in experiments}
        _divided(folders, out, quiet, options)
        return
    overall = Overall(watcher(quiet), [(r, m) for m in estimators for r in experiments])
    with stopping():
        # Finish one estimator for all rows before the next: one full column early is worth more than half the rows.
        for part in estimators:
            for experiment in experiments:
                folder = out / preset / _folder(experiment, schedule)
                overall.turn(experiment, part)
                result = begin_or_resume(experiment, folder, watch=overall, only=(part,), **options)
                write_json(folder.with_suffix(".json"), _published(result))
                write_report(out, with_curves=False)
    written = write_report(out)
    if not quiet:
        _show(out, written)


def _divided(experiments: dict[Path, Experiment], out: Path, quiet: bool, options: dict[str, Any]) -> None:
    """Train the table in several processes, every estimator and trial by itself; one of them writes the page."""
    with stopping():
        results = begin_or_resume_all(experiments, watch=watcher(quiet), **options)
    if rank() > 0:
        return
    for result in results:
        write_json(result.folder.with_suffix(".json"), _published(result))
    written = write_report(out)
    if not quiet:
        _show(out, written)


LONG = 2.0
"""Hours on a CPU from which the table is not begun without --yes."""


def _hours(experiment: Experiment, samples: int | None, data: str | None) -> float:
    """Roughly the time of one trial by one estimator on two cores."""
    from eqprop.tuning.effort import PACES, count_work

    settings = Settings(estimators=("ep",), samples=samples)
    plan = make_plan(experiment, settings, read_images(given_data(data), settings))
    return count_work(plan).seconds(experiment, PACES["cpu"]) * plan.iterations * experiment.epochs / 3600


def _ask(hours: float) -> None:
    if hours >= LONG:
        raise ValueError(
            f"This takes about {hours:.0f} hours on a CPU (estimated for two cores). Give --yes to begin; it can be "
            "stopped and continued. Or train on a GPU (--device cuda), or a part: --rows P-1h --trials 1 --epochs 3."
        )


def _published(result: Result) -> dict[str, Any]:
    """The content of a row's file: the JSON of `train --json`, wall times, free phases and provenance."""
    run = read_run(result.folder)
    seconds = {estimator: round(run.seconds(estimator), 3) for estimator in result.summary["estimators"]}
    more = {"seconds_by_estimator": seconds, "free_phases": free_phases(run.lines)}
    return {**result.summary, "schedule": run.experiment.schedule, **more, "provenance": run.sessions}


class Among(NamedTuple):
    """Selects published trials."""

    rows: list[str] | None
    preset: str | None
    estimators: tuple[str, ...]

    def trials(self, folder: Path) -> list[StoredTrial]:
        found = stored_trials(folder, self.rows)
        wanted = [t for t in found if t.estimator in self.estimators and self.preset in (None, t.experiment.preset)]
        if not wanted:
            there = sorted({f"{t.experiment.name} {t.experiment.preset} {t.estimator}" for t in found})
            asked = " ".join([self.preset or "any preset", " or ".join(self.estimators)])
            raise ValueError(f"No results for {asked}; published: {', '.join(there)}. Choose one of these.")
        return wanted


def _check(folder: Path, out: Path | None, among: Among, seed: int | None, options: dict[str, Any]) -> None:
    """Retrain a random published trial, in --out or in a temporary folder."""
    trial = draw(among.trials(folder), seed)
    drawn = trial.experiment
    which = f"{drawn.name} ({drawn.preset}, {drawn.schedule}), {trial.estimator}, seed {trial.seed}"
    typer.echo(
        f"{which}: published {trial.error:.2f} %, {counted(trial.experiment.epochs, 'epoch')}, from {trial.path}"
    )
    with TemporaryDirectory() as scratch, stopping():
        to = (out or Path(scratch)) / _folder(trial.experiment, trial.experiment.schedule)
        result = begin_or_resume(trial.experiment, to, estimators=(trial.estimator,), trials=1, **options)
    error = result.test_error(trial.estimator)
    if error is None:
        raise ValueError(f"{which} diverged when retrained; the published test error is {trial.error:.2f} %.")
    spread = f"{mean(trial.errors):.2f} ± {trial.tolerance:.2f} %"
    if not trial.holds(error):
        typer.echo(f"No: {error:.2f} % now, outside the published {spread}.")
        raise typer.Exit(1)
    typer.echo(f"Yes: {error:.2f} % now, within the published {spread}.")


def _rows(rows: str | None, preset: str) -> list[Experiment]:
    if preset not in OF_PAPER:
        raise ValueError(unknown("preset", preset, OF_PAPER))
    if rows is None:
        return list(OF_PAPER[preset].values())
    return [named_experiment(name.strip(), preset) for name in rows.split(",") if name.strip()]


def _folder(experiment: Experiment, schedule: str | None) -> str:
    return experiment.name + ("-alternating" if schedule == "alternating" else "")


def _check_out(out: Path) -> None:
    """Accept only a new folder, or one written by this command."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; expected a folder. Choose another --out.")
    if not out.exists() or not any(out.iterdir()):
        return
    if not any(True for _ in out.glob("*/*/experiment.json")) and not (out / "figures").is_dir():
        listing = ", ".join(sorted(p.name for p in out.iterdir())[:5])
        raise FileExistsError(f"{out} holds something else ({listing}). Choose a new or empty folder with --out.")


class Overall(Watch):
    """Forwards every event, with the time left for the whole table instead of one run.

    Estimates later runs from the amount of arithmetic, at the speed measured last.
    """

    def __init__(self, watch: Watch, parts: Sequence[tuple[Experiment, str]]) -> None:
        self.watch = watch
        self.to_come = list(parts)
        self.now: tuple[Experiment, str] | None = None
        self.started = time.monotonic()

    def turn(self, experiment: Experiment, estimator: str) -> None:
        self.now = (experiment, estimator)
        self.to_come.remove(self.now)

    def begin(self, plan: Plan, folder: Path) -> None:
        self.watch.begin(plan, folder)

    def begin_leg(self, leg: Leg, engine: str, epoch: int) -> None:
        self.watch.begin_leg(leg, engine, epoch)

    def progress(self, progress: Progress) -> None:
        self.watch.progress(self._with_all(progress))

    def epoch(self, lines: Sequence[Line], progress: Progress) -> None:
        self.watch.epoch(lines, self._with_all(progress))

    def warn(self, message: str) -> None:
        self.watch.warn(message)

    def end(self) -> None:
        self.watch.end()

    def _with_all(self, progress: Progress) -> Progress:
        assert self.now is not None, "turn comes first"
        whole, later = arithmetic(self.now[0]), sum(arithmetic(experiment) for experiment, _ in self.to_come)
        return replace(progress, seconds_left=progress.seconds_left + progress.seconds_whole * later / whole)


def _show(out: Path, written: Written) -> None:
    from eqprop.report.runs import collect, rows

    console = new_console()
    console.print(results_table(rows(collect(out).runs)))
    console.print(f"Page: {written.page}", soft_wrap=True)
    console.print(f"Table: {written.csv}, {written.latex}. Curves: {written.curves}", soft_wrap=True)


def results_table(found: Sequence[Row]) -> Table:
    """Our results next to the paper's, within 80 columns."""
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
    for heading in ("network", "estimator", "ours", "paper", "epochs", "reproduced"):
        table.add_column(heading, justify="left" if heading in ("network", "estimator") else "right", no_wrap=True)
    for row in found:
        paper = row.paper_result
        ours = "--" if row.test is None else spread(row.test.mean, row.test.std)[:-2]
        table.add_row(
            row.run.title,
            label(row.estimator),
            ours + ("" if row.train is None else f" ({row.train.mean:.2f})"),
            "--" if paper is None else str(paper),
            f"{row.test.epoch if row.test else 0}/{row.run.experiment.epochs}",
            row.verdict if row.verdict in ("yes", "no") else "--",
        )
    return table
