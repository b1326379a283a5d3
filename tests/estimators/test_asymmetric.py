"""Vector-field EP, AsymEP and dyadic EP against the exact gradient of nets whose Jacobian is not symmetric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.nets import F64, asymmetric, batch, energy_based, named, prototypical, random_like, settle
from helpers.tolerances import NOT_EQUAL, ORDER_IN_BETA, SAME_FORMULA
from torch import Tensor
from torch.testing import assert_close

from eqprop import RBP, Dynamics, Estimator, Relaxation, SquaredError, from_transition, relax
from eqprop.estimators import Backprop
from eqprop.estimators.asymmetric import AsymEP, VectorField
from eqprop.estimators.dyadic import Dyadic
from eqprop.models import Dense, Network
from eqprop.state import State

COST = SquaredError()
ENOUGH = 200
"""Second-phase steps after which nothing here changes any more."""
NETS: dict[str, Callable[[], Dynamics]] = {
    "asymmetric": asymmetric,
    "strongly coupled": lambda: asymmetric(1.5),
    "P": lambda: prototypical(2, "sigmoid"),
    "P nudged inside": lambda: prototypical(3, "tanh", nudge_site="inside"),
    "EB": lambda: energy_based(3, "sigmoid"),
}


def gradient(estimator: Estimator, net: Dynamics, x: Tensor, y: Tensor, free: Relaxation) -> dict[str, Tensor]:
    return named(net, estimator.gradient(net, COST, x, y, free.state)[1])


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """|a - b| / |b| over all parameters."""
    gap, size = (torch.cat([v.flatten() for v in each]) for each in ([a[n] - b[n] for n in b], list(b.values())))
    return float(gap.norm() / size.norm())


@pytest.mark.parametrize("name", NETS)
def test_asym_ep_and_dyadic_are_the_exact_gradient_at_rest(name: str) -> None:
    net = NETS[name]()
    x, y = batch(net)
    free = settle(net, x)
    exact = gradient(RBP(0, ENOUGH), net, x, y, free)
    assert apart(gradient(Dyadic(0, ENOUGH), net, x, y, free), exact) < SAME_FORMULA
    error = [apart(gradient(AsymEP(0, ENOUGH, beta=beta), net, x, y, free), exact) for beta in (2e-3, 1e-3)]
    assert error[1] < 1e-5
    if error[1] > 1e-10:  # below, rounding
        assert error[0] / error[1] == pytest.approx(4.0, rel=ORDER_IN_BETA)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_asym_ep_of_one_sign_is_of_first_order(sign: float) -> None:
    net = asymmetric()
    x, y = batch(net)
    free = settle(net, x)
    exact = gradient(RBP(0, ENOUGH), net, x, y, free)
    one, half = (
        apart(gradient(AsymEP(0, ENOUGH, beta=sign * beta, centered=False), net, x, y, free), exact)
        for beta in (2e-3, 1e-3)
    )
    assert one / half == pytest.approx(2.0, rel=ORDER_IN_BETA)


def field(asymmetry: float) -> Dynamics:
    """F = 0.1 tanh s + (S + asymmetry N) s + V x with S symmetric and N antisymmetric: J - J^T = 2 asymmetry N."""
    a = 0.2 * random_like((6, 6), 1)

    def transition(x: Tensor, s: State, theta: Any) -> State:
        v = torch.cat(s, -1)
        return torch.split(0.1 * torch.tanh(v) + v @ theta["W"].T + x @ theta["V"].T, (2, 4), -1)

    parameters = {"W": 0.5 * (a + a.T) + 0.5 * asymmetry * (a - a.T), "V": random_like((6, 3), 2)}
    return from_transition(transition, parameters, layers=(2, 4), input_shape=(3,))


def test_the_bias_of_the_vector_field_grows_with_the_asymmetry() -> None:
    errors = []
    for asymmetry in (0.0, 0.1, 0.2, 0.4, 0.8):
        net = field(asymmetry)
        x, y = batch(net)
        free = settle(net, x)
        exact = gradient(RBP(0, ENOUGH), net, x, y, free)
        errors.append(apart(gradient(VectorField(0, ENOUGH, beta=1e-4), net, x, y, free), exact))
        assert apart(gradient(AsymEP(0, ENOUGH, beta=1e-4), net, x, y, free), exact) < 1e-7
    assert errors[0] < 1e-7
    assert errors[1] > NOT_EQUAL
    assert errors == sorted(errors)
    assert errors[2] / errors[1] == pytest.approx(2.0, rel=0.2)  # of first order in J - J^T


def test_symmetric_weights_do_not_make_the_jacobian_symmetric() -> None:
    """F = tanh(W s + V x): J = diag(tanh') W."""
    a = 0.3 * random_like((6, 6), 1)

    def transition(x: Tensor, s: State, theta: Any) -> State:
        return torch.split(torch.tanh(torch.cat(s, -1) @ theta["W"].T + x @ theta["V"].T), (2, 4), -1)

    net = from_transition(transition, {"W": a + a.T, "V": random_like((6, 3), 2)}, layers=(2, 4), input_shape=(3,))
    x, y = batch(net)
    free = settle(net, x)
    exact = gradient(RBP(0, ENOUGH), net, x, y, free)
    assert apart(gradient(VectorField(0, ENOUGH, beta=1e-4), net, x, y, free), exact) > NOT_EQUAL


def test_dyadic_is_recurrent_backprop_at_rest_and_not_before() -> None:
    net = asymmetric()
    x, y = batch(net)
    rest, moving = settle(net, x), relax(net, x, 1)
    for K in (1, 3, 8):
        there, exact = (gradient(e(0, K), net, x, y, rest) for e in (Dyadic, RBP))
        assert_close(there, exact, rtol=SAME_FORMULA, atol=SAME_FORMULA)
    assert apart(*(gradient(e, net, x, y, moving) for e in (Dyadic(0, 8), RBP(0, 8, checked=False)))) > NOT_EQUAL


def test_asym_ep_with_feedback_zero_is_backprop() -> None:
    """784-256-10 in small: the second phase of a feed-forward net."""
    parameters = {"A": random_like((3, 8), 1), "V": random_like((8, 6), 2)}

    def transition(x: Tensor, s: State, theta: Any) -> State:
        return s[1] @ theta["A"].T, torch.tanh(x @ theta["V"].T)

    net = from_transition(transition, parameters, layers=(3, 8), input_shape=(6,))
    x, y = random_like((5, 6), 3), torch.eye(3, dtype=F64)[[0, 1, 2, 0, 1]]
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    out = torch.tanh(x @ leaves["V"].T) @ leaves["A"].T
    loss = 0.5 * (out - y).square().sum(-1).mean()
    exact = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for estimator in (AsymEP(2, 2, beta=1e-3), Dyadic(2, 2)):
        found = named(net, estimator.gradient(net, COST, x, y)[1])
        for name, g in exact.items():
            assert float(torch.cosine_similarity(found[name].flatten(), g.flatten(), dim=0)) > 0.999999
    with pytest.raises(ValueError, match="no forward pass"):
        Backprop().gradient(net, COST, x, y)


def test_a_graph_without_feedback_is_its_feed_forward_twin() -> None:
    """Whether the gain of the way back is 0, or weights of its own are: every weight but those gets backprop's."""
    for link in (Dense("h", "out", feedback_gain=0.0), Dense("h", "out", untied=True)):
        net = Network(6, {"out": 3, "h": 9}, [Dense("x", "h"), link], "tanh", seed=0, dtype=F64)
        back = dict(net.named_parameters()).get("B_out_h")
        if back is not None:
            torch.nn.init.zeros_(back)
        x, y = batch(net)
        exact = named(net, Backprop().gradient(net, COST, x, y)[1])
        for estimator in (AsymEP(2, 2, beta=1e-3), Dyadic(2, 2)):
            found = named(net, estimator.gradient(net, COST, x, y)[1])
            for name in exact.keys() - {"B_out_h"}:
                cosine = torch.cosine_similarity(found[name].flatten(), exact[name].flatten(), dim=0)
                assert float(cosine) > 0.999999
        # Weights that begin at 0 do not stay there.
        assert back is None or float(found["B_out_h"].abs().max()) > NOT_EQUAL


def test_sweeps_end_at_the_same_gradient() -> None:
    net = prototypical(3, "tanh")
    x, y = batch(net)
    free = settle(net, x)
    for kind in (AsymEP, Dyadic, VectorField):
        one, other = (gradient(kind(0, 400, schedule=s), net, x, y, free) for s in ("synchronous", "sweeps"))
        assert_close(one, other, rtol=1e-9, atol=1e-9)
