"""Project the time for all of Table 1: six rows, both estimators, the paper's epochs, evaluation included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cases import Case
from benchmarks.timing import Contestant
from eqprop import papers
from eqprop.data import Images
from eqprop.engines import Engine
from eqprop.run.evaluate import BATCH, Measure
from eqprop.run.session import Session
from eqprop.run.spec import Spec

ITERATIONS = 3000
"""Iterations per epoch: 60,000 samples in mini-batches of 20."""
TEST, TRAIN = 10_000, 60_000
"""Samples evaluated after every epoch, and once at the end."""
TRIALS = 5


def evaluation_seconds(case: Case, engine: Engine, images: Images) -> float:
    """Seconds to evaluate the test set on the case's networks, as in training, at initial weights.

    On a CPU one batch is timed and extrapolated; on a GPU the whole set runs.
    """
    device = images.test_x.device
    model = case.build(device)
    count = TEST if device.type == "cuda" else BATCH
    some = replace(images, test_x=images.test_x[:count], test_y=images.test_y[:count])
    measure = Measure(engine, model, Session(case.experiment, some), networks=case.network_count)
    contestant = Contestant(lambda n: _evaluate(measure), device)
    if device.type == "cuda":
        contestant.seconds(1)
    return contestant.seconds(1) * TEST / count


def _evaluate(measure: Measure) -> None:
    measure.error_rates()


def with_evaluation(rows: Sequence[dict[str, Any]], images: Images, chosen: Mapping[str, Engine]) -> None:
    """Add `evaluation_s` to every row, timing each experiment, schedule and engine once."""
    known: dict[tuple[object, ...], float] = {}
    for row in rows:
        key = (row["name"], row["preset"], row["engine"], row["schedule"], row["trials"])
        if key not in known:
            case = Case(_experiment(row), row["method"], row["engine"], row["trials"])
            known[key] = evaluation_seconds(case, chosen[row["engine"]], images)
        row["evaluation_s"] = known[key]


def _experiment(row: Mapping[str, Any]) -> Spec:
    return papers.find(row["name"], row["preset"]).override(schedule=row["schedule"])


def project(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Project the time of Table 1 from measured rows: with all steps, and with every exact shortcut.

    A row that was refused or not measured leaves the total open and is listed in `missing`. Trials are stacked as in
    the measured rows; with fewer than five, runs follow one another. For a settled stop only the time on trained
    weights counts.
    """
    every_step = [r for r in rows if r["schedule"] == "synchronous" and r["stop"] == "never"]
    typical = [r for r in rows if r["stop"] == "never" or r["weights"] == "trained"]
    return {"trials": TRIALS, "all_steps": _total(every_step), "all_exact_means": _total(typical)}


def _total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts, missing = [], []
    for name, experiment in papers.paper_rows().items():
        for method in ("ep", "bptt"):
            right = [r for r in rows if r["name"] == name and r["method"] == method and r["speedup"] is not None]
            costs = [(_seconds(r, experiment.optimizer.epochs), r) for r in right if "evaluation_s" in r]
            if not costs:
                missing.append(f"{name} {method}")
                continue
            seconds, row = min(costs, key=lambda pair: pair[0])
            parts.append({k: row[k] for k in ("name", "method", "engine", "schedule", "stop", "weights")})
            parts[-1].update(epochs=experiment.optimizer.epochs, seconds=seconds)
    total = None if missing else sum(part["seconds"] for part in parts)
    return {"seconds": total, "missing": missing, "rows": parts}


def _seconds(row: Mapping[str, Any], epochs: int) -> float:
    """Set-up, `epochs` epochs each followed by the test set, then the training set once; times the runs needed."""
    epoch = ITERATIONS * row["us_per_iteration"] * 1e-6 + row["evaluation_s"]
    runs = -(-TRIALS // row["trials"])
    return float(runs * (row["setup_s"] + epochs * epoch + row["evaluation_s"] * TRAIN / TEST))
