"""Spin nets: layers of spins of -1 or 1 joined by couplings, for Ising machines and for binary networks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Annotated, Literal, final

import torch
from torch import Tensor, nn

from eqprop.dynamics import NudgeSite, PrimitiveDynamics
from eqprop.models.settings import ModelSettings
from eqprop.settings import Positive, about
from eqprop.state import LayerParameters, State


@final
class Spins(PrimitiveDynamics):
    """Layers of spins s = -1 or 1; the input x enters as a field on the layer next to it:

        Phi = -E = sum_ij J_ij s_i s_j + sum_i h_i s_i,   s_i <- sign(dPhi/ds_i + nudge),   s = 1 where that is 0

    A step turns each spin along its field. In sweeps every other layer moves in turn and E never rises; the state it
    ends in is a minimum over single spins, which annealing (`eqprop.physical.Ising`) finds lower.

    seed        of the couplings; None: torch's own stream
    dtype       of the couplings; None: torch's default
    sizes       from the output to the input, such as (40, 120, 784)
    gains       per layer from the output on: couplings are drawn from U(-1, 1) gain/sqrt(fan_in); one for all, or each
    limit       of couplings and biases, which `constrain` keeps; None: no limit

    Parameters W01 (n0, n1), W12, ... and biases b0, b1, ...
    """

    bipartite = True
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
        sizes, gains = tuple(sizes), tuple(gains)
        if len(sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(f"sizes is {sizes}; expected two or more numbers of spins, from the output to the input.")
        if len(gains) not in (1, len(sizes) - 1) or not all(math.isfinite(g) for g in gains):
            raise ValueError(f"gains is {gains}; expected one number, or one per layer of couplings: {len(sizes) - 1}.")
        if limit is not None and not (math.isfinite(limit) and limit > 0.0):
            raise ValueError(f"limit is {limit!r}; expected a positive number, or None for no limit.")
        self.sizes, self.depth, self.limit, self.input_shape = sizes, len(sizes) - 1, limit, (sizes[-1],)
        generator = torch.Generator().manual_seed(0 if seed is None else seed)
        dtype = dtype or torch.get_default_dtype()
        scales = gains * self.depth if len(gains) == 1 else gains
        for n, ((post, pre), gain) in enumerate(zip(pairwise(sizes), scales, strict=True)):
            drawn = 2.0 * torch.rand(post, pre, generator=generator, dtype=torch.float64) - 1.0
            setattr(self, f"W{n}{n + 1}", nn.Parameter((gain / math.sqrt(pre) * drawn).to(dtype)))
            setattr(self, f"b{n}", nn.Parameter(torch.zeros(post, dtype=dtype)))

    def __repr__(self) -> str:
        return f"Spins {'-'.join(map(str, reversed(self.sizes)))}"

    def weight(self, n: int) -> Tensor:
        """The couplings between layers n and n + 1, (n_n, n_{n+1}); the last are those of the input."""
        return getattr(self, f"W{n}{n + 1}")

    def bias(self, n: int) -> Tensor:
        return getattr(self, f"b{n}")

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return _parameters(self.depth)

    def init_state(self, x: Tensor) -> State:
        return tuple(x.new_ones(*x.shape[:1], n) for n in self.sizes[:-1])

    def drive(self, x: Tensor) -> Tensor:
        """The field of the input on the last layer."""
        return x @ self.weight(self.depth - 1).mT

    def fields(self, drive: Tensor) -> tuple[Tensor, ...]:
        """h per layer, (B, n): biases, and the input's field on the layer next to it."""
        rest = [self.bias(n).expand(len(drive), -1) for n in range(self.depth - 1)]
        return (*rest, self.bias(self.depth - 1) + drive)

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
        return {name: out[name] for name, p in self.named_parameters() if p.requires_grad}

    def constrained(self) -> dict[str, Tensor]:
        limit = self.limit
        return {} if limit is None else {name: p.clamp(-limit, limit) for name, p in self.named_parameters()}

    def operations(self) -> int:
        return sum(4 * a * b for a, b in pairwise(self.sizes[:-1]))


def _parameters(depth: int) -> tuple[LayerParameters, ...]:
    return tuple(LayerParameters((f"W{n}{n + 1}",), f"b{n}") for n in range(depth))


@final
class SpinNet(ModelSettings, frozen=True):
    """`Spins` as data; sizes go from the output to the input. Their cost is "spins"."""

    sizes: Annotated[tuple[Positive, ...], about("Spins per layer, from the output to the input.")] = (40, 120, 784)
    gains: Annotated[tuple[float, ...], about("Gain of the initial couplings: one number, or one per layer from the output.")] = (
        *(1.0,),
    )
    limit: Annotated[float, about("Largest coupling and bias.", gt=0, le=1e9)] | None = 1.0
    nudge_site: Annotated[NudgeSite, about("Where the nudge enters: inside, as a field.")] = "inside"
    kind: Literal["spins"] = "spins"

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return _parameters(len(self.sizes) - 1)

    @property
    def weights(self) -> int:
        return sum(a * b for a, b in pairwise(self.sizes))

    def build(self, seed: int, dtype: torch.dtype) -> Spins:
        return Spins(self.sizes, self.gains, self.limit, seed=seed, dtype=dtype)

    def __str__(self) -> str:
        return f"spins {'-'.join(str(n) for n in reversed(self.sizes))}"
