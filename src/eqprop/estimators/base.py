"""Base of the gradient estimators: a common sign, a common way to fill `.grad`, common per-step processes."""

from __future__ import annotations

import functools
import importlib
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from eqprop.autodiff import check_recordable, in_own_precision
from eqprop.cost import Cost, Problem
from eqprop.dynamics import Drive, Dynamics, PrimitiveDynamics
from eqprop.estimators.settings import EstimatorSettings
from eqprop.relax import SWEEPS, Phase, Relaxation, Schedule, Stop, check_finite, prepare, settle
from eqprop.state import State, add, detach, per_sample, subtract

Grads = dict[nn.Parameter, Tensor]
"""dL/dtheta by parameter."""

Factor = float | complex | Tensor
"""A number, or a tensor with one per stacked network, (R,)."""


Rule = Callable[[int, int, float], "Estimator"]
"""A nudging rule: T, K, beta -> an estimator."""


class Backend(Protocol):
    """Computes the gradient of a call of `backward`, by the engine of a name or by one that it chooses."""

    def gradient(
        self, estimator: Estimator, problem: Problem, state: State | None, engine: str | None
    ) -> tuple[Relaxation, Grads]: ...


@functools.cache
def _backend() -> Backend:
    """The engines, which know the estimators: so they are imported by name, at the first call."""
    found: Backend = importlib.import_module("eqprop.engines.backend").BACKEND
    return found


class Step(NamedTuple):
    """One time step of a process: neurons per sample, synapses as the batch mean."""

    neurons: State
    synapses: dict[str, Tensor]


@dataclass(frozen=True)
class Processes:
    """An estimator's processes over t = 0, ..., K-1: (K, B, ...) per layer, (K, ...) per parameter.

    EP gives its updates Delta, BPTT and RBP their gradients nabla; Delta corresponds to -nabla.

    neurons     by layer, output first
    synapses    by parameter
    direct      dl/dtheta of a cost that depends on the parameters  [sec:index-shift], with the sign of the process
    """

    neurons: State
    synapses: dict[str, Tensor]
    direct: dict[str, Tensor]


@dataclass(frozen=True)
class Estimator(ABC):
    """Computes dL/dtheta: T free steps, then K steps specific to the estimator.

    Frozen, printable, comparable. `schedule`, `stop` and `tolerance` are those of the free phase.

    T           free steps
    K           steps specific to the estimator
    schedule    which layers each free step updates (see `eqprop.relax.Phase`)
    stop        "never": T steps; "settled": fewer, once nothing moves
    tolerance   the residual below which a sample counts as settled; None: 1e-6 in float64, 1e-4 in float32
    checked     False skips the checks that read results back from the device; the caller must then check for NaN
    """

    orientation: ClassVar[int] = 1
    """+1 if the process sums to dL/dtheta, -1 if it sums to the negative."""

    reads_only: ClassVar[bool] = False
    """Whether states at rest, free and nudged, are all that it needs of a system."""

    follows_theorem: ClassVar[bool] = True
    """Whether Theorem 1 speaks of it, so that what spoils EP's gradient spoils its own; else that is measured alone."""

    settings: ClassVar[type[EstimatorSettings]] = EstimatorSettings
    """What it declares for files and the command line beside its phases."""

    rules: ClassVar[Mapping[str, Rule]] = {}
    """The nudging rules that it stands for, by name: T, K, beta -> an estimator."""

    T: int
    K: int
    _: KW_ONLY
    schedule: Schedule = "synchronous"
    stop: Stop = "never"
    tolerance: float | None = None
    checked: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(beta := getattr(self, "beta", None), complex):
            raise ValueError(f"{name} got beta={beta}; expected a real number. For complex ones use HolomorphicEP.")
        if not isinstance(self.T, int) or isinstance(self.T, bool) or self.T < 0:
            raise ValueError(f"{name} got T={self.T!r}; expected the number of free steps, 0 or more.")
        if not isinstance(self.K, int) or isinstance(self.K, bool) or self.K < 1:
            raise ValueError(f"{name} got K={self.K!r}; expected the number of second-phase steps, 1 or more.")
        self.free_phase()

    @property
    def plain(self) -> Estimator:
        """Itself, without the penalties that it may carry."""
        return self

    def with_plain(self, plain: Estimator) -> Estimator:
        """Another estimator, with the penalties that this one carries."""
        return plain

    def free_phase(self, T: int | None = None) -> Phase:
        """The free phase, or its first T steps."""
        steps = self.T if T is None else T
        then = self.T - steps if self.schedule in SWEEPS else 0
        return Phase(steps, self.schedule, self.stop, self.tolerance, checked=self.checked, then=then)

    def nudged_phase(self) -> Phase:
        """The second phase of the forms of EP: in sweeps where the free phase is, else synchronous."""
        schedule = self.schedule if self.schedule in SWEEPS else "synchronous"
        return Phase(self.K, schedule, checked=self.checked)

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        """Raise ValueError if this estimator does not support the model or the cost. Most support all."""
        self.check_nudge(model, x.dtype)

    def gradient(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None = None
    ) -> tuple[Relaxation, Grads]:
        """The free phase and the batch mean of dL/dtheta by parameter, without touching `.grad`: the reference."""
        problem = Problem(model, cost, x, y)
        start = self.begin(problem, state)
        return self.for_call(model).computed(problem, start)

    def begin(self, problem: Problem, state: State | None = None) -> State:
        """Check the model, x, y and the state; return the state to start from. Values are not looked at."""
        check_recordable()
        start = prepare(problem.model, problem.x, state, None)
        problem.cost.check(start, problem.y)  # fail before the first step rather than after the last
        return start

    def for_call(self, model: Dynamics) -> Estimator:
        """The estimator of a single call: this one, unless it draws something anew."""
        return self

    @in_own_precision
    def computed(self, problem: Problem, start: State) -> tuple[Relaxation, Grads]:
        """The same for arguments that `begin` has checked and an estimator made by `for_call`."""
        if problem.model.settles_itself and not self.reads_only:
            raise TypeError(
                f"{type(self).__name__} needs the steps of a model, and {problem.model.title} can only be read at "
                "rest. Train it by EP."
            )
        if self.checked:
            self._check_values(problem, start)
        free = settle(problem.model, problem.x, self.free_phase(self.free_steps), start)
        free, grads = self.estimate(problem, free)
        return free, merge(problem.model, grads, problem.direct_gradient(free.state))

    def _check_values(self, problem: Problem, start: State) -> None:
        """Raise ValueError for NaN or infinity in x or y, which would pass in silence through a clip."""
        for name, value in (("input x", problem.x), ("target y", problem.y)):
            if not bool(torch.isfinite(value).all()):
                bad = int((~torch.isfinite(value)).sum())
                raise ValueError(
                    f"The {name} holds {bad} values that are not finite; expected numbers. Check the data."
                )
        self.check_nudge(problem.model, start[0].dtype)

    def check_nudge(self, model: Dynamics, dtype: torch.dtype) -> None:
        """Raise ValueError if a nudge of this strength is lost in rounding. Estimators without a nudge accept all."""

    @property
    def free_steps(self) -> int:
        """The steps that `gradient` relaxes before calling `estimate`."""
        return self.T

    @abstractmethod
    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        """The free phase to return, and the batch mean of dL/dtheta through the dynamics, by name."""

    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """Yield the K steps of the process, from the end of a free phase run with `keep=K`. Training does without."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} has a gradient but no process over time. Define {name}.steps(model, cost, x, y, free), or compare "
            "gradients: eqprop.gdu.compare_gradients."
        )

    def backward(
        self,
        model: Dynamics,
        cost: Cost,
        x: Tensor,
        y: Tensor,
        state: State | None = None,
        engine: str | None = None,
    ) -> Relaxation:
        """Add the batch-mean dL/dtheta to `.grad`; return the free phase.

        engine  what computes it, by name; None: that of `eqprop.engines.use`, else the fastest that serves
        """
        problem = Problem(model, cost, x, y)
        free, grads = _backend().gradient(self, problem, state, engine)
        self.fill_grad(problem, grads)
        return free

    def fill_grad(self, problem: Problem, grads: Grads) -> None:
        """Add to `.grad`."""
        if self.orientation < 0 and isinstance(problem.model, PrimitiveDynamics):  # updates are derivatives of Phi
            warn_outside_phi(problem.model, problem.x)
        add_to_grad(grads)

    @in_own_precision
    def processes(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Processes:
        """All K steps at once, from a free phase run with `keep=K` (memory grows with K)."""
        check_recordable()
        taken = list(self.steps(model, cost, x, y, free))
        neurons = tuple(torch.stack(layer) for layer in zip(*(step.neurons for step in taken), strict=True))
        synapses = {name: torch.stack([step.synapses[name] for step in taken]) for name in taken[0].synapses}
        names = {p: name for name, p in model.named_parameters()}
        direct = Problem(model, cost, x, y).direct_gradient(free.state)
        return Processes(neurons, synapses, {names[p]: self.orientation * g for p, g in direct.items() if p in names})


LOST_IN_ROUNDING = 100.0
"""A nudge must be at least this many machine epsilons strong: the update's relative error is about epsilon / nudge."""


def check_site(model: Dynamics, cost: Cost, y: Tensor) -> None:
    """Raise TypeError if the model is nudged implicitly and the cost has no such nudge."""
    if getattr(model, "nudge_site", None) == "implicit":
        cost.implicit_target(y)


def check_resolved(beta: float | complex | Tensor, model: Dynamics, dtype: torch.dtype) -> None:
    """Raise ValueError if beta * eps is so small that rounding in this dtype drowns what the nudge moves."""
    if isinstance(beta, Tensor) and not bool(torch.isfinite(beta).all()):
        raise ValueError(f"beta is {beta.tolist()}; expected finite, non-zero numbers, one per network.")
    strength = (float(beta.abs().min()) if isinstance(beta, Tensor) else abs(beta)) * model.nudge_scale
    least = LOST_IN_ROUNDING * torch.finfo(dtype).eps
    if strength < least:
        raise ValueError(
            f"The nudge has strength {strength:.1e} (beta times the step), which {str(dtype).removeprefix('torch.')} "
            f"rounds away; expected {least:.0e} or more. Raise beta, or compute in float64."
        )


_LOOKED_AT: WeakSet[Dynamics] = WeakSet()
_WARNED_OF: set[tuple[type, str]] = set()


def warn_outside_phi(model: PrimitiveDynamics, x: Tensor) -> None:
    """Warn of parameters that EP cannot train, once per class and parameter; look at each model once."""
    if model in _LOOKED_AT:
        return
    _LOOKED_AT.add(model)
    for name in model.outside_phi(x):
        if (type(model), name) not in _WARNED_OF:
            _WARNED_OF.add((type(model), name))
            warnings.warn(
                f"Phi of {type(model).__name__} does not read the parameter {name}, so EP gives it the gradient 0. "
                "Move it into Phi, train it by BPTT or RBP, or freeze it with requires_grad_(False).",
                stacklevel=3,
            )


def add_to_grad(grads: Mapping[nn.Parameter, Tensor]) -> None:
    """Add to `.grad`, laid out in memory as the parameter: torch's fused optimizers take both as flat arrays."""
    for parameter, grad in grads.items():
        if grad.stride() != parameter.stride():
            grad = torch.empty_like(parameter).copy_(grad)
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


Visited = TypeVar("Visited")


def last_of(
    visited: Iterable[Visited], model: Dynamics, checked: bool, kind: str, state: Callable[[Visited], State]
) -> Visited:
    """The last that a second phase passes; with `checked`, all are kept to say which state first is not finite."""
    passed = deque(visited, maxlen=None if checked else 1)
    if checked:
        check_finite(model, state(passed[-1]), lambda: map(state, passed), kind=kind)
    return passed[-1]


def difference(a: Step, b: Step) -> Step:
    return Step(subtract(a.neurons, b.neurons), {name: g - b.synapses[name] for name, g in a.synapses.items()})


def moved_contrast(model: PrimitiveDynamics, x: Tensor, after: State, before: State, begun: State) -> dict[str, Tensor]:
    """The contrast of two states of a nudged phase that began at a state `begun`.

    Where there is no Phi, contrasts are of the move seen from the state it leaves: here both are seen from where the
    phase began, so that those of its steps add up to that of the whole.
    """
    if model.conservative or before is begun:
        return model.contrast(x, after, before)
    ends = [model.contrast(x, end, begun) for end in (after, before)]
    return {name: g - ends[1][name] for name, g in ends[0].items()}


def update(model: Dynamics, x: Tensor, before: State, after: State, unit: Factor, begun: State | None = None) -> Step:
    """The update of neurons and synapses by one step of a nudged phase, times `unit`  [eq:delta-ep].

    begun   where the phase began, which nets without a Phi ask for; None: at `before`
    """
    moved = tuple(by_network(unit, v) * v for v in subtract(after, before))
    if not isinstance(model, PrimitiveDynamics):
        return Step(moved, parameter_vjp(model, x, before, moved))
    learned = trainable(model)
    contrast = moved_contrast(model, x, after, before, before if begun is None else begun)
    return Step(moved, {name: by_network(unit, g) * g.detach() for name, g in contrast.items() if name in learned})


def difference_update(model: Dynamics, x: Tensor, s: State, before: State, after: State, unit: Factor) -> Step:
    """The same from states given by how far they are from s; the neurons in the precision of s."""
    moved = tuple([(by_network(unit, v) * v).to(a.dtype) for v, a in zip(subtract(after, before), s, strict=True)])
    if not isinstance(model, PrimitiveDynamics):
        there = tuple([v.to(a.dtype) for v, a in zip(add(s, before), s, strict=True)])
        return Step(moved, parameter_vjp(model, x, there, moved))
    learned, contrast = trainable(model), model.difference_contrast(x, s, after, before)
    return Step(moved, {name: by_network(unit, g) * g.detach() for name, g in contrast.items() if name in learned})


def by_network(factor: Factor, like: Tensor) -> Factor:
    """Reshape a factor per network to multiply a layer or a parameter of stacked networks."""
    return per_sample(factor.to(like.dtype), like) if isinstance(factor, Tensor) else factor


def minus_sum(steps: Iterable[Step]) -> dict[str, Tensor]:
    """dL/dtheta as minus the sum of the synapses' updates over all steps  [eq:ep-weight-update]."""
    grads: dict[str, Tensor] = {}
    for step in steps:
        for name, change in step.synapses.items():
            grads[name] = grads[name] - change if name in grads else -change
    return grads


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def merge(model: Dynamics, grads: Mapping[str, Tensor], direct: Mapping[nn.Parameter, Tensor]) -> Grads:
    """Gradients by parameter: through the dynamics, plus the cost's direct term."""
    known = dict(model.named_parameters())
    lost = next((name for name in grads if name not in known), None)
    if lost is not None:
        raise ValueError(
            f"{model.title} computes a gradient for {lost}, which is no longer one of its parameters: was it "
            "pruned or parametrised? Undo that (torch.nn.utils.prune.remove, torch.nn.utils.parametrize), or write the "
            "model by its primitive, which is differentiated automatically."
        )
    out = {p: grads[name] for name, p in trainable(model).items() if name in grads}
    for p, g in direct.items():
        if p.requires_grad:
            out[p] = out[p] + g if p in out else g
    return out


def transition_vjp(
    model: Dynamics, x: Tensor, s: State, v: State, group: tuple[int, ...] | None = None
) -> tuple[State, dict[str, Tensor]]:
    """(dF/ds)^T v per sample, and the batch mean of (dF/dtheta)^T v  [eq:bptt-state, eq:bptt-param]."""
    parameters = trainable(model)
    with torch.enable_grad():
        leaves = tuple(layer.detach().requires_grad_() for layer in s)
        out = advance(model, model.drive(x), leaves, group)
        grads = pull_back(out, (*leaves, *parameters.values()), v)
    synapses = batch_mean(model, x, s, dict(zip(parameters, grads[len(s) :], strict=True)))
    return grads[: len(s)], synapses


def parameter_vjp(model: Dynamics, x: Tensor, s: State, v: State) -> dict[str, Tensor]:
    """The batch mean of (dF/dtheta)^T v alone: no gradient flows back to the state."""
    with torch.enable_grad():
        out = model.step(model.drive(x), detach(s))
    parameters = trainable(model)
    grads = pull_back(out, tuple(parameters.values()), v)
    return batch_mean(model, x, out, dict(zip(parameters, grads, strict=True)))


def advance(model: Dynamics, drive: Drive, s: State, group: tuple[int, ...] | None) -> State:
    """F(x, s) of a group of layers, or of all."""
    if group is None:
        return model.step(drive, s)
    # Views: layers were updated one from another, and a step that differentiates by them takes partial derivatives.
    return model.group_step(drive, tuple(layer.view_as(layer) for layer in s), group)


def pull_back(out: State, inputs: Sequence[Tensor], v: State, retain_graph: bool = False) -> tuple[Tensor, ...]:
    """(d out / d inputs)^T v; outputs that depend on no input contribute zero.

    No conjugation, so that the result is analytic if the function is.
    """
    depending = [n for n, layer in enumerate(out) if layer.requires_grad]
    if not depending or not inputs:
        return tuple(torch.zeros_like(w) for w in inputs)
    grads = torch.autograd.grad(
        [out[n] for n in depending],
        inputs,
        [v[n].conj() for n in depending],
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return tuple(g.conj().resolve_conj() for g in grads)


def batch_mean(model: Dynamics, x: Tensor, s: State, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    samples = s[0].shape[model.sample_dims(x) - 1]
    return {name: g / samples for name, g in sums.items()}
