"""Persistent states: what is kept and where, saved and resumed bit for bit, refused with other data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_contract as contract
from helpers.nets import asymmetric, batch, convolutional, energy_based, prototypical, toy
from helpers.training_runs import (
    SMALL,
    Asking,
    assert_same_bits,
    explosive_network,
    few_images,
    finish,
    kill,
    start,
    start_of_whole_and_cut,
    wait_for,
    write_idx,
)
from torch import Tensor

from eqprop import Dynamics, relax
from eqprop.data import Images
from eqprop.engines.eager import Eager
from eqprop.engines.xla import Xla
from eqprop.estimators import Signs
from eqprop.models.layered import LayeredNet
from eqprop.run import Stopped, resume, train
from eqprop.run.checkpoint import read_checkpoint
from eqprop.starts import Persistent

KEPT = SMALL.override(
    name="kept",
    model=LayeredNet((10, 24, 784), "energy-based", "hard-sigmoid", eps=0.5, clip=True),
    estimator="ep-random-sign",
    start="persistent",
)
LEG = "ep-random-sign"
"""Where its checkpoints lie."""
MODELS: dict[str, Callable[[], Dynamics]] = {
    "toy": toy,
    "energy-based": lambda: energy_based(2),
    "prototypical": lambda: prototypical(3),
    "convolutional": convolutional,
    "transition": asymmetric,
}


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_goes_on_where_it_was_left(name: str) -> None:
    """Twice T steps over two visits are 2T steps from zero, for each sample by its number, on every model."""
    model = MODELS[name]()
    x, _ = batch(model, samples=6)
    kept = Persistent(model, x)
    rows = torch.tensor([4, 1, 3])
    for _ in range(2):
        begun = kept.begin(x[rows], rows)
        kept.end(x[rows], rows, begun, relax(model, x[rows], 5, begun).state)
    whole = relax(model, x[rows], 10).state
    for ours, expected, untouched in zip(kept.layers, whole, model.init_state(x), strict=True):
        assert torch.allclose(ours[rows], expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(ours[[0, 2, 5]], untouched[[0, 2, 5]])


def test_a_state_that_is_not_finite_is_not_kept() -> None:
    model = prototypical(2)
    x, _ = batch(model, samples=3)
    kept, rows = Persistent(model, x), torch.arange(3)
    good = relax(model, x, 4).state
    kept.end(x, rows, kept.begin(x, rows), good)
    spoilt = tuple(layer.clone() for layer in good)
    spoilt[1][2, 0] = float("nan")
    kept.end(x, rows, kept.begin(x, rows), tuple(2.0 * layer for layer in spoilt))
    for layer, before in zip(kept.layers, good, strict=True):
        assert torch.equal(layer[2], before[2])
        assert torch.equal(layer[:2], 2.0 * before[:2])


CASES = [*contract.layered_cases()[::48], *contract.conv_cases()[::40]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_keep_what_the_reference_keeps(case: contract.Case) -> None:
    """Six iterations in float64: weights, kept states and counts, with random signs for EP."""
    drawn = {"nudging": "random-sign"} if case.estimator == "ep" else {}
    found = []
    for engine in (Eager(), Xla()):
        model = case.model(contract.EXACT)
        job = contract.job_for(model, case, contract.EXACT, 0.05, **drawn)
        kept = Persistent(model, job.images)
        seeds = Signs(tuple(range(3, 3 + (case.networks or 1))), first=5)
        runner = engine.runner(replace(job, start=kept, signs=seeds))
        order = case.order(6)
        runner.run(order[:2])
        runner.run(order[2:])
        found.append(({**dict(model.named_parameters()), **kept.tensors}, runner.tally.read()))
    (expected, counts), (ours, our_counts) = found
    assert max(float(v.detach().abs().max()) for name, v in expected.items() if name.startswith("s")) > 0.1
    for name, value in expected.items():
        assert torch.allclose(ours[name], value, rtol=1e-9, atol=1e-11), name
    for name, values in counts.items():
        assert torch.allclose(torch.tensor(our_counts[name]), torch.tensor(values), rtol=1e-9, atol=1e-11), name


@pytest.mark.parametrize(("engine", "trials"), [("eager", 2), ("xla", 1)])
def test_a_run_resumes_to_the_same_bits_states_included(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, engine: str, trials: int
) -> None:
    kept = start_of_whole_and_cut(KEPT, tmp_path, monkeypatch, images, engine=engine, trials=trials)
    assert kept.keys() == {f"{r}.s{n}" for r in range(trials) for n in range(2)}
    assert all(float(value.abs().max()) > 0 for value in kept.values())


def states(folder: Path, leg: str = LEG) -> dict[str, Tensor]:
    return read_checkpoint(folder / leg).start


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, images: Images) -> None:
    data = write_idx(tmp_path / "data", images)
    (tmp_path / "kept.toml").write_text(
        'base = "scellier-bengio-2017"\nT = 6\nK = 3\nepochs = 4\n[model]\nsizes = [10, 24, 20, 784]\n'
    )
    words = ("train", tmp_path / "kept.toml", "--data", data, "--quiet", "--threads", 1, "--checkpoint-every", 0.1)
    process = start(*words, "--out", tmp_path / "cut")
    wait_for(tmp_path / "cut" / "metrics.jsonl", process)
    kill(process)
    assert not (tmp_path / "cut" / "result.json").exists(), "killed before its end"
    assert finish("resume", tmp_path / "cut", "--quiet").returncode == 0
    assert finish(*words, "--out", tmp_path / "whole").returncode == 0
    assert_same_bits(tmp_path / "whole", tmp_path / "cut", (LEG,))
    whole, cut = (states(tmp_path / name) for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def stopped_run(folder: Path, images: Images, monkeypatch: pytest.MonkeyPatch) -> dict[Path, bytes]:
    """A run stopped inside an epoch; its files."""
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        train(KEPT, folder, data=images, watch=Asking(patch, 3))
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_other_data_is_refused_and_nothing_is_lost(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stopped_run(tmp_path / "run", images, monkeypatch)
    other = replace(few_images(), train_x=images.train_x.flip(0), sha256="another")
    with pytest.raises(ValueError, match="was trained on other data: sha256.*Give the same data with --data"):
        resume(tmp_path / "run", data=other)
    # The same name and digest, but the samples stand in another order.
    shuffled = replace(images, train_x=images.train_x.flip(0), train_y=images.train_y.flip(0))
    with pytest.raises(ValueError, match="was trained on other data: fingerprint"):
        resume(tmp_path / "run", data=shuffled)
    assert {p: p.read_bytes() for p in before} == before
    resume(tmp_path / "run", data=images)
    train(KEPT, tmp_path / "whole", data=images)
    assert_same_bits(tmp_path / "whole", tmp_path / "run", (LEG,))


@pytest.mark.parametrize("begin", ["persistent", "initialised"])
def test_a_diverged_trial_is_told_from_where_it_began(tmp_path: Path, images: Images, begin: str) -> None:
    result = train(SMALL, tmp_path / "run", data=images, model=explosive_network, T=5, rates={"*": 50.0}, start=begin)
    assert result.summary["estimators"]["ep"]["trials"][0]["diverged"]
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert re.search("(not finite after step [1-9]|explodes).*[Ll]ower the learning rate", line["diverged"]["reason"])
    kept = states(tmp_path / "run", "ep")
    assert kept
    assert all(bool(torch.isfinite(value).all()) for value in kept.values())


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["device", "cpu"])
def test_states_live_on_the_gpu_or_beside_it(tmp_path: Path, images: Images, place: str) -> None:
    options: dict[str, Any] = {"data": images, "epochs": 2, "trials": 2}
    train(KEPT, tmp_path / "cpu", **options)
    train(KEPT, tmp_path / "cuda", device="cuda", states=place, **options)
    engine = read_checkpoint(tmp_path / "cuda" / LEG).engine
    assert engine == ("eager" if place == "cpu" else "cuda-graph")
    ours, expected = states(tmp_path / "cuda"), states(tmp_path / "cpu")
    for name, value in expected.items():
        assert float((ours[name] - value).norm() / value.norm()) < 1e-2, name
