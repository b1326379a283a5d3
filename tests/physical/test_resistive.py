"""Deep resistive nets: the energy is what the hand-written formulas say, and EP's gradient is that of the cost."""

from __future__ import annotations

import pytest
import torch

from eqprop import EP, SquaredError, doctor, relax
from eqprop.cost import Nudge
from eqprop.data import one_hot
from eqprop.physical.resistive import Resistive
from eqprop.relax import Phase

SIZES = [(3, 7, 5), (2, 6, 5, 4), (2, 5, 6, 4, 3)]


def made(sizes: tuple[int, ...], seed: int = 0) -> tuple[Resistive, torch.Tensor, torch.Tensor]:
    model = Resistive(sizes, 3.0, seed=seed, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed + 1)
    for p in model.parameters():
        p.data = torch.rand(p.shape, generator=g, dtype=torch.float64) * (1.0 if p.dim() > 1 else 0.3)
    x = torch.rand(4, sizes[-1], generator=g, dtype=torch.float64)
    y = torch.eye(sizes[0], dtype=torch.float64)[torch.arange(4) % sizes[0]]
    return model, x, y


@pytest.mark.parametrize("sizes", SIZES)
def test_formulas_are_those_of_the_energy(sizes: tuple[int, ...]) -> None:
    model, x, _ = made(sizes)
    s, t = (tuple(torch.randn(4, n, dtype=torch.float64) for n in sizes[:-1]) for _ in range(2))
    for a, b in zip(model.gradient(model.drive(x), s), model.autodiff_gradient(x, s), strict=True):
        torch.testing.assert_close(a, b)
    found, oracle = model.contrast(x, s, t), model.autodiff_contrast(x, s, t)
    assert found.keys() == oracle.keys()
    for name in found:
        torch.testing.assert_close(found[name], oracle[name])


@pytest.mark.parametrize("sizes", SIZES)
def test_a_step_is_the_minimum_over_its_layers(sizes: tuple[int, ...]) -> None:
    """No small move of a node within its diodes' limits lowers the energy, at rest, free and nudged."""
    model, x, y = made(sizes)
    for nudge in (None, Nudge(SquaredError(), y, 0.5), Nudge(SquaredError(), y, -0.5)):
        rest = relax(model, x, Phase(120, "sweeps"), nudge=nudge)
        assert float(rest.residual.max()) < 1e-10

        def energy(s: tuple[torch.Tensor, ...], nudge: Nudge | None = nudge) -> torch.Tensor:
            pushed = 0.0 if nudge is None else nudge.beta * 0.5 * (s[0] - y).square().sum(-1)
            return -model.primitive(x, s) + pushed

        least = energy(rest.state)
        for n, layer in enumerate(rest.state):
            for k in range(layer.shape[1]):
                for d in (1e-3, -1e-3):
                    moved = layer.clone()
                    moved[:, k] += d
                    assert bool(
                        (energy((*rest.state[:n], model._diodes(n, moved), *rest.state[n + 1 :])) >= least).all()
                    )
        low, high = rest.state[-1][:, : (sizes[-2] + 1) // 2], rest.state[-1][:, (sizes[-2] + 1) // 2 :]
        assert bool((low >= 0).all())
        assert bool((high <= 0).all())
        assert len(sizes) == 2 or bool((low > 0).any() and (high < 0).any())


@pytest.mark.parametrize("sizes", SIZES[:2])
def test_centered_gradient_is_that_of_the_relaxed_cost(sizes: tuple[int, ...]) -> None:
    """Against central differences of the cost at rest, beta 0.01; the one-sided gradient is further off."""
    model, x, y = made(sizes)
    cost = SquaredError()

    def loss() -> float:
        return float(cost(relax(model, x, Phase(120, "sweeps")).state, y).mean())

    def apart(nudging: str) -> float:
        model.zero_grad()
        EP(120, 120, 0.01, nudging, schedule="sweeps").backward(model, cost, x, y)
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        return float((found - wanted).norm() / wanted.norm())

    parts, d = [], 1e-6
    for p in model.parameters():
        flat = p.data.view(-1)
        for i in range(flat.numel()):
            was = float(flat[i])
            ends = []
            for sign in (1.0, -1.0):
                flat[i] = was + sign * d
                ends.append(loss())
            flat[i] = was
            parts.append((ends[0] - ends[1]) / (2 * d))
    wanted = torch.tensor(parts, dtype=torch.float64)
    assert apart("symmetric") < 1e-3
    assert apart("symmetric") < apart("one-sided")


def test_conductances_stay_at_zero_or_above() -> None:
    model, x, y = made((3, 7, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    EP(40, 40, 0.1, "symmetric", schedule="sweeps").backward(model, SquaredError(), x, y)
    optimizer.step()
    assert min(float(model.weight(n).detach().min()) for n in range(2)) < 0.0
    model.constrain()
    assert all(float(model.weight(n).detach().min()) >= 0.0 for n in range(2))


@pytest.mark.parametrize(("rate", "healthy"), [(0.01, True), (1e4, False)])
def test_the_doctor_tries_rates_on_a_circuit_that_stays_one(rate: float, healthy: bool) -> None:
    """Its steps are projected as those of training: no conductance goes below 0, whatever the rates."""
    net = Resistive((3, 12, 16), gain=10.0, seed=0)
    x = torch.rand(20, 16, generator=torch.Generator().manual_seed(0))
    y = one_hot(torch.arange(20) % 3, 3)
    found = doctor(net, SquaredError(), x, y, EP(20, 20, 0.01, "symmetric", schedule="sweeps"), rates=rate)
    assert found.healthy is healthy, found.verdict
    assert healthy or "loss" in found.verdict
