"""Binary weights turn when their low-passed gradient asks for it; nets of them, and of binary neurons, learn."""

from __future__ import annotations

import torch

import eqprop
from eqprop.optimizers import Bop
from eqprop.physical.spins import SpinError, Spins


def test_a_weight_turns_once_its_low_passed_gradient_exceeds_the_threshold() -> None:
    w = torch.nn.Parameter(torch.tensor([[0.3, -0.1, -0.2]]))
    b = torch.nn.Parameter(torch.zeros(2))
    optimizer = Bop([{"params": [w], "lr": 0.5}, {"params": [b], "lr": 0.1}], threshold=0.6)
    w.grad, b.grad = torch.tensor([[1.0, 1.0, -0.5]]), torch.tensor([1.0, -1.0])
    optimizer.step()  # the low-pass is at .5, .5, -.25
    torch.testing.assert_close(w.detach(), torch.tensor([[0.2, -0.2, -0.2]]))
    torch.testing.assert_close(b.detach(), torch.tensor([-0.1, 0.1]))
    optimizer.step()  # at .75, .75, -.375: the first turns, the second has the other sign already
    torch.testing.assert_close(w.detach(), torch.tensor([[-0.2, -0.2, -0.2]]))
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([[-0.2, -0.2, -0.2]]))


def patterns() -> tuple[torch.Tensor, torch.Tensor]:
    """Three noisy patterns of -1 and 1."""
    g = torch.Generator().manual_seed(0)
    kinds = torch.arange(60) % 3
    means = torch.where(torch.rand(3, 24, generator=g) < 0.5, -1.0, 1.0)
    turned = torch.where(torch.rand(60, 24, generator=g) < 0.1, -1.0, 1.0)
    return means[kinds] * turned, kinds


def wrong(model: eqprop.PrimitiveDynamics, cost: eqprop.Cost, x: torch.Tensor, kinds: torch.Tensor) -> float:
    s = eqprop.relax(model, x, eqprop.Phase(20, "sweeps")).state
    return float((cost.scores(s).argmax(-1) != kinds).float().mean())


def test_a_net_of_binary_neurons_and_weights_learns() -> None:
    x, kinds = patterns()
    y = torch.eye(3)[kinds]
    model, cost = Spins((6, 30, 24), seed=0), SpinError(3)
    optimizer = Bop(
        [{"params": [model.W01, model.W12], "lr": 0.1}, {"params": [model.b0, model.b1], "lr": 0.0}], threshold=0.03
    )
    first = wrong(model, cost, x, kinds)
    for _ in range(40):
        optimizer.zero_grad()
        eqprop.EP(20, 20, 2.0, schedule="sweeps").backward(model, cost, x, y)
        optimizer.step()
    assert all(len(w.detach().abs().unique()) == 1 for w in (model.W01, model.W12))
    assert wrong(model, cost, x, kinds) < min(0.2, first)


def test_its_experiment_is_among_those_of_the_package() -> None:
    assert eqprop.papers.find("binary-1h").optimizer.kind == "Bop"
