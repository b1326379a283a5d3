"""eqprop reproduce: the paper's figures and Table 1, and CIFAR-10; all resumable at any point."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from eqprop import papers
from eqprop.cli import app, command
from eqprop.cli.common import Quiet, new_console, one_process, spread, stopping, watcher
from eqprop.cli.figures import figures
from eqprop.cli.options import with_settings
from eqprop.estimators.named import label
from eqprop.files import write_json
from eqprop.messages import unknown
from eqprop.papers import CifarRow
from eqprop.report.page import ReportFiles, write_report
from eqprop.report.runs import CIFAR_HEADINGS, Row, RunFolder, published_cells, read_run
from eqprop.run import bind
from eqprop.run.api import begin_or_resume
from eqprop.run.dataset import describe
from eqprop.run.distributed import rank
from eqprop.run.folder import is_run, read_json
from eqprop.run.log import cosines
from eqprop.run.loop import Stopped
from eqprop.run.metrics import (
    PublishedRows,
    Result,
    StoredTrial,
    draw,
    free_phases,
    mean,
    stored_trials,
    summarise_trials,
    trial_of,
)
from eqprop.run.session import Session
from eqprop.run.spec import Spec, split_estimators
from eqprop.run.watch import Progress, Several, Watch, counted

reproduce = typer.Typer(
    help="Reproduce the paper's figures and tables.",
    epilog="Examples:\n\neqprop reproduce figures --out figures\n\neqprop reproduce table1 --rows P-1h --out table1",
    no_args_is_help=True,
)
app.add_typer(reproduce, name="reproduce")
command(
    "figures",
    "eqprop reproduce figures --out figures",
    "eqprop reproduce figures --preset gdu-authors --out authors",
    of=reproduce,
)(figures)

MACHINE = ("data", "engine", "device", "threads")
"""Settings that every command of training takes."""


@command(
    "table1",
    "eqprop reproduce table1 --rows P-1h --trials 1 --epochs 3 --out table1",
    "eqprop reproduce table1 --preset tuned --device cuda --out table1",
    of=reproduce,
)
@with_settings("estimator", "trials", "epochs", "schedule", "seed", "samples", *MACHINE)
def table1(
    settings: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder for the runs, the table and the page.")] = None,
    check: Annotated[Path | None, typer.Option(help="Folder of published results; retrain one random trial.")] = None,
    rows: Annotated[str | None, typer.Option(help="EB-1h,P-1h, ...; all by default.")] = None,
    preset: Annotated[str | None, typer.Option(help="paper, authors or tuned; paper by default.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train Table 1 of the paper: five trials of every row with EP, then with BPTT, from the same weights. Resumable.

    With --check FOLDER, retrain one random trial of one published row and say whether its error lies within the
    published spread (exit code 1 if not); --seed selects the trial, from those of --rows, --preset and --estimator.
    """
    estimators = split_estimators(settings.pop("estimator", "ep,bptt"))
    if check is not None:
        one_process("reproduce table1 --check")
        among = TrialSelection(None if rows is None else rows.split(","), preset, estimators)
        options = {name: value for name, value in settings.items() if name in ("samples", *MACHINE)}
        _check(draw(among.trials(check), settings.get("seed")), out, options, quiet)
        return
    if out is None:
        raise ValueError("Nothing to do: expected --out FOLDER to train into, or --check FOLDER of published results.")
    options = {"trials": 5, **settings, "estimators": estimators}
    specs = [spec.override(**options) for spec in _rows(rows, preset or "paper")]
    _check_out(out)
    watch = watcher(quiet)
    with stopping():
        # Finish one estimator for all rows before the next: one full column early is worth more than half the rows.
        for part in estimators:
            for spec in specs:
                folder = out / spec.preset / _folder(spec, settings.get("schedule"))
                result = begin_or_resume(spec, folder, watch=watch, only=(part,), **settings)
                if rank() == 0:
                    write_json(folder.with_suffix(".json"), _published(result))
                    write_report(out, with_curves=False, examine=False)
    if rank() > 0:
        return
    written = write_report(out, examine=False)
    if not quiet:
        _show(out, written)


def _published(result: Result) -> dict[str, Any]:
    """The content of a row's file: the JSON of `train --json`, wall times, free phases and provenance."""
    run = read_run(result.folder)
    seconds = {estimator: round(run.seconds(estimator), 3) for estimator in result.summary["estimators"]}
    more = {"seconds_by_estimator": seconds, "free_phases": free_phases(run.lines)}
    return {**result.summary, "schedule": run.spec.phases.schedule, **more, "provenance": run.sessions}


class TrialSelection(NamedTuple):
    """Selects published trials."""

    rows: list[str] | None
    preset: str | None
    estimators: tuple[str, ...]

    def trials(self, folder: Path) -> list[StoredTrial]:
        found = stored_trials(folder, self.rows)
        wanted = [t for t in found if t.estimator in self.estimators and self.preset in (None, t.spec.preset)]
        if not wanted:
            there = sorted({f"{t.spec.name} {t.spec.preset} {t.estimator}" for t in found})
            asked = " ".join([self.preset or "any preset", " or ".join(self.estimators)])
            raise ValueError(f"No results for {asked}; published: {', '.join(there)}. Choose one of these.")
        return wanted


def _check(trial: StoredTrial, out: Path | None, settings: dict[str, Any], quiet: bool) -> None:
    """Retrain a published trial, in --out or in a temporary folder, and hold its error against the published spread."""
    drawn = trial.spec
    which = f"{drawn.name} ({drawn.preset}, {drawn.phases.schedule}), {trial.estimator}, seed {trial.seed}"
    if len(trial.errors) < 2:
        raise ValueError(
            f"{which} is the only finished seed of its row in {trial.path} ({trial.error:.2f} %), and one seed has no "
            "spread to lie within. Choose another of --rows, or publish two seeds or more."
        )
    spec = drawn.override(estimators=(trial.estimator,), trials=1, **settings)
    _check_data(trial, bind(spec, trains=False))
    epochs = counted(spec.optimizer.epochs, "epoch")
    typer.echo(f"{which}: published {trial.error:.2f} %, {epochs}, from {trial.path}")
    with TemporaryDirectory() as scratch, stopping():
        to = (out or Path(scratch)) / _folder(spec, spec.phases.schedule)
        result = begin_or_resume(spec, to, watch=watcher(quiet), **settings)
    error = result.test_error(trial.estimator)
    if error is None:
        raise ValueError(f"{which} diverged when retrained; the published test error is {trial.error:.2f} %.")
    spread = f"{mean(trial.errors):.2f} ± {trial.tolerance:.2f} %"
    if not trial.holds(error):
        typer.echo(f"No: {error:.2f} % now, outside the published {spread}.")
        raise typer.Exit(1)
    typer.echo(f"Yes: {error:.2f} % now, within the published {spread}.")


def _check_data(trial: StoredTrial, session: Session) -> None:
    """Raise unless the data and the number of test samples are those of the published trial."""
    now = describe(session.images)
    for name in ("sha256", "test_samples"):
        if trial.data.get(name) not in (None, now[name]):
            raise ValueError(
                f"{trial.path} was trained on other data: its {name} is {trial.data[name]}, now {now[name]} "
                f"({now['name']}). Give the published data with --data."
            )


CIFAR10 = PublishedRows("*.json", "small.json", "eqprop reproduce cifar10 --out")
UNFINISHED = 75
"""Exit code of a piece that ran out of --minutes: the same command continues (EX_TEMPFAIL)."""


@command(
    "cifar10",
    "eqprop reproduce cifar10 --rows small --seeds 1 --out cifar10",
    "eqprop reproduce cifar10 --check results/cifar10",
    of=reproduce,
)
@with_settings("epochs", "seed", "samples", *MACHINE)
def cifar10(
    settings: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder for the runs and a file per row.")] = None,
    check: Annotated[Path | None, typer.Option(help="Folder of published rows; retrain one seed.")] = None,
    rows: Annotated[str | None, typer.Option(help="fast,B, ...; by default small* on a CPU, else the others.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per row; as published by default, 1 or 3.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop and save after so many minutes.")] = None,
    note: Annotated[str | None, typer.Option(help="Remark on the machine, kept with the times.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train the published rows of CIFAR-10, the first seed of every row before the second. Resumable.

    Each row writes FOLDER/ROW.json: errors, seconds and precision per epoch and seed, with provenance. Seconds are the
    run's own: training and evaluation without compiling, summed over pieces. With --minutes a long training goes in
    pieces: it ends with exit code 75 until the same command has nothing left to train.

    With --check FOLDER, retrain one seed of `fast` (or of --rows; of `small` where `fast` is not published) and say
    whether its error lies within the published spread (exit code 1 if not).
    """
    one_process("reproduce cifar10")
    epochs, seed = settings.pop("epochs", None), settings.pop("seed", None)
    if check is not None:
        _check(draw(_trials_to_check(check, rows), seed), out, settings, quiet)
        return
    if out is None:
        raise ValueError("Nothing to do: expected --out FOLDER to train into, or --check FOLDER of published rows.")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes is {minutes:g}; expected a number above 0, such as 9.")
    device = settings.get("device", "cpu")
    chosen = [
        row._replace(spec=row.spec.override(epochs=epochs, **settings), seeds=seeds or row.seeds)
        for row in _cifar_rows(rows, device)
    ]
    _check_out(out)
    until = TimeLimit(minutes)
    with stopping():
        try:
            _train_rows(chosen, out, until, note, {"watch": Several(watcher(quiet), until), **settings})
        except Stopped:
            if not until.over:
                raise
        finally:
            found = [publish(row, out, note) for row in chosen]
    if not quiet:
        _show_rows(chosen, found, out)
    if until.over:
        typer.echo(f"{minutes:g} minutes are over and everything is saved. The same command continues.", err=True)
        raise typer.Exit(UNFINISHED)


class TimeLimit(Watch):
    """Stops a run, saved, once so many minutes have passed; None: never."""

    def __init__(self, minutes: float | None) -> None:
        self.end_at = None if minutes is None else time.monotonic() + 60.0 * minutes
        self.over = False

    def passed(self) -> bool:
        return self.end_at is not None and time.monotonic() >= self.end_at

    def progress(self, progress: Progress) -> None:
        """Stop as on SIGTERM: the loop then saves, in the middle of an epoch too."""
        if self.passed():
            self.over = True
            signal.raise_signal(signal.SIGTERM)


def _cifar_rows(names: str | None, device: str) -> list[CifarRow]:
    there = papers.cifar_rows()
    if names is None:
        return [row for row in there.values() if row.large == (device != "cpu")]
    known = {name.lower(): row for name, row in there.items()}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    strange = next((name for name in asked if name.lower() not in known), None)
    if strange is not None or not asked:
        raise ValueError(unknown("row", strange or "", there))
    return [known[name.lower()] for name in asked]


def _trials_to_check(folder: Path, rows: str | None) -> list[StoredTrial]:
    """Those of the rows asked for, else of `fast` if two of its seeds are published, else of the small net."""
    if rows is not None:
        return stored_trials(folder, [row.name for row in _cifar_rows(rows, "cpu")], CIFAR10)
    found = [trial for trial in stored_trials(folder, None, CIFAR10) if trial.path.stem == "fast"]
    return found if len(found) > 1 else stored_trials(folder, ["small"], CIFAR10)


def _seed(n: int | str) -> str:
    return f"seed-{n}"


def _train_rows(
    rows: Sequence[CifarRow], out: Path, until: TimeLimit, note: str | None, options: Mapping[str, Any]
) -> None:
    """A run per row and seed, so that seeds can be added later; the first seed of every row first."""
    for n in range(max(row.seeds for row in rows)):
        for row in rows:
            if n >= row.seeds:
                continue
            if until.passed():
                until.over = True
                return
            spec = row.spec.override(seed=row.spec.run.seed + n, estimators=(row.estimator,))
            begin_or_resume(spec, out / row.name / _seed(n), **options)
            publish(row, out, note)


def publish(row: CifarRow, out: Path, note: str | None = None) -> dict[str, Any] | None:
    """Write the row's file from its runs, finished or not; None if there is no run yet.

    Errors are those after all epochs, over the seeds that have them; while none has, after as many as all have.
    """
    path = out / f"{row.name}.json"
    runs = [run for place in (out / row.name).glob(_seed("*")) if is_run(place) and (run := read_run(place)).lines]
    runs.sort(key=lambda run: run.spec.run.seed)
    if not runs:
        return None
    trials = [_published_trial(run, row.estimator) for run in runs]
    epochs = runs[0].spec.optimizer.epochs
    counts = [epochs if trial["diverged"] else len(trial["test_error"]) for trial in trials]
    reached = epochs if epochs in counts else min(counts)
    cut = [
        {name: v[:reached] if isinstance(v, list) else v for name, v in trial.items()}
        for trial, count in zip(trials, counts, strict=True)
        if count >= reached
    ]
    first = runs[0]
    before = read_json(path, "the row published before").get("note") if path.is_file() else None
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
        **({"note": said} if (said := note or before) else {}),
    }
    write_json(path, found)
    return found


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


def _show_rows(rows: Sequence[CifarRow], found: Sequence[Mapping[str, Any] | None], out: Path) -> None:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in CIFAR_HEADINGS[:-1]:
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for row, one in zip(rows, found, strict=True):
        table.add_row(*published_cells(row, one)[:-1])
    console = new_console()
    console.print(table)
    console.print(f"A file per row: {out}/*.json. A page: eqprop report {out}", soft_wrap=True)


def _rows(rows: str | None, preset: str) -> list[Spec]:
    """Rows of Table 1; all that have the preset by default."""
    there = [spec for name, spec in papers.specs(preset).items() if name in papers.of_paper()]
    if rows is None:
        return there
    return [papers.find(name.strip(), preset) for name in rows.split(",") if name.strip()]


def _folder(spec: Spec, schedule: str | None) -> str:
    return spec.name + ("-alternating" if schedule == "alternating" else "")


def _check_out(out: Path) -> None:
    """Accept only a new folder, or one written by this command."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; expected a folder. Choose another --out.")
    if not out.exists() or not any(out.iterdir()):
        return
    if not any(True for _ in out.glob("*/*/experiment.json")) and not (out / "figures").is_dir():
        listing = ", ".join(sorted(p.name for p in out.iterdir())[:5])
        raise FileExistsError(f"{out} holds something else ({listing}). Choose a new or empty folder with --out.")


def _show(out: Path, written: ReportFiles) -> None:
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
            f"{row.test.epoch if row.test else 0}/{row.run.spec.optimizer.epochs}",
            row.verdict if row.verdict in ("yes", "no") else "--",
        )
    return table


import eqprop.cli.field  # noqa: E402, F401 - last, as its command is one of `reproduce` and uses what stands above
