"""The final result of a run, from its metrics alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eqprop.training.checkpoint import has_checkpoint, read_checkpoint
from eqprop.training.metrics import Line, read_metrics
from eqprop.training.plan import Plan


@dataclass(frozen=True)
class Result:
    """What `train` gives back: the folder, and the summary that is also result.json and `--json`."""

    folder: Path
    summary: Mapping[str, Any]

    def test_error(self, method: str) -> float | None:
        """The mean test error in percent at the last epoch, over the trials that did not diverge."""
        mean: float | None = self.summary["methods"][method]["test_error_mean"]
        return mean


def summarise(plan: Plan, folder: Path) -> dict[str, Any]:
    """The JSON of `train --json`: errors per epoch in percent, mean and standard deviation over trials at the end."""
    lines = read_metrics(folder)
    seconds, engines = 0.0, {}
    for leg in plan.legs():
        if has_checkpoint(folder / leg.folder):
            checkpoint = read_checkpoint(folder / leg.folder)
            seconds += checkpoint.seconds
            engines[leg.method] = checkpoint.engine
    return {
        "name": plan.record.name,
        "preset": plan.record.preset,
        "engine": name_engines(engines),
        "device": plan.settings.device,
        "seconds": round(seconds, 3),
        "methods": {
            method: _method(method, [line for line in lines if line["method"] == method], plan)
            for method in plan.settings.methods
        },
    }


def name_engines(engines: Mapping[str, str]) -> str:
    """One name, or one a method where they differ."""
    names = set(engines.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{method}: {name}" for method, name in engines.items())


def _method(method: str, lines: Sequence[Line], plan: Plan) -> dict[str, Any]:
    trials = [_trial([x for x in lines if x["trial"] == t], plan.record.seed + t) for t in range(plan.settings.trials)]
    good = [t for t in trials if not t["diverged"] and t["test_error"]]
    return {
        **({"estimator": plan.record.estimator} if method == "ep" else {}),
        "trials": trials,
        "test_error_mean": mean([t["test_error"][-1] for t in good]),
        "test_error_std": deviation([t["test_error"][-1] for t in good]),
        "train_error_mean": mean([t["train_error"][-1] for t in good]),
    }


def _trial(lines: Sequence[Line], seed: int) -> dict[str, Any]:
    good = [line for line in lines if line["diverged"] is None]
    return {
        "seed": seed,
        "test_error": [line["test_error"] for line in good],
        "train_error": [line["train_error"] for line in good],
        "train_error_final": good[-1]["train_error_measured"] if good else None,
        "diverged": any(line["diverged"] is not None for line in lines),
    }


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation over trials, ddof 1; None for fewer than two, of which it says nothing."""
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))
