"""Several ranks train what one process trains, and stop together. The ranks are those of helpers/rank_cases.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rank_cases

import eqprop
from eqprop.engines import EXCHANGE, Task, choose
from eqprop.engines.cuda.one_hidden import OneHidden
from eqprop.run.distributed import Ranks

TESTS = Path(__file__).resolve().parents[1]
SAME, SAME_IN_FLOAT32 = 1e-12, 1e-5
"""Gradients of the parts against that of the whole: the sum over samples in another order, relative to the largest."""
CASES = [f"{name}, {size} ranks" for size in (2,) for name in rank_cases.CASES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-m", "helpers.rank_cases", str(folder)],
        cwd=TESTS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return content


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, SAME), (torch.float32, SAME_IN_FLOAT32)])
def test_gradients_are_those_of_one_process(found: dict[str, Any], case: str, dtype: torch.dtype, limit: float) -> None:
    name, size = case.split(", ")
    gap = found["compare"]["gradients"][f"{name} {dtype}, {size}"]
    assert 0.0 < gap < limit, "a gap of exactly 0 would mean that the parts were not summed in another order"


@pytest.mark.parametrize("case", CASES)
def test_running_errors_are_within_one_sample(found: dict[str, Any], case: str) -> None:
    gap = found["compare"]["training"][case]
    assert gap["train_error"] <= 100.0 / rank_cases.SAMPLES
    assert gap["test_error"] <= 100.0 / 250
    assert 0.0 < gap["weights"] < 1e-4


@pytest.mark.parametrize("kind", ["persistent", "carried", "initialised"])
def test_starts_belong_to_samples(found: dict[str, Any], kind: str) -> None:
    gap = found["starts"][kind]
    assert gap["weights"] < SAME
    assert gap["start"] < SAME


def test_what_is_drawn_belongs_to_samples(found: dict[str, Any]) -> None:
    gap = found["prepared"]
    assert gap["weights"] < SAME
    assert gap["start"] < SAME
    assert gap["train_error"] == 0.0


def test_each_rank_reads_its_own_part_of_a_stream(found: dict[str, Any]) -> None:
    parts = found["shards"]["read"]
    assert sorted([*parts[0], *parts[1]]) == list(range(40))
    assert not {*parts[0]} & {*parts[1]}
    # In training too: of the test set, all but the ends, which name the set, are read once an epoch by one of them.
    assert found["shards"]["training"]["weights"] < SAME_IN_FLOAT32
    assert found["shards"]["training"]["test_error"] == 0.0
    tested = [[n for n in part if 0 < n < 10] for part in found["shards"]["tested"]]
    assert tested == [[n for n in range(1, 6) for _ in range(2)], [n for n in range(6, 10) for _ in range(2)]]


def test_ranks_that_are_started_again_do_not_use_the_addresses_of_the_dead(found: dict[str, Any]) -> None:
    assert found["rejoined"]["first"] == [-9, -9]
    assert found["rejoined"]["second"] == [[0, ""], [0, ""]]


def test_several_networks_are_trained_one_after_the_other(found: dict[str, Any]) -> None:
    gap = found["networks"]
    assert gap["weights"] < SAME
    assert gap["same_files"]


def test_a_resumed_run_ends_as_if_left_alone(found: dict[str, Any]) -> None:
    again = found["again"]
    for case in ("by 2", "restarted"):
        assert (again[case]["weights"], again[case]["start"]) == (0.0, 0.0)
    assert again["by 1"]["weights"] < 1e-4
    assert again["by 1"]["train_error"] <= 100.0 / 200


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("does-not-divide", "A mini-batch of 25 samples does not divide among 2 ranks."),
        ("no-folder", "2 ranks need a run folder that all of them see."),
        ("other-settings", "experiment.phases.T is 6 on rank 1 and 5 on rank 0."),
        ("other-version", "torch is '1.0' on rank 1"),
        ("other-data", "on rank 1 and"),
        ("full-disk", "Could not save to"),
        ("taken", "already holds a run"),
    ],
)
def test_what_fails_on_one_rank_is_one_sentence_on_all(found: dict[str, Any], case: str, sentence: str) -> None:
    ended = found["faults"][case]
    assert ended["codes"] == [2, 2]
    for said in ended["said"]:
        assert sentence in said
        assert said.startswith("eqprop: ")
        assert said.count("\n") == 1
    assert found["faults"]["files"] == [], "a run that is refused leaves no folder"


@pytest.mark.parametrize(("case", "left"), [("killed", 0), ("killed-first", 1)])
def test_the_others_stop_within_seconds_of_a_kill(found: dict[str, Any], case: str, left: int) -> None:
    ended = found["faults"][case]
    assert (ended["codes"][left], ended["codes"][1 - left]) == (2, -9)
    assert f"rank {left} of 2 stops: another rank has ended" in ended["said"][left]
    assert ended["said"][left].count("\n") == 1
    assert ended["seconds"] < 10.0


def test_a_signal_to_one_rank_saves_and_stops_all(found: dict[str, Any]) -> None:
    ended = found["faults"]["term"]
    assert ended["codes"] == [143, 143]
    assert "Stopped and saved" in ended["said"][0]
    assert ended["said"][1] == ""


def test_a_rank_that_hangs_is_found_by_the_time_out(found: dict[str, Any]) -> None:
    ended = found["faults"]["hangs"]
    assert ended["codes"] == [2, 2]
    assert f"Timed out waiting {1000 * rank_cases.HANGS:.0f}ms" in ended["said"][0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("begin", "end"), [(0, 10), (3, 10), (5, 5), (0, 1000)])
def test_bounds_cover_every_sample_once(size: int, begin: int, end: int) -> None:
    parts = [Ranks(rank, size).bounds(begin, end) for rank in range(size)]
    assert [n for first, last, _ in parts for n in range(first, last)] == list(range(begin, end))
    assert all(last - first <= largest for first, last, largest in parts)


def test_shares_are_contiguous_and_divide() -> None:
    rows = torch.arange(24).view(2, 12)
    parts = [Ranks(rank, 3).share(rows, -1) for rank in range(3)]
    assert torch.equal(torch.cat(parts, -1), rows)
    with pytest.raises(ValueError, match="12 samples does not divide among 5 ranks. Use a batch of 10 or 15"):
        Ranks(0, 5).share(rows, -1)


def test_engines_that_update_weights_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneHidden, "device", "cpu")
    model = eqprop.models.Layered(sizes=(10, 16, 784), setting="prototypical", activation="sigmoid")
    task = Task(model, eqprop.SquaredError(), eqprop.EP(T=4, K=2, beta=0.1), extras=(EXCHANGE,))
    with pytest.raises(ValueError, match="it has no exchange between processes"):
        choose("cuda-one-hidden", task)
    assert choose("auto", task).reference
