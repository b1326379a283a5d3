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
from eqprop.experiments.paper import PAPER, PRESETS, caution, named_experiment
from eqprop.run import train
from eqprop.run.plan import Settings

GROUPS = {
    "What to train": ("estimator", "preset", "model"),
    "Phases": (),
    "Optimizer": ("lr", "optimizer_option"),
    "Data": ("data", "augment", "normalise"),
    "Run": ("out", "logger", "quiet", "as_json"),
}
"""The groups of `eqprop train --help`, and the options in each that are not fields of an experiment or of settings."""


@app.command("train")
@with_options(Experiment, Settings, groups=GROUPS)
def train_experiment(
    experiment: ExperimentName,
    estimator: Annotated[
        str | None, typer.Option(help=f"{', '.join(ESTIMATORS)}; or several: ep,bptt. [default: the experiment's]")
    ] = None,
    preset: Preset = "paper",
    out: Annotated[Path | None, typer.Option(help="The run folder. [default: runs/NAME-DATE-TIME]")] = None,
    lr: Annotated[
        list[str] | None, typer.Option(metavar="NAME=RATE", help="W01=0.04 (repeatable), or one rate for all.")
    ] = None,
    optimizer_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="momentum=0.9 (repeatable).")
    ] = None,
    augment: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="flip=true, crop=4, ... (repeatable).")
    ] = None,
    normalise: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="mean=[0.5], std=[0.2], scale=3 (repeatable).")
    ] = None,
    data: Data = None,
    model: Model = None,
    logger: Logger = None,
    quiet: Quiet = False,
    as_json: Json = None,
    **options: Any,
) -> None:
    """Train an experiment, or your own, in a run folder. Ctrl-C saves; eqprop resume continues."""
    check_json(as_json)
    options |= {
        "preset": preset,
        "estimators": estimator,
        "learning_rates": learning_rates(lr),
        "optimizer_options": named_values(optimizer_option),
        "augmentation": named_values(augment, "--augment"),
        "normalisation": named_values(normalise, "--normalise"),
    }
    if model is None and not quiet:
        _warn(experiment, preset, estimator)
    with stopping(), own_code(model or experiment):
        result = train(experiment, out, data=data, model=factory(model), watch=watcher(quiet, logger), **options)
    give_result(result, as_json, quiet)


def _warn(name: str, preset: str, estimators: str | None) -> None:
    """Say before a long training which cells of the paper's table do not come out as printed."""
    if name.lower() in (known.lower() for known in PAPER) and preset in PRESETS:
        chosen = named_experiment(name, preset)
        for estimator in (estimators or chosen.estimator).split(","):
            if known := caution(chosen, estimator.strip()):
                typer.echo(known, err=True)
