"""Train a net of oscillators with weights and phases on coarse grids; errors on held-out or on test images, as JSON.

    python examples/physical/quantised_oscillators.py --weight-bits 10 --phase-bits 4 --held 10000 --out record.json

The weights are kept in full outside the device, or on its grid with --on-grid. Phases are read on a grid of 2^bits
levels from -pi to pi; --dither adds normal noise of so many steps of that grid before they are rounded.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from eqprop import EP, data, papers, relax
from eqprop.physical import Imperfections, Simulated
from eqprop.physical.oscillators import PhaseError
from eqprop.relax import Phase


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, value in (
        ("weight-bits", int, None),
        ("phase-bits", int, None),
        ("weight-limit", float, None),
        ("dither", float, 0.0),
        ("rate", float, 0.3),
        ("T", int, 20),
        ("K", int, 4),
        ("beta", float, 0.1),
        ("seed", int, 0),
        ("epochs", int, 10),
        ("samples", int, 60000),
        ("held", int, 0),
        ("out", Path, None),
    ):
        options.add_argument(f"--{name}", type=kind, default=value)
    options.add_argument("--on-grid", action="store_true")
    a = options.parse_args()
    torch.set_num_threads(1)
    step = 2.0 * math.pi / (2**a.phase_bits - 1) if a.phase_bits else 0.0
    imperfections = Imperfections(
        weight_bits=a.weight_bits,
        weight_limit=a.weight_limit,
        read_bits=a.phase_bits,
        state_range=(-math.pi, math.pi),
        read_noise=a.dither * step,
        on_grid=a.on_grid,
        seed=a.seed,
    )
    device = Simulated(papers.find("oscillators-1h").model.build(a.seed, torch.float32), imperfections)
    images = data.mnist()
    x, y, x_test, y_test = images.train_x, images.train_y, images.test_x, images.test_y
    if a.held:
        x, y, x_test, y_test = x[: -a.held], y[: -a.held], x[-a.held :], y[-a.held :]
    x, y, x_test = 2.0 * x[: a.samples] - 1.0, torch.eye(10)[y[: a.samples]], 2.0 * x_test - 1.0
    ep, cost = EP(a.T, a.K, a.beta, "symmetric", checked=False), PhaseError()
    optimizer = torch.optim.SGD(device.parameters(), lr=a.rate)
    order = torch.Generator().manual_seed(a.seed)
    record = {key: str(value) if isinstance(value, Path) else value for key, value in vars(a).items()}
    errors, begun = [], time.process_time()
    for _ in range(a.epochs):
        for rows in torch.randperm(len(x), generator=order).split(20):
            optimizer.zero_grad()
            ep.backward(device, cost, x[rows], y[rows])
            optimizer.step()
        wrong = sum(
            int((cost.scores(relax(device, xs, Phase(a.T)).state).argmax(1) != ys).sum())
            for xs, ys in zip(x_test.split(1000), y_test.split(1000), strict=True)
        )
        errors.append(round(100.0 * wrong / len(x_test), 2))
        record |= {"errors": errors, "work": device.work.to_dict(), "cpu_seconds": time.process_time() - begun}
        print(json.dumps(record), flush=True)
        if a.out:
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
