"""The paper's activation functions with their derivatives, and support for custom ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eqprop.autodiff import derivative
from eqprop.messages import unknown


@dataclass(frozen=True)
class Activation:
    """sigma and its derivative, computed by automatic differentiation if not given."""

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor] | None = None

    def __call__(self, v: Tensor) -> Tensor:
        return self.function(v)

    def slope(self, v: Tensor) -> Tensor:
        """sigma'(v), elementwise; differentiable again when gradients are being recorded."""
        if self.derivative is not None:
            return self.derivative(v)
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            leaf = v if v.requires_grad else v.view_as(v).requires_grad_()
            (slope,) = derivative(self.function(leaf).sum(), (leaf,), create_graph=recording)
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
HARD_SIGMOID = Activation("hard-sigmoid", _hard_sigmoid, _hard_sigmoid_slope)
"""max(min(x, 1), 0)  [subsec-train]."""

ACTIVATIONS = {a.name: a for a in (TANH, SIGMOID, HARD_SIGMOID)}


def activation(choice: str | Activation | Callable[[Tensor], Tensor]) -> Activation:
    """An activation by name, or made from a differentiable function of one tensor."""
    if isinstance(choice, Activation):
        return choice
    if isinstance(choice, str):
        if choice in ACTIVATIONS:
            return ACTIVATIONS[choice]
        raise ValueError(unknown("activation", choice, ACTIVATIONS, other="or a function"))
    return Activation(getattr(choice, "__name__", "function"), choice)
