"""Gains and untied ways back: what the step becomes, and that the one-sided update is the gradient as gains vanish."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.nets import random_like
from torch import Tensor
from torch.testing import assert_close

from eqprop import EP, CrossEntropy, relax
from eqprop.autodiff import leaf
from eqprop.cost import Nudge
from eqprop.data import one_hot
from eqprop.estimators import Backprop
from eqprop.estimators.base import minus_sum
from eqprop.models import Convolutional, Dense, Layered, Network
from eqprop.models.predictive import PredictiveCoding

F64 = torch.float64


def chain(gain: float, depth: int = 4, untied: bool = False) -> Network:
    layers = {f"s{n}": 6 for n in range(depth)}
    links = [Dense("x", f"s{depth - 1}")]
    links += [Dense(f"s{n + 1}", f"s{n}", feedback_gain=gain, untied=untied) for n in range(depth - 1)]
    return Network(5, layers, links, "tanh", nudge_site="inside", bias=True, init="glorot", seed=0, dtype=F64)


def data() -> tuple[Tensor, Tensor]:
    return random_like((8, 5), 0), one_hot(torch.arange(8) % 3, 3, dtype=F64)


def test_a_step_weighs_each_way() -> None:
    net, x = chain(0.25, 2, untied=True), data()[0]
    s = tuple(random_like((8, 6), n) for n in (1, 2))
    with torch.no_grad():
        out, hidden = net.transition(x, s)
        assert_close(out, torch.tanh(s[1] @ net.W01.T + net.b0))
        assert_close(hidden, torch.tanh(0.25 * s[0] @ net.B01 + x @ net.W1x.T + net.b1))
        assert not torch.equal(net.B01, net.W01)
    assert [p.weights for p in net.layer_parameters] == [("W01", "B01"), ("W1x",)]


def test_equal_gains_have_a_phi_and_others_have_none() -> None:
    link = Dense("h", "out", forward_gain=0.5, feedback_gain=0.5)
    net = Network(5, {"out": 3, "h": 6}, [Dense("x", "h"), link], "tanh", seed=0, dtype=F64)
    s, other = (tuple(random_like((8, n), k + seed) for k, n in enumerate((3, 6))) for seed in (1, 5))
    x = data()[0]
    assert net.conservative
    assert_close(net.gradient(net.drive(x), s), net.autodiff_gradient(x, s))
    assert_close(net.contrast(x, s, other), net.autodiff_contrast(x, s, other))
    lopsided = chain(0.1)
    assert not lopsided.conservative
    with pytest.raises(ValueError, match="has no Phi"):
        lopsided.primitive(x, lopsided.init_state(x))


@pytest.mark.parametrize("untied", [False, True])
def test_the_scale_of_a_layer_is_the_product_of_gains_on_the_strongest_way(untied: bool) -> None:
    net = chain(0.1, untied=untied)
    assert_close(torch.tensor(net.update_scales), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    links = [Dense("x", "c"), Dense("c", "b", feedback_gain=0.1), Dense("b", "a", feedback_gain=0.1)]
    skipping = Network(5, {"a": 4, "b": 4, "c": 4}, [*links, Dense("c", "a", feedback_gain=0.5)], "tanh")
    assert_close(torch.tensor(skipping.update_scales), torch.tensor([1.0, 0.1, 0.5]))  # not forward, from c to b


def test_the_one_sided_update_tends_to_backprop_as_the_gain_falls() -> None:
    """Divided by the gains it has the size of the gradient too; its error is of the order of the gain, not less."""
    x, y = data()
    errors = []
    for gain in (1e-2, 1e-3):
        net = chain(gain)
        cost = CrossEntropy(6, 3, seed=0, dtype=F64)
        exact = Backprop().gradient(net, cost, x, y)[1]
        ep = EP(200, 40, beta=gain, form="difference", held=True)
        found = ep.gradient(net, cost, x, y)[1]
        assert found.keys() == exact.keys()
        errors.append(max(float((found[p] - g).norm() / g.norm()) for p, g in exact.items()))
    assert errors[1] < 0.02
    assert 5.0 < errors[0] / errors[1] < 20.0


def test_at_gain_one_it_is_not_backprop() -> None:
    x, y = data()
    net, cost = chain(0.9999999), CrossEntropy(6, 3, seed=0, dtype=F64)
    exact = Backprop().gradient(net, cost, x, y)[1]
    found = EP(400, 60, beta=0.01, form="difference", held=True).gradient(net, cost, x, y)[1]
    assert max(float((found[p] - g).norm() / g.norm()) for p, g in exact.items()) > 0.1


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [{}, {"nudging": "symmetric"}, {"nudging": "symmetric", "form": "difference"}, {"schedule": "sweeps"}],
    ids=lambda chosen: "-".join(chosen.values()) or "plain",
)
def test_the_updates_of_the_steps_add_up_to_the_gradient(chosen: dict[str, Any], untied: bool) -> None:
    x, y = data()
    net, cost = chain(0.3, untied=untied), CrossEntropy(6, 3, seed=0, dtype=F64)
    ep = EP(30, 12, beta=0.3, **chosen)
    free, grads = ep.gradient(net, cost, x, y)
    total = minus_sum(ep.steps(net, cost, x, y, free))
    assert_close([total[name] for name in total], [grads[net.get_parameter(name)] for name in total])


@pytest.mark.parametrize("engine", ["eager", "xla"])
def test_symmetric_nudging_errs_by_the_square_of_beta_without_a_phi_too(engine: str) -> None:
    """Halving beta quarters what separates it from its limit: pre-activities are those of the free phase's end."""
    if engine == "xla":
        pytest.importorskip("jax")
    x, y = data()
    net, cost = chain(0.5, 2, untied=True), CrossEntropy(6, 3, seed=0, dtype=F64)

    def gradient(beta: float) -> Tensor:
        net.zero_grad()
        EP(200, 60, beta=beta, nudging="symmetric").backward(net, cost, x, y, engine=engine)
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    far, near, limit = gradient(0.2), gradient(0.1), gradient(1e-3)
    assert 3.8 < float((far - limit).norm() / (near - limit).norm()) < 4.2


def test_an_untied_way_back_learns_by_how_far_its_end_moved() -> None:
    x, y = data()
    net, cost = chain(0.5, 2, untied=True), CrossEntropy(6, 3, seed=0, dtype=F64)
    free = relax(net, x, 500).state
    ep = EP(1, 12, beta=0.1, form="difference")
    grads = ep.gradient(net, cost, x, y, free)[1]
    rest = relax(net, x, 1, free).state
    nudged = relax(net, x, 12, rest, Nudge(cost, y, 0.1)).state
    moved = tuple(a - b for a, b in zip(nudged, rest, strict=True))
    assert_close(grads[net.W01], -(moved[0].T @ rest[1]) / 8 / 0.1, rtol=1e-8, atol=1e-12)
    assert_close(grads[net.B01], -0.5 * (rest[0].T @ moved[1]) / 8 / 0.1 / 0.5, rtol=1e-8, atol=1e-12)


def test_feedback_begins_at_its_angle() -> None:
    """B = sin a R + cos a W: at 0 degrees the weights of the way there, at 90 others."""
    nets = {a: Layered((10, 8, 12), "prototypical", "tanh", untied=True, feedback_angle=a, seed=0) for a in (0, 60, 90)}
    weight, rest = nets[0].get_parameter("W01"), nets[90].get_parameter("B01")
    assert torch.equal(nets[0].get_parameter("B01"), weight)
    assert not torch.allclose(rest, weight)
    torch.testing.assert_close(nets[60].get_parameter("B01"), math.sqrt(0.75) * rest + 0.5 * weight)


def test_an_untied_convolution_comes_back_through_the_maxima_of_its_way_there() -> None:
    net = Convolutional((1, 10, 10), (3, 2), (4,), "tanh", kernel=3, untied=True, seed=0, dtype=F64)
    x = random_like((5, 1, 10, 10), 0)
    rest = relax(net, x, 30).state
    plus = tuple(v + 0.1 * random_like(tuple(v.shape), n) for n, v in enumerate(rest))
    assert [p.weights for p in net.layer_parameters] == [("Wfc01", "Bfc01"), ("Wconv01", "Bconv01"), ("Wconv12",)]

    weight, back = net.get_parameter("Wconv01"), net.get_parameter("Bconv01")
    z = leaf(torch.nn.functional.conv2d(rest[2], weight, net.get_parameter("bconv0")))
    (spread,) = torch.autograd.grad(torch.nn.functional.max_pool2d(z, 2), z, rest[1])
    returned = torch.nn.functional.conv_transpose2d(spread, back)
    with torch.no_grad():
        assert_close(net.transition(x, rest)[2], torch.tanh(net.drive(x)[2] + returned))  # type: ignore[operator]
        found = net.contrast(x, plus, rest)
    (wanted,) = torch.autograd.grad((returned * (plus[2] - rest[2])).sum() / 5, back)
    assert_close(found["Bconv01"], wanted)


def test_a_predictive_net_refuses_a_way_back_of_its_own() -> None:
    links = [Dense("x", "s1"), Dense("s1", "s0", untied=True)]
    with pytest.raises(ValueError, match="comes back by the derivative"):
        PredictiveCoding(5, {"s0": 3, "s1": 4}, links, "tanh")
