"""Costs: squared error, any l(s, y), l(s, y, theta) with its t = 0 term, a readout with parameters of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from helpers.nets import F64, LONG, batch, energy_based, prototypical, random_like, settle, toy
from helpers.tolerances import FINITE_DIFFERENCE, SAME_FORMULA, SETTLED_GRADIENT, SYMMETRIC_EP
from torch import Tensor, nn
from torch.testing import assert_close

from eqprop import BPTT, EP, RBP, Cost, Dynamics, Estimator, FunctionCost, Nudge, Phase, SquaredError, relax
from eqprop.state import State

K = 100
Gradients = dict[nn.Parameter, Tensor]


def squared(s: State, y: Tensor) -> Tensor:
    return 0.5 * (s[0] - y).square().sum(-1)


def cross_entropy(s: State, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(s[0], y, reduction="none")


def everywhere(s: State, y: Tensor) -> Tensor:
    """Sees the hidden layer too."""
    return torch.cosh(s[0] - y).sum(-1) + s[1].pow(3).sum(-1)


def parametric(s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
    """A second reading of the output through W01, and a penalty on the weights."""
    return 0.5 * (s[0] + s[1] @ theta["W01"].T - y).square().sum(-1) + 0.05 * theta["W12"].square().sum()


class Readout(Cost):
    """Cross-entropy of a linear readout of the last hidden layer; y are class numbers."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, classes, dtype=F64)
        with torch.no_grad():
            self.linear.weight.copy_(random_like((classes, hidden), 1))
            self.linear.bias.copy_(random_like((classes,), 2))

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.linear(s[1]), y, reduction="none")


def steady_loss(net: Dynamics, cost: Cost, x: Tensor, y: Tensor, start: State) -> float:
    free = relax(net, x, Phase(LONG, stop="settled", still=1e-15), start)
    return float(cost(free.state, y, dict(net.named_parameters())).mean().detach())


def check_against_finite_differences(
    net: Dynamics, cost: Cost, x: Tensor, y: Tensor, grads: Gradients, allowed: float = FINITE_DIFFERENCE
) -> None:
    """Every parameter of the net and of the cost, along a random direction each."""
    start, h = settle(net, x).state, 1e-5
    for seed, (p, grad) in enumerate(grads.items()):
        u, losses, kept = random_like(tuple(p.shape), seed), [], p.detach().clone()
        for sign in (1.0, -1.0):
            with torch.no_grad():
                p.copy_(kept + sign * h * u)
            losses.append(steady_loss(net, cost, x, y, start))
        with torch.no_grad():
            p.copy_(kept)
        slope = (losses[0] - losses[1]) / (2 * h)
        assert float((grad * u).sum()) == pytest.approx(slope, abs=allowed)


def symmetric_ep(net: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> Gradients:
    """The mean over +beta and -beta, whose error is of the order of beta squared."""
    one, other = (EP(T=LONG, K=K, stop="settled", beta=b).gradient(net, cost, x, y)[1] for b in (1e-4, -1e-4))
    return {p: 0.5 * (g + other[p]) for p, g in one.items()}


def gradients(net: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> dict[str, Gradients]:
    state = settle(net, x).state
    return {
        "EP": symmetric_ep(net, cost, x, y),
        "BPTT": BPTT(T=K, K=K).gradient(net, cost, x, y, state)[1],
        "RBP": RBP(T=0, K=K).gradient(net, cost, x, y, state)[1],
    }


def test_squared_error_and_its_derivative_by_autodiff() -> None:
    net = energy_based(3)
    x, y = batch(net)
    s = tuple(random_like(tuple(v.shape), n) for n, v in enumerate(net.init_state(x)))
    by_hand, by_function = SquaredError(), FunctionCost(squared)
    assert_close(by_hand(s, y, {}), by_function(s, y, {}), rtol=0.0, atol=SAME_FORMULA)
    pull, oracle = by_hand.pull(s, y, {}), by_function.pull(s, y, {})
    assert_close(pull[0], oracle[0], rtol=0.0, atol=SAME_FORMULA)
    assert pull[1:] == oracle[1:] == (None, None)


def test_the_push_is_minus_beta_times_the_pull() -> None:
    net = energy_based(2)
    x, y = batch(net)
    s = tuple(random_like(tuple(v.shape), n) for n, v in enumerate(net.init_state(x)))
    for cost in (SquaredError(), FunctionCost(everywhere)):
        pull = cost.pull(s, y, {})
        push = Nudge(cost, y, -0.2).push(s, {}, 0.5)
        for a, b in zip(push, pull, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_close(a, 0.2 * 0.5 * b, rtol=0.0, atol=SAME_FORMULA)


@pytest.mark.parametrize("estimator", [EP(T=30, K=6, beta=0.2), BPTT(T=30, K=6), RBP(T=30, K=6)])
def test_a_function_cost_gives_the_same_gradients_as_the_formula(estimator: Estimator) -> None:
    net = prototypical(3)
    x, y = batch(net)
    formula, function = (estimator.gradient(net, cost, x, y)[1] for cost in (SquaredError(), FunctionCost(squared)))
    for p, grad in formula.items():
        assert_close(function[p], grad, rtol=0.0, atol=SAME_FORMULA)


@pytest.mark.parametrize("cost", [FunctionCost(everywhere), FunctionCost(parametric, parametric=True)])
def test_any_cost_against_finite_differences(cost: FunctionCost) -> None:
    net = energy_based(2)
    x, y = batch(net)
    found = gradients(net, cost, x, y)
    for grads in found.values():
        assert set(grads) == set(net.parameters())
        for p, grad in grads.items():
            assert_close(grad, found["RBP"][p], rtol=0.0, atol=SYMMETRIC_EP)
    check_against_finite_differences(net, cost, x, y, found["RBP"])
    check_against_finite_differences(net, cost, x, y, found["EP"], 10 * SYMMETRIC_EP)


def test_class_numbers_as_targets() -> None:
    net = energy_based(2)
    x, y = batch(net)
    labels = y.argmax(1)
    found = gradients(net, FunctionCost(cross_entropy), x, labels)
    check_against_finite_differences(net, FunctionCost(cross_entropy), x, labels, found["BPTT"])
    for p, grad in found["EP"].items():
        assert_close(grad, found["BPTT"][p], rtol=0.0, atol=SYMMETRIC_EP)


def test_the_term_at_t_0_is_the_partial_derivative_of_the_cost() -> None:
    """Delta_theta(0) = -dl/dtheta and nabla_theta(0) = dl/dtheta at the steady state  [sec:index-shift]."""
    net, cost = energy_based(2), FunctionCost(parametric, parametric=True)
    x, y = batch(net)
    free = settle(net, x, keep=5)
    theta = dict(net.named_parameters())
    loss = parametric(free.state, y, theta).mean()
    expected = dict(zip(("W01", "W12"), torch.autograd.grad(loss, (theta["W01"], theta["W12"])), strict=True))
    for estimator, sign in ((EP(T=0, K=5), -1), (BPTT(T=5, K=5), 1), (RBP(T=0, K=5), 1)):
        processes = estimator.processes(net, cost, x, y, free)
        assert processes.direct.keys() == expected.keys()
        for name, grad in expected.items():
            assert_close(processes.direct[name], sign * grad, rtol=0.0, atol=SAME_FORMULA)
        # The whole gradient is the process summed up and this term.
        start = free.trail[-5] if isinstance(estimator, BPTT) else free.state
        grads = estimator.gradient(net, cost, x, y, start)[1]
        for name, p in net.named_parameters():
            total = processes.synapses[name].sum(0) + processes.direct.get(name, 0.0)
            assert_close(estimator.orientation * total, grads[p], rtol=0.0, atol=SAME_FORMULA)


def test_the_term_at_t_0_is_needed() -> None:
    net = energy_based(2)
    x, y = batch(net)
    theta = dict(net.named_parameters())
    blind = FunctionCost(lambda s, y: parametric(s, y, {name: p.detach() for name, p in theta.items()}))
    seeing = FunctionCost(parametric, parametric=True)
    for estimator in (EP(T=100, K=20), BPTT(T=100, K=20), RBP(T=100, K=20)):
        without, whole = (estimator.gradient(net, cost, x, y)[1][theta["W01"]] for cost in (blind, seeing))
        assert float((without - whole).abs().max()) > 1e-2


def test_a_readout_and_its_net_are_trained_by_one_optimizer() -> None:
    net, cost = energy_based(2), Readout(5, 3)
    x, _ = batch(net, samples=6)
    labels = torch.arange(6) % 3
    optimizer = torch.optim.Adam([*net.parameters(), *cost.parameters()], lr=0.05)
    before = copy.deepcopy(cost.state_dict())
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        free = EP(T=60, K=30, beta=0.05).backward(net, cost, x, labels)
        losses.append(float(cost(free.state, labels, {}).mean().detach()))
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(before["linear.weight"], cost.linear.weight)


def test_a_cost_that_holds_the_model_does_not_count_its_parameters_twice() -> None:
    class Penalty(Cost):
        parametric = True

        def __init__(self, net: Dynamics) -> None:
            super().__init__()
            self.net = net

        def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
            return parametric(s, y, dict(self.net.named_parameters()))

    net = energy_based(2)
    x, y = batch(net)
    state = settle(net, x).state
    for estimator in (EP(T=0, K=9), BPTT(T=9, K=9), RBP(T=0, K=9)):
        held, given = (
            estimator.gradient(net, cost, x, y, state)[1]
            for cost in (Penalty(net), FunctionCost(parametric, parametric=True))
        )
        for p in net.parameters():
            assert_close(held[p], given[p], rtol=0.0, atol=SAME_FORMULA)


def test_ep_with_a_large_k_and_exact_costs_agrees_for_the_toy_model_too() -> None:
    net = toy()
    x, y = batch(net)
    found = gradients(net, FunctionCost(everywhere), x, y)
    for p, grad in found["RBP"].items():
        assert_close(found["BPTT"][p], grad, rtol=0.0, atol=SETTLED_GRADIENT)
        assert_close(found["EP"][p], grad, rtol=0.0, atol=SYMMETRIC_EP)
