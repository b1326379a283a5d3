"""The kernels for one hidden layer, run on the CPU thread by thread: what they compute, without a GPU."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cuda_on_cpu import run_kernels_on_cpu

from eqprop import BPTT, EP, Estimator, SquaredError
from eqprop.data import one_hot
from eqprop.engines import Job, Task, load_engine
from eqprop.engines.cuda import nvrtc
from eqprop.engines.cuda.one_hidden import OneHidden, OneHiddenRunner
from eqprop.engines.eager import EagerRunner
from eqprop.estimators import Signs
from eqprop.models import Layered, stack

NETWORKS, BATCH, SAMPLES = 2, 3, 40
NETS: dict[str, dict[str, Any]] = {
    "prototypical": {"activation": "sigmoid"},
    "energy-based": {"setting": "energy-based", "activation": "tanh", "eps": 0.3},
}
ROUNDING = 2e-7
"""Of weights of size 1 after a few iterations in float32."""
PHASES: dict[str, Any] = {"T": 12, "K": 5, "tolerance": 1e-4}
ESTIMATORS: dict[str, Estimator] = {
    "one-sided": EP(**PHASES, beta=0.3),
    "symmetric": EP(**PHASES, beta=0.3, nudging="symmetric"),
    "random-sign": EP(**PHASES, beta=0.3, nudging="random-sign"),
    "bptt": BPTT(**PHASES),
}


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its fibres are those of Linux")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: Path) -> None:
    run_kernels_on_cpu(monkeypatch, kernels)


def make_job(net: str, estimator: Estimator, dtype: torch.dtype) -> Job:
    model = stack([Layered((12, 52, 36), init="default", seed=r, **NETS[net]) for r in range(NETWORKS)]).to(dtype)
    source = torch.Generator().manual_seed(1)
    x = torch.rand(SAMPLES, 36, generator=source, dtype=torch.float64).to(dtype)
    labels = torch.randint(12, (SAMPLES,), generator=source)
    rates = [{"params": [p], "lr": 0.05 + 0.02 * n} for n, p in enumerate(model.parameters())]
    targets, signs = one_hot(labels, 12, dtype=dtype), Signs((3, 4), first=7)
    cost, optimizer = SquaredError(), torch.optim.SGD(rates)
    return Job(model, cost, estimator, optimizer, x, targets, labels, NETWORKS, signs=signs)


ORDER = torch.randint(SAMPLES, (4, NETWORKS, BATCH), generator=torch.Generator().manual_seed(2))


def apart(a: Job, b: Job) -> float:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return max(float((p.detach().double() - q.detach().double()).abs().max()) for p, q in pairs)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_training_is_the_references(name: str, net: str) -> None:
    """Two runs of several iterations, the second longer than a graph: weights and counts."""
    estimator = ESTIMATORS[name]
    exact, mine = make_job(net, estimator, torch.float64), make_job(net, estimator, torch.float32)
    reference, runner = EagerRunner(exact), OneHiddenRunner(mine)
    for part in (ORDER[:1], ORDER[1:]):
        reference.run(part)
        runner.run(part)
    assert runner.substitute is None
    assert apart(mine, exact) < ROUNDING
    counted, expected = runner.tally.read(), reference.tally.read()
    for what in ("samples", "errors", "unsettled", "bad"):
        assert counted[what] == expected[what], what
    assert counted["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    other = make_job(net, ESTIMATORS["symmetric" if name == "one-sided" else "one-sided"], torch.float64)
    EagerRunner(other).run(ORDER)
    assert apart(mine, other) > 100 * ROUNDING, "estimators differ by more than rounding"


def test_the_signs_of_a_run_that_goes_on_are_those_of_its_iterations() -> None:
    job = make_job("prototypical", ESTIMATORS["random-sign"], torch.float32)
    wrong = replace(job, model=copy.deepcopy(job.model), signs=Signs((3, 4), first=8))
    wrong = replace(wrong, optimizer=torch.optim.SGD(wrong.model.parameters(), lr=0.05))
    right = replace(wrong, model=(model := copy.deepcopy(job.model)), signs=job.signs)
    right = replace(right, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    for each in (wrong, right):
        OneHiddenRunner(each).run(ORDER)
    assert apart(wrong, right) > 100 * ROUNDING


def test_a_network_that_is_not_finite_is_frozen_and_the_other_goes_on() -> None:
    job = make_job("prototypical", ESTIMATORS["symmetric"], torch.float32)
    with torch.no_grad():
        job.model.weight(0)[1, 0, 0] = float("nan")  # type: ignore[operator]
    before = [p.detach().clone() for p in job.model.parameters()]
    runner = OneHiddenRunner(job)
    runner.run(ORDER)
    assert runner.tally.read()["bad"] == [-1.0, 0.0]
    for p, was in zip(job.model.parameters(), before, strict=True):
        assert torch.equal(p[1].nan_to_num(9.0), was[1].nan_to_num(9.0))
        assert not torch.equal(p[0], was[0])


def test_other_nudging_is_served_on_request_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` waits for a measurement on a GPU."""
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(OneHidden, "device", "cpu")
    engine = load_engine("cuda-one-hidden")
    for name, estimator in ESTIMATORS.items():
        job = make_job("prototypical", estimator, torch.float32)
        task = Task(job.model, job.cost, estimator, job.optimizer)
        assert engine.refuses(task) is None
        assert (engine.automatic(task) is None) == (name in ("symmetric", "random-sign"))
