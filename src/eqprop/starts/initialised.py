"""Initialised EP: a feed-forward net learns to predict the steady state (O'Connor, Gavves & Welling 2019)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, final

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.starts.base import Start, StartName, finite_samples, per_sample
from eqprop.state import State


@final
class Initialised(Start):
    """s_0 = f(x): f^n = g(V_n f^{n+1} + c_n) from the layer next to the input to the output, f^{N} = x.

    g is the model's own squash and projection, so that f^n lies where the states do. After each free phase every
    layer learns by itself, from its own error and its own input (the normalised delta rule, without any backprop):

        V_n <- V_n + rate <(s^n - f^n) f^{n+1}^T> / <1 + |f^{n+1}|^2>,    c_n <- c_n + rate <s^n - f^n> / <...>

    <> being the mean over the mini-batch. For g monotone with slopes up to 1 this is gradient descent on a convex loss
    with its smoothness divided out, so that rate < 2 is stable in any net. V and c start at zero: nothing is drawn.

    model       one network, or several stacked; each has an initialiser of its own
    x           inputs as the model takes them; only their shape and type are looked at
    """

    kind: ClassVar[StartName] = "initialised"

    @torch.no_grad()
    def __init__(self, model: Dynamics, x: Tensor, rate: float = 1.0) -> None:
        if not (isinstance(rate, int | float) and math.isfinite(rate) and 0.0 < rate < 2.0):
            raise ValueError(f"The initialiser's rate is {rate!r}; expected a number above 0 and below 2, such as 1.")
        self.model, self.rate, self.networks = model, float(rate), model.networks
        one = x[:1] if model.networks is None else x[:1].expand(model.networks, 1, *x.shape[1:])
        zero = model.init_state(one)
        dims = model.sample_dims(one)
        sizes = [*(math.prod(layer.shape[dims:]) for layer in zero), math.prod(one.shape[dims:])]
        networks = model.networks or 1
        self.weights = [zero[0].new_zeros(networks, n, m) for n, m in pairwise(sizes)]
        self.offsets = [zero[0].new_zeros(networks, 1, n) for n in sizes[:-1]]

    @torch.no_grad()
    def begin(self, x: Tensor, rows: Tensor | None = None) -> State:
        zero = self.model.init_state(x)
        layers = list(zero)
        signal = self._flat(x, self.model.sample_dims(x))
        for n in range(len(layers) - 1, -1, -1):
            inputs = torch.baddbmm(self.offsets[n], signal, self.weights[n].mT)  # (R, B, n)
            layers[n] = self._bounded(zero, n, inputs.view_as(zero[n]))
            signal = self._flat(layers[n], self.model.sample_dims(x))
        return tuple(layers)

    @torch.no_grad()
    def end(self, x: Tensor, rows: Tensor | None, begun: State, reached: State) -> None:
        dims = self.model.sample_dims(x)
        good = finite_samples(reached, dims)
        # A sample that is not finite counts as one that is all zero and has no error.
        signals = [self._flat(_where(good, v), dims) for v in (*begun, x)]
        for n, (f, s) in enumerate(zip(begun, reached, strict=True)):
            error = self._flat(_where(good, s - f), dims)  # (R, B, n)
            size = (1.0 + signals[n + 1].square().sum(-1)).sum(-1)  # (R,)
            step = error * (self.rate / size).view(-1, 1, 1)
            self.weights[n].baddbmm_(step.mT, signals[n + 1])
            self.offsets[n] += step.sum(1, keepdim=True)

    def unseen(self, x: Tensor) -> State:
        return self.begin(x)

    def _flat(self, layer: Tensor, dims: int) -> Tensor:
        """(R, B, neurons), R = 1 for a network that is not stacked."""
        flat = layer.flatten(dims)
        return flat if self.networks is not None else flat.unsqueeze(0)

    def _bounded(self, zero: State, n: int, inputs: Tensor) -> Tensor:
        """g: what the model's squash and projection make of layer n."""
        if not isinstance(self.model, PrimitiveDynamics):
            return inputs
        return self.model.project(self.model.squash((*zero[:n], inputs, *zero[n + 1 :])))[n]

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {f"V{n}": v for n, v in enumerate(self.weights)} | {f"c{n}": c for n, c in enumerate(self.offsets)}
        return found if self.networks is not None else {name: t[0] for name, t in found.items()}


def _where(good: Tensor, layer: Tensor) -> Tensor:
    return torch.where(per_sample(good, layer), layer, torch.zeros_like(layer))
