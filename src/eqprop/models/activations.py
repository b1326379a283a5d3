"""Activation functions with their derivatives, and support for custom ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eqprop.autodiff import derivative, leaf
from eqprop.messages import unknown
from eqprop.plugins import Table


@dataclass(frozen=True)
class Activation:
    """sigma and its derivative, computed by automatic differentiation if not given."""

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor] | None = None
    bounds: tuple[float, float] | None = None
    """Where sigma is the clamp between two numbers: these."""

    def __call__(self, v: Tensor) -> Tensor:
        return self.function(v)

    def slope(self, v: Tensor) -> Tensor:
        """sigma'(v), elementwise; differentiable again when gradients are being recorded."""
        if self.derivative is not None:
            return self.derivative(v)
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = leaf(v)
            (slope,) = derivative(self.function(inputs).sum(), (inputs,), create_graph=recording)
        return torch.zeros_like(v) if slope is None else slope


def _sigmoid(v: Tensor) -> Tensor:
    return torch.sigmoid(4.0 * v - 2.0)


def _sigmoid_slope(v: Tensor) -> Tensor:
    y = _sigmoid(v)
    return 4.0 * y * (1.0 - y)


def _hard_sigmoid(v: Tensor) -> Tensor:
    return v.clamp(0.0, 1.0)


def _hard_sigmoid_slope(v: Tensor) -> Tensor:
    # 1 on the closed interval, like the gradient of clamp: a net that starts at 0 must be able to move.
    return ((v >= 0.0) & (v <= 1.0)).to(v.dtype)


def _tanh_slope(v: Tensor) -> Tensor:
    return 1.0 - torch.tanh(v).square()


TANH = Activation("tanh", torch.tanh, _tanh_slope)
SIGMOID = Activation("sigmoid", _sigmoid, _sigmoid_slope)
"""1 / (1 + exp(-4 (x - 1/2))), the paper's sigmoid  [subsec-train]."""
HARD_SIGMOID = Activation("hard-sigmoid", _hard_sigmoid, _hard_sigmoid_slope, bounds=(0.0, 1.0))
"""max(min(x, 1), 0)  [subsec-train]."""

HALF_HARD_SIGMOID = Activation(
    "half-hard-sigmoid", lambda v: _hard_sigmoid(0.5 * v), lambda v: 0.5 * _hard_sigmoid_slope(0.5 * v)
)
"""max(min(x/2, 1), 0)."""
IDENTITY = Activation("identity", lambda v: v, torch.ones_like, bounds=(-math.inf, math.inf))
RELU = Activation("relu", lambda v: v.clamp(min=0.0), lambda v: (v >= 0.0).to(v.dtype), bounds=(0.0, math.inf))
RELU6 = Activation(
    "relu6", lambda v: v.clamp(0.0, 6.0), lambda v: ((v >= 0.0) & (v <= 6.0)).to(v.dtype), bounds=(0.0, 6.0)
)


def _adapted(name: str, part: Any) -> Activation:
    return part if isinstance(part, Activation) else Activation(name, part)


_BUILT_IN = (TANH, SIGMOID, HARD_SIGMOID, HALF_HARD_SIGMOID, IDENTITY, RELU, RELU6)
ACTIVATIONS: Table[Activation] = Table("activation", {a.name: a for a in _BUILT_IN}, _adapted)
"""Activations by name, with those from outside."""


def activation(choice: str | Activation | Callable[[Tensor], Tensor]) -> Activation:
    """An activation by name, or made from a differentiable function of one tensor."""
    if isinstance(choice, Activation):
        return choice
    if isinstance(choice, str):
        if choice in ACTIVATIONS:
            return ACTIVATIONS[choice]
        raise ValueError(unknown("activation", choice, ACTIVATIONS, other="or a function"))
    return Activation(getattr(choice, "__name__", "function"), choice)
