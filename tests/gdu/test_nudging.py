"""Nudging rules: orders in beta, the bounds of the loss, and what coupled learning computes instead of the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.nets import batch, energy_based, gather, named, prototypical, settle, sums
from helpers.tolerances import NOT_EQUAL, ORDER_IN_BETA, SAME_FORMULA
from torch import Tensor
from torch.testing import assert_close

from eqprop import RBP, FunctionCost, Nudge, SquaredError, relax
from eqprop.estimators.coupled import CoupledLearning
from eqprop.estimators.nudging import RULES
from eqprop.gdu.nudging import compare_nudging
from eqprop.models import Layered
from eqprop.state import State

COST = SquaredError()


def hopfield() -> Layered:
    return energy_based(3, "tanh", eps=0.5)


def test_the_orders_of_the_rules() -> None:
    net = hopfield()
    table = compare_nudging(net, COST, *batch(net), steps=300)
    orders = {row.rule: row.order for row in table.rows}
    assert list(orders) == list(RULES)
    for rule, order in {"positive": 1, "negative": 1, "centered": 2, "random-sign": 1, "holomorphic": 4}.items():
        assert orders[rule] == pytest.approx(order, abs=ORDER_IN_BETA)
    last = {row.rule: row.distances[-1] for row in table.rows}
    assert max(last[rule] for rule in ("positive", "negative", "centered", "holomorphic")) < 1e-2
    assert last["clamped"] > 10 * NOT_EQUAL
    assert orders["contrastive"] is None
    assert "centered" in str(table)
    assert table.residual < 1e-14


def test_a_rule_that_does_not_serve_says_why() -> None:
    net = prototypical(2, "hard-sigmoid")
    table = compare_nudging(net, COST, *batch(net), steps=50, rules=["centered", "holomorphic"])
    assert [row.refused is None for row in table.rows] == [True, False]
    assert "cannot step at complex states" in str(table)
    with pytest.raises(ValueError, match="Did you mean 'centered'"):
        compare_nudging(net, COST, *batch(net), rules="centred")


def free_energy(net: Layered, x: Tensor, y: Tensor, s: State, beta: float) -> Tensor:
    """min over s of E + beta l, from Phi = (1/2)|s|^2 - eps E."""
    nudge = Nudge(COST, y, beta) if beta else None
    end = relax(net, x, 3000, s, nudge).state
    squares = sum(0.5 * v.square().sum(-1) for v in end)
    energy = (squares - net.primitive(x, end)) / net.eps
    return (energy + beta * COST(end, y)).detach()


def test_positive_bounds_the_loss_from_below_and_negative_from_above() -> None:
    net = hopfield()
    x, y = batch(net, samples=5)
    s, beta = settle(net, x).state, 0.2
    loss, rest = COST(s, y), free_energy(net, x, y, s, 0.0)
    below, above = ((free_energy(net, x, y, s, b) - rest) / b for b in (beta, -beta))
    assert bool((below < loss).all())
    assert bool((loss < above).all())
    middle = 0.5 * (below + above)
    assert float((middle - loss).abs().max()) < 0.2 * float((above - below).max())


def test_coupled_learning_is_ep_with_the_error_times_the_stiffness() -> None:
    """H: the Schur complement of d2E/ds2 for the output, sample by sample."""
    net = hopfield()
    x, y = batch(net)
    free = settle(net, x)
    sizes = [v.shape[1] for v in free.state]

    def energy(flat: Tensor, k: int) -> Tensor:
        s = tuple(v.unsqueeze(0) for v in torch.split(flat, sizes))
        return (0.5 * flat.square().sum() - net.primitive(x[k : k + 1], s).sum()) / net.eps

    forces = []
    for k in range(len(x)):
        flat = torch.cat([v[k] for v in free.state])
        hessian = torch.autograd.functional.hessian(lambda v, k=k: energy(v, k), flat)
        inverse = torch.linalg.inv(hessian)[: sizes[0], : sizes[0]]
        forces.append(torch.linalg.solve(inverse, y[k] - free.state[0][k]))
    force = torch.stack(forces)
    other = FunctionCost(lambda s, y: -(s[0] * force).sum(-1))
    expected = named(net, RBP(0, 400).gradient(net, other, x, y, free.state)[1])
    exact = named(net, RBP(0, 400).gradient(net, COST, x, y, free.state)[1])

    def error(beta: float) -> float:
        found = named(net, CoupledLearning(0, 400, beta=beta).gradient(net, COST, x, y, free.state)[1])
        return max(float((found[n] - g).abs().max()) for n, g in expected.items())

    assert error(1e-4) < 1e-4
    assert error(2e-4) / error(1e-4) == pytest.approx(2.0, rel=ORDER_IN_BETA)
    size = math.sqrt(sum(float(g.square().sum()) for g in exact.values()))
    gap = math.sqrt(sum(float((expected[n] - g).square().sum()) for n, g in exact.items()))
    assert gap > 10 * NOT_EQUAL * size


def test_the_steps_of_coupled_learning_add_up() -> None:
    net = hopfield()
    x, y = batch(net)
    free = relax(net, x, 5)
    for schedule in ("synchronous", "sweeps"):
        estimator = CoupledLearning(0, 6, schedule=schedule)
        total = sums(gather(estimator.steps(net, COST, x, y, free)))
        grads = named(net, estimator.gradient(net, COST, x, y, free.state)[1])
        assert_close(grads, {name: -g for name, g in total.items()}, rtol=SAME_FORMULA, atol=SAME_FORMULA)
