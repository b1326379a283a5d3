"""EP behind squash and project: exact with the nudge inside and no clip; blind to what Phi does not read."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.ailing_nets import F64, SAMPLES, Draw, Gained
from torch import Tensor

import eqprop
from eqprop import BPTT, EP, ContinualEP, SquaredError
from eqprop.estimators import base


def test_softmax_as_squash_with_the_nudge_inside_is_exact_without_a_clip() -> None:
    """The derivative of softmax is symmetric though it is not diagonal; a clip behind it breaks that."""
    exact, clipped = Softmax(clip=False), Softmax(clip=True)
    x = Draw(0).uniform(SAMPLES, 3, low=-2.0, high=2.0)
    y = torch.eye(3, dtype=F64)[torch.arange(SAMPLES) % 3]
    gaps = []
    for model in (exact, clipped):
        ep, bptt = (e.gradient(model, SquaredError(), x, y)[1] for e in (EP(400, 200, beta=1e-5), BPTT(400, 200)))
        gaps.append(max(float((ep[p] - g).norm() / g.norm()) for p, g in bptt.items()))
    assert gaps[0] < 1e-4
    assert gaps[1] > 0.1


class Softmax(eqprop.PrimitiveDynamics):
    """Phi = s V x + s W s / 2, F = softmax(dPhi/ds), clipped to [0, 0.4] where asked."""

    nudge_site = "inside"

    def __init__(self, clip: bool) -> None:
        super().__init__()
        draw = Draw(3)
        W = draw.normal(3, 3)
        self.W = torch.nn.Parameter(0.3 * (W + W.T))
        self.V = torch.nn.Parameter(draw.normal(3, 3))
        self.clip = clip

    def init_state(self, x: Tensor) -> eqprop.State:
        return (x.new_zeros(len(x), 3),)

    def primitive(self, x: Tensor, s: eqprop.State) -> Tensor:
        (v,) = s
        return 0.5 * ((v @ self.W) * v).sum(-1) + (v * (x @ self.V.T)).sum(-1)

    def squash(self, s: eqprop.State) -> eqprop.State:
        return (torch.softmax(s[0], -1),)

    def project(self, s: eqprop.State) -> eqprop.State:
        return (s[0].clamp(0.0, 0.4),) if self.clip else s


def problem() -> tuple[Gained, Tensor, Tensor]:
    draw = Draw(0)
    return Gained(draw), *draw.batch(4, 2)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been warned of yet."""
    monkeypatch.setattr(base, "_WARNED_OF", set())


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("estimator", [EP(50, 20, beta=0.1), ContinualEP(50, 20, beta=0.1, rates=0.01)])
def test_backward_warns_once_of_a_parameter_that_phi_does_not_read(estimator: eqprop.Estimator) -> None:
    model, x, y = problem()
    with pytest.warns(UserWarning, match="Phi of Gained does not read the parameter gain.*the gradient 0"):
        estimator.backward(model, SquaredError(), x, y)
    assert not bool(model.gain.grad.any())
    other, x, y = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.backward(model, SquaredError(), x, y)
        estimator.backward(other, SquaredError(), x, y)
