"""EP's updates in float32, by `xla` and by the reference, against float64.

    python -m benchmarks.updates --out results/bench/updates.json

The error of an update is its distance from float64's, |a - b| / |b|, the worst parameter's; both engines start from the
same weights and samples, which float64 gets to the last bit. A row has the median over seeds of each engine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.collect import write_compact
from benchmarks.peers import Peer, peers
from eqprop import EP, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.models import Layered
from eqprop.provenance import provenance

BETAS = (0.5, 0.1, 0.03, 0.01, 0.003, 0.001)
SEEDS = 5
T, K = 50, 20


def update(model: Dynamics, beta: float, x: Tensor, y: Tensor, engine: str) -> dict[str, Tensor]:
    """dL/dtheta by name."""
    model.zero_grad(set_to_none=True)
    EP(T, K, beta=beta).backward(model, SquaredError(), x, y, engine=engine)
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Of the worst parameter."""
    return max(float((found[name] - g).norm() / g.norm()) for name, g in exact.items())


def cases() -> dict[str, Peer | None]:
    """Own models of two layers and more, and a net of the package."""
    chosen = {"own energy 64", "own energy 256", "own Phi, tanh", "softmax attention", "from_transition"}
    return {peer.name: peer for peer in peers() if peer.name in chosen} | {"Layered, 784-256-10": None}


def made(peer: Peer | None, seed: int) -> tuple[Dynamics, Dynamics, Tensor, Tensor]:
    """The model in float32 and in float64, x and y."""
    source = torch.Generator().manual_seed(seed)
    if peer is None:
        model: Dynamics = Layered((10, 256, 784), activation="tanh", seed=seed)
        return model, _wide(Layered((10, 256, 784), activation="tanh", seed=seed)), *_batch(32, source)
    theta = peer.data()[0]
    moved = {
        name: torch.from_numpy(v) * (0.9 + 0.2 * torch.rand(v.shape, generator=source)) for name, v in theta.items()
    }
    given = {name: v.numpy() for name, v in moved.items()}
    return peer.model(given), _wide(peer.model(given)), *_batch(peer.batch, source)


def _wide(model: Dynamics) -> Dynamics:
    wide: Dynamics = model.double()
    return wide


def _batch(size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.rand((size, 784), generator=source), torch.rand((size, 10), generator=source)


def measured(peer: Peer | None) -> list[dict[str, float]]:
    """A row per beta."""
    errors: dict[float, dict[str, list[float]]] = {beta: {"xla": [], "eager": []} for beta in BETAS}
    for seed in range(SEEDS):
        single, double, x, y = made(peer, seed)
        for beta in BETAS:
            exact = update(double, beta, x.double(), y.double(), "eager")
            for engine, found in errors[beta].items():
                found.append(error(update(single, beta, x, y, engine), exact))
    rows = []
    for beta, found in errors.items():
        xla, eager = (statistics.median(found[engine]) for engine in ("xla", "eager"))
        rows.append({"beta": beta, "xla": xla, "eager": eager, "ratio": xla / eager})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {name: measured(peer) for name, peer in cases().items()}
    ratios = [row["ratio"] for rows in found.values() for row in rows]
    summary = {"geometric mean": math.exp(statistics.fmean(map(math.log, ratios))), "largest": max(ratios)}
    document = {"T": T, "K": K, "seeds": SEEDS, "updates": found, "ratios": summary}
    print(json.dumps(document, indent=1))
    if given.out is not None:
        write_compact(given.out, {**document, "provenance": provenance(torch.device("cpu"))})


if __name__ == "__main__":
    main()
