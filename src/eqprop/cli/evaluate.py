"""eqprop evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from eqprop.cli import app
from eqprop.cli.common import (
    Data,
    Device,
    Engine,
    Json,
    Model,
    check_json,
    factory,
    give_json,
    new_console,
)
from eqprop.experiments.architecture import own_code
from eqprop.run import evaluate


@app.command("evaluate")
def evaluate_run(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Data = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    precision: Annotated[str | None, typer.Option(help="Of products, in place of the run's.")] = None,
    as_json: Json = None,
) -> None:
    """Measure the test error of every trial of a run again, from its weights."""
    check_json(as_json)
    with own_code(model):
        found = evaluate(
            folder, data=data, model=factory(model), device=device, engine=engine or "auto", precision=precision
        )
    give_json(found, as_json)
    if as_json == "-":
        return
    table = Table(title=str(folder))
    top5 = any("test_error_top5" in trial for trials in found.values() for trial in trials)
    for heading in ("estimator", "seed", "epochs", "test error", *(["top-5 error"] if top5 else [])):
        table.add_column(heading, justify="right")
    for estimator, trials in found.items():
        for trial in trials:
            error = "diverged" if trial["diverged"] else f"{trial['test_error']:.2f} %"
            beyond = [f"{trial['test_error_top5']:.2f} %" if "test_error_top5" in trial else "--"] if top5 else []
            table.add_row(estimator, str(trial["seed"]), str(trial["epoch"]), error, *beyond)
    new_console().print(table)
