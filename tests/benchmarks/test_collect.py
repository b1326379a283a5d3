"""What becomes of runs and JSON files in results/, and the counting of states at rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.training_runs import SMALL, few_images

from benchmarks import collect
from benchmarks.rest import at_rest
from eqprop.models import Layered
from eqprop.relax import Schedule
from eqprop.run import train


def test_runs_are_collected_by_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(SMALL, tmp_path / "small", data=few_images(100, 50), epochs=2)
    monkeypatch.setattr(collect, "RESULTS", tmp_path)
    for _ in range(2):
        collect.collect("a-topic", [str(tmp_path / "small")])
    found = json.loads((tmp_path / "runs" / "a-topic.json").read_text())
    assert len(found) == 2
    (trial,) = found[0]["estimators"]["ep"]["trials"]
    assert all(len(trial[name]) == 2 for name in collect.COLUMNS)
    assert found[0]["experiment"]["name"] == "small"
    assert "/" not in found[0]["provenance"][0]["command"]


@pytest.mark.parametrize("schedule", ["synchronous", "alternating"])
def test_rest_is_a_state_that_comes_again(schedule: Schedule) -> None:
    """Without weights a state is the same from the first step on; with weights it takes a while."""
    model = Layered((2, 3, 4), "prototypical", activation="sigmoid", seed=0)
    for p in model.parameters():
        p.data.zero_()
    x = torch.rand(5, 4)
    assert at_rest(model, x, 1, schedule) == [False] * 5
    assert at_rest(model, x, 8, schedule) == [True] * 5
    slow = Layered((2, 3, 4), "prototypical", activation="sigmoid", seed=0)
    assert at_rest(slow, x, 4, schedule) == [False] * 5, "still on its way"
