"""eqprop reproduce: what the paper shows, in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress, TaskID

from eqprop.cli import app
from eqprop.cli.gdu import check_out
from eqprop.cli.gdu_progress import bars
from eqprop.cli.gdu_targets import check_device
from eqprop.experiments.gdu_records import GDU_RECORDS, GduRecord
from eqprop.experiments.gdu_run import DTYPES, Subject, run, same_settings
from eqprop.experiments.suggest import unknown
from eqprop.gdu import NeverSettlesError

reproduce = typer.Typer(help="Reproduce figures and tables of the paper.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")

DTYPE = "float64"


@reproduce.command()
def figures(
    out: Annotated[Path, typer.Option(help="Folder for the figures and the numbers behind them.")],
    preset: Annotated[str, typer.Option(help="paper: as printed. authors: as their code ran.")] = "paper",
    seed: Annotated[int | None, typer.Option(help="Of weights and samples.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Every figure about the GDU property. Stopped and started again, it goes on where it was."""
    from eqprop.report.gdu_gallery import write_gallery

    check_out(out)
    check_device(device)
    if preset not in GDU_RECORDS:
        raise ValueError(unknown("preset", preset, GDU_RECORDS))
    if threads is not None:
        torch.set_num_threads(threads)
    records = [record.override(seed=seed) for record in GDU_RECORDS[preset].values()]
    failed = []
    with bars() as progress:
        task = progress.add_task("", total=sum(weight(record) for record in records))
        for record in records:
            try:
                _do(record, out / record.name, device, progress, task)
            except NeverSettlesError as error:
                failed.append(f"{record.name}: {error}")
    for path in write_gallery(out):
        typer.echo(path)
    if failed:
        raise NeverSettlesError(
            "Some figures are missing. " + " ".join(failed) + " Another --seed gives other samples."
        )


def weight(record: GduRecord) -> float:
    """About how long a record takes, in free steps of a small net, for the progress shown."""
    return record.T * max(len(record.hidden), 0.1) + 25 * record.K


def _do(record: GduRecord, folder: Path, device: str, progress: Progress, task: TaskID) -> None:
    """Compare and write the folder, unless it is there and was made with the same settings."""
    from eqprop.report.gdu_folder import read_document, write_folder

    done, share = progress.tasks[task].completed, weight(record)
    before = read_document(folder)
    if before is None or not same_settings(before, record, DTYPE, drop_unsettled=False):
        progress.update(task, description=record.name)
        subject = Subject.of_record(record, DTYPES[DTYPE], device)
        document, traces = run(subject, progress=lambda part: progress.update(task, completed=done + part * share))
        write_folder(folder, document, traces)
        said = f"{record.name}: {document['seconds']:.1f} s. {document['budget']['verdict']}"
        progress.console.print(said, markup=False, soft_wrap=True)
    progress.update(task, completed=done + share)
