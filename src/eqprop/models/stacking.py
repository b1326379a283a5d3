"""Several networks of one shape as one: parameters carry a leading dimension, states too."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from eqprop.dynamics import PrimitiveDynamics

Model = TypeVar("Model", bound=PrimitiveDynamics)


def stack(models: Sequence[Model]) -> Model:
    """One model whose parameters are those of the given ones, stacked: x, y and states are then (R, B, ...).

    The networks must be built alike; they stay independent of each other.
    """
    if not models:
        raise ValueError("No networks to stack; expected at least one.")
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in models]
    if any(type(m) is not type(models[0]) or s != shapes[0] for m, s in zip(models, shapes, strict=True)):
        raise ValueError("The networks differ in type or shapes; only networks built alike can be stacked.")
    if models[0].input_shape is None:
        raise ValueError(
            f"{type(models[0]).__name__} gives no input_shape, without which stacked inputs are not told apart."
        )
    stacked = copy.deepcopy(models[0])
    for name in shapes[0]:
        value = torch.stack([m.get_parameter(name).detach() for m in models])
        setattr(stacked, name, nn.Parameter(value))
    return stacked


def unstack(model: Model, r: int) -> Model:
    """Network r of a stacked model, as a model of its own."""
    single = copy.deepcopy(model)
    for name, p in model.named_parameters():
        setattr(single, name, nn.Parameter(p.detach()[r].clone()))
    return single
