"""Equilibrium propagation in discrete time  [sec:ep-algo]."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, final

import torch
from torch import Tensor, nn

from eqprop.cost import Cost, Nudge, check_beta
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import Estimator, Step, add_to_grad, begin, difference, merge, trainable, transition_vjp
from eqprop.relax import Phase, Relaxation, relax, trajectory
from eqprop.state import State, subtract


class SideBySide:
    """A mini-batch (B, ...) repeated once a beta, copy after copy: (P B, ...), or (R, P B, ...) when stacked.

    x       the inputs, repeated            nudge   towards the targets, repeated, each copy with its own beta

    A single beta leaves the batch as it is; it may then be a tensor with one value a network, (R,).
    """

    def __init__(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, betas: Sequence[float | complex | Tensor]
    ) -> None:
        self.copies = len(betas)
        self.dim = model.sample_dims(x) - 1
        self.x = self._repeat(x)
        if len(betas) == 1:
            (beta,) = betas
            self.nudge = Nudge(cost, y, beta.unsqueeze(-1) if isinstance(beta, Tensor) and beta.dim() else beta)
        else:
            lead = x.shape[: self.dim + 1]
            each = [x.new_ones(lead) * beta for beta in betas]
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


BITS = 256
"""Signs of one digest: its bits, the highest first, 1 standing for +1 and 0 for -1."""


def random_sign(seed: int, iteration: int) -> int:
    """+1 or -1: bit i mod 256 of SHA-256 of "eqprop signs SEED BLOCK", BLOCK = i div 256."""
    block, bit = divmod(iteration, BITS)
    return 1 if _digest(seed, block) >> (BITS - 1 - bit) & 1 else -1


def _digest(seed: int, block: int) -> int:
    return int.from_bytes(hashlib.sha256(f"eqprop signs {seed} {block}".encode()).digest(), "big")


@dataclass(frozen=True)
class Signs:
    """The signs of a training run.

    seeds   one a network: a network draws the same signs stacked with others as alone
    first   the iteration a runner begins with, counted from the start of the training
    """

    seeds: tuple[int, ...] = field(default=(0,))
    first: int = 0

    def rows(self, start: int, n: int) -> Tensor:
        """(n, R) of +1 and -1 in float64, for n iterations from `start` on, counted from `first`."""
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
Sign = float | Tensor
"""The sign of beta: +1 or -1, or a tensor of them with one a stacked network, (R,)."""


@final
@dataclass(frozen=True)
class EP(Estimator):
    """dL/dtheta = -(1/beta) (dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_*))  [eq:ep-grad].

    T free steps to s_*, then K steps nudged with strength beta  [eq:2nd-phase]. In the energy-based setting beta
    stands for beta * eps throughout  [delta-fc-canon]. Without a primitive, the updates are summed step by step,
    (1/beta) (dF/dtheta)^T (s_{t+1} - s_t)  [eq:ep-weight-update].

    nudging     "one-sided": as above, with a bias of order beta.
                "symmetric": -(1/2 beta) (dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_K^-beta)), the mean over beta and
                -beta, both relaxed in one batch; a bias of order beta^2.
                "random-sign": one-sided with the sign of beta drawn anew at every call, from torch's generator or
                given as `sign`; its mean over signs is the symmetric gradient.
    """

    beta: float = 0.1
    nudging: Nudging = "one-sided"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        if self.nudging not in ("one-sided", "symmetric", "random-sign"):
            raise ValueError(
                f"nudging is {self.nudging!r}; expected 'one-sided', 'symmetric' or 'random-sign'. Holomorphic and "
                "continual EP are estimators of their own, HolomorphicEP and ContinualEP."
            )

    @property
    def sign(self) -> int:
        return -1

    def with_sign(self, sign: int) -> EP:
        """The one-sided EP that random-sign nudging is where it draws this sign."""
        return replace(self, nudging="one-sided", beta=self.beta * sign)

    def backward(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None = None, sign: Sign | None = None
    ) -> Relaxation:
        """Add the batch-mean dL/dtheta to `.grad`; return the free phase."""
        free, grads = self.gradient(model, cost, x, y, state, sign)
        add_to_grad(grads)
        return free

    def gradient(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None = None, sign: Sign | None = None
    ) -> tuple[Relaxation, dict[nn.Parameter, Tensor]]:
        """As `Estimator.gradient`; `sign` is that of beta in random-sign nudging, drawn where it is not given."""
        chosen = self._sign(model, sign)
        free = relax(model, x, self.free_phase(), begin(model, cost, x, y, state))
        if isinstance(model, PrimitiveDynamics):
            grads = self._telescoped(model, cost, x, y, free, chosen)
        else:
            grads = {}
            for step in self._updates(model, cost, x, y, free, chosen):
                for name, update in step.synapses.items():
                    grads[name] = grads[name] - update if name in grads else -update
        direct = cost.direct_gradient(free.state, y, dict(model.named_parameters()))
        return free, merge(model, grads, direct)

    def _telescoped(
        self, model: PrimitiveDynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation, sign: Sign
    ) -> dict[str, Tensor]:
        """The two ends of the sum of all updates  [eq:ep-grad]."""
        batch = SideBySide(model, cost, x, y, self._betas(sign))
        nudged = relax(model, batch.x, Phase(self.K, checked=self.checked), batch.repeat(free.state), batch.nudge)
        ends = batch.split(nudged.state)
        plus, minus = ends if self.nudging == "symmetric" else (ends[0], free.state)
        unit = self._unit(model, sign)
        return {name: by_network(-unit, g) * g.detach() for name, g in model.contrast(x, plus, minus).items()}

    def steps(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation, sign: Sign | None = None
    ) -> Iterator[Step]:
        """Delta_s(beta, t) and Delta_theta(beta, t), t = 0, ..., K-1  [eq:delta-ep]; the mean of both if symmetric."""
        cost.check(free.state, y)
        return self._updates(model, cost, x, y, free, self._sign(model, sign))

    def _updates(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation, sign: Sign
    ) -> Iterator[Step]:
        batch = SideBySide(model, cost, x, y, self._betas(sign))
        unit = self._unit(model, sign)
        for s, new in pairwise(trajectory(model, batch.x, batch.repeat(free.state), self.K, batch.nudge)):
            parts = [
                _update(model, x, before, after, unit)
                for before, after in zip(batch.split(s), batch.split(new), strict=True)
            ]
            yield parts[0] if len(parts) == 1 else difference(*parts)

    def _betas(self, sign: Sign) -> tuple[float | Tensor, ...]:
        return (self.beta, -self.beta) if self.nudging == "symmetric" else (self.beta * sign,)

    def _unit(self, model: Dynamics, sign: Sign) -> Sign:
        """What the updates are divided by, inverted: beta * eps, or twice that where two phases are subtracted."""
        phases = 2.0 if self.nudging == "symmetric" else 1.0
        return 1.0 / (phases * self.beta * sign * model.nudge_scale)

    def _sign(self, model: Dynamics, given: Sign | None) -> Sign:
        if self.nudging != "random-sign":
            if given is not None:
                raise ValueError(
                    f"A sign of beta was given to {self.nudging} nudging, which has no use for it. Use "
                    "nudging='random-sign', or give EP a negative beta."
                )
            return 1.0
        if given is None:
            # As dropout does: torch.manual_seed makes it repeatable.
            drawn = 2.0 * torch.randint(2, (model.networks or 1,), dtype=torch.float64) - 1.0
            return drawn.to(next(model.parameters()).device) if model.networks else float(drawn)
        wanted = model.networks or 1
        right = given.numel() == wanted if isinstance(given, Tensor) else given in (1, -1)
        if not right:
            raise ValueError(f"The sign of beta is {given}; expected 1 or -1, or a tensor of {wanted}, one a network.")
        return given.reshape(() if model.networks is None else (wanted,)) if isinstance(given, Tensor) else given


def _update(model: Dynamics, x: Tensor, before: State, after: State, unit: Sign) -> Step:
    """One step of a nudged phase as an update, neurons and synapses  [eq:delta-ep]."""
    moved = tuple(by_network(unit, v) * v for v in subtract(after, before))
    if not isinstance(model, PrimitiveDynamics):
        _, synapses = transition_vjp(model, x, before, moved)
        return Step(moved, synapses)
    learned = trainable(model)
    contrast = model.contrast(x, after, before)
    return Step(moved, {name: by_network(unit, g) * g.detach() for name, g in contrast.items() if name in learned})


def by_network(factor: Sign, like: Tensor) -> Sign:
    """A factor a network, shaped to multiply a layer or a parameter of stacked networks."""
    if not isinstance(factor, Tensor):
        return factor
    return factor.to(like.dtype).view(*factor.shape, *[1] * (like.dim() - factor.dim()))
