"""Oscillator nets: formulas follow the energy, EP's gradient is that of the relaxed cost, phases can be coarse."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from eqprop import EP, relax
from eqprop.physical import Imperfections, Simulated
from eqprop.physical.oscillators import Oscillators, PhaseError
from eqprop.relax import Phase


def made(harmonic: bool) -> tuple[Oscillators, torch.Tensor, torch.Tensor]:
    model = Oscillators((3, 6, 5, 4), 0.2, harmonic=harmonic, seed=0, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data = 0.8 * torch.randn(p.shape, generator=g, dtype=torch.float64) + (0.2 if name[0] == "K" else 0.0)
    x = torch.rand(4, 4, generator=g, dtype=torch.float64) * 2.0 - 1.0
    return model, x, torch.eye(3, dtype=torch.float64)[torch.arange(4) % 3]


@pytest.mark.parametrize("harmonic", [False, True])
def test_formulas_are_those_of_the_energy(harmonic: bool) -> None:
    model, x, y = made(harmonic)
    s, t = (tuple(torch.randn(4, n, dtype=torch.float64) for n in (3, 6, 5)) for _ in range(2))
    apart = sum(
        float((torch.cos(a[:, :, None] - b[:, None, :]) * model.weight(n).detach()).sum((1, 2))[0])
        for n, (a, b) in enumerate(pairwise(s))
    )
    fields = sum(float((h * torch.cos(v)).sum(-1)[0].detach()) for h, v in zip(model.drive(x).fields, s, strict=True))
    second = (
        sum(float((getattr(model, f"K{n}") * torch.cos(2 * s[n])).sum(-1)[0].detach()) for n in range(3))
        if harmonic
        else 0
    )
    assert float(model.energy(x, s)[0].detach()) == pytest.approx(-apart - fields - 0.5 * second)
    for a, b in zip(model.gradient(model.drive(x), s), model.autodiff_gradient(x, s), strict=True):
        torch.testing.assert_close(a, b)
    found, oracle = model.contrast(x, s, t), model.autodiff_contrast(x, s, t)
    assert found.keys() == oracle.keys()
    for name in found:
        torch.testing.assert_close(found[name], oracle[name])
    cost = PhaseError()
    for a, b in zip(cost.pull(s, y, {})[:1], super(PhaseError, cost).pull(s, y, {})[:1], strict=True):
        torch.testing.assert_close(a, b)


def test_centered_gradient_is_that_of_the_relaxed_cost() -> None:
    model, x, y = made(True)
    cost = PhaseError()

    def loss() -> float:
        return float(cost(relax(model, x, Phase(600, stop="settled", still=1e-14)).state, y).mean())

    EP(600, 600, 0.01, "symmetric", stop="settled").backward(model, cost, x, y)
    for name in ("W01", "W23", "b1", "K0"):
        p = model.get_parameter(name)
        where, ends = (0,) * p.dim(), []
        was = float(p.data[where])
        for d in (1e-5, -1e-5):
            p.data[where] = was + d
            ends.append(loss())
        p.data[where] = was
        assert float(p.grad[where]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)


def test_phases_are_kept_on_a_grid_at_every_step() -> None:
    model, x, _ = made(False)
    coarse = Simulated(model, Imperfections(state_bits=4, state_range=(-math.pi, math.pi)))
    step = 2.0 * math.pi / 15
    for layer in relax(coarse, x, 30).state:
        found = (layer + math.pi) / step
        assert float((found - found.round()).abs().max()) < 1e-9
