"""What physical nets have in common: layers from the output to the input, each joined to the next by weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.dynamics import PrimitiveDynamics
from eqprop.models.connections import Weight, add_parameters
from eqprop.models.settings import ModelSettings, from_input
from eqprop.state import LayerParameters

Draw = Callable[[str, tuple[int, ...], torch.Generator], Tensor]


class Chain(PrimitiveDynamics):
    """Base of the physical nets: W01 (n0, n1), W12, ... between layers and the input, b0, b1, ... of the layers."""

    sizes: tuple[int, ...]

    def take_sizes(self, sizes: Sequence[int]) -> None:
        """Keep the sizes, checked, from the output to the input."""
        self.sizes = tuple(sizes)
        if len(self.sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in self.sizes):
            raise ValueError(f"sizes is {self.sizes}; expected two or more numbers, from the output to the input.")
        self.depth, self.input_shape = len(self.sizes) - 1, (self.sizes[-1],)

    def draw_parameters(self, draw: Draw, inputs: int, bias: bool, seed: int | None, dtype: torch.dtype | None) -> None:
        """Register W01, b0, W12, b1, ... as `draw` makes the weights; biases are 0. The last layer sees `inputs`."""
        wanted = {}
        for n, (post, pre) in enumerate(pairwise((*self.sizes[:-1], inputs))):
            wanted[f"W{n}{n + 1}"] = Weight((post, pre), pre, post)
            wanted |= {f"b{n}": Weight((post,), pre, post)} if bias else {}
        add_parameters(self, wanted, lambda *of: draw(*of) if len(of[1]) > 1 else torch.zeros(of[1]), seed or 0, dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__} {from_input(self.sizes)}"

    def weight(self, n: int) -> Tensor:
        """The weights between layers n and n + 1, (n_n, n_{n+1}); the last are those of the input."""
        return getattr(self, f"W{n}{n + 1}")

    def bias(self, n: int) -> Tensor | None:
        found: Tensor | None = getattr(self, f"b{n}", None)
        return found

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return tuple(
            LayerParameters((f"W{n}{n + 1}",), None if self.bias(n) is None else f"b{n}") for n in range(self.depth)
        )

    def learned(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of trained parameters, in their order."""
        return {name: found[name] for name, p in self.named_parameters() if p.requires_grad}

    def operations(self) -> int:
        return sum(4 * a * b for a, b in pairwise(self.sizes[:-1]))


class ChainNet(ModelSettings, frozen=True, kw_only=True):
    """Base of physical nets as data; each has its sizes, from the output to the input."""

    def __str__(self) -> str:
        sizes: tuple[int, ...] = self.sizes  # type: ignore[attr-defined]
        return f"{self.kind} {from_input(sizes)}"
