"""eqprop reproduce cifar10 and field: published rows, a run per row and seed, in pieces; a file per row."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from eqprop import papers
from eqprop.cli.common import Quiet, new_console, one_process, stopping, watcher
from eqprop.cli.options import with_settings
from eqprop.cli.published import check_again, check_folder
from eqprop.files import write_json
from eqprop.messages import unknown
from eqprop.papers import PublishedRow
from eqprop.report.field import FIELD_HEADINGS, field_cells
from eqprop.report.runs import CIFAR_HEADINGS, RunFolder, published_cells, read_run
from eqprop.run.api import begin_or_resume
from eqprop.run.field import examine
from eqprop.run.folder import is_run, read_json
from eqprop.run.log import cosines
from eqprop.run.loop import Stopped
from eqprop.run.metrics import PublishedRows, StoredTrial, free_phases, stored_trials, summarise_trials, trial_of
from eqprop.run.watch import Progress, Several, Watch

UNFINISHED = 75
"""Exit code of a piece that ran out of --minutes: the same command continues (EX_TEMPFAIL)."""
CHECKS = "field.json"
"""In a run's folder: what was measured of it, and the CPU time of its pieces."""

Seeds = Annotated[int | None, typer.Option(min=1, help="Seeds per row; as published by default.")]
Minutes = Annotated[float | None, typer.Option(help="Stop and save after so many minutes.")]
Note = Annotated[str | None, typer.Option(help="Remark on the machine, kept with the times.")]


@with_settings("epochs", "seed", "samples", "data", "engine", "device", "threads")
def cifar10(
    settings: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder for the runs and a file per row.")] = None,
    check: Annotated[Path | None, typer.Option(help="Folder of published rows; retrain one seed.")] = None,
    rows: Annotated[str | None, typer.Option(help="fast,B, ...; by default small* on a CPU, else the others.")] = None,
    seeds: Seeds = None,
    minutes: Minutes = None,
    note: Note = None,
    quiet: Quiet = False,
) -> None:
    """Train the published rows of CIFAR-10, the first seed of every row before the second. Resumable.

    Each row writes FOLDER/ROW.json: errors, seconds and precision per epoch and seed, with provenance. With --minutes a
    long training goes in pieces: it ends with exit code 75 until the same command has nothing left to train.

    With --check FOLDER, retrain one seed of `fast` (or of --rows; of `small` where `fast` is not published) and say
    whether its error lies within the published spread (exit code 1 if not).
    """
    one_process("reproduce cifar10")
    epochs, seed = settings.pop("epochs", None), settings.pop("seed", None)
    there = papers.cifar_rows()
    if check is not None:
        names = None if rows is None else [row.name for row in _chosen(rows, there)]
        check_again(Random(seed).choice(_trials_to_check(check, names)), out, settings, quiet)
        return
    if out is None:
        raise ValueError("Nothing to do: expected --out FOLDER to train into, or --check FOLDER of published rows.")
    large = settings.get("device", "cpu") != "cpu"
    usual = [row for row in there.values() if row.name.startswith("small") != large]
    chosen = usual if rows is None else _chosen(rows, there)
    given = _with(chosen, {"epochs": epochs, **settings}, seeds)
    over = train_rows(RowTraining(given, out, minutes, note, quiet, options=settings))
    if not quiet:
        _show(CIFAR_HEADINGS[:-1], [published_cells(row, _read_row(row, out))[:-1] for row in given], out)
    _say_whether(over, minutes)


@with_settings("epochs", "samples", "rates", "validation", "data", "engine", "device", "threads")
def field(
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder for the runs and a file per row.")],
    rows: Annotated[str | None, typer.Option(help="pc-2h,untied-dyadic, ...; by default all.")] = None,
    seeds: Seeds = None,
    seed: Annotated[int | None, typer.Option(min=0, help="This seed only.")] = None,
    minutes: Minutes = None,
    note: Note = None,
    quiet: Quiet = False,
) -> None:
    """Train the learning rules of the field, the first seed of every row before the second. Resumable.

    Each row writes FOLDER/ROW.json: errors per epoch and seed, how far its gradient is from the exact one before and
    after, CPU time and provenance. The table sets the error after the last epoch beside what was published, and beside
    the row's yardstick seed by seed. With --minutes it goes in pieces: it ends with exit code 75 until the same command
    has nothing left to train.
    """
    one_process("reproduce field")
    there = papers.field_rows()
    given = _with(_chosen(rows, there) if rows is not None else there.values(), settings, seeds)
    over = train_rows(RowTraining(given, out, minutes, note, quiet, only=seed, measures=True))
    if not quiet:
        found = {row.name: content for row in there.values() if (content := _read_row(row, out)) is not None}
        _show(FIELD_HEADINGS, [field_cells(row, found) for row in given], out)
    _say_whether(over, minutes)


@dataclass(frozen=True)
class RowTraining:
    """What both commands do: train rows, seed by seed, and write a file for each.

    only        train this seed only
    options     data and machine, as `begin_or_resume` takes them
    measures    whether gradients are examined before and after, and CPU time is counted
    """

    rows: Sequence[PublishedRow]
    out: Path
    minutes: float | None
    note: str | None
    quiet: bool
    only: int | None = None
    options: Mapping[str, Any] | None = None
    measures: bool = False


class TimeLimit(Watch):
    """Stops a run, saved, once so many minutes have passed; None: never."""

    def __init__(self, minutes: float | None) -> None:
        if minutes is not None and not minutes > 0:
            raise ValueError(f"--minutes is {minutes:g}; expected a number above 0, such as 9.")
        self.end_at = None if minutes is None else time.monotonic() + 60.0 * minutes
        self.over = False

    def passed(self) -> bool:
        self.over = self.end_at is not None and time.monotonic() >= self.end_at
        return self.over

    def progress(self, progress: Progress) -> None:
        """Stop as on SIGTERM: the loop then saves, in the middle of an epoch too."""
        if self.passed():
            signal.raise_signal(signal.SIGTERM)


def train_rows(job: RowTraining) -> bool:
    """Train what is not trained yet, the first seed of every row first. True if the time was over before the end."""
    check_folder(job.out)
    until = TimeLimit(job.minutes)
    watch = Several(watcher(job.quiet), until)
    seeds = range(max(row.seeds for row in job.rows)) if job.only is None else (job.only,)
    work = [(row, n) for n in seeds for row in job.rows if job.only is not None or n < row.seeds]
    with stopping():
        try:
            for row, n in work:
                if until.passed():
                    break
                _train(job, row, n, watch)
        except Stopped:
            if not until.over:
                raise
    return until.over


def _train(job: RowTraining, row: PublishedRow, n: int, watch: Watch) -> None:
    """One seed of a row, or what is left of it; then its file is written anew."""
    folder = job.out / row.name / _seed(n)
    spec = row.spec.override(seed=row.spec.run.seed + n, estimators=(row.estimator,))
    began = time.process_time()
    try:
        begin_or_resume(spec, folder, watch=watch, **(job.options or {}))
        if job.measures and "after" not in _checks(folder):
            _count(folder, time.process_time() - began)
            write_json(folder / CHECKS, {**_checks(folder), **examine(spec, folder)})
    except Stopped:
        if job.measures and is_run(folder):
            _count(folder, time.process_time() - began)
        raise
    finally:
        publish(row, job.out, job.note, job.measures)


def _checks(folder: Path) -> dict[str, Any]:
    path = folder / CHECKS
    return dict(read_json(path, "what was measured of the run")) if path.is_file() else {}


def _count(folder: Path, seconds: float) -> None:
    """Add to the CPU time of a run: training, evaluation and compiling."""
    before = _checks(folder)
    write_json(folder / CHECKS, {**before, "cpu_minutes": before.get("cpu_minutes", 0.0) + seconds / 60.0})


def _with(rows: Iterable[PublishedRow], settings: Mapping[str, Any], seeds: int | None) -> list[PublishedRow]:
    """The rows with other settings, and with so many seeds each."""
    return [row._replace(spec=row.spec.override(**settings), seeds=seeds or row.seeds) for row in rows]


def _chosen(names: str, there: Mapping[str, PublishedRow]) -> list[PublishedRow]:
    known = {name.lower(): row for name, row in there.items()}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    strange = next((name for name in asked if name.lower() not in known), None)
    if strange is not None or not asked:
        raise ValueError(unknown("row", strange or "", there))
    return [known[name.lower()] for name in asked]


CIFAR10 = PublishedRows("*.json", "small.json", "eqprop reproduce cifar10 --out")


def _trials_to_check(folder: Path, rows: list[str] | None) -> list[StoredTrial]:
    """Those of the rows asked for, else of `fast` if two of its seeds are published, else of the small net."""
    found = stored_trials(folder, rows, CIFAR10)
    fast = [trial for trial in found if trial.path.stem == "fast"]
    if rows is not None or len(fast) > 1:
        return fast if rows is None else found
    return stored_trials(folder, ["small"], CIFAR10)


def _seed(n: int | str) -> str:
    return f"seed-{n}"


def publish(row: PublishedRow, out: Path, note: str | None = None, measures: bool = False) -> None:
    """Write the row's file from its runs, finished or not; none if there is no run yet.

    Errors are those after all epochs, over the seeds that have them; while none has, after as many as all have.
    """
    runs = [run for place in (out / row.name).glob(_seed("*")) if is_run(place) and (run := read_run(place)).lines]
    runs.sort(key=lambda run: run.spec.run.seed)
    if not runs:
        return
    trials = [_published_trial(run, row.estimator) for run in runs]
    epochs = runs[0].spec.optimizer.epochs
    counts = [epochs if trial["diverged"] else len(trial["test_error"]) for trial in trials]
    reached = epochs if epochs in counts else min(counts)
    cut = [
        {name: v[:reached] if isinstance(v, list) else v for name, v in trial.items()}
        for trial, count in zip(trials, counts, strict=True)
        if count >= reached
    ]
    first, before = runs[0], _read_row(row, out) or {}
    found = {
        "row": row.name,
        "name": first.spec.name,
        "preset": first.spec.preset,
        "model": first.model,
        "experiment": first.spec.override(seed=row.spec.run.seed).to_dict(),
        "changes_from_paper": first.described.content.get("changes_from_paper"),
        "data": {key: value for key, value in first.described.data.items() if key != "directory"},
        "settings": {name: getattr(first.spec.data, name) for name in ("samples", "test_samples", "validation")},
        "device": first.spec.run.device,
        "epochs": epochs,
        "epochs_reached": reached,
        "estimators": {row.estimator: {**summarise_trials(cut), "trials": trials}},
        "provenance": [{"seed": run.spec.run.seed, **_without_paths(one)} for run in runs for one in run.sessions],
        **({"note": said} if (said := note or before.get("note")) else {}),
    }
    if measures:
        places = sorted((out / row.name).glob(_seed("*")))
        found["checks"] = {place.name: _checks(place) for place in places}
    write_json(_row_file(row, out), found)


def _row_file(row: PublishedRow, out: Path) -> Path:
    return out / f"{row.name}.json"


def _read_row(row: PublishedRow, out: Path) -> dict[str, Any] | None:
    """The row as it was published; None if it was not."""
    path = _row_file(row, out)
    return read_json(path, "a published row") if path.is_file() else None


def _published_trial(run: RunFolder, estimator: str) -> dict[str, Any]:
    """A seed's errors per epoch, with its seconds, how its free phases ended, and the guard's cosines with float32."""
    lines = [line for line in run.lines if line["diverged"] is None]
    (free,) = free_phases(run.lines).get(estimator) or [{}]
    guard = [found for line in lines if (found := cosines(line, "with_float32"))]
    return {
        **trial_of(run.lines, run.spec.run.seed, run.spec.data.top5),
        "seconds": [round(line["seconds"], 3) for line in lines],
        **{name: free[name] for name in ("residual_mean", "unsettled") if name in free},
        **({"cosines_with_float32": guard} if guard else {}),
    }


def _without_paths(session: Mapping[str, Any]) -> dict[str, Any]:
    """Strip local paths."""
    made = session["provenance"]
    return {**session, "provenance": {**made, "command": re.sub(r"\S*/", "", made["command"])}}


def _show(headings: Sequence[str], rows: Iterable[Sequence[str]], out: Path) -> None:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "row" else "right", no_wrap=heading == "row")
    for cells in rows:
        table.add_row(*cells)
    console = new_console()
    console.print(table)
    console.print(f"A file per row: {out}/*.json. A page: eqprop report {out}", soft_wrap=True)


def _say_whether(over: bool, minutes: float | None) -> None:
    """End with the exit code of a piece, if it is one."""
    if over:
        typer.echo(f"{minutes:g} minutes are over and everything is saved. The same command continues.", err=True)
        raise typer.Exit(UNFINISHED)
