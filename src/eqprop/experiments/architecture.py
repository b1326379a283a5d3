"""Network architectures as data; each builds its network from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch

from eqprop.dynamics import Dynamics
from eqprop.messages import shown, unknown
from eqprop.models import Connection, Convolutional, Layered, Network
from eqprop.models.connections import CONNECTIONS
from eqprop.models.convolutional import convolutional_parameters
from eqprop.models.layered import layered_parameters
from eqprop.state import LayerParameters

InitName = Literal["glorot", "default"]
Factory = Callable[[int], Dynamics]
"""Builds a custom network from a seed."""

MOST_WEIGHTS = 500_000_000
"""The largest network built, in weights: 2 GB in float32, as much again for each gradient."""
LARGEST = float(torch.finfo(torch.float32).max)
"""Numbers beyond this are infinite in float32, in which networks are trained."""


def check_types(values: Any) -> None:
    """Raise unless the fields of a dataclass, read from a file perhaps, have the types they are declared with."""
    hints = get_type_hints(type(values))
    for field in fields(values):
        value, kind = getattr(values, field.name), hints[field.name]
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise ValueError(unknown(field.name, str(value), get_args(kind)))
        elif not _has_type(value, kind):
            raise ValueError(f"{field.name} is {shown(value)}; expected {_described(kind)}.")


def _has_type(value: object, kind: Any) -> bool:
    if get_origin(kind) is UnionType:
        return any(_has_type(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        first, rest = get_args(kind)[0], get_args(kind)[1:]
        if not isinstance(value, tuple | list) or rest not in ((...,), (first,) * (len(value) - 1)):
            return False
        return all(_has_type(each, first) and each > 0 for each in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str) and value.isprintable()
    return isinstance(value, get_origin(kind) or kind)


def _described(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(_described(each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        length = "" if ... in get_args(kind) else f"{len(get_args(kind))} "
        return f"{length}integers above 0 in a list"
    names = {float: "a finite number", int: "an integer", str: "a text of printable characters", bool: "true or false"}
    return names.get(kind, "nothing" if kind is NoneType else "a table" if get_origin(kind) is Mapping else str(kind))


def _check_weights(sizes: str, weights: int) -> None:
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{sizes} has {weights} weights; at most {MOST_WEIGHTS} are built. Make it smaller.")


@dataclass(frozen=True)
class LayeredNet:
    """A fully connected layered net (see `eqprop.models.Layered`); sizes go from the output to the input."""

    sizes: tuple[int, ...] = (10, 512, 784)
    setting: Literal["energy-based", "prototypical"] = "prototypical"
    activation: str = "sigmoid"
    eps: float | None = None
    clip: bool = False
    output_slope: bool = True
    bias: bool = True
    kind: Literal["layered"] = "layered"

    def __post_init__(self) -> None:
        check_types(self)
        _check_weights(f"A net of sizes {shown(self.sizes)}", sum(a * b for a, b in pairwise(self.sizes)))

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        """The names of each layer's parameters, output first."""
        return layered_parameters(len(self.sizes) - 1, self.bias)

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        return Layered(
            self.sizes,
            self.setting,
            self.activation,
            eps=self.eps,
            clip=self.clip,
            output_slope=self.output_slope,
            bias=self.bias,
            init=init,
            seed=seed,
            dtype=dtype,
        )

    def without_output(self) -> LayeredNet:
        """The same net without the output layer, which a readout replaces."""
        if len(self.sizes) < 3:
            raise ValueError(f"A net of sizes {self.sizes} has no hidden layer to read; expected at least three sizes.")
        return replace(self, sizes=self.sizes[1:])

    def __str__(self) -> str:
        return "-".join(str(n) for n in reversed(self.sizes))


@dataclass(frozen=True)
class ConvolutionalNet:
    """Convolution and pooling, then fully connected layers (see `eqprop.models.Convolutional`)."""

    input_shape: tuple[int, int, int] = (1, 28, 28)
    channels: tuple[int, ...] = (64, 32)
    flat: tuple[int, ...] = (10,)
    activation: str = "hard-sigmoid"
    kernel: int = 5
    padding: int = 0
    pool: int = 2
    bias: bool = True
    kind: Literal["convolutional"] = "convolutional"

    def __post_init__(self) -> None:
        check_types(self)
        maps = pairwise((*self.channels, self.input_shape[0]))
        flat = pairwise((*self.flat, (self.channels or (1,))[0] * math.prod(self.input_shape[1:])))
        weights = sum(a * b * self.kernel**2 for a, b in maps) + sum(a * b for a, b in flat)
        _check_weights(f"A net of channels {shown(self.channels)} and flat layers {shown(self.flat)}", weights)

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return convolutional_parameters(len(self.flat), len(self.channels), self.bias)

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        return Convolutional(
            self.input_shape,
            self.channels,
            self.flat,
            self.activation,
            kernel=self.kernel,
            padding=self.padding,
            pool=self.pool,
            bias=self.bias,
            init=init,
            seed=seed,
            dtype=dtype,
        )

    def without_output(self) -> ConvolutionalNet:
        return replace(self, flat=self.flat[1:])

    def __str__(self) -> str:
        maps = "-".join(str(n) for n in reversed(self.channels))
        return f"{maps} maps of {self.kernel} x {self.kernel}, pool {self.pool}, {'-'.join(map(str, self.flat[::-1]))}"


@dataclass(frozen=True)
class OwnNet:
    """A custom network. Only its name is data; the function that builds it is passed alongside the experiment.

    A run folder therefore never names code to execute: whoever opens it must pass the function again.
    """

    source: str = "own"
    kind: Literal["own"] = "own"

    def __post_init__(self) -> None:
        check_types(self)

    layer_parameters: ClassVar[tuple[LayerParameters, ...]] = ()

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        raise ValueError(
            f"The experiment uses a custom network ({self.source}), but got no function that builds it. Pass "
            "model=function in Python, or --model FILE.py:FUNCTION on the command line."
        )

    def without_output(self) -> OwnNet:
        """The network itself: the readout reads its output layer."""
        return self

    def __str__(self) -> str:
        return f"own model {self.source}"


@dataclass(frozen=True)
class GraphNet:
    """Any layers, joined by any connections (see `eqprop.models.Network`).

    layers          (name, shape) pairs, the output first; a table in a TOML file
    connections     their fields and their kind: {"kind": "conv", "pre": "x", "post": "h1", "kernel": 3, ...}
    activation      one for all layers, or by layer, "*" for those not named
    groups          of layers that a sweep updates together; None: a colouring
    """

    input_shape: tuple[int, ...]
    layers: tuple[tuple[str, int | tuple[int, ...]], ...]
    connections: tuple[Mapping[str, Any], ...]
    activation: str | Mapping[str, str] = "hard-sigmoid"
    setting: Literal["energy-based", "prototypical"] = "prototypical"
    eps: float | None = None
    clip: bool = False
    bias: bool = True
    bias_gain: float = 1.0
    groups: tuple[tuple[str, ...], ...] | None = None
    kind: Literal["graph"] = "graph"

    def __post_init__(self) -> None:
        """Bring what a file holds, lists and tables, to one form; raise if it is something else."""
        pairs = self.layers.items() if isinstance(self.layers, Mapping) else self.layers
        set_field = partial(object.__setattr__, self)
        set_field("input_shape", _sizes("input_shape", self.input_shape))
        set_field("layers", tuple((name, _sizes(f"The layer {name}", n)) for name, n in _pairs(pairs)))
        set_field("connections", tuple(dict(c) if isinstance(c, Mapping) else c for c in self.connections))
        set_field("groups", None if self.groups is None else tuple(tuple(group) for group in self.groups))
        self._check()

    def _check(self) -> None:
        for name, kind in (("eps", float | None), ("clip", bool), ("bias", bool), ("bias_gain", float)):
            if not _has_type(getattr(self, name), kind):
                raise ValueError(f"{name} is {shown(getattr(self, name))}; expected {_described(kind)}.")
        named = {"*": self.activation} if isinstance(self.activation, str) else self.activation
        if not isinstance(named, Mapping) or not all(isinstance(sigma, str) for sigma in named.values()):
            raise ValueError(f"activation is {shown(self.activation)}; expected a name, or a table of names by layer.")
        _check_weights(str(self), self._count())

    def _count(self) -> int:
        shapes = {name: n if isinstance(n, tuple) else (n,) for name, n in (*self.layers, ("x", self.input_shape))}
        ends = [(c, shapes.get(c.pre), shapes.get(c.post)) for c in self._made()]
        known = [(c, pre, post) for c, pre, post in ends if pre is not None and post is not None]
        return sum(math.prod(w.shape) for c, pre, post in known for w in c.weights(pre, post).values())

    def _made(self) -> list[Connection]:
        return [_connection(values) for values in self.connections]

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return self.build("default", 0, torch.float32).layer_parameters

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        return Network(
            self.input_shape,
            dict(self.layers),
            self._made(),
            self.activation,
            setting=self.setting,
            eps=self.eps,
            clip=self.clip,
            bias=self.bias,
            groups=self.groups,
            init=init,
            bias_gain=self.bias_gain,
            seed=seed,
            dtype=dtype,
        )

    def without_output(self) -> GraphNet:
        """A copy without the output layer and its connections."""
        (output, _), *rest = self.layers
        if not rest:
            raise ValueError(f"The net has no layer but {output}, so a readout has nothing to read.")
        left = tuple(c for c in self.connections if output not in (c.get("pre"), c.get("post")))
        groups = self.groups and tuple(g for g in (tuple(n for n in g if n != output) for g in self.groups) if g)
        named = self.activation
        sigma = named if isinstance(named, str) else {name: a for name, a in named.items() if name != output}
        return replace(self, layers=tuple(rest), connections=left, activation=sigma, groups=groups)

    def __str__(self) -> str:
        sizes = "-".join(str(n if isinstance(n, int) else n[0]) for _, n in reversed(self.layers))
        return f"graph {sizes}, {len(self.connections)} connections"


def _pairs(given: Any) -> list[tuple[str, Any]]:
    pairs = [tuple(pair) for pair in given]
    if any(len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError(f"layers is {shown(given)}; expected a table of sizes by name, the output first.")
    return pairs


def _sizes(what: str, given: Any) -> Any:
    sizes: Any = tuple(given) if isinstance(given, list | tuple) else given
    if not _has_type(sizes, tuple[int, ...]) and not (_has_type(sizes, int) and sizes > 0):
        raise ValueError(f"{what} is {shown(given)}; expected an integer above 0, or several in a list.")
    return sizes


def _connection(values: Mapping[str, Any]) -> Connection:
    """A connection from its fields and its kind."""
    if not isinstance(values, Mapping):
        raise ValueError(f"A connection is {shown(values)}; expected a table with kind, pre and post.")
    given = dict(values)
    kind = given.pop("kind", "dense")
    if kind not in CONNECTIONS:
        raise ValueError(unknown("kind of connection", str(kind), CONNECTIONS))
    known = [f.name for f in fields(CONNECTIONS[kind])]
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ValueError(f"A connection of kind {kind}: {unknown('field', strange, known)}")
    missing = [name for name in ("pre", "post") if name not in given and not (kind == "lateral" and name == "post")]
    if missing:
        raise ValueError(f"A connection of kind {kind} lacks {' and '.join(missing)}, the names of its layers.")
    made = CONNECTIONS[kind](**given)
    check_types(made)
    return made


Architecture = LayeredNet | ConvolutionalNet | GraphNet | OwnNet
KINDS: dict[str, type[Any]] = {
    "layered": LayeredNet,
    "convolutional": ConvolutionalNet,
    "graph": GraphNet,
    "own": OwnNet,
}
