"""`stability` on planted cases: too large a step, growing loops, oscillations, and healthy nets."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.nets import random_like
from torch import Tensor
from torch.testing import assert_close

import eqprop
from eqprop import Dynamics, from_energy, from_transition, relax
from eqprop.gdu.lockstep import Linearised, flat, krylov
from eqprop.gdu.stability import DENSE, eigenvalues
from eqprop.models import Layered
from eqprop.models.connections import Theta
from eqprop.state import State

N, SEEDS = 6, 15


def bowl(seed: int, eps: float) -> Dynamics:
    """E = 1/2 s.A s + sum ln cosh s - x.V s, of which Euler's step has a limit of about 0.3."""
    root = random_like((N, N), seed, -1.0, 1.0)
    theta = {"A": root @ root.T / 2 + torch.eye(N).double() + 3.0 * torch.diag(random_like((N,), seed + 1, 0.0, 1.0))}

    def energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        quadratic = 0.5 * torch.einsum("bi,ij,bj->b", s[0], theta["A"], s[0])
        return quadratic + torch.log(torch.cosh(s[0])).sum(-1) - (x * s[0]).sum(-1)

    return from_energy(energy, theta, (N,), eps, input_shape=(N,))


def loop(seed: int, gain: float) -> Dynamics:
    """A ring of neurons with a gain above 1 all the way round, and weak random weights."""
    ring = torch.roll(torch.eye(N).double(), 1, 0) * gain + 0.02 * random_like((N, N), seed, 0.0, 1.0)
    return from_transition(lambda x, s, theta: (s[0] @ theta["W"].T + x,), {"W": ring}, (N,), input_shape=(N,))


def turning(seed: int, gain: float, eps: float) -> Dynamics:
    """s + eps (-s + tanh(gain R s + x)), R rotations: past a Hopf bifurcation where gain cos > 1."""
    angles = 0.6 + 0.5 * torch.rand(N // 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    blocks = [torch.tensor([[math.cos(v), -math.sin(v)], [math.sin(v), math.cos(v)]]) for v in angles.tolist()]
    R = torch.block_diag(*blocks).double()

    def step(x: Tensor, s: State, theta: Theta) -> State:
        return (s[0] + eps * (torch.tanh(s[0] @ theta["R"].T + 0.1 * x) - s[0]),)

    return from_transition(step, {"R": gain * R}, (N,), input_shape=(N,), start=lambda x: 0.1 + 0.0 * x)


def healthy(seed: int) -> Dynamics:
    if seed % 2:
        return Layered((3, 5, N), "energy-based", "tanh", eps=0.2, init="default", seed=seed, dtype=torch.float64)
    return Layered((3, 5, N), "prototypical", "sigmoid", init="default", seed=seed, dtype=torch.float64)


def inputs(seed: int) -> Tensor:
    return random_like((3, N), 100 + seed, 0.0, 1.0)


def planted(kind: str, seed: int) -> tuple[Dynamics, str]:
    spread = 1.0 + (seed + 1) / SEEDS
    if kind == "too large":
        limit = eqprop.stability(bowl(seed, 0.02), inputs(seed)).limit
        return bowl(seed, min(1.0, limit * (1.0 + 0.6 * spread / 2))), "step too large"
    if kind == "loop":
        return loop(seed, 1.0 + 0.2 * spread), "grows"
    if kind == "turning":
        return turning(seed, 2.0 * spread, 0.2), "oscillates"
    return healthy(seed), "settles"


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(SEEDS), marks=pytest.mark.slow)], ids=["few", "sixty"])
def test_planted_cases_get_their_names(seeds: range) -> None:
    wrong = []
    for kind in ("too large", "loop", "turning", "healthy"):
        for seed in seeds:
            model, name = planted(kind, seed)
            found = eqprop.stability(model, inputs(seed), T=150)
            settled = bool((relax(model, inputs(seed), eqprop.Phase(600, checked=False)).residual < 1e-6).all())
            assert settled == (name == "settles"), (kind, seed)  # the case is what it is planted as
            wrong += [(kind, seed, str(found))] if found.verdict != name else []
    assert len(wrong) <= len(seeds) // 5, wrong  # of 60 cases 57 are right


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_is_where_the_step_ceases_to_settle(seed: int) -> None:
    x = inputs(seed)
    limit = eqprop.stability(bowl(seed, 0.02), x).limit

    A = bowl(seed, 0.02).A.detach()

    def settles(eps: float) -> bool:
        s = torch.zeros_like(x)
        for _ in range(600):
            move = x - s @ A - torch.tanh(s)
            s = s + eps * move
        return float(move.abs().max()) < 1e-4

    low, high = 0.5 * limit, 2.0 * limit
    assert settles(low)
    assert not settles(high)
    while high - low > 0.005 * limit:
        low, high = (mid, high) if settles(mid := 0.5 * (low + high)) else (low, mid)
    assert abs(high / limit - 1.0) < 0.03
    assert_close(eqprop.stability(bowl(seed, 1.5 * limit), x).limit, limit, rtol=1e-4, atol=0.0)


def test_the_number_of_steps_is_the_measured_one() -> None:
    for seed in range(2):
        model, x = healthy(seed), inputs(seed)
        found = eqprop.stability(model, x)
        rest = relax(model, x, 3000).state
        pushed = tuple(v + 1e-4 * random_like(v.shape, 7 + n, -1.0, 1.0) for n, v in enumerate(rest))
        steps, away = 0, 1.0
        while away > 1e-10:
            pushed = relax(model, x, 1, pushed).state
            away, steps = max(float((a - b).abs().max()) for a, b in zip(pushed, rest, strict=True)), steps + 1
        assert 0.4 < steps / found.steps < 1.6


def test_large_nets_are_looked_at_by_products() -> None:
    model = Layered((10, 80, 60, 12), "energy-based", "tanh", eps=0.2, seed=0, dtype=torch.float64)
    x = random_like((2, 12), 3, 0.0, 1.0)
    rest = relax(model, x, 2000).state
    around = Linearised(model, x, rest)
    found, exact = eigenvalues(around)
    assert not exact
    rows = flat(rest)
    assert rows.shape[1] > DENSE
    unit = torch.eye(rows.shape[1]).double()
    whole = torch.linalg.eigvals(torch.stack([around.on_rows(e.expand_as(rows)) for e in unit], -1))
    for both in (torch.amax, torch.amin):
        assert_close(both(found.real, 1), both(whole.real, 1), rtol=1e-3, atol=1e-4)
    basis, h = krylov(around.on_rows, random_like(rows.shape, 0, -1.0, 1.0), 5)
    moved = torch.stack([around.on_rows(basis[:, k]) for k in range(4)], 1)
    assert_close(moved, (basis.mT @ h[:, :5, :4]).mT, rtol=1e-8, atol=1e-10)


def test_looking_changes_nothing() -> None:
    model, x = healthy(1), inputs(1)
    before = copy.deepcopy(model.state_dict())
    found = eqprop.stability(model, x)
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert found.to_dict()["verdict"] == "settles"
    assert "settles" in str(found).lower()
