"""The reference time loop: free and nudged phases, schedules, residuals and errors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from eqprop.autodiff import doubled, in_own_precision, wide, with_values
from eqprop.cost import Cost, Nudge, check_beta
from eqprop.dynamics import Departure, Drive, Dynamics, PrimitiveDynamics
from eqprop.state import State, add, detach, distances, first_bad_layer, is_number, layer_name, subtract

Schedule = Literal["synchronous", "alternating", "sweeps", "sweeps-same"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
SWEEPS: tuple[Schedule, ...] = ("sweeps", "sweeps-same")
"""Schedules that update the groups of `Dynamics.sweep` in turn, in the nudged phase too."""

Stop = Literal["never", "settled"]

PhaseForm = Literal["plain", "difference"]
"""How a nudged phase is computed: on the state, or on its difference from the end of the free phase."""

Result = TypeVar("Result")


def in_sweeps(updates: int, groups: int | None) -> str:
    """` (60 sweeps)` after a count of updates of one group each; empty where all layers move at once."""
    return f" ({updates / groups:g} sweeps)" if groups else ""


SETTLED = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Default residual below which a sample counts as settled."""

CHECK_EVERY = 8
"""With stop='settled', the number of steps between checks; a check compares the whole state."""


@dataclass(frozen=True)
class Phase:
    """How to run a phase: T steps, or fewer if nothing moves any more.

    T           most steps
    still       below which movement counts as none
    schedule    "synchronous": s_{t+1} = F(x, s_t). "alternating": each t updates either the even or the odd layers,
                ending with the even ones (which include the output). After T half-updates the even layers equal
                those of the synchronous dynamics at T, and the odd ones those at T - 1. Nets with two or more
                convolutions are the exception: their inverse pooling uses the arg-max of the layer's own state, so
                the two schedules may diverge and settle in different fixed points of F.
                "sweeps": each t updates one group of `Dynamics.sweep`, ending with the last; a nudged phase runs the
                groups in reverse, beginning with the last. EP then matches BPTT through the same updates one by one.
                "sweeps-same": the nudged phase runs them in the same order, beginning with the first.
    stop        "never": T steps. "settled": stop when no neuron of any sample moved by more than `still`. With
                still = 0, the default, that is a bitwise fixed point, and all T steps would give the same.
    tolerance   the residual below which a sample counts as settled; None: 1e-6 in float64, 1e-4 in float32.
    checked     whether to check the last state for NaN and infinity (which waits for the device).
    then        of a free phase in sweeps: how many updates follow that are not part of it, which shifts the groups
    """

    T: int
    schedule: Schedule = "synchronous"
    stop: Stop = "never"
    tolerance: float | None = None
    still: float = 0.0
    checked: bool = True
    then: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.T, int) or self.T < 0:
            raise ValueError(f"T is {self.T!r}; expected a whole number of steps, 0 or more.")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule is {self.schedule!r}; expected 'synchronous' or 'alternating', 'sweeps' or 'sweeps-same'."
            )
        if self.stop not in ("never", "settled"):
            raise ValueError(f"stop is {self.stop!r}; expected 'never' or 'settled'.")
        if self.tolerance is not None and not (is_number(self.tolerance) and self.tolerance > 0.0):
            raise ValueError(f"tolerance is {self.tolerance!r}; expected a positive residual, such as 1e-6.")
        if not self.still >= 0.0:
            raise ValueError(f"still is {self.still}; expected 0 (no bit changes) or a small positive number.")


@dataclass(frozen=True)
class Relaxation:
    """The result of a phase.

    state       the last state
    steps       the steps taken
    residual    max |F(x, s) - s| over each sample's neurons, including the nudge in a nudged phase; (B,)
    settled     whether the residual is below the tolerance, per sample; (B,)
    trail       the last states before `state`, oldest first, if requested by `keep`
    by_layer    the residual of each layer, (layers, B), from the reference's time loop; None from engines that keep
                only the largest
    adjoint_residual    the remainder of recurrent backprop's adjoint, per sample; None for other phases
    """

    state: State
    steps: int
    residual: Tensor
    settled: Tensor
    trail: tuple[State, ...] = field(default=(), repr=False)
    adjoint_residual: Tensor | None = None
    by_layer: Tensor | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        layers = ", ".join(f"s{n} {tuple(layer.shape)}" for n, layer in enumerate(self.state))
        settled = f"{int(self.settled.sum())} of {self.settled.numel()} samples settled"
        worst = float(self.residual.max()) if self.residual.numel() else 0.0
        moving = "" if self.by_layer is None or bool(self.settled.all()) else f" in s{self._moving_most()}"
        return f"Relaxation({layers}; {self.steps} steps, residual at most {worst:.1e}{moving}, {settled})"

    def _moving_most(self) -> int:
        assert self.by_layer is not None
        return int(self.by_layer.flatten(1).amax(1).argmax())


class NotFiniteError(FloatingPointError):
    """A state became NaN or infinite."""


@in_own_precision
@torch.no_grad()
def relax(
    model: Dynamics,
    x: Tensor,
    phase: Phase | int,
    state: State | None = None,
    nudge: Nudge | None = None,
    keep: int = 0,
) -> Relaxation:
    """T steps of s_{t+1} = F(x, s_t), or of its nudged form, from `state` or the model's zero state.

    [eq:1st-phase] without a nudge, [eq:2nd-phase] with one.

    model   the network
    x       inputs, (B, ...)
    phase   the steps, or a `Phase` that also says in what order and when to stop
    state   where it begins; None: the model's zero state
    nudge   the force of a second phase; None: a free phase
    keep    how many states before the last to return
    """
    phase = phase if isinstance(phase, Phase) else Phase(phase)
    if keep < 0:
        raise ValueError(f"keep is {keep}; expected the number of states to return before the last, 0 or more.")
    start = prepare(model, x, state, nudge)
    if state is None and model.settles_itself:
        settled_alone: Relaxation = model.relaxation(x, phase, None, nudge, keep)
        return settled_alone
    return settle(model, x, phase, start, nudge, keep)


@torch.no_grad()
def settle(
    model: Dynamics, x: Tensor, phase: Phase, start: State, nudge: Nudge | None = None, keep: int = 0
) -> Relaxation:
    """The same for arguments that `prepare` has checked, in the precision of their tensors."""
    if model.settles_itself:
        settled_alone: Relaxation = model.relaxation(x, phase, start, nudge, keep)
        return settled_alone
    s, steps, before, step = _run(model, x, phase, start, nudge, keep)
    by_layer = distances(step(s), s, model.sample_dims(x))
    residual = by_layer.amax(0)
    settled = residual < settled_below(s[0].dtype, phase.tolerance)
    # States skipped by an early stop equal the fixed point.
    trail = (*before, *[s] * min(phase.T - steps, keep))[-keep:] if keep else ()
    return Relaxation(s, steps, residual, settled, trail, by_layer=by_layer)


@torch.no_grad()
def end_of_phase(
    model: Dynamics, x: Tensor, phase: Phase, state: State, nudge: Nudge, form: PhaseForm = "plain"
) -> State:
    """The last state of a nudged phase, as by `relax`, without the further step that measures its residual.

    What is given is not checked: it is the end of a free phase, and a nudge whose cost has seen it.

    In the difference form, how far it is from `state`.
    """
    if model.settles_itself:
        read = relax(model, x, phase, state, nudge).state
        return subtract(read, state) if form != "plain" else read
    return _run(model, x, phase, detach(state), nudge, 0, form)[0]


def _run(
    model: Dynamics,
    x: Tensor,
    phase: Phase,
    start: State,
    nudge: Nudge | None,
    keep: int,
    form: PhaseForm = "plain",
) -> tuple[State, int, deque[State], Stepper]:
    """The last state, the steps taken, at least `keep` states before the last, and the step itself."""
    if phase.schedule == "alternating":
        _check_alternating(model, nudge)
    step: Stepper
    if form == "difference":
        assert nudge is not None, "a free phase has no difference form"
        step = _MAKE_DIFFERENCE.get()(model, x, nudge, start)
        start = step.start(start)
    else:
        step = _MAKE_STEPPER.get()(model, x, nudge, phase)
    groups, origin = _groups(model, phase, start, nudge, form)
    order: list[Update] = [turn(groups, t - origin, phase.schedule) for t in range(phase.T)] if groups else []
    if phase.schedule == "alternating":
        order = [(phase.T - 1 - t) % 2 for t in range(phase.T)]
    # An update of one group changes only its layers, so it takes a whole sweep to see that nothing moves.
    span = 2 if phase.schedule == "alternating" else len(groups) or 1
    recent: deque[State] = deque([start], maxlen=max(keep, span) + 1)
    steps = 0
    for n, look in _strides(phase, step.block, span, keep):
        recent.append(step.run(recent[-1], order[steps : steps + n] or [None] * n))
        if steps == 0:
            _check_step(model, recent[-1], start)
        steps += n
        if look and _still(recent[-1], recent[-1 - span], phase):
            break
    s = recent.pop()
    if phase.checked:
        kind = "step" if nudge is None else "nudged step"
        check_finite(model, s, lambda: _replay(start, step, order[:steps] or [None] * steps), kind=kind)
    return s, steps, recent, step


def _groups(
    model: Dynamics, phase: Phase, start: State, nudge: Nudge | None, form: PhaseForm
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The layers that steps update in turn, () for all at once, and the step from which turns are counted."""
    if phase.schedule in SWEEPS:
        return model.sweep(len(start)), phase.T + phase.then if nudge is None else 0
    if phase.schedule == "synchronous" and form == "difference":
        assert nudge is not None, "a free phase has no difference form"
        return (moved_in_turn(model, len(start), nudge.cost) if nudge.at is not None else ()), 0
    if phase.schedule == "synchronous" and nudge is None and _from_zero(model, start):
        return moved_from_zero(model, len(start)), 0
    return (), 0


def turn(groups: tuple[tuple[int, ...], ...], t: int, schedule: Schedule) -> tuple[int, ...] | None:
    """The group that update t changes, t counted from the end of the free phase: its last update is -1.

    In sweeps the nudged phase mirrors the free one, update t repeating -1 - t. None, for all layers, without groups.
    """
    if not groups:
        return None
    return groups[(-1 - t if t >= 0 and schedule == "sweeps" else t) % len(groups)]


def moved_in_turn(model: Dynamics, layers: int, cost: Cost) -> tuple[tuple[int, ...], ...]:
    """The layers that a held nudge moves at even and at odd steps of the difference form; () where all may move.

    d begins at 0, so a layer k connections away first moves at step k, and then only at every other: in between, what
    it sees has not changed. Leaving it out is exact to the bit.
    """
    first = cost.pulls if "pulls" in vars(type(cost)) else None
    if first is None or not model.in_turns or getattr(model, "nudge_site", "") == "implicit":
        return ()
    return _parities(layers, first)


def moved_from_zero(model: Dynamics, layers: int) -> tuple[tuple[int, ...], ...]:
    """The same of a free phase that begins at the zero state."""
    return () if model.first_moved is None else _parities(layers, model.first_moved)


def _parities(layers: int, first: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(n for n in range(layers) if (n - first) % 2 == p) for p in (0, 1))


def _from_zero(model: Dynamics, start: State) -> bool:
    """Whether a phase begins where only some layers move, and is run by the reference."""
    known = model.first_moved is not None and _MAKE_STEPPER.get() is _reference_stepper
    return known and start[0].device.type == "cpu" and not any(bool(v.any()) for v in start)


def turns(model: Dynamics, layers: int, schedule: Schedule, times: Iterable[int]) -> list[tuple[int, ...] | None]:
    """The group of each update, t counted from the end of the free phase; None for all layers."""
    groups = model.sweep(layers) if schedule in SWEEPS else ()
    return [turn(groups, t, schedule) for t in times]


Update = tuple[int, ...] | int | None
"""What a step changes: some layers, those of one parity (0: even) in an alternating phase, or with None all."""


class Stepper:
    """s -> F(x, s), or s -> F(x, s) - beta dl/ds; of some layers, the others unchanged, or of all."""

    block: int = 1
    """How many steps `run` takes best at once."""

    def __init__(self, model: Dynamics, drive: Drive, nudge: Nudge | None) -> None:
        self.model, self.drive, self.nudge = model, drive, nudge
        self.theta = {} if nudge is None else dict(model.named_parameters())
        self.implicit = nudge is not None and isinstance(model, PrimitiveDynamics) and model.nudge_site == "implicit"

    def __call__(self, s: State, update: Update = None) -> State:
        model, drive, nudge = self.model, self.drive, self.nudge
        if isinstance(update, int):
            return model.half_step(drive, s, update)
        if self.implicit:
            assert nudge is not None
            assert isinstance(model, PrimitiveDynamics)
            target, strength = nudge.implicit(s[0], model.nudge_scale, model.least_curvature)
            return model.implicit_step(drive, s, target, strength, update)
        push = None if nudge is None else nudge.push(s, self.theta, model.nudge_scale)
        return model.step(drive, s, push) if update is None else model.group_step(drive, s, update, push)

    def start(self, s: State) -> State:
        """What the phase begins from where the state is s."""
        return s

    def run(self, s: State, updates: Sequence[Update]) -> State:
        """One step after the other."""
        for update in updates:
            s = self(s, update)
        return s


class DifferenceStepper(Stepper):
    """d -> F(x, s* + d) - F(x, s*) of a nudged step, s* the end of a free phase, by the model's formulas.

    What s* is not quite at rest by, F(x, s*) - s*, is left out: it would drift into the difference of two states.
    """

    def __init__(self, model: Dynamics, drive: Drive, nudge: Nudge, s: State, around: Departure) -> None:
        super().__init__(model, drive, nudge)
        self.s, self.around = s, around

    def start(self, s: State) -> State:
        return tuple(map(torch.zeros_like, s))

    def __call__(self, d: State, update: Update = None) -> State:
        assert self.nudge is not None
        assert not isinstance(update, int), "a nudged phase does not alternate"
        s = add(self.s, d)
        if self.implicit:
            return self.around.implicit(d, *self.nudge.implicit(s[0], self.model.nudge_scale), update)
        return self.around(d, self.nudge.push(s, self.theta, self.model.nudge_scale), update)


class WideStepper(Stepper):
    """The same of any model, as the difference of two steps in float64: exact to 1e-16 of the state."""

    def __init__(self, model: Dynamics, x: Tensor, nudge: Nudge, s: State) -> None:
        self.modules, self.values = (model, nudge.cost), (doubled(model), doubled(nudge.cost))
        self.x = wide(x)
        beta = wide(nudge.beta) if isinstance(nudge.beta, Tensor) else nudge.beta
        self.nudge = replace(nudge, y=wide(nudge.y), beta=beta)
        self.model, self.s = model, tuple(map(wide, s))
        try:
            self.free, self.nudged = self._run(self._made)
            self.known = self._run(lambda: self.free(self.s))
        except RuntimeError as error:
            raise ValueError(
                f"{model.title} cannot be computed in float64, which the difference form needs of a model without "
                f"formulas for it ({str(error).strip().splitlines()[0].rstrip('.')}): it reads tensors beside its "
                "parameters and buffers. Hold them by register_buffer, or use form='plain'."
            ) from error

    def start(self, s: State) -> State:
        return tuple([torch.zeros_like(wide(v)) for v in s])

    def __call__(self, d: State, update: Update = None) -> State:
        new = self._run(lambda: self.nudged(add(self.s, d), update))
        chosen = range(len(d)) if not isinstance(update, tuple) else update
        return tuple([new[n] - self.known[n] if n in chosen else v for n, v in enumerate(d)])

    def _made(self) -> tuple[Stepper, Stepper]:
        drive = self.model.drive(self.x)
        return Stepper(self.model, drive, None), Stepper(self.model, drive, self.nudge)

    def _run(self, run: Callable[[], Result]) -> Result:
        return with_values(self.modules, self.values, run)


def difference_stepper(model: Dynamics, x: Tensor, nudge: Nudge, s: State) -> Stepper:
    """The steps of a nudged phase in the difference form, around s."""
    drive = model.drive(x)
    around = model.departure(drive, s)
    return WideStepper(model, x, nudge, s) if around is None else DifferenceStepper(model, drive, nudge, s, around)


DifferenceMaker = Callable[[Dynamics, Tensor, Nudge, State], Stepper]

_MAKE_DIFFERENCE: ContextVar[DifferenceMaker] = ContextVar("make_difference", default=difference_stepper)


class StepperMaker(Protocol):
    """Makes the steps of a phase. An engine replaces it to run the time loop of any estimator (see `stepping`)."""

    def __call__(self, model: Dynamics, x: Tensor, nudge: Nudge | None, phase: Phase) -> Stepper: ...


def _reference_stepper(model: Dynamics, x: Tensor, nudge: Nudge | None, phase: Phase) -> Stepper:
    return Stepper(model, model.drive(x), nudge)


_MAKE_STEPPER: ContextVar[StepperMaker] = ContextVar("make_stepper", default=_reference_stepper)


@contextmanager
def stepping(make: StepperMaker, difference: DifferenceMaker = difference_stepper) -> Iterator[None]:
    """Let `relax` take the steps that `make` makes, and `difference` those of the difference form."""
    token, other = _MAKE_STEPPER.set(make), _MAKE_DIFFERENCE.set(difference)
    try:
        yield
    finally:
        _MAKE_STEPPER.reset(token)
        _MAKE_DIFFERENCE.reset(other)


def _strides(phase: Phase, block: int, span: int, keep: int) -> Iterator[tuple[int, bool]]:
    """How many steps to take at once, and whether to look for a fixed point after them.

    Looking takes `span` single steps, and states to keep are reached by single steps too.
    """
    settles = phase.stop == "settled"
    left = phase.T
    while block > 1 and left - keep >= block + span * settles:
        yield block, False
        for n in range(span * settles):
            yield 1, n == span - 1
        left -= block + span * settles
    for t in range(phase.T - left, phase.T):
        yield 1, settles and block == 1 and (t + 1) % CHECK_EVERY == 0


def trajectory(
    model: Dynamics,
    x: Tensor,
    s: State,
    groups: int | Sequence[tuple[int, ...] | None],
    nudge: Nudge | None = None,
    form: PhaseForm = "plain",
) -> Iterator[State]:
    """s_0 = s, s_1, ..., one at a time, free or nudged  [eq:1st-phase, eq:2nd-phase].

    `groups` is how many steps to take, or the layers that each of them updates (see `turns`). In the difference form:
    d_0 = 0, d_1, ..., how far they are from s.
    """
    # No gradient is recorded during a step; between steps the caller's grad mode applies.
    with torch.no_grad():
        if form == "difference":
            assert nudge is not None, "a free phase has no difference form"
            step = difference_stepper(model, x, nudge, s)
            s = step.start(s)
        else:
            step = Stepper(model, model.drive(x), nudge)
    yield s
    for layers in [None] * groups if isinstance(groups, int) else groups:
        with torch.no_grad():
            s = step(s, layers)
        yield s


def settled_below(dtype: torch.dtype, tolerance: float | None) -> float:
    return SETTLED.get(dtype, 1e-4) if tolerance is None else tolerance


def prepare(model: Dynamics, x: Tensor, state: State | None, nudge: Nudge | None) -> State:
    """Check x, y and the state against the model; return the state to start from."""
    if not isinstance(model, Dynamics):
        raise _not_a_model(model)
    _check_input(model, x)
    zero = model.init_state(x)
    s = zero if state is None else detach(tuple(state))
    _check_state(model, s, zero)
    if nudge is not None:
        if not isinstance(nudge.beta, Tensor):
            check_beta(nudge.beta)
        nudge.cost.check(s, nudge.y)
    return s


def _not_a_model(model: object) -> TypeError:
    inside = getattr(model, "module", None)
    advice = (
        "It wraps one: use its .module, and one process per device, each with its own trials."
        if isinstance(inside, Dynamics)
        else "Build one with eqprop.from_primitive, from_energy or from_transition."
    )
    return TypeError(f"The model is a {type(model).__name__}; expected an eqprop.Dynamics. {advice}")


def _check_input(model: Dynamics, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"The input x is a {type(x).__name__}; expected a tensor. Convert it with torch.as_tensor(x).")
    sample = model.input_shape
    if sample is not None:
        lead = tuple(x.shape[: max(x.dim() - len(sample), 0)])
        stacked = () if model.networks is None else (model.networks,)
        if lead[:-1] != stacked or not lead or tuple(x.shape[len(lead) :]) != sample:
            raise _wrong_shape(model, x, (*stacked, "B", *sample))
    if not x.numel():
        raise ValueError(f"The input x has shape {tuple(x.shape)} and no samples; expected at least one.")
    parameter = next(model.parameters(), None)
    if parameter is not None and (x.dtype != parameter.dtype or x.device != parameter.device):
        raise ValueError(
            f"The input x is {x.dtype} on {x.device}; expected {parameter.dtype} on {parameter.device}, like the "
            "model's parameters. Convert one of them with .to(...)."
        )


def _wrong_shape(model: Dynamics, x: Tensor, shape: Sequence[int | str]) -> ValueError:
    expected = ", ".join(map(str, shape))
    what = "" if model.networks is None else f" for {model.networks} stacked networks"
    return ValueError(
        f"The input x has shape {tuple(x.shape)}; expected ({expected}){what}: B samples of the shape "
        f"{model.title} takes. Reshape it with x.reshape({expected.replace('B', '-1')})."
    )


def _check_step(model: Dynamics, s: State, before: State) -> None:
    got, expected = ([(tuple(v.shape), v.dtype) for v in state] for state in (s, before))
    if got != expected:
        raise ValueError(
            f"A step of {model.title} turned layers of {_kinds(expected)} into {_kinds(got)}; expected no "
            "change. The transition must return a tuple with one tensor per layer, shaped like the state."
        )


def _kinds(layers: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in layers)


def _check_state(model: Dynamics, s: State, zero: State) -> None:
    got, expected = [tuple(v.shape) for v in s], [tuple(v.shape) for v in zero]
    if got != expected:
        raise ValueError(
            f"The state has layers of shapes {got}; expected {expected} for this x. Start from model.init_state(x) "
            "or from the state of an earlier relaxation of the same batch."
        )
    for n, (layer, like) in enumerate(zip(s, zero, strict=True)):
        if layer.dtype != like.dtype or layer.device != like.device:
            raise ValueError(
                f"Layer {layer_name(model.layer_names, n)} of the state is {layer.dtype} on {layer.device}; expected "
                f"{like.dtype} on {like.device}, like x. Convert it with .to(...)."
            )


def _check_alternating(model: Dynamics, nudge: Nudge | None) -> None:
    if nudge is not None:
        raise ValueError(
            "The nudged phase cannot alternate: the nudge makes the output depend on itself. "
            "Use schedule='synchronous' for it; only the free phase may alternate."
        )
    if not model.bipartite:
        raise ValueError(
            f"{model.title} cannot alternate: its layers do not form two groups that depend only on each "
            "other (in an energy-based net each layer depends on itself). Use schedule='synchronous'."
        )


def _still(s: State, earlier: State, phase: Phase) -> bool:
    if phase.still == 0.0:
        return all(torch.equal(a, b) for a, b in zip(s, earlier, strict=True))
    return all(bool(((a - b).abs() <= phase.still).all()) for a, b in zip(s, earlier, strict=True))


def _replay(s: State, step: Stepper, updates: Iterable[Update]) -> Iterator[State]:
    yield s
    for update in updates:
        s = step(s, update)
        yield s


def check_finite(
    model: Dynamics, s: State, replay: Callable[[], Iterator[State]], first: int = 0, kind: str = "step"
) -> None:
    """Check only the last state, which is cheap; if it is bad, replay the phase to find the first bad step.

    `replay` yields all states, starting with the one after `first` steps.
    """
    if first_bad_layer(s) is None:
        return
    for t, state in enumerate(replay(), start=first):
        bad = first_bad_layer(state)
        if bad is not None:
            raise NotFiniteError(
                f"Layer {layer_name(model.layer_names, bad)} of {model.title} is not finite after {kind} {t}. "
                "The weights may be too large or x not finite: lower the learning rate, eps or beta, or check x."
            )
    raise NotFiniteError(
        f"{model.title} ended in a state that is not finite, but a second run did not. Make its transition a "
        "deterministic function of x and s."
    )


FLOPS_PER_THREAD = 1e8
"""Floating point operations of a step on a mini-batch that are worth a thread of their own.

torch's threads meet at the end of every operation. Where operations are short they mostly wait for one another, and on
a busy machine for their turn: two threads run P-1h 50 times slower than one when both cores have other work.
"""


def threads_for(model: Dynamics, x: Tensor) -> int:
    """CPU threads for torch on this model and mini-batch.

    At most torch's current number, and one for small work. Depends on sizes alone, never on how busy the machine is, so
    that a seed gives the same bits whatever else runs.
    """
    most = torch.get_num_threads()
    if most == 1 or next(model.parameters(), x).device.type != "cpu":
        return most
    samples = math.prod(x.shape[: model.sample_dims(x)])
    used_once = 2 * sum(p.numel() for p in model.parameters()) // (model.networks or 1)
    return min(most, max(1, int(samples * max(model.operations(), used_once) / FLOPS_PER_THREAD)))


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of CPU threads, and restore it afterwards; None leaves it alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
