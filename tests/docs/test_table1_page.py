"""docs/table1.md says what results/table1 holds, and is current."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.pages import page_maker, write_row

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return page_maker("make_table1_page")


def test_the_page_is_current(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_table1_page.py", "--check"])
    page.main()


def test_rows_are_judged_by_the_papers_spread_and_its_epochs(page: ModuleType, tmp_path: Path) -> None:
    write_row(tmp_path, "paper", "P-1h", test=2.26, epochs=30)
    write_row(tmp_path, "paper", "P-2h", test=2.16, epochs=50)
    write_row(tmp_path, "tuned", "P-2h", test=1.9, epochs=49)
    write_row(tmp_path, "paper", "P-1h-alternating", test=2.2, epochs=30)
    text, files = page.PAGE.read_text(encoding="utf-8"), list(page.published(tmp_path))
    made = page_maker("blocks").filled(text, page.makers(files))
    assert "| P-1h | 2.26 ± 0.10 (0.50) | 2.00 ± 0.13 (0.20) | yes | – |" in made
    assert "| P-2h | 2.16 ± 0.10 (0.50) | 1.95 ± 0.10 (0.14) | no | – |" in made
    assert "| P-2h | 1.90 ± 0.10 (0.50) | 1.95 ± 0.10 (0.14) | – | – |" in made, "an epoch is missing"
    assert "| P-2h | `tuned` | init default instead of glorot; schedule alternating instead of synchronous |" in made
    assert "| P-1h EP, `paper` | 2.26 ± 0.10 (0.50) | yes | 2.20 ± 0.10 (0.50) | yes | 90 s | 90 s |" in made
    assert "| P-1h | `paper`, `paper` with alternating steps | none |\n| P-2h | none | none |" in made
    assert "| `paper` | a device | 2 | 3.0 |\n| `paper` with alternating steps | a device | 1 | 1.5 |" in made
    assert "| `tuned` | a device | 1 | 1.5 |" in made


def test_the_last_free_phases_are_told_from_the_calmest_trial_to_the_worst(page: ModuleType, tmp_path: Path) -> None:
    write_row(tmp_path, "paper", "P-2h", test=2.16, epochs=50)
    path = tmp_path / "paper" / "P-2h.json"
    phases = [{"seed": n, "residual_mean": [9.0] * 40 + [10.0**-n] * 10, "unsettled": [n / 200] * 50} for n in (1, 3)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"free_phases": {"ep": phases}}))
    made = page.rest_block(list(page.published(tmp_path)))
    assert made.splitlines()[2:] == ["| P-2h EP | `paper` | 2.16 ± 0.10 (0.50) | 1.0e-03 … 1.0e-01 | 0.5 … 1.5 |"]


def test_a_schedule_costs_what_its_method_took(page: ModuleType) -> None:
    """Files with one time for both estimators are compared as a whole, if they hold the same."""
    both, ep = ({"estimators": {m: {"test_error_mean": 2.0} for m in held}} for held in (("ep", "bptt"), ("ep",)))
    apart = {**both, "seconds": 90.0, "seconds_by_estimator": {"ep": 30.0, "bptt": 60.0}}
    whole, short = {**both, "seconds": 50.0}, {**ep, "seconds": 20.0}

    gpu, cpu = {"device": "a device"}, {"device": "cpu", "processor": "a processor", "threads": 1}

    def times(*found: dict[str, Any], where: tuple[dict[str, Any], ...] = (gpu, gpu)) -> list[str]:
        files = [{**f, "provenance": [{"provenance": told}]} for f, told in zip(found, where, strict=True)]
        return page._times(*(page.Published(None, False, f) for f in files), "ep")

    assert times(apart, {**ep, "seconds_by_estimator": {"ep": 12.4}}) == ["30 s", "12 s"]
    assert times(apart, whole) == ["90 s, both estimators", "50 s, both estimators"]
    assert times(short, short) == ["20 s", "20 s"]
    assert times(whole, short) == ["–", "–"]
    assert times(short, short, where=(gpu, cpu)) == ["20 s, a device", "20 s, a processor, 1 thread"]
