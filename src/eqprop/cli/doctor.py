"""eqprop doctor: why does this run, or what `eqprop train` would run, not learn by EP?"""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.text import Text

from eqprop.cli import command
from eqprop.cli.common import Examined, Json, OfRun, Preset, Trial, check_json, give_json, new_console
from eqprop.cli.options import factory, with_settings, words_of
from eqprop.messages import command as shell_command
from eqprop.run.laboratory import Weights, examine, find_problem
from eqprop.run.own import own_code

CAUSE_FOUND = 1
"""The exit code where a cause was found; 0 where none was, 2 for an error."""


@command("doctor", "eqprop doctor P-1h --preset tuned", "eqprop doctor my.py:build --T 200 --lr 0.05")
@with_settings(without=("estimator",))
def doctor(
    target: Examined,
    settings: dict[str, Any],
    preset: Preset = None,
    estimator: OfRun = None,
    trial: Trial = None,
    json: Json = None,
) -> None:
    """Why does it not learn? The first cause, the number that shows it, and the remedy.

    Takes the arguments of eqprop train and examines what it would run; or takes a run folder and examines its weights
    as they are now, with the run's settings. The exit code is 1 if a cause was found.
    """
    check_json(json)
    words = [target, *(["--preset", preset] if preset else []), *words_of(settings)]
    words += ["--estimator", estimator] if estimator else []
    console = new_console(file=sys.stderr if json == "-" else sys.stdout)
    with own_code(settings.get("function") or target):
        subject = find_problem(target, preset, settings, factory(settings), Weights(estimator, trial))
        found = examine(subject)
    spec, samples = subject.spec, len(subject.problem.x)
    checked = shell_command("resume", target) if subject.trained else shell_command("train", *words)
    phases = {"T": spec.phases.T, "K": spec.phases.K, "beta": spec.phases.beta, "schedule": spec.phases.schedule}
    turns = "" if spec.phases.schedule == "synchronous" else f" {spec.phases.schedule}"
    said = f"T = {spec.phases.T}{turns}, K = {spec.phases.K}, beta = {spec.phases.beta:g}, {samples} samples"
    console.print(Text(f"{spec.name}: {said}, {found.seconds:.1f} s", style="bold"))
    console.print(Text(f"Examined is what this command runs: {checked}"), soft_wrap=True)
    width = max((len(name) for name in found.passed), default=0)
    for name, what in found.passed.items():
        console.print(Text(f"  {name:<{width}}  {what}"))
    for remark in found.remarks:
        console.print(Text(remark))
    console.print(Text(found.verdict, style="bold"))
    result = {"name": spec.name, **phases, "samples": samples, **found.to_dict()}
    give_json({**result, "command": checked, "spec": spec.to_dict()}, json)
    if not found.healthy:
        raise typer.Exit(CAUSE_FOUND)
