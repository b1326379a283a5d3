"""The state of a network: a tuple with one tensor per layer, `s[0]` the output.

A layer has shape `(B, ...)`, samples first. Networks of the same shape can be stacked in a leading dimension,
`(R, B, ...)`; the operations here then act on every network.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class LayerParameters(NamedTuple):
    """The names of the parameters that feed a layer: its weights, and its bias if it has one."""

    weights: tuple[str, ...]
    bias: str | None = None


def detach(s: State) -> State:
    return tuple(layer.detach() for layer in s)


def subtract(a: State, b: State) -> State:
    return tuple(p - q for p, q in zip(a, b, strict=True))


def scale(s: State, factor: float) -> State:
    return tuple(layer * factor for layer in s)


def add(a: State, b: Sequence[Tensor | None]) -> State:
    """a + b, treating layers of b that are None as zero."""
    return tuple(p if q is None else p + q for p, q in zip(a, b, strict=True))


def distance(a: State, b: State, sample_dims: int) -> Tensor:
    """max |a - b| over the neurons of each sample, shape (B,) or (R, B).

    `sample_dims` is the number of leading dimensions that index samples: 1, or 2 for stacked networks.
    """
    return distances(a, b, sample_dims).amax(0)


def distances(a: State, b: State, sample_dims: int) -> Tensor:
    """The same layer by layer, (layers, B) or (layers, R, B)."""
    layers = [(p - q).abs().flatten(sample_dims).amax(-1) for p, q in zip(a, b, strict=True)]
    return torch.stack(layers)


def per_sample(values: Tensor, layer: Tensor) -> Tensor:
    """Reshape values per sample, (B,) or (R, B), or per network, (R,), to broadcast against a layer or parameter."""
    return values.view((*values.shape, *[1] * (layer.dim() - values.dim())))


def first_bad_layer(s: State) -> int | None:
    """The index of the first layer with a NaN or infinity; None if all are finite."""
    for n, layer in enumerate(s):
        if not bool(torch.isfinite(layer).all()):
            return n
    return None


def layer_name(names: Sequence[str] | None, n: int) -> str:
    """The paper's name for layer n; s0 is the output."""
    return f"s{n}" if names is None else names[n]


def zero_state(x: Tensor, shapes: Sequence[tuple[int, ...]], samples: Sequence[int]) -> State:
    return tuple(torch.zeros(*samples, *shape, dtype=x.dtype, device=x.device) for shape in shapes)


def is_number(value: object) -> bool:
    """Whether it is a real number, of Python or numpy; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)
