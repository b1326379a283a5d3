"""The implicit nudge: o = sigma(inputs + beta (y - o)), solved by the output at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.nets import F64, batch, gap, prototypical, random_like
from helpers.tolerances import FIRST_ORDER, GDU_AT_SMALL_BETA, SAME_FORMULA
from torch.testing import assert_close

from eqprop import (
    BPTT,
    EP,
    Nudge,
    Phase,
    SquaredError,
    relax,
)
from eqprop.dynamics import PrimitiveDynamics, set_nudge_site, solve_implicit
from eqprop.models import Dense, Network
from eqprop.models.activations import ACTIVATIONS, Activation

COST = SquaredError()
K = 8
ELEMENTWISE = {name: sigma for name, sigma in ACTIVATIONS.items() if sigma.elementwise}


def linear_output(**options: Any) -> Network:
    links = [Dense("x", "h", gain=0.8), Dense("h", "out", gain=0.8)]
    chosen: dict[str, Any] = {"activation": {"out": "identity", "h": "sigmoid"}, "nudge_site": "implicit", "seed": 0}
    return Network(4, {"out": 3, "h": 5}, links, dtype=F64, **chosen | options)


NETS: dict[str, Callable[[], PrimitiveDynamics]] = {
    "linear output": linear_output,
    "hard sigmoid": lambda: linear_output(activation={"out": "hard-sigmoid", "h": "sigmoid"}),
    "sigmoid": lambda: prototypical(3, "sigmoid", nudge_site="implicit"),
    "tanh": lambda: prototypical(2, "tanh", nudge_site="implicit"),
    "energy-based": lambda: linear_output(activation="tanh", setting="energy-based", eps=0.5),
}


@pytest.mark.parametrize("strength", [-0.9, -0.3, 0.1, 1.0, 20.0])
@pytest.mark.parametrize("sigma", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_the_solution_solves_it(sigma: Activation, strength: float) -> None:
    inputs, target = random_like((40,), 0, -3.0, 3.0), random_like((40,), 1, -1.0, 2.0)
    found = solve_implicit(sigma, inputs, target, strength, sigma.bounds)
    assert_close(found, sigma(inputs + strength * (target - found)), rtol=0.0, atol=1e-11)
    assert_close(found, solve_implicit(sigma, inputs, target, strength), rtol=0.0, atol=1e-10)


def test_a_linear_output_has_the_known_form() -> None:
    net = linear_output()
    x, y = batch(net)
    s = relax(net, x, 30).state
    nudged = relax(net, x, 1, s, Nudge(COST, y, 0.7)).state
    with torch.no_grad():
        inputs = net.gradient(net.drive(x), s)[0]
    assert_close(nudged[0], (inputs + 0.7 * y) / 1.7, rtol=0.0, atol=SAME_FORMULA)


@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
@pytest.mark.parametrize("schedule", ["synchronous", "sweeps"])
def test_it_comes_to_rest_where_the_nudge_inside_does(build: Callable[[], PrimitiveDynamics], schedule: Any) -> None:
    net = build()
    x, y = batch(net)
    phase = Phase(3000, schedule, stop="settled", still=1e-15)
    rest = relax(net, x, phase, nudge=Nudge(COST, y, 0.4))
    assert float(rest.residual.max()) < SAME_FORMULA
    net.nudge_site = "inside" if net.squashes else "outside"
    assert_close(relax(net, x, phase, nudge=Nudge(COST, y, 0.4)).state, rest.state, rtol=0.0, atol=SAME_FORMULA)


@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
@pytest.mark.parametrize("schedule", ["synchronous", "sweeps"])
def test_the_synapses_follow_bptt_as_with_the_nudge_inside(
    build: Callable[[], PrimitiveDynamics], schedule: Any
) -> None:
    net = build()
    x, y = batch(net)
    free = relax(net, x, Phase(3000, schedule, stop="settled", still=1e-16), keep=K)
    nabla = BPTT(3000, K, schedule=schedule).processes(net, COST, x, y, free)

    def error(beta: float) -> float:
        gaps = gap(EP(3000, K, schedule=schedule, beta=beta).processes(net, COST, x, y, free), nabla)
        return max(gaps[name] for name in nabla.synapses)

    assert error(1e-6) < GDU_AT_SMALL_BETA
    assert error(2e-4) / error(1e-4) == pytest.approx(2.0, rel=FIRST_ORDER)


def test_it_settles_at_a_beta_at_which_the_nudge_inside_grows() -> None:
    net = linear_output()
    x, y = batch(net)
    nudge = Nudge(COST, y, 3.0)
    assert float(relax(net, x, 60, nudge=nudge).residual.max()) < 1e-9
    set_nudge_site(net, "inside")
    assert float(relax(net, x, 60, nudge=nudge).residual.max()) > 1e3
