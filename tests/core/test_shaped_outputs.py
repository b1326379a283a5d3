"""Outputs with several dimensions: l is the sum over all but the samples, in every estimator and factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.nets import F64, named, random_like
from helpers.tolerances import FLOAT32, SAME_FORMULA
from torch import Tensor
from torch.testing import assert_close

from eqprop import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Estimator,
    FunctionCost,
    HolomorphicEP,
    PrimitiveDynamics,
    SquaredError,
    from_primitive,
)
from eqprop.engines import Job, load_engine
from eqprop.models import Conv, Network, stack

SHAPE = (2, 3, 2)
ESTIMATORS = [
    EP(9, 4, 0.2),
    EP(9, 4, 0.2, nudging="symmetric"),
    ContinualEP(9, 4, 0.2, rates=0.01),
    HolomorphicEP(9, 4, 0.2, points=3),
    BPTT(9, 4),
    RBP(9, 4, checked=False),
]


def made(shape: tuple[int, ...]) -> PrimitiveDynamics:
    """Twelve outputs that see each other and the input, laid out as told."""

    def phi(x: Tensor, s: Any, theta: Any) -> Tensor:
        v = s[0].flatten(1)
        return 0.5 * (v * torch.tanh(v @ theta["W"])).sum(-1) + (v * (x @ theta["V"])).sum(-1)

    parameters = {"W": random_like((12, 12), 1, -0.3, 0.3), "V": random_like((5, 12), 2)}
    return from_primitive(phi, parameters, [shape], torch.sigmoid)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_the_gradient_is_that_of_the_outputs_in_a_row(estimator: Estimator) -> None:
    x, y, flat, shaped = random_like((4, 5), 3), random_like((4, 12), 4), made((12,)), made(SHAPE)
    _, row = estimator.gradient(flat, SquaredError(), x, y)
    free, found = estimator.gradient(shaped, SquaredError(), x, y.view(4, *SHAPE))
    assert_close(named(shaped, found), named(flat, row), rtol=SAME_FORMULA, atol=SAME_FORMULA)
    assert free.state[0].shape == (4, *SHAPE)


def test_the_loss_has_one_value_per_sample() -> None:
    s, y = random_like((4, 12), 1), random_like((4, 12), 2)
    folded = s.view(4, *SHAPE), y.view(4, *SHAPE)
    assert_close(SquaredError()((folded[0],), folded[1]), SquaredError()((s,), y))
    stacked = SquaredError()((s.view(2, 2, 12),), y.view(2, 2, 12), sample_dims=2)
    assert_close(stacked, SquaredError()((s,), y).view(2, 2))


@pytest.mark.parametrize("summed", [-1, (-1, -2), (-1, -2, -3)])
def test_a_cost_of_theta_gets_the_factor_of_its_samples(summed: Any) -> None:
    """Whatever part of the outputs the cost itself sums over."""

    def loss(s: Any, y: Tensor, theta: Any) -> Tensor:
        return (0.5 * (s[0] - y).square() + theta["W"].square().mean()).sum(summed)

    x, y, model = random_like((4, 5), 3), random_like((4, *SHAPE), 4), made(SHAPE)
    _, grads = BPTT(5, 3).gradient(model, FunctionCost(loss, parametric=True), x, y)
    _, without = BPTT(5, 3).gradient(model, SquaredError(), x, y)
    W = model.get_parameter("W").detach()
    expected = named(model, without)["W"] + 12 * 2 * W / W.numel()
    assert_close(named(model, grads)["W"], expected, rtol=SAME_FORMULA, atol=SAME_FORMULA)


@pytest.mark.parametrize("networks", [None, 2])
def test_a_net_whose_output_is_an_image_trains(networks: int | None) -> None:
    nets = [
        Network((1, 4, 4), {"image": (2, 4, 4)}, [Conv("x", "image", kernel=3, padding=1)], "sigmoid", seed=n)
        for n in range(networks or 1)
    ]
    model = nets[0] if networks is None else stack(nets)
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.cat([x, 1.0 - x], 1)
    job = Job(
        model,
        SquaredError(),
        EP(4, 3, 0.5),
        torch.optim.SGD(model.parameters(), lr=0.05),
        x,
        y,
        y.flatten(1).argmax(-1),
        networks,
    )
    runner = load_engine("eager").runner(job)
    order = torch.arange(6).expand(40, 6) if networks is None else torch.arange(6).expand(40, networks, 6)
    runner.run(order[:1])
    first = runner.tally.read()
    assert first["samples"] == [6.0] * (networks or 1)
    one = nets[0]
    expected = Network((1, 4, 4), {"image": (2, 4, 4)}, list(one.connections), "sigmoid", seed=0)
    once = SquaredError()((expected(x),), y).sum()
    assert first["loss"][0] == pytest.approx(float(once), rel=FLOAT32)
    runner.reset()
    runner.run(order)
    assert all(b < 0.8 * 40 * a for a, b in zip(first["loss"], runner.tally.read()["loss"], strict=True))


def test_the_derivative_by_a_state_within_a_graph_is_partial() -> None:
    """One layer made of another: the cost's pull and Phi's slope are those of the layers as they are."""
    cost = FunctionCost(lambda s, y: (s[0] * s[1]).sum(-1) + 0.0 * y.sum(-1))
    model = from_primitive(
        lambda x, s, theta: theta["a"] * (s[0] * s[1]).sum(-1), {"a": torch.ones((), dtype=F64)}, (3, 3)
    )
    s0 = random_like((4, 3), 1).requires_grad_()
    s = (s0, torch.sin(s0))
    fixed = (s[1].detach(), s[0].detach())
    pull = cost.pull(s, torch.zeros(4, 3, dtype=F64), {})
    assert_close(tuple(v.detach() for v in pull if v is not None), fixed)
    assert_close(tuple(v.detach() for v in model.gradient(model.drive(torch.zeros(4, 1)), s)), fixed)
