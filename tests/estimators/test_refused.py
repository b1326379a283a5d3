"""What would give a wrong gradient in silence is right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.nets import convolutional, energy_based, prototypical
from torch import Tensor

from eqprop import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Estimator,
    HolomorphicEP,
    SquaredError,
    from_energy,
    relax,
)
from eqprop.dynamics import Dynamics
from eqprop.estimators import Backprop
from eqprop.models import stack

COST = SquaredError()
ALL: list[Estimator] = [
    EP(6, 3),
    EP(6, 3, nudging="symmetric"),
    BPTT(6, 3),
    RBP(6, 3),
    ContinualEP(6, 3),
    Backprop(),
]


def batch(model: Dynamics, samples: int = 4) -> tuple[Tensor, Tensor]:
    assert model.input_shape is not None
    source = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    x = torch.rand(samples, *model.input_shape, generator=source, dtype=torch.float64).to(dtype)
    y = torch.rand(model.init_state(x)[0].shape, generator=source, dtype=torch.float64).to(dtype)
    return x, y


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_inference_mode_is_refused(estimator: Estimator) -> None:
    model = prototypical(2)
    x, y = batch(model)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="under torch.inference_mode"):
        estimator.backward(model, COST, x, y)
    with torch.no_grad():
        estimator.backward(model, COST, x, y)
    assert float(model.get_parameter("W01").grad.abs().max()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [EP, HolomorphicEP, ContinualEP])
def test_a_nudge_that_rounding_drowns_is_refused(make: Any) -> None:
    for model in (prototypical(2), energy_based(2, "tanh", clip=False)):
        x, y = batch(model)
        make(6, 3, beta=1e-8).gradient(model, COST, x, y)
        model = model.float()
        with pytest.raises(ValueError, match="float32 rounds away.*Raise beta, or compute in float64"):
            make(6, 3, beta=1e-8).gradient(model, COST, x.float(), y.float())
        with pytest.raises(ValueError, match="rounds away"):
            make(6, 3, beta=1e-8).check_serves(model, COST, x.float(), y.float())
        make(6, 3, beta=0.01).gradient(model, COST, x.float(), y.float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_data_that_is_not_finite_is_refused(estimator: Estimator, bad: float) -> None:
    forward = isinstance(estimator, Backprop)  # which has no energy
    model = prototypical(2, "hard-sigmoid") if forward else energy_based(2, "hard-sigmoid")
    x, y = batch(model)
    for which in (0, 1):
        given = [x.clone(), y.clone()]
        given[which][1, 0] = bad
        with pytest.raises(ValueError, match=f"The {('input x', 'target y')[which]} holds 1 values"):
            estimator.backward(model, COST, *given)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_autocast_changes_no_bit(estimator: Estimator) -> None:
    model = convolutional().float()
    x, y = batch(model)
    free, expected = estimator.gradient(model, COST, x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, found = estimator.gradient(model, COST, x, y)
        alone = relax(model, x, 6)
    assert all(torch.equal(expected[p], found[p]) for p in expected)
    assert torch.equal(relax(model, x, 6).state[0], alone.state[0])
    assert torch.equal(free.state[0], again.state[0])


def test_a_model_of_a_function_is_not_stacked() -> None:
    """Its step takes one network's states; the layer of one neuron would pass for stacked by its shape alone."""
    for width in (1, 3):

        def e(x: Tensor, s: Any, theta: Any) -> Tensor:
            return 0.5 * s[0].square().sum(-1) - ((x @ theta["W"]) * s[0]).sum(-1)

        nets = [from_energy(e, {"W": torch.rand(4, width)}, (width,), eps=0.5, input_shape=(4,)) for _ in range(2)]
        with pytest.raises(ValueError, match=r"e is written for one network.*Train one network at a time"):
            stack(nets)
    assert stack([prototypical(2), prototypical(2)]).networks == 2
