"""Hamiltonian echoes against autograd through the same steps: two springs, oscillators, a readout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.nets import F64, random_like
from helpers.tolerances import ORDER_IN_BETA
from torch import Tensor, nn

from eqprop import CrossEntropy, SquaredError
from eqprop.cost import Cost
from eqprop.echo import Echo, ForcedOscillators, Hamiltonian, PhasePoint, ThroughTime

COST = SquaredError()


class Springs(Hamiltonian):
    """Two masses on springs of their own, joined by a third, the first pulled by u."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor([0.6, 0.9, 0.4], dtype=F64))

    def start(self, u: Tensor) -> PhasePoint:
        return PhasePoint(u.new_tensor([[0.5, -0.2]]).expand(len(u), 2), u.new_tensor([[0.1, 0.3]]).expand(len(u), 2))

    def potential(self, y: Tensor, u: Tensor) -> Tensor:
        a, b, c = self.k
        one, two = y.unbind(-1)
        return 0.5 * (a * one * one + b * two * two + c * (one - two) ** 2) - u[:, 0] * one


def sequences(steps: int, samples: int = 3, inputs: int = 1) -> Tensor:
    return random_like((samples, steps, inputs), 3)


def error(echo: Echo, system: Hamiltonian, cost: Cost, u: Tensor, y: Tensor) -> float:
    exact = ThroughTime(echo.delta, echo.at).gradient(system, cost, u, y)[1]
    found = echo.gradient(system, cost, u, y)[1]
    assert found.keys() == exact.keys()
    gap, size = (
        torch.cat([v.flatten() for v in each]) for each in ([found[p] - exact[p] for p in exact], exact.values())
    )
    return float(gap.norm() / size.norm())


def test_two_springs() -> None:
    u, y = sequences(400), random_like((3, 2), 4)
    errors = [error(Echo(0.05, eps=eps), Springs(), COST, u, y) for eps in (2e-3, 1e-3)]
    assert errors[1] <= 1e-6
    # Of squared error in a linear system the echoes are linear in eps as well: nothing is left but rounding.
    assert max(errors) < 1e-9


class Hard(Springs):
    """Springs that stiffen, so that echoes are not linear in their kicks."""

    def potential(self, y: Tensor, u: Tensor) -> Tensor:
        return super().potential(y, u) + 0.25 * self.k[0] * y.pow(4).sum(-1)


@pytest.mark.parametrize("at", ["last", "every"])
def test_two_stiffening_springs_are_of_second_order(at: Any) -> None:
    u = sequences(400)
    y = random_like((3, 2) if at == "last" else (3, 400, 2), 4)
    errors = [error(Echo(0.05, at, eps), Hard(), COST, u, y) for eps in (2e-3, 1e-3)]
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=ORDER_IN_BETA)
    if at == "last":
        assert errors[1] <= 1e-6


def test_the_echo_returns() -> None:
    u, y = sequences(400), random_like((3, 2), 4)
    run, _ = Echo(0.05, returning=True).gradient(Hard(), COST, u, y)
    assert run.returned is not None
    assert run.returned < 1e-13
    # Slopes taken at the step's end instead would not lead back.
    assert float((run.end.y - Hard().start(u).y).abs().max()) > 0.01


@pytest.mark.parametrize("at", ["last", "every"])
def test_oscillators_with_a_readout(at: Any) -> None:
    net = ForcedOscillators(3, 8, seed=0, dtype=F64)
    labels = torch.arange(5) % 4 if at == "last" else torch.arange(30).view(5, 6) % 4
    y = torch.nn.functional.one_hot(labels, 4).to(F64)
    cost = CrossEntropy(8, 4, seed=1, dtype=F64)
    u = sequences(6, 5, 3)
    assert error(Echo(at=at, eps=1e-3), net, cost, u, y) < 1e-5
    run = Echo(at=at).backward(net, cost, u, y)
    assert run.loss.shape == (5,)
    assert all(p.grad is not None for p in (*net.parameters(), *cost.parameters()))
    alone = Echo(at=at).gradient(net, cost, u[:1], y[:1])[0]
    torch.testing.assert_close(alone.loss[0], run.loss[0])


def test_a_slope_written_by_hand_is_that_of_the_potential() -> None:
    net = ForcedOscillators(3, 8, seed=0, dtype=F64)
    y, u = random_like((4, 8), 1), random_like((4, 3), 2)
    torch.testing.assert_close(net.slope(y, u), Hamiltonian.slope(net, y, u))
