"""The doctor on chains of many depths: drift, rounding and epsilon in the plain form, none in the difference form."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.nets import random_like
from torch import Tensor

from eqprop import EP, FunctionCost, SquaredError, doctor
from eqprop.models import Dense, Network
from eqprop.state import State

WIDTH, SAMPLES = 16, 8


def chain(depth: int) -> Network:
    names = [f"s{n}" for n in range(depth)]
    links = [Dense(pre, post, feedback_gain=0.1) for post, pre in pairwise(names)]
    layers = {"s0": 4, **dict.fromkeys(names[1:], WIDTH)}
    ways = [Dense("x", names[-1]), *links]
    return Network(WIDTH, layers, ways, activation="tanh", bias=False, nudge_site="inside", init="glorot", seed=depth)


def batch(depth: int) -> tuple[Tensor, Tensor]:
    return random_like((SAMPLES, WIDTH), depth, -1.0, 1.0).float(), random_like((SAMPLES, 4), 1, -0.5, 0.5).float()


def faint(s: State, y: Tensor) -> Tensor:
    return 5e-10 * (s[0] - y).square().sum(-1)


def test_drift_is_named_layer_by_layer() -> None:
    depth = 5
    net, (x, y) = chain(depth), batch(depth)
    found = doctor(net, SquaredError(), x, y, EP(T=3 * depth, K=2 * depth, beta=0.1))
    assert found.cause == "drift", found.verdict
    assert found.finding is not None
    assert f"W{depth - 1}x by" in found.finding.shown_by  # the farthest off first
    assert found.finding.change == {"form": "difference"}


@pytest.mark.slow
@pytest.mark.parametrize("depth", range(4, 17))
def test_each_cause_is_named_and_the_difference_form_has_none(depth: int) -> None:
    net, (x, y) = chain(depth), batch(depth)
    short, long = EP(T=3 * depth, K=2 * depth, beta=0.1), EP(T=60 * depth, K=2 * depth, beta=1e-4)
    assert doctor(net, SquaredError(), x, y, short).cause == "drift"
    assert doctor(net, SquaredError(), x, y, long).cause == "rounding"
    adam = torch.optim.Adam(net.parameters())
    moved = EP(T=60 * depth, K=2 * depth, beta=0.1, form="difference")
    assert doctor(net, FunctionCost(faint), x, y, moved, rates=adam).cause == "epsilon"
    for ep in (short, long):
        healthy = doctor(net, SquaredError(), x, y, EP(ep.T, ep.K, ep.beta, form="difference"))
        assert healthy.cause is None, healthy.verdict
        assert "no gradient of an energy" in healthy.remarks[0]
