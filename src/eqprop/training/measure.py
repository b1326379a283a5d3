"""The error of networks on a whole set: free phases through the engine, in its iterations or in large batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines import Engine, Job, Runner
from eqprop.estimators import EP
from eqprop.experiments.record import Record
from eqprop.relax import Phase
from eqprop.starts import Start

BATCH = 1000
"""Samples relaxed at once on a CPU; a fixed number, so that the same weights give the same bits."""

NEURONS = 1 << 26
"""Neurons relaxed at once on another device, where large batches cost fewer launches."""


@dataclass(frozen=True, eq=False)
class Measure:
    """How errors on one set are measured: the free phase of the record, left early where not one bit moves any more.

    x, y        the set, (N, ...) and (N,); stacked networks all see the same samples
    networks    how many are stacked in the model; None for one plain network
    cost        which says what the answer is read from
    start       where free phases began in training: an initialiser serves any sample, kept states serve none but theirs
    """

    engine: Engine
    model: Dynamics
    record: Record
    x: Tensor
    y: Tensor
    networks: int | None = None
    start: Start | None = None
    cost: Cost = field(default_factory=SquaredError)

    @property
    def phase(self) -> Phase:
        return Phase(self.record.evaluation_T or self.record.T, self.record.schedule, stop="settled", checked=False)

    def error_rates(self, between: Callable[[], None] = lambda: None) -> list[float]:
        """The share of samples, in percent, whose largest output is not the label: one value a network.

        `between` is called between batches.
        """
        runner = self._runner
        done, wrong = (0, [0.0] * (self.networks or 1)) if runner is None else self._counted(runner, between)
        rest = self._relaxed(done, between)
        return [100.0 * (a + b) / len(self.x) for a, b in zip(wrong, rest, strict=True)]

    @torch.no_grad()
    def _relaxed(self, begin: int, between: Callable[[], None]) -> list[int]:
        """The errors among the samples from `begin` on, relaxed in large batches."""
        x, y = self.x, self.y
        wrong = torch.zeros(self.networks or 1, dtype=torch.int64, device=x.device)
        batch = self._batch()
        for first in range(begin, len(x), batch):
            between()
            part = x[first : first + batch]
            part = part if self.networks is None else part.expand(self.networks, *part.shape)
            begun = None if self.start is None else self.start.unseen(part)
            free = self.engine.relaxation(self.model, part, self.phase, begun)
            outputs = self.cost.scores(free.state)  # (B, classes) or (R, B, classes)
            wrong += (outputs.argmax(-1) != y[first : first + batch]).reshape(wrong.numel(), -1).sum(1)
        return wrong.tolist()

    def _batch(self) -> int:
        if self.x.device.type == "cpu":
            return BATCH
        neurons = sum(layer.numel() for layer in self.model.init_state(self._one()))
        return min(max(NEURONS // neurons, BATCH), 10 * BATCH)

    def _one(self) -> Tensor:
        """A sample for every network."""
        one = self.x[:1]
        return one if self.networks is None else one.expand(self.networks, *one.shape)

    def _counted(self, runner: Runner, between: Callable[[], None]) -> tuple[int, list[float]]:
        """Samples in whole mini-batches, and the errors among them as the runner's iterations count them."""
        batch = self.record.batch
        done = len(self.x) // batch * batch
        order = torch.arange(done, device=self.x.device).view(-1, batch)
        if self.networks is not None:
            order = order.unsqueeze(1).expand(-1, self.networks, -1)
        runner.reset()
        wrong = [0.0] * (self.networks or 1)
        for part in order.split(max(10 * BATCH // batch, 1)):
            between()
            # A network that has gone bad is frozen: it is counted on, and nothing writes its parameters.
            runner.tally.bad.zero_()
            runner.run(part)
            wrong = runner.tally.read()["errors"]
        return done, wrong

    @cached_property
    def _runner(self) -> Runner | None:
        """Iterations that learn nothing, made once: they read the model's parameters as they are at each run.

        None where the engine has none that are faster than `relaxation`, or free phases begin elsewhere than at zero.
        """
        batch = self.record.batch
        fast = self.engine.evaluates(batch * (self.networks or 1))
        if not fast or self.start is not None or len(self.x) < batch:
            return None
        phase = self.phase
        estimator = EP(T=phase.T, K=1, schedule=phase.schedule, stop=phase.stop, checked=False)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        if self.engine.refuses(self.model, self.cost, estimator, optimizer) is not None:
            return None
        # A label that no output stands for is an error whatever its target.
        outputs = torch.arange(self.model.init_state(self._one())[0].shape[-1], device=self.x.device)
        targets = (self.y.unsqueeze(1) == outputs).to(self.x.dtype)
        job = Job(self.model, self.cost, estimator, optimizer, self.x, targets, self.y, self.networks)
        return self.engine.runner(job)
