"""Captured iterations, on recorded graphs that stand for CUDA's: the same weights as the reference, without Python."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import eqprop
from eqprop import EP
from eqprop.cost import Nudge
from eqprop.engines import Job
from eqprop.engines.compiled import CompiledGraphRunner, CompiledSteps
from eqprop.engines.cuda.graph import GraphRunner
from eqprop.engines.eager import EagerRunner
from eqprop.models import Conv, Dense, Network, stack
from eqprop.starts import Carried
from tests.helpers.recorded_graphs import record_graphs

SAMPLES, ROWS, RATE = 24, 20, 0.125


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)
    monkeypatch.setattr("eqprop.engines.compiled.compile_graph", lambda graph, inputs, before: graph)
    monkeypatch.setattr("eqprop.engines.cuda.graph.STEPS_PER_GRAPH", 40)
    # The check of an implicit nudge reads beta back, but not from a GPU.
    monkeypatch.setattr("eqprop.estimators.ep.Nudge", functools.partial(Nudge, checked=False))


def order(batch: int = 4) -> Tensor:
    source = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(SAMPLES, generator=source)[:batch] for _ in range(ROWS)])


def job(networks: int | None = None, estimator: Any = None, **options: Any) -> Job:
    nets = [eqprop.models.Layered((3, 5, 6), "prototypical", "tanh", seed=n).double() for n in range(networks or 1)]
    model = stack(nets) if networks else nets[0]
    x = torch.rand(SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(SAMPLES) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5, weight_decay=0.25)
    ep = estimator or EP(T=8, K=3, beta=0.1)
    y = torch.eye(3).double()[labels]
    return Job(model, eqprop.SquaredError(), ep, optimizer, x, y, labels, networks, **options)


def captured(task: Job) -> CompiledGraphRunner:
    return CompiledGraphRunner(task, CompiledSteps(False, lambda: None))


def halve(grads: list[Tensor], loss: Tensor) -> Tensor:
    for g in grads:
        g.mul_(0.5)
    return loss


def by_number(s: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(s[0], y, reduction="none")


def labelled() -> Job:
    """A cost of one's own whose targets are class numbers."""
    task = job()
    return replace(task, cost=eqprop.FunctionCost(by_number), targets=task.labels)


CASES: dict[str, Callable[[], Job]] = {
    "class numbers": labelled,
    "one-sided": job,
    "symmetric": lambda: job(estimator=EP(8, 3, 0.5, nudging="symmetric")),
    "one after the other": lambda: job(estimator=EP(8, 3, 0.5, nudging="symmetric", side_by_side=False)),
    "random-sign": lambda: job(estimator=EP(8, 3, 0.1, nudging="random-sign")),
    "sweeps": lambda: job(estimator=EP(8, 4, 0.1, schedule="sweeps")),
    "BPTT": lambda: job(estimator=eqprop.BPTT(8, 3)),
    "two networks": lambda: job(2, EP(8, 3, 0.1, nudging="random-sign")),
    "halves": lambda: job(exchange=halve),
    "halves of two networks": lambda: job(2, exchange=halve),
    "prepared and clipped": lambda: job(prepare=lambda stored, rows: stored * (rows % 2).unsqueeze(-1), clip=0.01),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [GraphRunner, captured])
def test_captured_iterations_are_the_reference(name: str, kind: Callable[[Job], EagerRunner]) -> None:
    found = {}
    for make in (EagerRunner, kind):
        task = CASES[name]()
        rows = order() if task.networks is None else order().unsqueeze(1).expand(-1, task.networks, -1)
        runner = make(task)
        runner.run(rows[:13])
        runner.run(rows[13:])
        tally = torch.tensor(list(runner.tally.read().values()))
        found[make] = [*task.model.parameters(), tally, *(s["momentum_buffer"] for s in task.optimizer.state.values())]
    for a, b in zip(found[EagerRunner], found[kind], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_net_with_pooled_convolutions_and_carried_states() -> None:
    def make() -> Job:
        net = Network(
            (2, 8, 8),
            {"out": 3, "h2": (4, 3, 3), "h1": (3, 8, 8)},
            [Conv("x", "h1", kernel=3, padding=1), Conv("h1", "h2", kernel=3, pool=2), Dense("h2", "out")],
            {"out": "identity", "*": "hard-sigmoid"},
            nudge_site="implicit",
            seed=0,
            dtype=torch.float64,
        )
        task = job(estimator=EP(6, 4, 0.5, nudging="symmetric", schedule="sweeps"))
        x = torch.rand(SAMPLES, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        return replace(task, model=net, images=x, optimizer=optimizer, start=Carried(net, x, 4))

    twin, ours = make(), make()
    EagerRunner(twin).run(order())
    captured(ours).run(order())
    for a, b in zip(twin.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_changed_rate_is_no_new_capture() -> None:
    twin, ours = job(), job()
    eager, graphs = EagerRunner(twin), captured(ours)
    replayed = None
    for epoch in range(4):
        for task, runner in ((twin, eager), (ours, graphs)):
            for group in task.optimizer.param_groups:
                group["lr"] = RATE / 2**epoch
            runner.take_rates()
            runner.run(order())
        replayed = replayed or graphs.graph
        assert graphs.graph is replayed
    assert ours.optimizer.param_groups[0]["lr"] == RATE / 8
    assert not ours.optimizer.param_groups[0]["fused"]
    for a, b in zip(twin.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_another_mini_batch_is_a_new_capture() -> None:
    twin, ours = job(), job()
    for runner in (EagerRunner(twin), captured(ours)):
        runner.run(order(4))
        runner.run(order(3))
    for a, b in zip(twin.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_model_that_reads_its_state_back_cannot_be_captured() -> None:
    def looking(x: Tensor, s: tuple[Tensor, ...], theta: Any) -> Tensor:
        return (1.0 if bool(s[0].sum() > 0) else 0.5) * (s[0] * (x @ theta["W"].T)).sum(-1)

    weights = {"W": torch.ones(3, 6, dtype=torch.float64)}
    model = eqprop.from_primitive(looking, weights, (3,), squash=torch.tanh, input_shape=(6,))
    task = replace(job(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="cannot be captured"):
        GraphRunner(task).run(order())


def test_phases_that_do_not_fit_side_by_side_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, ours = CASES["symmetric"](), CASES["symmetric"]()
    runner = captured(ours)
    learn = runner.learn
    before = [p.detach().clone() for p in ours.model.parameters()]
    calls: list[bool] = []

    def short(batch: Any, signs: Any = None) -> Tensor:
        calls.append(runner.estimator.side_by_side)  # type: ignore[attr-defined]
        if calls == [True, True]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return learn(batch, signs)

    monkeypatch.setattr(runner, "learn", short)
    with pytest.warns(UserWarning, match="do not fit into the GPU's memory side by side"):
        runner._capture(order())
    for a, b in zip(before, ours.model.parameters(), strict=True):
        assert torch.equal(a, b), "what the first iterations changed is restored"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.run(order())
    EagerRunner(twin).run(order())
    for a, b in zip(twin.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
    "weight decay": lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=0.25),
    "Adam": lambda p: torch.optim.Adam(p, lr=RATE, weight_decay=0.25),
}


@pytest.mark.parametrize("networks", [None, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [EagerRunner, GraphRunner, captured])
def test_a_frozen_network_stays_whatever_the_optimizer_remembers(kind: Any, optimizer: str, networks: Any) -> None:
    if kind is not EagerRunner and optimizer == "Adam":
        pytest.skip("capturable on a GPU only")
    task = job(networks)
    task = replace(task, optimizer=OPTIMIZERS[optimizer](list(task.model.parameters())))
    task.targets[0] = torch.nan
    rows = torch.arange(1, 1 + 4 * (networks or 1)).view(1, networks or 1, 4)
    rows = rows if networks else rows[0]
    runner = kind(task)
    runner.run(torch.stack([rows[0], rows[0]]))
    before = [p.detach().clone() for p in task.model.parameters()]
    bad = rows.clone()
    bad.view(-1)[0] = 0
    runner.run(torch.stack([bad[0], rows[0], rows[0]]))
    assert runner.tally.read()["bad"] == [2.0, -1.0][: networks or 1]
    for p, q in zip(task.model.parameters(), before, strict=True):
        first, others = (p, p[:0]) if networks is None else (p[0], p[1:])
        assert torch.equal(first, q if networks is None else q[0])
        assert networks is None or not torch.equal(others, q[1:])


@pytest.mark.parametrize("kind", [GraphRunner, captured])
def test_a_capture_that_fails_leaves_everything_as_it_was(kind: Any) -> None:
    """The iterations of its warm-up are undone, and the next run tries again instead of replaying an older graph."""

    class Fails(RuntimeError):
        pass

    calls: list[int] = []

    def prepare(stored: Tensor, rows: Tensor) -> Tensor:
        calls.append(rows.shape[-1])
        if rows.shape[-1] == 3 and calls.count(3) % 3 == 0:  # at the end of the warm-up
            raise Fails("no")
        return stored

    task = job(prepare=prepare)
    runner = kind(task)
    runner.run(order())
    before = [p.detach().clone() for p in task.model.parameters()]
    samples = runner.tally.read()["samples"]
    for _ in range(2):
        with pytest.raises(Fails):
            runner.run(order(3))
        assert all(torch.equal(p, q) for p, q in zip(task.model.parameters(), before, strict=True))
        assert runner.tally.read()["samples"] == samples
