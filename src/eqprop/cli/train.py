"""eqprop train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eqprop.cli import app
from eqprop.cli.common import (
    Data,
    Device,
    Engine,
    Init,
    Json,
    Model,
    Preset,
    Quiet,
    RecordName,
    Threads,
    check_json,
    factory,
    give_result,
    learning_rates,
    named_values,
    stopping,
    watcher,
)
from eqprop.experiments.experiment import ESTIMATORS
from eqprop.training import train

# The options of `train` that go to the record and to the settings under their own names.
RECORD_OPTIONS = (
    *("preset", "T", "K", "beta", "epochs", "batch", "decay", "init", "output_bias", "output_scale", "seed", "cost"),
    *("schedule", "stop", "estimator", "points", "nudge", "start", "initialiser_rate", "evaluation_T", "optimizer"),
)
SETTINGS_OPTIONS = (
    *("trials", "engine", "device", "threads", "validation", "samples"),
    *("train_error_every", "checkpoint_every", "stacked", "states"),
)


@app.command("train")
def train_record(
    record: RecordName,
    method: Annotated[str, typer.Option(help="ep, bptt or rbp, or several: ep,bptt.")] = "ep",
    trials: Annotated[int, typer.Option(help="Networks to train, each from its own seed.")] = 1,
    preset: Preset = "paper",
    out: Annotated[Path | None, typer.Option(help="The run folder. [default: runs/NAME-DATE-TIME]")] = None,
    T: Annotated[int | None, typer.Option("--T", help="Steps of the free phase.")] = None,
    K: Annotated[int | None, typer.Option("--K", help="Steps of the second phase.")] = None,
    evaluation_T: Annotated[int | None, typer.Option("--evaluation-T", help="The same in tests. [default: T]")] = None,
    beta: Annotated[float | None, typer.Option(help="Strength of the nudge.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in a mini-batch.")] = None,
    lr: Annotated[list[str] | None, typer.Option(help="W01=0.04, repeatable; or one rate for all.")] = None,
    decay: Annotated[str | None, typer.Option(help="Rates: none, or cosine (to nothing over the epochs).")] = None,
    init: Init = None,
    output_bias: Annotated[float | None, typer.Option(help="What the outputs' biases begin with.")] = None,
    output_scale: Annotated[float | None, typer.Option(help="A factor on the outputs' first weights.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of trial 0; trial r takes seed + r.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Free phase: synchronous or alternating.")] = None,
    stop: Annotated[str | None, typer.Option(help="Free phase: never, or settled (same bits, sooner).")] = None,
    estimator: Annotated[str | None, typer.Option(help=f"The form of EP: {', '.join(ESTIMATORS)}.")] = None,
    points: Annotated[int | None, typer.Option(help="Of the circle of holomorphic EP.")] = None,
    nudge: Annotated[str | None, typer.Option(help="outside sigma, as in the paper, or inside.")] = None,
    cost: Annotated[str | None, typer.Option(help="squared-error, or cross-entropy of a softmax readout.")] = None,
    start: Annotated[str | None, typer.Option(help="Free phase from zero, persistent or initialised states.")] = None,
    initialiser_rate: Annotated[float | None, typer.Option(help="Of an initialiser; below 2.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Any of torch.optim.")] = None,
    optimizer_option: Annotated[list[str] | None, typer.Option(help="momentum=0.9, repeatable.")] = None,
    engine: Engine = None,
    device: Device = None,
    threads: Threads = None,
    data: Data = None,
    validation: Annotated[int | None, typer.Option(help="Hold out N training samples; test on them.")] = None,
    samples: Annotated[int | None, typer.Option(help="Train on the first N samples only.")] = None,
    train_error_every: Annotated[int | None, typer.Option(help="Measure the train error every N epochs.")] = None,
    checkpoint_every: Annotated[float | None, typer.Option(help="Seconds between checkpoints in an epoch.")] = None,
    stacked: Annotated[bool | None, typer.Option(help="Trials side by side. [default: where faster]")] = None,
    states: Annotated[str | None, typer.Option(help="Keep persistent states on the device, or on the cpu.")] = None,
    model: Model = None,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """Train a record, or your own experiment, in a run folder. Ctrl-C saves; eqprop resume goes on."""
    given = locals()
    check_json(as_json)
    options = {name: given[name] for name in (*RECORD_OPTIONS, *SETTINGS_OPTIONS)}
    options |= {
        "methods": method,
        "learning_rates": learning_rates(lr),
        "optimizer_options": named_values(optimizer_option),
    }
    with stopping():
        result = train(record, out, data=data, model=factory(model), watch=watcher(quiet), **options)
    give_result(result, as_json, quiet)
