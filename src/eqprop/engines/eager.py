"""The reference engine: the time loop as in the equations, for any model, cost and estimator."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine, Job, Runner, Tally, full_precision
from eqprop.estimators import EP, Signs
from eqprop.relax import Phase, Relaxation, relax
from eqprop.state import State


class EagerRunner(Runner):
    """Run iterations one by one, each with `Estimator.backward` and the optimizer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.estimator = replace(job.estimator, checked=False)
        self.tally = Tally.zeros(job.networks or 1, job.images.device)
        self.clock = torch.zeros((), dtype=torch.float64, device=job.images.device)
        self.signs = job.signs or Signs(tuple(range(job.networks or 1)))
        self.done = 0

    @full_precision()
    def run(self, order: Tensor) -> None:
        signs = self.next_signs(len(order))
        for n, rows in enumerate(order.to(self.job.images.device)):
            self.iterate(rows, None if signs is None else signs[n])

    def next_signs(self, n: int) -> Tensor | None:
        """(n, R) signs of beta for the next n iterations, on the device; None if the estimator draws none."""
        first, self.done = self.done, self.done + n
        if not (isinstance(self.estimator, EP) and self.estimator.nudging == "random-sign"):
            return None
        return self.signs.rows(first, n).to(self.job.images.device)

    def iterate(self, rows: Tensor, signs: Tensor | None = None) -> None:
        """Run one iteration. Everything stays on the device, even the iteration number, so that it can be captured."""
        job = self.job
        x, y = job.images[rows], job.targets[rows]
        job.optimizer.zero_grad(set_to_none=True)
        begun = None if job.start is None else job.start.begin(x, rows)
        estimator = self.estimator
        if isinstance(estimator, EP) and signs is not None:
            estimator = estimator.with_sign(signs if job.networks else signs[0])
        free = estimator.backward(job.model, job.cost, x, y, begun)
        with torch.no_grad():
            theta = dict(job.model.named_parameters())
            loss = job.cost(free.state, y, theta).reshape(self.tally.bad.numel(), -1)
            self._guard(loss)
            self._count(free, loss, job.labels[rows])
        job.optimizer.step()
        if job.start is not None and begun is not None:
            job.start.end(x, rows, begun, free.state)
        self.clock += 1.0

    def _guard(self, loss: Tensor) -> None:
        """Freeze networks whose loss or gradient is not finite: with a zero gradient, SGD changes nothing."""
        good = torch.isfinite(loss).all(1)
        grads = [p.grad for group in self.job.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            good &= torch.isfinite(grad).reshape(good.numel(), -1).all(1)
        bad = self.tally.bad
        newly = ~good & (bad < 0)
        bad.copy_(torch.where(newly, self.clock, bad))
        for grad in grads:
            keep = (bad < 0).view(-1, *[1] * (grad.dim() - 1)) if self.job.networks else (bad < 0)[0]
            grad.copy_(torch.where(keep, grad, torch.zeros_like(grad)))

    def _count(self, free: Relaxation, loss: Tensor, labels: Tensor) -> None:
        tally, networks = self.tally, self.tally.bad.numel()
        wrong = (self.job.cost.scores(free.state).argmax(-1) != labels).reshape(networks, -1)
        residual = free.residual.reshape(networks, -1)
        tally.samples += wrong.shape[1]
        tally.errors += wrong.sum(1)
        tally.loss += loss.sum(1)
        tally.residual += residual.sum(1)
        tally.worst.copy_(torch.maximum(tally.worst, residual.amax(1).double()))
        tally.unsettled += (~free.settled).reshape(networks, -1).sum(1)


class Eager(Engine):
    name = "eager"
    reference = True
    starts = ("zero", "persistent", "initialised", "carried")

    @full_precision()
    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        return relax(model, x, phase, state)

    def runner(self, job: Job) -> Runner:
        return EagerRunner(job)
