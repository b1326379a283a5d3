"""The campaigns that stop training: a short form always, the long form with -m slow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from campaigns import stops
from campaigns.stops import CASES, Place

SCRIPT = Path(stops.__file__)
ROOT = SCRIPT.resolve().parents[2]


def campaign(out: Path, cases: int, seed: int, seconds: float) -> list[dict[str, object]]:
    """Run every campaign in a process of its own, which forks: it must not hold the threads of other tests."""
    words = [word for kind in CASES for word in (f"--{kind}", str(cases))]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--seed", str(seed), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1), done.stderr
    found: list[dict[str, object]] = json.loads(out.read_text())
    assert [d["campaign"] for d in found] == list(CASES)
    assert [d["wrong"] for d in found] == [[]] * len(CASES), done.stdout
    assert [d["cases"] for d in found] == [cases] * len(CASES)
    return found


def test_a_few_kills_full_disks_and_signals(tmp_path: Path) -> None:
    campaign(tmp_path / "out.json", cases=2, seed=7, seconds=300.0)


@pytest.mark.slow
def test_many_kills_full_disks_and_signals(tmp_path: Path) -> None:
    campaign(tmp_path / "out.json", cases=60, seed=8, seconds=3600.0)


def test_the_comparison_finds_what_differs(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.differs(tmp_path / "timed") is None
    (tmp_path / "timed" / "ep" / ".x.part").write_text("")
    assert "left behind" in str(place.differs(tmp_path / "timed"))
    path = tmp_path / "whole" / "metrics.jsonl"
    whole = path.read_text()
    path.write_text("".join(line + "\n" for line in whole.splitlines()[:-1]))
    assert "metrics" in str(place.differs(tmp_path / "timed"))
    path.write_text(whole)
    shutil.rmtree(tmp_path / "whole" / "bptt")
    shutil.copytree(tmp_path / "whole" / "ep", tmp_path / "whole" / "bptt")
    assert place.differs(tmp_path / "timed") == "bptt: other weights"


def test_the_page_shows_the_counts_of_the_long_form() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "results" / "campaigns.json").read_text())
    assert [d["campaign"] for d in found] == list(CASES)
    for d in found:
        counts = ", ".join(f"{count} {what}" for what, count in d["counts"].items())
        assert f"| {counts} | {d['cases']} | {len(d['wrong'])} |" in page
        assert d["provenance"]["commit"][:7] in page
        assert not d["root"], "run as an ordinary user"
