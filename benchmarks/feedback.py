"""AsymEP with feedback that is 0, or begins at 0 and is trained, beside backprop, from the same weights and digits.

python -m benchmarks.feedback --seed 0        results/field/feedback-0-seed-0.json

Three trainings of 784-256-10 (tanh, softmax cost, SGD): by backprop, by AsymEP with feedback weights held at 0, and by
AsymEP with the same weights trained. Errors per epoch; |B| and |J - J^T|/|J| of the third.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.collect import RESULTS
from eqprop.data import mnist, one_hot
from eqprop.estimators import Backprop, Estimator
from eqprop.estimators.asymmetric import AsymEP
from eqprop.estimators.homeostasis import relative_asymmetry
from eqprop.files import write_json
from eqprop.models import Dense, Network
from eqprop.models.readout import SoftmaxCrossEntropy
from eqprop.provenance import provenance
from eqprop.relax import Phase, relax
from eqprop.state import State

CLASSES, HIDDEN, EXAMINED = 10, 256, 100
STEPS, BETA = 20, 0.01
WAYS: dict[str, Estimator] = {
    "backprop": Backprop(),
    "held at 0": AsymEP(2, 2, beta=BETA),
    "trained from 0": AsymEP(STEPS, STEPS, beta=BETA),
}
"""Two steps pass a net without feedback; with it errors return more than once."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--samples", type=int, help="train on the first N only")
    parser.add_argument("--by", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, default=RESULTS / "field")
    return parser.parse_args()


def built(seed: int) -> Network:
    net = Network(
        784,
        {"s0": CLASSES, "s1": HIDDEN},
        [Dense("x", "s1"), Dense("s1", "s0", untied=True)],
        {"s0": "identity", "s1": "tanh"},
        init="glorot",
        seed=seed,
    )
    with torch.no_grad():
        net.get_parameter("B01").zero_()
    return net


def trained(given: argparse.Namespace, by: str) -> dict[str, Any]:
    way = WAYS[by]
    images = mnist()
    x, labels = images.floats(images.train_x)[: given.samples], images.train_y[: given.samples]
    test_x, test_y = images.floats(images.test_x), images.test_y
    net, cost = built(given.seed), SoftmaxCrossEntropy()
    net.get_parameter("B01").requires_grad_(by == "trained from 0")
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=given.lr)
    order, errors, began = torch.Generator().manual_seed(given.seed), [], time.process_time()
    for _ in range(given.epochs):
        for chosen in torch.randperm(len(x), generator=order).split(given.batch):
            optimizer.zero_grad()
            way.backward(net, cost, x[chosen], one_hot(labels[chosen], CLASSES))
            optimizer.step()
        errors.append(round(error(net, test_x, test_y), 4))
        print(f"seed {given.seed}, {by}: {errors[-1]:.2f} %", flush=True)
    found = {"test_error": errors, "cpu_minutes": round((time.process_time() - began) / 60.0, 2)}
    return found | asymmetry(net, x[:EXAMINED])


def rest(net: Network, x: Tensor) -> State:
    return relax(net, x, Phase(STEPS, checked=False)).state


@torch.no_grad()
def error(net: Network, x: Tensor, labels: Tensor) -> float:
    """In percent, where free phases end."""
    scores = torch.cat([rest(net, part)[0] for part in x.split(1000)])
    return 100.0 * float((scores.argmax(1) != labels).double().mean())


def asymmetry(net: Network, x: Tensor) -> dict[str, float]:
    return {
        "norm_of_B": round(float(net.get_parameter("B01").detach().norm()), 4),
        "norm_of_W": round(float(net.get_parameter("W01").detach().norm()), 4),
        "asymmetry": round(relative_asymmetry(net, x, rest(net, x)), 4),
    }


def main() -> None:
    given = parsed()
    found = {by: trained(given, by) for by in given.by.split(",")}
    settings = {name: v for name, v in vars(given).items() if name not in ("out", "by")}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"feedback-0-seed-{given.seed}.json"
    write_json(path, {"by": found, "settings": settings, "provenance": provenance()})
    print(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
