"""Stack networks of the same shape into one model, with a leading dimension on parameters and states."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from eqprop.dynamics import PrimitiveDynamics

Model = TypeVar("Model", bound=PrimitiveDynamics)


def stack(models: Sequence[Model]) -> Model:
    """Stack the parameters of R models into one model; x, y and states are then (R, B, ...).

    The networks must be built alike; they remain independent of each other.
    """
    if not models:
        raise ValueError("No networks to stack; expected at least one.")
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in models]
    if any(type(m) is not type(models[0]) or s != shapes[0] for m, s in zip(models, shapes, strict=True)):
        raise ValueError("The networks differ in type or shapes; only networks built alike can be stacked.")
    first = _build(models[0])
    for m in models:
        unlike = [name for name, value in _build(m).items() if not _same(value, first.get(name))]
        if unlike:
            raise ValueError(f"The networks differ in {', '.join(unlike)}; only networks built alike can be stacked.")
    if models[0].networks is not None:
        raise ValueError("The networks are already stacked; expected single ones. Separate them with unstack.")
    if models[0].input_shape is None:
        raise ValueError(
            f"{type(models[0]).__name__} has no input_shape; expected one, to recognise stacked inputs. Set it on the "
            "model."
        )
    stacked = copy.deepcopy(models[0])
    for name in shapes[0]:
        value = torch.stack([m.get_parameter(name).detach() for m in models])
        _replace(stacked, name, value)
    stacked.networks = len(models)
    _check_stacks(stacked, models[0])
    return stacked


@torch.no_grad()
def _check_stacks(stacked: Model, single: Model) -> None:
    """Raise ValueError unless a step of the stack takes layers (R, B, ...): models of functions are for one network."""
    assert single.input_shape is not None, "checked by stack"
    networks, like = stacked.networks or 1, next(single.parameters())
    x = like.new_zeros(networks, 2, *single.input_shape)
    expected = [(networks, *layer.shape) for layer in single.init_state(x[0])]
    start = stacked.init_state(x)
    try:
        fits = [layer.shape for layer in start] == expected
        fits = fits and [layer.shape for layer in stacked.transition(x, start)] == expected
    except (RuntimeError, ValueError, TypeError, IndexError):
        fits = False
    if not fits:
        raise ValueError(
            f"{single.title} is written for one network: its step does not take states with a leading dimension for "
            f"the {networks} networks. Train one network at a time, or write it as an eqprop.models.Network."
        )


def unstack(model: Model, r: int) -> Model:
    """Extract network r of a stacked model."""
    if model.networks is None or not 0 <= r < model.networks:
        count = "a single network" if model.networks is None else f"{model.networks} stacked networks"
        raise ValueError(f"Got network {r} of {count}; expected an index from 0 into a stacked model.")
    single = copy.deepcopy(model)
    for name, p in model.named_parameters():
        _replace(single, name, p.detach()[r].clone())
    single.networks = None
    return single


def _build(model: PrimitiveDynamics) -> dict[str, object]:
    """How a model was built: what it and its parts hold, its buffers, and which of its parameters are trained."""
    own = vars(nn.Module())
    parts = ((f"{path}." if path else "", vars(m)) for path, m in model.named_modules())
    built = {
        path + name: v for path, held in parts for name, v in held.items() if name == "training" or name not in own
    }
    built |= dict(model.named_buffers())
    return built | {f"whether {name} is trained": p.requires_grad for name, p in model.named_parameters()}


def _same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _replace(model: PrimitiveDynamics, name: str, value: Tensor) -> None:
    """Replace a parameter by a value of another shape, trainable if the parameter was, wherever it is shared."""
    old = model.get_parameter(name)
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    shared = [other for other, p in model.named_parameters(remove_duplicate=False) if p is old]
    for other in shared:
        owner, _, leaf = other.rpartition(".")
        setattr(model.get_submodule(owner), leaf, new)
