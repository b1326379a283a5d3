"""How much is trained for a decision: a budget in seconds, turned into samples by counting operations.

Counted, not timed: the same seed and budget then decide the same on a busy machine and on an idle one.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from eqprop.data import one_hot
from eqprop.experiments.record import Record
from eqprop.training.plan import Plan
from eqprop.tuning.probe import looked_through

TRAININGS = 16
"""How many short trainings a recipe takes, about."""

LEAST_SAMPLES = 400
LEAST_EPOCHS = 2


@dataclass(frozen=True)
class Pace:
    """What a dependent step costs on a kind of machine, in seconds: a latency, and its operations at a rate."""

    latency: float
    operations: float


PACES = {"cpu": Pace(15e-6, 1e11), "cuda": Pace(20e-6, 1e13)}
"""Round figures of the engines on two cores of a server and on a large GPU."""


@dataclass(frozen=True)
class Work:
    """Operations of an iteration of one mini-batch: what does not depend on T and K, and each step."""

    fixed: float
    step: float

    def seconds(self, record: Record, pace: Pace) -> float:
        steps = record.T + record.K
        return steps * (pace.latency + self.step / pace.operations) + self.fixed / pace.operations


@dataclass(frozen=True)
class Effort:
    """A short training: how many samples, how often, tested on how many held-out ones, and its expected seconds."""

    samples: int
    epochs: int
    validation: int
    seconds: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def count_work(plan: Plan) -> Work:
    """Of an EP iteration, by running two short ones on the CPU and counting."""
    model = plan.record.build(0, plan.dtype, plan.own).cpu()
    x = plan.inputs(plan.images.train_x[: plan.record.batch].cpu(), model)
    y = one_hot(plan.images.train_y[: plan.record.batch].cpu(), plan.images.classes, plan.dtype)
    neurons = sum(layer.numel() for layer in model.init_state(x))
    cost = copy.deepcopy(plan.cost(model)).cpu()
    counts = []
    for T in (1, 2):
        record = looked_through(replace(plan.record, T=T, K=1))
        estimator = replace(record.make_estimator("ep"), checked=False)
        with FlopCounterMode(display=False) as counter:
            estimator.gradient(copy.deepcopy(model), copy.deepcopy(cost), x, y)
        counts.append(float(counter.get_total_flops()))
    step = counts[1] - counts[0]
    # A step also passes over every neuron a few times, which the counter of products does not see.
    return Work(max(counts[0] - 2 * step, 0.0), step + 10.0 * neurons)


def short_training(plan: Plan, budget: float, trainings: int = TRAININGS) -> Effort:
    """The samples and epochs of which so many trainings fit into a budget of seconds, at the record's T and K."""
    check_budget(budget)
    pace = PACES.get(torch.device(plan.settings.device).type, PACES["cpu"])
    each = count_work(plan).seconds(plan.record, pace)
    batch, total = plan.record.batch, len(plan.images.train_x)
    # Every sample held out is relaxed once an epoch, half as much again as a tenth of the iterations.
    iterations = budget / trainings / each / 1.2
    validation = held_out(total)
    most = total - validation
    least = min(max(LEAST_SAMPLES, batch), most)
    samples = int(min(max(iterations * batch / LEAST_EPOCHS, least), most)) // batch * batch
    samples = max(_two_digits_down(samples) // batch * batch, batch)
    epochs = max(min(int(iterations * batch / samples), plan.record.epochs), LEAST_EPOCHS)
    validation = min(validation, max(samples // 2, batch))
    return Effort(samples, epochs, validation, epochs * samples / batch * each * 1.2)


def check_budget(budget: float) -> None:
    if not (math.isfinite(budget) and budget > 0):
        raise ValueError(f"The budget is {budget}; expected a number of seconds above 0, such as 600.")


def held_out(total: int) -> int:
    """A sixth of the training samples: 10,000 of MNIST's 60,000."""
    return max(total // 6, 1)


def _two_digits_down(value: int) -> int:
    unit = 10 ** max(len(str(value)) - 2, 0)
    return value // unit * unit
