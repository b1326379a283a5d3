"""The recipe of the paper for choosing hyper-parameters, step by step, without a look at the test set."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eqprop.cost import Cost
from eqprop.data import Images, one_hot
from eqprop.dynamics import Dynamics
from eqprop.experiments.architecture import Factory
from eqprop.experiments.plain import to_plain
from eqprop.experiments.record import EVERY_OTHER, Record
from eqprop.experiments.training_records import printed_record
from eqprop.provenance import provenance
from eqprop.training.plan import Plan, describe, make_plan, read_images
from eqprop.training.settings import Settings
from eqprop.tuning import decide
from eqprop.tuning.curves import Look
from eqprop.tuning.decide import Decision
from eqprop.tuning.effort import Effort, check_budget, held_out, short_training
from eqprop.tuning.probe import Batches, agreement, exact_gradients, residuals, scales, weight_names
from eqprop.tuning.trainings import Machine, Outcome, Trainings

FORMAT = 1
MINI_BATCHES = 5
"""Mini-batches that are looked at."""

TRAININGS = "trainings"


@dataclass(frozen=True)
class Request:
    """What is tuned and with what means.

    record      gives the network, its initial weights, batch, optimizer, epochs, schedule and seed; its T, K, beta and
                learning rates are where nothing starts from
    budget      seconds for the short trainings, about: they are turned into samples by counting operations
    """

    record: Record
    out: Path
    images: Images
    own: Factory | None = None
    machine: Machine = field(default_factory=Machine)
    budget: float = 600.0
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Tuned:
    """The record that came out, and the document with everything it was decided from."""

    record: Record
    document: dict[str, Any]


@dataclass
class Recipe:
    """One run of the recipe: what was decided so far, in order, and what it was decided from."""

    request: Request
    plan: Plan
    record: Record
    looks: list[Look] = field(default_factory=list)
    decisions: dict[str, Decision] = field(default_factory=dict)
    trainings: Trainings | None = None

    def decide(self, decision: Decision) -> None:
        self.decisions[decision.name] = decision
        if decision.name != "learning_rates":
            self.record = self.record.override(**{decision.name: decision.value})

    def batches(self, model: Dynamics) -> Batches:
        """The same training samples every time, none of those that may be held out."""
        n, images = self.record.batch, self.plan.images
        x, labels = images.sample(min(MINI_BATCHES * n, len(images.train_x) // n * n), self.record.seed)
        y = one_hot(labels, images.classes, self.plan.dtype)
        return Batches(self.plan.inputs(x, model).split(n), y.split(n))

    def look(self, model: Dynamics, cost: Cost, weights: str) -> None:
        """Measure at these weights; T, K and beta follow from all looks so far."""
        batches, tell = self.batches(model), self.request.tell
        tell(f"residuals at the {weights}")
        settling = residuals(model, batches.all_x(), self.record.schedule, decide.T_RANGE[1])
        self.decide(decide.free_steps([*(look.residuals for look in self.looks), settling]))
        tell(f"processes at the {weights}")
        longest = min(4 * self.record.T, decide.T_RANGE[1])
        exact = exact_gradients(model, cost, batches, longest, min(decide.K_RANGE[1], longest))
        self.decide(decide.second_steps([*(look.sizes for look in self.looks), exact.sizes], self.record.T))
        tell(f"sign agreement at the {weights}")
        signs = agreement(model, cost, batches, exact, self.record, decide.BETAS)
        self.decide(decide.nudge([*(look.agreement for look in self.looks), signs]))
        sizes = scales(model, cost, batches, self.record)
        self.looks.append(Look(weights, settling, exact.sizes, signs, sizes))


def tune(request: Request) -> Tuned:
    """T from the residuals, K from where the gradients die out, beta from the signs, rates from the sizes of the
    gradients, all again at trained weights; then T and K smaller until the training error rises.
    """
    began = time.monotonic()
    check_budget(request.budget)
    plan = _plan(request)
    model = plan.network((0,))
    cost = plan.cost(model)
    recipe = Recipe(request, plan, plan.record)
    recipe.look(model, cost, "initial weights")
    effort = short_training(replace(plan, record=recipe.record), request.budget)
    recipe.trainings = trainings = Trainings(
        request.images, effort, request.machine, request.out / TRAININGS, request.own, request.tell
    )
    pilot = _choose_rates(recipe, trainings, weight_names(model, cost))
    recipe.look(*trainings.trained(pilot), "trained weights")
    _shrink(recipe, trainings)
    return Tuned(_named(recipe.record), _document(recipe, effort, time.monotonic() - began))


def _plan(request: Request) -> Plan:
    images = _split(request, held_out(len(request.images.train_x)))
    settings = Settings(device=request.machine.device, engine=request.machine.engine)
    return make_plan(request.record, settings, images, request.own)


def _split(request: Request, validation: int) -> Images:
    """The training samples without those held out, in the place of the test set those."""
    return read_images(request.images, Settings(device=request.machine.device, validation=validation))


def _choose_rates(recipe: Recipe, trainings: Trainings, names: Sequence[str]) -> Outcome:
    """The rates of the weights in the proportion of their gradients' sizes, their height by short trainings."""
    wanted, why = decide.relative_rates(recipe.looks[0].scales, names, recipe.record.optimizer)
    outcomes: dict[float, Outcome] = {}

    def error(height: float) -> float:
        record = replace(recipe.record, learning_rates=_rates(recipe, wanted, height))
        outcomes[height] = trainings.run(record, f"rates-{height:.2g}")
        return outcomes[height].train

    best, tried = decide.climb(error, decide.LARGEST_RATE)
    if outcomes[best].diverged:
        raise ArithmeticError(
            f"Every short training diverged, with largest rates from {min(tried):g} to {max(tried):g}. Take initial "
            "weights that settle (--init default), or a smaller step eps."
        )
    chosen = _rates(recipe, wanted, best)
    recipe.record = replace(recipe.record, learning_rates=chosen)
    listing = ", ".join(f"{tried[c]:.1f} % at {c:g}" for c in sorted(tried))
    recipe.decide(Decision("learning_rates", chosen, f"{why}; the largest by training error: {listing}"))
    return outcomes[best]


def _rates(recipe: Recipe, wanted: dict[str, float], height: float) -> dict[str, float]:
    """Rates of the weights; a bias takes its weight's, and what has neither the smallest of them."""
    rates = decide.rounded_rates(wanted, height)
    named = [name for name, _ in recipe.plan.network((0,)).named_parameters()]
    try:
        replace(recipe.record, learning_rates=rates).rates([*named, *recipe.record.readout_names])
    except ValueError:
        return {**rates, EVERY_OTHER: min(rates.values())}
    return rates


def _shrink(recipe: Recipe, trainings: Trainings) -> None:
    """T and K in turn to seven tenths, until for each the training error rises."""
    first = trainings.run(recipe.record, f"T-{recipe.record.T}-K-{recipe.record.K}")
    lowest, samples = first.train, trainings.effort.samples
    stopped: dict[str, str] = {}
    while len(stopped) < 2:
        for name in [n for n in ("T", "K") if n not in stopped]:
            record = smaller(recipe.record, name)
            if record is None:
                # K as large as T keeps T from shrinking until K does.
                if name == "K" or "K" in stopped:
                    stopped[name] = f"{getattr(recipe.record, name)} is the least"
                continue
            tried = trainings.run(record, f"T-{record.T}-K-{record.K}")
            if decide.has_risen(tried.train, lowest, samples):
                here = f"{tried.train:.2f} % at {getattr(record, name)} against {lowest:.2f} %"
                stopped[name] = f"below it the training error rises: {here}"
                continue
            recipe.record, lowest = record, min(lowest, tried.train)
    for name in ("T", "K"):
        before, now = recipe.decisions[name], getattr(recipe.record, name)
        began = f"{before.value} at first: {before.reason}" if now < before.value else before.reason
        recipe.decide(Decision(name, now, f"{began}. Then {stopped[name]}"))


def smaller(record: Record, name: str) -> Record | None:
    """The record with seven tenths of T or K; None where that is no fewer: K is 1 at least, T no less than K."""
    now = getattr(record, name)
    below = max(int(now * decide.SHRINK), record.K if name == "T" else 1)
    return record.override(**{name: below}) if below < now else None


def _named(record: Record) -> Record:
    return replace(record, preset="own", reported={})


def _document(recipe: Recipe, effort: Effort, seconds: float) -> dict[str, Any]:
    assert recipe.trainings is not None, "made before anything is trained"
    request = recipe.request
    printed = printed_record(request.record)
    return {
        "format": FORMAT,
        "name": request.record.name,
        "seed": request.record.seed,
        "budget": request.budget,
        "seconds": round(seconds, 1),
        "effort": effort.plain(),
        "data": describe(request.images),
        "decisions": [{"name": d.name, "value": d.value, "reason": d.reason} for d in recipe.decisions.values()],
        "paper": None if printed is None else _beside(printed),
        "record": to_plain(_named(recipe.record)),
        "looks": [look.plain() for look in recipe.looks],
        "trainings": [outcome.plain() for outcome in recipe.trainings.done],
        "provenance": provenance(torch.device(request.machine.device)),
    }


def _beside(printed: Record) -> dict[str, Any]:
    names = ("T", "K", "beta", "learning_rates")
    return {name: getattr(printed, name) for name in names}
