"""The nudge inside sigma: on nets with a squash EP's synapses then follow BPTT's exactly, which they do not outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers.nets import (
    batch,
    bptt_processes,
    convolutional,
    ep_processes,
    gap,
    limit_processes,
    named,
    prototypical,
    random_like,
    relative_gap,
    settle,
)
from helpers.tolerances import FIRST_ORDER, NOT_EQUAL, SAME_FORMULA, SYMMETRIC_EP
from torch import Tensor
from torch.testing import assert_close

from eqprop import BPTT, EP, PrimitiveDynamics, Processes, SquaredError, from_primitive
from eqprop.state import State

K = 12


def softmax_net(nudge: Any) -> PrimitiveDynamics:
    """A squash that mixes the neurons of a layer, its derivative being symmetric all the same."""

    def phi(x: Tensor, s: State, theta: Mapping[str, Tensor]) -> Tensor:
        return (s[1] @ theta["W"].T * s[0]).sum(-1) + (x @ theta["V"].T * s[1]).sum(-1)

    parameters = {"W": 2.0 * random_like((3, 4), 0), "V": random_like((4, 5), 1)}
    model = from_primitive(phi, parameters, (3, 4), squash=lambda v: torch.softmax(v, -1), nudge_site=nudge)
    model.input_shape = (5,)
    return model


NETS: dict[str, Callable[[Any], PrimitiveDynamics]] = {
    **{
        f"P depth {depth} {sigma}": lambda nudge, depth=depth, sigma=sigma: prototypical(depth, sigma, nudge_site=nudge)
        for depth in (1, 2, 3, 4)
        for sigma in ("tanh", "sigmoid")
    },
    "P without biases": lambda nudge: prototypical(3, bias=False, nudge_site=nudge),
    "conv": lambda nudge: convolutional(activation="tanh", nudge_site=nudge),
    "conv deeper": lambda nudge: convolutional(activation="sigmoid", flat=(3, 4), nudge_site=nudge),
    "own Phi, softmax": softmax_net,
}


def both(build: Callable[[Any], PrimitiveDynamics], nudge: str) -> tuple[Processes, Processes]:
    """EP's processes in the exact limit beta -> 0, and BPTT's."""
    net = build(nudge)
    x, y = batch(net)
    free = settle(net, x, keep=K)
    return limit_processes(net, x, y, free, K), bptt_processes(net, x, y, free, K)


@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
def test_inside_the_synapse_processes_are_those_of_bptt(build: Callable[[Any], PrimitiveDynamics]) -> None:
    delta, nabla = both(build, "inside")
    gaps = gap(delta, nabla)
    assert max(gaps[name] for name in nabla.synapses) < SAME_FORMULA
    assert all(float(value.abs().max()) > 1e-4 for value in nabla.synapses.values())


@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
def test_outside_they_are_not(build: Callable[[Any], PrimitiveDynamics]) -> None:
    delta, nabla = both(build, "outside")
    gaps = relative_gap(delta, nabla)
    assert min(gaps[name] for name in nabla.synapses) > NOT_EQUAL


@pytest.mark.parametrize("sigma", ["tanh", "sigmoid"])
def test_inside_the_neurons_carry_sigma_prime_times_bptt(sigma: str) -> None:
    """Delta_s(t) = -D nabla_s(t): what is left between the two, and all that is."""
    net = prototypical(3, sigma, nudge_site="inside")
    x, y = batch(net)
    free = settle(net, x, keep=K)
    delta, nabla = limit_processes(net, x, y, free, K), bptt_processes(net, x, y, free, K)
    with torch.no_grad():
        slopes = [net.activation.slope(v) for v in net.gradient(net.drive(x), free.state)]
    for d, n, slope in zip(delta.neurons, nabla.neurons, slopes, strict=True):
        assert_close(d, -slope * n, rtol=0.0, atol=SAME_FORMULA)
        assert float((d + n).abs().max()) > NOT_EQUAL * float(n.abs().max())


def test_the_error_at_finite_beta_is_of_first_order() -> None:
    net = prototypical(3, nudge_site="inside")
    x, y = batch(net)
    free = settle(net, x, keep=K)
    nabla = bptt_processes(net, x, y, free, K)

    def error(beta: float) -> float:
        gaps = gap(ep_processes(net, x, y, free, K, beta), nabla)
        return max(gaps[name] for name in nabla.synapses)

    assert error(2e-4) / error(1e-4) == pytest.approx(2.0, rel=FIRST_ORDER)


def test_inside_ep_finds_the_gradient_of_the_loss_and_outside_it_does_not() -> None:
    for nudge, right in (("inside", True), ("outside", False)):
        net = prototypical(3, nudge_site=nudge)
        x, y = batch(net)
        state = settle(net, x).state
        one, other = (EP(T=0, K=100, beta=b).gradient(net, SquaredError(), x, y, state)[1] for b in (1e-4, -1e-4))
        ep = named(net, {p: 0.5 * (g + other[p]) for p, g in one.items()})
        true = named(net, BPTT(T=100, K=100).gradient(net, SquaredError(), x, y, state)[1])
        for name, g in true.items():
            error = float((ep[name] - g).abs().max())
            assert error < SYMMETRIC_EP if right else error > NOT_EQUAL * float(g.abs().max())


def test_the_free_phase_and_bptt_do_not_see_where_the_nudge_is() -> None:
    for estimator in (BPTT(T=20, K=5), BPTT(T=20, K=20)):
        found = []
        for nudge in ("inside", "outside"):
            net = prototypical(3, nudge_site=nudge)
            found.append(named(net, estimator.gradient(net, SquaredError(), *batch(net))[1]))
        assert_close(found[0], found[1], rtol=0.0, atol=0.0)
