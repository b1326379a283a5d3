"""The campaign that kills ranks: a short form always, the long form with -m slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from campaigns import lost_ranks

SCRIPT = Path(lost_ranks.__file__)
ROOT = SCRIPT.resolve().parents[2]


def campaign(out: Path, cases: int, seed: int) -> dict[str, Any]:
    """Run the campaign in a process of its own, which forks: it must not hold the threads of other tests."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cases", str(cases), "--seed", str(seed), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=60.0 * cases,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert out.exists(), done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["wrong"] == [], done.stdout
    return found


def kills(found: dict[str, Any]) -> int:
    return sum(n for what, n in found["counts"].items() if "killed" in what)


def test_one_run_that_loses_a_rank(tmp_path: Path) -> None:
    assert kills(campaign(tmp_path / "out.json", cases=1, seed=3)) >= 1


@pytest.mark.slow
def test_twenty_runs_that_lose_a_rank(tmp_path: Path) -> None:
    assert kills(campaign(tmp_path / "out.json", cases=20, seed=4)) >= 20


def test_the_recorded_campaign_lost_nothing() -> None:
    found = json.loads((ROOT / "results" / "lost-ranks.json").read_text())
    assert found["wrong"] == []
    assert found["cases"] >= 20
    assert kills(found) >= 20
    assert found["largest_difference_with_another_number_of_ranks"] <= lost_ranks.CLOSE
    for place in ("training", "checkpoint", "evaluation"):
        assert any(place in what for what in found["counts"])
