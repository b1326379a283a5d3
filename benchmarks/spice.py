"""Resistive nets here and in ngspice: random ones node by node, and twenty iterations of drn-xs trained by both.

python -m benchmarks.spice       results/physical/spice.json
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import eqprop
from benchmarks.collect import RESULTS, write_compact
from eqprop import papers
from eqprop.physical import spice
from eqprop.physical.resistive import Resistive
from eqprop.provenance import provenance

NETS, ITERATIONS, BATCH = 20, 20, 4


def random_net(seed: int) -> tuple[Resistive, torch.Tensor, torch.Tensor]:
    """1 to 3 hidden layers of 5 to 40 nodes, with biases; two samples and their targets."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    sizes = (number(2, 5), *(number(5, 40) for _ in range(1 + seed % 3)), number(3, 8))
    model = Resistive(sizes, 3.0 if seed % 2 else 30.0, seed=seed, dtype=torch.float64)
    for n in range(model.depth):
        b = model.bias(n)
        assert b is not None
        b.data = 0.1 * torch.randn(b.shape, generator=g, dtype=torch.float64)
    x = torch.rand(2, sizes[-1], generator=g, dtype=torch.float64)
    return model, x, torch.eye(sizes[0], dtype=torch.float64)[:2]


def strength(model: Resistive, seed: int) -> float:
    """Half of the largest nudge, of either sign in turn."""
    return (0.5 if seed % 2 else -0.5) * model.least_conductance


def nodes(seed: int) -> dict[str, Any]:
    """How far the worst node is off, free and nudged, with ideal diodes and with real ones."""
    model, x, y = random_net(seed)
    found: dict[str, Any] = {"seed": seed, "sizes": model.sizes}
    for diodes in ("ideal", "real"):
        one = spice.check(model, x, y, strength(model, seed), diodes)
        found[diodes] = {phase: getattr(one, phase)._asdict() for phase in ("free", "nudged")}
        found["nodes"] = one.nodes
    return found


def training() -> dict[str, Any]:
    """drn-xs for some iterations with ngspice as the network, and here: how far apart the weights end."""
    models, seconds, work = {}, {}, {}
    start = papers.find("drn-xs").model.build(0, torch.float32)
    for machine in ("none", "spice"):
        options: dict[str, Any] = {"lumped": True} if machine == "spice" else {}
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            run = eqprop.train(
                *("drn-xs", Path(folder) / "run"),
                samples=ITERATIONS * BATCH,
                test_samples=1,
                epochs=1,
                machine=machine,
                machine_options=options,
                engine="eager",
                threads=1,
            )
            seconds[machine] = round(time.perf_counter() - began, 1)
            models[machine] = eqprop.load(run.folder).model
            work[machine] = run.summary["estimators"]["ep-symmetric"]["trials"][0].get("work")
    with torch.no_grad():
        apart = {
            name: float((models["spice"].get_parameter(name) - p).norm() / (p - start.get_parameter(name)).norm())
            for name, p in models["none"].named_parameters()
        }
    return {"iterations": ITERATIONS, "batch": BATCH, "apart": apart, "seconds": seconds, "work": work["spice"]}


def main() -> None:
    version = subprocess.run([spice.program(), "--version"], capture_output=True, text=True, check=True).stdout
    record = {
        "ngspice": next(line.strip("* ") for line in version.splitlines() if "ngspice-" in line).split()[0],
        "nets": [nodes(seed) for seed in range(NETS)],
        "training": training(),
        "provenance": provenance(),
    }
    write_compact(RESULTS / "physical" / "spice.json", record)


if __name__ == "__main__":
    assert shutil.which("ngspice"), "apt install ngspice"
    main()
