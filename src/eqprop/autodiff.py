"""Automatic differentiation: analytic derivatives, and other values in the place of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call


def derivative(f: Tensor, inputs: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """df/dz for each input z, None where f does not depend on it.

    For an analytic f of complex inputs it is the complex derivative. torch's own gradient is its conjugate, the
    direction of steepest ascent of Re f; on real inputs the two are one.
    """
    grads = torch.autograd.grad(f, inputs, torch.ones_like(f), create_graph=create_graph, allow_unused=True)
    return tuple(g.conj().resolve_conj() if g is not None and g.is_complex() else g for g in grads)


Result = TypeVar("Result")


class _Holder(nn.Module):
    """Gives modules a common parent, whose call runs a function."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


def with_values(
    modules: Sequence[nn.Module], values: Sequence[Mapping[str, Tensor]], run: Callable[[], Result]
) -> Result:
    """run(), while the parameters and buffers of each module that `values` names have those values."""
    named = {f"held.{n}.{name}": v for n, part in enumerate(values) for name, v in part.items()}
    result: Result = functional_call(_Holder(modules), named, (run,))
    return result


def in_complex(modules: Sequence[nn.Module], run: Callable[[], Result]) -> Result:
    """run(), while every floating parameter and buffer of the modules is complex, with the same values."""
    values = [
        {name: complex_of(v) for name, v in (*module.named_parameters(), *module.named_buffers())} for module in modules
    ]
    return with_values(modules, values, run)


def complex_of(v: Tensor) -> Tensor:
    """The same numbers as complex ones, a leaf that learns if v does; what is not floating stays as it is."""
    if not v.is_floating_point():
        return v
    return v.detach().to(v.dtype.to_complex()).requires_grad_(v.requires_grad)
