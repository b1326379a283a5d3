"""The paper's models: names and initial weights, the convolution lemma, the energy, several networks as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from helpers.nets import F64, batch, convolutional, energy_based, prototypical, random_like, toy
from helpers.tolerances import SAME_FORMULA
from torch import Tensor
from torch.testing import assert_close

from eqprop import BPTT, EP, RBP, Estimator, PrimitiveDynamics, SquaredError, from_energy, relax
from eqprop.models import Activation, Convolutional, Layered, Toy, stack, unstack
from eqprop.models.activations import ACTIVATIONS
from eqprop.models.convolutional import Window, conv, conv_transpose, conv_weight, max_pool
from eqprop.state import State


def same(actual: object, expected: object) -> None:
    assert_close(actual, expected, rtol=SAME_FORMULA, atol=SAME_FORMULA)


def names(model: PrimitiveDynamics) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_the_four_derivatives_of_the_convolution_lemma(kernel: int, padding: int, size: int) -> None:
    """Phi = Y . P(W * X): by Z = W * X, X, W and Y, each formula against autograd. Zones need not divide the map."""
    X, W = random_like((2, 2, 9, 8), 0).requires_grad_(), random_like((3, 2, kernel, kernel), 1).requires_grad_()
    window = Window(padding)
    Z = conv(X, W, None, window)
    pooled = max_pool(Z, size)
    Y = random_like(tuple(pooled.values.shape), 2).requires_grad_()
    phi = (Y * torch.nn.functional.max_pool2d(Z, size)).sum()
    by_z, by_x, by_w, by_y = torch.autograd.grad(phi, (Z, X, W, Y))
    with torch.no_grad():
        spread = pooled.spread(Y)
        same(spread, by_z)  # P^-1(Y)
        same(conv_transpose(spread, W, window), by_x)  # W~ * P^-1(Y)
        same(conv_weight(X, spread, W, window), by_w)  # P^-1(Y) * X
        same(pooled.values, by_y)  # P(W * X)


def test_the_flipped_kernel_of_the_paper_is_the_transpose_convolution() -> None:
    """W~_{c_in, c_out, r, s} = W_{c_out, c_in, F-r+1, F-s+1} on an input padded by F - 1 - P."""
    W, Z = random_like((3, 2, 4, 4), 0), random_like((1, 3, 5, 6), 1)
    flipped = W.transpose(0, 1).flip(-2, -1)
    for padding in (0, 1, 3):
        expected = torch.nn.functional.conv2d(Z, flipped, padding=3 - padding)
        same(conv_transpose(Z, W, Window(padding)), expected)


@pytest.mark.parametrize("sigma", ["tanh", "sigmoid"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_energy_based_net_is_made_from_its_energy(sigma: str, bias: bool) -> None:
    net = energy_based(3, sigma, bias=bias)

    def energy(x: Tensor, s: State, theta: Mapping[str, Tensor]) -> Tensor:
        """E = 1/2 |s|^2 - sum_n r^n . W r^{n+1} - b . r"""
        r = [net.activation(v) for v in (*s, x)]
        out = sum(0.5 * v.square().sum(-1) for v in s)
        for n in range(3):
            out = out - torch.einsum("bi,ij,bj->b", r[n], theta[f"W{n}{n + 1}"], r[n + 1])
            out = out - (r[n] @ theta[f"b{n}"] if bias else 0.0)
        assert isinstance(out, Tensor)
        return out

    twin = from_energy(energy, dict(net.named_parameters()), layers=(3, 5, 5), eps=net.eps)
    x, y = batch(net)
    free, other = relax(net, x, 30), relax(twin, x, 30)
    same(other.state, free.state)
    same(twin.primitive(x, free.state), net.primitive(x, free.state))
    for estimator in (EP(T=20, K=7, beta=0.2), BPTT(T=20, K=7)):
        grads = [estimator.gradient(m, SquaredError(), x, y)[1].values() for m in (net, twin)]
        same(tuple(grads[0]), tuple(grads[1]))


def test_the_authors_output_leaves_out_one_slope_and_nothing_else() -> None:
    whole, without = energy_based(2, "sigmoid"), energy_based(2, "sigmoid", output_slope=False)
    x, _ = batch(whole)
    s = tuple(random_like(tuple(v.shape), n, 0.1, 0.9) for n, v in enumerate(whole.init_state(x)))
    with torch.no_grad():
        a, b = whole.transition(x, s), without.transition(x, s)
        forces = [(v[0] - (1 - whole.eps) * s[0]) for v in (a, b)]
        same(forces[0], forces[1] * whole.activation.slope(s[0]))
        same(a[1], b[1])


def test_parameters_and_layers_are_named_as_in_the_paper() -> None:
    assert names(Layered((10, 512, 512, 784))) == ["W01", "b0", "W12", "b1", "W23", "b2"]
    assert names(Layered((10, 784), bias=False)) == ["W01"]
    assert Layered((10, 512, 512, 784)).layer_names == ("s0", "s1", "s2")
    assert names(Toy()) == ["W01", "W0x", "W1x", "b0", "b1"]
    assert Toy().layer_names == ("s0", "s1")
    paper = Convolutional()
    assert names(paper) == ["Wfc01", "bfc0", "Wconv01", "bconv0", "Wconv12", "bconv1"]
    assert paper.layer_names == ("s0", "h0", "h1")
    deep = Convolutional((1, 28, 28), (8, 4, 2), (10, 20), kernel=3)
    assert names(deep)[::2] == ["Wfc01", "Wfc12", "Wconv01", "Wconv12", "Wconv23"]
    assert deep.layer_names == ("s0", "s1", "h0", "h1", "h2")


BUILD: dict[str, Callable[..., PrimitiveDynamics]] = {
    "toy": lambda **options: Toy((40, 50, 60), **options),
    "layered": lambda **options: Layered((40, 50, 60), **options),
    "convolutional": lambda **options: Convolutional((3, 16, 16), (20, 10), (30,), kernel=3, **options),
}


def fans(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    area = math.prod(shape[2:])
    return shape[1] * area, shape[0] * area


@pytest.mark.parametrize("kind", BUILD)
def test_glorot_fills_its_range_and_leaves_biases_at_zero(kind: str) -> None:
    for name, p in BUILD[kind](init="glorot", seed=0).named_parameters():
        if p.dim() == 1:
            assert not bool(p.any())
        else:
            _check_uniform(p, math.sqrt(6.0 / sum(fans(name, tuple(p.shape)))))


def _check_uniform(p: Tensor, bound: float) -> None:
    """All inside the range, reaching its ends, with the mean and the spread of a uniform draw."""
    n, p = p.numel(), p.detach()
    assert 0.95 * bound < float(p.max()) <= bound
    assert -bound <= float(p.min()) < -0.95 * bound
    spread = bound / math.sqrt(3.0)
    assert abs(float(p.mean())) < 4.0 * spread / math.sqrt(n)
    assert float(p.std()) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("init", ["glorot", "default"])
def test_a_seed_means_the_same_weights_in_every_precision(kind: str, init: str) -> None:
    single, double = (BUILD[kind](init=init, seed=7, dtype=dtype) for dtype in (torch.float32, torch.float64))
    other = BUILD[kind](init=init, seed=8, dtype=torch.float64)
    for name, p in double.named_parameters():
        assert torch.equal(single.get_parameter(name), p.float())
        assert p.dim() == 1 or not torch.equal(other.get_parameter(name), p)


def test_a_seed_leaves_torchs_own_random_numbers_alone_and_none_follows_them() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Layered((4, 5, 6), seed=1)
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(3)
    first = Layered((4, 5, 6)).weight(0)
    torch.manual_seed(3)
    assert torch.equal(Layered((4, 5, 6)).weight(0), first)
    assert not torch.equal(Layered((4, 5, 6)).weight(0), first)


@pytest.mark.parametrize("sigma", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_slopes_are_derivatives(sigma: Activation) -> None:
    v = random_like((50,), 0, -2.0, 3.0)
    same(sigma.slope(v), Activation("by autodiff", sigma.function).slope(v))


STACKED: dict[str, Callable[[int], PrimitiveDynamics]] = {
    "toy": lambda seed: toy(seed=seed),
    "EB": lambda seed: energy_based(3, "sigmoid", clip=True, seed=seed),
    "P": lambda seed: prototypical(3, seed=seed),
    "P without biases": lambda seed: prototypical(2, bias=False, seed=seed),
    "conv": lambda seed: convolutional(flat=(3, 4), seed=seed),
}


@pytest.mark.parametrize("estimator", [EP(T=15, K=6, beta=0.2), BPTT(T=15, K=6), RBP(T=15, K=6, checked=False)])
@pytest.mark.parametrize("kind", STACKED)
def test_stacked_networks_learn_as_each_would_alone(kind: str, estimator: Estimator) -> None:
    nets = [STACKED[kind](seed) for seed in range(3)]
    pairs = [batch(net, seed=seed) for seed, net in enumerate(nets)]
    together = stack(nets)
    assert together.networks == 3
    x, y = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    free = estimator.backward(together, SquaredError(), x, y)
    for r, (net, (x_r, y_r)) in enumerate(zip(nets, pairs, strict=True)):
        alone = estimator.backward(net, SquaredError(), x_r, y_r)
        same(tuple(v[r] for v in free.state), alone.state)
        same(free.residual[r], alone.residual)
        assert torch.equal(free.settled[r], alone.settled)
        for name, p in net.named_parameters():
            grad = together.get_parameter(name).grad
            assert grad is not None
            same(grad[r], p.grad)


@pytest.mark.parametrize("kind", STACKED)
def test_unstack_gives_the_networks_back(kind: str) -> None:
    nets = [STACKED[kind](seed) for seed in range(2)]
    for net in nets:
        net.get_parameter(names(net)[0]).requires_grad_(False)
    together = stack(nets)
    for r, net in enumerate(nets):
        single = unstack(together, r)
        same(single.state_dict(), net.state_dict())
        assert single.networks is None
        x, _ = batch(net)
        same(relax(single, x, 5).state, relax(net, x, 5).state)
        assert not single.get_parameter(names(single)[0]).requires_grad
        with torch.no_grad():
            next(single.parameters()).add_(1.0)
    same(unstack(together, 0).state_dict(), nets[0].state_dict())  # a copy, not a view


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_a_beta_of_its_own_for_each_network_serves_every_nudging(samples: int) -> None:
    """Also where there are as many samples as networks, so that shapes alone would not tell."""
    nets = [prototypical(2, seed=seed) for seed in range(3)]
    pairs = [batch(net, samples=samples, seed=seed) for seed, net in enumerate(nets)]
    x, y = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    betas = torch.tensor([0.1, 0.2, -0.4], dtype=F64)
    for options in ({}, {"nudging": "symmetric"}, {"nudging": "symmetric", "side_by_side": False}):
        _, found = EP(15, 6, betas, **options).gradient(stack(nets), SquaredError(), x, y)
        for r, (net, (x_r, y_r)) in enumerate(zip(nets, pairs, strict=True)):
            _, alone = EP(15, 6, float(betas[r]), **options).gradient(net, SquaredError(), x_r, y_r)
            same([g[r] for g in found.values()], list(alone.values()))


class Tied(PrimitiveDynamics):
    """Two parts with one weight between them, and a mask that is not learned."""

    input_shape = (3,)

    def __init__(self, seed: int, mask: float = 1.0) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.below, self.above = torch.nn.Module(), torch.nn.Module()
        self.below.W = torch.nn.Parameter(torch.randn(3, 3, generator=source, dtype=F64))
        self.above.W = self.below.W
        self.register_buffer("mask", torch.full((3,), mask, dtype=F64))

    def init_state(self, x: Tensor) -> State:
        return (torch.zeros_like(x),)

    def primitive(self, x: Tensor, s: State) -> Tensor:
        seen = x @ self.below.W.mT * self.mask + torch.tanh(x) @ self.above.W.mT  # type: ignore[operator]
        return (s[0] * seen).sum(-1)


def test_weights_that_a_model_shares_stay_shared_when_stacked() -> None:
    nets = [Tied(seed) for seed in range(3)]
    x = torch.rand(3, 4, 3, dtype=F64)
    together = stack(nets)
    assert together.below.W is together.above.W
    for r, net in enumerate(nets):
        same(relax(together, x, 3).state[0][r], relax(net, x[r], 3).state[0])
        same(relax(unstack(together, r), x[r], 3).state[0], relax(net, x[r], 3).state[0])


def test_a_net_too_large_to_build_is_refused_before_its_weights_are_drawn() -> None:
    with pytest.raises(ValueError, match="78,401,000,000 weights; at most"):
        Layered((10, 100_000, 784_000), bias=False)
