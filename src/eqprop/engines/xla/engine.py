"""Programs by model: made when first needed, kept true, left to the reference where there can be none."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from eqprop.cost import Cost, Problem, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines.traced import CannotTrace, Checks, Watch, apart, size_of
from eqprop.engines.xla.compiling import running
from eqprop.engines.xla.program import Gradient, Inputs, Kind, Pieces, as_array, as_tensor
from eqprop.estimators import EP, Grads
from eqprop.relax import Relaxation, settled_below
from eqprop.state import State

MOST = 16
"""Programs kept per model: one per cost, shapes and kind of estimator."""
RESTLESS = 4
"""Changes in a row, a call apart, after which a model is left to the reference: tracing would take all the time."""
AGREE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far a program's step may be from the reference's, relative to its largest number, rounding apart."""
NOISE = 100.0
"""How many times what the last bits of a state change in the result is the work of rounding."""


class Known:
    """A program and what keeps it true."""

    def __init__(self, problem: Problem, estimator: EP, s: State, kind: Kind) -> None:
        model, cost = problem.model, problem.cost
        self.watch = Watch(model, type(cost) if is_plain(cost) else cost)
        if self.watch.refusal is not None:
            raise CannotTrace(self.watch.refusal)
        pieces = Pieces(problem, s, *strength(estimator, model))
        self.program = Gradient(pieces, kind)
        self.held, self.constants = pieces.held, pieces.constants
        self.cost = weakref.ref(cost)
        self.checks = Checks()
        self.calls = 0

    def __call__(self, problem: Problem, estimator: EP, s: State) -> tuple[Relaxation, Grads, bool]:
        """The free phase, the gradients, and whether all numbers are finite."""
        program = self.program
        beta, unit = strength(estimator, problem.model)
        given = Inputs(
            [as_array(place.tensor) for held in self.held for place in held.values()],
            [as_array(v) for v in self.constants],
            as_array(problem.x),
            as_array(problem.y),
            tuple([as_array(layer) for layer in s]),
            as_array(beta),
            as_array(unit),
            np.array([program.kind.free.periods(estimator.T), program.kind.second.periods(estimator.K)], np.int32),
        )
        with running(first=self.calls == 0):
            found = program.run(given)
            state, residual = tuple(map(as_tensor, found.state)), as_tensor(found.residual)
            values = [as_tensor(g) for g in found.grads]
        self.calls += 1
        grads: Grads = {}
        for (k, name), value in zip(program.names, values, strict=True):
            p: Any = self.held[k][name].tensor
            grads[p] = grads[p] + value if p in grads else value
        settled = residual < settled_below(state[0].dtype, estimator.tolerance)
        return Relaxation(state, int(found.steps), residual, settled), grads, bool(found.fine)

    def fits(self, cost: Cost) -> bool:
        """Whether the program is of this cost."""
        return is_plain(cost) or self.cost() is cost


_BARE = frozenset(vars(SquaredError()))


def is_plain(cost: Cost) -> bool:
    """Whether a cost is the squared error as it is defined: any of them is as good as any other."""
    return type(cost) is SquaredError and vars(cost).keys() == _BARE


def strength(estimator: EP, model: Dynamics) -> tuple[Tensor, Tensor]:
    """beta and the factor of the updates in float64, one each or one per network."""
    beta = torch.as_tensor(estimator.beta, dtype=torch.float64)
    phases = 2.0 if estimator.nudging == "symmetric" else 1.0
    unit = 1.0 / (phases * beta * model.nudge_scale)
    return (beta.unsqueeze(-1) if beta.dim() else beta), unit


@dataclass
class Memory:
    """What is known of a model: its programs, and why it has none.

    changes     in a row, without a call between that found all as it was
    """

    programs: dict[object, Known] = field(default_factory=dict)
    refused: dict[object, str] = field(default_factory=dict)
    changes: int = 0


class Programs:
    """Computes gradients by programs, which it remembers by model, cost, shapes and kind of estimator."""

    def __init__(self) -> None:
        self._memories: WeakKeyDictionary[Dynamics, Memory] = WeakKeyDictionary()

    def gradient(self, problem: Problem, estimator: EP, s: State, falls_back: bool = True) -> tuple[Relaxation, Grads]:
        """The free phase from s and dL/dtheta by parameter, as the estimator's own; all arguments checked before.

        falls_back      whether a model that has no program is left to the reference with a warning, or else raises
        """
        memory = self._memories.setdefault(problem.model, Memory())
        kind = Kind.of(problem.model, len(s), estimator)
        key = _key(problem, estimator, s, kind)
        try:
            known = self._known(memory, key, problem, estimator, s, kind)
            free, grads, fine = known(problem, estimator, s)
            if estimator.checked and not fine:
                return reference(problem, estimator, s)  # which says where a number was first not finite
            if known.checks.due():
                self._verify(memory, key, known, problem, estimator, free.state)
                if key not in memory.programs:  # it was stale
                    return self.gradient(problem, estimator, s, falls_back)
        except CannotTrace as error:
            if not falls_back:
                title = problem.model.title
                raise ValueError(f"The engine 'xla' cannot serve {title}: {error}. Use 'eager'.") from error
            return self._left(memory, key, problem, estimator, s, str(error))
        return free, grads

    def _known(self, memory: Memory, key: object, problem: Problem, estimator: EP, s: State, kind: Kind) -> Known:
        """The program of this kind, made anew if anything changed."""
        if key in memory.refused:
            raise CannotTrace(memory.refused[key])
        known = memory.programs.get(key)
        if known is not None and known.fits(problem.cost) and not known.watch.changed():
            memory.changes = 0
            return known
        if known is not None:
            memory.changes += 1
            if memory.changes > RESTLESS:
                raise CannotTrace("what it reads beside tensors changes at every call")
        if len(memory.programs) >= MOST:
            memory.programs.clear()
        memory.programs[key] = Known(problem, estimator, s, kind)
        return memory.programs[key]

    def _left(
        self, memory: Memory, key: object, problem: Problem, estimator: EP, s: State, reason: str
    ) -> tuple[Relaxation, Grads]:
        """Leave it to the reference, with a warning once."""
        title = problem.model.title
        found = reference(problem, estimator, s)  # an error of the model's own says more than a warning
        if key not in memory.refused:
            memory.refused[key] = reason
            memory.programs.pop(key, None)
            warnings.warn(f"{title} runs on the eager engine, which is slower: {reason}.", stacklevel=4)
        return found

    def _verify(self, memory: Memory, key: object, known: Known, problem: Problem, estimator: EP, s: State) -> None:
        """Compare short phases from this state with the reference's; forget a program that has gone stale.

        The nudge is as strong as the cost itself, so that rounding does not hide a difference.
        """
        kind, ones = known.program.kind, torch.ones_like(torch.as_tensor(estimator.beta))
        T, K = (min(n, len(t.pattern) + t.rest) for n, t in ((estimator.T, kind.free), (estimator.K, kind.second)))
        short = replace(estimator, T=T, K=K, stop="never", checked=False, beta=ones if ones.dim() else 1.0)
        free, grads, _ = known(problem, short, s)
        order = list(grads)
        ours, theirs = _numbers(free, grads, order), _numbers(*reference(problem, short, s), order)
        # A layer that the nudge has not reached yet has a gradient of rounding alone, hence the largest of all.
        most = 0.1 * max(map(size_of, theirs), default=0.0)
        allowed = [AGREE[s[0].dtype] * max(size_of(v), most) for v in theirs]
        if not apart(ours, theirs, allowed):
            return
        nearby = tuple(layer * (1.0 + 2.0 * torch.finfo(layer.dtype).eps) for layer in s)
        shaken = _numbers(*reference(problem, short, nearby), order)
        noise = [NOISE * size_of(a - b) + least for a, b, least in zip(theirs, shaken, allowed, strict=True)]
        if not apart(ours, theirs, noise):
            return
        del memory.programs[key]
        if known.calls <= 2:  # the first call and its check: it was never right
            raise CannotTrace("its compiled step differs from the reference's")
        memory.changes += 1
        if memory.changes > RESTLESS:
            raise CannotTrace("its step changes from call to call")
        warnings.warn(f"The step of {problem.model.title} had changed unseen; it was compiled again.", stacklevel=5)


def _numbers(free: Relaxation, grads: Grads, order: Sequence[nn.Parameter]) -> list[Tensor]:
    """All that is compared; nothing where the gradients are of other parameters."""
    return [*free.state, *(grads[p] for p in order)] if set(grads) == set(order) else []


def reference(problem: Problem, estimator: EP, s: State) -> tuple[Relaxation, Grads]:
    """The reference's gradient."""
    return estimator.computed(problem, s)


def _key(problem: Problem, estimator: EP, s: State, kind: Kind) -> object:
    model, cost = problem.model, problem.cost
    tensors = (problem.x, problem.y, *s)
    layouts = tuple([(v.shape, v.dtype) for v in tensors])
    beta = estimator.beta.shape if isinstance(estimator.beta, Tensor) else None
    held = SquaredError if is_plain(cost) else id(cost)
    return kind, layouts, beta, held, model.nudge_scale, torch.get_default_dtype()
