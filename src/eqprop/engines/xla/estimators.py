"""The gradients of the other estimators as programs: BPTT, recurrent backprop, continual and holomorphic EP.

Derivatives of steps are traced from torch's own, not made by jax of the lowered step: what torch takes for the slope
at a kink, or leaves out by `detach`, would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from eqprop.autodiff import complex_of, in_complex
from eqprop.cost import Nudge, Problem
from eqprop.dynamics import PrimitiveDynamics
from eqprop.engines.xla.program import (
    Arrays,
    Gradient,
    Inputs,
    Name,
    Piece,
    Pieces,
    Program,
    Second,
    Steps,
    adding,
    apart,
    run_phase,
)
from eqprop.engines.xla.windows import Array
from eqprop.estimators import BPTT, EP, RBP, ContinualEP, Estimator, HolomorphicEP
from eqprop.estimators.base import Grads, by_network, parameter_vjp, pull_back, trainable, transition_vjp, update
from eqprop.relax import CHECK_EVERY, Relaxation, Stepper, Update, relax
from eqprop.state import State

Step = Callable[..., Arrays]


class Derivatives(Pieces):
    """Pieces that differentiate a step, or take it at complex states."""

    def pull(self) -> Piece:
        """s -> dl/ds."""

        def run(x: Tensor, nudge: Nudge, unit: Tensor, s: State) -> State:
            with torch.no_grad():
                return Problem(self.model, self.cost, x, nudge.y).pull(s)

        return self._piece("pull", run, self.s)[0]

    def back(self, group: Update) -> tuple[Piece, list[Name]]:
        """s, v -> (dF/ds)^T v and (dF/dtheta)^T v  [eq:bptt-state, eq:bptt-param]."""
        names: list[Name] = []

        def run(x: Tensor, nudge: Nudge, unit: Tensor, both: State) -> State:
            assert not isinstance(group, int)
            earlier, synapses = transition_vjp(self.model, x, both[: self.layers], both[self.layers :], group)
            names[:] = [(0, name) for name in synapses]
            return (*earlier, *synapses.values())

        return self._piece(("back", group), run, (*self.s, *self.s), names=names)

    def adjoint(self) -> Piece:
        """s, v -> (dF/ds)^T v; what depends on s alone is computed once."""

        def run(x: Tensor, nudge: Nudge, unit: Tensor, both: State) -> State:
            with torch.enable_grad():
                leaves = tuple([layer.detach().requires_grad_() for layer in both[: self.layers]])
                out = self.model.step(self.model.drive(x), leaves)
            return pull_back(out, leaves, both[self.layers :])

        return self._piece("adjoint", run, self.s, self.s)[0]

    def parameters(self) -> tuple[Piece, list[Name]]:
        """s, v -> (dF/dtheta)^T v."""
        names: list[Name] = []

        def run(x: Tensor, nudge: Nudge, unit: Tensor, both: State) -> State:
            found = parameter_vjp(self.model, x, both[: self.layers], both[self.layers :])
            names[:] = [(0, name) for name in found]
            return tuple(found.values())

        return self._piece("parameters", run, (*self.s, *self.s), names=names)

    def complex_step(self, group: Update) -> Piece:
        """s -> the next nudged state, all complex."""

        def run(x: Tensor, nudge: Nudge, unit: Tensor, s: State) -> State:
            return in_complex(self.modules, lambda: self._complex_step(x, nudge, s, group))

        return self._piece(("complex step", group), run, tuple(map(complex_of, self.s)))[0]

    def complex_contrast(self) -> tuple[Piece, list[Name]]:
        """s_plus, s -> the share of a point on the circle in each parameter's gradient."""
        model, names = self.model, list[Name]()
        assert isinstance(model, PrimitiveDynamics)

        def run(x: Tensor, nudge: Nudge, unit: Tensor, both: State) -> State:
            ends = both[: self.layers], both[self.layers :]
            found = in_complex(self.modules, lambda: model.contrast(complex_of(x), *ends))
            names[:] = [(0, name) for name in trainable(model) if name in found]
            return tuple([(by_network(-unit, found[name]) * found[name].detach()).real for _, name in names])

        moving = tuple(map(complex_of, self.s))
        return self._piece("complex contrast", run, (*moving, *moving), names=names)

    def complex_update(self, group: Update) -> tuple[Piece, list[Name]]:
        """s -> the next nudged state, and what the step adds to the gradient of each parameter."""
        names: list[Name] = []

        def run(x: Tensor, nudge: Nudge, unit: Tensor, s: State) -> State:
            def both() -> State:
                new = self._complex_step(x, nudge, s, group)
                step = update(self.model, complex_of(x), s, new, -unit)
                names[:] = [(0, name) for name in step.synapses]
                return (*new, *(g.real for g in step.synapses.values()))

            return in_complex(self.modules, both)

        return self._piece(("complex update", group), run, tuple(map(complex_of, self.s)), names=names)

    @torch.no_grad()
    def _complex_step(self, x: Tensor, nudge: Nudge, s: State, group: Update) -> State:
        turned = Nudge(self.cost, complex_of(nudge.y), nudge.beta, checked=False)
        return Stepper(self.model, self.model.drive(complex_of(x)), turned)(s, group)


class Unrolled(Program):
    """BPTT's gradient: K steps are kept and gone back  [eq:bptt-state]."""

    def prepare(self, pieces: Pieces) -> list[Name]:
        assert isinstance(pieces, Derivatives)
        names: list[Name] = []
        self._pull, self._steps, self._back = pieces.pull(), {}, dict[Update, Piece]()
        for u in dict.fromkeys(self.kind.second.pattern):
            self._steps[u] = pieces.step(False, u)
            self._back[u], names = pieces.back(u)
        return names

    def second(self, given: Inputs, s: Arrays) -> Second:
        turns, K, layers = self.kind.second, self.kind.fixed, len(s)
        steps = {u: piece.at(given) for u, piece in self._steps.items()}
        back, zeros, whole = self._summed(self._back, given)

        def forth(s: Arrays, updates: tuple[Update, ...]) -> tuple[Arrays, list[Arrays]]:
            """The state after these updates, and those before each."""
            passed = []
            for u in updates:
                passed.append(s)
                s = tuple(steps[u](*s))
            return s, passed

        def gone_back(carried: Arrays, updates: tuple[Update, ...], passed: list[Arrays]) -> Arrays:
            for u, before in zip(reversed(updates), reversed(passed), strict=True):
                found = back[u](*before, *carried[:layers])
                sums = zip(carried[layers:], found[layers:], strict=True)
                carried = (*found[:layers], *(a + b for a, b in sums))
            return carried

        pattern, rest = turns.pattern, turns.pattern[: turns.rest]
        s, periods = lax.scan(lambda s, _: forth(s, pattern), tuple(s), length=turns.periods(K))
        end, passed = forth(s, rest)
        carried = (*self._pull.at(given)(*end), *zeros)
        carried = gone_back(carried, rest, passed)
        carried, _ = lax.scan(lambda c, p: (gone_back(c, pattern, p), None), carried, periods, reverse=True)
        return Second(end, K, whole(carried[layers:]), ())


class Adjoint(Program):
    """Recurrent backprop's gradient: the adjoint is iterated at the free state  [cor:bptt-steady-state]."""

    def prepare(self, pieces: Pieces) -> list[Name]:
        assert isinstance(pieces, Derivatives)
        self._pull, self._adjoint = pieces.pull(), pieces.adjoint()
        self._parameters, names = pieces.parameters()
        return names

    def second(self, given: Inputs, s: Arrays) -> Second:
        first = self._pull.at(given)(*s)
        step = self._adjoint.at(given, s)
        total, left = self._until_still(given, step, first) if self.kind.settles else self._sum(given, step, first)
        zeros = tuple(map(jnp.zeros_like, s))
        residual, start = apart(left, zeros, self._dims), apart(first, zeros, self._dims)
        # What has grown is looked at by the reference.
        decayed = jnp.where(jnp.all(residual <= start), 0.0, jnp.nan)
        return Second(s, 0, self._parameters.at(given)(*s, *total), (decayed,), residual)

    def _sum(self, given: Inputs, step: Step, first: Arrays) -> tuple[Arrays, Arrays]:
        """The sum of the first K terms, and the next term."""

        def body(_: Array, carried: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            term = tuple(step(*carried[0]))
            return term, tuple(a + b for a, b in zip(carried[1], term, strict=True))

        term, total = lax.fori_loop(1, given.periods[1], body, (first, first))
        return total, tuple(step(*term))

    def _until_still(self, given: Inputs, step: Step, first: Arrays) -> tuple[Arrays, Arrays]:
        """The same, or fewer terms if one no longer changes the sum; looked at every few."""

        def more(carried: tuple[Array, Array, Arrays, Arrays]) -> Array:
            k, still, _, _ = carried
            return (k < given.periods[1]) & ~still

        def body(carried: tuple[Array, Array, Arrays, Arrays]) -> tuple[Array, Array, Arrays, Arrays]:
            k, _, term, total = carried
            term = tuple(step(*term))
            new = tuple(a + b for a, b in zip(total, term, strict=True))
            same = jnp.all(jnp.stack([jnp.all(a == b) for a, b in zip(new, total, strict=True)]))
            return k + 1, same & (k % CHECK_EVERY == 0), term, new

        one = jnp.ones((), given.periods.dtype)
        _, still, term, total = lax.while_loop(more, body, (one, jnp.asarray(False), first, first))
        following = step(*term)
        return total, tuple(jnp.where(still, a, b) for a, b in zip(term, following, strict=True))


class Moving(Program):
    """Continual EP's gradient: parameters move with the neurons."""

    def prepare(self, pieces: Pieces) -> list[Name]:
        names: list[Name] = []
        self._updates = dict[Update, Piece]()
        for u in self.kind.second.pattern:
            self._updates[u], names = pieces.update(u, self.kind)
        return names

    def second(self, given: Inputs, s: Arrays) -> Second:
        layers, learned = len(s), len(self._places)

        def step(piece: Piece, *carried: Array) -> Arrays:
            theta, moving = list(given.theta), carried[layers : layers + learned]
            for n, p in zip(self._places, moving, strict=True):
                theta[n] = p
            found = piece.at(given._replace(theta=theta), s)(*carried[:layers])
            grads = found[layers:]
            rated = zip(moving, grads, given.rates, strict=True)
            moved = [p - rate.astype(p.dtype) * g for p, g, rate in rated]
            sums = [a + g for a, g in zip(carried[layers + learned :], grads, strict=True)]
            return (*found[:layers], *moved, *sums)

        steps: Steps = {u: partial(step, piece) for u, piece in self._updates.items()}
        start = (*s, *(given.theta[n] for n in self._places), *self._zeros(given))
        end = run_phase(steps, self.kind.second, given.periods[1], start)
        return Second(s, 0, end[layers + learned :], end[:layers])


class Holomorphic(Program):
    """Holomorphic EP's gradient: the sum over points on a circle of nudges."""

    def prepare(self, pieces: Pieces) -> list[Name]:
        assert isinstance(pieces, Derivatives)
        names: list[Name] = []
        self._contrast: Piece | None = None
        self._steps = dict[Update, Piece]()
        for u in self.kind.second.pattern:
            if isinstance(pieces.model, PrimitiveDynamics):
                self._steps[u] = pieces.complex_step(u)
                self._contrast, names = pieces.complex_contrast()
            else:
                self._steps[u], names = pieces.complex_update(u)
        return names

    def second(self, given: Inputs, s: Arrays) -> Second:
        start = tuple(v + 0j for v in s)

        def share(beta: Array, unit: Array) -> tuple[Arrays, Arrays]:
            """The share of a point, and the end of its phase."""
            at = given._replace(beta=beta, unit=unit)
            steps = {u: piece.at(at) for u, piece in self._steps.items()}
            if self._contrast is not None:
                end = run_phase(steps, self.kind.second, given.periods[1], start)
                return self._contrast.at(at)(*end, *start), end
            steps = {u: adding(step, len(s)) for u, step in steps.items()}
            end = run_phase(steps, self.kind.second, given.periods[1], (*start, *self._zeros(given)))
            return end[len(s) :], end[: len(s)]

        shares, ends = jax.vmap(share)(given.beta, given.unit)
        return Second(s, 0, tuple(g.sum(0) for g in shares), ends)


@dataclass(frozen=True)
class FreePhaseAlone(Estimator):
    """The free phase and no gradient, for evaluation."""

    def computed(self, problem: Problem, start: State) -> tuple[Relaxation, Grads]:
        return relax(problem.model, problem.x, self.free_phase(), start), {}

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        return free, {}


class Settling(Program):
    """The free phase alone."""

    def prepare(self, pieces: Pieces) -> list[Name]:
        return []

    def second(self, given: Inputs, s: Arrays) -> Second:
        return Second(s, 0, (), ())


PROGRAMS: dict[type[Estimator], type[Program]] = {
    FreePhaseAlone: Settling,
    EP: Gradient,
    BPTT: Unrolled,
    RBP: Adjoint,
    ContinualEP: Moving,
    HolomorphicEP: Holomorphic,
}
"""The programs by estimator."""
