"""eqprop reproduce: what the paper shows, in one go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TaskID

from eqprop.cli import app
from eqprop.cli.gdu import Preset, check_out
from eqprop.cli.gdu_progress import bars
from eqprop.cli.gdu_targets import check_device
from eqprop.experiments.gdu_records import GDU_RECORDS, GduRecord
from eqprop.experiments.gdu_run import DTYPES, Subject, run, same_settings
from eqprop.gdu import NeverSettlesError
from eqprop.report.gdu_gallery import SETTLED

reproduce = typer.Typer(help="Reproduce figures and tables of the paper.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")

DTYPE = "float64"


@dataclass(frozen=True)
class Job:
    """One comparison of the set and the folder it has."""

    record: GduRecord
    folder: Path
    drop_unsettled: bool = False

    @property
    def label(self) -> str:
        return self.record.name + (SETTLED if self.drop_unsettled else "")

    @property
    def weight(self) -> float:
        """About how long it takes, in free steps of a small net, for the progress shown."""
        return self.record.T * max(len(self.record.hidden), 0.1) + 25 * self.record.K


@reproduce.command()
def figures(
    out: Annotated[Path, typer.Option(help="Folder for the figures and the numbers behind them.")],
    preset: Annotated[Preset, typer.Option(help="As printed, or as the authors' code ran.")] = "paper",
    seed: Annotated[int | None, typer.Option(help="Of weights and samples.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Every figure about the GDU property. Stopped and started again, it goes on where it was."""
    from eqprop.report.gdu_gallery import write_gallery

    check_out(out)
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    jobs = [Job(record.override(seed=seed), out / record.name) for record in GDU_RECORDS[preset].values()]
    failed = []
    with bars() as progress:
        task = progress.add_task("", total=sum(job.weight for job in jobs))
        for job in jobs:
            try:
                _with_settled(job, out, device, progress, task)
            except NeverSettlesError as error:
                failed.append(f"{job.label}: {error}")
    for path in write_gallery(out):
        typer.echo(path)
    if failed:
        raise NeverSettlesError(
            "Some figures are missing. " + " ".join(failed) + " Another --seed gives other samples."
        )


def _with_settled(job: Job, out: Path, device: str, progress: Progress, task: TaskID) -> None:
    """A job and, where some of its samples have not settled, the same without them: the figure shows both."""
    found = _do(job, device, progress, task)
    if 0 < found["residual"]["unsettled"] < found["batch"]:
        again = Job(job.record, out / f"{job.record.name}{SETTLED}", drop_unsettled=True)
        progress.update(task, total=(progress.tasks[task].total or 0.0) + again.weight)
        _do(again, device, progress, task)


def _do(job: Job, device: str, progress: Progress, task: TaskID) -> dict[str, Any]:
    """The document of a job: the one that is there if it was made with the same settings, else a new one."""
    from eqprop.report.gdu_folder import read_document, write_folder

    done = progress.tasks[task].completed
    document = read_document(job.folder)
    if document is None or not same_settings(document, job.record, DTYPE, job.drop_unsettled):
        progress.update(task, description=job.label)
        subject = Subject.of_record(job.record, DTYPES[DTYPE], device)
        document, traces = run(
            subject, job.drop_unsettled, lambda part: progress.update(task, completed=done + part * job.weight)
        )
        write_folder(job.folder, document, traces)
        progress.console.print(
            f"{job.label}: {document['seconds']:.1f} s. {document['budget']['verdict']}", markup=False
        )
    progress.update(task, completed=done + job.weight)
    return document
