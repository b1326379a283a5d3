"""Backprop through one forward pass: the feed-forward twin of a net that settles."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import eqprop
from eqprop.estimators import Backprop
from eqprop.models import Conv, Convolutional, Dense, Layered, Network


def test_its_gradient_is_autograds_through_the_net_written_by_hand() -> None:
    net = Network(
        (2, 6, 6),
        {"out": 3, "h2": (4, 3, 3), "h1": (3, 6, 6)},
        [Conv("x", "h1", kernel=3, padding=1), Conv("h1", "h2", kernel=3, padding=1, pool=2), Dense("h2", "out")],
        {"out": "identity", "*": "hard-sigmoid"},
        seed=0,
        dtype=torch.float64,
    )
    x, y = torch.randn(5, 2, 6, 6).double(), torch.rand(5, 3).double()
    theta = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    h1 = F.conv2d(x, theta["W_h1_x"], theta["b_h1"], padding=1).clamp(0, 1)
    h2 = F.max_pool2d(F.conv2d(h1, theta["W_h2_h1"], theta["b_h2"], padding=1), 2).clamp(0, 1)
    out = F.linear(h2.flatten(1), theta["W_out_h2"], theta["b_out"])
    (0.5 * (out - y).square().sum(-1).mean()).backward()
    free, found = Backprop().gradient(net, eqprop.SquaredError(), x, y)
    assert torch.allclose(free.state[0], out.detach())
    assert bool(free.settled.all())
    for name, p in net.named_parameters():
        assert torch.allclose(found[p], theta[name].grad, atol=1e-12), name  # type: ignore[arg-type]


def test_the_readout_learns_and_a_skip_is_seen() -> None:
    net = Network(
        4, {"s0": 3, "s1": 5}, [Dense("x", "s1"), Dense("s1", "s0"), Dense("x", "s0")], "sigmoid", dtype=torch.float64
    )
    x, y = torch.rand(6, 4).double(), eqprop.data.one_hot(torch.arange(6) % 2, 2, torch.float64)
    hidden = net.activations[1](x @ net.W1x.T + net.b1)
    out = net.activations[0](hidden @ net.W01.T + x @ net.W0x.T + net.b0)
    assert torch.allclose(net.feedforward(x)[0], out)
    cost = eqprop.CrossEntropy(3, 2, dtype=torch.float64)
    loss = F.cross_entropy(F.linear(out, cost.Wout, cost.bout), y)
    expected = torch.autograd.grad(loss, [net.W1x, cost.Wout])
    _, found = Backprop().gradient(net, cost, x, y)
    assert torch.allclose(found[net.W1x], expected[0])
    assert torch.allclose(found[cost.Wout], expected[1])


@pytest.mark.parametrize(
    "net",
    [Layered((3, 8, 5), seed=0), Convolutional((1, 12, 12), (4,), (3,), kernel=3, seed=0)],
    ids=["layered", "convolutional"],
)
def test_a_forward_pass_is_a_sweep_from_rest(net: eqprop.Dynamics) -> None:
    """With all layers above at zero nothing comes back: a sweep from the input up is the forward pass."""
    x = torch.rand(4, *net.input_shape)  # type: ignore[misc]
    s, drive = net.init_state(x), net.drive(x)
    for n in reversed(range(len(s))):
        s = net.group_step(drive, s, (n,))
    for a, b in zip(net.feedforward(x), s, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
