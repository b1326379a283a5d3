"""Activation functions with their derivatives and differences, and support for custom ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eqprop.autodiff import derivative, leaf
from eqprop.messages import unknown
from eqprop.plugins import Table

Move = Callable[[Tensor], Tensor]
"""e -> f(a + e) - f(a) for a fixed a."""

HALF_WAY = 1e-5
"""Below this |e|, sigma(a + e) - sigma(a) of any sigma is taken as e sigma'(a + e/2), which is exact to e^2/24 times
the relative third derivative; above, the difference of two values in float64 is."""


@dataclass(frozen=True)
class Activation:
    """sigma and its derivative, computed by automatic differentiation if not given.

    bounds      where sigma is the clamp between two numbers: these
    moves       a -> (e -> sigma(a + e) - sigma(a)) without cancellation; given none, from values in float64
    turns       (sigma(a), sigma(a + e) - sigma(a)) -> sigma'(a + e) - sigma'(a), where sigma' is a function of sigma
    elementwise     whether each output depends on one input alone, as of all but softmax
    """

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor] | None = None
    bounds: tuple[float, float] | None = None
    moves: Callable[[Tensor], Move] | None = None
    turns: Callable[[Tensor, Tensor], Tensor] | None = None
    elementwise: bool = True

    def __call__(self, v: Tensor) -> Tensor:
        return self.function(v)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A built-in one is pickled by name: its functions may be lambdas, and it stays the same object."""
        if ACTIVATIONS.built_in.get(self.name) is self:
            return activation, (self.name,)
        return Activation, tuple([getattr(self, f.name) for f in fields(self)])

    def slope(self, v: Tensor) -> Tensor:
        """sigma'(v), elementwise; differentiable again when gradients are being recorded."""
        if self.derivative is not None:
            return self.derivative(v)
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = leaf(v)
            (slope,) = derivative(self.function(inputs).sum(), (inputs,), create_graph=recording)
        return torch.zeros_like(v) if slope is None else slope

    def difference(self, a: Tensor, e: Tensor) -> Tensor:
        """sigma(a + e) - sigma(a), as exact for e of 1e-12 as for e of 1."""
        return self.around(a)(e)

    def around(self, a: Tensor) -> Move:
        """e -> sigma(a + e) - sigma(a); what depends on a alone is computed once."""
        if self.moves is not None:
            return self.moves(a)
        return clamp_moves(a, *self.bounds) if self.bounds is not None else partial(self._wide_move, a)

    def slope_around(self, a: Tensor) -> Move:
        """e -> sigma'(a + e) - sigma'(a)."""
        if self.turns is not None:
            turns, value, move = self.turns, self(a), self.around(a)
            return lambda e: turns(value, move(e))
        if self.bounds is not None:
            return _clamp_turns(a, *self.bounds)
        return lambda e: (self.slope(a.double() + e) - self.slope(a.double())).to(a.dtype)

    def _wide_move(self, a: Tensor, e: Tensor) -> Tensor:
        a64, e64 = a.double(), e.double()
        apart = self(a64 + e64) - self(a64)
        near = e64 * self.slope(a64 + 0.5 * e64) if self.elementwise else apart
        return torch.where(e64.abs() < HALF_WAY, near, apart).to(a.dtype)


def tanh_moves(a: Tensor) -> Move:
    """tanh(a + e) - tanh(a) = t (1 - s^2)/(1 + s t), s = tanh a, t = tanh e.

    1 - s and 1 + s are computed apart from s, which loses them where it is near 1; so is 1 + s t where it is small.
    """
    above, below = 2.0 * torch.sigmoid(2.0 * a), 2.0 * torch.sigmoid(-2.0 * a)  # 1 + s, 1 - s
    slope, least = above * below, torch.finfo(a.dtype).tiny

    def move(e: Tensor) -> Tensor:
        t = torch.tanh(e)
        size = t.abs()
        return t * slope / ((1.0 - size) + (size * torch.where(t < 0.0, below, above)).clamp(min=least))

    return move


def _logistic_moves(a: Tensor) -> Move:
    """1/(1 + exp(-v)) = (1 + tanh(v/2))/2."""
    move = tanh_moves(0.5 * a)
    return lambda e: 0.5 * move(0.5 * e)


def _sigmoid_moves(a: Tensor) -> Move:
    move = tanh_moves(2.0 * a - 1.0)
    return lambda e: 0.5 * move(2.0 * e)


def clamp_moves(a: Tensor, low: float, high: float) -> Move:
    """clamp(a + e) - c, c = clamp(a): e + (a - c) between low - c and high - c; a - c is 0 within the bounds."""
    c = a.clamp(low, high)
    beyond, down, up = a - c, low - c, high - c
    return lambda e: (e + beyond).clamp(down, up)


def _clamp_turns(a: Tensor, low: float, high: float) -> Move:
    """1 within the closed interval, 0 outside."""
    down, up = low - a, high - a
    inside = ((down <= 0.0) & (up >= 0.0)).to(a.dtype)
    return lambda e: ((e >= down) & (e <= up)).to(a.dtype) - inside


def _half_hard_moves(a: Tensor) -> Move:
    move = clamp_moves(0.5 * a, 0.0, 1.0)
    return lambda e: move(0.5 * e)


def _softplus_moves(a: Tensor) -> Move:
    """log(1 + e^(a + e)) - log(1 + e^a) = log(1 + p (e^e - 1)), p = 1/(1 + e^-a)."""
    p, value = torch.sigmoid(a), F.softplus(a)

    def move(e: Tensor) -> Tensor:
        near = torch.log1p(p * torch.expm1(e.clamp(-1.0, 1.0)))
        return torch.where(e.abs() <= 1.0, near, F.softplus(a + e) - value)

    return move


def _softmax(v: Tensor) -> Tensor:
    return torch.softmax(v, -1)


def _softmax_moves(a: Tensor) -> Move:
    """p expm1(u - log sum p exp u), u = e - sum p e: what is common to all of e changes nothing."""
    p = _softmax(a)

    def move(e: Tensor) -> Tensor:
        u = e - (p * e).sum(-1, keepdim=True)
        return p * torch.expm1(u - torch.log1p((p * torch.expm1(u)).sum(-1, keepdim=True)))

    return move


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


def _logistic_slope(v: Tensor) -> Tensor:
    y = torch.sigmoid(v)
    return y * (1.0 - y)


TANH = Activation("tanh", torch.tanh, _tanh_slope, moves=tanh_moves, turns=lambda y, dy: -dy * (2.0 * y + dy))
SIGMOID = Activation(
    "sigmoid",
    _sigmoid,
    _sigmoid_slope,
    moves=_sigmoid_moves,
    turns=lambda y, dy: 4.0 * dy * ((1.0 - 2.0 * y) - dy),
)
"""1 / (1 + exp(-4 (x - 1/2))), the paper's sigmoid  [subsec-train]."""
HARD_SIGMOID = Activation("hard-sigmoid", _hard_sigmoid, _hard_sigmoid_slope, bounds=(0.0, 1.0))
"""max(min(x, 1), 0)  [subsec-train]."""

LOGISTIC = Activation(
    "logistic",
    torch.sigmoid,
    _logistic_slope,
    moves=_logistic_moves,
    turns=lambda y, dy: dy * ((1.0 - 2.0 * y) - dy),
)
"""1 / (1 + exp(-x))."""
SOFTPLUS = Activation("softplus", F.softplus, torch.sigmoid, moves=_softplus_moves)
SOFTMAX = Activation("softmax", _softmax, moves=_softmax_moves, elementwise=False)
"""Of a flat layer, over its neurons; its derivative is symmetric, but no number per neuron."""
HALF_HARD_SIGMOID = Activation(
    "half-hard-sigmoid",
    lambda v: _hard_sigmoid(0.5 * v),
    lambda v: 0.5 * _hard_sigmoid_slope(0.5 * v),
    moves=_half_hard_moves,
)
"""max(min(x/2, 1), 0)."""
IDENTITY = Activation("identity", lambda v: v, torch.ones_like, bounds=(-math.inf, math.inf))
RELU = Activation("relu", lambda v: v.clamp(min=0.0), lambda v: (v >= 0.0).to(v.dtype), bounds=(0.0, math.inf))
RELU6 = Activation(
    "relu6", lambda v: v.clamp(0.0, 6.0), lambda v: ((v >= 0.0) & (v <= 6.0)).to(v.dtype), bounds=(0.0, 6.0)
)


def _adapted(name: str, part: Any) -> Activation:
    return part if isinstance(part, Activation) else Activation(name, part)


_BUILT_IN = (TANH, SIGMOID, LOGISTIC, HARD_SIGMOID, HALF_HARD_SIGMOID, IDENTITY, RELU, RELU6, SOFTPLUS, SOFTMAX)
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
