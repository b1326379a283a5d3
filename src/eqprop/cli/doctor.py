"""eqprop doctor: why does this run, or this model, not learn by EP?"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from eqprop.cli import app
from eqprop.cli.common import OfRun, Threads, check_json, give_json, learning_rates, new_console
from eqprop.cli.gdu import Asked, setup
from eqprop.engines import threads_for, using_threads
from eqprop.estimators import EP
from eqprop.experiments.architecture import is_own, own_code
from eqprop.experiments.gdu import Setup
from eqprop.gdu.doctor import doctor as examine
from eqprop.gdu.examination import Rates
from eqprop.relax import Schedule

CAUSE_FOUND = 1
"""The exit code where a cause was found; 0 where none was, 2 for an error."""


@app.command()
def doctor(
    target: Annotated[str, typer.Argument(help="A run folder, FILE.py:FUNCTION, or an experiment of eqprop gdu.")],
    T: Annotated[int | None, typer.Option("--T", help="Steps of the free phase.")] = None,
    K: Annotated[int | None, typer.Option("--K", help="Steps of the second phase.")] = None,
    beta: Annotated[float | None, typer.Option(help="Strength of the nudge.")] = None,
    lr: Annotated[list[str] | None, typer.Option("--lr", help="NAME=RATE, or one rate for all.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of the free phase: synchronous or alternating.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and samples.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64 or float32; by default the model's own.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Threads = None,
    estimator: Annotated[str | None, typer.Option(help="Of a run folder; its first by default.")] = None,
    trial: Annotated[int | None, typer.Option(help="Of a run folder; 0 by default.")] = None,
    data: Annotated[str | None, typer.Option(help="The data of a run folder, if it is elsewhere now.")] = None,
    model: OfRun = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="The result as JSON.")] = None,
) -> None:
    """Why does it not learn? The first cause, the number that shows it, and the remedy.

    Of a run, its weights as they are now, with its own T, K, beta and learning rates. The exit code is 1 where a cause
    was found.
    """
    check_json(json)
    asked = Asked(
        T=T, K=K, beta=beta, batch=batch, seed=seed, dtype=dtype, device=device, data=data, estimator=estimator,
        trial=trial, schedule=cast(Schedule | None, schedule), model=model,
    )  # fmt: skip
    console = new_console(file=sys.stderr if json == "-" else sys.stdout)
    with own_code(target if is_own(target) else model):
        chosen = setup(target, asked)
        rates = learning_rates(lr) or _rates_of(chosen, target)
        ep = EP(chosen.T, chosen.K, schedule=chosen.schedule, beta=chosen.beta)
        of = chosen.problem
        with using_threads(threads or threads_for(of.model, of.x)):
            found = examine(of.model, of.cost, of.x, of.y, ep, rates=rates, voice="command line")
    phases = {"T": chosen.T, "K": chosen.K, "beta": chosen.beta, "schedule": chosen.schedule}
    result: dict[str, Any] = {"name": chosen.name, **phases, "samples": len(of.x), **found.to_dict()}
    width = max(len(name) for name in found.passed) if found.passed else 0
    turns = " alternating" if chosen.schedule == "alternating" else ""
    phases_text = f"T = {chosen.T}{turns}, K = {chosen.K}, beta = {chosen.beta:g}"
    console.print(Text(f"{chosen.name}: {phases_text}, {len(of.x)} samples, {found.seconds:.1f} s", style="bold"))
    for name, what in found.passed.items():
        console.print(Text(f"  {name:<{width}}  {what}"))
    for remark in found.remarks:
        console.print(Text(remark))
    console.print(Text(found.verdict, style="bold"))
    give_json(result, json)
    if not found.healthy:
        raise typer.Exit(CAUSE_FOUND)


def _rates_of(chosen: Setup, target: str) -> Rates:
    """The optimizer of a run, without its history."""
    from eqprop.run.extras import make_optimizer
    from eqprop.run.plan import read_description

    if chosen.trained is None:
        return None
    experiment = read_description(Path(target)).experiment
    return make_optimizer(replace(experiment, decay="none"), chosen.problem.model, chosen.problem.cost)
