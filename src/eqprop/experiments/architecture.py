"""Network architectures as data, each builds its network from a seed; and your own, built by a function."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from eqprop.cost import Cost, FunctionCost, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.messages import EXPECTED_ERRORS, shown, unknown
from eqprop.models import Connection, Convolutional, Layered, Network
from eqprop.models.connections import CONNECTIONS
from eqprop.models.convolutional import convolutional_parameters
from eqprop.models.layered import layered_parameters
from eqprop.plugins import Table
from eqprop.state import LayerParameters

InitName = Literal["glorot", "default"]
Factory = Callable[..., Any]
"""Your own function: what `Own` describes."""

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
        if (own := registered_own(self)) is not None:
            return own(seed).to(dtype)
        raise ValueError(
            f"The experiment uses your own network ({self.source}), but got no function that builds it. Pass "
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
        return self.network().layer_parameters

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        return self.network(init, seed, dtype)

    def network(self, init: InitName = "default", seed: int = 0, dtype: torch.dtype = torch.float32) -> Network:
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


class Built(NamedTuple):
    """What your function returned: a network and, if it gave them, a cost, samples x with answers y, or a data set."""

    model: Dynamics
    cost: Cost | None = None
    x: Tensor | None = None
    y: Tensor | None = None
    data: Any = None


class Own:
    """Your own function, for `gdu`, `doctor`, `train` and `tune`. It takes a seed or nothing, and returns one of

        model                   a `Dynamics`, such as `eqprop.from_energy` makes
        model, cost             with a `Cost`, or a function l(s, y) of state and targets, one value per sample
        model, cost, x, y       with samples and their targets or class numbers
        model, cost, data       with anything that `data=` takes, such as "fashion-mnist" or (x, y, x_test, y_test)

    Random numbers it draws from torch are seeded as well, so that it is reproducible even if it takes no seed. A cost
    that reads the model's parameters must do so through theta (see `eqprop.FunctionCost`).
    """

    def __init__(self, function: Factory, name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__qualname__", type(function).__name__))
        self._arguments = _seed_arguments(function, self.name)
        self._last: tuple[int, Built] | None = None

    def __call__(self, seed: int) -> Dynamics:
        return self.build(seed).model

    def build(self, seed: int) -> Built:
        """Call the function; its last result is kept and copied, as it may be slow or load data."""
        if self._last is None or self._last[0] != seed:
            with torch.random.fork_rng(devices=[]), own_code(self.name):
                torch.manual_seed(seed)
                made = self.function(*([seed] * self._arguments[0]), **dict.fromkeys(self._arguments[1], seed))
            self._last = seed, _built(made, self.name)
        built = self._last[1]
        model, cost = copy.deepcopy((built.model, built.cost))
        return built._replace(model=model, cost=cost)

    @property
    def has_cost(self) -> bool:
        """Whether it gives a cost other than the squared error, which runs have anyway."""
        return type(self.build(0).cost) not in (NoneType, SquaredError)

    def data(self) -> Any:
        """The data it gives, in a form that `data=` takes; None if it gives none.

        Samples without a test set are also what is tested on.
        """
        built = self.build(0)
        if built.x is None:
            return built.data
        return (built.x, built.y, built.x, built.y)


def as_own(function: Factory | None, name: str | None = None) -> Own | None:
    return function if function is None or isinstance(function, Own) else Own(function, name)


MODELS: Table[Factory] = Table("model", {}, lambda name, part: part)
"""Models from outside by name."""


def registered_own(architecture: Architecture) -> Own | None:
    """The registered model that an architecture names, if it is one."""
    if not isinstance(architecture, OwnNet) or architecture.source not in MODELS:
        return None
    return Own(MODELS[architecture.source], architecture.source)


def own_of(model: Factory | None, architecture: Architecture) -> Own | None:
    """Your own function, as given, or a registered model."""
    return as_own(model) or registered_own(architecture)


def is_own(target: object) -> bool:
    """Whether a target is a user's FILE.py:FUNCTION, or a registered model."""
    return isinstance(target, str) and (target.endswith(".py") or ".py:" in target or target in MODELS)


def load_own(where: str) -> Own:
    """FILE.py:FUNCTION, package.module:FUNCTION or a registered model as `Own`."""
    return Own(MODELS[where] if where in MODELS else load_function(where), where)


def _seed_arguments(function: Factory, name: str) -> tuple[int, tuple[str, ...]]:
    """How many seeds to pass by position, and under which names."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins
        return 1, ()
    if any(p.name == "seed" and p.kind is not p.POSITIONAL_ONLY for p in parameters):
        others = [p for p in parameters if p.name != "seed"]
    else:
        others = parameters
    needed = [p for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(others) < len(parameters) and not needed:
        return 0, ("seed",)
    if len(others) == len(parameters) and len(needed) <= 1 and all(p.kind is not p.KEYWORD_ONLY for p in needed):
        return len(needed), ()
    raise ValueError(
        f"{name} needs {', '.join(p.name for p in needed)}; expected a function of a seed, or of nothing. Give the "
        "other parameters a default."
    )


CONTRACT = "model; model, cost; model, cost, x, y; or model, cost, data"


def _built(made: Any, name: str) -> Built:
    values = tuple(made) if isinstance(made, tuple | list) else (made,)
    if len(values) not in (1, 2, 3, 4):
        raise ValueError(f"{name} returned {len(values)} values; expected {CONTRACT}.")
    model, cost = values[0], values[1] if len(values) > 1 else None
    if not isinstance(model, Dynamics):
        raise ValueError(
            f"{name} returned {type(model).__name__} as model; expected an eqprop.Dynamics, such as eqprop.from_energy "
            f"makes. It may return {CONTRACT}."
        )
    if cost is not None and not isinstance(cost, Cost):
        if not callable(cost):
            raise ValueError(f"{name} returned {type(cost).__name__} as cost; expected a Cost or a function l(s, y).")
        cost = FunctionCost(cost)
    if len(values) < 4:
        return Built(model, cost, data=values[2] if len(values) == 3 else None)
    return Built(model, cost, *_samples(values[2], values[3], name))


def _samples(x: Any, y: Any, name: str) -> tuple[Tensor, Tensor]:
    for value, what in ((x, "x"), (y, "y")):
        if not isinstance(value, Tensor | np.ndarray):
            raise ValueError(f"{name} returned {type(value).__name__} as {what}; expected a tensor or a numpy array.")
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if x.dim() < 2 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"{name} returned x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}; expected the samples "
            "along the first dimension, equally many in both, and at least one."
        )
    return x, y


def load_function(where: str) -> Callable[..., Any]:
    """FILE.py:FUNCTION or package.module:FUNCTION -> the function."""
    source, _, name = where.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(f"{where!r} does not name a function; expected FILE.py:FUNCTION or MODULE:FUNCTION.")
    if source.endswith(".py") and not Path(source).is_file():
        raise FileNotFoundError(f"There is no file {source}. Expected FILE.py:FUNCTION.")
    with own_code(where):
        module = _module(source)
    found = getattr(module, name, None)
    if callable(found):
        return cast("Callable[..., Any]", found)
    there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    what = (
        unknown("function", name, there) if there else f"There is no function {name!r}; no functions are defined there."
    )
    raise ValueError(f"{source}: {what}")


def _module(source: str) -> ModuleType:
    """Import a module by name or file. A file can import its neighbours, as if it were run as a script."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    # A prefix, so that a file called random.py does not replace the standard library's.
    name = f"eqprop_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # At the end, so that no file there replaces a module of the standard library or an installed one.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


@contextmanager
def own_code(where: str | None) -> Iterator[None]:
    """Turn an error in the user's FILE.py:FUNCTION into one message with its line; keep eqprop's own errors.

    Errors of a function that is not named by its file are left alone: Python shows their traceback.
    """
    if where is None or ".py" not in where:
        yield
        return
    path = Path(where.rpartition(":")[0])
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"{path} ends the program (exit code {error.code}); expected a function.") from error
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        if isinstance(error, EXPECTED_ERRORS) and not lines:
            raise
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = f"{path}, line {line}" if line else str(path)
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
