"""The scripts under docs/ that make pages, as modules."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page_maker(name: str) -> ModuleType:
    """docs/NAME.py, which finds the other scripts as it does when it is run itself: its folder comes first."""
    if str(DOCS) not in sys.path:
        sys.path.insert(0, str(DOCS))
    return importlib.import_module(name)


def write_row(folder: Path, preset: str, row: str, test: float, epochs: int) -> None:
    trials = [{"seed": s, "test_error": [9.0] * (epochs - 1) + [test], "train_error": [0.5] * epochs} for s in range(5)]
    estimator = {"trials": [t | {"diverged": False} for t in trials], "test_error_mean": test, "test_error_std": 0.1}
    told: dict[str, Any] = {
        "device": "a device",
        "torch": "2.0",
        "commit": "c0ffee" * 6,
        "date": "2026-01-02",
        "threads": 2,
    }
    found = {"name": row.removesuffix("-alternating"), "preset": preset, "engine": "an engine", "seconds": 90.0}
    found |= {"estimators": {"ep": estimator | {"train_error_mean": 0.5}}, "provenance": [{"provenance": told}]}
    path = folder / preset / f"{row}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
