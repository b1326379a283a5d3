"""Hamiltonian echoes on a sequence task: MNIST row by row into 64 oscillators, beside backpropagation through time.

python -m benchmarks.echo --seed 0                       results/field/echo-0.json: both, from the same weights
python -m benchmarks.echo --held-out 10000 --delta 0.3   to choose settings, without the test set

A step is one row of 28 pixels; a softmax reads the positions after the last. A record that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.collect import RESULTS
from eqprop.data import mnist, one_hot
from eqprop.echo import Echo, ForcedOscillators, ThroughTime
from eqprop.files import write_json
from eqprop.models import CrossEntropy
from eqprop.provenance import provenance

SIDE, SIZE, CLASSES, EXAMINED = 28, 64, 10, 100


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--delta", type=float, default=0.3)
    parser.add_argument("--eps", type=float, default=0.1)
    parser.add_argument("--held-out", type=int, default=0)
    parser.add_argument("--samples", type=int, help="train on the first N only")
    parser.add_argument("--by", default="echo,bptt")
    parser.add_argument("--out", type=Path, default=RESULTS / "field")
    parser.add_argument("--name", help="of the record; by default echo-SEED")
    return parser.parse_args()


def digits(given: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then those that errors are measured on."""
    images = mnist()
    x, labels = images.floats(images.train_x).reshape(-1, SIDE, SIDE), images.train_y
    if given.held_out:
        n = len(x) - given.held_out
        x, labels, test_x, test_y = x[:n], labels[:n], x[n:], labels[n:]
    else:
        test_x, test_y = images.floats(images.test_x).reshape(-1, SIDE, SIDE), images.test_y
    return x[: given.samples], labels[: given.samples], test_x, test_y


def built(given: argparse.Namespace, dtype: torch.dtype = torch.float32) -> tuple[ForcedOscillators, CrossEntropy]:
    return (
        ForcedOscillators(SIDE, SIZE, seed=given.seed, dtype=dtype),
        CrossEntropy(SIZE, CLASSES, seed=given.seed, dtype=dtype),
    )


@torch.no_grad()
def error(net: ForcedOscillators, cost: CrossEntropy, way: ThroughTime, x: Tensor, labels: Tensor) -> float:
    """In percent."""
    wrong = 0
    for images, answers in zip(x.split(1000), labels.split(1000), strict=True):
        s = net.start(images)
        for t in range(SIDE):
            s = way.step(net, s, images[:, t])
        wrong += int((cost.scores((s.y,)).argmax(1) != answers).sum())
    return 100.0 * wrong / len(x)


def cosines(
    given: argparse.Namespace, net: ForcedOscillators, cost: CrossEntropy, x: Tensor, y: Tensor
) -> dict[str, float]:
    """Of the echo's gradient with the exact one, by parameter of the net."""
    exact = ThroughTime(given.delta).gradient(net, cost, x, y)[1]
    found = Echo(given.delta, eps=given.eps).gradient(net, cost, x, y)[1]
    return {
        name: round(float(torch.cosine_similarity(found[p].flatten(), exact[p].flatten(), dim=0)), 6)
        for name, p in net.named_parameters()
    }


def trained(given: argparse.Namespace, by: str) -> dict[str, Any]:
    x, labels, test_x, test_y = digits(given)
    net, cost = built(given)
    exact = ThroughTime(given.delta)
    way = Echo(given.delta, eps=given.eps) if by == "echo" else exact
    optimizer = torch.optim.Adam([*net.parameters(), *cost.parameters()], lr=given.lr)
    order = torch.Generator().manual_seed(given.seed)
    few, few_y = x[:EXAMINED], one_hot(labels[:EXAMINED], CLASSES)
    before, errors, losses, began = cosines(given, net, cost, few, few_y), [], [], time.process_time()
    for _ in range(given.epochs):
        total = 0.0
        for chosen in torch.randperm(len(x), generator=order).split(given.batch):
            optimizer.zero_grad()
            run = way.backward(net, cost, x[chosen], one_hot(labels[chosen], CLASSES))
            optimizer.step()
            total += float(run.loss.sum())
        losses.append(round(total / len(x), 4))
        errors.append(round(error(net, cost, exact, test_x, test_y), 4))
        print(f"{by} seed {given.seed}: loss {losses[-1]:.4f}, error {errors[-1]:.2f} %", flush=True)
    return {
        "test_error": errors,
        "loss": losses,
        "cpu_minutes": round((time.process_time() - began) / 60.0, 2),
        "cosines": {"before": before, "after": cosines(given, net, cost, few, few_y)},
    }


def main() -> None:
    given = parsed()
    path = given.out / f"{given.name or f'echo-{given.seed}'}.json"
    known = json.loads(path.read_text()) if path.is_file() else {"by": {}}
    settings = {name: v for name, v in vars(given).items() if name not in ("out", "name", "by")}
    if known["by"] and known["settings"] != settings:
        raise SystemExit(f"{path} has other settings: {known['settings']}. Give another --name.")
    for by in given.by.split(","):
        if by not in known["by"]:
            known["by"][by] = trained(given, by)
            given.out.mkdir(parents=True, exist_ok=True)
            write_json(path, {**known, "settings": settings, "provenance": provenance()})
    print(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
