"""Which estimator suits a model of one's own: ten small nets, one-sided, symmetric and random-sign nudging.

python -m benchmarks.own_models    results/own-models.json (about ten minutes on one thread)

The nets are as a user may write them. All share beta, T, K, the optimizer and its rate; none is tuned.
Measured are the cosine with the exact gradient (recurrent backprop at the steady state, in float64) at the first
weights, and the test error after a short training.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from benchmarks.collect import RESULTS, rounded, write_compact
from eqprop import EP, RBP, Dynamics, SquaredError, State, from_energy, from_primitive, from_transition, relax
from eqprop.data import mnist, one_hot
from eqprop.estimators.ep import Nudging, random_sign
from eqprop.models import Conv, Dense, Layered, Network
from eqprop.provenance import provenance

T, K, BETA = 30, 10, 0.1
BATCH, EPOCHS, RATE = 20, 15, 0.005
TRAIN, TEST = 400, 1000
SEEDS = (0, 1, 2)
INPUTS, HIDDEN, OUTPUTS, SIDE = 49, 32, 10, 7
SETTLING, TERMS = 5000, 2000
"""Steps and terms of the exact gradient; both stop once nothing changes."""
NUDGING: dict[str, Nudging] = {"ep": "one-sided", "ep-symmetric": "symmetric", "ep-random-sign": "random-sign"}

Theta = Mapping[str, Tensor]


class Digits(NamedTuple):
    """MNIST in 7 x 7 pixels, the first images of each part."""

    x: Tensor
    labels: Tensor
    test_x: Tensor
    test_labels: Tensor


def small_digits() -> Digits:
    images = mnist()

    def shrunk(x: Tensor, n: int) -> Tensor:
        return avg_pool2d(x[:n].reshape(n, 1, 28, 28), 4).flatten(1)

    parts = (shrunk(images.train_x, TRAIN), images.train_y[:TRAIN])
    return Digits(*parts, shrunk(images.test_x, TEST), images.test_y[:TEST])


def weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Glorot's range for matrices, zeros for biases."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: (2 * torch.rand(shape, generator=source) - 1) * math.sqrt(6 / sum(shape))
        if len(shape) > 1
        else torch.zeros(shape)
        for name, shape in shapes.items()
    }


def two_layers(seed: int) -> dict[str, Tensor]:
    return weights(seed, W=(OUTPUTS, HIDDEN), V=(HIDDEN, INPUTS), b=(OUTPUTS,), c=(HIDDEN,))


def coupling(x: Tensor, s: State, theta: Theta) -> Tensor:
    """s0.(W.s1 + b) + s1.(V.x + c)."""
    to_output = s[1] @ theta["W"].T + theta["b"]
    return (s[0] * to_output).sum(-1) + (s[1] * (x @ theta["V"].T + theta["c"])).sum(-1)


def squares(s: State) -> Tensor:
    return 0.5 * sum((layer.square().sum(-1) for layer in s), start=torch.zeros(()))


def hopfield(seed: int) -> Dynamics:
    def energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        return squares(s) - coupling(x, tuple(layer.clamp(0, 1) for layer in s), theta)

    return from_energy(energy, two_layers(seed), (OUTPUTS, HIDDEN), eps=0.5, project=lambda v: v.clamp(0, 1))


def quartic(seed: int) -> Dynamics:
    def energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        walls = 0.25 * (s[0].pow(4).sum(-1) + s[1].pow(4).sum(-1))
        return squares(s) + walls - coupling(x, s, theta)

    return from_energy(energy, two_layers(seed), (OUTPUTS, HIDDEN), eps=0.2)


def predictive_coding(seed: int) -> Dynamics:
    def energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        output = s[0] - torch.tanh(s[1]) @ theta["W"].T - theta["b"]
        hidden = s[1] - x @ theta["V"].T - theta["c"]
        return 0.5 * (output.square().sum(-1) + hidden.square().sum(-1))

    return from_energy(energy, two_layers(seed), (OUTPUTS, HIDDEN), eps=0.1)


def linear_primitive(seed: int) -> Dynamics:
    """The setting of the theorem; half the usual range of W, so that it contracts."""
    theta = two_layers(seed)
    return from_primitive(coupling, theta | {"W": 0.5 * theta["W"]}, (OUTPUTS, HIDDEN))


def tanh_primitive(seed: int) -> Dynamics:
    return from_primitive(coupling, two_layers(seed), (OUTPUTS, HIDDEN), squash=torch.tanh)


def transition(seed: int) -> Dynamics:
    """Feedback by weights of its own, so that there is no primitive."""
    theta = two_layers(seed) | weights(seed + 1000, B=(HIDDEN, OUTPUTS))

    def step(x: Tensor, s: State, theta: Theta) -> State:
        hidden = x @ theta["V"].T + s[0] @ theta["B"].T + theta["c"]
        return torch.sigmoid(s[1] @ theta["W"].T + theta["b"]), torch.sigmoid(hidden)

    return from_transition(step, theta, (OUTPUTS, HIDDEN))


def conv_net(seed: int) -> Dynamics:
    layers = {"out": OUTPUTS, "h": (8, 3, 3)}
    links = [Conv("x", "h", padding=1, pool=2, pooling="average"), Dense("h", "out")]
    return Network((1, SIDE, SIDE), layers, links, "hard-sigmoid", seed=seed)


def skip_net(seed: int) -> Dynamics:
    """Two hidden layers, and the input joined to both and to the output."""
    pairs = (("x", "h1"), ("h1", "h2"), ("h2", "out"), ("x", "h2"), ("x", "out"))
    return Network(INPUTS, {"out": OUTPUTS, "h2": 24, "h1": HIDDEN}, [Dense(*p) for p in pairs], "sigmoid", seed=seed)


NETS: dict[str, Callable[[int], Dynamics]] = {
    "quartic energy": quartic,
    "Hopfield energy": hopfield,
    "predictive coding": predictive_coding,
    "linear primitive": linear_primitive,
    "tanh primitive": tanh_primitive,
    "transition": transition,
    "sigmoid layers": lambda seed: Layered((OUTPUTS, HIDDEN, INPUTS), seed=seed),
    "hard-sigmoid layers": lambda seed: Layered((OUTPUTS, HIDDEN, INPUTS), activation="hard-sigmoid", seed=seed),
    "convolution": conv_net,
    "skip net": skip_net,
}


def shaped(model: Dynamics, x: Tensor) -> Tensor:
    return x.reshape(len(x), *(model.input_shape or (INPUTS,)))


def flat(model: Dynamics, grads: Mapping[Any, Tensor]) -> Tensor:
    return torch.cat([grads[p].flatten() for p in model.parameters() if p in grads])


def cosines(make: Callable[[int], Dynamics], seed: int, digits: Digits) -> dict[str, float]:
    """Each estimator's cosine with the exact gradient at the first weights; random signs: the mean over both."""
    model = make(seed).double()
    x, y = shaped(model, digits.x[:BATCH].double()), one_hot(digits.labels[:BATCH], OUTPUTS, torch.float64)
    cost = SquaredError()
    exact = flat(model, RBP(SETTLING, TERMS, stop="settled").gradient(model, cost, x, y)[1])

    def cosine(beta: float, nudging: Nudging) -> float:
        found = flat(model, EP(T, K, beta=beta, nudging=nudging).gradient(model, cost, x, y)[1])
        return float(found @ exact / (found.norm() * exact.norm()))

    up, down = cosine(BETA, "one-sided"), cosine(-BETA, "one-sided")
    return {"ep": up, "ep-symmetric": cosine(BETA, "symmetric"), "ep-random-sign": (up + down) / 2}


def error_after_training(make: Callable[[int], Dynamics], seed: int, digits: Digits, estimator: str) -> float | None:
    """Test error in percent; None if training diverges."""
    model, cost = make(seed), SquaredError()
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    ep = EP(T, K, beta=BETA, nudging=NUDGING[estimator])
    x, y = shaped(model, digits.x), one_hot(digits.labels, OUTPUTS, torch.float32)
    source, iteration = torch.Generator().manual_seed(seed), 0
    try:
        for _ in range(EPOCHS):
            for batch in torch.randperm(TRAIN, generator=source).split(BATCH):
                now = ep.with_sign(random_sign(seed, iteration)) if ep.nudging == "random-sign" else ep
                optimizer.zero_grad()
                now.backward(model, cost, x[batch], y[batch])
                optimizer.step()
                iteration += 1
        outputs = relax(model, shaped(model, digits.test_x), T).state[0]
    except ArithmeticError:
        return None
    return 100.0 * float((outputs.argmax(-1) != digits.test_labels).double().mean())


def measured(name: str, digits: Digits) -> dict[str, Any]:
    make = NETS[name]
    each = [cosines(make, seed, digits) for seed in SEEDS]
    errors = {e: [error_after_training(make, seed, digits, e) for seed in SEEDS] for e in NUDGING}
    found = {"name": name, "cosine": {e: [c[e] for c in each] for e in NUDGING}, "test_error": errors}
    print(found, flush=True)
    return rounded(found)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "own-models.json")
    parser.add_argument("nets", nargs="*", help="some of the nets; by default all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    digits = small_digits()
    settings = {"T": T, "K": K, "beta": BETA, "batch": BATCH, "epochs": EPOCHS, "optimizer": "Adam", "rate": RATE}
    settings |= {"training_samples": TRAIN, "test_samples": TEST, "data": "mnist, 7 x 7 pixels", "seeds": list(SEEDS)}
    nets = [measured(name, digits) for name in given.nets or NETS]
    write_compact(given.out, {"settings": settings, "nets": nets, "provenance": provenance()})


if __name__ == "__main__":
    main()
