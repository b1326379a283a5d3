"""Keeping a net at rest: the quick radius, the cap on weights, the best beta; and optimizers for small updates."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.nets import F64, batch, energy_based, prototypical, random_like
from torch.testing import assert_close

import eqprop
from eqprop import EP, SquaredError, relax
from eqprop.cost import Problem
from eqprop.estimators.homeostasis import Homeostasis
from eqprop.gdu.beta import GRID
from eqprop.gdu.control import radius, recurrent
from eqprop.models import Layered
from eqprop.optimizers import drowned


@pytest.mark.parametrize("net", [prototypical(2, "tanh"), energy_based(3, "tanh"), prototypical(3, "sigmoid")])
def test_the_quick_radius_is_that_of_the_eigenvalues(net: eqprop.Dynamics) -> None:
    x, _ = batch(net, 4)
    rest = relax(net, x, 2000).state
    assert radius(net, x, rest, 60) == pytest.approx(eqprop.stability(net, x).radius, rel=0.02)


def turning() -> Layered:
    """What comes back has the other sign: the state goes round and round."""
    net = Layered((3, 5, 4), "prototypical", "tanh", untied=True, bias=False, seed=0, dtype=F64)
    with torch.no_grad():
        net.W01.mul_(3.0)
        net.B01.copy_(-net.W01)
    return net


def test_a_cap_brings_a_net_that_does_not_settle_to_rest() -> None:
    net = turning()
    x = 0.1 * batch(net, 4)[0]
    assert recurrent(net, x) == ("W01", "B01")
    before, fed = copy.deepcopy(net), net.W12.detach().clone()
    assert not bool(relax(net, x, 400).settled.all())
    first = eqprop.keep_at_rest(net, x, 0.9)
    assert first > 1.0
    for _ in range(30):
        last = eqprop.keep_at_rest(net, x, 0.9)
    assert last <= 0.9 * 1.001
    assert bool(relax(net, x, 400).settled.all())
    assert torch.equal(net.W12, fed)  # what the input comes by is left alone
    share = net.W01 / before.W01
    assert_close(share, share[0, 0].expand_as(share))  # and the others only shrink


def test_a_healthy_net_keeps_every_bit() -> None:
    net = prototypical(3, "sigmoid")
    before, x = copy.deepcopy(net.state_dict()), batch(net, 4)[0]
    assert eqprop.keep_at_rest(net, x) < 0.95
    assert all(torch.equal(v, before[name]) for name, v in net.state_dict().items())
    with pytest.raises(ValueError, match="radius_below"):
        eqprop.keep_at_rest(net, x, 0.0)


def test_the_penalty_on_the_size_is_that_of_the_jacobian_and_its_gradient() -> None:
    net = prototypical(3, "tanh")
    x, _ = batch(net)
    s = relax(net, x, 50).state
    many, penalty = (Homeostasis(base=EP(1, 1), weight=0.0, size=1.0, probes=n) for n in (2000, 2))
    neurons = sum(v.shape[1] for v in s)
    with torch.no_grad():
        exact = 0.0
        for k in range(len(x)):
            drive = net.drive(x[k : k + 1])
            J = torch.func.jacfwd(lambda rows, d=drive: torch.cat(net.step(d, rows.split([3, 5, 5], 1)), 1))
            exact += float(J(torch.cat([v[k : k + 1] for v in s], 1)).square().sum()) / len(x)
    assert many.size_gradient(net, x, s)[0] == pytest.approx(exact / neurons, rel=0.05)
    _, grads = penalty.size_gradient(net, x, s)
    for name in ("W01", "W12", "b1"):
        h, u, values = 1e-6, random_like(tuple(net.get_parameter(name).shape), 1), []
        for sign in (1.0, -2.0):
            with torch.no_grad():
                net.get_parameter(name).add_(sign * h * u)
                values.append(penalty.size_gradient(net, x, s)[0])
        with torch.no_grad():
            net.get_parameter(name).add_(h * u)
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(float((grads[name] * u).sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("nudging", "form"), [("one-sided", "plain"), ("symmetric", "plain"), ("one-sided", "difference")]
)
def test_the_beta_proposed_is_among_the_best(nudging: str, form: str) -> None:
    net = energy_based(3, "tanh").float()
    x, y = (v.float() for v in batch(net, 16))
    problem = Problem(net, SquaredError(), x, y)
    ep = EP(25, 20, nudging=nudging, form=form)  # type: ignore[arg-type]
    found = eqprop.best_beta(problem, ep)
    tried = dict(found.tried)
    assert set(GRID) <= set(tried)
    if form == "difference":  # the largest that bends by less than a hundredth: smaller ones only cost digits
        assert tried[max(tried)] > 0.01 >= found.error
        assert all(e <= 0.011 for b, e in tried.items() if b < found.beta)
        return
    free = relax(net, x, 25)
    wide, at = problem.double(), relax(net, x, 25).state
    exact = EP(1, 20, beta=1e-5, nudging="symmetric", form="difference", checked=False).estimate(
        wide, type(free)(tuple(v.double() for v in at), 0, free.residual, free.settled)
    )[1]

    def off(beta: float) -> float:
        got = EP(25, 20, beta=beta, nudging=nudging, checked=False).estimate(problem, free)[1]  # type: ignore[arg-type]
        both = (torch.cat([g[n].double().flatten() for n in exact]) for g in (got, exact))
        a, b = both
        return float((a - b).norm() / b.norm())

    assert off(found.beta) < 1.5 * min(map(off, GRID))


def test_lion_steps_by_signs() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=F64))
    lion, kept = eqprop.Lion([p], lr=0.1, weight_decay=0.5), torch.zeros(3, dtype=F64)
    for g in (torch.tensor([1e-12, -1.0, 0.0], dtype=F64), torch.tensor([-1e-10, 1.0, 2.0], dtype=F64)):
        wanted = p.detach() * (1 - 0.05) - 0.1 * torch.sign(0.9 * kept + 0.1 * g)
        kept = 0.99 * kept + 0.01 * g
        p.grad = g.clone()
        lion.step()
        assert_close(p.detach(), wanted)
    with pytest.raises(ValueError, match="betas"):
        eqprop.Lion([p], betas=(1.0, 0.5))


def test_an_epsilon_above_a_tenth_of_an_update_is_found() -> None:
    small, large = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    adam = torch.optim.Adam([small, large], eps=1e-6)
    for _ in range(3):
        small.grad, large.grad = torch.full((4,), 5e-6), torch.full((4,), 2e-5)
        adam.step()
    ((name, size),) = drowned(adam, {id(small): "small", id(large): "large"})
    assert name == "small"
    assert size == pytest.approx(5e-6, rel=1e-4)
    assert not drowned(torch.optim.SGD([small], lr=0.1), {})
    assert math.isfinite(size)
