"""What the ways to begin a free phase share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from eqprop.state import State

StartName = Literal["zero", "persistent", "initialised"]
"""Where the free phases of a training begin; "zero" is the model's own `init_state`."""

STARTS: tuple[str, ...] = get_args(StartName)


class Start(ABC):
    """Where free phases begin, and what is learnt from where they end.

        begun = start.begin(x, rows)
        free = ep.backward(model, cost, x, y, begun)
        start.end(x, rows, begun, free.state)

    rows are the numbers of the samples in x among all training samples: (B,), or (R, B) for stacked networks. A
    sample whose state is not finite teaches nothing.
    """

    kind: ClassVar[StartName]

    @abstractmethod
    def begin(self, x: Tensor, rows: Tensor) -> State:
        """The state each of these samples starts from."""

    @abstractmethod
    def end(self, x: Tensor, rows: Tensor, begun: State, reached: State) -> None:
        """Take in where the free phases ended that began at `begun`."""

    def unseen(self, x: Tensor) -> State | None:
        """Where samples start that are not trained on; None for the model's zero state."""
        return None

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved to go on, by name: the memory itself. Stacked networks stand in the first dimension."""


def finite_samples(s: State, dims: int) -> Tensor:
    """Which samples have no NaN and no infinity in any layer: (B,) or (R, B); dims counts the sample dimensions."""
    layers = [torch.isfinite(layer).flatten(dims).all(-1) for layer in s]
    return torch.stack(layers).all(0)


def per_sample(mask: Tensor, layer: Tensor) -> Tensor:
    """A value a sample, shaped to be applied to a layer of neurons."""
    return mask.reshape(*mask.shape, *[1] * (layer.dim() - mask.dim()))
