"""The CPU engine: the contract of every engine, and what only it has: threads, a compiler, a cache."""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_contract import (
    EXACT,
    MAPS,
    SIZES,
    Case,
    Place,
    changes,
    check_calls,
    check_frozen,
    check_gradient,
    check_relaxation,
    check_settled,
    check_training,
    conv_cases,
    convolutional,
    data,
    energy_based,
    error,
    job_for,
    layered,
    layered_cases,
)

from eqprop import BPTT, EP, RBP, NotFiniteError, Phase, SquaredError, from_primitive, relax
from eqprop.cost import FunctionCost
from eqprop.engines import Task, choose
from eqprop.engines.cpu import binding as cpu_library
from eqprop.engines.cpu.engine import Cpu
from eqprop.engines.eager import Eager
from eqprop.models import Layered

SINGLE = Place(dtype=torch.float32)


def with_symmetric(cases: list[Case]) -> list[Case]:
    """The cases, and those of EP once more with symmetric nudging, which the CUDA kernels do not have."""
    return [*cases, *(replace(case, method="ep-symmetric") for case in cases if case.method == "ep")]


CASES = with_symmetric([*layered_cases(), *conv_cases()])
# In float32 a maximum of a convolution may change its place by rounding, and what follows with it: the convolutional
# nets are compared in float64, and in float32 at one step, where there is no time for it.
FLAT_CASES = with_symmetric(layered_cases())[::3]
FEW = [case for i, case in enumerate(CASES) if i % 7 == 0]
PAPER_1H = Case("P-1h", lambda seed: Layered((10, 512, 784), seed=seed, dtype=torch.float64), samples=20)
PAPER_EB = Case(
    "EB-1h",
    lambda seed: Layered((10, 512, 784), "energy-based", eps=0.2, clip=True, seed=seed, dtype=torch.float64),
    samples=20,
)

pytestmark = pytest.mark.skipif(
    Cpu().refuses(Task(CASES[0].model(EXACT))) is not None, reason="there is no C compiler on this machine"
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_update_is_that_of_the_reference(case: Case) -> None:
    check_gradient(Cpu(), case, EXACT)


@pytest.mark.parametrize("case", FLAT_CASES, ids=str)
def test_one_update_is_as_good_as_float32(case: Case) -> None:
    check_gradient(Cpu(), case, SINGLE)


@pytest.mark.parametrize("case", [case for case in CASES if case.method == "ep"], ids=str)
def test_free_phases_end_where_the_reference_ends(case: Case) -> None:
    check_relaxation(Cpu(), case, EXACT)


SIGNED = [replace(case, method="ep-random-sign") for case in FEW if case.method == "ep"]


@pytest.mark.parametrize("case", [*FEW, *SIGNED], ids=str)
def test_training_and_its_counts(case: Case) -> None:
    check_training(Cpu(), case, EXACT)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_calls_and_resets_change_no_bit(case: Case) -> None:
    check_calls(Cpu(), case, SINGLE)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_network_that_is_not_finite_is_frozen(case: Case) -> None:
    check_frozen(Cpu(), case, SINGLE)


@pytest.mark.parametrize("method", ["ep", "ep-symmetric", "bptt"])
@pytest.mark.parametrize(
    ("name", "build", "schedule"),
    [
        ("P", layered(SIZES[3]), "synchronous"),
        ("P", layered(SIZES[4]), "alternating"),
        ("EB", energy_based(SIZES[2], clip=True), "synchronous"),
        ("conv", convolutional(MAPS["two maps"]), "synchronous"),
        ("conv", convolutional(MAPS["padded, two flat"]), "alternating"),
    ],
)
def test_a_settled_stop_changes_no_bit(name: str, build: Any, schedule: Any, method: str) -> None:
    check_settled(Cpu(), Case(name, build, method, schedule, networks=2, samples=9), SINGLE)


@pytest.mark.parametrize(
    "case", [PAPER_1H, PAPER_EB, *(replace(PAPER_1H, method=m) for m in ("bptt", "ep-symmetric"))], ids=str
)
def test_nets_of_the_paper_are_as_good_as_float32(case: Case) -> None:
    check_gradient(Cpu(), case, SINGLE)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(case: Case) -> None:
    start = case.model(SINGLE)
    runs = [changes_with(threads, start, case) for threads in (1, 2, 5)]
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in runs[0])


def changes_with(threads: int, start: Any, case: Case) -> dict[str, torch.Tensor]:
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return changes(Cpu(), start, case, SINGLE)
    finally:
        torch.set_num_threads(kept)


def test_any_number_of_samples_gives_each_sample_the_same_bits() -> None:
    model = PAPER_1H.model(SINGLE)
    x, _, _ = data(model, SINGLE)
    whole = Cpu().relaxation(model, x, Phase(9)).state
    for first, last in ((0, 1), (1, 3), (3, 10), (10, 37), (37, 60)):
        part = Cpu().relaxation(model, x[first:last], Phase(9)).state
        assert all(torch.equal(a, b[first:last]) for a, b in zip(part, whole, strict=True))


def test_other_optimizers_step_with_its_gradients() -> None:
    case = Case("P", layered(SIZES[3]), networks=2)
    start = case.model(EXACT)
    ends = []
    for engine in (Cpu(), Eager()):
        model = copy.deepcopy(start)
        job = replace(job_for(model, case, EXACT, 1.0), optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
        engine.runner(job).run(case.order(3))
        ends.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        assert error(ours, theirs) < 1e-9


def test_a_new_learning_rate_counts_from_the_next_call() -> None:
    case = Case("P", layered(SIZES[2]))
    start = case.model(EXACT)
    ends = []
    for engine in (Cpu(), Eager()):
        job = job_for(copy.deepcopy(start), case, EXACT, 0.1)
        runner = engine.runner(job)
        runner.run(case.order(1))
        for group in job.optimizer.param_groups:
            group["lr"] *= 3.0
        runner.run(case.order(1, seed=1))
        ends.append(dict(job.model.named_parameters()))
    for name, ours in ends[0].items():
        assert error(ours.detach(), ends[1][name].detach()) < 1e-12, name


def test_parameters_that_are_not_trained_stay() -> None:
    case = Case("EB", energy_based(SIZES[3]))
    model = case.model(EXACT)
    model.get_parameter("W12").requires_grad_(False)
    before = copy.deepcopy(model)
    job = job_for(model, case, EXACT, 0.1)
    left_out = replace(job, optimizer=torch.optim.SGD([p for n, p in model.named_parameters() if n != "b0"], lr=0.1))
    Cpu().runner(left_out).run(case.order(2))
    for name, p in model.named_parameters():
        assert torch.equal(p, before.get_parameter(name)) == (name in ("W12", "b0")), name


def test_parameters_in_other_memory_are_followed() -> None:
    case = Case("P", layered(SIZES[2]))
    model = case.model(EXACT)
    twin = copy.deepcopy(model)
    runner = Cpu().runner(job_for(model, case, EXACT, 0.1))
    runner.run(case.order(1))
    for p in model.parameters():
        # Another place, and columns that do not follow each other.
        p.data = p.data.T.clone().T if p.dim() == 2 else p.data.clone()
    runner.run(case.order(1, seed=1))
    other = Eager().runner(job_for(twin, case, EXACT, 0.1))
    other.run(case.order(1))
    other.run(case.order(1, seed=1))
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert error(p.detach(), q.detach()) < 1e-12, name


def test_a_state_that_is_not_finite_is_told_as_the_reference_tells_it() -> None:
    model = Case("P", layered(SIZES[2])).model(EXACT)
    x = data(model, EXACT)[0][:3]
    x[1, 4] = float("nan")
    with pytest.raises(NotFiniteError, match="s1 of Layered is not finite after step 1"):
        Cpu().relaxation(model, x, Phase(5))
    end = Cpu().relaxation(model, x, Phase(5, checked=False))
    assert end.residual.isnan().tolist() == [False, True, False]


def test_phases_it_does_not_have_are_left_to_the_reference() -> None:
    model = Case("EB", energy_based(SIZES[2])).model(EXACT)
    x = data(model, EXACT)[0][:3]
    with pytest.raises(ValueError, match="cannot alternate"):
        Cpu().relaxation(model, x, Phase(5, "alternating"))
    tolerant = Phase(200, stop="settled", still=1e-3)
    assert Cpu().relaxation(model, x, tolerant).steps == relax(model, x, tolerant).steps < 200


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (torch.zeros(2, 3, 4, dtype=torch.int64), r"expected \(n, B\)"),
        (torch.zeros(2, 3), "of integers"),
        (torch.tensor([[0, 60]]), "expected 0 to 59"),
        (torch.tensor([[-1, 3]]), "expected 0 to 59"),
    ],
)
def test_a_bad_order_is_refused_before_anything_moves(order: torch.Tensor, problem: str) -> None:
    case = Case("P", layered(SIZES[2]))
    model = case.model(EXACT)
    before = copy.deepcopy(model)
    with pytest.raises((ValueError, IndexError), match=problem):
        Cpu().runner(job_for(model, case, EXACT, 0.1)).run(order)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_data_that_does_not_fit_is_refused_in_words() -> None:
    case = Case("P", layered(SIZES[2]))
    job = job_for(case.model(EXACT), case, EXACT, 0.1)
    for wrong, words in (
        (replace(job, images=job.images.float()), "The images are torch.float32"),
        (replace(job, images=job.images[:, :-1]), r"expected \(N, 40\)"),
        (replace(job, targets=job.targets[:-1]), r"and \(N, 10\)"),
        (replace(job, labels=job.labels[:-1]), "labels have shape"),
    ):
        with pytest.raises(ValueError, match=words):
            Cpu().runner(wrong)


def test_it_says_in_words_what_it_does_not_have() -> None:
    model = Case("P", layered(SIZES[2])).model(EXACT)
    own = from_primitive(lambda x, s, theta: (s[0] * (x @ theta["W"])).sum(-1), {"W": torch.zeros(4, 2)}, layers=(2,))
    other = Layered((3, 4, 5), activation=torch.relu)
    refusals = [
        (own, None, None, "the model is own model"),
        (model, FunctionCost(lambda s, y: (s[0] - y).abs().sum(-1)), None, "the cost is FunctionCost"),
        (model, SquaredError(), RBP(T=5, K=3), "the estimator is RBP"),
        (other, None, None, "and this net has 'relu'"),
        (copy.deepcopy(model).half(), None, None, "float16"),
        (Case("EB", energy_based((3, 4, 5))).model(EXACT), None, EP(T=5, K=3, schedule="alternating"), "alternate"),
    ]
    for net, cost, estimator, words in refusals:
        reason = Cpu().refuses(Task(net, cost, estimator))
        assert reason is not None
        assert words in reason
        assert choose("auto", Task(net, cost, estimator)).name == "eager"
        with pytest.raises(ValueError, match="The engine 'cpu' cannot serve"):
            choose("cpu", Task(net, cost, estimator))


def test_auto_takes_it_for_the_nets_of_the_paper() -> None:
    for case in (PAPER_1H, Case("conv", convolutional(MAPS["two maps"]))):
        model = case.model(SINGLE)
        for estimator in (EP(T=5, K=2), BPTT(T=5, K=2)):
            assert choose("auto", Task(model, SquaredError(), estimator)).name == "cpu"


WITHOUT = """
import sys, warnings, torch
from eqprop import EP, SquaredError
from eqprop.engines import Task, choose
from eqprop.models import Layered
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    task = Task(Layered((2, 3, 4)), SquaredError(), EP(T=5, K=2))
    names = [choose("auto", task).name for _ in range(3)]
print(names, [str(w.message) for w in said])
try:
    choose("cpu", Task(Layered((2, 3, 4))))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"EQPROP_NO_COMPILER": "1"}, "$EQPROP_NO_COMPILER is set"),
        ({"CC": "/nowhere/cc"}, "$CC is '/nowhere/cc', which was not found"),
        ({"CC": sys.executable}, "failed"),
    ],
)
def test_without_a_compiler_the_reference_runs_and_it_is_said_once(
    variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)} | variables
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=True)
    told, asked = done.stdout.splitlines()
    assert told.startswith("['eager', 'eager', 'eager']")
    assert told.count("The fast CPU engine is not available") == 1
    assert reason in told
    assert asked.startswith("The engine 'cpu' cannot serve:")
    assert reason in asked
    assert not list(tmp_path.rglob("*.so"))


def test_a_change_of_flags_or_sources_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = cpu_library.find_compiler()
    first = cpu_library._fingerprint(command, ("-DREAL_DOUBLE",))
    assert first == cpu_library._fingerprint(command, ("-DREAL_DOUBLE",))
    assert first != cpu_library._fingerprint(command, ())
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(cpu_library, "SOURCES", tmp_path)
    assert first != cpu_library._fingerprint(command, ("-DREAL_DOUBLE",))


def test_choosing_it_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", Task(PAPER_1H.model(SINGLE))).name == "cpu"


def test_symmetric_nudging_takes_less_than_twice_the_time() -> None:
    """It has one phase more, of K steps, and shares the rest: measured 1.15 times on P-1h."""
    made = {method: replace(PAPER_1H, method=method) for method in ("ep", "ep-symmetric")}
    runners = {
        method: Cpu().runner(job_for(case.model(SINGLE), case, SINGLE, 0.01, T=30, K=10))
        for method, case in made.items()
    }
    order = PAPER_1H.order(20)
    ratios = []
    for _ in range(9):
        seconds = {}
        for method, runner in runners.items():
            began = time.process_time()
            runner.run(order)
            seconds[method] = time.process_time() - began
        ratios.append(seconds["ep-symmetric"] / seconds["ep"])
    assert statistics.median(ratios) < 1.9, ratios
