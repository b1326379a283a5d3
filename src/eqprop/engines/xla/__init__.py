"""The engine `xla`: both phases and the gradient of any model as one program of the compiler XLA.

jax is imported when the first program is asked for, not here.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

from torch import Tensor

from eqprop.cost import Problem
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine, Job, Runner, Task
from eqprop.estimators import BPTT, EP, RBP, ContinualEP, Grads, HolomorphicEP
from eqprop.relax import Phase, Relaxation
from eqprop.state import State

if TYPE_CHECKING:
    from eqprop.engines.xla.engine import Programs


SHORT = 1e9
"""Multiplications and additions of an epoch that takes the reference less time than compiling does."""


@functools.cache
def shared_programs() -> Programs:
    """The programs of this process, by model. jax is imported when the first is asked for."""
    from eqprop.engines.xla.engine import Programs

    return Programs()


class Xla(Engine):
    """Any model and cost, in float32 or float64 on the CPU.

    falls_back      whether a model that has no program is left to the reference, with a warning, or else raises
    """

    name = "xla"
    device = "cpu"
    computes = True
    missed = importlib.util.find_spec("jax") is None
    reference = True
    steers = True
    estimators = (EP, BPTT, RBP, ContinualEP, HolomorphicEP)
    starts = ("zero", "persistent", "initialised", "carried")

    def __init__(self, falls_back: bool = False) -> None:
        self.falls_back = falls_back

    def automatic(self, task: Task) -> Engine | None:
        """Unless a training is over before its programs are compiled."""
        return None if 0.0 < task.work < SHORT else Xla(falls_back=True)

    def refuses_more(self, task: Task) -> str | None:
        if importlib.util.find_spec("jax") is None:
            return "jax is not installed: python -m pip install jax."
        return None

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        return shared_programs().relaxation(model, x, phase, state, self.falls_back)

    def gradient(self, task: Task, x: Tensor, y: Tensor, state: State) -> tuple[Relaxation, Grads]:
        assert task.cost is not None
        assert task.estimator is not None
        if task.estimator.checked:
            task.estimator.check_nudge(task.model, state[0].dtype)
        problem = Problem(task.model, task.cost, x, y)
        return shared_programs().gradient(problem, task.estimator, state, self.falls_back)

    def runner(self, job: Job) -> Runner:
        from eqprop.engines.xla.training import XlaRunner

        return XlaRunner(job, self, self.falls_back)
