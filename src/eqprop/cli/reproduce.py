"""eqprop reproduce: the paper's figures and Table 1, and CIFAR-10; all resumable at any point."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from eqprop import papers
from eqprop.cli import app, command
from eqprop.cli.common import Quiet, new_console, one_process, results_table, stopping, watcher
from eqprop.cli.figures import figures
from eqprop.cli.options import with_settings
from eqprop.cli.published import check_again, check_folder, run_name
from eqprop.cli.rows import cifar10, field
from eqprop.files import write_json
from eqprop.report.page import ReportFiles, write_report
from eqprop.report.runs import read_run
from eqprop.run.api import begin_or_resume
from eqprop.run.distributed import rank
from eqprop.run.metrics import (
    Result,
    StoredTrial,
    free_phases,
    stored_trials,
)
from eqprop.run.spec import Spec, split_estimators

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
command(
    "cifar10",
    "eqprop reproduce cifar10 --rows small --seeds 1 --out cifar10",
    "eqprop reproduce cifar10 --check results/cifar10",
    of=reproduce,
)(cifar10)
command(
    "field",
    "eqprop reproduce field --minutes 30 --out field",
    "eqprop reproduce field --rows pc-2h --seeds 1 --out field",
    of=reproduce,
)(field)

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
        among = _published_trials(check, rows, preset, estimators)
        options = {name: value for name, value in settings.items() if name in ("samples", *MACHINE)}
        check_again(Random(settings.get("seed")).choice(among), out, options, quiet)
        return
    if out is None:
        raise ValueError("Nothing to do: expected --out FOLDER to train into, or --check FOLDER of published results.")
    options = {"trials": 5, **settings, "estimators": estimators}
    specs = [spec.override(**options) for spec in _rows(rows, preset or "paper")]
    check_folder(out)
    watch = watcher(quiet)
    with stopping():
        # Finish one estimator for all rows before the next: one full column early is worth more than half the rows.
        for part in estimators:
            for spec in specs:
                folder = out / spec.preset / run_name(spec, settings.get("schedule"))
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


def _published_trials(
    folder: Path, rows: str | None, preset: str | None, estimators: tuple[str, ...]
) -> list[StoredTrial]:
    """The trials of published rows, by these estimators and of this preset."""
    found = stored_trials(folder, None if rows is None else rows.split(","))
    wanted = [t for t in found if t.estimator in estimators and preset in (None, t.spec.preset)]
    if not wanted:
        there = sorted({f"{t.spec.name} {t.spec.preset} {t.estimator}" for t in found})
        asked = " ".join([preset or "any preset", " or ".join(estimators)])
        raise ValueError(f"No results for {asked}; published: {', '.join(there)}. Choose one of these.")
    return wanted


def _rows(rows: str | None, preset: str) -> list[Spec]:
    """Rows of Table 1; all that have the preset by default."""
    there = [spec for name, spec in papers.specs(preset).items() if name in papers.of_paper()]
    if rows is None:
        return there
    return [papers.find(name.strip(), preset) for name in rows.split(",") if name.strip()]


def _show(out: Path, written: ReportFiles) -> None:
    from eqprop.report.runs import collect, rows

    console = new_console()
    console.print(results_table(rows(collect(out).runs)))
    console.print(f"Page: {written.page}", soft_wrap=True)
    console.print(f"Table: {written.csv}, {written.latex}. Curves: {written.curves}", soft_wrap=True)
