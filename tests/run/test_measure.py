"""The error on a set: an engine's iterations find what its relaxation does, and move not one bit of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, assert_same_bits, few_images, metrics
from torch import Tensor

from eqprop import papers, relax
from eqprop.data import Images, mnist, one_hot
from eqprop.engines import Engine, Job, Runner, Task, choose
from eqprop.engines.base import full_precision
from eqprop.engines.cuda.conv import ConvEngine
from eqprop.engines.cuda.deep import Deep
from eqprop.engines.cuda.job import CapturedRunner
from eqprop.engines.eager import Eager
from eqprop.models import stack
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.run import evaluate, train
from eqprop.run.evaluate import Measure, evaluation_phase
from eqprop.run.session import Session, build_model
from eqprop.run.spec import Spec

EXPERIMENTS = {
    "layered": SMALL.override(init="default"),
    "convolutional": SMALL.override(model=ConvolutionalNet(channels=(3, 2), kernel=5), init="default"),
}


class Counting(Eager):
    """The reference, evaluating by its iterations; its runners are kept."""

    name = "counting"

    def __init__(self) -> None:
        self.runners: list[Runner] = []

    def evaluates(self, samples: int) -> bool:
        return True

    def runner(self, job: Job) -> Runner:
        self.runners.append(super().runner(job))
        return self.runners[-1]


@pytest.fixture(scope="module", autouse=True)
def without_tf32() -> Iterator[None]:
    """Which torch lets its convolutions have on a GPU."""
    with full_precision():
        yield


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images(test=110)


def measure(engine: Engine, experiment: Spec, images: Images, networks: int | None, **options: Any) -> Measure:
    models = [build_model(experiment, seed) for seed in range(networks or 1)]
    model = models[0] if networks is None else stack(models)
    return Measure(engine, model, Session(experiment, images), networks=networks, **options)


def bits(of: Measure) -> list[Tensor]:
    return [p.detach().clone().view(torch.int32) for p in of.model.parameters()]


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("networks", [None, 3])
@pytest.mark.parametrize("samples", [110, 100, 20, 13])
def test_iterations_count_what_relaxation_counts(name: str, networks: int | None, samples: int, images: Images) -> None:
    """Also where the last mini-batch is not whole, or none is."""
    engine = Counting()
    some = replace(images, test_x=images.test_x[:samples], test_y=images.test_y[:samples])
    ours, reference = (measure(e, EXPERIMENTS[name], some, networks) for e in (engine, Eager()))
    before = bits(ours)
    assert ours.error_rates() == reference.error_rates()
    assert all(torch.equal(a, b) for a, b in zip(bits(ours), before, strict=True))
    assert [runner.tally.read()["samples"][0] for runner in engine.runners] == [samples // 20 * 20] * (samples >= 20)


def test_one_runner_serves_every_epoch_and_sees_the_weights_of_each(images: Images) -> None:
    engine = Counting()
    ours = measure(engine, EXPERIMENTS["layered"], images, 2)
    rates = []
    for seed in range(3):
        with torch.no_grad():
            for p, q in zip(
                ours.model.parameters(), build_model(EXPERIMENTS["layered"], seed).parameters(), strict=True
            ):
                p[0].copy_(q)
        rates.append(ours.error_rates())
        assert rates[-1] == replace(ours, engine=Eager()).error_rates()
    assert len(engine.runners) == 1
    assert len({first for first, _ in rates}) > 1
    assert len({second for _, second in rates}) == 1


def test_a_run_evaluated_by_iterations_is_the_same_run(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"data": images, "trials": 2, "estimators": "ep,bptt", "epochs": 2, "engine": "eager"}
    train(SMALL, tmp_path / "relaxed", **options)
    made = []
    built = Eager.runner
    monkeypatch.setattr(Eager, "evaluates", lambda self, samples: samples == 2 * SMALL.optimizer.batch)
    monkeypatch.setattr(Eager, "runner", lambda self, job: made.append(job.estimator.K) or built(self, job))
    train(SMALL, tmp_path / "counted", **options)
    assert_same_bits(tmp_path / "relaxed", tmp_path / "counted", ("ep", "bptt"))
    assert made == [SMALL.phases.K, 1, 1] * 2, "training, the test set, the training set after the last epoch"
    monkeypatch.setattr(Eager, "evaluates", lambda self, samples: True)
    found = evaluate(tmp_path / "counted", data=images, engine="eager")
    assert found == evaluate(tmp_path / "relaxed", data=images, engine="eager")


@pytest.fixture(scope="module", params=["P-conv", "P-2h"])
def on_the_gpu(request: pytest.FixtureRequest) -> Measure:
    """Four of the paper's nets whose outputs all win now and then; the labels are what the first of them answers.

    The last mini-batch of the set is not whole.
    """
    experiment = papers.find(request.param).override(init="default", T=40)
    model = stack([build_model(experiment, seed) for seed in range(4)]).cuda()
    assert model.input_shape is not None
    digits = mnist("cuda")
    x = digits.test_x[:2011].view(-1, *model.input_shape)
    with torch.no_grad():
        for _ in range(4):
            outputs = relax(model, x.expand(4, *x.shape), experiment.phases.T).state[0]
            model.get_parameter("bfc0" if request.param == "P-conv" else "b0").add_(0.5 - outputs.mean(1))
    outputs = relax(model, x.expand(4, *x.shape), experiment.phases.T).state[0]
    engine = choose("auto", Task(model))
    assert isinstance(engine, ConvEngine if request.param == "P-conv" else Deep)
    images = replace(digits, test_x=digits.test_x[:2011], test_y=outputs[0].argmax(-1))
    return Measure(engine, model, Session(experiment, images), networks=4)


def assert_evaluates_as_eager(ours: Measure) -> None:
    """A sample whose two largest outputs are nearly equal may be told either way."""
    before = bits(ours)
    found, expected = ours.error_rates(), replace(ours, engine=Eager()).error_rates()
    assert all(torch.equal(a, b) for a, b in zip(bits(ours), before, strict=True))
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) * ours.samples / 100.0 <= 4.5
    runner = ours._runner
    assert isinstance(runner, CapturedRunner)
    assert runner.substitute is None
    counted = runner.tally.read()
    images = ours.session.images
    assert isinstance(images, Images)
    inputs, targets = ours.session.inputs(images.test_x, ours.model), one_hot(images.test_y, 10)
    x, y = (t[:2000].expand(4, *t[:2000].shape) for t in (inputs, targets))
    free = relax(ours.model, x, evaluation_phase(ours.session.spec))
    loss = ours.cost(free.state, y, {})
    assert counted["samples"] == [2000.0] * 4
    assert counted["loss"] == pytest.approx(loss.double().sum(1).tolist(), rel=1e-4)
    # Where two values of a pool are nearly equal, a sample that has not come to rest may go either way; one that has
    # still moves by some roundings of its states.
    either_way = free.residual.max().item() + 2000 * 2e-7
    assert counted["residual"] == pytest.approx(free.residual.double().sum(1).tolist(), rel=1e-2, abs=either_way)


@pytest.mark.gpu
def test_the_kernels_evaluate_as_torch_does_and_see_the_weights_of_each_time(on_the_gpu: Measure) -> None:
    first, *others = on_the_gpu.error_rates()
    assert first < 1.0
    assert min(others) > 50.0
    assert_evaluates_as_eager(on_the_gpu)
    for _ in range(4):
        with torch.no_grad():
            for p in on_the_gpu.model.parameters():
                p.copy_(p.roll(1, 0))
        assert_evaluates_as_eager(on_the_gpu)
    assert on_the_gpu.error_rates() == [first, *others]


@pytest.mark.gpu
def test_the_kernels_leave_a_network_that_is_not_finite_as_it_is(on_the_gpu: Measure) -> None:
    expected = on_the_gpu.error_rates()
    kept = [p.detach().clone() for p in on_the_gpu.model.parameters()]
    with torch.no_grad():
        for p in on_the_gpu.model.parameters():
            p[1].view(-1)[0] = -0.0
            p[1].view(-1)[1] = float("nan")
    before = bits(on_the_gpu)
    found = on_the_gpu.error_rates()
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert all(torch.equal(a, b) for a, b in zip(bits(on_the_gpu), before, strict=True))
    with torch.no_grad():
        for p, value in zip(on_the_gpu.model.parameters(), kept, strict=True):
            p.copy_(value)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ep", "bptt"])
def test_a_run_of_the_kernels_is_measured_as_its_weights_are(images: Images, tmp_path: Path, method: str) -> None:
    """Of 110 test samples ten are relaxed; two may be told either way."""
    experiment = EXPERIMENTS["convolutional"].override(rates={"*": 0.005}, epochs=2)
    train(experiment, tmp_path / "run", data=images, trials=2, estimators=method, device="cuda", engine="cuda-conv")
    last = [line["test_error"] for line in metrics(tmp_path / "run") if line["epoch"] == 2]
    for engine in ("cuda-conv", "eager"):
        again = [trial["test_error"] for trial in evaluate(tmp_path / "run", data=images, engine=engine)[method]]
        assert again == pytest.approx(last, abs=2.0)
