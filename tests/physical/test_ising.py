"""Spin nets and the Ising machine: formulas follow the energy, anneals find its minima, their work is counted."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import eqprop
from eqprop import EP, relax
from eqprop.cost import Nudge
from eqprop.physical.ising import Ising
from eqprop.physical.spins import SpinError, SpinNet, Spins
from eqprop.relax import Phase

needs_dwave = pytest.mark.skipif(
    importlib.util.find_spec("dwave") is None,
    reason="dwave-samplers is not installed (the extra `ising`), so nothing is annealed",
)
SIZES = (6, 5, 4)


def made(seed: int = 0) -> tuple[Spins, torch.Tensor, torch.Tensor]:
    model = Spins(SIZES, (2.0,), None, seed=seed, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed + 1)
    for n in range(2):
        model.bias(n).data = 0.3 * torch.randn(SIZES[n], generator=g, dtype=torch.float64)
    x = torch.randn(3, SIZES[-1], generator=g, dtype=torch.float64)
    return model, x, torch.eye(3, dtype=torch.float64)


def lowest(model: Spins, x: torch.Tensor, cost: SpinError, y: torch.Tensor, beta: float) -> tuple[torch.Tensor, ...]:
    """Of all states of one sample, that of the least E + beta l."""
    n = sum(SIZES[:-1])
    every = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=torch.float64)
    s = every.split(SIZES[:-1], 1)
    energy = -model.primitive(x.expand(len(every), -1), s) + beta * cost(s, y.expand(len(every), -1), {})
    return tuple(v[int(energy.argmin())] for v in s)


def test_formulas_are_those_of_the_energy() -> None:
    model, x, y = made()
    s, t = (tuple(torch.randn(3, n, dtype=torch.float64).sign() for n in SIZES[:-1]) for _ in range(2))
    for a, b in zip(model.gradient(model.drive(x), s), model.autodiff_gradient(x, s), strict=True):
        torch.testing.assert_close(a, b)
    found, oracle = model.contrast(x, s, t), model.autodiff_contrast(x, s, t)
    for name in oracle:
        torch.testing.assert_close(found[name], oracle[name])
    cost = SpinError(3)
    torch.testing.assert_close(cost(s, y, {}), 0.5 * (s[0] - cost.target(y, s[0])).square().sum(-1))
    assert cost.scores(s).shape == (3, 3)


def test_sweeps_never_raise_the_energy() -> None:
    model, x, _ = made()
    s, last = model.init_state(x), None
    for _ in range(20):
        s = relax(model, x, Phase(1, "sweeps"), s).state
        energy = -model.primitive(x, s)
        assert last is None or bool((energy <= last + 1e-12).all())
        last = energy
    assert float(relax(model, x, Phase(40, "sweeps")).residual.max()) == 0.0


@needs_dwave
def test_anneals_find_the_lowest_state_and_are_counted() -> None:
    model, x, y = made()
    machine, cost = Ising(model, reads=10, field_limit=100.0), SpinError(3)
    free = relax(machine, x, 1)
    assert machine.work.to_dict() == {"settles": 30, "reads": 30, "writes": 1, "calibrations": 0}
    assert float(free.residual.max()) == 0.0
    nudged = relax(machine, x, 1, free.state, Nudge(cost, y, 1.5))
    right = (free.state[0] == cost.target(y, free.state[0])).all(1)
    assert machine.work.settles == 30 + 10 * int((~right).sum())
    for k in range(3):
        for got, wanted in zip(free.state, lowest(model, x[k : k + 1], cost, y[k : k + 1], 0.0), strict=True):
            assert torch.equal(got[k], wanted)
        for got, wanted in zip(nudged.state, lowest(model, x[k : k + 1], cost, y[k : k + 1], 1.5), strict=True):
            assert torch.equal(got[k], wanted)


@needs_dwave
def test_training_an_ising_machine_repeats_every_bit() -> None:
    def trained(seed: int) -> tuple[float, torch.Tensor]:
        model, x, y = made()
        machine = Ising(model, reads=3, sweeps=30, seed=seed)
        optimizer, cost = torch.optim.SGD(machine.parameters(), lr=0.1), SpinError(3)
        for _ in range(25):
            optimizer.zero_grad()
            free = EP(1, 1, 2.0).backward(machine, cost, x, y)
            optimizer.step()
        return float(cost(free.state, y, {}).mean()), model.W01.detach()

    first, again = trained(0), trained(0)
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], trained(1)[1])
    model, x, y = made()
    assert first[0] < 0.5 * float(SpinError(3)(relax(model, x, Phase(20, "sweeps")).state, y, {}).mean())


class Chip:
    """What a sampler of D-Wave takes: it records what it is asked and returns one state."""

    def __init__(self, *parameters: str) -> None:
        self.parameters = dict.fromkeys(("num_reads", *parameters), ())
        self.asked: list[dict[str, Any]] = []

    def sample(self, of: Any, **asked: Any) -> Any:
        import dimod

        assert asked.keys() <= self.parameters.keys()
        self.asked.append(asked)
        return dimod.ExactSolver().sample(of)


@needs_dwave
def test_the_same_class_takes_a_sampler_of_d_wave() -> None:
    model, x, y = made()
    chip = Chip("anneal_schedule", "initial_state", "reinitialize_state", "chain_strength")
    machine = Ising(model, chip, fraction=0.3, field_limit=100.0, options={"chain_strength": 2.0})
    free = relax(machine, x, 1).state
    for k in range(3):
        assert torch.equal(free[0][k], lowest(model, x[k : k + 1], SpinError(3), y[k : k + 1], 0.0)[0])
    wrong = tuple(-v for v in free)
    relax(machine, x, 1, wrong, Nudge(SpinError(3), y, 1.0))
    assert chip.asked[0] == {"num_reads": 10, "chain_strength": 2.0}
    last = chip.asked[-1]
    assert last["anneal_schedule"] == [[0.0, 1.0], [10.0, 0.3], [20.0, 1.0]]
    assert list(last["initial_state"].values()) == torch.cat([v[-1] for v in wrong]).tolist()
    assert not Ising(model, Chip()).abilities.continues


def test_a_trained_spin_net_answers_with_as_many_classes_as_its_data(tmp_path: Path) -> None:
    x, kinds = torch.rand(12, 8).round(), torch.arange(12) % 3
    spec = eqprop.Spec.of(
        *("small",),
        model=SpinNet(sizes=(6, 10, 8)),
        cost="spins",
        estimator="ep",
        T=4,
        K=4,
        beta=2.0,
        batch=4,
        epochs=1,
    )
    run = eqprop.train(spec, tmp_path / "run", data=(x, kinds, x, kinds), schedule="sweeps", rates={"*": 0.1})
    cost = eqprop.load(run.folder).cost
    assert isinstance(cost, SpinError)
    assert cost.classes == 3
    assert eqprop.evaluate(run.folder, data=(x, kinds, x, kinds))["ep"][0]["test_error"] == run.test_error("ep")
