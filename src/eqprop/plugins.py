"""Parts from outside, by name: estimators, engines, models, costs, activations, data sets and loggers.

A part is registered by a call, `eqprop.register("estimator", "mine", Mine)`, or by an installed package, in its
pyproject.toml:

    [project.entry-points."eqprop.estimator"]
    mine = "my_package.estimator:Mine"

It then works wherever a built-in one does: in `train`, `gdu`, TOML files, `resume` and `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from eqprop.messages import EXPECTED_ERRORS, unknown

KINDS = {
    "estimator": "an `Estimator`, or a function of an `Experiment` that returns one",
    "engine": "an `Engine`; it is used where it is named, never chosen by auto",
    "model": "a function that builds a network, as in FILE.py:FUNCTION",
    "cost": "a `Cost` without arguments, or a function l(s, y)",
    "activation": "an `Activation`, or a differentiable function of one tensor",
    "data": "a function that returns what `data=` takes",
    "logger": "a `Watch`",
    "machine": "a function of a network that returns an `eqprop.physical.Machine`, such as its class",
}
"""Every kind of part, and what to register."""

Value = TypeVar("Value")
_registered: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
_tables: dict[str, Table[Any]] = {}


def register(kind: str, name: str, part: Any) -> None:
    """Make a part known under a name, for this process; see `KINDS` for what each kind is.

    kind        a key of `KINDS`: estimator, engine, model, connection, cost, activation, data, logger, ...
    name        what options, TOML files and run folders call it
    part        the class, function or object itself
    """
    if kind not in KINDS:
        raise ValueError(unknown("kind of part", kind, KINDS))
    if not name or not name.replace("-", "").replace("_", "").isalnum() or name != name.lower():
        raise ValueError(f"The {kind} is named {name!r}; expected lower-case letters, digits and hyphens.")
    if name in built_in(kind):
        raise ValueError(f"eqprop has a {kind} {name!r} of its own. Choose another name.")
    _registered[kind][name] = part


def part(place: str) -> Any:
    """A part of the package by its place, MODULE:NAME, so that a line of a table is all that names it."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"eqprop.{module}"), name)


def later(place: str) -> Callable[..., Any]:
    """What makes such a part, imported when it is first made: for tables that a part's own module needs."""
    return lambda *given, **options: part(place)(*given, **options)


def built_in(kind: str) -> Mapping[str, Any]:
    return _tables[kind].built_in if kind in _tables else {}


def origins(kind: str) -> dict[str, str]:
    """Where each part of a kind comes from: eqprop, a package and its version, or this process."""
    found = dict.fromkeys(built_in(kind), "eqprop")
    for name, point in _installed(kind).items():
        found.setdefault(name, f"{point.dist.name} {point.dist.version}" if point.dist else point.value)
    return {**found, **dict.fromkeys(_registered[kind], "this process")}


def _installed(kind: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"eqprop.{kind}")}


def _load(kind: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except (*EXPECTED_ERRORS, AttributeError) as error:
        package = f" of the package {point.dist.name}" if point.dist else ""
        raise ImportError(
            f"The {kind} {point.name!r}{package} ({point.value}) cannot be loaded: {type(error).__name__}: {error}."
        ) from error


class Table(Mapping[str, Value], Generic[Value]):
    """The built-in parts of a kind, then those from outside, which are loaded when they are first asked for.

    `adapt` makes what is registered into what the table holds.
    """

    def __init__(self, kind: str, built_in: Mapping[str, Value], adapt: Callable[[str, Any], Value]) -> None:
        self.kind, self.built_in, self.adapt = kind, dict(built_in), adapt
        self._adapted: dict[str, tuple[Any, Value]] = {}
        _tables[kind] = self

    def __getitem__(self, name: str) -> Value:
        if name in self.built_in:
            return self.built_in[name]
        part = self.part(name)
        known = self._adapted.get(name)
        if known is None or known[0] is not part:
            self._adapted[name] = known = part, self.adapt(name, part)
        return known[1]

    def part(self, name: str) -> Any:
        """What was registered under a name that is not built in."""
        if name in _registered[self.kind]:
            return _registered[self.kind][name]
        point = _installed(self.kind).get(name)
        if point is None:
            raise KeyError(name)
        return _load(self.kind, point)

    def __contains__(self, name: object) -> bool:
        if name in self.built_in or name in _registered[self.kind]:
            return True
        return isinstance(name, str) and name in _installed(self.kind)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.built_in, *_installed(self.kind), *_registered[self.kind]]))

    def __len__(self) -> int:
        return len(list(iter(self)))
