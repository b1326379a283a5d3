"""The penalty on |J - J^T|: its size and gradient, and that training with it makes the ways there and back alike."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.nets import F64, asymmetric, batch, named, prototypical, random_like
from torch.testing import assert_close

from eqprop import EP, RBP, SquaredError, relax
from eqprop.estimators.homeostasis import Homeostasis, asymmetric_part, relative_asymmetry
from eqprop.models import Layered

COST = SquaredError()


def untied(angle: float = 90.0) -> Layered:
    return Layered((3, 6, 5, 4), activation="tanh", untied=True, feedback_angle=angle, seed=0, dtype=F64)


def test_its_mean_is_the_difference_of_the_weights() -> None:
    net = untied()
    x, _ = batch(net)
    s = relax(net, x, 50).state
    mean, _ = Homeostasis(base=EP(1, 1), probes=1000).penalty_gradient(net, x, s)
    n = sum(v.shape[1] for v in s)
    gap = sum(float((net.get_parameter(f"W{k}") - net.get_parameter(f"B{k}")).square().sum()) for k in ("01", "12"))
    # |J - J^T|^2 counts every pair of layers twice.
    assert mean == pytest.approx(2.0 * gap / (2.0 * n), rel=0.06)


def test_symmetric_weights_have_no_penalty_and_their_transition_has() -> None:
    net = prototypical(3, "tanh")
    x, _ = batch(net)
    s = relax(net, x, 50).state
    penalty = Homeostasis(base=EP(1, 1))
    assert penalty.penalty_gradient(net, x, s)[0] < 1e-28
    assert relative_asymmetry(net, x, s) < 1e-14
    apart = untied()
    # Independent weights: |W - B|^2 is twice |W|^2, for each pair of layers.
    assert relative_asymmetry(apart, x, relax(apart, x, 50).state) == pytest.approx(math.sqrt(2.0), rel=0.4)
    other = asymmetric()
    assert penalty.penalty_gradient(other, batch(other)[0], relax(other, batch(other)[0], 50).state)[0] > 1e-3


def test_the_gradient_is_that_of_the_penalty() -> None:
    net = untied()
    x, _ = batch(net)
    s = relax(net, x, 50).state
    penalty = Homeostasis(base=EP(1, 1), probes=2)
    _, grads = penalty.penalty_gradient(net, x, s)
    assert grads.keys() == dict(net.named_parameters()).keys()
    for name, h in (("W01", 1e-6), ("B12", 1e-6), ("W23", 1e-6)):
        u, values = random_like(tuple(net.get_parameter(name).shape), 1), []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                net.get_parameter(name).add_(sign * h * u)
                values.append(penalty.penalty_gradient(net, x, s)[0])
                net.get_parameter(name).sub_(sign * h * u)
        assert float((grads[name] * u).sum()) == pytest.approx((values[0] - values[1]) / (2 * h), abs=1e-8)
    assert float(grads["W23"].abs().max()) == 0.0  # from the input, which nothing feeds back to


@pytest.mark.parametrize("base", [EP(20, 5, nudging="symmetric"), RBP(20, 5, checked=False)])
def test_it_is_added_to_any_estimator(base: EP | RBP) -> None:
    net = untied()
    x, y = batch(net)
    added = Homeostasis(base=base, weight=0.3)
    free, plain = base.gradient(net, COST, x, y)
    found = named(net, added.gradient(net, COST, x, y)[1])
    again = named(net, added.gradient(net, COST, x, y)[1])
    assert_close(again, found, rtol=0.0, atol=0.0)  # the same probes for the same batch and weights
    _, penalty = added.penalty_gradient(net, x, free.state)
    assert_close(found, {name: g + 0.3 * penalty[name] for name, g in named(net, plain).items()})
    added.backward(net, COST, x, y)
    assert_close({name: p.grad for name, p in net.named_parameters()}, found)


def test_training_with_it_aligns_the_ways() -> None:
    net = untied()
    x, y = batch(net)
    e = tuple(random_like(tuple(v.shape), n) for n, v in enumerate(net.init_state(x)))

    def size() -> float:
        s = relax(net, x, 50).state
        return sum(float(v.detach().square().sum()) for v in asymmetric_part(net, x, s, e))

    before = size()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        Homeostasis(base=EP(20, 5, nudging="symmetric"), weight=5.0).backward(net, COST, x, y)
        optimizer.step()
    assert size() < 0.1 * before
