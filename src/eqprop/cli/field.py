"""eqprop reproduce field: the learning rules of the field, each trained beside its yardstick; resumable."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from eqprop import papers
from eqprop.cli import command
from eqprop.cli.common import Quiet, new_console, one_process, stopping, watcher
from eqprop.cli.options import with_settings
from eqprop.cli.reproduce import MACHINE, UNFINISHED, TimeLimit, publish, reproduce
from eqprop.cli.reproduce import _check_out as check_out
from eqprop.cli.reproduce import _seed as seed_folder
from eqprop.files import write_json
from eqprop.messages import unknown
from eqprop.papers import FieldRow
from eqprop.report.field import FIELD_HEADINGS, field_cells
from eqprop.run.api import begin_or_resume
from eqprop.run.field import examine
from eqprop.run.folder import is_run, read_json
from eqprop.run.loop import Stopped
from eqprop.run.watch import Several

CHECKS = "field.json"
"""In a run's folder: what was measured of it, and the CPU time of its pieces."""


@command(
    "field",
    "eqprop reproduce field --minutes 30 --out field",
    "eqprop reproduce field --rows pc-2h --seeds 1 --out field",
    of=reproduce,
)
@with_settings("epochs", "samples", "rates", "validation", *MACHINE)
def field(
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder for the runs and a file per row.")],
    rows: Annotated[str | None, typer.Option(help="pc-2h,untied-dyadic, ...; by default all.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per row; as published by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="This seed only.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop and save after so many minutes.")] = None,
    note: Annotated[str | None, typer.Option(help="Remark on the machine, kept with the times.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train the learning rules of the field, the first seed of every row before the second. Resumable.

    Each row writes FOLDER/ROW.json: errors per epoch and seed, how far its gradient is from the exact one before and
    after, CPU time and provenance. The table sets the error after the last epoch beside what was published, and beside
    the row's yardstick seed by seed. With --minutes it goes in pieces: it ends with exit code 75 until the same command
    has nothing left to train.
    """
    one_process("reproduce field")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes is {minutes:g}; expected a number above 0, such as 9.")
    chosen = [row._replace(spec=row.spec.override(**settings), seeds=seeds or row.seeds) for row in _chosen(rows)]
    check_out(out)
    until = TimeLimit(minutes)
    with stopping():
        try:
            _train(chosen, seed, out, until, note, Several(watcher(quiet), until))
        except Stopped:
            if not until.over:
                raise
    if not quiet:
        _show(chosen, out)
    if until.over:
        typer.echo(f"{minutes:g} minutes are over and everything is saved. The same command continues.", err=True)
        raise typer.Exit(UNFINISHED)


def _chosen(names: str | None) -> list[FieldRow]:
    there = papers.field_rows()
    asked = list(there) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    strange = next((name for name in asked if name not in there), None)
    if strange is not None or not asked:
        raise ValueError(unknown("row", strange or "", there))
    return [there[name] for name in asked]


def _train(
    rows: Sequence[FieldRow], only: int | None, out: Path, until: TimeLimit, note: str | None, watch: Several
) -> None:
    """A run per row and seed, the first seed of every row first; or of one seed only."""
    for n in range(max(row.seeds for row in rows)) if only is None else (only,):
        for row in rows:
            if only is None and n >= row.seeds:
                continue
            if until.passed():
                until.over = True
                return
            folder = out / row.name / seed_folder(n)
            spec = row.spec.override(seed=row.spec.run.seed + n, estimators=(row.estimator,))
            began = time.process_time()
            try:
                begin_or_resume(spec, folder, watch=watch)
                finished = True
            except Stopped:
                finished = False
                raise
            finally:
                if is_run(folder):
                    _count(folder, time.process_time() - began)
                    if finished and "after" not in _checks(folder):
                        write_json(folder / CHECKS, {**_checks(folder), **examine(spec, folder)})
                    _publish(row, out, note)


def _checks(folder: Path) -> dict[str, Any]:
    path = folder / CHECKS
    return dict(read_json(path, "what was measured of the run")) if path.is_file() else {}


def _count(folder: Path, seconds: float) -> None:
    """Add to the CPU time of a run: training, evaluation and compiling; a finished run takes next to none."""
    before = _checks(folder)
    if "after" not in before:
        write_json(folder / CHECKS, {**before, "cpu_minutes": before.get("cpu_minutes", 0.0) + seconds / 60.0})


def _publish(row: FieldRow, out: Path, note: str | None) -> None:
    """The row's file as for CIFAR-10, with what was measured of each seed."""
    found = publish(row, out, note)  # type: ignore[arg-type]
    if found is not None:
        checks = {place.name: _checks(place) for place in sorted((out / row.name).glob(seed_folder("*")))}
        write_json(out / f"{row.name}.json", {**found, "checks": checks})


def _show(rows: Sequence[FieldRow], out: Path) -> None:
    found: dict[str, Mapping[str, Any]] = {
        name: read_json(path, "a row") for name in papers.field_rows() if (path := out / f"{name}.json").is_file()
    }
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in FIELD_HEADINGS:
        table.add_column(heading, justify="left" if heading == "row" else "right", no_wrap=heading == "row")
    for row in rows:
        table.add_row(*field_cells(row, found))
    console = new_console()
    console.print(table)
    console.print(f"A file per row: {out}/*.json", soft_wrap=True)
