"""Nets as graphs that the tests share: random ones, a connection of a user's own, the field's nets made small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from eqprop.models import Connection, Conv, Dense, Lateral, Network, Skip, Transposed
from eqprop.models.connections import Shape, Theta, Weight
from helpers.nets import F64


@dataclass(frozen=True)
class Own(Connection):
    """A user's connection: not linear in pre, two parameters, everything but the forward map by autodiff."""

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        size = torch.Size(pre).numel()
        return {"W": Weight((torch.Size(post).numel(), size), size, 1), "tilt": Weight((1, size), size, 1)}

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        flat = pre.flatten(1)
        return (flat + theta["tilt"] * flat * flat) @ theta["W"].mT


@st.composite
def convs(draw: st.DrawFn, pre: str, post: str, shape: Shape) -> tuple[Connection, Shape]:
    """A convolution that fits a layer of this shape, and the layer it makes."""
    channels, height, width = shape
    kernel = draw(st.integers(1, min(3, height, width)))
    stride, padding = draw(st.integers(1, 2)), draw(st.integers(0, kernel - 1))
    groups = draw(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
    sides = [(n + 2 * padding - kernel) // stride + 1 for n in (height, width)]
    pool = draw(st.integers(1, min(2, *sides)))
    pooling: Any = draw(st.sampled_from(["max", "average", "soft"]))
    made = Conv(
        pre, post, kernel=kernel, stride=stride, padding=padding, groups=groups, pool=pool, pooling=pooling, gain=0.7
    )
    return made, (groups * draw(st.integers(1, 2)), *(n // pool for n in sides))


@st.composite
def transposed(draw: st.DrawFn, pre: str, post: str, shape: Shape) -> tuple[Connection, Shape]:
    channels, *sides = shape
    stride, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rest = draw(st.integers(0, stride - 1))
    groups = draw(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
    made = Transposed(pre, post, kernel=kernel, stride=stride, rest=rest, groups=groups)
    return made, (groups * draw(st.integers(1, 2)), *((n - 1) * stride + kernel + rest for n in sides))


@st.composite
def grown(draw: st.DrawFn, pre: str, post: str, shape: Shape) -> tuple[Connection, Shape]:
    """A connection from a layer of this shape, and the layer it makes."""
    kinds = ["dense", "own", "skip"] + (["conv", "conv", "transposed"] if len(shape) == 3 else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "conv":
        return draw(convs(pre, post, shape))
    if kind == "transposed":
        return draw(transposed(pre, post, shape))
    if kind == "skip":
        return Skip(pre, post, learned=draw(st.booleans()), gain=0.5), shape
    new: Shape = draw(st.sampled_from([(2,), (3,), (1, 2, 2)]))
    return (Dense(pre, post) if kind == "dense" else Own(pre, post, gain=0.5)), new


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A net of up to four hidden layers, each grown from any earlier one, with further connections among them."""
    shapes: dict[str, Shape] = {"x": draw(st.sampled_from([(4,), (1, 5, 4), (2, 4, 4)]))}
    connections: list[Connection] = []
    for n in range(draw(st.integers(1, 4))):
        pre, post = draw(st.sampled_from(list(shapes) if n else ["x"])), f"h{n}"
        made, shapes[post] = draw(grown(pre, post, shapes[pre]))
        connections.append(made)
    hidden = [name for name in shapes if name != "x"]
    connections.append(Dense(hidden[-1], "out"))
    for layer in hidden:
        if draw(st.integers(0, 3)) == 0:
            connections.append(Lateral(layer))
        other = draw(st.sampled_from([name for name in shapes if name != layer]))
        if draw(st.integers(0, 2)) == 0:
            kind = Skip if shapes[other] == shapes[layer] and draw(st.booleans()) else Dense
            connections.append(kind(other, layer, name=f"V_{layer}"))
    layers: dict[str, int | Shape] = {"out": draw(st.integers(1, 3))}
    layers |= {name: shapes[name] for name in reversed(hidden)}
    sigma = ["tanh", "sigmoid", "hard-sigmoid", "half-hard-sigmoid", "relu", "relu6", "identity"]
    options: dict[str, Any] = {"bias": draw(st.booleans()), "seed": draw(st.integers(0, 2**31)), "dtype": F64}
    if draw(st.booleans()):
        options |= {
            "setting": "energy-based",
            "eps": draw(st.sampled_from([0.2, 0.5, 1.0])),
            "clip": draw(st.booleans()),
        }
    activation = {"out": draw(st.sampled_from(sigma)), "*": draw(st.sampled_from(sigma))}
    return Network(shapes["x"], layers, connections, activation, **options)
