"""eqprop reproduce figures: all figures of the paper; resumable at any point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress as Bars
from rich.progress import TaskID

from eqprop.cli.common import Threads, bars, check_out, one_process
from eqprop.data.images import check_device
from eqprop.experiments.gdu import DTYPES, GDU_EXPERIMENTS, GduExperiment, Setup, run, same_settings
from eqprop.gdu import NeverSettlesError
from eqprop.messages import unknown

DTYPE = "float64"


def figures(
    out: Annotated[Path, typer.Option(help="Folder for the figures and their data.")],
    preset: Annotated[str, typer.Option(help="paper: as printed. authors: as in their code.")] = "paper",
    seed: Annotated[int | None, typer.Option(help="Seed of weights and samples.")] = None,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Draw the paper's 22 figures. Run it again to continue where it stopped.

    Comparisons with BPTT are computed, in minutes. The training curves are those of published runs, which are stored
    in the package: training takes hours on a GPU (eqprop reproduce table1).
    """
    from eqprop.report.paper import write_figures

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
    for path in write_figures(out):
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
