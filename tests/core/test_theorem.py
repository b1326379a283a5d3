"""Theorem 1: at a steady state EP's updates tend to BPTT's gradients, step by step, neuron by neuron  [thm:main]."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.nets import (
    asymmetric,
    batch,
    bptt_processes,
    energy_based,
    ep_processes,
    gap,
    gradient_nets,
    groups,
    prototypical,
    relative_gap,
    settle,
    toy,
)
from helpers.tolerances import FIRST_ORDER, GDU_AT_SMALL_BETA, NOT_EQUAL, RELATIVE_AT_SMALL_BETA

from eqprop import EP, Dynamics, SquaredError

K = 12
NETS = gradient_nets()


@pytest.fixture(params=NETS, scope="module")
def net(request: pytest.FixtureRequest) -> Dynamics:
    return NETS[request.param]


def test_the_error_is_first_order_in_beta(net: Dynamics) -> None:
    x, y = batch(net)
    free = settle(net, x, keep=K)
    nabla = bptt_processes(net, x, y, free, K)
    errors = [gap(ep_processes(net, x, y, free, K, beta), nabla) for beta in (4e-3, 2e-3, 1e-3)]
    for coarse, fine in pairwise(errors):
        for group, error in coarse.items():
            assert error > 0.0
            assert error / fine[group] == pytest.approx(2.0, rel=FIRST_ORDER), group


def test_the_error_vanishes_with_beta(net: Dynamics) -> None:
    x, y = batch(net)
    free = settle(net, x, keep=K)
    nabla = bptt_processes(net, x, y, free, K)
    delta = ep_processes(net, x, y, free, K, 1e-6)
    assert max(gap(delta, nabla).values()) < GDU_AT_SMALL_BETA
    # Deep layers hear little of the target, so the gap must also be small beside the gradient itself.
    assert max(relative_gap(delta, nabla).values()) < RELATIVE_AT_SMALL_BETA


def test_every_step_matches_and_not_only_the_largest() -> None:
    net = toy()
    x, y = batch(net)
    free = settle(net, x, keep=K)
    delta, nabla = (groups(p) for p in (ep_processes(net, x, y, free, K, 1e-6), bptt_processes(net, x, y, free, K)))
    for name, value in nabla.items():
        for t in range(K):
            size = float(value[t].abs().max())
            # The hidden layer hears of the target one step later.
            assert (size > 0.0) == (t > 0 or name not in ("s1", "b1", "W1x"))
            allowed = RELATIVE_AT_SMALL_BETA * size or GDU_AT_SMALL_BETA
            assert float((delta[name][t] + value[t]).abs().max()) < allowed, (name, t)


def test_a_negative_beta_gives_the_same_limit_from_the_other_side() -> None:
    """The mean over +beta and -beta is of second order: its error quarters when beta halves."""
    net = energy_based(2)
    x, y = batch(net)
    free = settle(net, x, keep=K)
    nabla = groups(bptt_processes(net, x, y, free, K))
    errors = []
    for beta in (4e-2, 2e-2):
        plus, minus = (groups(ep_processes(net, x, y, free, K, b)) for b in (beta, -beta))
        errors.append(max(float((0.5 * (plus[n] + minus[n]) + nabla[n]).abs().max()) for n in nabla))
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=FIRST_ORDER)


def test_an_asymmetric_transition_fails() -> None:
    """No primitive, no theorem: the gap stays above one per cent however small beta is."""
    net = asymmetric()
    x, y = batch(net)
    free = settle(net, x, keep=K)
    nabla = bptt_processes(net, x, y, free, K)
    gaps = [relative_gap(ep_processes(net, x, y, free, K, beta), nabla) for beta in (1e-3, 1e-6)]
    for group in ("s1", "A", "B", "V"):
        assert min(gaps[0][group], gaps[1][group]) > NOT_EQUAL
        assert gaps[0][group] == pytest.approx(gaps[1][group], rel=1e-2)  # it does not shrink with beta


def test_the_output_slope_of_the_energy_based_net_is_needed() -> None:
    """Without sigma'(s0) the Jacobian is not symmetric, and the equality is lost by more than one per cent."""
    net = energy_based(2, output_slope=False)
    x, y = batch(net)
    free = settle(net, x, keep=K)
    gaps = relative_gap(ep_processes(net, x, y, free, K, 1e-6), bptt_processes(net, x, y, free, K))
    assert gaps["W01"] > NOT_EQUAL
    assert gaps["W12"] > NOT_EQUAL


def test_a_prototypical_net_only_approximates() -> None:
    net = prototypical(2)
    x, y = batch(net)
    free = settle(net, x, keep=K)
    gaps = relative_gap(ep_processes(net, x, y, free, K, 1e-6), bptt_processes(net, x, y, free, K))
    assert gaps["W01"] > NOT_EQUAL


def test_away_from_a_steady_state_the_theorem_does_not_hold() -> None:
    """Five steps are not enough: the free movement, divided by beta, swamps the updates."""
    net = energy_based(3)
    x, y = batch(net)
    ep = EP(T=5, K=K, beta=1e-6)
    free, _ = ep.gradient(net, SquaredError(), x, y)
    assert not bool(free.settled.any())
    first = next(ep.steps(net, SquaredError(), x, y, free))
    assert max(float(layer.abs().max()) for layer in first.neurons) > 1e3


def test_the_paper_scale_of_the_toy_model() -> None:
    """beta = 0.01 leaves a few per cent, in s1 most, as in the figure  [fig:toy-model]."""
    net = toy(eps=0.08)
    x, y = batch(net, samples=1)
    free = settle(net, x, keep=40)
    gaps = relative_gap(ep_processes(net, x, y, free, 40, 0.01), bptt_processes(net, x, y, free, 40))
    assert torch.tensor(list(gaps.values())).max() < 0.05
