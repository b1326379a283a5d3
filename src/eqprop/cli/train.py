"""eqprop list, train, resume, evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eqprop.cli import app
from eqprop.cli.options import (
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
    give_json,
    learning_rates,
    named_values,
    show_result,
    stopping,
    watcher,
)
from eqprop.experiments.architecture import LayeredNet
from eqprop.experiments.beyond_records import LITERATURE
from eqprop.experiments.plain import find_record, to_plain
from eqprop.experiments.record import ESTIMATORS, Record
from eqprop.experiments.training_records import PRESETS, RECORDS, printed_record
from eqprop.training import Result, evaluate, resume, train

# The options of `train` that go to the record and to the settings under their own names.
RECORD_OPTIONS = (
    *("preset", "T", "K", "beta", "epochs", "batch", "decay", "init", "output_bias", "output_scale", "seed", "cost"),
    *("schedule", "stop", "estimator", "points", "nudge", "start", "initialiser_rate", "evaluation_T", "optimizer"),
)
SETTINGS_OPTIONS = (
    *("trials", "engine", "device", "threads", "validation", "samples"),
    *("train_error_every", "checkpoint_every", "stacked", "states"),
)


@app.command("list")
def list_records(
    name: Annotated[str | None, typer.Argument(help="One record, in full.")] = None,
    preset: Preset = "paper",
    as_json: Json = None,
) -> None:
    """The records: what each is, its settings, what the paper reports."""
    check_json(as_json)
    chosen = [find_record(name, preset)] if name else list(_preset(preset).values())
    if as_json is not None:
        give_json({record.name: to_plain(record) for record in chosen}, as_json)
        if as_json == "-":
            return
    console = Console()
    console.print(_table(chosen, preset))
    if name:
        console.print(json.dumps(to_plain(chosen[0]), indent=2), highlight=False)
    _show_changes(console, [record.name for record in chosen])
    if not name:
        _show_literature(console)


def _show_literature(console: Console) -> None:
    for row in LITERATURE:
        if row.record is None:
            steps = f"T {row.T}" + ("" if row.K is None else f"  K {row.K}")
            said = f"{row.source}, {row.errors} %, {steps}  {row.epochs} epochs"
            console.print(f"In the paper's table as well, not a record: {said}", highlight=False, soft_wrap=True)


def _show_changes(console: Console, names: list[str]) -> None:
    for other in PRESETS[1:]:
        for record in RECORDS[other].values():
            printed = printed_record(record)
            if record.name in names and printed is not None:
                changes = ", ".join(map(str, record.changes(printed)))
                console.print(f"--preset {other} {record.name}: {changes}", highlight=False, soft_wrap=True)


def _preset(preset: str) -> dict[str, Record]:
    if preset not in RECORDS:
        find_record("P-1h", preset)
    return RECORDS[preset]


def _table(records: list[Record], preset: str) -> Table:
    """Three lines a record, so that it fits a terminal of 80 columns."""
    table = Table(title=f"Records, preset {preset}", show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("network, steps, learning rates")
    table.add_column("paper, %: test (train)", no_wrap=True)
    for r in records:
        net = r.architecture
        eps = f"  ε {net.eps}" if isinstance(net, LayeredNet) and net.eps else ""
        reported = [f"{method.upper():4} {x}" for method, x in r.reported.items()]
        what = [
            f"{net}, {getattr(net, 'activation', 'own')}, {r.init}",
            f"T {r.T}  K {r.K}  β {r.beta}{eps}  {r.epochs} epochs",
            "  ".join(f"{name} {rate}" for name, rate in r.learning_rates.items()),
            *([", ".join(special)] if (special := _special(r)) else []),
        ]
        table.add_row(_broken(r.name), "\n".join(what), "\n".join(reported) or "--")
    return table


def _special(record: Record) -> list[str]:
    """What a record does otherwise than the paper's: how it begins, how it nudges."""
    start = [] if record.start == "zero" else [f"{record.start} start"]
    return start + ([] if record.estimator == "one-sided" else [record.estimator])


def _broken(name: str) -> str:
    """A long name on two lines, broken behind a hyphen, so that the other columns keep their width."""
    if len(name) <= 14 or "-" not in name:
        return name
    cut = min((i + 1 for i, c in enumerate(name) if c == "-"), key=lambda i: abs(i - len(name) / 2))
    return f"{name[:cut]}\n{name[cut:]}"


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
    _give(result, as_json, quiet)


def _give(result: Result, as_json: str | None, quiet: bool) -> None:
    give_json(result.summary, as_json)
    if as_json != "-" and not quiet:
        show_result(result.summary, result.folder)


@app.command("resume")
def resume_run(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Data = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """Go on with a run where it stopped, with its own settings."""
    check_json(as_json)
    with stopping():
        result = resume(
            folder,
            data=data,
            model=factory(model),
            watch=watcher(quiet),
            engine=engine,
            device=device,
            threads=threads,
        )
    _give(result, as_json, quiet)


@app.command("evaluate")
def evaluate_run(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Data = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    as_json: Json = None,
) -> None:
    """The test error of every trial of a run, measured again from its weights."""
    check_json(as_json)
    found = evaluate(folder, data=data, model=factory(model), device=device, engine=engine or "auto")
    give_json(found, as_json)
    if as_json == "-":
        return
    table = Table(title=str(folder))
    for heading in ("method", "seed", "epochs", "test error"):
        table.add_column(heading, justify="right")
    for method, trials in found.items():
        for trial in trials:
            error = "diverged" if trial["diverged"] else f"{trial['test_error']:.2f} %"
            table.add_row(method, str(trial["seed"]), str(trial["epoch"]), error)
    Console().print(table)
