"""CPU time of a training step of predictive-coding nets beside that of their backprop twins, in turn.

python -m benchmarks.predictive pc-2h,cifar10-laptop      results/field/cost.json

Blocks of steps alternate between the two in one process, so that other work on the machine meets both; a row's figure
is the median over blocks of the ratio of CPU seconds. Inputs are random: times do not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.collect import RESULTS
from eqprop import SquaredError, papers
from eqprop.data import one_hot
from eqprop.estimators import EP, Backprop, Estimator
from eqprop.files import write_json
from eqprop.provenance import provenance
from eqprop.run.spec import Spec

CLASSES = 10


def step(spec: Spec, estimator: Estimator) -> Any:
    """A function that takes a step of training on a batch."""
    net = spec.model.build(0, torch.float32)
    cost = SquaredError()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def take(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        estimator.backward(net, cost, x, y, engine="eager")
        optimizer.step()

    return take


def seconds(take: Any, x: Tensor, y: Tensor, steps: int) -> float:
    began = time.process_time()
    for _ in range(steps):
        take(x, y)
    return (time.process_time() - began) / steps


def measured(name: str, blocks: int, steps: int) -> dict[str, Any]:
    spec = papers.find(name)
    phases, shape = spec.phases, tuple(spec.model.input_shape)  # type: ignore[attr-defined]
    ep = EP(phases.T, phases.K, phases.beta, nudging="symmetric", schedule=phases.schedule)
    x = torch.rand(spec.optimizer.batch, *shape)
    y = one_hot(torch.arange(len(x)) % CLASSES, CLASSES)
    both = step(spec, ep), step(spec, Backprop())
    for take in both:
        seconds(take, x, y, 3)
    found = [[seconds(take, x, y, steps) for take in both] for _ in range(blocks)]
    return {
        "experiment": name,
        "K": phases.K,
        "batch": len(x),
        "ratio": round(statistics.median(a / b for a, b in found), 3),
        "ratios": [round(a / b, 3) for a, b in found],
        "milliseconds": [round(1e3 * statistics.median(column), 3) for column in zip(*found, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", default="pc-2h,cifar10-laptop")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "field")
    given = parser.parse_args()
    rows = [measured(name, given.blocks, given.steps) for name in given.rows.split(",")]
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(given.out / "cost.json", {"cost": rows, "provenance": provenance()})
    for row in rows:
        print(row["experiment"], row["ratio"], row["milliseconds"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
