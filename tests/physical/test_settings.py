"""A machine as data: named in a spec, run in training with its work counted, refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import eqprop
from eqprop import Spec
from eqprop.models.layered import LayeredNet
from eqprop.physical import Machine, Simulated, settings
from eqprop.run import own

DATA = torch.rand(40, 8), torch.arange(40) % 3, torch.rand(9, 8), torch.arange(9) % 3
SMALL = Spec.of("small", model=LayeredNet((3, 12, 8)), T=20, K=5, estimator="ep", batch=4, epochs=1, rates={"*": 0.1})


def test_a_run_counts_the_work_of_its_machine_across_a_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"imperfections": {"read_noise": 0.01}, "data": DATA}
    whole = eqprop.train(SMALL, tmp_path / "whole", epochs=2, **options)
    eqprop.train(SMALL, tmp_path / "parts", **options)
    parts = eqprop.resume(tmp_path / "parts", epochs=2, data=DATA)
    counts = [run.summary["estimators"]["ep"]["trials"][0]["work"] for run in (whole, parts)]
    # An epoch of 40 samples in two phases, and 9 more to test on; the training set once at the end of a run.
    assert counts[0]["settles"] >= 2 * (2 * 40 + 9) + 40
    assert counts[0]["writes"] >= 20
    assert counts[1]["settles"] == counts[0]["settles"] + 40


def test_a_perfect_machine_trains_with_the_same_bits_as_its_model(tmp_path: Path) -> None:
    runs = [
        eqprop.train(SMALL, tmp_path / name, data=DATA, machine=name, engine="eager") for name in ("none", "simulated")
    ]
    models = [eqprop.load(run.folder).model for run in runs]
    assert isinstance(models[1], Simulated)
    assert not isinstance(models[0], Machine)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_class_of_ones_own_trains_and_is_given_again_on_resume(tmp_path: Path) -> None:
    """`--machine FILE.py:CLASS`: a run folder names the class, and never runs its code by itself."""
    (tmp_path / "board.py").write_text("from eqprop.physical import Simulated\n\n\nclass Board(Simulated):\n    pass\n")
    where = f"{tmp_path / 'board.py'}:Board"
    run = eqprop.train(SMALL, tmp_path / "run", data=DATA, machine=where)
    assert type(eqprop.load(run.folder).model).__name__ == "Board"
    settings.OWN.pop(where)
    with pytest.raises(ValueError, match=r"your own code; give it again: --machine .*board.py:Board"):
        eqprop.resume(run.folder, data=DATA, epochs=2)
    own.meet_machine(where)
    work = eqprop.resume(run.folder, data=DATA, epochs=2).summary["estimators"]["ep"]["trials"][0]["work"]
    assert work["writes"] >= 20  # one per iteration of both epochs


def test_imperfections_are_merged_and_kept_in_files(tmp_path: Path) -> None:
    spec = SMALL.override(imperfections={"read_noise": 0.1}).override(imperfections={"weight_bits": 4})
    device = spec.machine.imperfections
    assert device is not None
    assert (device.read_noise, device.weight_bits) == (0.1, 4)
    assert Spec(**spec.to_dict()) == spec
    first, second = (spec.machine.around(LayeredNet((3, 12, 8)).build(0, torch.float32), trial) for trial in (0, 1))
    assert isinstance(first, Simulated)
    assert isinstance(second, Simulated)
    assert (first.imperfections.seed, second.imperfections.seed) == (0, 1)
