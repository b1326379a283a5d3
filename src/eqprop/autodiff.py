"""Automatic differentiation: analytic derivatives, and calls with substituted parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call


def check_recordable() -> None:
    """Raise RuntimeError where autograd would record nothing and a derivative be zero in silence."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Derivatives cannot be computed under torch.inference_mode(): autograd records nothing there. Leave that "
            "mode for the call, or use torch.no_grad() in its place."
        )


def derivative(f: Tensor, inputs: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """df/dz for each input z, None where f does not depend on it.

    For an analytic f of complex inputs this is the complex derivative. torch's own gradient is its conjugate, the
    direction of steepest ascent of Re f; on real inputs the two coincide.
    """
    check_recordable()
    grads = torch.autograd.grad(f, inputs, torch.ones_like(f), create_graph=create_graph, allow_unused=True)
    return tuple(g.conj().resolve_conj() if g is not None and g.is_complex() else g for g in grads)


def leaf(v: Tensor) -> Tensor:
    """A view of v to differentiate by: only this use of v counts, and forward-mode tangents pass through it.

    v itself may be part of a graph, in which other inputs were made of it: by v, a derivative would be total.
    """
    view = v.view_as(v)
    return view if view.requires_grad else view.requires_grad_()


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_own_precision(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function, or the steps of a generator, compute in the precision of its tensors whatever autocast says.

    Autocast would round products to half precision, which loses what a nudge moves. Every entry that runs a model
    passes here; a single formula (`model.transition`, `model.primitive`) is the caller's own.
    """
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def guarded_steps(*args: Any, **options: Any) -> Iterator[Any]:
            steps = function(*args, **options)
            while True:
                with _autocast_off():
                    try:
                        step = next(steps)
                    except StopIteration:
                        return
                yield step

        return cast("Callable[Parameters, Result]", guarded_steps)

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **options)
        with _autocast_off():
            return function(*args, **options)

    return guarded


@contextmanager
def _autocast_off() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class _Holder(nn.Module):
    """A common parent for modules; calling it runs a function."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


def with_values(
    modules: Sequence[nn.Module], values: Sequence[Mapping[str, Tensor]], run: Callable[[], Result]
) -> Result:
    """Call run() with the parameters and buffers named in `values` replaced, module by module.

    What modules share, such as a readout with the model's own weights, takes the value of the first.
    """
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for n, (module, part) in enumerate(zip(modules, values, strict=True)):
        own = dict((*module.named_parameters(), *module.named_buffers()))
        named |= {f"held.{n}.{name}": v for name, v in part.items() if id(own[name]) not in seen}
        seen |= {id(own[name]) for name in part}
    result: Result = functional_call(_Holder(modules), named, (run,))
    return result


def in_complex(modules: Sequence[nn.Module], run: Callable[[], Result]) -> Result:
    """Call run() with every floating-point parameter and buffer of the modules converted to complex."""
    values = [
        {name: complex_of(v) for name, v in (*module.named_parameters(), *module.named_buffers())} for module in modules
    ]
    return with_values(modules, values, run)


def doubled(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module in float64, by name, trainable where they are."""
    held = (*module.named_parameters(), *module.named_buffers())
    return {name: wide(v).requires_grad_(v.requires_grad) for name, v in held if v.is_floating_point()}


def wide(v: Tensor) -> Tensor:
    """v in float64, or complex128; tensors that are not floating-point are returned unchanged."""
    if v.is_complex():
        return v.detach().to(torch.complex128)
    return v.detach().double() if v.is_floating_point() else v


def complex_of(v: Tensor) -> Tensor:
    """v as a complex leaf, trainable if v is; tensors that are not floating-point are returned unchanged."""
    if not v.is_floating_point():
        return v
    return v.detach().to(v.dtype.to_complex()).requires_grad_(v.requires_grad)
