"""eqprop reproduce figures: all figures of the paper; resumable at any point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress as Bars
from rich.progress import TaskID

from eqprop import papers
from eqprop.cli.common import bars, check_out, one_process
from eqprop.cli.options import with_settings
from eqprop.gdu import NeverSettlesError
from eqprop.messages import unknown
from eqprop.models.layered import LayeredNet
from eqprop.run import bind
from eqprop.run.laboratory import BoundProblem, compare, is_same
from eqprop.run.spec import Spec


@with_settings("seed", "threads", "device")
def figures(
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder for the figures and their data.")],
    preset: Annotated[str, typer.Option(help="gdu: as printed. gdu-authors: as in their code.")] = "gdu",
) -> None:
    """Draw the paper's 22 figures. Run it again to continue where it stopped.

    Comparisons with BPTT are computed, in minutes. The training curves are those of published runs, which are stored
    in the package: training takes hours on a GPU (eqprop reproduce table1).
    """
    from eqprop.report.paper import write_figures

    one_process("reproduce figures")
    check_out(out)
    if preset not in papers.COMPARED:
        raise ValueError(unknown("preset", preset, papers.COMPARED))
    specs = [spec.override(**settings) for spec in papers.specs(preset).values()]
    failed = []
    with bars() as progress:
        task = progress.add_task("", total=sum(weight(spec) for spec in specs))
        for spec in specs:
            try:
                _compare(spec, out / spec.name, (progress, task))
            except NeverSettlesError as error:
                failed.append(f"{spec.name}: {error}")
    for path in write_figures(out):
        typer.echo(path)
    if failed:
        raise NeverSettlesError("Some figures are missing. " + " ".join(failed) + " Try another --seed.")


def weight(spec: Spec) -> float:
    """Rough cost of a comparison, in free steps of a small net, for the progress bar."""
    hidden = len(spec.model.sizes) - 2 if isinstance(spec.model, LayeredNet) else 0
    return spec.phases.T * max(hidden, 0.1) + 25 * spec.phases.K


def _compare(spec: Spec, folder: Path, shown: tuple[Bars, TaskID]) -> None:
    """Compare and write the folder, unless it exists with the same settings."""
    from eqprop.report.gdu import read_document, write_folder

    progress, task = shown
    done, share = progress.tasks[task].completed, weight(spec)
    before = read_document(folder)
    if before is None or not is_same(before, spec, torch.float64):
        progress.update(task, description=spec.name)
        session = bind(spec, dtype=torch.float64, trains=False)
        subject = BoundProblem(session, session.problem())
        document, report = compare(subject, progress=lambda part: progress.update(task, completed=done + part * share))
        write_folder(folder, document, report.traces_to_dict())
        said = f"{spec.name}: {document['seconds']:.1f} s. {document['budget']['verdict']}"
        progress.console.print(said, markup=False, soft_wrap=True)
    progress.update(task, completed=done + share)
