"""Random models of one's own, each by every estimator and schedule: programs of `xla` against the reference.

    python -m benchmarks.lowered 0 300 --out results/bench/lowered.json
    python -m benchmarks.lowered --join results/bench/lowered.json A.json B.json

A model is served if every estimator that the reference computes has a program with the same gradients; what is not
served is listed by cause. Models are in float64 (`tests.helpers.own_nets`), compiled without XLA's costly passes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.collect import write_compact
from eqprop import BPTT, EP, RBP, ContinualEP, HolomorphicEP
from eqprop.cost import Problem
from eqprop.dynamics import Dynamics
from eqprop.engines.xla.engine import Programs
from eqprop.estimators import Estimator
from eqprop.provenance import provenance
from tests.helpers.own_nets import own_model

AGREE = 1e-7
"""Of the largest number of a gradient, in float64: the contract's 1e-9, and room for models that amplify rounding."""


def estimators(model: Dynamics) -> list[Estimator]:
    """Every estimator that has programs, in every form and schedule."""
    found: list[Estimator] = [
        EP(12, 5, beta=0.3),
        EP(12, 5, beta=0.3, nudging="symmetric"),
        EP(12, 5, beta=0.3, nudging="random-sign").with_sign(-1.0),
        EP(12, 5, beta=0.3, form="difference"),
        EP(13, 5, beta=0.3, schedule="sweeps"),
        EP(13, 5, beta=0.3, schedule="sweeps-same"),
        EP(40, 5, beta=0.3, stop="settled"),
        BPTT(12, 5),
        BPTT(13, 5, schedule="sweeps"),
        RBP(30, 10),
        ContinualEP(12, 5, beta=0.3, rates=0.005),
        HolomorphicEP(12, 5, beta=0.1, points=4),
    ]
    return [*found, EP(13, 5, beta=0.3, schedule="alternating")] if model.bipartite else found


def judged(seed: int) -> dict[str, Any]:
    """A model's title, how many estimators gave equal gradients, and what the others came to."""
    model, cost, x, y, title = own_model(seed)
    programs, verdicts = Programs(), {}
    for estimator in estimators(model):
        problem = Problem(model, cost, x, y)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                start = estimator.begin(problem)
                free, expected = estimator.computed(problem, start)
        except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            verdicts[repr(estimator)] = f"not computed: {type(error).__name__}"
            continue
        verdicts[repr(estimator)] = compared(programs, problem, estimator, start, free.state, expected)
    equal = sum(v == "equal" for v in verdicts.values())
    return {"seed": seed, "title": title, "equal": equal, "other": {k: v for k, v in verdicts.items() if v != "equal"}}


def compared(programs: Programs, problem: Problem, estimator: Estimator, start: Any, state: Any, expected: Any) -> str:
    """ "equal", or why not."""
    try:
        free, grads = programs.gradient(problem, estimator, start, falls_back=False)
    except ValueError as error:
        return f"refused: {str(error).partition(': ')[2].removesuffix(chr(10))}"
    if set(grads) != set(expected):
        return "other parameters"
    ours, theirs = [*free.state, *(grads[p] for p in expected)], [*state, *expected.values()]
    largest = max(float(v.abs().max()) for v in theirs)
    off = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest
    return "equal" if off < AGREE else f"off by {off:.1e}"


def summary(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and causes over judged models."""
    wrong = [{v for v in model["other"].values() if not v.startswith("not computed")} for model in models]
    served = sum(not found for found in wrong)
    return {
        "models": len(models),
        "served": served,
        "share_left": round(1.0 - served / len(models), 4) if models else None,
        "gradients_equal": sum(model["equal"] for model in models),
        "causes": dict(Counter(cause for found in wrong for cause in found)),
        "left": [model for model, found in zip(models, wrong, strict=True) if found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", help="the first seed and the one after the last, or with --join files")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after this time")
    parser.add_argument("--join", type=Path, help="write what several parts found together")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    # Read when jax is loaded, which is at the first program: compiled once and run once.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    torch.set_num_threads(1)
    if given.join is not None:
        parts = [json.loads(Path(name).read_text()) for name in given.seeds]
        models = [model for part in parts for model in part["judged"]]
        write_compact(given.join, {**summary(models), "provenance": [part["provenance"] for part in parts]})
        return
    first, last = map(int, given.seeds)
    began, models = time.monotonic(), list[dict[str, Any]]()
    for seed in range(first, last):
        if time.monotonic() - began > given.seconds:
            break
        models.append(judged(seed))
        if given.out is not None:
            found = {**summary(models), "agree": AGREE, "judged": models, "provenance": provenance(torch.device("cpu"))}
            write_compact(given.out, found)
    print(json.dumps({k: v for k, v in summary(models).items() if k != "left"}, indent=1))


if __name__ == "__main__":
    main()
