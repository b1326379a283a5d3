"""A machine in the loop: EP trains it, its work is counted, a session is replayed, and one that lies is found out."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eqprop import EP, Nudge, SquaredError, doctor, relax
from eqprop.models import Layered
from eqprop.physical import Abilities, Imperfections, Machine, Reading, Recorded, Replay, Simulated
from eqprop.physical.resistive import Resistive
from eqprop.state import State


class Bench(Machine):
    """An honest machine: a copy of the model, relaxed for long."""

    steps = 200

    def __init__(self, model: Layered | Resistive) -> None:
        super().__init__(model)
        self.inside = (deepcopy(model),)

    def write(self, theta: Mapping[str, Tensor]) -> None:
        self.inside[0].load_state_dict(dict(theta))

    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        return Reading(relax(self.inside[0], x, self.steps, start, nudge).state)


class Hasty(Bench):
    steps = 3


class HastyFromScratch(Hasty):
    abilities = Abilities(continues=False)


class Reversed(Bench):
    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        return super().settle(x, None if nudge is None else Nudge(nudge.cost, nudge.y, -nudge.beta), start)


class Weak(Bench):
    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        return super().settle(x, None if nudge is None else Nudge(nudge.cost, nudge.y, 0.1 * nudge.beta), start)


class Clipped(Bench):
    limit = 0.2

    def write(self, theta: Mapping[str, Tensor]) -> None:
        super().write({name: v.clamp(-self.limit, self.limit) if v.dim() > 1 else v for name, v in theta.items()})


class ClippedHigh(Clipped):
    """Above the weights it has at first: found only because larger ones are tried."""

    limit = 0.9


class Offset(Bench):
    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        return Reading(tuple(v + 0.1 for v in super().settle(x, nudge, start).state))


def problem(sizes: tuple[int, ...] = (3, 12, 8)) -> tuple[Layered, SquaredError, Tensor, Tensor]:
    model = Layered(sizes, seed=0, dtype=torch.float64)
    x = torch.rand(6, sizes[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model, SquaredError(), x, torch.eye(sizes[0], dtype=torch.float64)[torch.arange(6) % sizes[0]]


@pytest.mark.parametrize("nudging", ["one-sided", "symmetric"])
def test_a_machine_without_fault_gives_the_gradient_of_its_model(nudging: str) -> None:
    model, cost, x, y = problem()
    machine = Bench(deepcopy(model))
    for each, ep in ((model, EP(200, 200, 0.1, nudging)), (machine, EP(1, 1, 0.1, nudging))):
        ep.backward(each, cost, x, y)
    for p, q in zip(model.parameters(), machine.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad)
    nudged = 12 if nudging == "symmetric" else 6
    assert machine.work.to_dict() == {"settles": 6 + nudged, "reads": 6 + nudged, "writes": 1, "calibrations": 0}


def test_weights_are_written_when_they_have_changed() -> None:
    model, cost, x, y = problem()
    machine = Bench(model)
    optimizer = torch.optim.SGD(machine.parameters(), lr=0.5)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        free = EP(1, 1, 0.1, "symmetric").backward(machine, cost, x, y)
        losses.append(float(cost(free.state, y).mean()))
        optimizer.step()
    relax(machine, x, 1)
    relax(machine, x, 1)
    assert machine.work.writes == 31
    assert losses[-1] < 0.7 * losses[0]


def test_a_recorded_session_is_replayed(tmp_path: Path) -> None:
    model, cost, x, y = problem()
    here, there = Recorded(Bench(deepcopy(model))), deepcopy(model)
    ep = EP(1, 1, 0.1, "symmetric")
    ep.backward(here, cost, x, y)
    played = Replay(there, here.save(tmp_path / "session.npz"))
    with pytest.raises(ValueError, match="Settling 1 .* was recorded for other weights, inputs or nudge"):
        relax(played, 2.0 * x, 1)
    ep.backward(played, cost, x, y)
    for p, q in zip(here.parameters(), played.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with pytest.raises(ValueError, match="holds 3 settlings, and one more was asked"):
        relax(played, x, 1)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="is no recorded session"):
        Replay(model, tmp_path / "broken.npz")


@pytest.mark.parametrize(
    ("kind", "cause", "shown"),
    [
        (Bench, None, ""),
        (Hasty, "machine-rest", "settling again"),
        (HastyFromScratch, "machine-rest", "after 3 steps"),
        (Reversed, "machine-nudge", "wrong way"),
        (Weak, "machine-nudge", "times as far as it should"),
        (Clipped, "machine-weights", "cut at about 0.2"),
        (ClippedHigh, "machine-weights", "cut at about 0.9"),
        (Offset, "machine-other", "from the rest of the model"),
    ],
)
def test_the_doctor_finds_a_machine_that_lies(kind: type[Bench], cause: str | None, shown: str) -> None:
    model, cost, x, y = problem()
    machine = kind(model)
    before = [p.detach().clone() for p in machine.parameters()]
    found = doctor(machine, cost, x, y, EP(1, 1, 0.1))
    assert found.cause == cause, found
    assert shown in found.verdict
    assert all(torch.equal(p, q) for p, q in zip(machine.parameters(), before, strict=True))


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_the_doctor_takes_noise_for_noise(noise: float) -> None:
    model, cost, x, y = problem()
    machine = Simulated(model, Imperfections(read_noise=noise))
    found = doctor(machine, cost, x, y, EP(200, 200, 0.3))
    assert found.healthy, found


def test_machines_train_on_the_engine_eager(tmp_path: Path) -> None:
    from eqprop import train

    images = torch.rand(40, 8), torch.arange(40) % 3, torch.rand(9, 8), torch.arange(9) % 3
    result = train(
        lambda seed: Bench(Layered((3, 12, 8), seed=seed)), tmp_path / "run", data=images, T=1, K=1, epochs=1
    )
    assert result is not None
