"""Initialised EP: the initialiser's rule, what it learns on every model, saved, resumed, used for new samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_contract as contract
from helpers.nets import asymmetric, batch, convolutional, energy_based, prototypical, random_like, toy
from helpers.training_runs import SMALL, few_images, start_of_whole_and_cut
from torch import Tensor

from eqprop import Dynamics, from_primitive, relax
from eqprop.data import Images
from eqprop.engines.eager import Eager
from eqprop.engines.xla import Xla
from eqprop.models import Layered
from eqprop.models.layered import LayeredNet
from eqprop.run import evaluate, load, predict, resume, train
from eqprop.starts import Initialised
from eqprop.state import State

FIRST = SMALL.override(
    name="first",
    model=LayeredNet((10, 24, 784), "energy-based", "hard-sigmoid", eps=0.5, clip=True),
    T=4,
    beta=1.0,
    estimator="ep-random-sign",
    start="initialised",
)


def own_phi() -> Dynamics:
    """A user's own primitive, with a squash of its own."""

    def phi(x: Tensor, s: State, theta: Any) -> Tensor:
        s0, s1 = s
        return ((s1 @ theta["W"].T) * s0).sum(-1) + ((x @ theta["V"].T) * s1).sum(-1)

    parameters = {"W": random_like((3, 5), 1, -0.5, 0.5), "V": random_like((5, 4), 2)}
    model = from_primitive(phi, parameters, layers=(3, 5), squash=torch.tanh)
    model.input_shape = (4,)
    return model


MODELS: dict[str, Callable[[], Dynamics]] = {
    "toy": toy,
    "energy-based": lambda: energy_based(3),
    "energy-based, clipped": lambda: energy_based(2, "hard-sigmoid", clip=True, eps=0.5),
    "prototypical": lambda: prototypical(3, "sigmoid"),
    "convolutional": convolutional,
    "own primitive": own_phi,
    "transition": asymmetric,
}


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def gap(a: State, b: State) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_where_the_free_phase_ends(name: str) -> None:
    """On every model, its weights held still: the prediction comes close, and four steps from it leave less to go."""
    model = MODELS[name]()
    x, _ = batch(model, samples=6)
    steady = relax(model, x, 400)
    first = Initialised(model, x)
    before = gap(first.begin(x), steady.state)
    for _ in range(2000):
        first.end(x, None, first.begin(x), steady.state)
    assert gap(first.begin(x), steady.state) < 0.05 * before
    left, zero = (relax(model, x, 4, start).residual.max() for start in (first.begin(x), None))
    assert float(left) < 0.2 * float(zero)


def test_the_rule_is_the_normalised_delta_rule() -> None:
    """V_n += rate <(s - f) pre^T> / <1 + |pre|^2>, number by number."""
    model = Layered((2, 3, 4), "energy-based", "hard-sigmoid", eps=0.5, clip=True, dtype=torch.float64)
    x = random_like((5, 4), 0, 0.0)
    first = Initialised(model, x, rate=0.7)
    for seed, weight in enumerate((*first.weights, *first.offsets)):
        weight.copy_(random_like(tuple(weight.shape), seed, -0.3, 0.6))
    f1 = (x @ first.weights[1][0].T + first.offsets[1][0]).clamp(0.0, 1.0)
    f0 = (f1 @ first.weights[0][0].T + first.offsets[0][0]).clamp(0.0, 1.0)
    begun = first.begin(x)
    assert torch.allclose(begun[1], f1)
    assert torch.allclose(begun[0], f0)
    before = {name: value.clone() for name, value in first.tensors.items()}
    s = (random_like((5, 2), 8), random_like((5, 3), 9))
    first.end(x, None, begun, s)
    for n, (target, f, below) in enumerate(((s[0], f0, f1), (s[1], f1, x))):
        size = sum(1.0 + float(row @ row) for row in below) / 5
        for i in range(target.shape[1]):
            error = target[:, i] - f[:, i]
            for j in range(below.shape[1]):
                expected = before[f"V{n}"][i, j] + 0.7 * float((error * below[:, j]).mean()) / size
                assert float(first.tensors[f"V{n}"][i, j]) == pytest.approx(float(expected), abs=1e-12)
            moved = first.tensors[f"c{n}"][0, i] - before[f"c{n}"][0, i]
            assert float(moved) == pytest.approx(0.7 * float(error.mean()) / size, abs=1e-12)


def test_it_is_stable_below_rate_two_however_large_the_input() -> None:
    model = Layered((3, 200), "energy-based", "hard-sigmoid", eps=0.5, clip=True, dtype=torch.float64)
    x = 10.0 * random_like((12, 200), 0, 0.0)
    target = (random_like((12, 3), 1, 0.0),)
    first = Initialised(model, x, rate=1.95)
    errors = []
    for _ in range(300):
        begun = first.begin(x)
        errors.append(float((begun[0] - target[0]).square().sum()))
        first.end(x, None, begun, target)
    assert errors[-1] < 0.5 * errors[0]
    assert max(errors) <= errors[0] * (1.0 + 1e-9)


def test_a_sample_that_is_not_finite_teaches_nothing() -> None:
    model = prototypical(2)
    x, _ = batch(model, samples=4)
    with_bad, without = Initialised(model, x), Initialised(model, x)
    s = relax(model, x, 5).state
    spoilt, silent = tuple(v.clone() for v in s), tuple(v.clone() for v in s)
    spoilt[0][3], bad_x, no_x = float("nan"), x.clone(), x.clone()
    bad_x[3], no_x[3] = float("inf"), 0.0
    begun = with_bad.begin(x)
    with_bad.end(bad_x, None, begun, spoilt)
    for layer, f in zip(silent, begun, strict=True):
        layer[3] = f[3]
    # A silent sample is all zero and has no error.
    without.end(no_x, None, tuple(_zeroed(f) for f in begun), tuple(_zeroed(v) for v in silent))
    for name, value in without.tensors.items():
        assert bool(torch.isfinite(with_bad.tensors[name]).all())
        assert torch.allclose(with_bad.tensors[name], value)


def _zeroed(layer: Tensor) -> Tensor:
    out = layer.clone()
    out[3] = 0.0
    return out


@pytest.mark.parametrize("case", [*contract.layered_cases()[1::48], *contract.conv_cases()[1::48]], ids=str)
def test_programs_teach_it_as_the_reference(case: contract.Case) -> None:
    found = []
    for engine in (Eager(), Xla()):
        model = case.model(contract.EXACT)
        job = contract.job_for(model, case, contract.EXACT, 0.05)
        first = Initialised(model, job.images)
        # From V = 0 the maps are constant, and which of equal numbers is the largest of a pool is left to rounding.
        drawn = torch.Generator().manual_seed(3)
        for value in first.tensors.values():
            value += 0.1 * torch.randn(value.shape, generator=drawn, dtype=value.dtype)
        engine.runner(replace(job, start=first)).run(case.order(6))
        found.append({**dict(model.named_parameters()), **first.tensors})
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, rtol=1e-9, atol=1e-11), name
    assert any(float(value.abs().max()) > 0 for name, value in found[0].items() if name.startswith("V"))


@pytest.mark.parametrize(("engine", "trials"), [("eager", 2), ("xla", 1)])
def test_a_run_resumes_to_the_same_bits_the_initialiser_included(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, engine: str, trials: int
) -> None:
    kept = start_of_whole_and_cut(FIRST, tmp_path, monkeypatch, images, engine=engine, trials=trials)
    assert kept.keys() == {f"{r}.{kind}{n}" for r in range(trials) for kind in "Vc" for n in range(2)}


def test_new_samples_begin_where_it_says(tmp_path: Path, images: Images) -> None:
    result = train(FIRST, tmp_path / "run", data=images, trials=2)
    errors = [trial["test_error"][-1] for trial in result.summary["estimators"][FIRST.estimator.kind]["trials"]]
    assert [entry["test_error"] for entry in evaluate(tmp_path / "run", data=images)[FIRST.estimator.kind]] == errors
    for trial, error in enumerate(errors):
        trained = load(tmp_path / "run", trial=trial)
        classes = predict(trained, images.test_x)
        assert 100.0 * float((classes != images.test_y).double().mean()) == pytest.approx(error)
        assert isinstance(trained.start, Initialised)
        model, begun = trained.model, trained.start.unseen(images.test_x)
        assert torch.equal(relax(model, images.test_x, 4, begun).state[0].argmax(-1), classes)
        assert not torch.equal(relax(model, images.test_x, 4).state[0], relax(model, images.test_x, 4, begun).state[0])


@pytest.mark.parametrize("begin", ["persistent", "initialised"])
def test_a_network_of_ones_own_trains_and_loads(tmp_path: Path, images: Images, begin: str) -> None:
    def build(seed: int) -> Dynamics:
        return Layered((10, 12, 784), "prototypical", "tanh", seed=seed)

    options: dict[str, Any] = {"data": images, "model": build}
    train(SMALL, tmp_path / "run", start=begin, rates={"*": 0.02}, epochs=1, **options)
    found = evaluate(tmp_path / "run", **options)[SMALL.estimator.kind][0]["test_error"]
    assert found < 90.0
    assert resume(tmp_path / "run", **options).test_error(SMALL.estimator.kind) == found
