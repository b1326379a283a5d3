"""eqprop resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eqprop.cli import app
from eqprop.cli.common import (
    Data,
    Device,
    Engine,
    Json,
    Logger,
    Model,
    Quiet,
    Threads,
    check_json,
    factory,
    give_result,
    stopping,
    watcher,
)
from eqprop.experiments.architecture import own_code
from eqprop.run import resume


@app.command("resume")
def resume_run(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Data = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    threads: Threads = None,
    precision: Annotated[
        str | None, typer.Option(help="Of products in the epochs to come: float32, tf32, float16 or bfloat16.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Train until there are so many in all: as if they had been asked for at first.")
    ] = None,
    logger: Logger = None,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """Continue a run where it stopped, with its own settings."""
    check_json(as_json)
    with stopping(), own_code(model):
        result = resume(
            folder,
            data=data,
            model=factory(model),
            watch=watcher(quiet, logger),
            engine=engine,
            device=device,
            threads=threads,
            precision=precision,
            epochs=epochs,
        )
    give_result(result, as_json, quiet)
