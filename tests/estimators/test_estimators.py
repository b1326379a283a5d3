"""EP, BPTT and RBP: one gradient where they should give one, checked against finite differences of the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers.nets import (
    LONG,
    asymmetric,
    batch,
    convolutional,
    energy_based,
    gather,
    named,
    prototypical,
    random_like,
    settle,
    sums,
    toy,
)
from helpers.tolerances import EXACT_LIMIT, FINITE_DIFFERENCE, FIRST_ORDER, NOT_EQUAL, SAME_FORMULA, SETTLED_GRADIENT
from torch import Tensor
from torch.testing import assert_close

from eqprop import (
    BPTT,
    EP,
    RBP,
    Dynamics,
    Estimator,
    GrowingAdjointError,
    Phase,
    SquaredError,
    from_transition,
    limit_steps,
    relax,
)
from eqprop.models import Layered
from eqprop.state import State

COST = SquaredError()
ENOUGH = 100
"""Steps after which BPTT's and RBP's sums no longer change: their terms fall like the residual of the free phase."""

GRADIENT_NETS: dict[str, Callable[[], Dynamics]] = {
    "toy": toy,
    "EB depth 1": lambda: energy_based(1),
    "EB depth 2": lambda: energy_based(2, "sigmoid"),
    "EB depth 3": lambda: energy_based(3, "sigmoid"),
}
PROTOTYPICAL_NETS: dict[str, Callable[[], Dynamics]] = {
    "P depth 1": lambda: prototypical(1),
    "P depth 2": lambda: prototypical(2, "sigmoid"),
    "P depth 3": lambda: prototypical(3),
    "conv": lambda: convolutional(activation="sigmoid"),
}
ARBITRARY: dict[str, Callable[[], Dynamics]] = {"asymmetric": asymmetric}
ALL = GRADIENT_NETS | PROTOTYPICAL_NETS | ARBITRARY


def steady_loss(net: Dynamics, x: Tensor, y: Tensor, start: State) -> float:
    free = relax(net, x, Phase(LONG, stop="settled", still=1e-15), start)
    return float(COST(free.state, y, {}).mean())


def finite_difference(net: Dynamics, x: Tensor, y: Tensor, start: State, name: str, seed: int) -> tuple[float, Tensor]:
    """(L*(theta + h u) - L*(theta - h u)) / 2h along a random direction u of one parameter, and u."""
    h = 1e-5
    u = random_like(tuple(net.get_parameter(name).shape), seed)
    losses = []
    for sign in (1.0, -1.0):
        moved = copy.deepcopy(net)
        with torch.no_grad():
            moved.get_parameter(name).add_(sign * h * u)
        losses.append(steady_loss(moved, x, y, start))
    return (losses[0] - losses[1]) / (2 * h), u


def check_against_finite_differences(net: Dynamics, grads: dict[str, Tensor], x: Tensor, y: Tensor, s: State) -> None:
    assert grads.keys() == dict(net.named_parameters()).keys()
    for seed, (name, grad) in enumerate(grads.items()):
        slope, u = finite_difference(net, x, y, s, name, seed)
        assert float((grad * u).sum()) == pytest.approx(slope, abs=FINITE_DIFFERENCE), name


def gradient(
    estimator: Estimator, net: Dynamics, x: Tensor, y: Tensor, state: State | None = None
) -> dict[str, Tensor]:
    return named(net, estimator.gradient(net, COST, x, y, state)[1])


def exact_ep(net: Dynamics, x: Tensor, y: Tensor, K: int) -> dict[str, Tensor]:
    """EP's gradient in the limit beta -> 0, the sum of its exact updates."""
    free = settle(net, x)
    return {name: -total for name, total in sums(gather(limit_steps(net, COST, x, y, free, K))).items()}


@pytest.mark.parametrize("name", ALL)
def test_bptt_and_rbp_are_the_gradient_of_the_steady_loss(name: str) -> None:
    net = ALL[name]()
    x, y = batch(net)
    free = settle(net, x)
    bptt = gradient(BPTT(T=ENOUGH, K=ENOUGH), net, x, y, free.state)
    rbp = gradient(RBP(T=0, K=ENOUGH), net, x, y, free.state)
    assert_close(rbp, bptt, rtol=0.0, atol=SETTLED_GRADIENT)
    check_against_finite_differences(net, rbp, x, y, free.state)


@pytest.mark.parametrize("name", GRADIENT_NETS)
def test_ep_is_the_same_gradient_where_f_derives_from_phi(name: str) -> None:
    net = GRADIENT_NETS[name]()
    x, y = batch(net)
    free = settle(net, x)
    rbp = gradient(RBP(T=0, K=ENOUGH), net, x, y, free.state)
    assert_close(exact_ep(net, x, y, ENOUGH), rbp, rtol=0.0, atol=SETTLED_GRADIENT)

    def error(beta: float) -> float:
        ep = gradient(EP(T=0, K=ENOUGH, beta=beta), net, x, y, free.state)
        return max(float((ep[name] - rbp[name]).abs().max()) for name in rbp)

    assert error(2e-4) / error(1e-4) == pytest.approx(2.0, rel=FIRST_ORDER)


@pytest.mark.parametrize("name", [*PROTOTYPICAL_NETS, *ARBITRARY])
def test_ep_is_not_that_gradient_elsewhere(name: str) -> None:
    net = (PROTOTYPICAL_NETS | ARBITRARY)[name]()
    x, y = batch(net)
    ep, rbp = exact_ep(net, x, y, 25), gradient(RBP(T=LONG, K=25, stop="settled"), net, x, y)
    largest = max(float((ep[name] - rbp[name]).abs().max() / rbp[name].abs().max()) for name in rbp)
    assert largest > NOT_EQUAL


def test_truncated_bptt_approaches_the_steady_gradient() -> None:
    """L against L*: more steps unrolled, less distance  [sec:loss-L-L*]."""
    net = energy_based(3)
    x, y = batch(net)
    free = settle(net, x)
    target = gradient(RBP(T=0, K=ENOUGH), net, x, y, free.state)
    distances = []
    for K in (1, 2, 5, 10, 20, 50, 100):
        bptt = gradient(BPTT(T=K, K=K), net, x, y, free.state)
        distances.append(sum(float((bptt[name] - target[name]).norm()) for name in target))
    assert all(later < earlier for earlier, later in pairwise(distances))
    assert distances[0] > 0.1
    assert distances[-1] < 1e-6 * distances[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("T", [7, 30])
def test_bptt_is_autograd_through_a_plain_loop(name: str, T: int) -> None:
    net = ALL[name]()
    x, y = batch(net)
    for K in (1, 3, T):
        s = relax(net, x, T - K).state
        for _ in range(K):
            s = net.transition(x, s)
        loss = 0.5 * (s[0] - y).square().sum() / len(x)
        names, parameters = zip(*net.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        bptt = gradient(BPTT(T=T, K=K), net, x, y)
        assert_close(bptt, dict(zip(names, grads, strict=True)), rtol=0.0, atol=SAME_FORMULA)


def test_bptt_truncates_to_exactly_k_steps() -> None:
    """Two steps reach the weights next to the input of a net three layers deep, one step does not."""
    net = prototypical(2)
    x, y = batch(net)
    assert float(gradient(BPTT(T=20, K=1), net, x, y)["W12"].abs().max()) == 0.0
    assert float(gradient(BPTT(T=20, K=2), net, x, y)["W12"].abs().max()) > 0.0


@pytest.mark.parametrize("estimator", [EP(T=20, K=5), BPTT(T=20, K=5), RBP(T=20, K=5)])
def test_backward_adds_to_grad_and_leaves_the_frozen_alone(estimator: Estimator) -> None:
    net = energy_based(2)
    x, y = batch(net)
    once = gradient(estimator, net, x, y)
    assert all(p.grad is None for p in net.parameters())
    net.W12.requires_grad_(False)
    net.b1.requires_grad_(False)
    estimator.backward(net, COST, x, y)
    estimator.backward(net, COST, x, y)
    assert net.W12.grad is None
    assert net.b1.grad is None
    for name in ("W01", "b0"):
        assert_close(net.get_parameter(name).grad, 2 * once[name], rtol=0.0, atol=SAME_FORMULA)


def test_rbp_stops_when_the_sum_is_complete() -> None:
    net = prototypical(2)
    x, y = batch(net)
    state = settle(net, x).state
    whole, early = (gradient(RBP(T=0, K=600, stop=stop), net, x, y, state) for stop in ("never", "settled"))
    assert_close(early, whole, rtol=0.0, atol=0.0)
    residuals = [RBP(T=0, K=K).gradient(net, COST, x, y, state)[0].adjoint_residual for K in (5, 20)]
    assert residuals[0] is not None
    assert residuals[1] is not None
    assert residuals[0].shape == (3,)
    assert bool((residuals[1] < residuals[0]).all())


@pytest.mark.parametrize("K", [1, 2, 3])
def test_an_adjoint_that_grows_as_it_spreads_is_none(K: int) -> None:
    """At rest in a net that attracts: the first terms may exceed the cost's own pull before they decay."""
    grown = 0
    for seed in range(40):
        net = Layered((10, 6, 14), "prototypical", "tanh", seed=seed, dtype=torch.float64)
        x, y = batch(net)
        free = settle(net, x)
        result, grads = RBP(T=0, K=K).gradient(net, COST, x, y, free.state)
        assert result.adjoint_residual is not None
        grown += bool((result.adjoint_residual > (free.state[0] - y).abs().amax(1)).any())
        assert_close(named(net, grads), gradient(BPTT(T=K, K=K), net, x, y, free.state), rtol=0.0, atol=EXACT_LIMIT)
    assert grown > 0 or K > 1


def test_a_growing_adjoint_is_an_error() -> None:
    """s -> 2 s has a fixed point at 0 that repels."""
    net = from_transition(lambda x, s, theta: (theta["a"] * s[0] + 0.0 * x,), {"a": torch.tensor([2.0])}, layers=(2,))
    x, y = torch.zeros(3, 2), torch.ones(3, 2)
    with pytest.raises(
        GrowingAdjointError,
        match=r"3 of 3 samples.*K=10.*expected it to decay, as at an attracting fixed point\. Raise T",
    ):
        RBP(T=5, K=10).backward(net, COST, x, y)
    assert net.a.grad is None
    unchecked, _ = RBP(T=5, K=10, checked=False).gradient(net, COST, x, y)
    assert unchecked.adjoint_residual is not None
    assert float(unchecked.adjoint_residual.min()) == 2.0**10


@pytest.mark.parametrize("estimator", [EP(T=41, K=5), BPTT(T=41, K=5), RBP(T=41, K=5)])
def test_an_alternating_free_phase_leads_to_the_same_gradient(estimator: Estimator) -> None:
    net = prototypical(3, "sigmoid")
    x, y = batch(net)
    longer = replace(estimator, T=301)
    assert_close(
        gradient(replace(longer, schedule="alternating"), net, x, y),
        gradient(longer, net, x, y),
        rtol=0.0,
        atol=EXACT_LIMIT,
    )


def test_bptt_unrolls_synchronously_from_the_alternating_state() -> None:
    net = prototypical(3)
    x, y = batch(net)
    start = relax(net, x, Phase(6, "alternating")).state
    assert_close(
        gradient(BPTT(T=10, K=4, schedule="alternating"), net, x, y),
        gradient(BPTT(T=4, K=4), net, x, y, start),
        rtol=0.0,
        atol=0.0,
    )


def test_ep_of_a_net_as_a_bare_transition_tends_to_that_of_its_primitive() -> None:
    """Step by step with dF/dtheta, or telescoped with dPhi/dtheta: they differ by an order of beta."""
    net = energy_based(2)
    x, y = batch(net)
    state = settle(net, x).state
    bare = from_transition(
        lambda x, s, theta: torch.func.functional_call(
            _Transition(net), {f"net.{n}": v for n, v in theta.items()}, (x, s)
        ),
        dict(net.named_parameters()),
        layers=(3, 5),
    )

    def distance(beta: float) -> float:
        # The bare transition knows no eps, so its beta is the other's beta times eps.
        plain = gradient(EP(T=0, K=20, beta=beta * net.eps), bare, x, y, state)
        telescoped = gradient(EP(T=0, K=20, beta=beta), net, x, y, state)
        return max(float((plain[name] - telescoped[name]).abs().max()) for name in plain)

    assert distance(2e-3) / distance(1e-3) == pytest.approx(2.0, rel=FIRST_ORDER)


class _Transition(torch.nn.Module):
    def __init__(self, net: Layered) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, s: State) -> State:
        return self.net.transition(x, s)
