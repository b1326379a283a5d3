"""Random models of a user's own against loops: a few always, 500 with -m slow (results/own-gradients.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import own_gradients
from campaigns.own_gradients import SAME, campaign, difference, net_of
from helpers.own_nets import own_model
from helpers.written_out import ESTIMATORS, Task
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eqprop import EP, SquaredError
from eqprop.engines import Job
from eqprop.engines.compiled import Compiled
from eqprop.engines.eager import Eager
from eqprop.relax import Phase, Schedule, relax

RESULTS = Path(__file__).resolve().parents[2] / "results"


def check(found: dict[str, Any]) -> None:
    assert not found["differing"]
    assert found["models_with_another_refusal"] <= 0.03 * found["models"], found["refusals"]
    assert found["cases"] > 20 * found["models"]


def test_a_few_random_models_are_their_loops() -> None:
    check(campaign(3, 900))


@pytest.mark.slow
def test_hundreds_of_random_models_are_their_loops() -> None:
    check(campaign(500, 2026))


def moved_by_rounding(seed: int) -> float:
    """How far a gradient moves, relative to itself, when the free state is moved by 1e-16: far only off any slope."""
    model, _, x, y, _ = own_model(seed)
    ep, free = EP(T=0, K=6, beta=0.1, nudging="symmetric", side_by_side=False), relax(model, x, Phase(20)).state
    moved = tuple(v + 1e-16 for v in free)
    one, other = (ep.gradient(model, SquaredError(), x, y, s)[1] for s in (free, moved))
    size = max(float(g.abs().max()) for g in one.values())
    return max(float((other[p] - g).abs().max()) for p, g in one.items()) / size


def test_the_record_of_the_campaign() -> None:
    """Where a model differs, its state lies where Phi has no slope, so that no gradient is right: |z| at z = 0."""
    found = json.loads((RESULTS / "own-gradients.json").read_text(encoding="utf-8"))
    assert found["models"] >= 500
    assert found["tolerance"] == SAME
    assert found["holomorphic_EP"]["analytic_models"] >= 20
    assert not found["holomorphic_EP"]["differing"]
    differing = {int(case.partition(" ")[0]) for case in found["differing"]}
    assert len(differing) <= 0.01 * found["models"]
    assert all(moved_by_rounding(seed) > 0.1 for seed in differing)
    assert all(moved_by_rounding(seed + 1) < SAME for seed in differing), "models beside them have a slope"
    check({**found, "differing": {}})


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    estimator=st.sampled_from(sorted(set(ESTIMATORS) - {"holomorphic EP"})),
    schedule=st.sampled_from(("synchronous", "sweeps", "sweeps-same")),
)
def test_any_model_and_estimator_in_any_schedule_is_its_loop(seed: int, estimator: str, schedule: Schedule) -> None:
    model, _, x, y, title = own_model(seed)
    task = Task(net_of(model, x), x, y)
    try:
        apart = difference(task, estimator, schedule)
    except (ValueError, TypeError, NotImplementedError) as error:
        assert len(str(error).split()) > 5, title  # noqa: PT017
        return
    assert apart <= SAME, title


def moved_by(engine: Any, seed: int) -> tuple[list[Tensor], str]:
    """The parameters of a random model after two iterations, and what it is."""
    torch.manual_seed(seed)
    model, cost, x, y, title = own_model(seed)
    labels = torch.arange(len(x)) % 3
    optimizer = torch.optim.SGD([*model.parameters(), *cost.parameters()], lr=0.1)
    engine.runner(Job(model, cost, EP(6, 4, 0.3, schedule="sweeps"), optimizer, x, y, labels)).run(
        torch.arange(4).view(2, 2)
    )
    return [p.detach() for p in (*model.parameters(), *cost.parameters())], title


@pytest.mark.parametrize("seed", [n if n < 1 else pytest.param(n, marks=pytest.mark.slow) for n in range(20)])
def test_compiled_trains_random_models_as_the_reference_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs as torch's operators; a model it leaves to the reference is told so in a sentence."""
    monkeypatch.setattr("eqprop.engines.compiled._compile", lambda graph, inputs: graph)
    monkeypatch.setattr("eqprop.engines.compiled.why_not_compiled", lambda device: None)
    wanted, title = moved_by(Eager(), 3000 + seed)
    try:
        found, _ = moved_by(Compiled(), 3000 + seed)
    except ValueError as error:
        assert "cannot serve" in str(error), title  # noqa: PT017
        assert seed > 0
        return
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= SAME * float(b.abs().max().clamp_min(1.0)), title


def test_a_wrong_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step fewer through time."""
    model, _, x, y, _ = own_model(901)
    task = Task(net_of(model, x), x, y)
    make, loop = ESTIMATORS["BPTT"]
    shorter = (make, lambda task, estimator: loop(task, type(estimator)(estimator.T, estimator.K - 1)))
    monkeypatch.setitem(own_gradients.ESTIMATORS, "BPTT", shorter)
    assert difference(task, "BPTT", "synchronous") > 1e-3
