"""The paper's experiments made small, and an engine with something wrong about it, for the tests of the benchmarks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from eqprop import data, papers
from eqprop.data import Images
from eqprop.dynamics import Dynamics
from eqprop.engines import Job, Runner
from eqprop.engines.eager import Eager
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.relax import Phase, Relaxation
from eqprop.run.spec import Spec
from eqprop.state import State

EXPERIMENTS = list(papers.paper_rows().values())


def few_images() -> Images:
    full = data.mnist()
    return replace(full, train_x=full.train_x[:500], train_y=full.train_y[:500])


def shrunk(experiment: Spec, **fields: Any) -> Spec:
    """The experiment with small layers, still for MNIST."""
    net = experiment.model
    if isinstance(net, LayeredNet):
        net = msgspec.structs.replace(net, sizes=(10, *(9 + n for n in range(len(net.sizes) - 2)), 784))
    elif isinstance(net, ConvolutionalNet):
        net = msgspec.structs.replace(net, channels=(4, 3))
    return experiment.override(model=net, **fields)


def brief(experiment: Spec, **fields: Any) -> Spec:
    return shrunk(experiment, T=7, K=4, **fields)


class Spoiled(Eager):
    """The reference with something wrong about it."""

    name = "spoiled"

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        if self.wrong == "fewer steps":
            phase = replace(phase, T=phase.T - 1)
        if self.wrong == "alternating":
            phase = replace(phase, schedule="alternating")
        free = super().relaxation(model, x, phase, state)
        if self.wrong == "coarse state":
            return replace(free, state=tuple(v.half().float() for v in free.state))
        return free

    def runner(self, job: Job) -> Runner:
        if self.wrong == "alternating":
            job = replace(job, estimator=replace(job.estimator, schedule="alternating"))
        return SpoiledRunner(job, super().runner(job), self.wrong)


class SpoiledRunner(Runner):
    def __init__(self, job: Job, inner: Runner, wrong: str) -> None:
        self.job, self.inner, self.wrong, self.tally = job, inner, wrong, inner.tally

    def run(self, order: Tensor) -> None:
        parameters = dict(self.job.model.named_parameters())
        if self.wrong == "other batches":
            order = order.roll(1, -1).flip(0)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        self.inner.run(order)
        with torch.no_grad():
            for name, p in parameters.items():
                if self.wrong == "coarse update":
                    p.copy_(before[name] + (p - before[name]).bfloat16())
                elif self.wrong == "one bias" and name.endswith("0") and p.dim() <= 2 and name.startswith("b"):
                    p.copy_(before[name])
                elif self.wrong == "not finite":
                    p.fill_(torch.nan)
                elif self.wrong == "one network":
                    p[1].copy_(before[name][1])


def rows_of_table1(**fields: Any) -> list[dict[str, Any]]:
    common = {
        "engine": "e",
        "schedule": "synchronous",
        "stop": "never",
        "weights": "initial",
        "trials": 5,
        "speedup": 2.0,
        "setup_s": 3.0,
        "evaluation_s": 0.5,
        "us_per_iteration": 100.0,
    }
    return [{**common, "name": n, "method": m, **fields} for n in papers.of_paper() for m in ("ep", "bptt")]
