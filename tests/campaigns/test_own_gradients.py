"""Random models of a user's own against loops: a few always, 500 with -m slow (results/own-gradients.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from campaigns import own_gradients
from campaigns.own_gradients import SAME, campaign, difference, net_of
from helpers.own_nets import own_model
from helpers.written_out import ESTIMATORS, Task

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


def test_the_record_of_the_campaign() -> None:
    found = json.loads((RESULTS / "own-gradients.json").read_text(encoding="utf-8"))
    assert found["models"] >= 500
    assert found["tolerance"] == SAME
    check(found)


def test_a_wrong_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step fewer through time."""
    model, _, x, y, _ = own_model(901)
    task = Task(net_of(model, x), x, y)
    make, loop = ESTIMATORS["BPTT"]
    shorter = (make, lambda task, estimator: loop(task, type(estimator)(estimator.T, estimator.K - 1)))
    monkeypatch.setitem(own_gradients.ESTIMATORS, "BPTT", shorter)
    assert difference(task, "BPTT", "synchronous") > 1e-3
