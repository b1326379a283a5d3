"""How many outputs get no gradient at all at the first iteration, with EP and with BPTT.

python -m benchmarks.silent     writes results/tried/silent-outputs.json

An output that rests below 0 or above 1 is clipped there, and the derivative of the clip is zero: BPTT does not see it.
EP's nudge moves it if beta is larger than its distance from the clip.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.collect import write_compact
from eqprop import SquaredError, papers
from eqprop.data import mnist, one_hot
from eqprop.provenance import provenance
from eqprop.run.session import build_model, make_estimator

OUT = Path(__file__).resolve().parents[1] / "results" / "tried" / "silent-outputs.json"
SAMPLES = 60
ROWS = (
    *((name, preset, "b0") for name in ("EB-1h", "EB-2h") for preset in papers.PRESETS),
    *(("P-conv", preset, "bfc0") for preset in papers.PRESETS),
)


def silent(name: str, preset: str, bias: str, seed: int, estimator: str) -> int:
    """Outputs whose bias has a gradient of exactly zero, over the first samples of the training set."""
    experiment, images = papers.find(name, preset), mnist()
    model = build_model(experiment, seed)
    assert model.input_shape is not None
    x = images.train_x[:SAMPLES].view(-1, *model.input_shape)
    y = one_hot(images.train_y[:SAMPLES], images.classes)
    _, gradient = make_estimator(experiment, estimator).gradient(model, SquaredError(), x, y)
    return int((gradient[model.get_parameter(bias)] == 0).sum())


def main() -> None:
    rows = [
        {
            "name": name,
            "preset": preset,
            **{
                estimator: [silent(name, preset, bias, seed, estimator) for seed in range(5)]
                for estimator in ("ep", "bptt")
            },
        }
        for name, preset, bias in ROWS
    ]
    made = provenance(torch.device("cpu"))
    write_compact(OUT, {"samples": SAMPLES, "seeds": list(range(5)), "rows": rows, "provenance": made})


if __name__ == "__main__":
    main()
