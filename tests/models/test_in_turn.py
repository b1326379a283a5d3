"""Layers that cannot move are left out of a phase, and not a bit changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.nets import random_like

import eqprop
from eqprop import EP, FunctionCost, SquaredError, relax
from eqprop.cost import Cost, Nudge
from eqprop.engines.base import Job, load_engine
from eqprop.models import Conv, CrossEntropy, Dense, Layered, Network
from eqprop.relax import Stepper, difference_stepper, end_of_phase, moved_from_zero, moved_in_turn

DEPTH = 5


def chain(**options: Any) -> Network:
    names = [f"s{n}" for n in range(DEPTH)]
    links = [Dense("x", "s4"), *(Dense(f"s{n + 1}", f"s{n}", feedback_gain=0.3) for n in range(DEPTH - 1))]
    given = {"activation": "tanh", "bias": False, "nudge_site": "inside", "init": "glorot", "seed": 0}
    return Network(7, dict.fromkeys(names, 6), links, **(given | options))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return random_like((3, 7), 1).float(), random_like((3, 6), 2, 0.0, 1.0).float()


@pytest.mark.parametrize("T", [0, 1, 6, 7])
def test_a_free_phase_from_zero_has_the_bits_of_whole_steps(T: int) -> None:
    net, (x, _) = chain(), batch()
    s, step = net.init_state(x), Stepper(net, net.drive(x), None)
    with torch.no_grad():
        for _ in range(T):
            s = step(s)
    free = relax(net, x, T)
    assert moved_from_zero(net, DEPTH) == ((0, 2, 4), (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(free.state, s, strict=True))
    assert len(free.trail) == 0
    begun = relax(net, x, T, tuple(v + 0.1 for v in s))  # from elsewhere all layers move
    assert begun.steps == T


@pytest.mark.parametrize("cost", [SquaredError(), CrossEntropy(6, 4, layer=1, seed=0)], ids=["output", "layer 1"])
@pytest.mark.parametrize("K", [1, 6, 7])
def test_so_has_a_held_nudge(K: int, cost: Cost) -> None:
    net, (x, y) = chain(), batch()
    y = y if isinstance(cost, SquaredError) else torch.eye(4)[:3]
    free = relax(net, x, 30)
    nudge = Nudge(cost, y, 0.1, at=free.state)
    step = difference_stepper(net, x, nudge, free.state)
    d = step.start(free.state)
    with torch.no_grad():
        for _ in range(K):
            d = step(d)
    found = end_of_phase(net, x, eqprop.Phase(K), free.state, replace(nudge), "difference")
    assert moved_in_turn(net, DEPTH, cost)
    assert all(torch.equal(a, b) for a, b in zip(found, d, strict=True))


def test_where_more_may_move_nothing_is_left_out() -> None:
    class Farther(SquaredError):
        """Reads another layer too, and does not say so."""

    def far(s: Any, y: torch.Tensor) -> torch.Tensor:
        return (s[0] - y).square().sum(-1) + s[1].square().sum(-1)

    assert moved_in_turn(chain(), DEPTH, Farther()) == ()
    assert moved_in_turn(chain(), DEPTH, FunctionCost(far)) == ()
    assert moved_from_zero(chain(bias=True), DEPTH) == ()
    assert moved_from_zero(chain(activation="sigmoid"), DEPTH) == ()
    assert moved_from_zero(Layered((5, 8, 7), "energy-based", "tanh", eps=0.3, seed=0), 2) == ()
    pooled = Network(
        (1, 8, 8),
        {"s0": (3, 2, 2), "s1": (2, 4, 4), "s2": (2, 8, 8)},
        [Conv("x", "s2", padding=1), Conv("s2", "s1", padding=1, pool=2), Conv("s1", "s0", padding=1, pool=2)],
        activation="tanh",
        bias=False,
        seed=0,
    )
    assert moved_in_turn(pooled, 3, SquaredError()) == ()


def test_the_compiled_training_leaves_them_out_too() -> None:
    net, (x, y) = chain(), batch()
    trained = {}
    for name in ("eager", "xla"):
        own = chain()
        own.load_state_dict(net.state_dict())
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        ep = EP(9, 7, beta=0.1, form="difference", held=True)
        job = Job(own, SquaredError(), ep, optimizer, x, y, torch.zeros(3, dtype=torch.int64))
        load_engine(name).runner(job).run(torch.tensor([[0, 1, 2], [2, 0, 1]]))
        trained[name] = own.state_dict()
    for name, value in trained["eager"].items():
        torch.testing.assert_close(trained["xla"][name], value, rtol=1e-5, atol=1e-6)
