"""Oscillator nets: phases coupled by cosines, with second harmonics that pull them to 0 or pi."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, final

import torch
from torch import Tensor

from eqprop.cost import Cost, check_kind
from eqprop.dynamics import check_eps
from eqprop.models.connections import Init, Weight, add_parameters
from eqprop.physical.chain import Chain, ChainNet
from eqprop.settings import Finite, Positive, about
from eqprop.state import State


class Fields(NamedTuple):
    """What does not change during a phase: the field h on each layer, (n,) or (B, n)."""

    fields: tuple[Tensor, ...]


@final
class Oscillators(Chain):
    """Layers of oscillators with phases phi; the input x enters as a field, x cos(phi):

        E = -sum_ij J_ij cos(phi_i - phi_j) - sum_i h_i cos(phi_i) - 1/2 sum_i K_i cos(2 phi_i)
        phi <- phi - eps dE/dphi,   Phi = 1/2 |phi|^2 - eps E,   phi_0 = pi/2

    bias        whether there are fields
    init        how couplings are drawn
    seed        of the couplings; None: torch's own stream
    dtype       of the couplings; None: torch's default
    sizes       from the output to the input, such as (10, 120, 784)
    eps         the step
    harmonic    whether the second harmonics K are trained (see the parameters K0, K1, ...); they begin at 0

    Parameters W01 (n0, n1), W12, ... and biases b0, b1, ...: the couplings J, those from the input being fields on the
    layer next to it, h = W x + b.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        eps: float = 0.1,
        *,
        bias: bool = True,
        harmonic: bool = False,
        init: Init = "glorot",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.take_sizes(sizes)
        self.nudge_scale = check_eps(eps)
        wanted = {f"W{n}{n + 1}": Weight((a, b), b, a) for n, (a, b) in enumerate(pairwise(self.sizes))}
        if bias:
            wanted |= {f"b{n}": Weight((a,), b, a) for n, (a, b) in enumerate(pairwise(self.sizes))}
        add_parameters(self, wanted, init, seed, dtype)
        self.harmonic = harmonic
        if harmonic:
            for n in range(self.depth):
                zero = torch.zeros(self.sizes[n], dtype=dtype or torch.get_default_dtype())
                self.register_parameter(f"K{n}", torch.nn.Parameter(zero))

    def __repr__(self) -> str:
        return f"{super().__repr__()}, eps {self.nudge_scale:g}"

    def init_state(self, x: Tensor) -> State:
        return tuple(x.new_full((*x.shape[:1], n), math.pi / 2) for n in self.sizes[:-1])

    def energy(self, x: Tensor, s: State) -> Tensor:
        """E per sample."""
        total = x.new_zeros(x.shape[:1])
        for n in range(self.depth - 1):
            J = self.weight(n)
            for f in (torch.cos, torch.sin):  # cos(a - b) = cos a cos b + sin a sin b
                total = total - ((f(s[n]) @ J) * f(s[n + 1])).sum(-1)
        for h, phi in zip(self.drive(x).fields, s, strict=True):
            total = total - (h * torch.cos(phi)).sum(-1)
        if self.harmonic:
            for n, phi in enumerate(s):
                total = total - 0.5 * (getattr(self, f"K{n}") * torch.cos(2.0 * phi)).sum(-1)
        return total

    def primitive(self, x: Tensor, s: State) -> Tensor:
        squares = torch.stack([phi.square().sum(-1) for phi in s]).sum(0)
        return 0.5 * squares - self.nudge_scale * self.energy(x, s)

    def drive(self, x: Tensor) -> Fields:
        fed = [x.new_zeros(())] * (self.depth - 1) + [x @ self.weight(self.depth - 1).mT]
        biases = [self.bias(n) for n in range(self.depth)]
        return Fields(tuple(h if b is None else h + b for h, b in zip(fed, biases, strict=True)))

    def gradient(self, drive: Fields | Tensor, s: State) -> State:
        return self.group_gradient(drive, s, range(len(s)))

    def group_gradient(self, drive: Fields | Tensor, s: State, layers: Collection[int]) -> State:
        """phi - eps dE/dphi for these layers: dE/dphi_i = cos(phi_i) B_i - sin(phi_i) A_i, summed fields A and B."""
        drive = drive if isinstance(drive, Fields) else self.drive(drive)
        cos, sin = [torch.cos(v) for v in s], [torch.sin(v) for v in s]
        return tuple(
            [self._turned(drive.fields[n], cos, sin, n, phi) if n in layers else phi for n, phi in enumerate(s)]
        )

    def _turned(self, along: Tensor, cos: list[Tensor], sin: list[Tensor], n: int, phi: Tensor) -> Tensor:
        across: Tensor | None = None
        if n > 0:
            J = self.weight(n - 1)
            along, across = along + cos[n - 1] @ J, sin[n - 1] @ J
        if n < self.depth - 1:
            J = self.weight(n).mT
            along, more = along + cos[n + 1] @ J, sin[n + 1] @ J
            across = more if across is None else across + more
        slope = along * sin[n] if across is None else along * sin[n] - across * cos[n]
        if self.harmonic:
            slope = slope + 2.0 * getattr(self, f"K{n}") * sin[n] * cos[n]
        return phi - self.nudge_scale * slope

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """-eps (dE/dtheta at s_plus minus at s_minus), the batch mean; differences of cosines come before products."""
        scale, out = self.nudge_scale / len(x), dict[str, Tensor]()
        ends = [([f(v) for v in s_plus], [f(v) for v in s_minus]) for f in (torch.cos, torch.sin)]
        moved = [[a - b for a, b in zip(plus, minus, strict=True)] for plus, minus in ends]
        for n in range(self.depth):
            if n == self.depth - 1:
                out[f"W{n}{n + 1}"] = scale * (moved[0][n].mT @ x)
            else:
                parts = [
                    d[n].mT @ plus[n + 1] + minus[n].mT @ d[n + 1] for d, (plus, minus) in zip(moved, ends, strict=True)
                ]
                out[f"W{n}{n + 1}"] = scale * (parts[0] + parts[1])
            out[f"b{n}"] = scale * moved[0][n].sum(0)
            if self.harmonic:  # cos 2a - cos 2b = 2 (cos a - cos b) (cos a + cos b)
                out[f"K{n}"] = scale * (moved[0][n] * (ends[0][0][n] + ends[0][1][n])).sum(0)
        return self.learned(out)

    def operations(self) -> int:
        return 2 * super().operations()


@final
class OscillatorNet(ChainNet, frozen=True):
    """`Oscillators` as data; sizes go from the output to the input. Their cost is "phase"."""

    sizes: Annotated[tuple[Positive, ...], about("Oscillators per layer, from the output to the input.")] = (
        *(10, 120, 784),
    )
    eps: Annotated[Finite, about("Step of the phases.")] = 0.1
    bias: Annotated[bool, about("Whether layers have biases.")] = True
    harmonic: Annotated[bool, about("Whether second harmonics are trained.")] = False
    kind: Literal["oscillators"] = "oscillators"

    network = Oscillators


class PhaseError(Cost):
    """l = 1/2 |cos phi_0 - (2 y - 1)|^2: outputs in phase with 1, in antiphase with 0."""

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (torch.cos(s[0]) - (2.0 * y - 1.0)).square().sum(-1)

    def pull(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        return (-(torch.cos(s[0]) - (2.0 * y - 1.0)) * torch.sin(s[0]), *(None for _ in s[1:]))

    def scores(self, s: State) -> Tensor:
        return torch.cos(s[0])

    def check(self, s: State, y: Tensor) -> None:
        super().check(s, y)
        if y.shape != s[0].shape:
            raise ValueError(f"The target y has shape {tuple(y.shape)}; expected {tuple(s[0].shape)}, like the output.")
        check_kind("target y", y, s[0])
