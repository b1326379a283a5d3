"""The error of networks on a whole set: the free phase in large batches, through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines import Engine
from eqprop.experiments.record import Record
from eqprop.relax import Phase
from eqprop.starts import Start

BATCH = 1000
"""Samples relaxed at once on a CPU; a fixed number, so that the same weights give the same bits."""

NEURONS = 1 << 26
"""Neurons relaxed at once on another device, where large batches cost fewer launches."""


@dataclass(frozen=True)
class Measure:
    """How errors are measured: the free phase of the record, left early where not one bit moves any more.

    networks    how many are stacked in the model; None for one plain network
    cost        which says what the answer is read from
    start       where free phases began in training: an initialiser serves any sample, kept states serve none but theirs
    """

    engine: Engine
    model: Dynamics
    record: Record
    networks: int | None = None
    start: Start | None = None
    cost: Cost = field(default_factory=SquaredError)

    @property
    def phase(self) -> Phase:
        return Phase(self.record.evaluation_T or self.record.T, self.record.schedule, stop="settled", checked=False)

    @torch.no_grad()
    def error_rates(self, x: Tensor, y: Tensor, between: Callable[[], None] = lambda: None) -> list[float]:
        """The share of samples, in percent, whose largest output is not the label: one value a network.

        x is (N, ...) and y (N,); stacked networks all see the same samples. `between` is called between batches.
        """
        wrong = torch.zeros(self.networks or 1, dtype=torch.int64, device=x.device)
        batch = self._batch(x)
        for first in range(0, len(x), batch):
            between()
            part = x[first : first + batch]
            part = part if self.networks is None else part.expand(self.networks, *part.shape)
            begun = None if self.start is None else self.start.unseen(part)
            free = self.engine.relaxation(self.model, part, self.phase, begun)
            outputs = self.cost.scores(free.state)  # (B, classes) or (R, B, classes)
            wrong += (outputs.argmax(-1) != y[first : first + batch]).reshape(wrong.numel(), -1).sum(1)
        return [100.0 * count / len(x) for count in wrong.tolist()]

    def _batch(self, x: Tensor) -> int:
        if x.device.type == "cpu":
            return BATCH
        sample = x[:1] if self.networks is None else x[:1].expand(self.networks, *x[:1].shape)
        neurons = sum(layer.numel() for layer in self.model.init_state(sample))
        return min(max(NEURONS // neurons, BATCH), 10 * BATCH)
