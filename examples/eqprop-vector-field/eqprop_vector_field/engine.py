"""A toy engine: the time loop as eqprop's own, with the first phase split into two halves."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

import eqprop
from eqprop.engines import Engine, Job, Runner
from eqprop.engines.eager import EagerRunner


class Unrolled(Engine):
    """Serves any model, cost and estimator on the CPU. An engine changes how fast something runs, never the result."""

    name = "toy-unrolled"
    device = "cpu"

    def relaxation(
        self, model: eqprop.Dynamics, x: Tensor, phase: eqprop.Phase, state: eqprop.State | None = None
    ) -> eqprop.Relaxation:
        if phase.schedule != "synchronous" or phase.T < 2:
            return eqprop.relax(model, x, phase, state)
        half = eqprop.relax(model, x, replace(phase, T=phase.T // 2), state)
        return eqprop.relax(model, x, replace(phase, T=phase.T - phase.T // 2), half.state)

    def runner(self, job: Job) -> Runner:
        return EagerRunner(job)
