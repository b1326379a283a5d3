"""Recurrent Hamiltonian echo learning: gradients for sequences from a system run forward and echoed twice.

A frictionless system takes a sequence in. Its momenta are flipped and the inputs replayed in reverse, so that it runs
back the way it came; kicked by the cost on the way, it comes back beside that way by what backpropagation through time
would compute (2506.05259). Nothing is stored but the last state.

    net = ForcedOscillators(inputs=28, size=64, seed=0)
    cost = eqprop.CrossEntropy(64, 10)
    run = Echo(delta=0.5, eps=0.1).backward(net, cost, u, y)     # u (B, steps, 28): fills .grad

Equilibrium propagation is for systems that come to rest; this is for systems that never do, so no `Dynamics`, doctor or
GDU comparison applies: `ThroughTime` is the exact gradient to compare with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from eqprop.autodiff import check_recordable, derivative
from eqprop.cost import Cost
from eqprop.models.connections import Init, Weight, add_parameters
from eqprop.state import is_number

At = Literal["last", "every"]


class PhasePoint(NamedTuple):
    """Where a system is in phase space: positions and momenta, (B, n) each."""

    y: Tensor
    z: Tensor


class Hamiltonian(nn.Module, ABC):
    """H(y, z, u) = 1/2 |z|^2 + V(y, u), positions y, momenta z, an input u. A subclass defines `size` and V."""

    size: int

    @abstractmethod
    def potential(self, y: Tensor, u: Tensor) -> Tensor:
        """V(y, u), one value per sample, (B,)."""

    def start(self, u: Tensor) -> PhasePoint:
        """Where sequences u (B, steps, inputs) begin: at rest in the origin."""
        zero = u.new_zeros(len(u), self.size)
        return PhasePoint(zero, zero)

    def slope(self, y: Tensor, u: Tensor) -> Tensor:
        """dV/dy, (B, n); differentiable again where gradients are recorded."""
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = y if y.requires_grad else y.detach().requires_grad_()
            (slope,) = derivative(self.potential(inputs, u).sum(), (inputs,), create_graph=recording)
        assert slope is not None, "V depends on y"
        return slope


@final
class ForcedOscillators(Hamiltonian):
    """V = 1/2 sum alpha y^2 + sum ln cosh(W y + B u + b): coupled oscillators, pushed by a sequence.

    init        how weights are drawn
    seed        of the weights; None: torch's own stream
    dtype       of the weights; None: torch's default
    inputs      numbers per step
    size        oscillators
    frequency   alpha before training, the square of an uncoupled frequency

    Parameters W, B, b and alpha, of which only |alpha| counts: no oscillator runs away.
    """

    W: nn.Parameter
    B: nn.Parameter
    b: nn.Parameter
    alpha: nn.Parameter

    def __init__(
        self,
        inputs: int,
        size: int,
        *,
        frequency: float = 0.5,
        init: Init = "glorot",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.size = inputs, size
        wanted = {"W": Weight((size, size), size, size), "B": Weight((size, inputs), inputs, size)}
        add_parameters(self, wanted, init, seed, dtype)
        self.b = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.alpha = nn.Parameter(torch.full((size,), frequency, dtype=dtype))

    def potential(self, y: Tensor, u: Tensor) -> Tensor:
        a = (y @ self.W.T + u @ self.B.T + self.b).abs()
        # ln cosh a = |a| + ln(1 + exp(-2 |a|)) - ln 2, which no number overflows.
        return 0.5 * (y * y) @ self.alpha.abs() + (a + torch.log1p(torch.exp(-2.0 * a)) - math.log(2.0)).sum(-1)

    def slope(self, y: Tensor, u: Tensor) -> Tensor:
        """|alpha| y + W^T tanh(W y + B u + b)."""
        return y * self.alpha.abs() + torch.tanh(y @ self.W.T + u @ self.B.T + self.b) @ self.W


class EchoRun(NamedTuple):
    """What a run gave.

    loss        per sample, (B,): at the last step, or the sum over all
    end         positions and momenta after the last step
    returned    how far the unkicked echo ended from the start, largest over samples and neurons; None if not asked for
    """

    loss: Tensor
    end: PhasePoint
    returned: float | None = None


@dataclass(frozen=True)
class _Sequences(ABC):
    """Base of what computes dL/dtheta of L = sum over steps of l(y_t), or l at the last step, by leapfrog steps.

    delta       the length of a step
    at          whether the cost counts at the "last" step, with targets (B, ...), or at "every" one, (B, steps, ...)
    """

    delta: float = 0.5
    at: At = "last"

    def __post_init__(self) -> None:
        if not is_number(self.delta) or not 0.0 < self.delta < math.inf:
            raise ValueError(f"delta is {self.delta!r}; expected the length of a step, a positive number such as 0.5.")
        if self.at not in ("last", "every"):
            raise ValueError(f"at is {self.at!r}; expected 'last' or 'every'.")

    @abstractmethod
    def gradient(
        self, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor
    ) -> tuple[EchoRun, dict[nn.Parameter, Tensor]]:
        """The run and the batch mean of dL/dtheta, by parameter of the system and the cost."""

    def backward(self, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor) -> EchoRun:
        """Add the batch-mean dL/dtheta to `.grad`; return the run."""
        run, grads = self.gradient(system, cost, u, y)
        for p, g in grads.items():
            p.grad = g if p.grad is None else p.grad + g
        return run

    def middle(self, s: PhasePoint) -> Tensor:
        """y + delta/2 z: where a step takes its slope."""
        return s.y + 0.5 * self.delta * s.z

    def step(self, system: Hamiltonian, s: PhasePoint, u: Tensor) -> PhasePoint:
        """y_h = y + delta/2 z, z' = z - delta dV/dy(y_h), y' = y_h + delta/2 z'. With z negated it runs back."""
        half = self.middle(s)
        z = s.z - self.delta * system.slope(half, u)
        return PhasePoint(half + 0.5 * self.delta * z, z)

    def target(self, y: Tensor, t: int, steps: int) -> Tensor | None:
        """The target of the cost after step t; None where it does not count."""
        if self.at == "every":
            return y[:, t]
        return y if t == steps - 1 else None

    def check(self, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor) -> None:
        check_recordable()
        if u.dim() != 3 or not u.shape[1] or len(u) != len(y):
            raise ValueError(
                f"The sequences have shape {tuple(u.shape)} and the targets {tuple(y.shape)}; expected (B, steps, "
                "inputs) with at least one step, and as many targets."
            )
        if cost.parametric:
            raise ValueError(f"The cost {cost.title} reads a model's parameters, which this does not support.")
        target = self.target(y, u.shape[1] - 1, u.shape[1])
        assert target is not None, "the cost counts at the last step"
        cost.check((system.start(u).y,), target)


@final
@dataclass(frozen=True)
class Echo(_Sequences):
    """dL/dtheta = -(delta / 2 eps) sum_t (dH/dtheta(y_h^+) - dH/dtheta(y_h^-)), y_h in the middle of each step.

    Two echoes, kicked by z <- z + eps dl/dy and z - eps dl/dy wherever the cost counts; an error of order eps^2. Both
    run in one batch, so a gradient costs about three runs and, whatever the length of a sequence, the memory of one
    step. Rounding adds about (machine epsilon) / eps, multiplied by how far the system drives apart what is near.

    delta       the length of a step
    at          whether the cost counts at the "last" step or at "every" one
    eps         of the kicks
    returning   also run an echo without kicks and report how far from the start it ends
    """

    eps: float = 0.1
    returning: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.eps) or not 0.0 < self.eps < math.inf:
            raise ValueError(f"eps is {self.eps!r}; expected the strength of the kicks, a positive number such as 0.1.")

    def gradient(
        self, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor
    ) -> tuple[EchoRun, dict[nn.Parameter, Tensor]]:
        self.check(system, cost, u, y)
        run, direct = self._forward(system, cost, u, y)
        grads = dict(direct)
        for p, g in self._echoed(system, cost, u, y, run.end).items():
            grads[p] = grads[p] + g if p in grads else g
        return (run._replace(returned=self._returned(system, u, run.end)) if self.returning else run), grads

    @torch.no_grad()
    def _forward(
        self, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor
    ) -> tuple[EchoRun, dict[nn.Parameter, Tensor]]:
        """The run, and the gradient of the cost's own parameters on the way."""
        s, steps = system.start(u), u.shape[1]
        loss, direct = u.new_zeros(len(u)), dict[nn.Parameter, Tensor]()
        for t in range(steps):
            s = self.step(system, s, u[:, t])
            target = self.target(y, t, steps)
            if target is not None:
                loss = loss + cost.values((s.y,), target, {})
                for p, g in cost.direct_gradient((s.y,), target, {}).items():
                    direct[p] = direct[p] + g if p in direct else g
        return EchoRun(loss, s), direct

    def _echoed(
        self, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor, end: PhasePoint
    ) -> dict[nn.Parameter, Tensor]:
        """The sum over the echoes' steps, taken at once per step for both."""
        learned = [p for p in system.parameters() if p.requires_grad]
        steps, signs = u.shape[1], torch.cat([u.new_ones(len(u)), -u.new_ones(len(u))])
        s = PhasePoint(torch.cat([end.y, end.y]), -torch.cat([end.z, end.z]))
        totals = [torch.zeros_like(p) for p in learned]
        unit = -0.5 * self.delta / (self.eps * len(u))
        for t in reversed(range(steps)):
            s = self._kicked(cost, s, self.target(y, t, steps), signs)
            both = torch.cat([u[:, t], u[:, t]])
            half = self.middle(s)
            if learned:
                with torch.enable_grad():
                    parts = derivative((signs * system.potential(half, both)).sum(), learned)
                totals = [a if g is None else a + unit * g for a, g in zip(totals, parts, strict=True)]
            with torch.no_grad():
                s = self.step(system, s, both)
        return dict(zip(learned, totals, strict=True))

    @torch.no_grad()
    def _kicked(self, cost: Cost, s: PhasePoint, target: Tensor | None, signs: Tensor) -> PhasePoint:
        """z + eps dl/dy in the first half of the batch and z - eps dl/dy in the second, both at the echo's own y."""
        if target is None:
            return s
        pull = cost.pull((s.y,), torch.cat([target, target]), {})[0]
        assert pull is not None, "the cost reads y"
        return s._replace(z=s.z + self.eps * signs.unsqueeze(-1) * pull)

    @torch.no_grad()
    def _returned(self, system: Hamiltonian, u: Tensor, end: PhasePoint) -> float:
        s = PhasePoint(end.y, -end.z)
        for t in reversed(range(u.shape[1])):
            s = self.step(system, s, u[:, t])
        start = system.start(u)
        return max(float((s.y - start.y).abs().max()), float((s.z + start.z).abs().max()))


@final
@dataclass(frozen=True)
class ThroughTime(_Sequences):
    """dL/dtheta by backpropagation through every step, exactly; memory grows with the length of the sequences.

    delta   length of a step
    at      where the loss is taken, as in `Echo`
    """

    def gradient(
        self, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor
    ) -> tuple[EchoRun, dict[nn.Parameter, Tensor]]:
        self.check(system, cost, u, y)
        learned = [p for p in (*system.parameters(), *cost.parameters()) if p.requires_grad]
        steps = u.shape[1]
        with torch.enable_grad():
            s, loss = system.start(u), u.new_zeros(len(u))
            for t in range(steps):
                s = self.step(system, s, u[:, t])
                target = self.target(y, t, steps)
                loss = loss if target is None else loss + cost.values((s.y,), target, {})
            grads = derivative(loss.mean(), learned)
        end = PhasePoint(s.y.detach(), s.z.detach())
        return EchoRun(loss.detach(), end), {p: g for p, g in zip(learned, grads, strict=True) if g is not None}
