"""Models from functions against the loop a user would write by hand: the same gradients, and no slower."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from helpers import hand_loops as hand
from torch import Tensor

from eqprop import EP, Dynamics, SquaredError, from_energy, from_primitive, from_transition
from eqprop.relax import using_threads

LOOPS = sorted(hand.LOOPS)


def build(kind: str, g: hand.Given) -> Dynamics:
    layers = tuple(v.shape[1] for v in g.zeros)
    if kind == "energy":
        return from_energy(hand.energy, g.theta, layers, eps=hand.EPS, project=hand.clip)
    if kind == "primitive":
        return from_primitive(hand.coupling, g.theta, layers, squash=torch.tanh)
    return from_transition(hand.transition, g.theta, layers)


def by_library(model: Dynamics, g: hand.Given) -> dict[str, Tensor]:
    _, found = EP(T=g.T, K=g.K, beta=g.beta).gradient(model, SquaredError(), g.x, g.y)
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: value for p, value in found.items()}


@pytest.mark.parametrize("kind", LOOPS)
def test_the_library_gives_the_gradients_of_the_loop_by_hand(kind: str) -> None:
    g = hand.given((3, 7, 6, 5), T=60, K=15, dtype=torch.float64)
    ours, theirs = by_library(build(kind, g), g), hand.LOOPS[kind](g)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float(value.norm()) > 1e-4, f"{name} gets no gradient: the comparison says nothing"
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # and alone: on a busy machine it says nothing
@pytest.mark.parametrize("kind", LOOPS)
def test_the_library_is_no_slower_than_the_loop_by_hand(kind: str) -> None:
    g = hand.given((10, 128, 128, 784), T=60, K=15, dtype=torch.float32)
    model = build(kind, g)
    with using_threads(1):
        ratios = [seconds(lambda: by_library(model, g)) / seconds(lambda: hand.LOOPS[kind](g)) for _ in range(9)]
    # Measured 0.99 to 1.04; on a busy machine single ratios scatter by a quarter, their median by less.
    assert statistics.median(ratios) < 1.15, [f"{r:.2f}" for r in ratios]


def seconds(run: object) -> float:
    assert callable(run)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
