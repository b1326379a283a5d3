"""eqprop train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eqprop.cli import app
from eqprop.cli.common import (
    Data,
    ExperimentName,
    Json,
    Logger,
    Model,
    Preset,
    Quiet,
    check_json,
    factory,
    give_result,
    learning_rates,
    named_values,
    stopping,
    watcher,
    with_options,
)
from eqprop.experiments.architecture import own_code
from eqprop.experiments.experiment import ESTIMATORS, Experiment
from eqprop.training import train
from eqprop.training.plan import Settings


@app.command("train")
@with_options(Experiment, Settings)
def train_experiment(
    experiment: ExperimentName,
    estimator: Annotated[
        str | None, typer.Option(help=f"{', '.join(ESTIMATORS)}; or several: ep,bptt. [default: the experiment's]")
    ] = None,
    preset: Preset = "paper",
    out: Annotated[Path | None, typer.Option(help="The run folder. [default: runs/NAME-DATE-TIME]")] = None,
    lr: Annotated[list[str] | None, typer.Option(help="W01=0.04 (repeatable), or one rate for all.")] = None,
    optimizer_option: Annotated[list[str] | None, typer.Option(help="momentum=0.9 (repeatable).")] = None,
    data: Data = None,
    model: Model = None,
    logger: Logger = None,
    quiet: Quiet = False,
    as_json: Json = None,
    method: Annotated[
        str | None, typer.Option(hidden=True, help="Version 0.1.0's name for --estimator: ep, bptt, rbp.")
    ] = None,
    **options: Any,
) -> None:
    """Train an experiment, or your own, in a run folder. Ctrl-C saves; eqprop resume continues."""
    check_json(as_json)
    options |= {
        "preset": preset,
        "estimators": estimator,
        "methods": method,
        "learning_rates": learning_rates(lr),
        "optimizer_options": named_values(optimizer_option),
    }
    with stopping(), own_code(model or experiment):
        result = train(experiment, out, data=data, model=factory(model), watch=watcher(quiet, logger), **options)
    give_result(result, as_json, quiet)
