"""Nets of a user's own that the guard trains and differentiates: a graph with a skip, an energy.

Weights come from a generator of their own, so that they do not depend on what was drawn before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eqprop import PrimitiveDynamics, from_energy
from eqprop.models import Conv, Dense, Network, Skip


def skip(seed: int, dtype: torch.dtype | None = None, side: int = 28, outputs: int = 10) -> Network:
    """An image, a convolution that pools, another of the same size joined by a skip as well, and a dense output."""
    quarter = side // 4
    return Network(
        input_shape=(1, side, side),
        layers={"out": outputs, "h2": (4, quarter, quarter), "h1": (4, quarter, quarter)},
        connections=[
            Conv("x", "h1", kernel=2, stride=2, pool=2, gain=0.5),
            Conv("h1", "h2", kernel=3, padding=1, gain=0.5),
            Skip("h1", "h2", gain=0.5, name="skip"),
            Dense("h2", "out", gain=0.5),
        ],
        activation={"out": "identity", "*": "hard-sigmoid"},
        seed=seed,
        dtype=dtype,
    )


def energy(seed: int, dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (10, 24, 784)) -> PrimitiveDynamics:
    """E = 1/2 |s|^2 - <s0, W01 tanh(s1)> - <s1, W1x x> - <b0, s0>; the sizes of s0, s1 and x."""
    source = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return ((2 * torch.rand(shape, generator=source, dtype=torch.float64) - 1) / shape[-1] ** 0.5).to(dtype)

    def function(x: Tensor, s: tuple[Tensor, ...], theta: dict[str, Tensor]) -> Tensor:
        s0, s1 = s
        joined = (s0 * (s1.tanh() @ theta["W01"].T)).sum(-1) + (s1 * (x.flatten(1) @ theta["W1x"].T)).sum(-1)
        return 0.5 * (s0.square().sum(-1) + s1.square().sum(-1)) - joined - s0 @ theta["b0"]

    parameters = {"W01": drawn(*sizes[:2]), "W1x": drawn(*sizes[1:]), "b0": drawn(sizes[0])}
    return from_energy(function, parameters, layers=sizes[:2], eps=0.5, name="energy")
