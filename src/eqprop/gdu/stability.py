"""`stability`: does the state settle, how fast, and if not, is the step too large or no step small enough?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.dynamics import Dynamics
from eqprop.gdu.lockstep import KRYLOV, Linearised, flat, krylov, single_start, unflat
from eqprop.state import State, distance

Verdict = Literal["settles", "step too large", "oscillates", "grows", "unknown"]
DENSE = 128
"""Neurons up to which the Jacobian is written out and its eigenvalues are exact."""
STEPS = (0.5, 0.25, 0.1, 0.03)
"""Shares of a step, s + a (F(s) - s), by which a state of rest is looked for that whole steps do not reach."""
NEWTON, HALVINGS = 30, 6
AT_REST, EXPLODED = 1e-9, 1e6
TRUSTED = 0.05
"""Estimated eigenvalues are used where the estimate of their own error is below this."""
MILLIONTH = math.log(1e-6)


@dataclass(frozen=True)
class Stability:
    """The step linearised at the state of rest of each sample, and what follows from its eigenvalues.

    The step is taken as s + eps f(s): an eigenvalue l of its Jacobian is 1 + eps (a + ib), a + ib one of the flow f.
    Euler's step settles if and only if eps < -2a/(a^2 + b^2) for all of them.

    verdict         "settles"; "step too large": all a < 0, and a smaller eps settles; "oscillates" or "grows": some
                    a > 0, with b or without, at any eps; "unknown": no state of rest was found
    eigenvalues     l, the largest first, (B, m); all of them where `exact`
    eps, limit      the step of the model (1 where it has none), and the step below which it settles, 0 if none
    residual        |F(s) - s| where it was linearised
    """

    verdict: Verdict
    eigenvalues: Tensor
    eps: float
    limit: float
    exact: bool
    residual: float

    @property
    def radius(self) -> float:
        """The largest |l| over the samples."""
        return float(self.eigenvalues.abs().max()) if self.eigenvalues.numel() else math.nan

    @property
    def steps(self) -> float:
        """After about how many steps a push has fallen to a millionth; inf where it does not fall."""
        if not self.radius < 1.0:
            return math.inf
        return 1.0 if self.radius == 0.0 else max(1.0, MILLIONTH / math.log(self.radius))

    @property
    def flow(self) -> Tensor:
        """a + ib = (l - 1)/eps."""
        return (self.eigenvalues - 1.0) / self.eps

    @property
    def worst(self) -> complex:
        """The a + ib that decides: of the largest a where one is above 0, else of the least limit."""
        found = self.flow.flatten()
        growing = found[found.real.argmax()]
        return complex(growing if float(growing.real) > 0.0 else found[_limits(found).argmin()])

    def __str__(self) -> str:
        if self.verdict == "unknown":
            return f"No state of rest was found (residual {self.residual:.1e})."
        radius = f"|l| = {self.radius:.4g}"
        if self.verdict == "settles":
            return f"Settles: a push falls to a millionth in about {self.steps:.0f} steps ({radius})."
        at = f"{self.worst.real:+.3g} {'+' if self.worst.imag >= 0 else '-'} {abs(self.worst.imag):.3g}i"
        if self.verdict == "step too large":
            small = f"{self.limit:.3g}"
            return f"The step is too large: {radius}; it settles below eps = {small} (now {self.eps:g}; flow {at})."
        what = "Oscillates" if self.verdict == "oscillates" else "Grows"
        return f"{what} at any step: the flow has the eigenvalue {at}. Lower the weights, or tie the ways back."

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "verdict": self.verdict,
            "radius": self.radius,
            "steps": self.steps if math.isfinite(self.steps) else None,
            "eps": self.eps,
            "limit": self.limit if math.isfinite(self.limit) else None,
            "flow": [self.worst.real, self.worst.imag] if self.eigenvalues.numel() else None,
            "exact": self.exact,
            "residual": self.residual,
        }


@in_own_precision
def stability(model: Dynamics, x: Tensor, T: int = 1000, state: State | None = None) -> Stability:
    """Whether and how fast the free state of this model settles on these inputs, by the eigenvalues of its step.

        print(eqprop.stability(model, x[:8]))

    model   any model
    x       a few samples
    T       free steps by which a state of rest is looked for; then smaller steps, and Newton's iteration, which also
            finds one that does not attract
    state   where they begin; None: the model's own

    Products with the Jacobian are taken by automatic differentiation in float64, on a copy; up to 128 neurons it is
    written out. The model stays as it is. Stacked networks are looked at one at a time.
    """
    if not isinstance(T, int) or isinstance(T, bool) or T < 1:
        raise ValueError(f"T is {T!r}; expected a number of steps, at least 1.")
    s = single_start(model, x, state)
    wide, x64 = copy.deepcopy(model).double(), x.double()
    start = tuple(layer.detach().double() for layer in s)
    rest = _rest(wide, x64, start, T)
    residual = _residual(wide, x64, rest)
    near = residual < AT_REST * max(1.0, max(float(layer.abs().max()) for layer in rest))
    if not math.isfinite(residual):
        none = torch.zeros(len(x), 0, dtype=torch.complex128)
        return Stability("grows", none, model.nudge_scale, 0.0, False, residual)
    found, exact = eigenvalues(Linearised(wide, x64, rest))
    return judged(found, model.nudge_scale, exact, residual, near)


def judged(found: Tensor, eps: float, exact: bool, residual: float, near: bool = True) -> Stability:
    """The verdict that follows from eigenvalues of the step, (B, m)."""
    flow = ((found - 1.0) / eps).flatten()
    size = max(1.0, float(flow.abs().max()))
    growing = flow[flow.real > 1e-9 * size]
    limit = 0.0 if len(growing) else float(_limits(flow).min())
    verdict: Verdict = "settles" if float(found.abs().max()) < 1.0 else "step too large"
    if len(growing):
        first = growing[growing.real.argmax()]
        verdict = "oscillates" if abs(float(first.imag)) > 1e-6 * size else "grows"
    if not near and verdict in ("settles", "step too large"):
        verdict = "unknown"
    order = found.abs().argsort(dim=1, descending=True)
    return Stability(verdict, found.gather(1, order), eps, limit, exact, residual)


def _limits(flow: Tensor) -> Tensor:
    """-2a/(a^2 + b^2), infinite where a mode does not move."""
    size = flow.abs().square()
    return torch.where(size > 0.0, -2.0 * flow.real / size.clamp(min=1e-300), math.inf)


def eigenvalues(around: Linearised, seed: int = 0) -> tuple[Tensor, bool]:
    """The leading eigenvalues of the step's Jacobian, (B, m), and whether they are all, and exact."""
    rows, product = flat(around.s), around.on_rows
    if rows.shape[1] <= DENSE:
        unit = torch.eye(rows.shape[1]).to(rows)
        return torch.linalg.eigvals(torch.stack([product(e.expand_as(rows)) for e in unit], -1)), True
    source = torch.Generator().manual_seed(seed)
    start = torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows)
    _, h = krylov(product, start, KRYLOV)
    values, vectors = torch.linalg.eig(h[:, :-1])
    error = h[:, -1, -1:].abs() * vectors[:, -1].abs()
    order = values.abs().argsort(dim=1, descending=True)
    first = torch.zeros_like(error, dtype=torch.bool).scatter_(1, order[:, :1], True)
    # What is not yet an eigenvalue is replaced by the largest, which decides nothing then.
    largest = values.gather(1, order[:, :1])
    return torch.where(first | (error < TRUSTED), values, largest), False


def _residual(model: Dynamics, x: Tensor, s: State) -> float:
    with torch.no_grad():
        return float(distance(model.transition(x, s), s, 1).max())


@torch.no_grad()
def _rest(model: Dynamics, x: Tensor, start: State, T: int) -> State:
    """A state that F holds: by whole steps, smaller ones, or Newton's iteration from the middle of the way."""
    drive = model.drive(x)

    def step(s: State) -> State:
        return model.step(drive, s)

    s, middle = start, start
    for a in (1.0, *STEPS):
        begun = start if not _size(s) < EXPLODED else s
        s, mean, away = _walk(step, begun, T, a)
        if away <= AT_REST * max(1.0, _size(s)):
            return s
        middle = mean if a == 1.0 and _size(mean) < EXPLODED else middle
    return _newton(model, x, middle)


def _walk(step: Callable[[State], State], s: State, steps: int, a: float) -> tuple[State, State, float]:
    """Where so many steps of s + a (F(s) - s) end, the mean of their second half, and the residual there."""
    total, count, away = tuple(map(torch.zeros_like, s)), 0, math.inf
    for t in range(steps):
        new = step(s)
        if t % 16 == 15:
            away = float(distance(new, s, 1).max())
            if not away < EXPLODED or away <= 0.01 * AT_REST:
                break
        s = new if a == 1.0 else tuple([v + a * (w - v) for v, w in zip(s, new, strict=True)])
        if 2 * t >= steps:
            total, count = tuple([u + v for u, v in zip(total, s, strict=True)]), count + 1
    return s, tuple([v / max(count, 1) for v in total]), float(distance(step(s), s, 1).max())


def _newton(model: Dynamics, x: Tensor, s: State) -> State:
    """Solve F(s) = s, each sample's own (I - J) d = F(s) - s in a Krylov space, with halved steps where it rises."""
    drive, rows = model.drive(x), flat(s)

    def gap(rows: Tensor) -> Tensor:
        return flat(model.step(drive, unflat(rows, s))) - rows

    left = gap(rows)
    for _ in range(NEWTON):
        if float(left.abs().max()) < 0.01 * AT_REST:
            break
        product = Linearised(model, x, unflat(rows, s)).on_rows
        basis, h = krylov(product, left, KRYLOV)
        shifted = -h
        shifted[:, : h.shape[2]] += torch.eye(h.shape[2]).to(h)
        target = torch.zeros_like(h[:, :, :1])
        target[:, 0] = left.norm(dim=1, keepdim=True)
        move = (basis.mT @ (torch.linalg.pinv(shifted) @ target)).squeeze(-1)
        share = torch.ones_like(left[:, :1])
        for _ in range(HALVINGS):
            new = gap(rows + share * move)
            worse = ~(new.norm(dim=1, keepdim=True) < left.norm(dim=1, keepdim=True))
            if not bool(worse.any()):
                break
            share = torch.where(worse, 0.5 * share, share)
        rows = rows + torch.where(worse, torch.zeros_like(share), share) * move
        left = gap(rows)
    return unflat(rows, s)


def _size(s: State) -> float:
    found = max(float(layer.abs().max()) for layer in s)
    return found if math.isfinite(found) else math.inf
