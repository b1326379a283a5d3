"""The limit beta -> 0 taken exactly: equal to BPTT where F = dPhi/ds, and what it is everywhere else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.nets import (
    F64,
    asymmetric,
    batch,
    bptt_processes,
    convolutional,
    energy_based,
    ep_processes,
    gap,
    gather,
    gradient_nets,
    groups,
    limit_processes,
    prototypical_nets,
    random_like,
    relative_gap,
    settle,
    toy,
)
from helpers.tolerances import EXACT_LIMIT, FIRST_ORDER, NOT_EQUAL, SAME_FORMULA
from torch import Tensor
from torch.testing import assert_close

from eqprop import BPTT, Dynamics, FunctionCost, PrimitiveDynamics, SquaredError, from_primitive, limit_steps
from eqprop.cost import Problem
from eqprop.models import Layered
from eqprop.state import State

K = 12
GRADIENT_NETS = gradient_nets()
PROTOTYPICAL_NETS = prototypical_nets()


@pytest.mark.parametrize("name", GRADIENT_NETS)
def test_the_limit_is_bptt(name: str) -> None:
    net = GRADIENT_NETS[name]
    x, y = batch(net)
    free = settle(net, x, keep=K)
    delta, nabla = limit_processes(net, x, y, free, K), bptt_processes(net, x, y, free, K)
    assert max(gap(delta, nabla).values()) < EXACT_LIMIT


def test_the_limit_is_bptt_for_a_primitive_without_formulas() -> None:
    """Everything by automatic differentiation, a cost that sees every layer, layers of several dimensions."""

    def phi(x: Tensor, s: State, theta: Any) -> Tensor:
        s0, s1 = s
        inner = torch.einsum("bi,iop,bop->b", torch.sin(s0), theta["W"], torch.cos(s1))
        return 0.3 * (inner + (x @ theta["V"] * s1.flatten(1)).sum(-1) + s0.square().sum(-1) / 2)

    parameters = {"W": random_like((2, 3, 2), 0), "V": random_like((4, 6), 1)}
    net = from_primitive(phi, parameters, layers=(2, (3, 2)))
    cost = FunctionCost(lambda s, y: torch.cosh(s[0] - y).sum(-1) + s[1].pow(4).flatten(1).sum(-1))
    x, y = random_like((3, 4), 2), random_like((3, 2), 3)
    free = settle(net, x, keep=K)
    nabla = BPTT(T=K, K=K).processes(net, cost, x, y, free)
    delta = gather(limit_steps(net, cost, x, y, free, K))
    assert max(gap(delta, nabla).values()) < EXACT_LIMIT
    assert min(float(v.abs().max()) for v in groups(nabla).values()) > 1e6 * EXACT_LIMIT


@pytest.mark.parametrize("name", [name for name in PROTOTYPICAL_NETS if "depth 1" not in name])
def test_on_a_prototypical_net_the_limit_differs_by_the_output_slope(name: str) -> None:
    """Synapses see (DW)^t dl/ds in EP and (DW)^t D dl/ds in BPTT, D = diag sigma'  [exp:def-fc-p].

    So BPTT with the output's dl/ds divided by D at the output is EP, exactly; and without that the two differ.
    """
    net = PROTOTYPICAL_NETS[name]
    x, y = batch(net)
    free = settle(net, x, keep=K)
    delta, nabla = limit_processes(net, x, y, free, K), bptt_processes(net, x, y, free, K)
    gaps = relative_gap(delta, nabla)
    assert all(gaps[group] > NOT_EQUAL for group in delta.synapses), gaps

    jacobian, slopes = linearised(net, x, free.state)
    pull = torch.cat([layer.flatten(1) for layer in Problem(net, SquaredError(), x, y).pull(free.state)], 1)
    weights, D = jacobian / slopes.unsqueeze(-1), slopes  # J = D W, sample by sample
    assert_close(weights, weights.mT, rtol=1e-7, atol=1e-9)
    ep, bptt, seen = -pull, pull.clone(), slopes * pull
    for t in range(K):
        neurons = [torch.cat([layer[t].flatten(1) for layer in p.neurons], 1) for p in (delta, nabla)]
        assert_close(neurons[0], ep, rtol=0.0, atol=EXACT_LIMIT)  # (DW)^t dl/ds
        assert_close(neurons[1], bptt, rtol=0.0, atol=EXACT_LIMIT)  # (WD)^t dl/ds
        assert_close(D * neurons[1], seen, rtol=0.0, atol=EXACT_LIMIT)  # D (WD)^t dl/ds = (DW)^t D dl/ds
        for name, update in synapse_updates(net, x, free.state, ep).items():
            assert_close(delta.synapses[name][t], update, rtol=0.0, atol=EXACT_LIMIT)
        for name, update in synapse_updates(net, x, free.state, seen).items():
            assert_close(nabla.synapses[name][t], update, rtol=0.0, atol=EXACT_LIMIT)
        ep, seen = apply(jacobian, ep), apply(jacobian, seen)
        bptt = apply(jacobian.mT, bptt)


def linearised(net: Layered, x: Tensor, s: State) -> tuple[Tensor, Tensor]:
    """J = dF/ds (B, n, n) and D = sigma' (B, n) at s, both found without the library's estimators."""
    sizes = [layer.shape[1] for layer in s]

    def step(flat: Tensor, sample: Tensor) -> Tensor:
        with torch.enable_grad():
            layers = tuple(part.unsqueeze(0) for part in flat.split(sizes))
            return torch.cat([layer[0] for layer in net.transition(sample.unsqueeze(0), layers)])

    flat = torch.cat(s, 1)
    pairs = zip(flat, x, strict=True)
    jacobian = torch.stack(
        [torch.autograd.functional.jacobian(lambda f, one=one: step(f, one), row) for row, one in pairs]
    )
    with torch.no_grad():
        slopes = torch.cat([net.activation.slope(v) for v in net.gradient(net.drive(x), s)], 1)
    return jacobian, slopes


def apply(matrix: Tensor, v: Tensor) -> Tensor:
    return (matrix @ v.unsqueeze(-1)).squeeze(-1)


def synapse_updates(net: Layered, x: Tensor, s: State, signal: Tensor) -> dict[str, Tensor]:
    """The batch mean of signal^n s^{n+1}^T + s^n signal^{n+1}^T: d/dbeta of the products s^n s^{n+1}^T."""
    parts = signal.split([layer.shape[1] for layer in s], 1)
    out = {}
    for n, part in enumerate(parts):
        below = s[n + 1] if n + 1 < len(s) else x
        moved = part.T @ below
        if n + 1 < len(s):
            moved = moved + s[n].T @ parts[n + 1]
        out[f"W{n}{n + 1}"] = moved / len(x)
        out[f"b{n}"] = part.mean(0)
    return out


class NudgedInside(PrimitiveDynamics):
    """A prototypical net with the nudge inside sigma: s_{t+1} = sigma(W s_t - beta dl/ds)."""

    def __init__(self, inner: Layered) -> None:
        super().__init__()
        self.inner, self.input_shape = inner, inner.input_shape

    def init_state(self, x: Tensor) -> State:
        return self.inner.init_state(x)

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return self.inner.primitive(x, s)

    def step(self, drive: Tensor, s: State, push: Any = None) -> State:
        raw = self.autodiff_gradient(drive, s)
        moved = raw if push is None else tuple(v if p is None else v + p for v, p in zip(raw, push, strict=True))
        return self.inner.squash(moved)


def test_with_the_nudge_inside_sigma_the_synapses_agree_exactly() -> None:
    net = NudgedInside(PROTOTYPICAL_NETS["P depth 3 tanh"])
    x, y = batch(net)
    free = settle(net, x, keep=K)
    delta, nabla = limit_processes(net, x, y, free, K), bptt_processes(net, x, y, free, K)
    gaps = gap(delta, nabla)
    assert max(gaps[name] for name in delta.synapses) < EXACT_LIMIT
    assert relative_gap(delta, nabla)["s0"] > NOT_EQUAL  # for neurons it stays D nabla_s against Delta_s


@pytest.mark.parametrize("net", [asymmetric(), toy(), energy_based(3), prototypical_nets()["P depth 3 sigmoid"]])
def test_the_lemma_for_an_arbitrary_transition(net: Dynamics) -> None:
    """Delta_s(0) = -dl/ds, Delta_s(t+1) = J Delta_s(t), Delta_theta(t) = (dF/dtheta)^T Delta_s(t)  [lemma:ep].

    The nets that have a Phi stand here for their F alone, dF/dtheta being taken where F is sigma(dPhi/ds) too.
    """
    plain = Transition(net)
    x, y = batch(net)
    free = settle(plain, x)
    steps = list(limit_steps(plain, SquaredError(), x, y, free, K))
    pull = Problem(net, SquaredError(), x, y).pull(free.state)
    assert_close(steps[0].neurons, tuple(-p for p in pull), rtol=0.0, atol=SAME_FORMULA)
    for earlier, later in pairwise(steps):
        _, product = torch.autograd.functional.jvp(
            lambda *s: net.transition(x, s), free.state, earlier.neurons, strict=False
        )
        assert_close(later.neurons, product, rtol=0.0, atol=EXACT_LIMIT)
    for step in steps:
        out = net.transition(x, free.state)
        grads = torch.autograd.grad(out, list(net.parameters()), step.neurons, allow_unused=True, retain_graph=True)
        expected = {name: g / len(x) for (name, _), g in zip(net.named_parameters(), grads, strict=True)}
        assert_close(
            {n.removeprefix("net."): v for n, v in step.synapses.items()}, expected, rtol=0.0, atol=EXACT_LIMIT
        )


class Transition(Dynamics):
    """Any model seen as nothing but a transition: no primitive is left to telescope."""

    def __init__(self, net: Dynamics) -> None:
        super().__init__()
        self.net, self.input_shape = net, net.input_shape

    def init_state(self, x: Tensor) -> State:
        return self.net.init_state(x)

    def transition(self, x: Tensor, s: State) -> State:
        return self.net.transition(x, s)


@pytest.mark.parametrize("net", [toy(), energy_based(2, "sigmoid")])
def test_both_definitions_of_the_weight_update_coincide_in_the_limit(net: PrimitiveDynamics) -> None:
    """(1/beta) dF/dtheta^T (s' - s) against (1/beta) (dPhi/dtheta(s') - dPhi/dtheta(s))  [eq:ep-weight-update-2]."""
    x, y = batch(net)
    free = settle(net, x, keep=K)
    by_transition = limit_processes(Transition(net), x, y, free, K)
    by_primitive = limit_processes(net, x, y, free, K)
    for name, update in by_primitive.synapses.items():
        assert_close(by_transition.synapses[f"net.{name}"], update, rtol=0.0, atol=EXACT_LIMIT)


def test_an_asymmetric_transition_fails_in_the_limit_too() -> None:
    net = asymmetric()
    x, y = batch(net)
    free = settle(net, x, keep=K)
    gaps = relative_gap(limit_processes(net, x, y, free, K), bptt_processes(net, x, y, free, K))
    assert gaps["s0"] > NOT_EQUAL
    assert min(gaps[name] for name in ("A", "B", "V")) > NOT_EQUAL


@pytest.mark.parametrize(
    "net",
    [
        toy(),
        energy_based(3, "sigmoid"),
        prototypical_nets()["P depth 2 tanh"],
        asymmetric(),
        convolutional(activation="tanh"),
    ],
    ids=["toy", "EB", "P", "asymmetric", "conv"],
)
def test_finite_beta_tends_to_the_limit_on_every_kind_of_net(net: Dynamics) -> None:
    x, y = batch(net)
    free = settle(net, x, keep=6)
    limit = groups(limit_processes(net, x, y, free, 6))

    def distance(beta: float) -> float:
        finite = groups(ep_processes(net, x, y, free, 6, beta))
        return max(float((finite[name] - limit[name]).abs().max()) for name in limit)

    coarse, fine = distance(2e-4), distance(1e-4)
    assert coarse / fine == pytest.approx(2.0, rel=FIRST_ORDER)
    assert fine < 1e-2


def test_a_clip_stops_the_neurons_it_holds() -> None:
    """A neuron held at the edge of [0, 1] by the projection neither moves in EP nor passes on BPTT's gradient."""
    net = energy_based(2, "hard-sigmoid", clip=True, init=lambda name, shape, source: -torch.ones(shape, dtype=F64))
    x, y = batch(net)
    free = settle(net, x, keep=K)
    assert float(free.state[1].max()) == 0.0  # every input of the hidden layer is negative
    delta, nabla = limit_processes(net, x, y, free, K), bptt_processes(net, x, y, free, K)
    assert float(delta.neurons[1].abs().max()) == 0.0
    assert float(nabla.synapses["W12"].abs().max()) == float(delta.synapses["W12"].abs().max()) == 0.0


def test_the_limit_needs_no_gradient_mode() -> None:
    net = energy_based(2)
    x, y = batch(net)
    free = settle(net, x, keep=3)
    expected = limit_processes(net, x, y, free, 3)
    with torch.no_grad():
        assert_close(limit_processes(net, x, y, free, 3).synapses, expected.synapses)
    assert torch.is_grad_enabled()
