"""Train the two small nets of `eqprop play`, quantise them, and store them with the digits the page offers.

python -m benchmarks.play_nets [--runs FOLDER]       about five minutes on one core

Writes src/eqprop/report/play-nets.json: weights as 8-bit integers with a scale per row, biases in float64, and beside
them the experiments, the errors measured before and after quantising, and where the numbers come from.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eqprop.data import Images, mnist
from eqprop.files import write_json
from eqprop.models import Layered
from eqprop.models.layered import LayeredNet
from eqprop.provenance import provenance
from eqprop.relax import Phase, relax
from eqprop.report.play import NETS, dequantised
from eqprop.run import train
from eqprop.run.evaluate import load
from eqprop.run.spec import Spec

EXPERIMENTS = {
    "energy-based": Spec.of(
        optimizer="SGD",
        estimator="ep",
        name="play-energy-based",
        model=LayeredNet((10, 64, 784), "energy-based", "sigmoid", eps=0.2),
        T=100,
        K=20,
        beta=0.2,
        epochs=20,
        rates={"W12": 0.2, "W01": 0.1},
        decay="cosine",
    ),
    "prototypical": Spec.of(
        optimizer="SGD",
        estimator="ep",
        name="play-prototypical",
        model=LayeredNet((10, 64, 784)),
        T=30,
        K=10,
        beta=0.1,
        epochs=20,
        rates={"W12": 0.08, "W01": 0.04},
        decay="cosine",
    ),
}
"""Energy-based without the clip, for which Theorem 1 is exact; prototypical as P-1h, with fewer neurons."""

LONG = 2000
"""Free steps after which a sample that still moves goes back and forth for good."""


def quantised(weight: Tensor) -> dict[str, Any]:
    """Integers in -127 ... 127 and a scale per row; the largest of a row is exact."""
    scale = weight.abs().amax(1, keepdim=True) / 127.0
    integers = (weight / scale).round().to(torch.int8)
    return {
        "shape": list(weight.shape),
        "scale": scale.flatten().tolist(),
        "int8": base64.b64encode(integers.numpy().tobytes()).decode(),
    }


def described(model: Layered) -> dict[str, Any]:
    values = {name: p.detach().double() for name, p in model.named_parameters()}
    return {
        "setting": "energy-based" if model.energy_based else "prototypical",
        "activation": model.activation.name,
        "eps": model.eps,
        "sizes": list(model.sizes),
        "weights": {name: quantised(v) for name, v in values.items() if v.dim() == 2},
        "biases": {name: v.tolist() for name, v in values.items() if v.dim() == 1},
    }


def test_error(model: Layered, images: Images, T: int) -> float:
    """Percent, in float64."""
    state = relax(model, images.test_x, T).state
    return round(100.0 * float((state[0].argmax(1) != images.test_y).double().mean()), 2)


def example(images: Images, index: int) -> dict[str, Any]:
    pixels = (images.test_x[index] * 255.0).round().to(torch.uint8)
    return {
        "index": index,
        "label": int(images.test_y[index]),
        "uint8": base64.b64encode(pixels.numpy().tobytes()).decode(),
    }


def digits(model: Layered, images: Images) -> list[int]:
    """Of every class the first test image the net reads rightly and settles on, then two that it gets wrong."""
    free = relax(model, images.test_x, LONG)
    right = (free.state[0].argmax(1) == images.test_y) & free.settled
    chosen = [int((right & (images.test_y == digit)).nonzero()[0]) for digit in range(images.classes)]
    return [*chosen, *((~right & free.settled).nonzero()[:2].flatten().tolist())]


def back_and_forth(model: Layered, images: Images) -> int:
    """The test image that keeps moving most synchronously and comes to rest alternating."""
    free = relax(model, images.test_x, LONG)
    turns = relax(model, images.test_x, Phase(LONG, "alternating"))
    moving = torch.where(turns.settled, free.residual, 0.0)
    if float(moving.max()) < 0.1:
        raise ValueError(f"Every test image settles ({float(moving.max()):.1e} at most). Train with another seed.")
    return int(moving.argmax())


def trained(name: str, runs: Path, images: Images) -> dict[str, Any]:
    experiment = EXPERIMENTS[name]
    folder = runs / experiment.name
    result = train(experiment, folder, threads=1)
    model = load(folder).model
    assert isinstance(model, Layered)
    net = described(model)
    before = test_error(model.double(), images, experiment.phases.T)
    return {
        **net,
        "experiment": experiment.to_dict(),
        "seconds": round(result.summary["seconds"]),
        "test_error": {"trained": before, "quantised": test_error(dequantised(net), images, experiment.phases.T)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="Keep the run folders here. [default: a temporary folder]")
    given = parser.parse_args()
    images = mnist(dtype=torch.float64)
    with tempfile.TemporaryDirectory() as temporary:
        nets = {name: trained(name, given.runs or Path(temporary), images) for name in EXPERIMENTS}
    chosen = digits(dequantised(nets["energy-based"]), images)
    content = {
        "nets": nets,
        "examples": [example(images, index) for index in chosen],
        "back_and_forth": example(images, back_and_forth(dequantised(nets["prototypical"]), images)),
        "data": {"name": "MNIST, test set", "licence": "CC BY-SA 3.0", "sha256": images.sha256},
        "provenance": {**provenance(), "command": "python -m benchmarks.play_nets"},
    }
    write_json(NETS, content)
    print(NETS)


if __name__ == "__main__":
    main()
