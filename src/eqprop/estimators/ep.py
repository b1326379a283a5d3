"""Equilibrium propagation in discrete time, and its exact limit for beta -> 0  [sec:ep-algo]."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, final

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Nudge, Problem, check_beta
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import (
    Estimator,
    Rule,
    Step,
    by_network,
    check_resolved,
    check_site,
    difference,
    difference_update,
    minus_sum,
    moved_contrast,
    parameter_vjp,
    trainable,
    update,
)
from eqprop.estimators.settings import EstimatorSettings
from eqprop.relax import PhaseForm, Relaxation, Schedule, end_of_phase, trajectory, turns
from eqprop.settings import about
from eqprop.state import State, subtract


class SideBySide:
    """A mini-batch (B, ...) with one copy per beta, concatenated: (P B, ...), or (R, P B, ...) when stacked.

    x       the inputs, repeated            nudge   towards the repeated targets, each copy with its own beta

    A single beta does not copy the batch. A beta may be a tensor with one value per network, (R,).
    """

    def __init__(self, problem: Problem, betas: Sequence[float | complex | Tensor]) -> None:
        model, cost, x, y = problem.model, problem.cost, problem.x, problem.y
        self.copies = len(betas)
        self.dim = model.sample_dims(x) - 1
        self.x = self._repeat(x)
        if len(betas) == 1:
            self.nudge = Nudge(cost, y, _over_batch(betas[0]))
        else:
            lead = x.shape[: self.dim + 1]
            each = [(x.new_ones(lead) * _over_batch(beta)).reshape(lead) for beta in betas]
            self.nudge = Nudge(cost, self._repeat(y), torch.cat(each, self.dim))

    def repeat(self, s: State) -> State:
        return tuple(self._repeat(layer) for layer in s)

    def split(self, s: State) -> list[State]:
        """The state of each copy, in the order of the betas."""
        if self.copies == 1:
            return [s]
        layers = [layer.chunk(self.copies, self.dim) for layer in s]
        return [tuple(layer[k] for layer in layers) for k in range(self.copies)]

    def _repeat(self, v: Tensor) -> Tensor:
        return v if self.copies == 1 else torch.cat([v] * self.copies, self.dim)


def _over_batch(beta: float | complex | Tensor) -> float | complex | Tensor:
    """A beta per network, shaped to multiply values per sample: (R,) -> (R, 1)."""
    return beta.unsqueeze(-1) if isinstance(beta, Tensor) and beta.dim() else beta


BITS = 256
"""Signs per digest: its bits, highest first, 1 for +1 and 0 for -1."""


def random_sign(seed: int, iteration: int) -> int:
    """+1 or -1: bit i mod 256 of SHA-256 of "eqprop signs SEED BLOCK", BLOCK = i div 256.

    seed        of the run
    iteration   i, counted from 0 over the whole training
    """
    block, bit = divmod(iteration, BITS)
    return 1 if _digest(seed, block) >> (BITS - 1 - bit) & 1 else -1


def _digest(seed: int, block: int) -> int:
    return int.from_bytes(hashlib.sha256(f"eqprop signs {seed} {block}".encode()).digest(), "big")


@dataclass(frozen=True)
class Signs:
    """The signs of a training run.

    seeds   one per network, so that a network draws the same signs stacked or alone
    first   the iteration a runner begins with, counted from the start of training
    """

    seeds: tuple[int, ...] = field(default=(0,))
    first: int = 0

    def rows(self, start: int, n: int) -> Tensor:
        """(n, R) of +1 and -1 in float64, for n iterations beginning at `start`, counted from `first`."""
        begin = self.first + start
        columns = [list(_signs(seed, begin, begin + n)) for seed in self.seeds]
        return torch.tensor(columns, dtype=torch.float64).view(len(self.seeds), n).T.contiguous()


def _signs(seed: int, begin: int, end: int) -> Iterator[float]:
    block, digest = -1, 0
    for i in range(begin, end):
        if i // BITS != block:
            block = i // BITS
            digest = _digest(seed, block)
        yield 1.0 if digest >> (BITS - 1 - i % BITS) & 1 else -1.0


Nudging = Literal["one-sided", "symmetric", "random-sign"]


class EPSettings(EstimatorSettings, frozen=True, kw_only=True):
    """Of `EP`."""

    form: Annotated[PhaseForm, about("Nudged phase on the state (plain) or on its difference.", common=True)] = "plain"
    held: Annotated[bool, about("Whether the nudge keeps the force it begins with.")] = False


def positive(T: int, K: int, beta: float) -> Estimator:
    """Towards the target: exactly the gradient of (F(beta) - F(0)) / beta, a lower bound of the loss.

    Biased by order beta. It may reach the bound without lowering the loss, as the nudged state does part of the work.
    """
    return EP(T, K, beta=beta)


def negative(T: int, K: int, beta: float) -> Estimator:
    """Away from the target: exactly the gradient of (F(0) - F(-beta)) / beta, an upper bound of the loss.

    Biased by order beta. To lower an upper bound lowers the loss; from some beta on the phase no longer settles.
    """
    return EP(T, K, beta=-beta)


def centered(T: int, K: int, beta: float) -> Estimator:
    """Both: exactly the gradient of (F(beta) - F(-beta)) / (2 beta), between the two bounds.

    Biased by order beta^2, and what an unsettled state would have done anyway cancels; two second phases.
    """
    return EP(T, K, beta=beta, nudging="symmetric")


def random_sign_rule(T: int, K: int, beta: float) -> Estimator:
    """Positive or negative by a coin: one draw is biased by order beta, their mean is the centered one.

    One second phase, at the price of noise of order beta between draws.
    """
    return EP(T, K, beta=beta, nudging="random-sign")


@final
@dataclass(frozen=True)
class EP(Estimator):
    """dL/dtheta = -(1/beta) (dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_*))  [eq:ep-grad].

    T free steps to s_*, then K steps nudged with strength beta  [eq:2nd-phase]. In the energy-based setting beta
    stands for beta * eps throughout  [delta-fc-canon]. Without a primitive, the updates are summed step by step,
    (1/beta) (dF/dtheta)^T (s_{t+1} - s_t)  [eq:ep-weight-update].

    T           free steps
    K           nudged steps
    schedule, stop, tolerance, checked    of the free phase, as in `Estimator`
    nudging     "one-sided": as above, with a bias of order beta.
                "symmetric": -(1/2 beta) (dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_K^-beta)), the mean over beta and
                -beta, both relaxed in one batch; a bias of order beta^2.
                "random-sign": one-sided, with the sign of beta drawn from torch's generator at every call; its mean
                over signs is the symmetric gradient. `with_sign` sets the sign explicitly.
    beta        a number, or a tensor with one per stacked network, (R,)
    form        "plain": the nudged phase runs on the state, and the two ends are subtracted. "difference": it runs on
                d = s^beta - s_* itself, d_{t+1} = F(x, s_* + d_t) - beta dl/ds - F(x, s_*) without cancellation, so
                that rounding takes no share of a small update, and a free phase not quite at rest leaves no drift in
                it. Nets of connections have formulas for it; the phase of any other model runs in float64.
    held        whether the nudge keeps the force it has at s_*, instead of following the output
    side_by_side    whether both phases of symmetric nudging run in one batch; one after the other, they need half the
                    memory (of a model with a primitive)
    """

    orientation: ClassVar[int] = -1
    reads_only: ClassVar[bool] = True
    settings: ClassVar[type[EstimatorSettings]] = EPSettings
    rules: ClassVar[Mapping[str, Rule]] = {
        "positive": positive,
        "negative": negative,
        "centered": centered,
        "random-sign": random_sign_rule,
    }

    beta: float | Tensor = 0.1
    nudging: Nudging = "one-sided"
    form: PhaseForm = field(default="plain", kw_only=True)
    held: bool = field(default=False, kw_only=True)
    side_by_side: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.beta, Tensor):
            check_beta(self.beta)
        for name in ("side_by_side", "held"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False.")
        if self.form not in ("plain", "difference"):
            raise ValueError(f"form is {self.form!r}; expected 'plain' or 'difference'.")
        if self.nudging not in ("one-sided", "symmetric", "random-sign"):
            raise ValueError(
                f"nudging is {self.nudging!r}; expected 'one-sided', 'symmetric' or 'random-sign'. For holomorphic and "
                "continual EP use the estimators HolomorphicEP and ContinualEP."
            )

    def with_sign(self, sign: float | Tensor) -> EP:
        """The one-sided EP that random-sign nudging becomes for this sign, or these signs, one per network."""
        if self.nudging != "random-sign":
            raise ValueError(
                f"Got a sign of beta for {self.nudging} nudging, which does not use one. Use nudging='random-sign', or "
                "give EP a negative beta."
            )
        if not isinstance(sign, Tensor) and sign not in (1, -1):
            raise ValueError(f"The sign of beta is {sign}; expected 1 or -1, or a tensor of them, one per network.")
        return replace(self, nudging="one-sided", beta=self.beta * sign)

    def for_call(self, model: Dynamics) -> EP:
        """With random-sign nudging, the one-sided EP of a sign drawn now."""
        if self.nudging == "random-sign":
            return self.with_sign(_drawn_sign(model))
        if isinstance(self.beta, Tensor) and self.beta.numel() != (model.networks or 1):
            raise ValueError(
                f"beta has {self.beta.numel()} values for {model.networks or 1} network(s); expected one per network."
            )
        return self

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        super().check_serves(model, cost, x, y)
        check_site(model, cost, y)

    def check_nudge(self, model: Dynamics, dtype: torch.dtype) -> None:
        if self.form == "plain":
            check_resolved(self.beta, model, dtype)
        model.check_nudge(float(self.beta.abs().max()) if isinstance(self.beta, Tensor) else self.beta)

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        if isinstance(problem.model, PrimitiveDynamics):
            return free, self._telescoped(problem, problem.model, free)
        return free, minus_sum(self._updates(problem, free))

    def _telescoped(self, problem: Problem, model: PrimitiveDynamics, free: Relaxation) -> dict[str, Tensor]:
        """The sum of all updates, from its two ends  [eq:ep-grad]."""
        s, phase, betas = free.state, self.nudged_phase(), self._betas
        if self.side_by_side and len(betas) > 1:
            batch = SideBySide(problem, betas)
            nudge = self._nudge(batch, s)
            ends = batch.split(end_of_phase(model, batch.x, phase, batch.repeat(s), nudge, self.form))
        else:
            at = s if self.held else None
            nudges = [Nudge(problem.cost, problem.y, _over_batch(beta), at=at) for beta in betas]
            ends = [end_of_phase(model, problem.x, phase, s, nudge, self.form) for nudge in nudges]
        unit = self._unit(model)
        if self.form == "difference":
            contrast = model.difference_contrast(problem.x, free.state, *ends)
        else:
            other = ends[1] if self.nudging == "symmetric" else s
            contrast = moved_contrast(model, problem.x, ends[0], other, s)
        return {name: by_network(-unit, g) * g.detach() for name, g in contrast.items()}

    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """Delta_s(beta, t) and Delta_theta(beta, t), t = 0, ..., K-1  [eq:delta-ep]; the mean of both if symmetric."""
        cost.check(free.state, y)
        if self.nudging == "random-sign":
            return self.with_sign(_drawn_sign(model)).steps(model, cost, x, y, free)
        return self._updates(Problem(model, cost, x, y), free)

    @in_own_precision
    def _updates(self, problem: Problem, free: Relaxation) -> Iterator[Step]:
        model, x = problem.model, problem.x
        batch = SideBySide(problem, self._betas)
        unit = self._unit(model)
        order, start = turns(model, len(free.state), self.schedule, range(self.K)), batch.repeat(free.state)
        nudge = self._nudge(batch, free.state)
        for s, new in pairwise(trajectory(model, batch.x, start, order, nudge, self.form)):
            pairs = zip(batch.split(s), batch.split(new), strict=True)
            if self.form == "difference":
                parts = [difference_update(model, x, free.state, before, after, unit) for before, after in pairs]
            else:
                parts = [update(model, x, before, after, unit, free.state) for before, after in pairs]
            yield parts[0] if len(parts) == 1 else difference(*parts)

    def _nudge(self, batch: SideBySide, s: State) -> Nudge:
        """The nudge of the second phase, which begins at s."""
        return replace(batch.nudge, at=batch.repeat(s)) if self.held else batch.nudge

    @property
    def _betas(self) -> tuple[float | Tensor, ...]:
        return (self.beta, -self.beta) if self.nudging == "symmetric" else (self.beta,)

    def _unit(self, model: Dynamics) -> float | Tensor:
        """The factor of the updates: 1 / (beta * eps), or half of that where two phases are subtracted."""
        phases = 2.0 if self.nudging == "symmetric" else 1.0
        return 1.0 / (phases * self.beta * model.nudge_scale)


def _drawn_sign(model: Dynamics) -> float | Tensor:
    """Drawn from torch's global generator, as in dropout: torch.manual_seed makes it reproducible."""
    drawn = 2.0 * torch.randint(2, (model.networks or 1,), dtype=torch.float64) - 1.0
    return drawn.to(next(model.parameters()).device) if model.networks else float(drawn)


@in_own_precision
def limit_steps(
    model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation, K: int, schedule: Schedule = "synchronous"
) -> Iterator[Step]:
    """Delta_s(t) and Delta_theta(t) in the limit beta -> 0, t = 0, ..., K-1  [lemma:ep].

    The limit is exact, without finite differences: forward-mode differentiation of the second phase along beta at
    beta = 0. The state evolves as in the free phase and carries its tangent d s_t / d beta.

    model, cost     what is trained
    x, y        a mini-batch and its targets
    free        its free phase, whose last state the second phase begins with
    K           steps of the second phase
    schedule    of the second phase
    """
    cost.check(free.state, y)
    s = free.state
    tangent = tuple(torch.zeros_like(layer) for layer in s)
    for group in turns(model, len(s), schedule, range(K)):
        new, new_tangent = _advance(Problem(model, cost, x, y), s, tangent, group)
        moved = subtract(new_tangent, tangent)
        if isinstance(model, PrimitiveDynamics):
            synapses = _contrast_tangent(model, x, (new, new_tangent), (s, tangent))
        else:
            synapses = parameter_vjp(model, x, s, moved)
        yield Step(moved, synapses)
        s, tangent = new, new_tangent


@torch.no_grad()
def _advance(problem: Problem, s: State, tangent: State, group: tuple[int, ...] | None) -> tuple[State, State]:
    """F(x, s) and its derivative along beta: J tangent - dl/ds, squash and projection included.

    The nudge is passed to the step with value 0 and tangent -dl/ds, so it is differentiated wherever the model
    applies it.
    """
    model, pull = problem.model, problem.pull(s)
    with forward_ad.dual_level():
        dual = tuple(forward_ad.make_dual(v, d) for v, d in zip(s, tangent, strict=True))
        push = tuple(forward_ad.make_dual(torch.zeros_like(p), -p) for p in pull)
        drive, layers = model.drive(problem.x), range(len(s)) if group is None else group
        out = [forward_ad.unpack_dual(v) for v in model.group_step(drive, dual, layers, push)]
        new = tuple(v.primal.detach().clone() for v in out)
        moved = tuple(torch.zeros_like(v.primal) if v.tangent is None else v.tangent.detach().clone() for v in out)
    return new, moved


def _contrast_tangent(
    model: PrimitiveDynamics, x: Tensor, plus: tuple[State, State], minus: tuple[State, State]
) -> dict[str, Tensor]:
    """The derivative along beta of the parameter contrast between two states with their tangents.

    In the energy-based setting the tangents, and so the result, are along beta * eps, like the updates.
    """
    learned = trainable(model)
    with forward_ad.dual_level():
        a, b = (tuple(forward_ad.make_dual(v, d) for v, d in zip(*pair, strict=True)) for pair in (plus, minus))
        contrast = {name: forward_ad.unpack_dual(g) for name, g in model.contrast(x, a, b).items()}
        return {
            name: torch.zeros_like(g.primal) if g.tangent is None else g.tangent.detach().clone()
            for name, g in contrast.items()
            if name in learned
        }
