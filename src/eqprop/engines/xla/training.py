"""Whole training iterations as one program: mini-batch, gradient, optimizer step, and the counts of losses and errors.

The samples stay where they are and mini-batches are gathered in the program. Where an iteration does what no program
can, such as an optimizer that only torch has, the gradient alone is one, and the rest is the reference's iteration.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor, nn

from eqprop.autodiff import in_own_precision
from eqprop.cost import Nudge, Problem
from eqprop.engines.base import Batch, Engine, Job, Tally, Task, checked_rows
from eqprop.engines.eager import CLIP_EPS, EagerRunner
from eqprop.engines.traced import CannotTrace, Checks, apart, size_of, watched
from eqprop.engines.xla.compiling import running
from eqprop.engines.xla.engine import AGREE, NOISE, Call, first_steps, strength
from eqprop.engines.xla.estimators import PROGRAMS, Derivatives
from eqprop.engines.xla.optimizers import Rule, Values, rates_of, rules_of
from eqprop.engines.xla.program import (
    Arrays,
    Inputs,
    Kind,
    Name,
    Piece,
    Turns,
    as_array,
    as_tensor,
)
from eqprop.engines.xla.windows import Array
from eqprop.estimators import BPTT, EP, RBP, Estimator
from eqprop.relax import Relaxation, settled_below
from eqprop.state import State

MOST = 512
"""Most iterations of a call: its mini-batches are given as a table of this many rows."""
CALL_SECONDS = 0.2
"""About how long a call takes: keyboard interrupts are handled between calls."""
CHECKED_STEPS = 8, 4
"""Steps of the two phases that are compared with the reference's."""


class TrainingPieces(Derivatives):
    """The pieces of an iteration beside those of its gradient."""

    def begin(self) -> Piece:
        """-> the state that free phases start from."""
        return self._piece("begin", lambda x, nudge, unit, s: self._begun(x), ())[0]

    @torch.no_grad()
    def _begun(self, x: Tensor) -> State:
        # A tensor of its own even where a model returns one that it holds.
        return tuple(layer + torch.zeros_like(layer) for layer in self.model.init_state(x))

    def answers(self) -> Piece:
        """s -> the loss of each sample, and its class scores."""

        def run(x: Tensor, nudge: Nudge, unit: Tensor, s: State) -> State:
            theta, dims = dict(self.model.named_parameters()), self.model.sample_dims(x)
            with torch.no_grad():
                return self.cost.values(s, nudge.y, theta, dims), self.cost.scores(s).flatten(dims)

        return self._piece("answers", run, self.s)[0]

    def constrained(self) -> tuple[Piece, list[Name]]:
        """-> the parameters that a constraint changes."""
        names: list[Name] = []

        def run(x: Tensor, nudge: Nudge, unit: Tensor, s: State) -> State:
            with torch.no_grad():
                found = self.model.constrained()
            names[:] = [(0, name) for name in found]
            return tuple(found.values())

        return self._piece("constrained", run, (), names=names)


class ScanInputs(NamedTuple):
    """What a call takes and leaves as it is.

    theta       all parameters and buffers; those that are learned are taken from `ScanCarry`
    order       (MOST, B) or (MOST, R, B) rows of the samples, of which the first `count` are used
    beta, unit  of the nudge, by iteration
    rates       of the learned parameters
    free        whether parameters are left as they are by a constraint
    """

    theta: list[Array]
    constants: list[Array]
    images: Array
    targets: Array
    labels: Array
    order: Array
    beta: Array
    unit: Array
    rates: list[Array]
    periods: Array
    tolerance: Array
    count: Array
    free: Array


class ScanCarry(NamedTuple):
    """What iterations change.

    kept        by the optimizer, for each learned parameter
    counts      (7, R), as in `Tally`
    clock       iterations since the runner's start
    state       the free state of the last iteration
    """

    learned: list[Array]
    kept: list[Values]
    counts: dict[str, Array]
    clock: Array
    state: Arrays


class Iterations:
    """Iterations of a job as a program, for one size of mini-batch.

    learned     the parameters that are trained, each once
    pace        how many of them a call takes
    """

    def __init__(self, job: Job, rules: Mapping[nn.Parameter, Rule], problem: Problem) -> None:
        estimator = job.estimator
        s = job.model.init_state(problem.x)
        self.networks, self.stacked, self.clip = job.networks or 1, job.networks is not None, job.clip
        signs: Any = torch.ones(self.networks, dtype=torch.float64) if self.stacked else 1
        one = estimator.with_sign(signs) if isinstance(estimator, EP) and draws(estimator) else estimator
        self.kind = Kind.of(job.model, len(s), estimator, job.cost, job.start is None)
        self.watch = watched(first_steps(Call(problem, one, s), self.kind), job.model, job.cost)
        pieces = TrainingPieces(problem, s, *strength(one, job.model))
        self.gradient = PROGRAMS[type(estimator)](pieces, self.kind)
        self.begin, self.answers = pieces.begin(), pieces.answers()
        self.constraint, constrained = pieces.constrained()
        self.held, self.constants = pieces.held, pieces.traced.constants
        self.places = [place for held in self.held for place in held.values()]
        tensors = [place.tensor for place in self.places]
        with_gradient = {id(tensors[pieces.place(name)]) for name in self.gradient.names}
        self.learned = [p for p in rules if id(p) in with_gradient]
        self.rules = [rules[p] for p in self.learned]
        number = {id(p): n for n, p in enumerate(self.learned)}
        self.learned_at = {n: number[id(v)] for n, v in enumerate(tensors) if id(v) in number}
        self.grad_of = [number.get(id(tensors[pieces.place(name)])) for name in self.gradient.names]
        self.constrained = [number.get(id(tensors[pieces.place(name)])) for name in constrained]
        if None in self.constrained:
            raise CannotTrace("it constrains a parameter that is not trained")
        self.state = s
        self.checks, self.made, self.pace = Checks(), set[bool](), 1
        self.run = jax.jit(partial(self._run, looked=False))
        self.look = jax.jit(partial(self._run, looked=True))

    def __call__(self, given: ScanInputs, carried: ScanCarry, looked: bool) -> ScanCarry:
        """`_run`, compiled at its first call."""
        first = looked not in self.made
        self.made.add(looked)
        with running(first):
            return jax.block_until_ready((self.look if looked else self.run)(given, carried))

    def _run(self, given: ScanInputs, carried: ScanCarry, looked: bool) -> ScanCarry:
        """Run iterations; `looked` at each, or else as if all numbers stayed finite, which is a third faster."""
        return lax.fori_loop(0, given.count, lambda n, now: self._iterate(given, n, now, looked), carried)

    def _iterate(self, given: ScanInputs, n: Array, now: ScanCarry, looked: bool) -> ScanCarry:
        rows = given.order[n]
        theta = [now.learned[self.learned_at[k]] if k in self.learned_at else v for k, v in enumerate(given.theta)]
        x, y, labels = given.images[rows], given.targets[rows], given.labels[rows]
        inputs = Inputs(theta, given.constants, x, y, (), given.beta[n], given.unit[n], given.periods)
        inputs = inputs._replace(s=self.begin.at(inputs)())
        found = self.gradient.whole(inputs)
        grads = self._grads(found.grads, now.learned)
        loss, scores = self.answers.at(inputs)(*found.state)
        loss = loss.reshape(self.networks, -1)
        counts = self._counted(now, given, loss, scores.argmax(-1) != labels, found.residual)
        going = None
        if looked:
            bad = jnp.where(~self._good(loss, grads) & (counts["bad"] < 0), now.clock, counts["bad"])
            counts, going = counts | {"bad": bad}, bad < 0
            grads = [jnp.where(self._by_network(going, g), g, 0) for g in grads]
        if self.clip is not None:
            grads = self._clipped(grads, self.clip)
        learned, kept = self._stepped(given, inputs, now, grads)
        if going is not None:  # a network that is frozen keeps its parameters
            before = zip(learned, now.learned, strict=True)
            learned = [jnp.where(self._by_network(going, p), p, old) for p, old in before]
        return ScanCarry(learned, kept, counts, now.clock + 1.0, found.state)

    def _good(self, loss: Array, grads: list[Array]) -> Array:
        """Which networks' numbers are finite."""
        good = jnp.all(jnp.isfinite(loss), 1)
        for g in grads:
            good &= jnp.all(jnp.isfinite(g).reshape(self.networks, -1), 1)
        return good

    def _grads(self, found: Arrays, learned: list[Array]) -> list[Array]:
        """The gradient of each learned parameter, the sum of its parts."""
        grads: dict[int, Array] = {}
        for number, g in zip(self.grad_of, found, strict=True):
            if number is not None:
                grads[number] = grads[number] + g if number in grads else g
        return [grads[n] for n in range(len(learned))]

    def _counted(
        self, now: ScanCarry, given: ScanInputs, loss: Array, wrong: Array, residual: Array
    ) -> dict[str, Array]:
        counts = now.counts
        wrong, residual = wrong.reshape(self.networks, -1), residual.reshape(self.networks, -1)
        return counts | {
            "samples": counts["samples"] + wrong.shape[1],
            "errors": counts["errors"] + wrong.sum(1),
            "loss": counts["loss"] + loss.sum(1),
            "residual": counts["residual"] + residual.sum(1),
            "worst": jnp.maximum(counts["worst"], residual.max(1)),
            "unsettled": counts["unsettled"] + (~(residual < given.tolerance.astype(residual.dtype))).sum(1),
        }

    def _clipped(self, grads: list[Array], most: float) -> list[Array]:
        squares = sum((jnp.square(g.astype(jnp.float64)).reshape(self.networks, -1).sum(1) for g in grads), start=0.0)
        factor = jnp.minimum(most / (jnp.sqrt(squares) + CLIP_EPS), 1.0)
        return [g * self._by_network(factor, g).astype(g.dtype) for g in grads]

    def _stepped(
        self, given: ScanInputs, inputs: Inputs, now: ScanCarry, grads: list[Array]
    ) -> tuple[list[Array], list[Values]]:
        """The optimizer's step, and the constraint."""
        parts = zip(self.rules, now.learned, grads, now.kept, given.rates, strict=True)
        steps = [rule.step(p, g, kept, rate) for rule, p, g, kept, rate in parts]
        learned = [p for p, _ in steps]
        if self.constrained:
            theta = [learned[self.learned_at[k]] if k in self.learned_at else v for k, v in enumerate(inputs.theta)]
            values = self.constraint.at(inputs._replace(theta=theta))()
            for number, value in zip(self.constrained, values, strict=True):
                assert number is not None, "checked when made"
                learned[number] = jnp.where(given.free, learned[number], value)
        return learned, [kept for _, kept in steps]

    def _by_network(self, value: Array, like: Array) -> Array:
        return value.reshape(-1, *[1] * (like.ndim - 1)) if self.stacked else value[0]


@dataclass(frozen=True)
class Samples:
    """The training set where programs read it: the job's own memory."""

    images: Array
    targets: Array
    labels: Array

    @classmethod
    def of(cls, job: Job) -> Samples:
        parts = job.images, job.targets, job.labels.to(torch.int64)
        with running(first=False):
            return cls(*(jax.device_put(as_array(v.contiguous()), may_alias=True) for v in parts))


class XlaRunner(EagerRunner):
    """Runs a job's iterations in programs: whole ones where it can, else their gradients.

    falls_back      whether a model that has no program is left to the reference, with a warning, or else raises
    """

    def __init__(self, job: Job, engine: Engine, falls_back: bool = False) -> None:
        super().__init__(job)
        self.engine, self.falls_back = engine, falls_back
        self.samples: Samples | None = None
        self.known: dict[object, Iterations] = {}
        self.refused: str | None = None
        self.last: State | None = None

    @in_own_precision
    def run(self, order: Tensor) -> None:
        self.job.check_unchanged()
        rules = None if self.refused or not is_whole(self.job) else rules_of(self.job.optimizer)
        if rules is None:
            super().run(order)
            return
        rows = checked_rows(order, self.job.networks, len(self.job.images))
        if not rows.numel():
            return
        try:
            iterations = self._iterations(rules, rows[0])
        except CannotTrace as error:
            self._leave(str(error))
            super().run(order)
            return
        signs = self.next_signs(len(rows))
        done = 0
        while done < len(rows):
            part = slice(done, min(done + iterations.pace, len(rows)))
            began = time.perf_counter()
            self._call(iterations, rows[part], None if signs is None else signs[part])
            took = (time.perf_counter() - began) / (part.stop - done)
            done = part.stop
            iterations.pace = max(1, min(MOST, 2 * iterations.pace, int(CALL_SECONDS / max(took, 1e-9))))

    def backward(self, estimator: Estimator, batch: Batch, begun: State | None) -> Relaxation:
        if self.refused:
            return super().backward(estimator, batch, begun)
        problem = Problem(self.job.model, self.job.cost, batch.x, batch.y)
        task = Task(problem.model, problem.cost, estimator.for_call(problem.model))
        free, grads = self.engine.gradient(task, batch.x, batch.y, estimator.begin(problem, begun))
        estimator.fill_grad(problem, grads)
        return free

    def free_states(self) -> State | None:
        return self.last

    def reset(self) -> None:
        super().reset()
        for iterations in self.known.values():
            iterations.checks.ask()

    def _problem(self, rows: Tensor) -> Problem:
        job = self.job
        return Problem(job.model, job.cost, job.images[rows], job.targets[rows])

    def _iterations(self, rules: Mapping[nn.Parameter, Rule], rows: Tensor) -> Iterations:
        """The program for mini-batches like these rows, made anew if anything changed."""
        key = (rows.shape, tuple(rules.values()), tuple(map(id, rules)))
        found = self.known.get(key)
        if found is None or found.watch.changed():
            found = self.known[key] = Iterations(self.job, rules, self._problem(rows))
        if found.checks.due():
            self._verify(found, rows)
        return found

    def _leave(self, reason: str) -> None:
        title = self.job.model.title
        if not self.falls_back:
            raise ValueError(f"The engine 'xla' cannot serve {title}: {reason}. Use 'eager'.")
        self.refused = reason
        warnings.warn(f"{title} trains on the eager engine, which is slower: {reason}.", stacklevel=4)

    def _given(
        self, iterations: Iterations, rows: Tensor, estimator: Estimator, signs: Tensor | None, free: bool = False
    ) -> ScanInputs:
        """The inputs of a call for these rows."""
        if self.samples is None:
            self.samples = Samples.of(self.job)
        count, model = len(rows), self.job.model
        order = np.zeros((MOST, *rows.shape[1:]), np.int32)
        order[:count] = rows.numpy()
        drawn = estimator
        if isinstance(estimator, EP) and signs is not None:
            drawn = replace(estimator, nudging="one-sided", beta=1.0)  # its signs are factors below
        beta, unit = (np.asarray(v, np.float64) for v in strength(drawn, model))
        if isinstance(estimator, EP) and signs is not None:
            each = signs.numpy() * np.asarray(estimator.beta)  # (n, R)
            each = each if iterations.stacked else each[:, 0]
            beta, unit = each[..., None] if iterations.stacked else each, unit / each
            betas, units = _padded(beta), _padded(unit)
        else:
            betas, units = (np.broadcast_to(v, (MOST, *v.shape)) for v in (beta, unit))
        rates = rates_of(self.job.optimizer)
        kind = iterations.kind
        return ScanInputs(
            [as_array(place.tensor) for place in iterations.places],
            [as_array(v) for v in iterations.constants],
            *(self.samples.images, self.samples.targets, self.samples.labels),
            order,
            betas,
            units,
            [np.float64(rates[p]) for p in iterations.learned],
            np.array([kind.free.periods(estimator.free_steps), kind.second.periods(estimator.K)], np.int32),
            np.float64(settled_below(iterations.state[0].dtype, estimator.tolerance)),
            np.int32(count),
            np.bool_(free),
        )

    def _carried(self, iterations: Iterations) -> ScanCarry:
        """Where a call begins."""
        state = self.job.optimizer.state
        counts = {name: as_array(getattr(self.tally, name)) for name in Tally.names()}
        learned = [as_array(p) for p in iterations.learned]
        kept = [
            tuple(rule.read(p, state.get(p, {}))) for p, rule in zip(iterations.learned, iterations.rules, strict=True)
        ]
        free = tuple(as_array(layer) for layer in iterations.state)
        return ScanCarry(learned, kept, counts, as_array(self.clock), free)

    def _call(self, iterations: Iterations, rows: Tensor, signs: Tensor | None) -> None:
        """Run some iterations, and take over what they leave."""
        estimator, optimizer = self.estimator, self.job.optimizer
        given, carried = self._given(iterations, rows, estimator, signs), self._carried(iterations)
        looked = bool(iterations.constrained) or bool((self.tally.bad >= 0).any())
        end = iterations(given, carried, looked)
        if not (looked or _finite(end)):
            end = iterations(given, carried, looked=True)
        for p, rule, new, kept in zip(iterations.learned, iterations.rules, end.learned, end.kept, strict=True):
            as_array(p)[...] = new
            if kept:
                rule.write(p, optimizer.state[p], list(map(np.asarray, kept)))
        for name, count in end.counts.items():
            as_array(getattr(self.tally, name))[...] = count
        self.clock.fill_(float(end.clock))
        if self.keeps_states:
            layers = map(as_tensor, end.state)
            self.last = tuple(layers) if iterations.stacked else tuple(layer.unsqueeze(0) for layer in layers)

    def _verify(self, iterations: Iterations, rows: Tensor) -> None:
        """Compare a short iteration with the reference's. Raises CannotTrace where the two differ.

        The nudge is as strong as the cost itself, so that rounding does not hide a difference. The gradient is read off
        the optimizer's first step, at a rate that moves the parameters far.
        """
        problem, short = self._problem(rows), self._shortened(iterations)
        theirs = self._reference(iterations, problem, short)
        state, wanted = theirs[: len(iterations.state)], theirs[len(iterations.state) :]
        before = self._carried(iterations)
        before = before._replace(kept=[tuple(map(np.zeros_like, kept)) for kept in before.kept])
        rates = [_far(p, size_of(g)) for p, g in zip(before.learned, wanted, strict=True)]
        given = self._given(iterations, rows.unsqueeze(0), short, None, free=True)._replace(rates=rates)
        after = iterations(given, before, looked=False)
        moves = zip(iterations.rules, before.learned, after.learned, after.kept, rates, strict=True)
        ours = [*map(as_tensor, after.state), *(torch.tensor(rule.gradient(*move)) for rule, *move in moves)]
        theirs = [*state, *self._as_stepped(wanted)]
        largest = 0.1 * max(map(size_of, theirs), default=0.0)
        allowed = [AGREE[v.dtype] * max(size_of(v), largest) for v in theirs]
        if not apart(ours, theirs, allowed):
            return
        nearby = replace(problem, x=problem.x * (1.0 + 2.0 * torch.finfo(problem.x.dtype).eps))
        other = self._reference(iterations, nearby, short)
        other = [*other[: len(state)], *self._as_stepped(other[len(state) :])]
        noise = [NOISE * size_of(a - b) + least for a, b, least in zip(theirs, other, allowed, strict=True)]
        if apart(ours, theirs, noise):
            raise CannotTrace("its compiled iteration differs from the reference's")

    def _shortened(self, iterations: Iterations) -> Estimator:
        """The estimator with short phases, of whole periods and the rest that the program has."""
        estimator, kind = self.estimator, iterations.kind
        T, K = _short(estimator.free_steps, CHECKED_STEPS[0], kind.free), estimator.K
        if isinstance(estimator, BPTT):  # K is part of the program
            return replace(estimator, T=T + K, stop="never", checked=False)
        short = replace(estimator, T=T, K=_short(K, CHECKED_STEPS[1], kind.second), stop="never", checked=False)
        if not isinstance(short, EP):
            return short
        drawn = draws(short)
        each = isinstance(short.beta, Tensor) or (drawn and iterations.stacked)
        # Half, as in `shortened`.
        beta: Any = torch.full((iterations.networks,), 0.5, dtype=torch.float64) if each else 0.5
        return replace(short, nudging="one-sided" if drawn else short.nudging, beta=beta)

    def _reference(self, iterations: Iterations, problem: Problem, estimator: Estimator) -> list[Tensor]:
        """The free state and the gradient of each learned parameter."""
        free, grads = estimator.computed(problem, problem.model.init_state(problem.x))
        return [*free.state, *(grads[p] for p in iterations.learned)]

    def _as_stepped(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients as the optimizer gets them."""
        if self.job.clip is None:
            return grads
        networks = self.job.networks or 1
        norms = torch.stack([g.double().reshape(networks, -1).square().sum(1) for g in grads]).sum(0).sqrt()
        factor = (self.job.clip / (norms + CLIP_EPS)).clamp(max=1.0)
        return [
            g * (factor.view(-1, *[1] * (g.dim() - 1)) if self.job.networks else factor[0]).to(g.dtype) for g in grads
        ]


def _far(p: np.ndarray[Any, Any], slope: float) -> np.float64:
    """A power of two: the rate at which a gradient of this size moves a parameter by several times its own."""
    size = float(np.abs(p).max(initial=0.0))
    return np.float64(2.0 ** round(math.log2(8.0 * size / slope)) if size > 0.0 and 0.0 < slope < math.inf else 1.0)


def _finite(end: ScanCarry) -> bool:
    """Whether parameters, what the optimizer keeps, and losses are finite: what is not never becomes so again."""
    values = (*end.learned, *(v for kept in end.kept for v in kept), end.counts["loss"])
    return all(bool(np.isfinite(np.sum(np.asarray(v), dtype=np.float64))) for v in values)


def is_whole(job: Job) -> bool:
    """Whether an iteration of this job is nothing but mini-batch, gradient, clip, step and counts."""
    beside = job.start, job.prepare, job.stream, job.exchange, job.after
    return isinstance(job.estimator, EP | BPTT | RBP) and all(part is None for part in beside)


def draws(estimator: Estimator) -> bool:
    """Whether it draws the sign of beta anew in every iteration."""
    return isinstance(estimator, EP) and estimator.nudging == "random-sign"


def _short(n: int, steps: int, turns: Turns) -> int:
    """At most about this many updates, with the same rest as n."""
    period = len(turns.pattern)
    return min(n, -(-steps // period) * period + turns.rest)


def _padded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(n, ...) values with ones up to MOST."""
    whole = np.ones((MOST, *values.shape[1:]))
    whole[: len(values)] = values
    return whole
