"""Models of a user's own for `eqprop gdu tests/gdu_models.py:NAME`: one that has the GDU property, and bad ones."""

from __future__ import annotations

import torch
from torch import Tensor

import eqprop
from eqprop.state import State

NUMBER = 3


def _batch(inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.rand(4, inputs, generator=source), torch.rand(4, outputs, generator=source)


def _made(*layers: tuple[int, int]) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    return {f"W{n}": 0.8 * torch.rand(shape, generator=source) - 0.4 for n, shape in enumerate(layers)}


def symmetric() -> tuple[object, ...]:
    """An energy-based net: the theorem holds."""

    def energy(x: Tensor, s: State, theta: dict[str, Tensor]) -> Tensor:
        r0, r1 = torch.tanh(s[0]), torch.tanh(s[1])
        pairs = (r0 * (r1 @ theta["W0"].T)).sum(-1) + (r1 * (x @ theta["W1"].T)).sum(-1)
        return 0.5 * (s[0].square().sum(-1) + s[1].square().sum(-1)) - pairs

    return eqprop.from_energy(energy, _made((2, 5), (5, 3)), (2, 5), eps=0.5), eqprop.SquaredError(), *_batch(3, 2)


def asymmetric() -> tuple[object, ...]:
    """Feedback through weights of its own: no primitive, no theorem."""

    def transition(x: Tensor, s: State, theta: dict[str, Tensor]) -> State:
        return torch.tanh(s[1] @ theta["W0"].T), torch.tanh(s[0] @ theta["W2"].T + x @ theta["W1"].T)

    model = eqprop.from_transition(transition, _made((2, 5), (5, 3), (5, 2)), (2, 5))
    return model, eqprop.SquaredError(), *_batch(3, 2)


def cycle() -> tuple[object, ...]:
    """s -> 1 - s never settles."""
    model = eqprop.from_transition(lambda x, s, theta: (1.0 - s[0] * theta["w"],), {"w": torch.ones(2)}, (2,))
    return model, eqprop.SquaredError(), *_batch(3, 2)


def explode() -> tuple[object, ...]:
    model = eqprop.from_transition(lambda x, s, theta: (s[0].square() + theta["w"],), {"w": torch.ones(2)}, (2,))
    return model, eqprop.SquaredError(), *_batch(3, 2)


def three() -> tuple[object, ...]:
    return symmetric()[:3]


def wrong_model() -> tuple[object, ...]:
    return ("a model", *symmetric()[1:])


def broken() -> tuple[object, ...]:
    return {}["nothing"]


def broken_step() -> tuple[object, ...]:
    def transition(x: Tensor, s: State, theta: dict[str, Tensor]) -> State:
        return (s[0] @ theta["w"],)

    model = eqprop.from_transition(transition, {"w": torch.ones(3, 3)}, (2,))
    return model, eqprop.SquaredError(), *_batch(3, 2)
