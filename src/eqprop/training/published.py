"""Results that were published as files, and whether a network trained anew lies within their spread."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eqprop.experiments.record import Record
from eqprop.experiments.training_records import named_record
from eqprop.training.result import deviation, mean

ALTERNATING = "-alternating"
"""Ends the names of files whose free phases alternated."""
TEST_SAMPLES = 10_000


@dataclass(frozen=True)
class PublishedTrial:
    """One network of a published row: where it stands, what it was trained with, and its errors in percent.

    errors      test errors at the last epoch of all the row's trials, this one's among them
    """

    path: Path
    record: Record
    method: str
    seed: int
    error: float
    errors: tuple[float, ...]

    @property
    def tolerance(self) -> float:
        """Twice the standard deviation over trials, and of the count of errors itself, together."""
        share = (mean(self.errors) or 0.0) / 100.0
        counting = 100.0 * math.sqrt(share * (1.0 - share) / TEST_SAMPLES)
        return 2.0 * math.hypot(deviation(self.errors) or 0.0, counting)

    def holds(self, error: float) -> bool:
        """Whether a test error in percent lies within the published spread."""
        return abs(error - (mean(self.errors) or 0.0)) <= self.tolerance


def published_trials(folder: Path, rows: Collection[str] | None = None) -> list[PublishedTrial]:
    """Every trial of `folder/<preset>/<row>.json`; of some rows only, if they are named."""
    wanted = None if rows is None else {row.strip().lower() for row in rows}
    found = []
    for path in sorted(folder.glob("*/*.json")):
        if wanted is None or path.stem.removesuffix(ALTERNATING).lower() in wanted:
            found += _trials(path, _read(path))
    if not found:
        which = "" if rows is None else f" for {', '.join(rows)}"
        raise FileNotFoundError(
            f"{folder} holds no published results{which}; expected files such as paper/P-1h.json, as "
            "`eqprop reproduce table1 --out` writes them."
        )
    return found


def draw(trials: list[PublishedTrial], seed: int | None) -> PublishedTrial:
    """One of them at random."""
    return random.Random(seed).choice(trials)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["methods"], dict):
            raise TypeError("methods")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a result of `eqprop train --json`: {type(error).__name__} {error}.") from error
    return found


def _trials(path: Path, found: Mapping[str, Any]) -> list[PublishedTrial]:
    out = []
    schedule = "alternating" if path.stem.endswith(ALTERNATING) else None
    for method, told in found["methods"].items():
        good = [trial for trial in told["trials"] if trial["test_error"] and not trial["diverged"]]
        errors = tuple(float(trial["test_error"][-1]) for trial in good)
        for trial, error in zip(good, errors, strict=True):
            record = named_record(found["name"], found["preset"]).override(
                epochs=len(trial["test_error"]), seed=int(trial["seed"]), schedule=schedule
            )
            out.append(PublishedTrial(path, record, method, int(trial["seed"]), error, errors))
    return out
