"""The audit of settling: who is not at rest, by layer, in the laboratory and in the result of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import eqprop
from eqprop import Spec
from eqprop.gdu.settling import audit
from eqprop.models import Layered
from eqprop.models.layered import LayeredNet


def test_the_share_and_the_distance_of_each_layer() -> None:
    model = Layered((2, 3, 4), seed=0, dtype=torch.float64)
    x = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rest = eqprop.relax(model, x, eqprop.Phase(5000, stop="settled", still=0.0)).state
    at_rest = audit(model, x, rest)
    assert at_rest["s0"]["unsettled"] == at_rest["s1"]["unsettled"] == 0.0
    assert at_rest["s1"]["max"] < 1e-12
    moved = rest[0].clone()
    moved[1, 0] += 0.5  # a sample's output moves back by 0.5, and pulls its hidden layer
    found = audit(model, x, (moved, rest[1]))
    assert found["s0"]["unsettled"] == found["s1"]["unsettled"] == 0.25
    assert found["s0"]["max"] == 0.5
    new = model.step(model.drive(x), (moved, rest[1]))[1]
    assert found["s1"]["max"] == float(f"{float((new - rest[1]).detach().abs().max()):.3g}")
    assert found["s0"]["median"] < 1e-12


def test_a_run_says_who_is_not_at_rest(tmp_path: Path) -> None:
    data = torch.rand(40, 8), torch.arange(40) % 3, torch.rand(9, 8), torch.arange(9) % 3
    spec = Spec.of("small", model=LayeredNet((3, 12, 8)), K=3, estimator="ep", batch=4, epochs=1, rates={"*": 0.1})
    short, long = (eqprop.train(spec, tmp_path / str(T), data=data, T=T) for T in (1, 300))
    layers = {}
    for T, run in ((1, short), (300, long)):
        found = run.summary["estimators"]["ep"]["trials"][0]["settling"]
        assert found["samples"] == 32
        layers[T] = found["layers"]
    assert layers[1]["s0"]["unsettled"] == 1.0
    assert layers[1]["s0"]["max"] > 1e-2
    assert layers[300]["s0"]["max"] < 1e-6
    machine = eqprop.train(spec, tmp_path / "machine", data=data, machine="simulated")
    assert "settling" not in machine.summary["estimators"]["ep"]["trials"][0], "that would be work of the machine"


@pytest.mark.parametrize("content", ["half", "[]", '{"estimators": {"ep": {"trials": 3}}}', None])
def test_a_damaged_or_lost_result_is_made_anew(tmp_path: Path, content: str | None) -> None:
    data = torch.rand(40, 8), torch.arange(40) % 3, torch.rand(9, 8), torch.arange(9) % 3
    spec = Spec.of("small", model=LayeredNet((3, 12, 8)), K=3, estimator="ep", batch=4, epochs=1, rates={"*": 0.1})
    eqprop.train(spec, tmp_path / "run", data=data, T=5)
    path = tmp_path / "run" / "result.json"
    before = json.loads(path.read_text())
    path.unlink() if content is None else path.write_text(content)
    eqprop.resume(tmp_path / "run", data=data)
    assert json.loads(path.read_text())["estimators"] == before["estimators"]
