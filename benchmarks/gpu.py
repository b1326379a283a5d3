"""python -m benchmarks.gpu FOLDER: what only a CUDA machine can show, in one call of at most ten minutes.

    B, A-sweeps, A      in float16 by `compiled`, against the naive twin;  mlp: a user's Phi in float32
    guard               weights of the paper's nets after 50 iterations, against those recorded before (tests/guard)
    tests               those marked gpu
    float32, A-float32  B and A in float32
    fixed               B in float16 by fixed algorithms: what --deterministic costs

Every step is a process of its own with a limit of time; records and logs go to FOLDER, which also gets summary.json:
what ran, how long, and the times per iteration beside those asked for. It needs no network and no installation:

    PYTHONPATH=src:. python -m benchmarks.gpu results/gpu
    PYTHONPATH=src:. python -m benchmarks.gpu /tmp/dry --device cpu      the same steps, small, on any machine

It trains nothing to the end. The published rows of CIFAR-10 follow, ten minutes at a time, by the commands in
docs/cifar10.md ("Make the large rows on one GPU").
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eqprop.files import write_json
from eqprop.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 590.0
"""Seconds for all steps."""

ASKED = {"A": 70.0, "A-sweeps": 40.0, "B": 24.0}
"""Milliseconds per iteration in float16 on one H200, batch 128."""
ASKED_RATIO = {"mlp": 10.0}
"""Times the naive twin in float32."""


@dataclass(frozen=True)
class Step:
    """A command, its limit in seconds, and the record it writes, if any."""

    name: str
    words: tuple[str, ...]
    limit: float
    record: str | None = None


def steps(folder: Path, device: str) -> list[Step]:
    """The most wanted first, since what comes last may find no time."""
    small = device == "cpu"
    end = "-small@8" if small else ""

    def nets(name: str, subjects: Sequence[str], precision: str, limit: float, *more: str) -> Step:
        record = f"{name}.json"
        # On a CPU half precision is emulated, by the eager engine.
        engine = "eager" if small and precision != "float32" else "compiled"
        rounds = ("--rounds", "3", "--naive-rounds", "2", "--chunk-seconds", "0.2")
        where = ("--device", device, "--precision", precision, "--engine", engine, "--json", str(folder / record))
        chosen = [f"{one}{end}" for one in subjects]
        return Step(name, ("-m", "benchmarks", *chosen, *where, *rounds, *more), limit, record)

    guard = str(ROOT / "tests" / "guard" / "guard.py")
    only = ("--names", "P-1h") if small else ()
    before = ROOT / "tests" / "guard" / ("before.json" if small else "before-h200.json")
    chosen = ("tests/engines/test_captured.py",) if small else ("-m", "gpu", "tests")
    record = (guard, "record", str(folder / "guard.json"), "--device", device, "--only", "weights", *only)
    return [
        nets("B", ("B",), "float16", 100.0),
        nets("A-sweeps", ("A-sweeps",), "float16", 100.0),
        nets("mlp", ("mlp",), "float32", 80.0),
        nets("A", ("A",), "float16", 120.0),
        Step("guard", record, 120.0),
        Step("guard-check", (guard, "compare", str(before), str(folder / "guard.json"), *only), 20.0),
        Step("tests", ("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen), 200.0),
        nets("float32", ("B",), "float32", 80.0),
        nets("fixed", ("B",), "float16", 60.0, "--deterministic"),
        nets("A-float32", ("A",), "float32", 120.0),
    ]


def run(step: Step, folder: Path, left: float) -> dict[str, Any]:
    """Run a step within its limit and what is left of the budget; its output goes to a log."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    clock, limit = time.perf_counter(), min(step.limit, left)
    if limit < 5.0:
        return {"name": step.name, "ran": False, "reason": "no time was left"}
    with (folder / f"{step.name}.log").open("w") as log:
        try:
            words = [sys.executable, *step.words]
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(
                words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False
            )
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = (folder / f"{step.name}.log").read_text().strip().splitlines()
    found = {"name": step.name, "ran": True, "exit": code, "seconds": time.perf_counter() - clock}
    return {**found, "limit": limit, "last_line": lines[-1] if lines else ""}


def verdicts(folder: Path, plan: Sequence[Step]) -> list[dict[str, Any]]:
    """Every measured net beside what is asked."""
    out = []
    for step in plan:
        path = folder / str(step.record)
        if step.record is None or not path.is_file():
            continue
        for row in json.loads(path.read_text())["rows"]:
            took, name = row["us_per_iteration"] / 1000.0, row["name"]
            asked = ASKED.get(name) if row["precision"] == "float16" else None
            ratio = ASKED_RATIO.get(name) if row["precision"] == "float32" else None
            met = None if asked is None else took <= asked
            met = met if ratio is None else (row["speedup"] or 0.0) >= ratio
            chosen = ("name", "engine", "precision", "deterministic", "batch", "speedup", "cosine", "first_iteration_s")
            about = {key: row[key] for key in chosen}
            out.append({"step": step.name, **about, "ms": took, "asked_ms": asked, "asked_ratio": ratio, "met": met})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", help="steps to run")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began, done = time.perf_counter(), []
    plan = [step for step in steps(folder, given.device) if given.only is None or step.name in given.only]
    for step in plan:
        done.append(run(step, folder, BUDGET - (time.perf_counter() - began)))
        found = {"machine": provenance(given.device), "steps": done, "nets": verdicts(folder, plan)}
        write_json(folder / "summary.json", found)
        print(json.dumps(done[-1]), flush=True)
    for row in verdicts(folder, plan):
        print(json.dumps(row), flush=True)
    sys.exit(any(step.get("exit") != 0 for step in done))


if __name__ == "__main__":
    main()
