"""Predictive-coding nets: the forward pass is at rest, and EP's gradient tends to backprop's as beta falls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.contract import Case, check_model
from helpers.nets import F64, batch, named
from helpers.tolerances import NOT_EQUAL, ORDER_IN_BETA, SAME_FORMULA
from torch.testing import assert_close

from eqprop import EP, Phase, SquaredError, relax
from eqprop.estimators import Backprop
from eqprop.models import Conv, Dense, Network, Skip
from eqprop.models.predictive import PredictiveCoding

COST = SquaredError()


def dense(activation: str = "relu") -> PredictiveCoding:
    sigmas = {"out": "identity", "*": activation}
    links = [Dense("x", "h2", gain=1.5), Dense("h2", "h1"), Dense("h1", "out")]
    return PredictiveCoding(4, {"out": 3, "h1": 6, "h2": 5}, links, sigmas, seed=0, dtype=F64)


def images() -> PredictiveCoding:
    links = [Conv("x", "h2", padding=1, pool=2), Conv("h2", "h1", stride=2, padding=1), Dense("h1", "out")]
    layers = {"out": 3, "h1": (3, 2, 2), "h2": (2, 4, 4)}
    return PredictiveCoding((1, 8, 8), layers, links, {"out": "identity", "*": "relu"}, seed=1, dtype=F64)


def skips() -> PredictiveCoding:
    links = [
        Dense("x", "a"),
        Dense("a", "b"),
        Skip("a", "b", name="V"),
        Dense("a", "out"),
        Dense("b", "out"),
        Dense("x", "out"),
    ]
    return PredictiveCoding(4, {"out": 3, "b": 5, "a": 5}, links, {"out": "tanh", "*": "relu"}, seed=2, dtype=F64)


NETS: dict[str, Callable[[], PredictiveCoding]] = {
    "dense": dense,
    "dense tanh": lambda: dense("tanh"),
    "images": images,
    "skips": skips,
}


@pytest.mark.parametrize("name", NETS)
def test_it_keeps_what_every_model_promises(name: str) -> None:
    net = NETS[name]()
    check_model(Case(net, *batch(net)))


@pytest.mark.parametrize("name", NETS)
def test_the_forward_pass_is_at_rest(name: str) -> None:
    net = NETS[name]()
    x, _ = batch(net)
    free = relax(net, x, Phase(1, "sweeps"))
    assert_close(free.state, net.feedforward(x), rtol=SAME_FORMULA, atol=SAME_FORMULA)
    assert float(free.residual.max()) < SAME_FORMULA
    moved = tuple(v + 0.1 for v in free.state)
    assert float(relax(net, x, 0, moved).residual.max()) > NOT_EQUAL


@pytest.mark.parametrize("name", NETS)
def test_ep_tends_to_backprop(name: str) -> None:
    net = NETS[name]()
    x, y = batch(net)
    exact = named(net, Backprop().gradient(net, COST, x, y)[1])
    K = 60 * len(net.layers)

    def error(beta: float, nudging: str) -> float:
        ep = EP(1, K, beta=beta, nudging=nudging, schedule="sweeps")  # type: ignore[arg-type]
        found = named(net, ep.gradient(net, COST, x, y)[1])
        return max(float((found[n] - g).abs().max()) for n, g in exact.items())

    assert error(2e-4, "one-sided") / error(1e-4, "one-sided") == pytest.approx(2.0, rel=ORDER_IN_BETA)
    assert error(1e-3, "symmetric") < 1e-4


def test_few_sweeps_are_near_and_one_is_not() -> None:
    """K must be told beside any comparison: the errors arrive in the first sweep, the activities' answer later."""
    net = dense()
    x, y = batch(net, samples=20)
    exact = named(net, Backprop().gradient(net, COST, x, y)[1])
    worst = {}
    for sweeps in (1, 5):
        ep = EP(1, 3 * sweeps, beta=0.02, nudging="symmetric", schedule="sweeps")
        found = named(net, ep.gradient(net, COST, x, y)[1])
        worst[sweeps] = min(
            float(torch.cosine_similarity(found[n].flatten(), g.flatten(), dim=0)) for n, g in exact.items()
        )
    assert worst[5] > 0.99
    assert worst[1] < worst[5] - NOT_EQUAL


def test_with_relu_around_the_state_the_forward_pass_is_not_at_rest() -> None:
    """The same weights with a_n linear and sigma on the state: the trap that predictive coding avoids."""
    links = [Dense("x", "h"), Dense("h", "out")]
    net = PredictiveCoding(4, {"out": 3, "h": 6}, links, {"out": "identity", "h": "relu"}, seed=0, dtype=F64)
    other = Network(4, {"out": 3, "h": 6}, links, {"out": "identity", "h": "relu"}, seed=0, dtype=F64)
    x, _ = batch(net)
    assert_close(other.feedforward(x), net.feedforward(x))
    assert float(relax(other, x, 0, other.feedforward(x)).residual.max()) > NOT_EQUAL
