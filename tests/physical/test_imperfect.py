"""Each imperfection does what its description says; without any, a device is its model, bit for bit."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch

from eqprop import EP, SquaredError, relax
from eqprop.models import Layered
from eqprop.physical import Imperfections, Simulated
from eqprop.physical.oscillators import Oscillators
from eqprop.physical.resistive import Resistive

X = torch.rand(50, 30, generator=torch.Generator().manual_seed(1))
Y = torch.eye(10)[torch.arange(50) % 10]


def net() -> Layered:
    return Layered((10, 40, 30), seed=0)


def device(**imperfections: Any) -> Simulated:
    return Simulated(net(), Imperfections(**imperfections))


def held(machine: Simulated) -> torch.Tensor:
    """The weights that the device runs with."""
    machine.program()
    return machine.held.W12.detach().clone()


def trained(model: Any, steps: int = 5, **ep: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for n in range(steps):
        optimizer.zero_grad()
        EP(12, 6, 0.3, "symmetric", **ep).backward(
            model, SquaredError(), X[10 * n : 10 * n + 10], Y[10 * n : 10 * n + 10]
        )
        optimizer.step()
        model.constrain()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("model", "ep"),
    [
        (net(), {}),
        (net(), {"schedule": "sweeps"}),
        (Layered((10, 40, 30), "energy-based", "tanh", eps=0.3, seed=0), {}),
        (Resistive((10, 40, 30), 2.0, seed=0), {"schedule": "sweeps"}),
        (Oscillators((10, 40, 30), seed=0), {}),
    ],
)
def test_without_imperfections_training_has_the_same_bits(model: Any, ep: dict[str, Any]) -> None:
    perfect = trained(deepcopy(model), **ep)
    for p, q in zip(perfect, trained(Simulated(deepcopy(model)), **ep), strict=True):
        assert torch.equal(p, q)
    noisy = trained(Simulated(deepcopy(model), Imperfections(read_noise=1e-3)), **ep)
    assert not torch.equal(perfect[0], noisy[0])
    again = trained(Simulated(deepcopy(model), Imperfections(read_noise=1e-3)), **ep)
    assert all(torch.equal(p, q) for p, q in zip(noisy, again, strict=True))


def test_noise_has_the_moments_it_is_given() -> None:
    clean = relax(net(), X, 50).state
    read = relax(device(read_noise=0.1), X, 50).state
    off = torch.cat([(a - b).flatten() for a, b in zip(read, clean, strict=True)])
    assert abs(float(off.mean())) < 4 * 0.1 / math.sqrt(len(off))
    assert abs(float(off.std()) - 0.1) < 4 * 0.1 / math.sqrt(2 * len(off))
    # After one step the noise of a step is all there is; after many, what the net has made of it.
    one = relax(device(state_noise=0.1), X, 1).state[1] - relax(net(), X, 1).state[1]
    assert abs(float(one.std()) - 0.1) < 4 * 0.1 / math.sqrt(2 * one.numel())
    first, second = (relax(device(state_noise=0.1, seed=n), X, 1).state[0] for n in (1, 2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bits_are_a_grid(bits: int) -> None:
    levels = 2**bits
    for name in ("read_bits", "state_bits"):
        read = relax(device(**{name: bits}), X, 20).state
        found = torch.cat([v.flatten() for v in read]) * (levels - 1)
        assert float((found - found.round()).abs().max()) < 1e-4
        assert 0.0 <= float(found.min()) <= float(found.max()) <= levels - 1
    w = held(device(weight_bits=bits, weight_limit=0.1))
    found = (w + 0.1) * (levels - 1) / 0.2
    assert float((found - found.round()).abs().max()) < 1e-4
    assert len(w.unique()) <= levels
    assert float(w.abs().max()) <= 0.1 * (1 + 1e-6)
    own = net().W12.detach()
    near = own.abs() <= 0.1
    assert float((w - own)[near].abs().max()) <= 0.1 / (levels - 1) * (1 + 1e-4)


def test_a_limit_cuts_weights() -> None:
    own = net().W12.detach()
    assert torch.equal(held(device(weight_limit=0.1)), own.clamp(-0.1, 0.1))


def test_mismatch_is_fixed_and_drift_grows() -> None:
    machine = device(mismatch=0.05)
    own, first = net().W12.detach(), held(machine)
    ratio = first / own
    assert abs(float(ratio.mean()) - 1.0) < 4 * 0.05 / math.sqrt(ratio.numel())
    assert abs(float(ratio.std()) - 0.05) < 4 * 0.05 / math.sqrt(2 * ratio.numel())
    machine.W12.data *= 2.0
    torch.testing.assert_close(held(machine), 2.0 * first)
    assert not torch.equal(held(device(mismatch=0.05, seed=1)), first)

    drifting, spread = device(drift=0.01), []
    for _ in range(17):
        spread.append(float((held(drifting) / drifting.W12.detach()).std()))
        drifting.W12.data += 0.001
    assert spread[0] < 1e-6
    for n in (1, 4, 16):
        assert abs(spread[n] / (0.01 * math.sqrt(n)) - 1.0) < 0.15


def test_missing_devices_are_zero_and_stay_so() -> None:
    machine = device(missing=0.3)
    gone = held(machine) == 0.0
    assert abs(float(gone.float().mean()) - 0.3) < 4 * math.sqrt(0.21 / gone.numel())
    machine.W12.data += 0.01
    assert torch.equal(held(machine) == 0.0, gone)


def test_asymmetry_moves_up_and_down_by_different_amounts() -> None:
    machine = device(asymmetry=0.2)
    before = held(machine).clone()
    change = 0.01 * torch.randn(before.shape, generator=torch.Generator().manual_seed(2))
    machine.W12.data += change
    moved = held(machine) - before
    torch.testing.assert_close(moved, change * torch.where(change > 0, 1.2, 0.8), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(machine.W12.detach(), held(machine))


def test_weights_stay_in_the_range_of_the_device() -> None:
    machine = device(weight_range=(-0.05, 0.08))
    held(machine)
    assert float(machine.W12.detach().min()) == pytest.approx(-0.05)
    assert float(machine.W12.detach().max()) == pytest.approx(0.08)


def test_on_the_grid_small_updates_are_lost_and_outside_they_add_up() -> None:
    grid, outside = (device(weight_bits=4, weight_limit=0.3, on_grid=on) for on in (True, False))
    step = 0.6 / 15
    starts = [held(machine).clone() for machine in (grid, outside)]
    assert torch.equal(*starts)
    for _ in range(10):
        for machine in (grid, outside):
            machine.W12.data += 0.2 * step
            held(machine)
    inside = starts[0] < 0.2
    assert torch.equal(held(grid), starts[0])
    moved = (held(outside) - starts[1])[inside]
    assert float((moved / step).mean()) == pytest.approx(2.0, abs=0.1)
