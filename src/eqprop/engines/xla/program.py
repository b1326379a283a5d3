"""An estimator's whole gradient as one program: the free phase, the second phase, and the update.

The pieces, a step of each kind and the contrast, are traced from the model's own methods, with parameters, buffers, x,
y, the nudge's strength and the state as inputs, and joined by XLA's loops. How many steps are taken and how strong the
nudge is are inputs too, so a program of other lengths is no new one. `Program.whole` is a function of arrays without
side effects, to be traced into larger programs: it may stand in a loop or a scan. `estimators` has those of other
estimators than EP.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor, nn

from eqprop.autodiff import with_values
from eqprop.cost import Cost, Nudge, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines.traced import CannotTrace, trace
from eqprop.engines.xla.lowering import Lowered, Values, operations
from eqprop.engines.xla.operations import dtype_of
from eqprop.engines.xla.windows import Array
from eqprop.estimators import BPTT, EP, RBP, Estimator, HolomorphicEP
from eqprop.estimators.base import by_network, difference_update, moved_contrast, trainable, update
from eqprop.relax import (
    CHECK_EVERY,
    SWEEPS,
    Stepper,
    Update,
    difference_stepper,
    moved_from_zero,
    moved_in_turn,
    turn,
)
from eqprop.state import State

Arrays = tuple[Array, ...]
Name = tuple[int, str]
"""A parameter: 0 for the model's or 1 for the cost's, and its name."""


class TensorPlace(NamedTuple):
    """A parameter or buffer where its module holds it, so that it is found after it was replaced."""

    store: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        found: Tensor = self.store[self.key]
        return found


def held_by(module: nn.Module) -> dict[str, TensorPlace]:
    """The parameters and buffers of a module by name."""
    found: dict[str, TensorPlace] = {}
    for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
        owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        found[name] = TensorPlace(part._parameters if key in part._parameters else part._buffers, key)
    return found


@dataclass(frozen=True)
class Turns:
    """The updates of a phase: `pattern` over and over, `rest` steps of it at the end.

    pattern     which layers each update of a period changes
    rest        how many updates follow the last whole period
    """

    pattern: tuple[Update, ...]
    rest: int

    @classmethod
    def of(cls, model: Dynamics, layers: int, estimator: Estimator, T: int, first: int) -> Turns:
        """The T updates from `first` on, counted from the end of the free phase."""
        schedule = estimator.schedule
        if schedule == "alternating" and first < 0:
            return cls(((first + 1) % 2, first % 2), T % 2)  # the last update, -1, is of the even layers
        groups = model.sweep(layers) if schedule in SWEEPS else ()
        period = len(groups) or 1
        return cls(tuple(turn(groups, first + t, schedule) for t in range(period)), T % period)

    @classmethod
    def every(cls) -> Turns:
        """Updates of all layers."""
        return cls((None,), 0)

    def periods(self, T: int) -> int:
        """How many whole periods T updates have."""
        return T // len(self.pattern)


@dataclass(frozen=True)
class Kind:
    """What a program depends on besides the model, the cost and the shapes.

    form        the estimator's class
    fixed       what else of it is part of the program: K where a loop is differentiated, the points on a circle
    difference  whether nudged phases run on how far they are from the free state
    held        whether the nudge keeps its force of the free state
    """

    free: Turns
    second: Turns
    symmetric: bool
    settles: bool
    form: type[Estimator] = EP
    fixed: int = 0
    difference: bool = False
    held: bool = False

    @classmethod
    def of(
        cls, model: Dynamics, layers: int, estimator: Estimator, cost: Cost | None = None, from_zero: bool = False
    ) -> Kind:
        """Of an estimator; layers that cannot move are left out where the cost, or the start, says which."""
        steps, form, settles = estimator.free_steps, type(estimator), estimator.stop == "settled"
        if isinstance(estimator, BPTT):  # the steps that are differentiated are the end of the free phase
            in_turn = estimator.schedule in SWEEPS
            free = Turns.of(model, layers, estimator, steps, -estimator.T if in_turn else -steps)
            last = Turns.of(model, layers, estimator, estimator.K, -estimator.K) if in_turn else Turns.every()
            return cls(free, last, False, settles, form, estimator.K)
        free = Turns.of(model, layers, estimator, steps, -steps)
        if from_zero and estimator.schedule == "synchronous" and (groups := moved_from_zero(model, layers)):
            free = Turns(groups, steps % 2)
        if isinstance(estimator, RBP):
            return cls(free, Turns.every(), False, settles, form)
        second = Turns.of(model, layers, estimator, estimator.K, 0)
        if isinstance(estimator, EP):
            symmetric, difference = estimator.nudging == "symmetric", estimator.form == "difference"
            if difference and estimator.held and cost is not None and estimator.schedule not in SWEEPS:
                groups = moved_in_turn(model, layers, cost)
                second = Turns(groups, estimator.K % 2) if groups else second
            return cls(free, second, symmetric, settles, form, 0, difference, estimator.held)
        points = estimator.points if isinstance(estimator, HolomorphicEP) else 0
        return cls(free, second, False, settles, form, points)


class Traced:
    """What was traced of a model and a cost for some shapes: programs of other estimators take the same steps.

    pieces      by what they are, with the parameters that they return something for
    constants   tensors that they read besides parameters and buffers
    """

    def __init__(self) -> None:
        self.pieces: dict[object, tuple[Piece, list[Name]]] = {}
        self.constants: list[Tensor] = []


class Pieces:
    """The pieces of a gradient as functions of arrays, each traced when first asked for.

    given   what they take first: parameters and buffers, x, y, beta and the unit of the updates
    """

    def __init__(self, problem: Problem, s: State, beta: Tensor, unit: Tensor, traced: Traced | None = None) -> None:
        self.model, self.cost, self.layers = problem.model, problem.cost, len(s)
        self.modules: tuple[nn.Module, ...] = (problem.model, problem.cost)
        self.held = [held_by(module) for module in self.modules]
        theta = [place.tensor.detach() for held in self.held for place in held.values()]
        self.x, self.s = problem.x, s
        self.given = (*theta, problem.x, problem.y, beta, unit)
        self.traced = traced or Traced()

    def step(self, nudged: bool, update: Update = None) -> Piece:
        """s -> the next state."""

        def run(x: Tensor, nudge: Nudge, unit: Tensor, s: State) -> State:
            with torch.no_grad():
                return _unchanged(Stepper(self.model, self.model.drive(x), nudge if nudged else None)(s, update), s)

        return self._piece(("step", nudged, update), run, self.s)[0]

    def nudged(self, update: Update, kind: Kind) -> Piece:
        """s -> the next nudged state, in an own form (see `Kind`) around a fixed state."""

        def run(x: Tensor, nudge: Nudge, unit: Tensor, both: State) -> State:
            at, s = both[: self.layers], both[self.layers :]
            return _unchanged(self._stepper(x, nudge, at, kind)(s, update), s)

        key = "nudged", update, kind.difference, kind.held
        return self._piece(key, torch.no_grad()(run), self.start(kind), self.s)[0]

    def start(self, kind: Kind) -> State:
        """What a nudged phase begins from where the free one ends in `s`."""
        if not kind.difference:
            return self.s
        nudge = Nudge(self.cost, self.given[-3], 1.0)
        return difference_stepper(self.model, self.x, nudge, self.s).start(self.s)

    def _stepper(self, x: Tensor, nudge: Nudge, at: State, kind: Kind) -> Stepper:
        nudge = replace(nudge, at=at) if kind.held else nudge
        if kind.difference:
            return difference_stepper(self.model, x, nudge, at)
        return Stepper(self.model, self.model.drive(x), nudge)

    def contrast(self, kind: Kind) -> tuple[Piece, list[Name]]:
        """s_plus, s_minus -> the gradient of each parameter of Phi; around a fixed state where `contrasts_around`."""
        model, L = self.model, self.layers
        assert isinstance(model, PrimitiveDynamics)
        names, around = list[Name](), self.contrasts_around(kind)

        def run(x: Tensor, nudge: Nudge, unit: Tensor, states: State) -> State:
            ends = [states[n : n + L] for n in range(0, len(states), L)]
            if kind.difference:
                found = model.difference_contrast(x, *ends)
            elif around:
                begun, plus, minus = ends
                found = moved_contrast(model, x, plus, minus, begun)
            else:
                found = model.contrast(x, *ends)
            learned = [name for name in trainable(model) if name in found]
            names[:] = [(0, name) for name in learned]
            lost = next((name for name in found if name not in dict(model.named_parameters())), None)
            if lost is not None:
                raise CannotTrace(f"it computes a gradient for {lost}, which is no longer one of its parameters")
            return tuple([by_network(-unit, found[name]) * found[name].detach() for name in learned])

        end = self.start(kind)
        moving = end if kind.difference and not kind.symmetric else (*end, *end)
        key = "contrast", kind.difference, around, len(moving)
        return self._piece(key, run, moving, self.s if around else (), names)

    def contrasts_around(self, kind: Kind) -> bool:
        """Whether the contrast asks for where the phase began: as a difference of it, or where there is no Phi."""
        return kind.difference or (kind.symmetric and not getattr(self.model, "conservative", True))

    def update(self, update_of: Update, kind: Kind) -> tuple[Piece, list[Name]]:
        """s -> the next nudged state, and what the step adds to the gradient of each parameter."""
        names: list[Name] = []

        def run(x: Tensor, nudge: Nudge, unit: Tensor, both: State) -> State:
            at, s = both[: self.layers], both[self.layers :]
            with torch.no_grad():
                new = _unchanged(self._stepper(x, nudge, at, kind)(s, update_of), s)
            if kind.difference:
                step = difference_update(self.model, x, at, s, new, -unit)
            else:
                step = update(self.model, x, s, new, -unit)
            names[:] = [(0, name) for name in step.synapses]
            return (*new, *step.synapses.values())

        key = "update", update_of, kind.difference, kind.held
        return self._piece(key, run, self.start(kind), self.s, names)

    def direct(self) -> tuple[Piece, list[Name]]:
        """s -> the gradient of the cost at that state, for parameters it depends on."""
        names: list[Name] = []

        def run(x: Tensor, nudge: Nudge, unit: Tensor, s: State) -> State:
            found = self.cost.direct_gradient(s, nudge.y, dict(self.model.named_parameters()))
            known = {p: (k, name) for k in (1, 0) for name, p in self.modules[k].named_parameters()}
            names[:] = [known[p] for p in found]
            return tuple(found.values())

        return self._piece("direct", run, self.s, names=names)

    def place(self, name: Name) -> int:
        """Where a parameter is among the given tensors."""
        k, path = name
        return k * len(self.held[0]) + list(self.held[k]).index(path)

    def _piece(
        self, key: object, run: Callable[..., State], moving: State, fixed: State = (), names: list[Name] | None = None
    ) -> tuple[Piece, list[Name]]:
        """run(x, nudge, unit, (*fixed, *moving)) as a piece; what `fixed` alone decides is computed once per phase.

        names   the parameters that it returns something for, filled by `run`
        """
        pieces = self.traced.pieces
        if key not in pieces:
            function = partial(self._with_given, run)
            lowered = Lowered(trace(function, (*self.given, *fixed, *moving), operations()), len(moving))
            pieces[key] = Piece(lowered, self._places(list(lowered.constants.values()))), names or []
        return pieces[key]

    def _with_given(self, run: Callable[..., State], *values: Tensor) -> State:
        """run(x, nudge, unit, moving) with the given values in the place of the parameters and buffers."""
        count = len(self.given)
        left = iter(values[: count - 4])
        theta = [{name: _leaf(place.tensor, next(left)) for name, place in held.items()} for held in self.held]
        x, y, beta, unit = values[count - 4 : count]
        nudge = Nudge(self.cost, y, beta, checked=False)
        return with_values(self.modules, theta, lambda: run(x, nudge, unit, values[count:]))

    def _places(self, tensors: list[Tensor]) -> list[int]:
        """Where these tensors are among the constants of all pieces, added where they are new."""
        constants = self.traced.constants
        known = {_memory(v): n for n, v in enumerate(constants)}
        for v in tensors:
            if _memory(v) not in known:
                known[_memory(v)] = len(constants)
                constants.append(v)
        return [known[_memory(v)] for v in tensors]


def _unchanged(new: State, s: State) -> State:
    if [(v.shape, v.dtype) for v in new] != [(v.shape, v.dtype) for v in s]:
        raise CannotTrace("its step changes the shapes or the types of layers")
    return new


def _leaf(like: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else value


def _memory(v: Tensor) -> object:
    return v.data_ptr(), v.shape, v.stride(), v.dtype


class Piece(NamedTuple):
    """A lowered graph, and where its constants are among those of the program."""

    lowered: Lowered
    places: list[int]

    def at(self, inputs: Inputs, fixed: Arrays = ()) -> Callable[..., Arrays]:
        """The piece as a function of what moves, all else computed."""
        prepared = self._prepared(inputs, fixed)
        return lambda *moving: self.lowered(prepared, moving)

    def summed(
        self, inputs: Inputs, sums: int, fixed: Arrays = ()
    ) -> tuple[Callable[..., Arrays], Arrays, Callable[[Arrays], Arrays]]:
        """The same where the last results are added up over steps: of them it returns terms.

        With it, a sum of terms to begin with, and what a sum of terms comes to.
        """
        prepared, chains = self._prepared(inputs, fixed), self.lowered.chains(sums)
        terms = [chain[0].meta["val"] for chain in chains]
        return (
            lambda *moving: self.lowered.terms(prepared, moving, chains),
            tuple([jnp.zeros(v.shape, dtype_of(v.dtype)) for v in terms]),
            lambda found: self.lowered.sums(prepared, found, chains),
        )

    def _prepared(self, inputs: Inputs, fixed: Arrays) -> Values:
        constants = dict(zip(self.lowered.constants, (inputs.constants[n] for n in self.places), strict=True))
        return self.lowered.prepare((*inputs.theta, inputs.x, inputs.y, inputs.beta, inputs.unit, *fixed), constants)


class Inputs(NamedTuple):
    """What a program takes.

    theta, constants    parameters and buffers, and other tensors that the model or the cost reads
    beta, unit          of the nudge, and the factor of its updates; of each point on the circle
    periods             whole periods of the free and of the second phase
    rates               of the parameters, where they move within the second phase, in the order of the program's names
    """

    theta: Sequence[Array]
    constants: Sequence[Array]
    x: Array
    y: Array
    s: Arrays
    beta: Array
    unit: Array
    periods: Array
    rates: Sequence[Array] = ()


class Outputs(NamedTuple):
    """What a program returns: the free phase, the gradients, and whether all numbers in it are finite.

    adjoint     the remainder of recurrent backprop's adjoint, per sample
    """

    state: Arrays
    steps: Array
    residual: Array
    grads: Arrays
    fine: Array
    adjoint: Array | None = None


class Second(NamedTuple):
    """What a second phase makes.

    state       the end of the free phase
    steps       of the free phase that it took itself
    seen        what is not finite if anything in it was not
    """

    state: Arrays
    steps: int
    grads: Arrays
    seen: Arrays
    adjoint: Array | None = None


class Program(ABC):
    """An estimator's gradient as one jitted program for one model, cost and kind of estimator.

    names   the parameters of its gradients, in order; one may come twice, for the sum of both
    moved   those of them that the second phase gives
    """

    def __init__(self, pieces: Pieces, kind: Kind) -> None:
        self.kind = kind
        self._free = {u: pieces.step(False, u) for u in kind.free.pattern}
        self._step = pieces.step(False)
        self._dims = pieces.model.sample_dims(pieces.x)
        self.moved = self.prepare(pieces)
        self._direct, direct = pieces.direct()
        self.names: list[Name] = [*self.moved, *direct]
        self._places = [pieces.place(name) for name in self.moved]
        self.run = jax.jit(self.whole)

    @abstractmethod
    def prepare(self, pieces: Pieces) -> list[Name]:
        """Trace what the second phase needs; the parameters of its gradients."""

    @abstractmethod
    def second(self, given: Inputs, s: Arrays) -> Second:
        """The second phase from the state that the free steps lead to."""

    def whole(self, given: Inputs) -> Outputs:
        """The free phase and the gradient, to be traced."""
        s, steps = self._relaxed(given)
        found = self.second(given, s)
        residual = apart(self._step.at(given)(*found.state), found.state, self._dims)
        direct = self._direct.at(given)(*found.state)
        fine = _finite((given.x, given.y, *found.state, *found.seen))
        return Outputs(found.state, steps + found.steps, residual, (*found.grads, *direct), fine, found.adjoint)

    def _relaxed(self, given: Inputs) -> tuple[Arrays, Array]:
        """The free steps, and how many there were."""
        steps = {update: piece.at(given) for update, piece in self._free.items()}
        count, period = given.periods[0], len(self.kind.free.pattern)
        total = count * period + self.kind.free.rest
        if not self.kind.settles:
            return run_phase(steps, self.kind.free, count, given.s), total
        return _until_still(steps, self.kind.free, count, given.s)

    def _zeros(self, given: Inputs) -> Arrays:
        """A sum of gradients to begin with."""
        return tuple(jnp.zeros_like(given.theta[n]) for n in self._places)

    def _summed(
        self, pieces: Mapping[Update, Piece], given: Inputs, fixed: Arrays = ()
    ) -> tuple[Steps, Arrays, Callable[[Arrays], Arrays]]:
        """The steps of a phase that adds up gradients, by update; how a sum begins, and what it comes to."""
        if len(pieces) > 1:  # whose terms differ
            return {u: piece.at(given, fixed) for u, piece in pieces.items()}, self._zeros(given), lambda sums: sums
        ((update, piece),) = pieces.items()
        step, zeros, whole = piece.summed(given, len(self._places), fixed)
        return {update: step}, zeros, whole


class Gradient(Program):
    """EP's gradient."""

    def prepare(self, pieces: Pieces) -> list[Name]:
        kind, names = self.kind, list[Name]()
        self._start = [dtype_of(v.dtype) for v in pieces.start(kind)]
        self._contrast: Piece | None = None
        self._around = pieces.contrasts_around(kind)
        self._steps: dict[Update, Piece] = {}
        for u in kind.second.pattern:
            if not isinstance(pieces.model, PrimitiveDynamics):
                self._steps[u], names = pieces.update(u, kind)
            else:
                self._steps[u] = pieces.nudged(u, kind) if kind.difference or kind.held else pieces.step(True, u)
        if isinstance(pieces.model, PrimitiveDynamics):
            self._contrast, names = pieces.contrast(kind)
        return names

    def second(self, given: Inputs, s: Arrays) -> Second:
        start = tuple(jnp.zeros_like(v, dtype=d) for v, d in zip(s, self._start, strict=True))
        start = start if self.kind.difference else s
        ends = [self._end(given, start, s)]
        if self.kind.symmetric:
            ends.append(self._end(given._replace(beta=-given.beta), start, s))
        layers = len(s)
        seen = tuple(v for end in ends for v in end[:layers])
        if self._contrast is None:
            plus, *minus = [end[layers:] for end in ends]  # the updates of all steps  [eq:ep-weight-update]
            grads = tuple(map(operator.sub, plus, minus[0])) if minus else plus
        elif self._around:
            grads = self._contrast.at(given, s)(*seen)
        else:  # from the two ends of the second phase, or of both  [eq:ep-grad]
            grads = self._contrast.at(given)(*(seen if self.kind.symmetric else (*seen, *s)))
        return Second(s, 0, grads, seen)

    def _end(self, given: Inputs, start: Arrays, s: Arrays) -> Arrays:
        """The end of a nudged phase, and the sum of its updates where there is no Phi."""
        count, layers = given.periods[1], len(s)
        if self._contrast is None:
            updates, zeros, whole = self._summed(self._steps, given, s)
            added: Steps = {u: adding(step, layers) for u, step in updates.items()}
            end = run_phase(added, self.kind.second, count, (*start, *zeros))
            return (*end[:layers], *whole(end[layers:]))
        around = s if self.kind.difference or self.kind.held else ()
        steps: Steps = {u: piece.at(given, around) for u, piece in self._steps.items()}
        return run_phase(steps, self.kind.second, count, start)


def apart(a: Arrays, b: Arrays, dims: int) -> Array:
    """max |a - b| over the neurons of each sample."""
    layers = [jnp.abs(p - q).reshape(*p.shape[:dims], -1).max(-1) for p, q in zip(a, b, strict=True)]
    return jnp.stack(layers).max(0)


def adding(step: Callable[..., Arrays], layers: int) -> Callable[..., Arrays]:
    """A step that adds its updates to those before."""

    def run(*carried: Array) -> Arrays:
        found = step(*carried[:layers])
        return (*found[:layers], *(a + b for a, b in zip(carried[layers:], found[layers:], strict=True)))

    return run


Steps = Mapping[Update, Callable[..., Arrays]]


def run_period(steps: Steps, pattern: Sequence[Update], s: Arrays) -> Arrays:
    for kind in pattern:
        s = tuple(steps[kind](*s))
    return s


def run_phase(steps: Steps, turns: Turns, count: Array, s: Arrays) -> Arrays:
    """`count` whole periods, and the rest."""
    s = lax.fori_loop(0, count, lambda _, s: run_period(steps, turns.pattern, s), tuple(s))
    return run_period(steps, turns.pattern[: turns.rest], s)


def _until_still(steps: Steps, turns: Turns, count: Array, s: Arrays) -> tuple[Arrays, Array]:
    """The same, or fewer steps if a period changes no bit; looked at every few periods, after one that is the last."""
    pattern, period = turns.pattern, len(turns.pattern)
    stride = max(1, -(-CHECK_EVERY // period))

    def go(carried: tuple[Array, Array, Arrays]) -> tuple[Array, Array, Arrays]:
        done, _, s = carried
        before = lax.fori_loop(0, stride - 1, lambda _, s: run_period(steps, pattern, s), s)
        after = run_period(steps, pattern, before)
        still = jnp.all(jnp.stack([jnp.all(a == b) for a, b in zip(before, after, strict=True)]))
        return done + stride, still, after

    def more(carried: tuple[Array, Array, Arrays]) -> Array:
        done, still, _ = carried
        return (done + stride <= count) & ~still

    start = (jnp.zeros((), count.dtype), jnp.asarray(False), tuple(s))
    done, still, s = lax.while_loop(more, go, start)
    left = jnp.where(still, 0, count - done)
    s = lax.fori_loop(0, left, lambda _, s: run_period(steps, pattern, s), s)
    s = lax.cond(still, lambda s: s, lambda s: run_period(steps, pattern[: turns.rest], s), s)
    return s, jnp.where(still, done * period, count * period + turns.rest)


def _finite(values: Sequence[Array]) -> Array:
    numbers = [v for v in values if jnp.issubdtype(v.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(v)) for v in numbers]))


def as_array(v: Tensor) -> np.ndarray[Any, Any]:
    """A view of a tensor's memory."""
    v = v.detach()
    return (v.resolve_conj().resolve_neg() if v.is_complex() else v).numpy()


def as_tensor(v: Array) -> Tensor:
    """A copy, which may be written to."""
    if not isinstance(v, jax.Array) or not v.size:
        return torch.from_numpy(np.array(v))
    return torch.from_numpy(np.array(_Memory(v.block_until_ready())))  # a tenth of the time of asking jax


LARGE = 1 << 16
"""Bytes from which the memory of a result is taken over instead of copied."""


class _Memory:
    """A result's memory as numpy may write to it, kept as long as numpy keeps this."""

    def __init__(self, v: Array) -> None:
        self.owner = v
        place = v.unsafe_buffer_pointer(), False
        self.__array_interface__ = {"shape": v.shape, "typestr": v.dtype.str, "data": place, "version": 3}


def taken_over(values: Sequence[Array], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results as tensors that may be written to: large ones where they lie, unless they share memory.

    inputs      what the program was given: jax may return one of them as it is
    """
    seen = {v.data_ptr() for v in inputs}
    found = []
    for v in values:
        if v.nbytes < LARGE or (place := v.unsafe_buffer_pointer()) in seen:
            found.append(as_tensor(v))
        else:
            seen.add(place)
            found.append(torch.from_numpy(np.asarray(_Memory(v))))
    return found
