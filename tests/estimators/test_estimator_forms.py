"""The forms of EP: each against its own limit, with the order of its bias; what each asks of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.nets import (
    F64,
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
from helpers.tolerances import HOLOMORPHIC, NOT_EQUAL, ORDER_IN_BETA, SAME_FORMULA, SETTLED_GRADIENT
from torch import Tensor
from torch.testing import assert_close

from eqprop import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Cost,
    Dynamics,
    Estimator,
    HolomorphicEP,
    SquaredError,
    from_energy,
    from_primitive,
    limit_steps,
    relax,
)
from eqprop.models import stack
from eqprop.state import State

COST = SquaredError()
K = 10


def own_phi(squash: Callable[[Tensor], Tensor] | None = None) -> Dynamics:
    """A Phi with sines and a fourth power, everything by automatic differentiation."""

    def phi(x: Tensor, s: State, theta: Any) -> Tensor:
        coupled = (torch.sin(s[1]) @ theta["W"].T * s[0]).sum(-1)
        return 0.4 * (coupled + (torch.tanh(x @ theta["V"].T) * s[1]).sum(-1)) - 0.05 * (s[0] ** 4).sum(-1)

    model = from_primitive(phi, {"W": random_like((2, 4), 0), "V": random_like((4, 3), 1)}, (2, 4), squash)
    model.input_shape = (3,)
    return model


ANALYTIC: dict[str, Callable[[], Dynamics]] = {
    "toy": toy,
    "EB depth 3": lambda: energy_based(3, "tanh"),
    "P depth 3": lambda: prototypical(3, "sigmoid"),
    "own Phi": own_phi,
    "own Phi squashed": lambda: own_phi(torch.tanh),
    "bare transition": asymmetric,
}
SMOOTH = ANALYTIC | {"conv": lambda: convolutional(activation="sigmoid")}


def gradient(
    form: Estimator, net: Dynamics, x: Tensor, y: Tensor, state: State, cost: Cost = COST
) -> dict[str, Tensor]:
    return named(net, form.gradient(net, cost, x, y, state)[1])


def limit(net: Dynamics, x: Tensor, y: Tensor, K: int = K, cost: Cost = COST) -> tuple[State, dict[str, Tensor]]:
    """The steady state, and EP's gradient there as beta -> 0, by forward mode."""
    free = settle(net, x)
    return free.state, {n: -g for n, g in sums(gather(limit_steps(net, cost, x, y, free, K))).items()}


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in b)


def errors(net: Dynamics, forms: list[Estimator]) -> list[float]:
    x, y = batch(net)
    state, target = limit(net, x, y)
    return [distance(gradient(form, net, x, y, state), target) for form in forms]


def test_the_order_in_beta_of_one_sided_and_symmetric_nudging() -> None:
    for name, build in SMOOTH.items():
        for nudging, order in (("one-sided", 1), ("symmetric", 2)):
            forms: list[Estimator] = [EP(0, K, beta=beta, nudging=nudging) for beta in (4e-3, 2e-3, 1e-3)]  # type: ignore[arg-type]
            for coarse, fine in pairwise(errors(build(), forms)):
                assert fine > 1e-12, (name, nudging)
                assert coarse / fine == pytest.approx(2.0**order, rel=ORDER_IN_BETA), (name, nudging)


@pytest.mark.parametrize("points", [2, 3, 4, 6])
def test_the_order_in_beta_of_holomorphic_ep_is_its_number_of_points(points: int) -> None:
    for name, build in ANALYTIC.items():
        coarse, fine = errors(build(), [HolomorphicEP(0, K, beta=beta, points=points) for beta in (0.06, 0.03)])
        assert fine > 1e-13, name
        assert coarse / fine == pytest.approx(2.0**points, rel=ORDER_IN_BETA), name


@pytest.mark.parametrize("name", ANALYTIC)
def test_the_bias_of_holomorphic_ep_is_exponentially_small_in_its_points(name: str) -> None:
    found = errors(ANALYTIC[name](), [HolomorphicEP(0, K, beta=0.1, points=n) for n in range(4, 25, 4)])
    for few, more in pairwise(found):
        assert more < 0.2 * few or more < HOLOMORPHIC
    assert found[0] > 1e-6
    assert found[-1] < HOLOMORPHIC


@pytest.mark.parametrize("name", ["toy", "EB depth 3", "own Phi"])
def test_holomorphic_ep_is_the_true_gradient_at_a_finite_beta(name: str) -> None:
    """Where F = dPhi/ds: against recurrent backprop at the steady state, and BPTT; symmetric EP is not there."""
    net = ANALYTIC[name]()
    x, y = batch(net)
    state = settle(net, x).state
    true = gradient(RBP(0, 150), net, x, y, state)
    assert distance(gradient(BPTT(150, 150), net, x, y, state), true) < SETTLED_GRADIENT
    assert distance(gradient(HolomorphicEP(0, 150, beta=0.1, points=24), net, x, y, state), true) < SETTLED_GRADIENT
    assert distance(gradient(EP(0, 150, beta=0.1, nudging="symmetric"), net, x, y, state), true) > 1e-6


@pytest.mark.parametrize("name", ANALYTIC)
def test_at_two_points_holomorphic_ep_is_symmetric_ep(name: str) -> None:
    net = ANALYTIC[name]()
    x, y = batch(net)
    state = relax(net, x, 15).state
    both = [HolomorphicEP(0, K, beta=0.2, points=2), EP(0, K, beta=0.2, nudging="symmetric")]
    one, other = (gradient(form, net, x, y, state) for form in both)
    assert_close(one, other, rtol=0.0, atol=SAME_FORMULA)


def test_what_moves_without_the_nudge_drops_out_of_both_but_not_of_one_sided_nudging() -> None:
    """Five free steps are not enough; the limit of the nudged phase is still that of a derivative along beta."""
    net = energy_based(3)
    x, y = batch(net)
    free = relax(net, x, 5)
    assert not bool(free.settled.any())
    target = {n: -g for n, g in sums(gather(limit_steps(net, COST, x, y, free, K))).items()}
    assert distance(gradient(EP(0, K, beta=1e-3), net, x, y, free.state), target) > 1.0
    assert distance(gradient(EP(0, K, beta=1e-3, nudging="symmetric"), net, x, y, free.state), target) < 1e-4
    assert distance(gradient(HolomorphicEP(0, K, points=24), net, x, y, free.state), target) < HOLOMORPHIC


@pytest.mark.parametrize("name", SMOOTH)
def test_the_mean_over_signs_is_the_symmetric_gradient(name: str) -> None:
    net = SMOOTH[name]()
    x, y = batch(net)
    state = relax(net, x, 25).state
    form = EP(0, K, beta=0.3, nudging="random-sign")
    plus, minus = (named(net, form.with_sign(sign).gradient(net, COST, x, y, state)[1]) for sign in (1.0, -1.0))
    mean = {n: 0.5 * (plus[n] + minus[n]) for n in plus}
    assert_close(mean, gradient(EP(0, K, beta=0.3, nudging="symmetric"), net, x, y, state), rtol=0.0, atol=SAME_FORMULA)
    assert_close(minus, gradient(EP(0, K, beta=-0.3), net, x, y, state), rtol=0.0, atol=0.0)
    assert_close(plus, gradient(form.with_sign(1), net, x, y, state), rtol=0.0, atol=0.0)


def test_stacked_networks_have_each_their_own_sign() -> None:
    nets = [prototypical(2, seed=seed) for seed in range(3)]
    pairs = [batch(net, seed=seed) for seed, net in enumerate(nets)]
    x, y = (torch.stack(v) for v in zip(*pairs, strict=True))
    form, signs = EP(20, 4, beta=0.2, nudging="random-sign"), torch.tensor([1.0, -1.0, -1.0], dtype=F64)
    together = stack(nets)
    free = form.with_sign(signs).backward(together, COST, x, y)
    for r, net in enumerate(nets):
        alone = gradient(form.with_sign(int(signs[r])), net, *pairs[r], net.init_state(pairs[r][0]))
        for name, g in alone.items():
            assert_close(together.get_parameter(name).grad[r], g, rtol=0.0, atol=SAME_FORMULA)  # type: ignore[index]
    steps = gather(form.with_sign(signs).steps(together, COST, x, y, free))
    total = {name: -g for name, g in sums(steps).items()}
    assert_close(total, {n: p.grad for n, p in together.named_parameters()}, rtol=0.0, atol=SAME_FORMULA)
    torch.manual_seed(0)
    form.gradient(together, COST, x, y)  # one drawn for each


@pytest.mark.parametrize("name", SMOOTH)
def test_continual_ep_tends_to_ep_in_the_first_order_of_the_rate(name: str) -> None:
    net = SMOOTH[name]()
    x, y = batch(net)
    state = settle(net, x).state
    target = gradient(EP(0, K, beta=0.1), net, x, y, state)
    assert distance(gradient(ContinualEP(0, K, beta=0.1, rates=0.0), net, x, y, state), target) < SAME_FORMULA
    found = [distance(gradient(ContinualEP(0, K, beta=0.1, rates=eta), net, x, y, state), target) for eta in ETAS]
    for coarse, fine in pairwise(found):
        assert fine > 1e-12
        assert coarse / fine == pytest.approx(2.0, rel=ORDER_IN_BETA)


ETAS = (4e-5, 2e-5, 1e-5)


def test_a_step_of_sgd_ends_where_continual_ep_moved_the_parameters() -> None:
    """Against the loop written out: every step of the second phase moves the parameters of a net of its own."""
    net = prototypical(3, "sigmoid")
    x, y = batch(net)
    rates = {name: 0.01 * (n + 1) for n, (name, _) in enumerate(net.named_parameters())}
    moving, beta = copy.deepcopy(net), 0.2
    s = relax(net, x, 30).state
    with torch.no_grad():
        for _ in range(K):
            new = moving.transition(x, s)
            new = (new[0] + beta * (y - s[0]), *new[1:])
            contrast = moving.contrast(x, new, s)
            for name, p in moving.named_parameters():
                p += rates[name] / beta * contrast[name]
            s = new
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    form = ContinualEP(30, K, beta=beta, rates=rates)
    form.backward(net, COST, x, y)
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name])  # until the optimizer moves it
    torch.optim.SGD([{"params": [p], "lr": rates[name]} for name, p in net.named_parameters()]).step()
    for name, p in net.named_parameters():
        assert_close(p, moving.get_parameter(name), rtol=0.0, atol=SAME_FORMULA)
        assert float((p.detach() - before[name]).abs().max()) > 1e-6


def test_continual_ep_asks_for_a_rate_of_every_parameter_that_learns() -> None:
    net = prototypical(2)
    x, y = batch(net)
    net.b0.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no rate for b1; got rates for W01, W12\. Give every trainable parameter"):
        ContinualEP(5, 3, rates={"W01": 0.1, "W12": 0.1}).backward(net, COST, x, y)
    ContinualEP(5, 3, rates={"W01": 0.1, "W12": 0.1, "b1": 0.0}).backward(net, COST, x, y)
    assert net.b0.grad is None


def conjugating() -> Dynamics:
    """|s|^2 by abs, as on the real axis s * s is."""

    def energy(x: Tensor, s: State, theta: Any) -> Tensor:
        return 0.5 * s[0].abs().pow(2).sum(-1) - (torch.tanh(s[0]) * (x @ theta["V"].T)).sum(-1)

    model = from_energy(energy, {"V": random_like((2, 3), 0)}, layers=(2,), eps=0.5)
    model.input_shape = (3,)
    return model


NOT_ANALYTIC: dict[str, tuple[Callable[[], Dynamics], str]] = {
    "clip": (lambda: energy_based(2, "sigmoid", clip=True), "clamp"),
    "hard sigmoid": (lambda: energy_based(2, "hard-sigmoid"), "clamp"),
    "max-pooling": (lambda: convolutional(activation="tanh"), "max_pool2d"),
    "rectified": (lambda: prototypical(2, torch.relu), "relu|clamp|complex"),
    "conjugation": (conjugating, "The primitive of energy with SquaredError is not analytic"),
    "conjugation inside sigma": (
        lambda: prototypical(2, lambda v: torch.tanh(v.real) + 0.0 * v),
        "The nudged step of Layered with SquaredError is not analytic",
    ),
}


@pytest.mark.parametrize("name", NOT_ANALYTIC)
def test_a_model_that_is_not_analytic_is_refused_in_words(name: str) -> None:
    build, why = NOT_ANALYTIC[name]
    net = build()
    x, y = batch(net)
    with pytest.raises(ValueError, match=f"(?s){why}.*Holomorphic EP needs an analytic model.*nudging='symmetric'"):
        HolomorphicEP(5, 3).backward(net, COST, x, y)
    assert all(p.grad is None and p.dtype == F64 for p in net.parameters())
    EP(5, 3, nudging="symmetric").backward(net, COST, x, y)
    ContinualEP(5, 3, rates=0.1).backward(net, COST, x, y)


def test_holomorphic_ep_on_a_prototypical_net_is_not_the_true_gradient() -> None:
    """What the circle removes is the bias of beta; the sigma' that EP lacks at the output stays."""
    net = prototypical(3)
    x, y = batch(net)
    state = settle(net, x).state
    true = gradient(RBP(0, 60), net, x, y, state)
    found = gradient(HolomorphicEP(0, 60, points=16), net, x, y, state)
    assert max(float((found[n] - true[n]).abs().max() / true[n].abs().max()) for n in true) > NOT_EQUAL
