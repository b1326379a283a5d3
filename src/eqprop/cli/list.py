"""eqprop list."""

from __future__ import annotations

import importlib
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eqprop.cli import app
from eqprop.cli.common import (
    Json,
    Preset,
    check_json,
    give_json,
    new_console,
)
from eqprop.experiments.architecture import LayeredNet
from eqprop.experiments.experiment import Experiment, label
from eqprop.experiments.io import find_experiment, to_dict
from eqprop.experiments.literature import EXPERIMENTS
from eqprop.experiments.paper import LITERATURE, PRESETS, printed_experiment


@app.command("list")
def list_experiments(
    name: Annotated[str | None, typer.Argument(help="Show one experiment in full.")] = None,
    preset: Preset = "paper",
    parts: Annotated[bool, typer.Option("--parts", help="List estimators, engines, costs, data sets, ...")] = False,
    as_json: Json = None,
) -> None:
    """List the experiments: network, settings, and the paper's results; or the parts they are made of."""
    check_json(as_json)
    if parts:
        _list_parts(as_json)
        return
    chosen = [find_experiment(name, preset)] if name else _preset(preset)
    if as_json is not None:
        give_json({experiment.name: to_dict(experiment) for experiment in chosen}, as_json)
        if as_json == "-":
            return
    console = new_console()
    console.print(_table(chosen, preset))
    if name:
        console.print(json.dumps(to_dict(chosen[0]), indent=2))
    _show_changes(console, [experiment.name for experiment in chosen])
    if not name:
        _show_literature(console)


def _list_parts(as_json: str | None) -> None:
    from eqprop.plugins import KINDS, origins

    # A table is known once its module is imported.
    for module in ("engines", "experiments.experiment", "experiments.architecture", "data", "run.watch"):
        importlib.import_module(f"eqprop.{module}")
    found = {kind: origins(kind) for kind in KINDS}
    give_json(found, as_json)
    if as_json == "-":
        return
    table = Table(title="Parts; register your own with eqprop.register or by an entry point")
    for heading in ("kind", "name", "from"):
        table.add_column(heading)
    for kind, names in found.items():
        for n, (name, origin) in enumerate(names.items()):
            table.add_row("" if n else kind, name, origin, end_section=n == len(names) - 1)
    new_console().print(table)


def _show_literature(console: Console) -> None:
    for row in LITERATURE:
        if row.experiment is None:
            steps = f"T {row.T}" + ("" if row.K is None else f"  K {row.K}")
            said = f"{row.source}, {row.errors} %, {steps}  {row.epochs} epochs"
            console.print(f"Also in the paper's table, but not an experiment here: {said}", soft_wrap=True)


def _show_changes(console: Console, names: list[str]) -> None:
    for other in PRESETS[1:]:
        for experiment in EXPERIMENTS[other].values():
            printed = printed_experiment(experiment)
            if experiment.name in names and printed is not None:
                changes = ", ".join(map(str, experiment.changes(printed)))
                console.print(f"--preset {other} {experiment.name}: {changes}", soft_wrap=True)


def _preset(preset: str) -> list[Experiment]:
    """The experiments of a preset; beside the printed ones those that are of no paper."""
    if preset not in EXPERIMENTS:
        find_experiment("P-1h", preset)
    found = EXPERIMENTS[preset]
    if preset != PRESETS[0]:
        return list(found.values())
    return [*found.values(), *(e for rest in EXPERIMENTS.values() for e in rest.values() if e.name not in found)]


def _table(experiments: list[Experiment], preset: str) -> Table:
    """Three lines per experiment, to fit a terminal of 80 columns."""
    table = Table(title=f"Experiments, preset {preset}", show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("network, steps, learning rates")
    table.add_column("paper, %: test (train)", no_wrap=True)
    for r in experiments:
        net = r.architecture
        eps = f"  ε {net.eps}" if isinstance(net, LayeredNet) and net.eps else ""
        paper_results = [f"{label(estimator):4} {x}" for estimator, x in r.paper_results.items()]
        what = [
            f"{net}, {_activation(net)}, {r.init}",
            f"T {r.T}  K {r.K}  β {r.beta}{eps}  {r.epochs} epochs",
            "  ".join(f"{name} {rate}" for name, rate in r.learning_rates.items()),
            *([", ".join(special)] if (special := _special(r)) else []),
        ]
        table.add_row(_broken(r.name), "\n".join(what), "\n".join(paper_results) or "--")
    return table


def _activation(net: object) -> str:
    named = getattr(net, "activation", "own")
    return named if isinstance(named, str) else ", ".join(f"{layer} {sigma}" for layer, sigma in named.items())


def _special(experiment: Experiment) -> list[str]:
    """How an experiment's start and estimator differ from the paper's."""
    start = [] if experiment.start == "zero" else [f"{experiment.start} start"]
    return start + ([] if experiment.estimator == "ep" else [experiment.estimator])


def _broken(name: str) -> str:
    """Break a long name after a hyphen, to keep the width of the other columns."""
    if len(name) <= 14 or "-" not in name:
        return name
    cut = min((i + 1 for i, c in enumerate(name) if c == "-"), key=lambda i: abs(i - len(name) / 2))
    return f"{name[:cut]}\n{name[cut:]}"
