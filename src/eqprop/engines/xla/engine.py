"""One program per model: made at first use, checked against the reference, which serves where none can be made."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
import torch
from torch import Tensor, nn

from eqprop.cost import Cost, Problem, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines.traced import CannotTrace, Checks, Fingerprint, Restless, apart, first_line, size_of, watched
from eqprop.engines.xla.compiling import running
from eqprop.engines.xla.estimators import PROGRAMS, Derivatives, FreePhaseAlone
from eqprop.engines.xla.program import LARGE, Inputs, Kind, Outputs, Traced, as_array, as_tensor, taken_over
from eqprop.estimators import EP, ContinualEP, Estimator, Grads, HolomorphicEP
from eqprop.estimators.holomorphic import check_analytic
from eqprop.relax import Phase, Relaxation, prepare, relax, settled_below
from eqprop.state import State

MOST = 16
"""Programs kept per model: one per cost, shapes and kind of estimator."""
RESTLESS = 4
"""Changes in a row, a call apart, after which a model is left to the reference: tracing would take all the time."""
AGREE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far a program's step may be from the reference's, relative to its largest number, rounding apart."""
NOISE = 100.0
"""How many times what the last bits of a state change in the result is the work of rounding."""


class Call(NamedTuple):
    """What a gradient is asked for: all that `Estimator.computed` takes."""

    problem: Problem
    estimator: Estimator
    s: State

    def reference(self) -> tuple[Relaxation, Grads]:
        """The reference's gradient."""
        return self.estimator.computed(self.problem, self.s)


class GuardedProgram:
    """A program and what keeps it true."""

    def __init__(self, call: Call, kind: Kind, watch: Fingerprint, traced: Traced) -> None:
        cost = call.problem.cost
        self.watch = watch
        beta, unit = strength(call.estimator, call.problem.model)
        one = (beta[0], unit[0]) if isinstance(call.estimator, HolomorphicEP) else (beta, unit)
        pieces = Derivatives(call.problem, call.s, *one, traced)
        self.program = PROGRAMS[type(call.estimator)](pieces, kind)
        self.held, self.constants = pieces.held, list(traced.constants)
        self.cost = weakref.ref(cost)
        self.checks = Checks()
        self.calls = 0
        self.views: dict[int, tuple[int, Any]] = {}

    def __call__(self, call: Call) -> tuple[Relaxation, Grads, bool]:
        """The free phase, the gradients, and whether all numbers are finite."""
        problem, estimator, s = call
        program, kind = self.program, self.program.kind
        beta, unit = strength(estimator, problem.model)
        tensors = [place.tensor for held in self.held for place in held.values()]
        given = Inputs(
            [self._given(n, v) for n, v in enumerate(tensors)],
            [as_array(v) for v in self.constants],
            as_array(problem.x),
            as_array(problem.y),
            tuple([as_array(layer) for layer in s]),
            as_array(beta),
            as_array(unit),
            np.array([kind.free.periods(estimator.free_steps), kind.second.periods(estimator.K)], np.int32),
            self._rates(estimator, problem.model),
        )
        found = self._run(given)
        state, residual = tuple(map(as_tensor, found.state)), as_tensor(found.residual)
        values = taken_over(found.grads, (*tensors, *self.constants, problem.x, problem.y, *s))
        grads: Grads = {}
        for (k, name), value in zip(program.names, values, strict=True):
            p: Any = self.held[k][name].tensor
            grads[p] = grads[p] + value if p in grads else value
        settled = residual < settled_below(state[0].dtype, estimator.tolerance)
        adjoint = None if found.adjoint is None else as_tensor(found.adjoint)
        steps = int(found.steps) if kind.settles else estimator.T
        free = Relaxation(state, steps, residual, settled, adjoint_residual=adjoint)
        return free, grads, bool(as_tensor(found.fine))

    def _given(self, n: int, v: Tensor) -> Any:
        """The n-th parameter or buffer as the program takes it: a large one where it lies, made once."""
        if v.nbytes < LARGE or not v.is_contiguous():
            return as_array(v)
        place, view = self.views.get(n, (0, None))
        if place == v.data_ptr() and view.shape == v.shape:
            return view
        with running(first=False):
            view = jax.device_put(as_array(v), may_alias=True)
        if view.unsafe_buffer_pointer() == v.data_ptr():  # else it is a copy, which would go stale
            self.views[n] = v.data_ptr(), view
        return view

    def _run(self, given: Inputs) -> Outputs:
        """Run the program; what jax says against compiling it is a reason to leave it."""
        first, self.calls = self.calls == 0, self.calls + 1
        try:
            with running(first):
                found: Outputs = self.program.run(given)
                return found
        except Exception as error:
            if not first:
                raise
            raise CannotTrace(f"XLA cannot compile it ({first_line(error)})") from error

    def _rates(self, estimator: Estimator, model: Dynamics) -> list[np.ndarray[Any, Any]]:
        if not isinstance(estimator, ContinualEP):
            return []
        rates = estimator.rates_of(model)
        return [np.asarray(rates[name]) for _, name in self.program.moved]

    def fits(self, cost: Cost) -> bool:
        """Whether the program is of this cost."""
        return is_plain(cost) or self.cost() is cost


_BARE = frozenset(vars(SquaredError()))


def is_plain(cost: Cost) -> bool:
    """Whether a cost is the squared error as it is defined: any of them is as good as any other."""
    return type(cost) is SquaredError and vars(cost).keys() == _BARE


def strength(estimator: Estimator, model: Dynamics) -> tuple[Tensor, Tensor]:
    """beta and the factor of the updates in float64, one each, or one per network, or one per point on a circle."""
    if isinstance(estimator, HolomorphicEP):
        betas, weights = zip(*estimator.circle(), strict=True)
        beta, weight = (torch.tensor(v, dtype=torch.complex128) for v in (betas, weights))
        return beta, weight / model.nudge_scale
    beta = torch.as_tensor(getattr(estimator, "beta", 1.0), dtype=torch.float64)
    phases = 2.0 if isinstance(estimator, EP) and estimator.nudging == "symmetric" else 1.0
    unit = 1.0 / (phases * beta * model.nudge_scale)
    return (beta.unsqueeze(-1) if beta.dim() else beta), unit


class Refusal:
    """Why a model has no program, and what would have to change for that to be asked again.

    watch   of the model as it was refused; None: it cannot be watched, so it is asked at every call
    """

    def __init__(self, reason: str, call: Call, forever: bool) -> None:
        watch = Fingerprint(call.problem.model, call.problem.cost)
        self.reason, self.forever = reason, forever
        self.watch = watch if watch.refusal is None else None

    def stands(self) -> bool:
        """Whether nothing has changed."""
        return self.forever or (self.watch is not None and not self.watch.changed())


@dataclass
class Memory:
    """What is known of a model: its programs, and why it has none.

    kinds       of estimators that were asked for
    traced      what programs are made of
    changes     in a row, without a call between that found all as it was
    warned      the reasons that were given as warnings
    """

    programs: dict[object, GuardedProgram] = field(default_factory=dict)
    refused: dict[object, Refusal] = field(default_factory=dict)
    kinds: dict[Estimator, Kind] = field(default_factory=dict)
    traced: dict[object, tuple[Fingerprint, Traced]] = field(default_factory=dict)
    changes: int = 0
    warned: set[str] = field(default_factory=set)

    def kind(self, call: Call) -> Kind:
        """What program an estimator needs."""
        known = self.kinds.get(call.estimator)
        if known is None:
            if len(self.kinds) >= MOST:
                self.kinds.clear()
            known = self.kinds[call.estimator] = Kind.of(call.problem.model, len(call.s), call.estimator)
        return known


class Programs:
    """Computes gradients by programs, which it remembers by model, cost, shapes and kind of estimator."""

    def __init__(self) -> None:
        self._memories: WeakKeyDictionary[Dynamics, Memory] = WeakKeyDictionary()

    def gradient(
        self, problem: Problem, estimator: Estimator, s: State, falls_back: bool = True
    ) -> tuple[Relaxation, Grads]:
        """The free phase from s and dL/dtheta by parameter, as the estimator's own; all arguments checked before.

        falls_back      whether a model that has no program is left to the reference with a warning, or else raises
        """
        memory = self._memories.get(problem.model)
        if memory is None:
            memory = self._memories[problem.model] = Memory()
        call = Call(problem, estimator, s)
        kind = memory.kind(call)
        key = _key(call, kind)
        try:
            known = self._known(memory, key, call, kind)
            free, grads, fine = known(call)
            if estimator.checked and not fine:
                return call.reference()  # which says where a number was first not finite
            if known.checks.due() and not self._is_true(memory, known, call._replace(s=free.state)):
                del memory.programs[key]
                memory.traced.clear()
                return self.gradient(problem, estimator, s, falls_back)
        except CannotTrace as error:
            memory.programs.pop(key, None)
            if not falls_back:
                title = problem.model.title
                raise ValueError(f"The engine 'xla' cannot serve {title}: {error}. Use 'eager'.") from error
            return self._left(memory, key, call, error)
        return free, grads

    def relaxation(
        self, model: Dynamics, x: Tensor, phase: Phase, state: State | None, falls_back: bool = True
    ) -> Relaxation:
        """The free phase, as `relax`; the options as in `gradient`."""
        if model.settles_itself or phase.still > 0.0 or phase.then or not x.numel():
            return relax(model, x, phase, state)
        start = prepare(model, x, state, None)
        asked = FreePhaseAlone(
            phase.T, 1, schedule=phase.schedule, stop=phase.stop, tolerance=phase.tolerance, checked=phase.checked
        )
        problem = Problem(model, SquaredError(), x, torch.zeros_like(start[0]))
        return self.gradient(problem, asked, start, falls_back)[0]

    def _known(self, memory: Memory, key: object, call: Call, kind: Kind) -> GuardedProgram:
        """The program of this kind, made anew if anything changed."""
        refusal = memory.refused.get(key)
        if refusal is not None:
            if refusal.stands():
                raise CannotTrace(refusal.reason)
            del memory.refused[key]
        known = memory.programs.get(key)
        if known is not None and known.fits(call.problem.cost) and not known.watch.changed():
            memory.changes = 0
            return known
        if known is not None:
            memory.kinds.clear()
            self._count(memory, "what it reads beside tensors changes at every call")
        if len(memory.programs) >= MOST:
            memory.programs.clear()
        memory.programs[key] = GuardedProgram(call, kind, *self._traced(memory, call, kind))
        return memory.programs[key]

    def _traced(self, memory: Memory, call: Call, kind: Kind) -> tuple[Fingerprint, Traced]:
        """What was traced for these shapes, for estimators of all kinds, and the watch of it."""
        model, cost = call.problem.model, call.problem.cost
        key = _shapes(call), *((v.shape[-1:], v.dtype) for v in strength(call.estimator, model))
        known, steps = memory.traced.get(key), first_steps(call, kind)
        if known is not None and not known[0].changed():
            steps()
            if not known[0].changed():
                return known
        if len(memory.traced) >= MOST:
            memory.traced.clear()
        memory.traced[key] = watched(steps, model, type(cost) if is_plain(cost) else cost), Traced()
        return memory.traced[key]

    def _count(self, memory: Memory, reason: str) -> None:
        memory.changes += 1
        if memory.changes > RESTLESS:
            raise Restless(reason)

    def _left(self, memory: Memory, key: object, call: Call, error: CannotTrace) -> tuple[Relaxation, Grads]:
        """Leave it to the reference, with a warning once."""
        title, reason = call.problem.model.title, str(error)
        found = call.reference()  # an error of the model's own says more than a warning
        if key not in memory.refused:
            memory.refused[key] = Refusal(reason, call, isinstance(error, Restless))
        if reason not in memory.warned:
            memory.warned.add(reason)
            warnings.warn(f"{title} runs on the eager engine, which is slower: {reason}.", stacklevel=6)
        return found

    def _is_true(self, memory: Memory, known: GuardedProgram, call: Call) -> bool:
        """Compare short phases from this state with the reference's: False where the program has gone stale.

        The nudge is as strong as the cost itself, so that rounding does not hide a difference. Raises CannotTrace if it
        was never right, or changes all the time.
        """
        problem, estimator, s = call
        if isinstance(estimator, HolomorphicEP) and estimator.checked:
            check_analytic(problem.model, problem.cost, problem.x, problem.y, s)
        short = call._replace(estimator=shortened(estimator, known.program.kind))
        free, grads, _ = known(short)
        order = list(grads)
        ours, theirs = _numbers(free, grads, order), _numbers(*short.reference(), order)
        # A layer that the nudge has not reached yet has a gradient of rounding alone, hence the largest of all.
        most = 0.1 * max(map(size_of, theirs), default=0.0)
        allowed = [AGREE[s[0].dtype] * max(size_of(v), most) for v in theirs]
        if not apart(ours, theirs, allowed):
            return True
        nearby = tuple(layer * (1.0 + 2.0 * torch.finfo(layer.dtype).eps) for layer in s)
        shaken = _numbers(*short._replace(s=nearby).reference(), order)
        noise = [NOISE * size_of(a - b) + least for a, b, least in zip(theirs, shaken, allowed, strict=True)]
        if not apart(ours, theirs, noise):
            return True
        if known.calls <= 2:  # the first call and its check
            raise CannotTrace("its compiled step differs from the reference's")
        self._count(memory, "its step changes from call to call")
        warnings.warn(f"The step of {problem.model.title} had changed unseen; it was compiled again.", stacklevel=6)
        return False


def shortened(estimator: Estimator, kind: Kind) -> Estimator:
    """The estimator with the shortest phases that have the same rests, and where beta is free, a strong nudge."""
    unrolled = estimator.T - estimator.free_steps
    T = unrolled + min(estimator.free_steps, len(kind.free.pattern) + kind.free.rest)
    K = estimator.K if unrolled else min(estimator.K, len(kind.second.pattern) + kind.second.rest)
    short = replace(estimator, T=T, K=K, stop="never", checked=False)
    if not isinstance(short, EP):
        return short
    # Half: an implicit nudge that is also taken away from the target has no solution at 1.
    halves = torch.full_like(torch.as_tensor(short.beta), 0.5)
    return replace(short, beta=halves if halves.dim() else 0.5)


def first_steps(call: Call, kind: Kind) -> Callable[[], object]:
    """Short phases of the reference, to be taken before anything is traced."""
    short = shortened(call.estimator, kind)
    if isinstance(short, HolomorphicEP):  # which says of a model that it is not analytic
        short = replace(short, checked=call.estimator.checked)
    return call._replace(estimator=short).reference


def _numbers(free: Relaxation, grads: Grads, order: Sequence[nn.Parameter]) -> list[Tensor]:
    """All that is compared; nothing where the gradients are of other parameters."""
    return [*free.state, *(grads[p] for p in order)] if set(grads) == set(order) else []


def reference(problem: Problem, estimator: Estimator, s: State) -> tuple[Relaxation, Grads]:
    """The reference's gradient."""
    return Call(problem, estimator, s).reference()


def _key(call: Call, kind: Kind) -> object:
    beta = getattr(call.estimator, "beta", None)
    return kind, beta.shape if isinstance(beta, Tensor) else None, _shapes(call)


def _shapes(call: Call) -> object:
    problem = call.problem
    layouts = tuple([(v.shape, v.dtype) for v in (problem.x, problem.y, *call.s)])
    return layouts, SquaredError if is_plain(problem.cost) else id(problem.cost), torch.get_default_dtype()
