"""eqprop evaluate."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from eqprop.cli import command
from eqprop.cli.common import Folder, Json, check_json, give_json, new_console
from eqprop.cli.options import factory, with_settings
from eqprop.run import evaluate
from eqprop.run.own import own_code


@command("evaluate", "eqprop evaluate runs/p1h", "eqprop evaluate runs/p1h --data fashion-mnist --json -")
@with_settings("data", "function", "machine", "engine", "device", "precision")
def evaluate_run(folder: Folder, settings: dict[str, Any], as_json: Json = None) -> None:
    """Measure the test error of every trial of a run again, from its weights."""
    check_json(as_json)
    settings.pop("machine", None)  # as in resume
    with own_code(settings.get("function")):
        found = evaluate(folder, model=factory(settings), **settings)
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
