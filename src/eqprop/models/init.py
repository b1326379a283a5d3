"""Initial weights: Glorot, PyTorch's default, or a user's function.

Weights are drawn on the CPU in float64, then rounded and moved, so a seed gives the same weights on every device and
in every precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

InitFunction = Callable[[str, tuple[int, ...], torch.Generator], Tensor]
Init = Literal["glorot", "default"] | InitFunction


def generator(seed: int | None) -> torch.Generator:
    """A CPU generator. Without a seed it is seeded from torch's global one, so torch.manual_seed applies."""
    chosen = int(torch.randint(2**62, ())) if seed is None else seed
    return torch.Generator().manual_seed(chosen)


@dataclass(frozen=True)
class Wanted:
    """A parameter to draw: its name, its shape and the fans and the gain that set its initial range."""

    name: str
    shape: tuple[int, ...]
    fan_in: int
    fan_out: int
    gain: float = 1.0


def add_parameters(
    module: nn.Module, wanted: Iterable[Wanted], init: Init, seed: int | None, dtype: torch.dtype | None
) -> None:
    """Draw and register the wanted parameters in the given order. Glorot sets biases (one dimension) to zero."""
    if not (init in ("glorot", "default") or callable(init)):
        raise ValueError(f"init is {init!r}; expected 'glorot', 'default' or a function (name, shape, generator).")
    source = generator(seed)
    for p in wanted:
        module.register_parameter(p.name, nn.Parameter(_draw(p, init, source).to(dtype or torch.get_default_dtype())))


def _draw(p: Wanted, init: Init, source: torch.Generator) -> Tensor:
    if callable(init):
        value = init(p.name, p.shape, source).detach()
        if tuple(value.shape) != p.shape:
            raise ValueError(f"init returned shape {tuple(value.shape)} for {p.name}; expected {p.shape}.")
        return value
    if init == "glorot":
        bound = math.sqrt(6.0 / (p.fan_in + p.fan_out)) if len(p.shape) > 1 else 0.0
    else:
        bound = 1.0 / math.sqrt(p.fan_in)
    uniform = torch.rand(p.shape, generator=source, dtype=torch.float64)
    return (2.0 * uniform - 1.0) * (p.gain * bound)
