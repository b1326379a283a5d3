"""The convolutional CUDA engine against the reference in float64: states of both phases, updates, counts, fallbacks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.engine_contract import (
    FLOOR,
    MAPS,
    TWICE,
    Case,
    Place,
    check_calls,
    check_frozen,
    check_training,
    convolutional,
    data,
    error,
    job_for,
)
from torch import Tensor

from eqprop import BPTT, EP, RBP, Nudge, SquaredError, relax
from eqprop.engines import Task, choose
from eqprop.engines.cuda import nvrtc
from eqprop.engines.cuda.conv import ConvEngine, ConvRunner
from eqprop.engines.eager import Eager, EagerRunner
from eqprop.models import Convolutional, Layered, stack

GPU = Place("cuda", torch.float32)
HOST = Place("cpu", torch.float32)
NETS: dict[str, dict[str, Any]] = {
    "paper": {"input_shape": (1, 28, 28), "channels": (64, 32), "flat": (10,)},
    "two maps": MAPS["two maps"],
    "odd": {"input_shape": (3, 21, 25), "channels": (37, 13), "flat": (7,), "kernel": 4},
    "no window": {"input_shape": (2, 10, 9), "channels": (9, 5), "flat": (16,), "kernel": 1},
}
SIGMAS = ("hard-sigmoid", "sigmoid", "tanh")
QUARTER = 0.25
"""Which of the errors of several starts is judged: an arg-max that is nearly a tie may go another way in float32, and
the lower quartile shows what the arithmetic does where it did not."""
STARTS = 8


def case(net: str, method: str = "ep", sigma: str = "hard-sigmoid", **options: Any) -> Case:
    return Case(f"{net}, {sigma}", convolutional(NETS[net], activation=sigma), method, **options)


def runner_of(start: Convolutional, of: Case, estimator: Any = None, rate: float = 8.0) -> ConvRunner:
    """A runner of a copy of the net, its buffers filled with NaN where the kernels must write before they read."""
    job = job_for(copy.deepcopy(start).to("cuda", torch.float32), of, GPU, rate)
    runner = ConvRunner(replace(job, estimator=estimator) if estimator is not None else job)
    runner._prepare(of.samples)
    for name, buffer in runner.buffers.items():
        if name != "packed":
            buffer.view(torch.uint8).fill_(0xFF)
    return runner


def change(start: Convolutional, of: Case, seed: int) -> dict[str, Tensor]:
    runner = runner_of(start, of)
    runner.run(of.order(1, seed).cuda())
    assert runner.substitute is None
    before = dict(start.named_parameters())
    after = runner.model.named_parameters()
    return {name: p.detach().cpu().double() - before[name].detach().double() for name, p in after}


def reference_change(start: Convolutional, of: Case, place: Place, seed: int) -> dict[str, Tensor]:
    model = copy.deepcopy(start).to(place.device, place.dtype)
    Eager().runner(job_for(model, of, place, 8.0)).run(of.order(1, seed).to(place.device))
    before = dict(start.named_parameters())
    return {name: p.detach().cpu().double() - before[name].detach().double() for name, p in model.named_parameters()}


COMBINATIONS = [("two maps", sigma) for sigma in SIGMAS] + [("odd", "hard-sigmoid"), ("no window", "tanh")]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["synchronous", "alternating"])
@pytest.mark.parametrize("method", ["ep", "bptt"])
@pytest.mark.parametrize(("net", "sigma"), COMBINATIONS)
def test_updates_are_as_good_as_float32(net: str, sigma: str, method: str, schedule: Any) -> None:
    """Over several starts: the lower quartile of the update's error is at most twice that of torch's own float32."""
    of = case(net, method, sigma, schedule=schedule, networks=2, samples=5)
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for seed in range(STARTS):
        start = of.model(HOST, seed)
        exact = reference_change(start, of, Place(), seed)
        for errors, got in ((ours, change(start, of, seed)), (theirs, reference_change(start, of, HOST, seed))):
            for name, true in exact.items():
                errors.setdefault(name, []).append(error(got[name], true))
    for name in ours:
        mine, plain = (float(torch.tensor(e[name]).quantile(QUARTER)) for e in (ours, theirs))
        assert mine <= max(TWICE * plain, FLOOR[torch.float32]), f"{of}: {name}"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ep", "bptt"])
def test_the_papers_net_learns_as_in_float32(method: str) -> None:
    of = case("paper", method, networks=3, samples=20)
    start = of.model(HOST)
    exact, plain = (reference_change(start, of, replace(place, device="cuda"), 0) for place in (Place(), HOST))
    for name, got in change(start, of, 0).items():
        errors = torch.tensor([[error(v[name][r], exact[name][r]) for r in range(3)] for v in ({name: got}, plain)])
        mine, theirs = errors.median(1).values.tolist()
        assert mine <= max(TWICE * theirs, 1e-5), name


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K"), [(1, 1), (2, 3), (60, 8)])
def test_states_of_both_phases(T: int, K: int) -> None:
    """The largest error of a sample, in the middle of all samples: at most twice that of torch's own float32."""
    of = case("paper", networks=2, samples=20)
    start = of.model(HOST)
    runner = runner_of(start, of, EP(T=T, K=K, beta=0.4), rate=0.0)
    runner.run(of.order(1).cuda())
    found = {}
    for dtype in (torch.float64, torch.float32):
        place = Place("cuda", dtype)
        model = copy.deepcopy(start).to("cuda", dtype)
        images, targets, _ = data(model, place)
        rows = of.order(1)[0].cuda()
        free = relax(model, images[rows], T)
        nudged = relax(model, images[rows], K, free.state, Nudge(SquaredError(), targets[rows], 0.4))
        found[dtype] = (free.state, nudged.state)
    for mine, plain, exact in zip(runner.states(), found[torch.float32], found[torch.float64], strict=True):
        ours, theirs = (
            torch.stack([(a.double() - b).abs().flatten(2).amax(2) for a, b in zip(state, exact, strict=True)]).amax(0)
            for state in (mine, plain)
        )
        assert float(ours.median()) <= max(TWICE * float(theirs.median()), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ep", "bptt"])
def test_iterations_are_counted_and_do_not_depend_on_calls(method: str) -> None:
    for networks in (None, 3):
        of = case("two maps", method, networks=networks)
        check_training(ConvEngine(), of, GPU)
        check_calls(ConvEngine(), of, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ep", "bptt"])
def test_a_network_that_is_not_finite_is_frozen_and_the_others_go_on(method: str) -> None:
    check_frozen(ConvEngine(), case("two maps", method, networks=3), GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["synchronous", "alternating"])
@pytest.mark.parametrize("method", ["ep", "bptt"])
def test_settled_stop_changes_no_bit_and_samples_come_to_rest(method: str, schedule: Any) -> None:
    """Parameters, states and counts, of phases of even and odd length: last bits may go to and fro for ever."""
    of = case("two maps", method, networks=3, samples=20, schedule=schedule)
    start = of.model(HOST)
    for T in (300, 301):
        after = []
        for stop in ("never", "settled"):
            runner = runner_of(start, of, of.estimator(T=T, stop=stop), rate=0.05)
            runner.run(of.order(3).cuda())
            after.append({**dict(runner.model.named_parameters()), **runner.buffers, "tally": runner._tally})
            steps = runner.buffers["stats"][:, 3]
            assert float(steps.median()) < 200.0, "samples did not come to rest"
        for name, value in after[0].items():
            never, settled = (v.detach().view(torch.uint8) for v in (value, after[1][name]))
            assert torch.equal(never, settled), f"{name}, T = {T}"


@pytest.mark.gpu
def test_kernels_that_do_not_compile_hand_over_to_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise nvrtc.CudaError("no kernel today.")

    monkeypatch.setattr(nvrtc, "Module", broken)
    of = case("two maps", networks=2)
    model, twin = (of.model(GPU) for _ in range(2))
    runner = ConvEngine().runner(job_for(model, of, GPU, 0.05))
    with pytest.warns(RuntimeWarning, match="graph engine takes over"):
        runner.run(of.order(3).cuda())
    Eager().runner(job_for(twin, of, GPU, 0.05)).run(of.order(3).cuda())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)
    assert runner.tally.read()["samples"] == [3.0 * of.samples] * 2


@pytest.mark.gpu
def test_auto_takes_the_kernels_and_what_they_do_not_serve_is_refused_in_words() -> None:
    model = stack([Convolutional(seed=seed) for seed in range(2)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert choose("auto", Task(model, SquaredError(), EP(T=5, K=2), optimizer)).name == "cuda-conv"
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert choose("auto", Task(model, SquaredError(), EP(T=5, K=2), momentum)).name == "cuda-graph"
    with pytest.raises(ValueError, match="RBP"):
        choose("cuda-conv", Task(model, SquaredError(), RBP(T=5, K=2)))
    refused: dict[str, dict[str, Any]] = {
        "padding": {"padding": 1},
        "pool": {"pool": 1, "input_shape": (1, 12, 12)},
        "two convolutions": {"channels": (4, 4, 4), "input_shape": (1, 40, 40), "kernel": 3},
        "one flat layer": {"flat": (10, 20)},
        "channels|units": {"channels": (65, 32)},
        "up to": {"input_shape": (1, 32, 32)},
    }
    for words, options in refused.items():
        with pytest.raises(ValueError, match=words):
            choose("cuda-conv", Task(Convolutional(**options).cuda(), SquaredError(), BPTT(T=5, K=2)))
    with pytest.raises(ValueError, match="Layered"):
        choose("cuda-conv", Task(Layered((10, 64, 48)).cuda(), SquaredError(), EP(T=5, K=2)))


def test_a_model_on_the_cpu_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="CUDA"):
        choose("cuda-conv", Task(Convolutional(), SquaredError(), EP(T=5, K=2)))


def test_a_runner_that_handed_over_has_no_states_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise nvrtc.CudaError("no kernel today.")

    monkeypatch.setattr(ConvRunner, "_prepare", broken)
    monkeypatch.setattr("eqprop.engines.cuda.job.GraphRunner", EagerRunner)
    of = case("two maps")
    runner = ConvRunner(job_for(of.model(HOST), of, HOST, 0.05))
    with pytest.warns(RuntimeWarning, match="graph engine takes over"):
        runner.run(of.order(1))
    assert runner.free_states() is None
