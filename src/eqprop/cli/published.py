"""Published results: a folder that holds them or may, and one of their trials, trained again to check them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from eqprop.cli.common import stopping, watcher
from eqprop.run import Session, bind
from eqprop.run.api import begin_or_resume
from eqprop.run.dataset import describe
from eqprop.run.folder import check_free
from eqprop.run.metrics import StoredTrial, mean
from eqprop.run.spec import Spec
from eqprop.run.watch import counted


def check_again(trial: StoredTrial, out: Path | None, settings: dict[str, Any], quiet: bool) -> None:
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
        to = (out or Path(scratch)) / run_name(spec, spec.phases.schedule)
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


def check_folder(out: Path) -> None:
    """Accept only a new folder, or one written by this command."""
    if not (out / "figures").is_dir() and not any(True for _ in out.glob("*/*/experiment.json")):
        check_free(out)


def run_name(spec: Spec, schedule: str | None) -> str:
    """The folder of a row's run."""
    return spec.name + ("-alternating" if schedule == "alternating" else "")
