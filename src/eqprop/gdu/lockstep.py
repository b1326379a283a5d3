"""Run EP forward and BPTT backward in time together, and split their difference into causes.

Both count t from the end of the free phase, so they advance in lockstep: time grows with K, memory does not.

Between EP's update f and minus BPTT's gradient g lie four intermediate processes, each differing from the next by one
cause:

    f                   the second phase at finite beta
    f - drift           without the remaining movement of the free phase
    limit               beta -> 0, exactly
    frozen              the same with the Jacobian J held at the state reached: J^t N (-dl/ds)
    adjoint             J^T instead of J, at the state reached: recurrent backprop
    g                   J^T along the states of the free phase: BPTT

so that f - g is the sum of

    residual        drift + (limit - frozen) + (adjoint - g): everything that vanishes at a steady state
    rounding        (f - drift) minus the same in float64: zero if the model is float64
    finite_beta     (f - drift) - limit, minus rounding
    output_slope    the excess in frozen's synapses because the nudge bypasses squash: J^t N (1 - D) (-dl/ds)
    asymmetry       frozen - output_slope - adjoint: J against its transpose

On a prototypical net J = D W with a symmetric W and D = diag(sigma'). Its synapses get (D W)^t dl/ds from EP and
(D W)^t D dl/ds from BPTT: they differ by output_slope only, and their asymmetry is zero. Its neurons get
(D W)^t dl/ds and (W D)^t dl/ds: they differ by asymmetry, without an output_slope part.

With the nudge inside sigma, N = D: both give the synapses (D W)^t D dl/ds, and output_slope is zero.

Below them: `Linearised`, the Jacobian J = dF/ds at a state through products with vectors. Is it symmetric, does it
contract?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import BPTT, EP, limit_steps
from eqprop.estimators.base import Step, trainable, update
from eqprop.relax import Relaxation, Stepper, prepare, turns
from eqprop.state import State, detach, scale, subtract

Turn = tuple[int, ...] | None
"""The layers that one update changes; None for all."""


class Moment(NamedTuple):
    """Time t: EP's update, minus BPTT's gradient, and the parts of their difference if requested.

    Parts that are zero by construction are absent; a part of the synapses only has no neurons.
    """

    ep: Step
    bptt: Step
    parts: dict[str, Step]


def pair(problem: Problem, free: Relaxation, ep: EP) -> Iterator[Moment]:
    """EP and BPTT after a free phase run with `keep=K`, without the parts of their difference."""
    arguments = (problem.model, problem.cost, problem.x, problem.y, free)
    bptt = BPTT(ep.T, ep.K, schedule=ep.schedule)
    for f, nabla in zip(ep.steps(*arguments), bptt.steps(*arguments), strict=True):
        yield Moment(f, combine((-1, nabla)), {})


def dissect(problem: Problem, free: Relaxation, ep: EP) -> Iterator[Moment]:
    """EP and BPTT with the parts of their difference."""
    around, push = Linearised(problem.model, problem.x, free.state), first_push(problem, free.state)
    order = turns(problem.model, len(free.state), ep.schedule, range(ep.K))
    arguments = (problem.model, problem.cost, problem.x, problem.y)
    at_rest = replace(free, trail=(free.state,) * ep.K)
    others = zip(
        drift_steps(problem, free, ep),
        limit_steps(*arguments, free, ep.K, ep.schedule),
        frozen_steps(around, around.product(_zeros(push), push), order),
        _slope_steps(around, push, order),
        BPTT(ep.T, ep.K, schedule=ep.schedule).steps(*arguments, at_rest),  # with J held there: recurrent backprop
        _wide_steps(problem, free, ep),
        strict=True,
    )
    for (f, g, _), (drift, limit, frozen, slope, nabla, wide) in zip(pair(problem, free, ep), others, strict=True):
        response = combine((1, f), (-1, drift))
        parts = {
            "residual": combine((1, drift), (1, limit), (-1, frozen), (-1, nabla), (-1, g)),
            "finite_beta": combine((1, response if wide is None else wide), (-1, limit)),
        }
        if wide is not None:
            parts["rounding"] = combine((1, response), (-1, wide))
        asymmetry = combine((1, frozen), (1, nabla))
        if slope is not None:
            parts["output_slope"] = Step((), slope.synapses)
            asymmetry = Step(asymmetry.neurons, combine((1, asymmetry), (-1, slope)).synapses)
        yield Moment(f, g, {**parts, "asymmetry": asymmetry})


def total(moments: Iterator[Moment]) -> Iterator[Moment]:
    """The sums over all t, as a single moment: in sweeps of the same order only they can be compared."""
    ep, bptt, parts = next(moments)
    for moment in moments:
        ep, bptt = combine((1, ep), (1, moment.ep)), combine((1, bptt), (1, moment.bptt))
        parts = {name: combine((1, part), (1, moment.parts[name])) for name, part in parts.items()}
    yield Moment(ep, bptt, parts)


def drift_steps(problem: Problem, free: Relaxation, ep: EP) -> Iterator[Step]:
    """EP's formula without a nudge: the remaining movement of the free phase, divided by beta.

    The difference form leaves it out, so there it is zero.
    """
    model, x, s = problem.model, problem.x, free.state
    if ep.form == "difference":
        none = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
        yield from [Step(_zeros(s), none)] * ep.K
        return
    unit = 1.0 / (ep.beta * model.nudge_scale)
    with torch.no_grad():
        step = Stepper(model, model.drive(x), None)
    for group in turns(model, len(s), ep.schedule, range(ep.K)):
        with torch.no_grad():
            new = step(s, group)
        yield update(model, x, s, new, unit, free.state)
        s = new


def _wide_steps(problem: Problem, free: Relaxation, ep: EP) -> Iterator[Step | None]:
    """f - drift in float64, from the same state; None if the model is float64 already."""
    if problem.x.dtype == torch.float64:
        yield from [None] * ep.K
        return
    wide, start = problem.double(), replace(free, state=tuple(layer.double() for layer in free.state), trail=())
    updates = ep.steps(wide.model, wide.cost, wide.x, wide.y, start)
    for f, drift in zip(updates, drift_steps(wide, start, ep), strict=True):
        yield combine((1, f), (-1, drift))


def frozen_steps(around: Linearised, first: State, order: Sequence[Turn]) -> Iterator[Step]:
    """J^t m for t = 0, ..., K-1 with J at the state reached, and the synapses' response.

    In sweeps it is d_{t+1} - d_t, where an update takes d to J d + m in the layers of its group.
    """
    moved, tangent = first, _zeros(first)
    for group in order:
        if group is not None:
            changed = [a + m for a, m in zip(around.product(tangent), first, strict=True)]
            new = tuple(changed[n] if n in group else layer for n, layer in enumerate(tangent))
            moved, tangent = subtract(new, tangent), new
        yield Step(moved, around.synapses(moved))
        moved = moved if group is not None else around.product(moved)


def first_push(problem: Problem, s: State) -> State:
    """-dl/ds at the end of the free phase."""
    return scale(detach(problem.pull(s)), -1.0)


def slope_excess(around: Linearised, push: State) -> State | None:
    """N (1 - D) p: the excess of the first move because the nudge bypasses squash; None if it is zero."""
    if not isinstance(around.model, PrimitiveDynamics) or around.model.nudge_site != "outside":
        return None
    excess = subtract(push, around.squashed(push))
    return around.product(_zeros(push), excess) if any(bool(layer.any()) for layer in excess) else None


def _slope_steps(around: Linearised, push: State, order: Sequence[Turn]) -> Iterator[Step | None]:
    first = slope_excess(around, push)
    yield from [None] * len(order) if first is None else frozen_steps(around, first, order)


def _zeros(s: State) -> State:
    return tuple([torch.zeros_like(v) for v in s])


def combine(*terms: tuple[int, Step]) -> Step:
    """A signed sum of steps, over the parameters common to all."""
    signs, steps = zip(*terms, strict=True)
    names = [name for name in steps[0].synapses if all(name in step.synapses for step in steps)]
    layers = zip(*[step.neurons for step in steps], strict=True)
    return Step(
        tuple([_sum(signs, layer) for layer in layers]),
        {name: _sum(signs, [step.synapses[name] for step in steps]) for name in names},
    )


def _sum(signs: Sequence[int], values: Sequence[Tensor]) -> Tensor:
    wide = torch.float64 if any(v.dtype == torch.float64 for v in values) else values[0].dtype
    total = signs[0] * values[0].to(wide)
    for sign, value in zip(signs[1:], values[1:], strict=True):
        total.add_(value, alpha=sign)
    return total


def single_start(model: Dynamics, x: Tensor, state: State | None) -> State:
    """Where the free phase of a single network begins, checked; stacked networks are refused."""
    start = prepare(model, x, state, None)
    if model.sample_dims(x) != 1:
        raise ValueError(
            f"The input x has shape {tuple(x.shape)}, that of stacked networks; expected a single network. Look at one "
            "at a time: eqprop.models.unstack(model, r)."
        )
    return start


def check_problem(problem: Problem, state: State | None = None) -> None:
    """Raise ValueError for a problem whose updates cannot be looked at: nothing is trained, or y does not fit."""
    start = single_start(problem.model, problem.x, state)
    if not trainable(problem.model):
        name = problem.model.title
        raise ValueError(f"{name} has no trainable parameter; expected at least one. Look for requires_grad_(False).")
    problem.cost.check(start, problem.y)


Receive = Callable[[State], Sequence[Tensor]]


class Linearised:
    """F linearised at a state s, per sample."""

    def __init__(self, model: Dynamics, x: Tensor, s: State) -> None:
        self.model, self.x, self.s = model, x, s
        with torch.no_grad():
            self.drive = model.drive(x)
        with torch.enable_grad():
            inputs, push = leaves(s), leaves(tuple(torch.zeros_like(v) for v in s))
            self._step = Tangent(model.step(self.drive, inputs, push), (*inputs, *push))
        self._receive: Receive | None = None

    def product(self, v: State, push: State | None = None) -> State:
        """J v, or J v + N p, where p is a nudge and N the derivative of the step by the nudge."""
        return self._step((*v, *(tuple(torch.zeros_like(a) for a in v) if push is None else push)))

    def on_rows(self, rows: Tensor) -> Tensor:
        """J v, with all layers of v in one row per sample, (B, N)."""
        return flat(self.product(unflat(rows, self.s)))

    def squashed(self, v: State) -> State:
        """D v, where D is the derivative of squash at dPhi/ds(s): diag(sigma') for a prototypical net."""
        if not isinstance(self.model, PrimitiveDynamics):
            raise TypeError(
                f"{type(self.model).__name__} has no primitive, so no squash to differentiate; expected a "
                "PrimitiveDynamics. Define it with eqprop.from_primitive."
            )
        with torch.no_grad():
            inputs = leaves(self.model.gradient(self.drive, self.s))
        with torch.enable_grad():
            return Tangent(self.model.squash(inputs), inputs)(v)

    def synapses(self, v: State) -> dict[str, Tensor]:
        """The batch mean of d^2Phi/dtheta ds v, the parameters' response to a move v; (dF/dtheta)^T v without Phi."""
        if self._receive is None:
            self._receive = self._record_parameters()
        return dict(zip(trainable(self.model), self._receive(v), strict=True))

    @torch.enable_grad()
    def _record_parameters(self) -> Receive:
        """Differentiate `contrast`, since EP uses it.

        If it is itself computed by automatic differentiation it has no graph; dPhi/ds has one, and its derivative by
        theta is the same.
        """
        model, x, s = self.model, self.x, self.s
        if isinstance(model, PrimitiveDynamics):
            inputs = leaves(s)
            contrast = model.contrast(x, inputs, s)
            received = tuple(contrast[name] for name in trainable(model))
            if any(g.requires_grad for g in received):
                return Tangent(received, inputs)
            out = model.gradient(model.drive(x), s)
        else:
            out = model.step(model.drive(x), s)
        parameters, samples = tuple(trainable(model).values()), len(x)
        return lambda v: [g / samples for g in _pull(out, parameters, v)]


class Tangent:
    """v -> (d outputs / d inputs) v, on the graph that computed `outputs` from `inputs`."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._u = leaves(tuple(torch.zeros_like(o) for o in outputs))
        self._pulled = _pull(outputs, inputs, self._u, create_graph=True)

    def __call__(self, v: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return _pull(self._pulled, self._u, v)


def leaves(s: State) -> State:
    return tuple(v.detach().requires_grad_() for v in s)


def _pull(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], v: Sequence[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """(d outputs / d inputs)^T v. Outputs without a graph contribute zero."""
    live = [(o, a) for o, a in zip(outputs, v, strict=True) if o.requires_grad]
    if not live:
        return tuple(torch.zeros_like(i) for i in inputs)
    return torch.autograd.grad(
        [o for o, _ in live],
        inputs,
        [a for _, a in live],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )


PROBES = 8
"""Pairs of random vectors per sample used to estimate the asymmetry."""

KRYLOV = 60
"""Steps of Arnoldi's iteration used to estimate the spectral radius."""

SATURATED = 0.01
"""A neuron counts as saturated where sigma' is below this."""


def flat(s: State) -> Tensor:
    """All layers of each sample in one row, (B, N)."""
    return torch.cat([layer.flatten(1) for layer in s], 1)


def unflat(rows: Tensor, like: State) -> State:
    parts = rows.split([layer[0].numel() for layer in like], 1)
    return tuple(part.view_as(layer) for part, layer in zip(parts, like, strict=True))


def asymmetry(around: Linearised, seed: int = 0) -> float:
    """|J - J^T| / (2 |J - c|) in Frobenius norm, estimated by random probes of u.Jv - v.Ju; 0 ... 1.

    c is the multiple of the identity nearest to J: the leak of an energy-based net is always symmetric and would
    mask the weights. 0 is symmetric, 1 antisymmetric; independent weights give 0.7.
    """
    source, rows, product = torch.Generator().manual_seed(seed), flat(around.s), around.on_rows
    odd, even, trace, size, samples = [], [], 0.0, 0.0, []
    for _ in range(PROBES):
        u, v = (torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows) for _ in range(2))
        ju, jv = product(u), product(v)
        uv, vu, dot = (u * jv).sum(1), (v * ju).sum(1), (u * v).sum(1)
        odd.append(uv - vu)
        samples.append((uv, vu, dot))
        trace += float((u * ju).sum() + (v * jv).sum())
        size += float((u * u).sum() + (v * v).sum())
    c = trace / size
    for uv, vu, dot in samples:
        even.append(0.5 * ((uv - c * dot).square() + (vu - c * dot).square()))
    whole = float(torch.stack(even).double().mean())
    return 0.5 * (float(torch.stack(odd).double().square().mean()) / whole) ** 0.5 if whole > 0.0 else 0.0


def spectral_radius(around: Linearised, seed: int = 0) -> float:
    """max |lambda(J)| over the samples, by Arnoldi's iteration from a random vector.

    Below 1 the steady state attracts; the closer to 1, the slower.
    """
    source, rows = torch.Generator().manual_seed(seed), flat(around.s)
    start = torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows)
    return float(torch.linalg.eigvals(krylov(around.on_rows, start, KRYLOV)[1][:, :-1].cpu()).abs().max())


def krylov(product: Callable[[Tensor], Tensor], start: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Arnoldi's iteration, each sample its own: an orthonormal basis (B, m, N), and h (B, m + 1, m) with J V = V h."""
    size = min(most, start.shape[1])
    basis = [start / start.norm(dim=1, keepdim=True).clamp_min(torch.finfo(start.dtype).tiny)]
    h = torch.zeros(start.shape[0], size + 1, size, dtype=torch.float64, device=start.device)
    for k in range(size):
        w = product(basis[k])
        # Two passes are enough: the second removes the rounding error of the first.
        for _ in range(2):
            for j, q in enumerate(basis):
                part = (q * w).sum(1, keepdim=True)
                w = w - part * q
                h[:, j, k] += part[:, 0].double()
        norm = w.norm(dim=1, keepdim=True)
        if k + 1 == start.shape[1] or not bool((norm > 0).any()):
            return torch.stack(basis, 1), h[:, : k + 2, : k + 1]
        h[:, k + 1, k] = norm[:, 0].double()
        if k + 1 < size:
            basis.append(w / norm.clamp_min(torch.finfo(w.dtype).tiny))
    return torch.stack(basis, 1), h


@torch.no_grad()
def slopes(around: Linearised) -> State | None:
    """sigma' of every neuron at s: of squash, or of the model's `activation`; None where neither bends."""
    model, s = around.model, around.s
    if not isinstance(model, PrimitiveDynamics):
        return None
    found = around.squashed(tuple([torch.ones_like(layer) for layer in s]))
    own = getattr(getattr(model, "activation", None), "slope", None)
    if own is not None and all(bool((v == 1.0).all()) for v in found):
        found = tuple([own(layer) for layer in s])
    return None if all(bool((v == 1.0).all()) for v in found) else found


@torch.no_grad()
def saturated(around: Linearised, seed: int = 0) -> State:
    """Which neurons of each sample cannot carry a signal: sigma' below `SATURATED`.

    Where there is no sigma', those that do not respond at all: a zero row of J.
    """
    if (found := slopes(around)) is not None:
        return tuple([v.abs() < SATURATED for v in found])
    source, s = torch.Generator().manual_seed(seed), around.s
    silent = [torch.ones_like(layer, dtype=torch.bool) for layer in s]
    for _ in range(2):
        v = tuple([torch.randn(layer.shape, generator=source, dtype=torch.float64).to(layer) for layer in s])
        silent = [held & (moved == 0.0) for held, moved in zip(silent, around.product(v), strict=True)]
    return tuple(silent)
