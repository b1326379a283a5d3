"""The toy model: output, hidden and input layers all connected, without lateral connections  [exp:toymodel]."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from eqprop.dynamics import PrimitiveDynamics, check_eps
from eqprop.models.activations import Activation, activation
from eqprop.models.init import Init, Wanted, add_parameters
from eqprop.state import LayerParameters, State, zero_state


@final
class Toy(PrimitiveDynamics):
    """Phi = (1 - eps)/2 |s|^2 + eps (r0.W01.r1 + r0.W0x.rx + r1.W1x.rx + b.r), r = sigma(s), rx = sigma(x).

    sizes are (outputs, hidden, inputs), (5, 50, 10) in the paper. Parameters W01, W0x, W1x and b0, b1.
    """

    W01: nn.Parameter
    W0x: nn.Parameter
    W1x: nn.Parameter
    b0: nn.Parameter
    b1: nn.Parameter

    def __init__(
        self,
        sizes: tuple[int, int, int] = (5, 50, 10),
        activation: str | Activation | Callable[[Tensor], Tensor] = "tanh",
        *,
        eps: float = 0.08,
        bias: bool = True,
        init: Init = "default",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if len(sizes) != 3 or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(f"sizes is {tuple(sizes)}; expected (outputs, hidden, inputs), such as (5, 50, 10).")
        self.sizes = tuple(sizes)
        self.activation = _activation(activation)
        self.eps = self.nudge_scale = check_eps(eps)
        self.bias = bias
        self.input_shape = (sizes[2],)
        outputs, hidden, visible = sizes
        wanted = [
            Wanted("W01", (outputs, hidden), hidden, outputs),
            Wanted("W0x", (outputs, visible), visible, outputs),
            Wanted("W1x", (hidden, visible), visible, hidden),
        ]
        if bias:
            wanted += [Wanted("b0", (outputs,), hidden, outputs), Wanted("b1", (hidden,), visible, hidden)]
        add_parameters(self, wanted, init, seed, dtype)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return ("s0", "s1")

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        biases = ("b0", "b1") if self.bias else (None, None)
        return LayerParameters(("W01", "W0x"), biases[0]), LayerParameters(("W1x",), biases[1])

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, [(self.sizes[0],), (self.sizes[1],)], x.shape[:-1])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        r0, r1 = (self.activation(layer) for layer in s)
        d0, d1 = self.drive(x)
        pairs = (r0 * (r1 @ self.W01.mT + d0)).sum(-1) + (r1 * d1).sum(-1)
        squares = s[0].square().sum(-1) + s[1].square().sum(-1)
        return 0.5 * (1.0 - self.eps) * squares + self.eps * pairs

    def drive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rx = self.activation(x)
        d0, d1 = rx @ self.W0x.mT, rx @ self.W1x.mT
        return (d0 + self.b0.unsqueeze(-2), d1 + self.b1.unsqueeze(-2)) if self.bias else (d0, d1)

    def gradient(self, drive: tuple[Tensor, Tensor], s: State) -> State:
        s0, s1 = s
        r0, r1 = self.activation(s0), self.activation(s1)
        f0 = self.activation.slope(s0) * (r1 @ self.W01.mT + drive[0])
        f1 = self.activation.slope(s1) * (r0 @ self.W01 + drive[1])
        return ((1.0 - self.eps) * s0 + self.eps * f0, (1.0 - self.eps) * s1 + self.eps * f1)

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        plus, minus = ([self.activation(layer) for layer in s] for s in (s_plus, s_minus))
        rx = self.activation(x)
        factor = self.eps / x.shape[-2]
        moved = [p - m for p, m in zip(plus, minus, strict=True)]
        out = {
            "W01": factor * (moved[0].mT @ plus[1] + minus[0].mT @ moved[1]),
            "W0x": factor * (moved[0].mT @ rx),
            "W1x": factor * (moved[1].mT @ rx),
        }
        if self.bias:
            out |= {"b0": factor * moved[0].sum(-2), "b1": factor * moved[1].sum(-2)}
        return out


# The constructor's argument of the same name shadows the function.
_activation = activation
