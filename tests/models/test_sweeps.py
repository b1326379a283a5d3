"""Sweeps: groups of layers in turn, in both phases; EP against BPTT through the same updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.contract import Case, same
from helpers.graphs import Own
from helpers.nets import F64, batch, energy_based, gap, gather, named, prototypical, random_like, relative_gap, sums
from helpers.tolerances import EXACT_LIMIT, GDU_AT_SMALL_BETA, NOT_EQUAL, SETTLED_GRADIENT
from torch.testing import assert_close

from eqprop import (
    BPTT,
    EP,
    RBP,
    Phase,
    SquaredError,
    from_transition,
    limit_steps,
    relax,
)
from eqprop.dynamics import Dynamics
from eqprop.models import Conv, Dense, Lateral, Layered, Network, Skip
from eqprop.relax import Relaxation, Schedule, turns

COST = SquaredError()
K = 14
T = 6000


def ring(**options: Any) -> Network:
    """Three layers that all see each other and one with connections within it: three colours, and a leak."""
    chosen: dict[str, Any] = {"activation": "tanh", "seed": 1, "dtype": F64}
    links = [
        Dense("x", "a", gain=0.8),
        Dense("a", "b", gain=0.6),
        Dense("a", "out", gain=0.6),
        Dense("b", "out", gain=0.6),
        Own("x", "b", gain=0.5),
        Lateral("a", gain=0.4),
    ]
    return Network(4, {"out": 3, "b": 5, "a": 6}, links, **chosen | options)


def deep(**options: Any) -> Network:
    """Convolutions, a skip and a flat output, as the published nets have."""
    chosen: dict[str, Any] = {"activation": {"out": "identity", "*": "sigmoid"}, "seed": 2, "dtype": F64}
    links = [
        Conv("x", "h1", padding=1, gain=0.6),
        Conv("h1", "h2", padding=1, pool=2, pooling="average", gain=0.6),
        Skip("h2", "h3", gain=0.3),
        Conv("x", "h3", kernel=1, stride=2, gain=0.6),
        Dense("h3", "out", gain=0.6),
    ]
    layers: dict[str, Any] = {"out": 3, "h3": (2, 2, 2), "h2": (2, 2, 2), "h1": (3, 4, 4)}
    return Network((2, 4, 4), layers, links, **chosen | options)


EB: dict[str, Any] = {"setting": "energy-based", "eps": 0.5}
EXACT: dict[str, Callable[[], Dynamics]] = {
    "EB chain": lambda: energy_based(3),
    "EB ring": lambda: ring(**EB),
    "EB deep": lambda: deep(**EB),
    "EB groups that are no colouring": lambda: ring(**EB, groups=[("a", "out"), ("b",)]),
    "EB one group": lambda: ring(**EB, groups=[("a", "b", "out")]),
}
INSIDE: dict[str, Callable[[], Dynamics]] = {
    "P chain": lambda: prototypical(3, "sigmoid", nudge_site="inside"),
    "P ring": lambda: ring(nudge_site="inside"),
    "P deep": lambda: deep(nudge_site="inside"),
    "P ring, implicit": lambda: ring(nudge_site="implicit"),
    "P groups that are no colouring": lambda: deep(nudge_site="inside", groups=[("h2",), ("h1", "h3", "out")]),
}


def at_rest(net: Dynamics, schedule: Schedule = "sweeps", keep: int = K) -> tuple[Any, Any, Relaxation]:
    x, y = batch(net)
    free = relax(net, x, Phase(T, schedule, stop="settled", still=1e-16), keep=keep)
    assert float(free.residual.max()) < 1e-12
    return x, y, free


@pytest.mark.parametrize("build", EXACT.values(), ids=EXACT)
def test_reversed_the_processes_are_those_of_bptt_update_by_update(build: Callable[[], Dynamics]) -> None:
    """F = dPhi/ds: neurons and synapses, whatever the groups are."""
    net = build()
    x, y, free = at_rest(net)
    delta = gather(limit_steps(net, COST, x, y, free, K, "sweeps"))
    nabla = gather(BPTT(T, K, schedule="sweeps").steps(net, COST, x, y, free))
    assert max(gap(delta, nabla).values()) < EXACT_LIMIT
    assert min(float(v.abs().max()) for v in nabla.synapses.values()) > 1e-6


@pytest.mark.parametrize("build", INSIDE.values(), ids=INSIDE)
def test_with_the_nudge_inside_the_synapses_are(build: Callable[[], Dynamics]) -> None:
    net = build()
    x, y, free = at_rest(net)
    delta = gather(limit_steps(net, COST, x, y, free, K, "sweeps"))
    nabla = gather(BPTT(T, K, schedule="sweeps").steps(net, COST, x, y, free))
    gaps = gap(delta, nabla)
    assert max(gaps[name] for name in nabla.synapses) < EXACT_LIMIT
    assert min(float(v.abs().max()) for v in nabla.synapses.values()) > 1e-6


@pytest.mark.parametrize("build", [*EXACT.values(), *INSIDE.values()], ids=[*EXACT, *INSIDE])
def test_at_small_beta_ep_follows_update_by_update(build: Callable[[], Dynamics]) -> None:
    net = build()
    x, y, free = at_rest(net)
    delta = EP(T, K, schedule="sweeps", beta=1e-6).processes(net, COST, x, y, free)
    nabla = BPTT(T, K, schedule="sweeps").processes(net, COST, x, y, free)
    gaps = gap(delta, nabla)
    assert max(gaps[name] for name in nabla.synapses) < GDU_AT_SMALL_BETA


def test_in_the_same_order_they_are_not() -> None:
    """Three groups: the second update of a sweep is that of another group than in BPTT."""
    net = ring(**EB)
    x, y, free = at_rest(net)
    delta = gather(limit_steps(net, COST, x, y, free, K, "sweeps-same"))
    nabla = gather(BPTT(T, K, schedule="sweeps-same").steps(net, COST, x, y, free))
    gaps = relative_gap(delta, nabla)
    assert min(gaps[name] for name in nabla.synapses) > 10 * NOT_EQUAL


def test_with_two_groups_the_same_order_lags_by_one_update() -> None:
    """The mirrored phase begins with the group that the cost does not see, which does not move."""
    net = prototypical(3, "sigmoid", nudge_site="inside")
    groups = net.sweep(3)
    assert groups == ((1,), (0, 2))
    x, y, free = at_rest(net)
    same_order = gather(limit_steps(net, COST, x, y, free, K, "sweeps-same"))
    nabla = gather(BPTT(T, K, schedule="sweeps").steps(net, COST, x, y, free))
    for name, value in same_order.synapses.items():
        assert float(value[0].abs().max()) == 0.0
        assert_close(value[1:], -nabla.synapses[name][:-1], rtol=0.0, atol=EXACT_LIMIT)


@pytest.mark.parametrize("schedule", ["sweeps", "sweeps-same"])
def test_either_order_adds_up_to_the_gradient(schedule: Schedule) -> None:
    net = ring(nudge_site="inside")
    x, y, free = at_rest(net)
    total = sums(gather(limit_steps(net, COST, x, y, free, 400, schedule)))
    _, grads = RBP(0, 400).gradient(net, COST, x, y, free.state)
    assert_close({name: -g for name, g in total.items()}, named(net, grads), rtol=0.0, atol=SETTLED_GRADIENT)


def test_bptt_goes_through_steps_that_differentiate_by_their_inputs() -> None:
    """Layers of a sweep are made one from another: a step must not see that, or its derivatives would be total."""

    def phi(s: tuple[torch.Tensor, ...], theta: Any) -> torch.Tensor:
        return (s[0] * torch.tanh(s[1] @ theta["W"])).sum()

    def derived(x: torch.Tensor, s: Any, theta: Any) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            inputs = tuple(v if v.requires_grad else v.detach().requires_grad_() for v in s)
            found = torch.autograd.grad(phi(inputs, theta), inputs, create_graph=True)
        return torch.tanh(found[0]), torch.tanh(found[1] + x)

    def written(x: torch.Tensor, s: Any, theta: Any) -> tuple[torch.Tensor, ...]:
        answer = torch.tanh(s[1] @ theta["W"])
        return torch.tanh(answer), torch.tanh((s[0] * (1.0 - answer**2)) @ theta["W"].T + x)

    theta, x, y = {"W": random_like((3, 2), 1)}, random_like((4, 3), 2), random_like((4, 2), 3)
    found = []
    for step in (derived, written):
        net = from_transition(step, theta, layers=(2, 3))
        free, grads = BPTT(13, 5, schedule="sweeps").gradient(net, COST, x, y)
        found.append((free.state, list(grads.values())))
    assert_close(*found, rtol=0.0, atol=EXACT_LIMIT)


def test_the_order_of_updates() -> None:
    net = ring()
    assert net.groups[-1] == ("out",)
    first, second, last = net.sweep(3)
    assert turns(net, 3, "sweeps", range(-4, 4)) == [last, first, second, last, last, second, first, last]
    assert turns(net, 3, "sweeps-same", range(-4, 4)) == [last, first, second, last, first, second, last, first]
    assert turns(net, 3, "synchronous", range(2)) == [None, None]
    assert turns(prototypical(3), 3, "sweeps", range(-2, 2)) == [(1,), (0, 2), (0, 2), (1,)]
    assert turns(energy_based(3), 3, "sweeps", range(-2, 2)) == [(1,), (0, 2), (0, 2), (1,)]
    unknown = from_transition(lambda x, s, theta: s, {"W": torch.zeros(1)}, layers=(2, 3, 4))
    assert turns(unknown, 3, "sweeps", range(-3, 1)) == [(2,), (1,), (0,), (0,)]


@pytest.mark.parametrize("build", [ring, deep, lambda: prototypical(4, "tanh")], ids=["ring", "deep", "chain"])
def test_a_group_is_updated_and_the_others_are_left_alone(build: Callable[[], Dynamics]) -> None:
    net = build()
    x, y = batch(net)
    s = Case(net, x, y).state()
    with torch.no_grad():
        drive, push = net.drive(x), (0.3 * y, *[None] * (len(s) - 1))
        whole = net.step(drive, s, push)
        for group in net.sweep(len(s)):
            moved = net.group_step(drive, s, group, push)
            same(moved, tuple(whole[n] if n in group else v for n, v in enumerate(s)))


@pytest.mark.parametrize("build", [ring, deep, lambda: ring(**EB)], ids=["ring", "deep", "EB ring"])
def test_sweeps_and_synchronous_steps_reach_the_same_fixed_point(build: Callable[[], Dynamics]) -> None:
    net = build()
    x, _, free = at_rest(net)
    together = relax(net, x, Phase(T, stop="settled", still=1e-16))
    assert_close(free.state, together.state, rtol=0.0, atol=EXACT_LIMIT)


def test_alternating_is_a_sweep_of_a_chain() -> None:
    net = prototypical(4, "sigmoid")
    x, _ = batch(net)
    same(relax(net, x, Phase(9, "sweeps")).state, relax(net, x, Phase(9, "alternating")).state)


@pytest.mark.parametrize("sizes", [(10, 512, 512, 784), (10, 512, 512, 512, 784)], ids=["P-2h", "P-3h"])
def test_sweeps_settle_where_synchronous_steps_go_back_and_forth(sizes: tuple[int, ...]) -> None:
    """The paper's deep prototypical nets with Glorot weights, on sparse random images."""
    net = Layered(sizes, "prototypical", "sigmoid", seed=0, dtype=F64)
    x = random_like((20, 784), 0, 0.0) * (random_like((20, 784), 1, 0.0) < 0.19)
    together, in_turn = relax(net, x, 800), relax(net, x, Phase(800, "sweeps"))
    worst = int(together.residual.argmax())
    assert float(together.residual[worst]) > 0.5
    again = relax(net, x, 2, together.state)
    assert max(float((a - b)[worst].abs().max()) for a, b in zip(again.state, together.state, strict=True)) < 1e-2
    assert float(in_turn.residual.max()) < 1e-3
