"""The state of a network: a tuple of tensors, one a layer, `s[0]` the output.

A layer is laid out as `(B, ...)`, samples first. Several networks of one shape may run stacked in a leading
dimension, `(R, B, ...)`; the operations here then act on every network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class LayerParameters(NamedTuple):
    """The names of the parameters that feed one layer: its weights, and its bias if it has one."""

    weights: tuple[str, ...]
    bias: str | None = None


def detach(s: State) -> State:
    return tuple(layer.detach() for layer in s)


def subtract(a: State, b: State) -> State:
    return tuple(p - q for p, q in zip(a, b, strict=True))


def scale(s: State, factor: float) -> State:
    return tuple(layer * factor for layer in s)


def add(a: State, b: Sequence[Tensor | None]) -> State:
    """a + b, where a layer of b that is None counts as zero."""
    return tuple(p if q is None else p + q for p, q in zip(a, b, strict=True))


def distance(a: State, b: State, sample_dims: int) -> Tensor:
    """max |a - b| over the neurons of each sample, shape (B,) or (R, B).

    `sample_dims` counts the leading dimensions that number samples: 1, or 2 when networks are stacked.
    """
    layers = [(p - q).abs().flatten(sample_dims).amax(-1) for p, q in zip(a, b, strict=True)]
    return torch.stack(layers).amax(0)


def per_sample(values: Tensor, layer: Tensor) -> Tensor:
    """One value per sample, (B,) or (R, B), or per network, (R,), shaped to multiply or mask a layer or a parameter."""
    return values.view(*values.shape, *[1] * (layer.dim() - values.dim()))


def first_bad_layer(s: State) -> int | None:
    """The index of the first layer that holds a NaN or an infinity; None if all are finite."""
    for n, layer in enumerate(s):
        if not bool(torch.isfinite(layer).all()):
            return n
    return None


def layer_name(names: Sequence[str] | None, n: int) -> str:
    """The paper's name of layer n, s0 being the output."""
    return f"s{n}" if names is None else names[n]
