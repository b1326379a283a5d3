"""Spin nets: layers of spins of -1 or 1 joined by couplings, for Ising machines and for binary networks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from eqprop.cost import Cost, check_kind
from eqprop.dynamics import NudgeSite
from eqprop.physical.chain import Chain, ChainNet
from eqprop.settings import Positive, about
from eqprop.state import State


@final
class Spins(Chain):
    """Layers of spins s = -1 or 1; the input x enters as a field on the layer next to it:

        Phi = -E = sum_ij J_ij s_i s_j + sum_i h_i s_i,   s_i <- sign(dPhi/ds_i + nudge),   s = 1 where that is 0

    A step turns each spin along its field. In sweeps every other layer moves in turn and E never rises; the state it
    ends in is a minimum over single spins, which annealing (`eqprop.physical.ising.Ising`) finds lower.

    seed        of the couplings; None: torch's own stream
    dtype       of the couplings; None: torch's default
    sizes       from the output to the input, such as (40, 120, 784)
    gains       per layer from the output on: couplings are drawn from U(-1, 1) gain/sqrt(fan_in); one for all, or each
    limit       of couplings and biases, which `constrain` keeps; None: no limit

    Parameters W01 (n0, n1), W12, ... and biases b0, b1, ...
    """

    bipartite = True
    differentiable = False
    nudge_site: NudgeSite = "inside"

    def __init__(
        self,
        sizes: Sequence[int],
        gains: Sequence[float] = (1.0,),
        limit: float | None = 1.0,
        *,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.take_sizes(sizes)
        gains = tuple(gains)
        if len(gains) not in (1, self.depth) or not all(math.isfinite(g) for g in gains):
            raise ValueError(f"gains is {gains}; expected one number, or one per layer of couplings: {self.depth}.")
        if limit is not None and not (math.isfinite(limit) and limit > 0.0):
            raise ValueError(f"limit is {limit!r}; expected a positive number, or None for no limit.")
        self.limit = limit
        scales = {f"W{n}{n + 1}": gains[n if len(gains) > 1 else 0] for n in range(self.depth)}

        def draw(name: str, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
            drawn = 2.0 * torch.rand(shape, generator=source, dtype=torch.float64) - 1.0
            return scales[name] / math.sqrt(shape[1]) * drawn

        self.draw_parameters(draw, self.sizes[-1], True, seed, dtype)

    def init_state(self, x: Tensor) -> State:
        return tuple(x.new_ones(*x.shape[:1], n) for n in self.sizes[:-1])

    def drive(self, x: Tensor) -> Tensor:
        """The field of the input on the last layer."""
        return x @ self.weight(self.depth - 1).mT

    def fields(self, drive: Tensor) -> tuple[Tensor, ...]:
        """h per layer, (B, n): biases, and the input's field on the layer next to it."""
        rest = [getattr(self, f"b{n}").expand(len(drive), -1) for n in range(self.depth - 1)]
        return (*rest, getattr(self, f"b{self.depth - 1}") + drive)

    def primitive(self, x: Tensor, s: State) -> Tensor:
        """-E, per sample."""
        phi = sum(((h * v).sum(-1) for h, v in zip(self.fields(self.drive(x)), s, strict=True)), x.new_zeros(()))
        for n, (post, pre) in enumerate(pairwise(s)):
            phi = phi + ((post @ self.weight(n)) * pre).sum(-1)
        return phi

    def gradient(self, drive: Tensor, s: State) -> State:
        return self.group_gradient(drive, s, range(len(s)))

    def group_gradient(self, drive: Tensor, s: State, layers: Collection[int]) -> State:
        fields = self.fields(drive)
        return tuple([self._felt(fields[n], s, n) if n in layers else v for n, v in enumerate(s)])

    def half_step(self, drive: Tensor, s: State, parity: int) -> State:
        return self.group_step(drive, s, range(parity, len(s), 2))

    def _felt(self, h: Tensor, s: State, n: int) -> Tensor:
        """The field on the spins of a layer."""
        if n > 0:
            h = h + s[n - 1] @ self.weight(n - 1)
        return h + s[n + 1] @ self.weight(n).mT if n < self.depth - 1 else h

    def squash(self, s: State) -> State:
        return tuple([torch.where(v >= 0.0, torch.ones_like(v), -torch.ones_like(v)) for v in s])

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for n, (a, b) in enumerate(zip(s_plus, s_minus, strict=True)):
            moved = (a - b) / len(x)
            if n == self.depth - 1:
                out[f"W{n}{n + 1}"] = moved.mT @ x
            else:
                after = (s_plus[n + 1] - s_minus[n + 1]) / len(x)
                out[f"W{n}{n + 1}"] = moved.mT @ s_plus[n + 1] + b.mT @ after
            out[f"b{n}"] = moved.sum(0)
        return self.learned(out)

    def constrained(self) -> dict[str, Tensor]:
        limit = self.limit
        return {} if limit is None else {name: p.clamp(-limit, limit) for name, p in self.named_parameters()}


@final
class SpinNet(ChainNet, frozen=True):
    """`Spins` as data; sizes go from the output to the input. Their cost is "spins"."""

    sizes: Annotated[tuple[Positive, ...], about("Spins per layer, from the output to the input.")] = (40, 120, 784)
    gains: Annotated[tuple[float, ...], about("Gain of the initial couplings, one or one per layer.")] = (*(1.0,),)
    limit: Annotated[float, about("Largest coupling and bias.", gt=0, le=1e9)] | None = 1.0
    nudge_site: Annotated[NudgeSite, about("Where the nudge enters: inside, as a field.")] = "inside"
    kind: Literal["spins"] = "spins"

    network = Spins


class SpinError(Cost):
    """l = sum (1 - s_0 t), t = 2 y - 1 repeated for the outputs of a class: 1/2 |s_0 - t|^2 for spins of -1 and 1.

    Its nudge is a field beta t, whatever the spins are. A class's score is the mean of its outputs, which stand side by
    side.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.classes = classes

    def for_classes(self, classes: int) -> SpinError:
        return SpinError(classes)

    def target(self, y: Tensor, output: Tensor) -> Tensor:
        """t, shaped like the output."""
        return (2.0 * y - 1.0).to(output).repeat_interleave(output.shape[-1] // self.classes, -1)

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        return (1.0 - s[0] * self.target(y, s[0])).sum(-1)

    def pull(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        return (-self.target(y, s[0]), *(None for _ in s[1:]))

    def scores(self, s: State) -> Tensor:
        return s[0].unflatten(-1, (self.classes, -1)).mean(-1)

    def check(self, s: State, y: Tensor) -> None:
        super().check(s, y)
        outputs = s[0].shape[-1]
        if outputs % self.classes or y.shape != (*s[0].shape[:-1], self.classes):
            raise ValueError(
                f"The target y has shape {tuple(y.shape)} and the output {tuple(s[0].shape)}; expected a y for each of "
                f"{self.classes} classes, and as many outputs for each."
            )
        check_kind("target y", y, s[0])
