"""The gradient of `backward` in C is the reference's, and what C does not serve is left to the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eqprop import BPTT, EP, SquaredError
from eqprop.cost import Cost, FunctionCost
from eqprop.dynamics import PrimitiveDynamics
from eqprop.estimators import Estimator
from eqprop.models import Convolutional, Layered, stack

ESTIMATORS: list[Estimator] = [
    EP(12, 5, beta=0.3),
    EP(12, 5, beta=0.3, nudging="symmetric"),
    EP(11, 4, beta=-0.4, schedule="alternating"),
    BPTT(9, 4),
]


def nets() -> dict[str, PrimitiveDynamics]:
    return {
        "layers": Layered((5, 9, 21), seed=0),
        "stack": stack([Layered((5, 9, 21), seed=seed) for seed in range(2)]),
        "maps": Convolutional((1, 8, 8), (3,), (5,), kernel=3, padding=1, pool=2, seed=0),
    }


def batch(model: PrimitiveDynamics) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    lead = (6,) if model.networks is None else (model.networks, 6)
    x = torch.rand(*lead, *(model.input_shape or ()), generator=source, dtype=torch.float64)
    return x, torch.rand(*lead, 5, generator=source, dtype=torch.float64)


def found(model: PrimitiveDynamics, estimator: Estimator, engine: str, cost: Cost | None = None) -> list[Tensor]:
    model.zero_grad()
    x, y = batch(model)
    free = estimator.backward(model, cost or SquaredError(), x, y, engine=engine)
    return [*free.state, free.residual, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize("name", nets())
def test_gradients_in_c(name: str, estimator: Estimator) -> None:
    model = nets()[name].double()
    torch.testing.assert_close(found(model, estimator, "cpu"), found(model, estimator, "eager"), rtol=1e-9, atol=1e-12)


def test_gradients_that_are_held_stay_as_they_are() -> None:
    model = Layered((5, 16, 24), seed=0).double()
    first = found(model, ESTIMATORS[0], "cpu")
    copies = [v.clone() for v in first]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    second = found(model, ESTIMATORS[0], "cpu")
    assert all(map(torch.equal, first, copies))
    assert not all(map(torch.equal, first, second))
    torch.testing.assert_close(second, found(model, ESTIMATORS[0], "eager"), rtol=1e-9, atol=1e-12)


def test_changes_and_other_costs_are_the_reference_s() -> None:
    model, ep = Layered((5, 9, 21), seed=0).double(), ESTIMATORS[0]
    found(model, ep, "cpu")
    model.W01.requires_grad_(False)
    assert len(found(model, ep, "cpu")) == len(found(model, ep, "eager")) == 6
    quartic = FunctionCost(lambda s, y: (s[0] - y).square().square().sum(-1))
    other = found(model, ep, "cpu", quartic)
    torch.testing.assert_close(other, found(model, ep, "eager", quartic), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(other[-1], found(model, ep, "eager")[-1], rtol=1e-3)
    model.step = lambda *given: PrimitiveDynamics.step(model, *given)
    torch.testing.assert_close(found(model, ep, "cpu"), found(model, ep, "eager"), rtol=1e-9, atol=1e-12)


def test_what_is_not_finite_is_said() -> None:
    model = Layered((5, 9, 21), seed=0).double()
    x, y = batch(model)
    y[0, 0] = torch.inf
    with pytest.raises(ValueError, match="The target y holds 1 values that are not finite"):
        ESTIMATORS[0].backward(model, SquaredError(), x, y, engine="cpu")
