"""The CUDA engines against the reference in float64: states, gradients through the weights they lead to, counts."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.check import Checker
from eqprop import BPTT, EP, RBP, Nudge, SquaredError, papers, relax
from eqprop.data import mnist, one_hot
from eqprop.engines import Job, Task, choose
from eqprop.engines.base import full_precision
from eqprop.engines.cuda import nvrtc
from eqprop.engines.cuda.deep import HELPERS, SHARED_BYTES, WARPS, Deep, layout, output_range
from eqprop.engines.cuda.graph import CapturedEngine
from eqprop.engines.cuda.job import LONGEST_RUN, CapturedRunner, KernelRunner
from eqprop.engines.cuda.one_hidden import OneHidden
from eqprop.engines.eager import EagerRunner
from eqprop.models import Convolutional, Layered, stack

N = 200
"""Random samples that stand for a data set."""

NETS = {
    "one hidden": (12, 52, 36),
    "one hidden, one output": (1, 128, 100),
    "two hidden": (10, 40, 72, 64),
    "two hidden, wide": (10, 512, 512, 784),
    "three hidden": (7, 100, 20, 68, 40),
    "three hidden, wide": (10, 512, 512, 512, 784),
    "four hidden": (10, 36, 20, 68, 36, 784),
}
SETTINGS = {
    "P sigmoid": {"setting": "prototypical", "activation": "sigmoid"},
    "P tanh": {"setting": "prototypical", "activation": "tanh"},
    "EB clipped": {"setting": "energy-based", "activation": "sigmoid", "eps": 0.3, "clip": True},
    "EB tanh, no output slope": {"setting": "energy-based", "activation": "tanh", "eps": 0.2, "output_slope": False},
}
TIMES_FLOAT32 = 2.0
"""How many times torch's own float32 the weight update may err (a bias: or that of its weights)."""
FLOOR = 5e-6
"""Where torch's float32 happens to err less, the roundings of a chain of thirty float32 steps are granted."""
PAIRS = [
    *((net, setting) for net in NETS for setting in ("P sigmoid", "EB clipped")),
    *((net, setting) for net in ("one hidden", "two hidden") for setting in ("P tanh", "EB tanh, no output slope")),
]


def build(sizes, setting, networks, seed=0):
    nets = [Layered(sizes, init="default", seed=seed + r, **SETTINGS[setting]) for r in range(networks)]
    return stack(nets)


def make_job(model, estimator, dtype, networks):
    g = torch.Generator().manual_seed(11)
    shape = model.input_shape
    x = torch.rand(N, *shape, generator=g, dtype=torch.float64)
    outputs = model.init_state(torch.zeros(networks, 1, *shape, dtype=dtype, device="cuda"))[0].shape[-1]
    labels = torch.randint(outputs, (N,), generator=g)
    rates = [0.05 + 0.01 * i for i, _ in enumerate(model.parameters())]
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)])
    y = one_hot(labels, outputs, dtype=torch.float64)
    return Job(
        model, SquaredError(), estimator, optimizer, x.to("cuda", dtype), y.to("cuda", dtype), labels.cuda(), networks
    )


def trained(kind, model, estimator, dtype, order):
    """The change of every parameter after the ordered iterations, and the runner."""
    model = build_copy(model, dtype)
    before = [p.detach().double().clone() for p in model.parameters()]
    job = make_job(model, estimator, dtype, order.shape[1])
    runner = kind(job)
    runner.run(order)
    return [p.detach().double() - b for p, b in zip(model.parameters(), before, strict=True)], runner


def build_copy(model, dtype):
    return copy.deepcopy(model).to("cuda", dtype)


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance(monkeypatch):
    """What the kernels do not write is NaN."""
    zeros = KernelRunner.buffer

    def filled(self, *shape, dtype=torch.float32):
        fresh = zeros(self, *shape, dtype=dtype)
        return fresh.fill_(float("nan")) if dtype == torch.float32 else fresh

    monkeypatch.setattr(KernelRunner, "buffer", filled)


def assert_near_float32(names, got, plain, exact):
    mine, theirs = (
        {name: ((a - ref).norm() / ref.norm()).item() for name, a, ref in zip(names, runs, exact, strict=True)}
        for runs in (got, plain)
    )
    for name in names:
        weights = f"W{name[1:]}{int(name[1:]) + 1}" if name.startswith("b") else name
        allowed = max(TIMES_FLOAT32 * theirs[name], TIMES_FLOAT32 * theirs[weights], FLOOR)
        assert mine[name] <= allowed, (name, mine[name], theirs[name])


def estimators(engine):
    for schedule in ("synchronous", "alternating"):
        for nudging in engine.nudgings:
            yield EP(T=21, K=6, beta=0.3, schedule=schedule, nudging=nudging), schedule
        yield BPTT(T=21, K=6, schedule=schedule), schedule


@pytest.mark.gpu
@pytest.mark.parametrize(("net", "setting"), PAIRS)
def test_updates_are_near_float32(net, setting):
    sizes, networks, batch = NETS[net], 3, 13
    engine = OneHidden() if len(sizes) == 3 else Deep()
    order = torch.randint(N, (2, networks, batch), generator=torch.Generator().manual_seed(3))
    model = build(sizes, setting, networks)
    for estimator, schedule in estimators(engine):
        if schedule == "alternating" and "EB" in setting:
            continue
        job = make_job(build_copy(model, torch.float32), estimator, torch.float32, networks)
        assert engine.refuses(Task(job.model, job.cost, estimator, job.optimizer)) is None
        exact, reference = trained(EagerRunner, model, estimator, torch.float64, order)
        plain, _ = trained(EagerRunner, model, estimator, torch.float32, order)
        got, runner = trained(engine.runner, model, estimator, torch.float32, order)
        names = [name for name, _ in model.named_parameters()]
        assert_near_float32(names, got, plain, exact)
        counted, expected = runner.tally.read(), reference.tally.read()
        assert counted["samples"] == expected["samples"]
        assert counted["bad"] == expected["bad"]
        for name in ("loss", "residual", "worst"):
            assert counted[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.gpu
def test_updates_of_a_large_batch_are_near_float32():
    networks, batch = 2, 61
    order = torch.randint(N, (2, networks, batch), generator=torch.Generator().manual_seed(3))
    model = build(NETS["two hidden"], "P sigmoid", networks)
    for estimator in (EP(T=21, K=6, beta=0.3), BPTT(T=21, K=6)):
        exact, _ = trained(EagerRunner, model, estimator, torch.float64, order)
        plain, _ = trained(EagerRunner, model, estimator, torch.float32, order)
        got, runner = trained(Deep().runner, model, estimator, torch.float32, order)
        assert runner.substitute is None
        assert_near_float32([name for name, _ in model.named_parameters()], got, plain, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["P-2h", "P-3h"])
def test_printed_nets_by_bptt_are_as_good_as_float32(name):
    """Nothing settles in them: an error that all sums have in common shows here, and not in small nets."""
    case = Case(papers.find(name, "paper"), "bptt", trials=5)
    with full_precision():
        verdict = Checker(mnist(torch.device("cuda"))).check(case, Deep())
    assert verdict.reason is None, verdict


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(10, 64, 48), (10, 64, 48, 32)])
@pytest.mark.parametrize("setting", ["P sigmoid", "EB clipped"])
def test_states_of_both_phases(sizes, setting, monkeypatch):
    monkeypatch.setattr(KernelRunner, "keeps_states", True)
    networks, batch = 2, 7
    model = build(sizes, setting, networks)
    estimator = EP(T=30, K=5, beta=0.4)
    order = torch.randint(N, (1, networks, batch), generator=torch.Generator().manual_seed(5))
    engine = OneHidden() if len(sizes) == 3 else Deep()
    _, runner = trained(engine.runner, model, estimator, torch.float32, order)
    job = make_job(build_copy(model, torch.float64), estimator, torch.float64, networks)
    rows = order[0].cuda()
    x, y = job.images[rows], job.targets[rows]
    free = relax(job.model, x, 30)
    nudged = relax(job.model, x, 5, free.state, Nudge(job.cost, y, 0.4))
    for mine, exact in zip(runner.states(), (free.state, nudged.state), strict=True):
        for a, b in zip(mine, exact, strict=True):
            assert (a.double() - b).abs().max() < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(10, 64, 48), (10, 64, 48, 32)])
def test_settled_stop_changes_no_bit(sizes):
    networks, batch = 2, 9
    model = build(sizes, "P sigmoid", networks)
    order = torch.randint(N, (2, networks, batch), generator=torch.Generator().manual_seed(7))
    engine = OneHidden() if len(sizes) == 3 else Deep()
    for kind in (EP(T=400, K=5, beta=0.4), BPTT(T=400, K=5)):
        whole, _ = trained(engine.runner, model, kind, torch.float32, order)
        early, _ = trained(engine.runner, model, replace(kind, stop="settled"), torch.float32, order)
        assert all(torch.equal(a, b) for a, b in zip(whole, early, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(10, 64, 48), (10, 64, 48, 32)])
def test_a_network_that_is_not_finite_is_frozen_and_the_others_go_on(sizes):
    networks, batch = 3, 5
    model = build(sizes, "P sigmoid", networks)
    with torch.no_grad():
        model.weight(0)[1, 0, 0] = float("nan")
    order = torch.randint(N, (4, networks, batch), generator=torch.Generator().manual_seed(7))
    engine = OneHidden() if len(sizes) == 3 else Deep()
    estimator = EP(T=10, K=4, beta=0.4)
    moved, runner = trained(engine.runner, model, estimator, torch.float32, order)
    plain, reference = trained(EagerRunner, model, estimator, torch.float32, order)
    assert runner.tally.read()["bad"] == reference.tally.read()["bad"] == [-1.0, 0.0, -1.0]
    for a, b in zip(moved[1:], plain[1:], strict=True):
        assert torch.equal(a[1], torch.zeros_like(a[1]))
        assert torch.allclose(a[0], b[0], rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [EP(T=12, K=4, beta=0.3), BPTT(T=12, K=4), RBP(T=12, K=4)])
def test_the_graph_is_the_reference_bit_for_bit(kind):
    conv = stack([Convolutional((1, 12, 12), (4, 3), (3,), kernel=3, seed=r) for r in range(2)])
    deep = build((5, 20, 30, 12), "EB clipped", 2)
    order = torch.randint(N, (5, 2, 6), generator=torch.Generator().manual_seed(7))
    for model in (conv, deep):
        plain, _ = trained(EagerRunner, model, kind, torch.float32, order)
        got, _ = trained(CapturedEngine().runner, model, kind, torch.float32, order)
        for a, b in zip(got, plain, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.gpu
def test_kernels_that_do_not_compile_hand_over_to_the_graph(monkeypatch):
    def broken(*_):
        raise nvrtc.CudaError("no kernel today.")

    monkeypatch.setattr(nvrtc, "Module", broken)
    model, order = build((10, 64, 48), "P sigmoid", 2), torch.randint(N, (3, 2, 6))
    estimator = EP(T=12, K=4, beta=0.3)
    with pytest.warns(RuntimeWarning, match="graph engine takes over"):
        got, runner = trained(OneHidden().runner, model, estimator, torch.float32, order)
    plain, _ = trained(EagerRunner, model, estimator, torch.float32, order)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(got, plain, strict=True))
    assert runner.tally.read()["samples"] == [18.0, 18.0]


@pytest.mark.gpu
def test_auto_takes_the_kernels_and_says_why_not():
    taken = {(10, 64, 48): "cuda-one-hidden", (10, 64, 48, 32): "cuda-deep", (10, 64, 48, 32, 32): "cuda-deep"}
    for shape, name in taken.items():
        model = build(shape, "P sigmoid", 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert choose(name, Task(model, SquaredError(), EP(T=5, K=2), optimizer)).name == name
        assert choose("auto", Task(model, SquaredError(), EP(T=5, K=2), optimizer)).name == name
        momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        assert choose("auto", Task(model, SquaredError(), EP(T=5, K=2), momentum)).name == "cuda-graph"
        with pytest.raises(ValueError, match="momentum"):
            choose(name, Task(model, SquaredError(), EP(T=5, K=2), momentum))


@pytest.mark.parametrize("name", ["cuda-one-hidden", "cuda-deep", "cuda-graph"])
def test_a_model_on_the_cpu_is_refused_in_words(name):
    with pytest.raises(ValueError, match="CUDA"):
        choose(name, Task(Layered((10, 64, 48)), SquaredError(), EP(T=5, K=2)))


@pytest.mark.gpu
def test_hidden_layers_that_do_not_fit_are_refused_in_words():
    for shape, words in (
        ((10, 520, 64, 48), "512 units"),
        ((10, 33, 64, 48), "multiple of 4"),
        ((10, 512, 512, 512, 512, 48), "must fit 16 blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            choose("cuda-deep", Task(Layered(shape).cuda(), SquaredError(), EP(T=5, K=2)))


LAYOUTS = [
    (10, 512, 512),
    (10, 512, 512, 512),
    (7, 100, 52),
    (16, 16, 31, 33, 300),
    (10, 33, 40),
    (10, 256, 256, 256, 256),
]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_tile_has_its_warps_and_every_neighbour_is_heard(sizes):
    plan, depth = layout(sizes), len(sizes)
    assert plan.shared_bytes <= SHARED_BYTES
    held = sorted(role for block in plan.blocks for role in block)
    teams = {n: 4 if 2 <= n < depth - 1 else 2 for n in range(1, depth)}
    assert held == [(n, t, p) for n in teams for t in range(-(-sizes[n] // 32)) for p in range(teams[n])]
    for rank, block in enumerate(plan.blocks):
        assert len(block) <= WARPS
        for i, (n, pair, part) in enumerate(block):
            first = i - part
            assert first % teams[n] == 0, "a team begins where its barriers are its own"
            assert block[first : first + teams[n]] == tuple((n, pair, p) for p in range(teams[n]))
        for n in range(depth):
            first, count = plan.listeners(n) % 256, plan.listeners(n) // 256
            assert (first <= rank < first + count) == (n in plan.heard(rank))


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_each_barrier_of_a_block_is_made_ready_by_one_warp(sizes):
    plan = layout(sizes)
    table = plan.table()
    for rank in range(len(plan.blocks)):
        ready = []
        for n, _, part, arms in table[rank * (WARPS + HELPERS) :][:WARPS]:
            source = n - 1 if part >= 2 or n == len(sizes) - 1 else n + 1
            ready += [m for bit, m in ((1, source), (2, 0)) if arms & bit]
        assert sorted(ready) == sorted(plan.heard(rank))


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_each_share_of_the_outputs_is_summed_by_one_helper_that_hears_layer_1(sizes):
    plan = layout(sizes)
    table, warps = plan.table(), WARPS + HELPERS
    assert len(table) == len(plan.blocks) * warps
    found = [(i // warps, row) for i, row in enumerate(table) if i % warps >= WARPS and row[0] >= 0]
    assert sorted(row[0] for _, row in found) == list(range(len(plan.shares)))
    assert 1 <= len(found) <= -(-sizes[1] // 32), "none has nothing to do"
    for rank, (_, place, _, _) in found:
        assert 1 in plan.heard(rank)
        assert [r for r, row in found if r == rank and row[1] == place] == [rank], "fragments of its own"


def test_outputs_are_told_relative_to_what_bounds_them():
    model = Layered((10, 8, 8, 12), "prototypical", seed=0)
    assert output_range(model, EP(T=5, K=2, beta=0.5)) == 4.0, "at most (1 + beta) / (1 - beta) = 3"
    assert output_range(model, EP(T=5, K=2, beta=-0.1)) == 2.0
    assert output_range(model, EP(T=5, K=2, beta=0.5), largest_target=10.0) == 16.0
    assert output_range(model, BPTT(T=5, K=2)) == 1.0, "never nudged"
    assert output_range(model, EP(T=5, K=2, beta=1.0)) == math.inf
    assert output_range(model, EP(T=5, K=2, beta=0.5), largest_target=math.nan) == math.inf
    energy_based = Layered((10, 8, 8, 12), "energy-based", seed=0, eps=0.2)
    assert output_range(energy_based, EP(T=5, K=2, beta=2.0)) == 1.0, "rates, not states, are told"


def test_layers_that_no_cluster_holds_have_no_layout():
    assert layout((10, 512, 512, 512, 512)) is None


class OnTheHost(CapturedRunner):
    """Notes what it is asked for; `broken` cannot be prepared."""

    def __init__(self, job, broken=False):
        super().__init__(job)
        self.broken, self.asked = broken, []

    def _prepare(self, batch):
        if self.broken:
            raise nvrtc.CudaError("no kernel today.")
        self.batch = batch
        self.asked.append(("prepare", batch))

    def _run(self, rows):
        self.asked.append(("run", tuple(rows.shape)))


def host_job():
    model = Layered((3, 4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = torch.rand(6, 5), torch.arange(6) % 3
    return Job(model, SquaredError(), EP(T=5, K=2), optimizer, x, one_hot(labels, 3), labels)


def test_a_long_order_is_run_in_parts_and_prepared_once_a_batch_size():
    runner = OnTheHost(host_job())
    runner.run(torch.zeros(LONGEST_RUN + 1, 2, dtype=torch.int64))
    runner.run(torch.zeros(3, 2, dtype=torch.int64))
    runner.run(torch.zeros(1, 4, dtype=torch.int64))
    runs = [("run", (LONGEST_RUN, 1, 2)), ("run", (1, 1, 2)), ("run", (3, 1, 2))]
    assert runner.asked == [("prepare", 2), *runs, ("prepare", 4), ("run", (1, 1, 4))]


def test_a_runner_that_cannot_be_prepared_hands_over_and_says_so_once(monkeypatch):
    monkeypatch.setattr("eqprop.engines.cuda.job.GraphRunner", EagerRunner)
    runner = OnTheHost(host_job(), broken=True)
    order = torch.arange(6).view(3, 2)
    with pytest.warns(RuntimeWarning, match="no kernel today. The graph engine takes over"):
        runner.run(order)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.run(order)
    assert runner.asked == []
    assert runner.tally.read()["samples"] == [12.0]
    runner.reset()
    assert runner.tally.read()["samples"] == [0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ep", "bptt"])
def test_networks_that_do_not_wait_for_each_other_learn_the_same_bits(method, monkeypatch):
    """Five networks of the paper's P-3h are fifteen clusters, more than any device holds at once."""
    sizes, networks, batch = NETS["three hidden, wide"], 5, 20
    estimator = EP(T=21, K=6, beta=0.3) if method == "ep" else BPTT(T=21, K=6)
    order = torch.randint(N, (120, networks, batch), generator=torch.Generator().manual_seed(3))
    model = build(sizes, "P sigmoid", networks)
    apart, runner = trained(Deep().runner, model, estimator, torch.float32, order)
    assert runner.takes_turns
    monkeypatch.setattr(type(runner), "takes_turns", False)
    together, other = trained(Deep().runner, model, estimator, torch.float32, order)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    assert runner.tally.read() == other.tally.read()
