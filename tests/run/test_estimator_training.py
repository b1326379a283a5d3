"""Training with each form of EP: experiments, run folders, pages and resumed runs know which one it was."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tolerances import SAME_FORMULA
from helpers.training_runs import SMALL, assert_same_bits, few_images, weights
from torch.testing import assert_close

from eqprop import BPTT, EP, RBP, ContinualEP, Dynamics, Estimator, HolomorphicEP, SquaredError, random_sign
from eqprop.data import Images
from eqprop.engines import Engine, Job, Task
from eqprop.engines.cuda.conv import ConvEngine
from eqprop.engines.cuda.deep import Deep
from eqprop.engines.cuda.graph import CapturedEngine
from eqprop.engines.cuda.one_hidden import OneHidden
from eqprop.engines.eager import Eager
from eqprop.engines.xla import Xla
from eqprop.estimators import Backprop, Signs
from eqprop.estimators.asymmetric import AsymEP, VectorField
from eqprop.estimators.coupled import CoupledLearning
from eqprop.estimators.dyadic import Dyadic
from eqprop.estimators.named import ESTIMATORS, label
from eqprop.models import Convolutional, Layered, stack
from eqprop.models.layered import LayeredNet
from eqprop.report.page import write_report
from eqprop.run import Stopped, resume, train
from eqprop.run.session import build_model, make_estimator
from eqprop.run.spec import Spec
from eqprop.run.watch import Progress, Watch

FORMS = list(ESTIMATORS)


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, images: Images) -> Path:
    """A run with each form, from the same weights and batches."""
    place = tmp_path_factory.mktemp("forms")
    for form in FORMS:
        train(SMALL, place / form, data=images, estimator=form, threads=1)
    return place


def first_lines(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_every_form_learns_and_the_folder_says_which_it_was(runs: Path) -> None:
    ends = []
    for form in FORMS:
        assert json.loads((runs / form / "experiment.json").read_text())["experiment"]["estimator"]["kind"] == form
        summary = json.loads((runs / form / "result.json").read_text())
        assert list(summary["estimators"]) == [form]
        losses = first_lines(runs / form)
        assert losses[-1] < 0.85 * losses[0], form
        ends.append(weights(runs / form, form)["0.W01"])
    for n, one in enumerate(ends):
        for other in ends[n + 1 :]:
            assert not torch.equal(one, other), "two forms gave the same bits: one of them did not run"


def test_the_page_and_the_tables_say_which_form_it_was(runs: Path, tmp_path: Path) -> None:
    written = write_report(runs, tmp_path)
    page, latex = written.page.read_text(encoding="utf-8"), written.latex.read_text()
    found = list(csv.DictReader(io.StringIO(written.csv.read_text())))
    assert sorted(row["estimator"] for row in found) == sorted(FORMS)
    for form in FORMS[1:]:
        assert f'<td class="text">{label(form)}</td>' in page
        assert f"{label(form)} &" in latex
    assert '<td class="text">EP</td>' in page


class StopAfter(Watch):
    """Interrupts a run inside an epoch, as Ctrl-C does."""

    def __init__(self, epoch: int) -> None:
        self.epoch_wanted = epoch

    def progress(self, progress: Progress) -> None:
        if progress.epoch == self.epoch_wanted and progress.iteration > 4:
            self.epoch_wanted = -1
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_stopped_run_goes_on_with_its_form_and_its_signs(
    runs: Path, tmp_path: Path, images: Images, form: str
) -> None:
    with pytest.raises(Stopped):
        train(SMALL, tmp_path / "run", data=images, estimator=form, threads=1, watch=StopAfter(1))
    result = resume(tmp_path / "run", data=images)
    assert list(result.summary["estimators"]) == [form]
    assert_same_bits(runs / form, tmp_path / "run", (form,))


def test_records_make_each_form() -> None:
    expected: dict[str, Estimator] = {
        "ep": EP(8, 4, beta=0.2),
        "ep-symmetric": EP(8, 4, beta=0.2, nudging="symmetric"),
        "ep-random-sign": EP(8, 4, beta=0.2, nudging="random-sign"),
        "ep-holomorphic": HolomorphicEP(8, 4, beta=0.2, points=6),
        "ep-continual": ContinualEP(8, 4, beta=0.2, rates={"W01": 0.05, "b0": 0.05, "W12": 0.1, "b1": 0.1}),
        "bptt": BPTT(8, 4),
        "rbp": RBP(8, 4),
        "backprop": Backprop(),
        "vector-field": VectorField(8, 4, beta=0.2),
        "asym-ep": AsymEP(8, 4, beta=0.2),
        "dyadic": Dyadic(8, 4),
        "coupled-learning": CoupledLearning(8, 4, beta=0.2),
    }
    for form, estimator in expected.items():
        points = {"points": 6} if form == "ep-holomorphic" else {}
        experiment = SMALL.override(estimator=form, **points)
        assert make_estimator(experiment, form, build_model(experiment, 0)) == estimator
    changed = [str(c) for c in SMALL.override(estimator="ep-holomorphic", points=6).changes(SMALL)]
    assert changed == ["estimator ep-holomorphic instead of ep", "points 6"]


def small_job(networks: int | None, signs: Signs | None, form: Estimator, device: str = "cpu") -> Job:
    nets = [Layered((3, 6, 4), dtype=torch.float64, seed=seed) for seed in range(networks or 1)]
    model = (nets[0] if networks is None else stack(nets)).to(device)
    source = torch.Generator().manual_seed(0)
    x, labels = torch.rand(12, 4, generator=source, dtype=torch.float64), torch.arange(12) % 3
    y = torch.nn.functional.one_hot(labels, 3).to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y, labels = (v.to(device) for v in (x, y, labels))
    return Job(model, SquaredError(), form, optimizer, x, y, labels, networks, signs=signs)


@pytest.mark.parametrize("networks", [None, 3])
def test_an_engine_takes_the_signs_of_the_iterations_numbers(networks: int | None) -> None:
    """Every iteration, on every network, is the one-sided one of its sign; also from the middle of a training on."""
    form = EP(10, 3, beta=0.4, nudging="random-sign")
    signs = Signs((5, 6, 7)[: networks or 1], first=250)
    order = torch.randint(12, (9, 4), generator=torch.Generator().manual_seed(1))
    order = order if networks is None else order[:, None].expand(9, networks, 4)
    jobs = [small_job(networks, signs, form) for _ in range(2)]
    for engine, job in zip((Eager(), Xla()), jobs, strict=True):
        assert engine.refuses(Task(job.model, job.cost, form, job.optimizer)) is None
        runner = engine.runner(job)
        runner.run(order[:4])
        runner.run(order[4:])
    expected = small_job(networks, signs, form)
    for i, rows in enumerate(order):
        expected.optimizer.zero_grad()
        sign = torch.tensor([random_sign(seed, 250 + i) for seed in signs.seeds], dtype=torch.float64)
        form.with_sign(sign).backward(expected.model, expected.cost, expected.images[rows], expected.targets[rows])
        expected.optimizer.step()
    for job in jobs:
        for (name, p), q in zip(job.model.named_parameters(), expected.model.parameters(), strict=True):
            assert_close(p.detach(), q.detach(), rtol=0.0, atol=SAME_FORMULA, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("networks", [None, 3])
@pytest.mark.parametrize(
    "form",
    [
        EP(10, 3, beta=0.4, nudging="symmetric"),
        EP(10, 3, beta=0.4, nudging="random-sign"),
        HolomorphicEP(10, 3, beta=0.4, points=5),
        ContinualEP(10, 3, beta=0.4, rates=0.1),
    ],
    ids=lambda form: getattr(form, "nudging", type(form).__name__),
)
def test_the_graph_engine_does_what_the_reference_does(networks: int | None, form: Estimator) -> None:
    signs = Signs((5, 6, 7)[: networks or 1], first=250)
    order = torch.randint(12, (70, 4), generator=torch.Generator().manual_seed(1))
    order = order if networks is None else order[:, None].expand(70, networks, 4)
    ends = []
    for engine, device in ((CapturedEngine(), "cuda"), (Eager(), "cuda"), (Eager(), "cpu")):
        job = small_job(networks, signs, form, device)
        assert engine.refuses(Task(job.model, job.cost, form, job.optimizer)) is None
        runner = engine.runner(job)
        for part in order.split((31, 39)):
            runner.run(part)
        ends.append([p.detach().cpu() for p in job.model.parameters()])
    assert_close(ends[0], ends[1], rtol=0.0, atol=1e-10)
    assert_close(ends[1], ends[2], rtol=0.0, atol=1e-10)


KERNELS: dict[type[Engine], Callable[[], Dynamics]] = {
    OneHidden: lambda: Layered((10, 64, 784), seed=0),
    Deep: lambda: Layered((10, 64, 64, 784), seed=0),
    ConvEngine: lambda: Convolutional(seed=0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("engine", KERNELS, ids=lambda engine: engine.name)
def test_the_kernels_refuse_the_forms_they_do_not_know(engine: type[Engine]) -> None:
    """Where the one-sided form is served, so that the reason is the form and not the machine or the net."""
    net = KERNELS[engine]().cuda()
    reason = engine().refuses(Task(net, SquaredError(), EP(20, 4)))
    if reason is not None:
        pytest.skip(reason)
    for form in (EP(20, 4, nudging="symmetric"), HolomorphicEP(20, 4), ContinualEP(20, 4)):
        known = isinstance(form, EP) and form.nudging in engine.nudgings
        assert (engine().refuses(Task(net, SquaredError(), form)) is None) == known
        assert CapturedEngine().refuses(Task(net, SquaredError(), form)) is None


def test_signs_are_bits_of_a_hash() -> None:
    digest = hashlib.sha256(b"eqprop signs 3 1").digest()
    bits = "".join(f"{byte:08b}" for byte in digest)
    expected = [1 if bit == "1" else -1 for bit in bits]
    assert [random_sign(3, 256 + i) for i in range(256)] == expected
    rows = Signs((3, 4), first=200).rows(56, 300)
    assert rows.shape == (300, 2)
    assert rows[:256, 0].tolist() == expected
    assert rows[256:, 0].tolist() == [random_sign(3, i) for i in range(512, 556)]
    assert rows[:, 1].tolist() == [random_sign(4, i) for i in range(256, 556)]
    many = Signs(tuple(range(40))).rows(0, 1000)
    assert abs(float(many.mean())) < 5 / 200  # five standard deviations of the mean of 40,000 fair signs


ENERGY_BASED = SMALL.override(name="eb", model=LayeredNet((10, 24, 784), "energy-based", "sigmoid", eps=0.2, clip=True))


@pytest.mark.parametrize(
    ("experiment", "options", "problem"),
    [
        (ENERGY_BASED, {"estimator": "ep-holomorphic"}, "clamp.*Holomorphic EP needs an analytic model and cost"),
        ("P-conv", {"estimator": "ep-holomorphic"}, "Convolutional with SquaredError cannot step at complex states"),
        (SMALL, {"estimator": "ep-holomorphic", "beta": -0.1}, "beta is -0.1; expected the circle's radius"),
        (SMALL, {"estimator": "ep-holomorphic", "points": 1}, "points is 1; expected a whole number from 2"),
        (
            SMALL,
            {"estimator": "symetric"},
            "Unknown estimator 'symetric'; expected one of .*Did you mean 'ep-symmetric'?",
        ),
        (
            SMALL,
            {"estimator": "ep-continual", "optimizer": "Adam"},
            "The optimizer is Adam, but continual EP.*like SGD without options. Use SGD without options",
        ),
        (
            SMALL,
            {"estimator": "ep-continual", "optimizer_options": {"momentum": 0.9}},
            "The optimizer is SGD with momentum=0.9",
        ),
        (SMALL, {"estimator": "ep-symmetric", "estimators": "bptt"}, "Give estimators or estimator, not both"),
        (
            SMALL,
            {"estimator": "ep-holomorphic", "engine": "cuda-deep"},
            "it runs on a CUDA device",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    experiment: str | Spec, options: dict[str, Any], problem: str, tmp_path: Path, images: Images
) -> None:
    with pytest.raises(ValueError, match=problem):
        train(experiment, tmp_path / "run", data=images, **options)
    assert not (tmp_path / "run").exists()
