"""Circuits in ngspice: its operating point is our state at rest, node by node; what fails says so in a sentence."""

from __future__ import annotations

import shutil

import pytest
import torch

from benchmarks.spice import NETS, random_net, strength
from eqprop import EP, SquaredError, relax
from eqprop.physical import spice
from eqprop.physical.resistive import Resistive

needs_ngspice = pytest.mark.skipif(
    shutil.which("ngspice") is None, reason="ngspice is not installed (apt install ngspice), so no circuit is checked"
)
DIVIDER = "* divider\nV1 a 0 3\nR1 a b 1000\nR2 b {ground} 2000\n.end\n"


@needs_ngspice
def test_every_node_is_where_ngspice_has_it() -> None:
    for seed in range(NETS):
        model, x, y = random_net(seed)
        beta = strength(model, seed)
        found = spice.check(model, x, y, beta)
        assert found.free.own < 1e-3, (seed, found)
        assert found.nudged.own < 1e-3, (seed, found)
        if seed < 2:  # a real diode begins to conduct at some tenths of a volt
            assert 0.2 < spice.check(model, x, y, beta, "real").free.volts < 1.0


@needs_ngspice
def test_training_with_ngspice_as_the_network() -> None:
    model, x, y = random_net(3)
    here = Resistive(model.sizes, model.gain, seed=3, dtype=torch.float64)
    here.load_state_dict(model.state_dict())
    lumped = relax(spice.Spice(model, lumped=True), x, 1).state
    for a, b in zip(relax(spice.Spice(model), x, 1).state, lumped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    machine = spice.Spice(model)
    beta, cost = 0.5 * model.least_conductance, SquaredError()
    EP(1, 1, beta, "symmetric").backward(machine, cost, x, y)
    EP(2000, 2000, beta, "symmetric", schedule="sweeps").backward(here, cost, x, y)
    for p, q in zip(machine.parameters(), here.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert float((p.grad - q.grad).norm()) < 1e-3 * float(q.grad.norm())
    assert machine.work.to_dict() == {"settles": 6, "reads": 6, "writes": 1, "calibrations": 0}


@needs_ngspice
def test_a_divider_divides_and_sources_can_be_changed() -> None:
    found = spice.run(DIVIDER.format(ground=0), ["b"], [{}, {"V1": 6.0}])
    assert [round(point["b"], 9) for point in found] == [2.0, 4.0]
