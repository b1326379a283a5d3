"""eqprop gdu."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich.console import Console

from eqprop.cli import app
from eqprop.cli.gdu_progress import progress_bar
from eqprop.cli.gdu_table import show
from eqprop.cli.gdu_targets import Wishes, is_own, own_code, subject
from eqprop.cli.options import check_json, give_json
from eqprop.dynamics import NudgePlace
from eqprop.relax import Schedule


@app.command()
def gdu(
    target: Annotated[str, typer.Argument(help="A record (toy, EB-1h, ...), FILE.py:FUNCTION, or a run folder.")],
    preset: Annotated[str, typer.Option(help="paper: as printed. authors: as their code ran.")] = "paper",
    T: Annotated[int | None, typer.Option("--T", help="Steps of the free phase.")] = None,
    K: Annotated[int | None, typer.Option("--K", help="Steps compared.")] = None,
    beta: Annotated[float | None, typer.Option(help="Strength of the nudge.")] = None,
    init: Annotated[str | None, typer.Option(help="Initial weights of a record: default or glorot.")] = None,
    nudge: Annotated[str | None, typer.Option(help="outside sigma, as in the paper, or inside.")] = None,
    cost: Annotated[str | None, typer.Option(help="Of a record: squared-error or cross-entropy.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Of the free phase: synchronous or alternating; a run's own by default.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, samples and probes.")] = None,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    drop_unsettled: Annotated[bool, typer.Option("--drop-unsettled", help="Leave out what has not settled.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    method: Annotated[str | None, typer.Option(help="Of a run folder; its first by default.")] = None,
    trial: Annotated[int | None, typer.Option(help="Of a run folder; 0 by default.")] = None,
    data: Annotated[str | None, typer.Option(help="The data of a run folder, if it is elsewhere now.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for gdu.json, traces.json and figures/.")] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="The result as JSON.")] = None,
) -> None:
    """Does EP compute the gradient of this model, and if not, why?

    EP's updates against BPTT's gradients, step by step and layer by layer, with an error budget.
    """
    from eqprop.experiments.gdu_run import run

    check_json(json)
    check_out(out)
    if threads is not None:
        torch.set_num_threads(threads)
    place = cast(NudgePlace | None, nudge)
    turns = cast(Schedule | None, schedule)
    wishes = Wishes(preset, T, K, beta, init, batch, seed, dtype, device, data, place, cost, method, trial, turns)
    console = Console(file=sys.stderr if json == "-" else sys.stdout, highlight=False)
    with own_code(Path(target.rpartition(":")[0])) if is_own(target) else nullcontext():
        chosen = subject(target, wishes)
        with progress_bar(chosen.name) as tell:
            document, traces = run(chosen, drop_unsettled, tell)
    if out is not None:
        from eqprop.report.gdu_folder import write_folder

        write_folder(out, document, traces)
    show(document, console)
    give_json(document, json)


def check_out(out: Path | None) -> None:
    """A folder that cannot be made is said before the work, not after it."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out got {out}, which is a file; expected a folder.")
    there = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise PermissionError(f"--out got {out}, but {there} cannot be written. Choose another folder.")
