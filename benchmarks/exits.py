"""Short processes that train and exit: each must end with status 0.

python -m benchmarks.exits 200 --out results/bench/exits.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.collect import write_compact
from eqprop.provenance import provenance

SHORT = """
import torch, eqprop
from eqprop import EP, SquaredError, from_energy
torch.set_num_threads(1)
def energy(x, s, th):
    return 0.5 * (s[0].square().sum(-1) + s[1].square().sum(-1)) - (s[0].tanh() * (s[1].tanh() @ th["W"].T)).sum(-1) \\
        - (s[1].tanh() * (x @ th["V"].T)).sum(-1)
model = from_energy(energy, {"W": 0.1 * torch.randn(3, 200), "V": 0.1 * torch.randn(200, 300)}, (3, 200), eps=0.3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y, ep = torch.rand(50, 300), torch.rand(50, 3), EP(20, 5, beta=0.3)
for _ in range(5):
    optimizer.zero_grad()
    ep.backward(model, SquaredError(), x, y, engine="xla")
    optimizer.step()
print(float(sum(p.sum() for p in model.parameters())) < 1e9)
"""
"""Gradients large enough that their memory is taken over from jax."""


def statuses(count: int, seconds: float) -> Counter[int]:
    """How many processes ended with which status."""
    found: Counter[int] = Counter()
    began = time.monotonic()
    while sum(found.values()) < count and time.monotonic() - began < seconds:
        done = subprocess.run([sys.executable, "-c", SHORT], env=dict(os.environ), capture_output=True, text=True)
        found[done.returncode or (0 if done.stdout.strip() == "True" else -999)] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no process after this time")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = statuses(given.count, given.seconds)
    result = {"processes": sum(found.values()), "statuses": {str(k): v for k, v in found.items()}}
    if given.out is not None:
        write_compact(given.out, {**result, "provenance": provenance(torch.device("cpu"))})
    print(result)
    sys.exit(set(found) != {0})


if __name__ == "__main__":
    main()
