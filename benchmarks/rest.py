"""Whether free phases come to rest before their T steps are over: what an exact early stop could save.

python -m benchmarks.rest     writes results/bench/rest.json

A state that equals, bit for bit, that of one or two steps before brings nothing new, and all further steps can be
skipped in pairs. Counted in float32 per sample and per group of seven, as a kernel runs them: from the printed initial
weights, from PyTorch's, and after an epoch of EP from the printed ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import eqprop
from benchmarks.collect import write_compact
from eqprop import papers
from eqprop.dynamics import Dynamics
from eqprop.provenance import provenance
from eqprop.relax import Phase, Schedule, relax
from eqprop.run.session import build_model

OUT = Path(__file__).resolve().parents[1] / "results" / "bench" / "rest.json"
ROWS: dict[str, tuple[Schedule, ...]] = {
    "P-2h": ("synchronous", "alternating"),
    "P-3h": ("synchronous", "alternating"),
    "EB-2h": ("synchronous",),
}
SAMPLES, GROUP, SEED = 140, 7, 0


@torch.no_grad()
def at_rest(model: Dynamics, x: Tensor, T: int, schedule: Schedule) -> list[bool]:
    """Whether each sample repeats, within T steps, the state of one or two steps before; alternating, two or four."""
    drive, s = model.drive(x), model.init_state(x)
    span = 2 if schedule == "alternating" else 1
    recent = [s]
    found = torch.zeros(len(x), dtype=torch.bool)
    for t in range(T):
        s = model.half_step(drive, s, (T - 1 - t) % 2) if schedule == "alternating" else model.step(drive, s)
        for before in recent[-2 * span :: span]:
            found |= torch.stack([(a == b).flatten(1).all(1) for a, b in zip(s, before, strict=True)]).all(0)
        recent = [*recent[1 - 2 * span :], s]
    return found.tolist()


def counted(model: Dynamics, x: Tensor, T: int, schedule: Schedule) -> dict[str, Any]:
    found = at_rest(model, x, T, schedule)
    residual = relax(model, x, Phase(T, schedule=schedule)).residual
    return {
        "schedule": schedule,
        "T": T,
        "samples": SAMPLES,
        "at_rest": sum(found),
        "groups": SAMPLES // GROUP,
        "groups_at_rest": sum(all(found[i : i + GROUP]) for i in range(0, SAMPLES, GROUP)),
        "residual_median": float(residual.median()),
        "residual_max": float(residual.max()),
    }


def networks(name: str) -> dict[str, Dynamics]:
    experiment = papers.find(name, "paper")
    with tempfile.TemporaryDirectory() as folder:
        eqprop.train(experiment, Path(folder) / "run", epochs=1, trials=1, seed=SEED)
        trained = eqprop.load(Path(folder) / "run").model
    default = build_model(experiment.override(init="default"), SEED)
    return {"printed": build_model(experiment, SEED), "PyTorch's": default, "after an epoch by EP": trained}


def main() -> None:
    images, rows = eqprop.data.mnist(), []
    for name, schedules in ROWS.items():
        T = papers.find(name, "paper").phases.T
        for weights, model in networks(name).items():
            assert model.input_shape is not None
            x = images.train_x[:SAMPLES].view(-1, *model.input_shape)
            for schedule in schedules:
                rows.append({"name": name, "weights": weights, **counted(model, x, T, schedule)})
                print(rows[-1], flush=True)
    write_compact(OUT, {"seed": SEED, "group": GROUP, "rest": rows, "machine": provenance(torch.device("cpu"))})


if __name__ == "__main__":
    main()
