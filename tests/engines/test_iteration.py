"""The parts of an iteration: preparation of samples, two halves around an exchange, clipping, what follows a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import eqprop
from eqprop.cost import Problem
from eqprop.engines import Job, choose
from eqprop.engines.base import Precision
from eqprop.engines.cuda.graph import GraphRunner
from eqprop.engines.eager import EagerRunner, agreements, update_in
from eqprop.models import stack

ORDER = torch.arange(12).view(3, 4)


def job(networks: int | None = None, lr: float = 0.1) -> Job:
    nets = [eqprop.models.Layered((3, 5, 6), "prototypical", "tanh", seed=n).double() for n in range(networks or 1)]
    model = stack(nets) if networks else nets[0]
    torch.manual_seed(0)
    x = torch.rand(12, 6, dtype=torch.float64)
    labels = torch.arange(12) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    ep = eqprop.EP(T=20, K=5, beta=0.1)
    return Job(model, eqprop.SquaredError(), ep, optimizer, x, torch.eye(3).double()[labels], labels, networks)


def weights(task: Job, order: Tensor = ORDER) -> dict[str, Tensor]:
    choose("eager", task.task).runner(task).run(order)
    return {name: p.detach().clone() for name, p in task.model.named_parameters()}


def test_prepared_samples_train_like_samples_that_are_inputs_already() -> None:
    bytes_ = (job().images * 255).round().to(torch.uint8)
    ready = replace(job(), images=bytes_.double() / 255)
    seen: list[Tensor] = []

    def prepare(stored: Tensor, rows: Tensor) -> Tensor:
        seen.append(rows)
        return stored.double() / 255

    prepared = replace(job(), images=bytes_, prepare=prepare)
    for name, value in weights(ready).items():
        torch.testing.assert_close(weights_of(prepared, name), value, rtol=0, atol=0)
    assert torch.equal(torch.stack(seen[:3]), ORDER)


def weights_of(task: Job, name: str) -> Tensor:
    fresh = replace(task, model=job().model)
    fresh = replace(fresh, optimizer=torch.optim.SGD(fresh.model.parameters(), lr=0.1))
    return weights(fresh)[name]


def test_an_exchange_stands_between_gradient_and_update() -> None:
    def halve(grads: list[Tensor], loss: Tensor) -> Tensor:
        for g in grads:
            g.mul_(0.5)
        return loss

    exchanged, slower = weights(replace(job(), exchange=halve)), weights(job(lr=0.05))
    for name, value in slower.items():
        torch.testing.assert_close(exchanged[name], value, rtol=1e-12, atol=0)
    assert not torch.equal(exchanged["W01"], weights(job())["W01"])


def test_a_loss_that_is_not_finite_elsewhere_freezes_the_network_here() -> None:
    before = job().model.W01.detach().clone()
    frozen = weights(replace(job(), exchange=lambda grads, loss: torch.full_like(loss, float("nan"))))
    assert torch.equal(frozen["W01"], before)


def test_each_stacked_network_is_clipped_as_torch_clips_one() -> None:
    most = 1e-3
    stacked = weights(replace(job(2), clip=most), ORDER[:1, None].expand(-1, 2, -1))
    for n in range(2):
        model = eqprop.models.Layered((3, 5, 6), "prototypical", "tanh", seed=n).double()
        task = job()
        rows = ORDER[0]
        task.estimator.backward(model, task.cost, task.images[rows], task.targets[rows])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        assert norm > 2 * most
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(stacked[name][n], p.detach(), rtol=1e-9, atol=1e-12)


def test_what_follows_a_step_sees_the_new_weights() -> None:
    task = job()
    seen: list[Tensor] = []
    after = replace(task, after=lambda: seen.append(task.model.W01.detach().clone()))
    last = weights(after)
    assert len(seen) == len(ORDER)
    assert torch.equal(seen[-1], last["W01"])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.gpu
@pytest.mark.parametrize("networks", [None, 2])
def test_captured_halves_are_the_reference_bit_for_bit(networks: int | None) -> None:
    """Two graphs with an exchange between them; here it halves gradients in the middle of every iteration."""

    def halve(grads: list[Tensor], loss: Tensor) -> Tensor:
        for g in grads:
            g.mul_(0.5)
        return loss

    def trained(kind: type[EagerRunner]) -> list[Tensor]:
        task = job(networks)
        model = task.model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parts = {name: getattr(task, name).cuda() for name in ("images", "targets", "labels")}
        order = ORDER if networks is None else ORDER.unsqueeze(1).expand(-1, networks, -1)
        kind(replace(task, model=model, optimizer=optimizer, exchange=halve, **parts)).run(order.cuda())
        return [p.detach().cpu() for p in model.parameters()]

    for eager, captured in zip(trained(EagerRunner), trained(GraphRunner), strict=True):
        torch.testing.assert_close(captured, eager, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_compiled_captures_train_as_the_reference_and_follow_changed_rates(optimizer: str) -> None:
    """The whole iteration by CompiledGraphRunner on the GPU, twice with half the rate, without a new capture."""

    def on_gpu() -> Job:
        task = job()
        model = task.model.cuda()
        options = {"momentum": 0.5} if optimizer == "SGD" else {"capturable": True}
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.125, **options)
        parts = {name: getattr(task, name).cuda() for name in ("images", "targets", "labels")}
        return replace(task, model=model, optimizer=made, **parts)

    twin, ours = on_gpu(), on_gpu()
    eager, engine = EagerRunner(twin), choose("compiled", ours.task)
    captured = engine.runner(ours)
    graphs = set()
    for epoch in range(3):
        for task, runner in ((twin, eager), (ours, captured)):
            for group in task.optimizer.param_groups:
                group["lr"] = 0.125 / 2**epoch
            runner.take_rates()
            runner.run(ORDER.cuda())
        graphs.add(id(captured.graph))  # type: ignore[attr-defined]
    assert len(graphs) == 1
    for a, b in zip(twin.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
def test_compiled_steps_have_the_declared_precision_on_a_gpu(precision: Precision) -> None:
    task = job()
    model = task.model.float().cuda()
    x, y = task.images.float().cuda(), task.targets.float().cuda()
    ep = eqprop.EP(T=20, K=5, beta=0.5, nudging="symmetric")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    reference = update_in(Problem(model, task.cost, x, y), ep, "float32")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = Job(model, task.cost, ep, optimizer, x, y, task.labels.cuda())
    choose("compiled", replace(given.task, precision=precision)).runner(given).run(torch.arange(12).view(1, 12).cuda())
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    agreed = agreements(moved, reference)[""]
    assert agreed.cosine > (1.0 - 1e-6 if precision == "float32" else 0.99)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
