"""Fully connected layered nets of any depth, energy-based or prototypical  [sec:depth]."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Literal, final

import torch
from torch import Tensor

from eqprop.dynamics import NudgeSite, PrimitiveDynamics, check_eps, set_nudge_site
from eqprop.models.activations import Activation, activation
from eqprop.models.init import Init, Wanted, add_parameters
from eqprop.state import LayerParameters, State, zero_state

Setting = Literal["energy-based", "prototypical"]


@final
class Layered(PrimitiveDynamics):
    """Layers s0 (output), s1, ..., and the static input, each connected to the next by tied weights.

    Energy-based  [exp:def-fc-eb], with r = sigma(s), the input entering as sigma(x):
        Phi = (1 - eps)/2 |s|^2 + eps (sum_n r^n . W_{n,n+1} . r^{n+1} + b^n . r^n),   s_{t+1} = dPhi/ds
    Prototypical  [exp:def-fc-p], the input entering as x:
        Phi = sum_n s^n . W_{n,n+1} . s^{n+1} + b^n . s^n,   s_{t+1} = sigma(dPhi/ds)

    sizes           from the output to the input, such as (10, 512, 784)
    eps             the step of the energy-based setting, in (0, 1]
    clip            energy-based: keep s in [0, 1] after every step, nudge included, as the paper does in training
    output_slope    energy-based: False omits sigma'(s0) from the output's step, as the authors' code does. The
                    Jacobian is then no longer symmetric.
    nudge_site      prototypical: "outside" is sigma(dPhi/ds) + push, the paper's; "inside" is sigma(dPhi/ds + push)
    init, seed      "glorot", "default" (PyTorch's) or a function; drawn on the CPU in float64, then rounded

    Parameters W01 (n0, n1), W12, ... and b0, b1, ...; stacked networks carry them with a leading dimension.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        setting: Setting = "prototypical",
        activation: str | Activation | Callable[[Tensor], Tensor] = "sigmoid",
        *,
        eps: float | None = None,
        clip: bool = False,
        output_slope: bool = True,
        bias: bool = True,
        nudge_site: NudgeSite = "outside",
        init: Init = "glorot",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = _check_sizes(sizes)
        self.energy_based = _check_setting(setting, eps, clip, output_slope)
        self.activation = _activation(activation)
        self.clip, self.output_slope, self.bias = clip, output_slope, bias
        self.eps = check_eps(eps) if eps is not None else 1.0
        self.nudge_scale = self.eps
        self.bipartite = not self.energy_based
        self.depth = len(self.sizes) - 1
        self.input_shape = (self.sizes[-1],)
        set_nudge_site(self, nudge_site)
        add_parameters(self, self._wanted(), init, seed, dtype)

    def _wanted(self) -> list[Wanted]:
        wanted = []
        for (rows, columns), (names, bias) in zip(pairwise(self.sizes), self.layer_parameters, strict=True):
            wanted.append(Wanted(names[0], (rows, columns), columns, rows))
            if bias is not None:
                wanted.append(Wanted(bias, (rows,), columns, rows))
        return wanted

    def weight(self, n: int) -> Tensor:
        """W_{n,n+1}, shape (n_n, n_{n+1}), or (R, n_n, n_{n+1}) when stacked."""
        return getattr(self, f"W{n}{n + 1}")

    def offset(self, n: int) -> Tensor | None:
        """b_n as a row (1, n_n), or (R, 1, n_n) when stacked; None without biases."""
        return getattr(self, f"b{n}").unsqueeze(-2) if self.bias else None

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"s{n}" for n in range(self.depth))

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return layered_parameters(self.depth, self.bias)

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, [(n,) for n in self.sizes[:-1]], x.shape[:-1])

    def activity(self, s: State) -> State:
        """The activity other layers receive: sigma(s) in the energy-based setting, s in the prototypical one."""
        return tuple(self.activation(layer) for layer in s) if self.energy_based else s

    def input_activity(self, x: Tensor) -> Tensor:
        return self.activation(x) if self.energy_based else x

    def primitive(self, x: Tensor, s: State) -> Tensor:
        r = (*self.activity(s), self.input_activity(x))
        phi = torch.zeros((), dtype=x.dtype, device=x.device)
        for n in range(self.depth):
            inputs = r[n + 1] @ self.weight(n).mT
            offset = self.offset(n)
            phi = phi + (r[n] * (inputs if offset is None else inputs + offset)).sum(-1)
        if not self.energy_based:
            return phi
        squares = torch.stack([layer.square().sum(-1) for layer in s]).sum(0)
        return 0.5 * (1.0 - self.eps) * squares + self.eps * phi

    def drive(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """The constant input of each layer: biases, and W x for the layer next to the input."""
        constant = [self.offset(n) for n in range(self.depth)]
        last = self.input_activity(x) @ self.weight(self.depth - 1).mT
        constant[-1] = last if constant[-1] is None else last + constant[-1]
        return tuple(constant)

    def inputs(self, drive: Sequence[Tensor | None], r: Sequence[Tensor], n: int) -> Tensor:
        """W_{n,n+1} r^{n+1} + W_{n-1,n}^T r^{n-1} + b^n, the total input of layer n."""
        total = drive[n]
        if n + 1 < self.depth:
            above = r[n + 1] @ self.weight(n).mT
            total = above if total is None else total + above
        if n > 0:
            below = r[n - 1] @ self.weight(n - 1)
            total = below if total is None else total + below
        assert total is not None, "a layer has a neighbour or the input"
        return total

    def gradient(self, drive: Sequence[Tensor | None], s: State) -> State:
        r = self.activity(s)
        inputs = [self.inputs(drive, r, n) for n in range(self.depth)]
        if not self.energy_based:
            return tuple(inputs)
        slopes = [None if n == 0 and not self.output_slope else self.activation.slope(v) for n, v in enumerate(s)]
        forces = (v if d is None else v * d for v, d in zip(inputs, slopes, strict=True))
        return tuple((1.0 - self.eps) * v + self.eps * f for v, f in zip(s, forces, strict=True))

    @property
    def squashes(self) -> bool:
        return not self.energy_based

    @property
    def output_bounds(self) -> tuple[float, float] | None:
        return super().output_bounds if self.energy_based else self.activation.bounds

    def squash(self, s: State) -> State:
        return s if self.energy_based else tuple(self.activation(layer) for layer in s)

    def project(self, s: State) -> State:
        return tuple(layer.clamp(0.0, 1.0) for layer in s) if self.clip else s

    def group_gradient(self, drive: Sequence[Tensor | None], s: State, layers: Collection[int]) -> State:
        if self.energy_based:
            return self.gradient(drive, s)
        return tuple(self.inputs(drive, s, n) if n in layers else layer for n, layer in enumerate(s))

    def half_step(self, drive: Sequence[Tensor | None], s: State, parity: int) -> State:
        return tuple(
            self.activation(self.inputs(drive, s, n)) if n % 2 == parity else layer for n, layer in enumerate(s)
        )

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """(1/B) (r+^n r+^{n+1}^T - r-^n r-^{n+1}^T), times eps if energy-based  [delta-fc-canon, delta-fc].

        Differences come first, dr r+^T + r- dr^T: the sums over samples are far larger than what they differ in.
        """
        plus, minus = self.activity(s_plus), self.activity(s_minus)
        visible = self.input_activity(x)
        factor = (self.eps if self.energy_based else 1.0) / x.shape[-2]
        out = {}
        for n in range(self.depth):
            moved = plus[n] - minus[n]
            if n + 1 < self.depth:
                pairs = moved.mT @ plus[n + 1] + minus[n].mT @ (plus[n + 1] - minus[n + 1])
            else:
                pairs = moved.mT @ visible
            out[f"W{n}{n + 1}"] = factor * pairs
            if self.bias:
                out[f"b{n}"] = factor * moved.sum(-2)
        return out


# The constructor's argument of the same name shadows the function.
_activation = activation


def layered_parameters(depth: int, bias: bool = True, kind: str = "") -> tuple[LayerParameters, ...]:
    """W01 and b0, W12 and b1, ...; `kind` goes between letter and numbers, as in Wfc01."""
    return tuple(LayerParameters((f"W{kind}{n}{n + 1}",), f"b{kind}{n}" if bias else None) for n in range(depth))


def _check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if len(sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            f"sizes is {tuple(sizes)}; expected at least two positive integers from the output to the input, "
            "such as (10, 512, 784)."
        )
    if len(sizes) > 2 and sizes[-1] < sizes[0]:
        warnings.warn(
            f"Layered got sizes {tuple(sizes)}: sizes run from output to input, so this net has {sizes[0]} outputs and "
            f"{sizes[-1]} inputs. For the net the other way round give {tuple(sizes)[::-1]}.",
            stacklevel=4,
        )
    return tuple(sizes)


def _check_setting(setting: str, eps: float | None, clip: bool, output_slope: bool) -> bool:
    if setting == "energy-based":
        if eps is None:
            raise ValueError("Got no eps for the energy-based setting; expected a number in (0, 1], such as eps=0.2.")
        return True
    if setting != "prototypical":
        raise ValueError(f"setting is {setting!r}; expected 'energy-based' or 'prototypical'.")
    if eps is not None or clip or not output_slope:
        raise ValueError(
            "eps, clip and output_slope apply to the energy-based setting only. Omit them, or choose "
            "setting='energy-based'."
        )
    return False
