"""What every engine promises: a list of checks to run on any `Engine`, against the reference in float64.

    for case in layered_cases():
        check_gradient(engine, case, Place("cuda", torch.float32))

A case is a net, a method, a schedule and a number of stacked networks; weights and data are drawn afresh for each.
The nets' sizes are odd on purpose: whole vectors and their remainders, one sample and many.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eqprop import BPTT, EP, Phase, SquaredError
from eqprop.data import one_hot
from eqprop.dynamics import PrimitiveDynamics
from eqprop.engines import Engine, Job, Runner
from eqprop.engines.eager import Eager
from eqprop.estimators import Estimator
from eqprop.models import Convolutional, Layered, stack
from eqprop.relax import Schedule
from eqprop.state import State

N = 60
"""Random samples that stand for a data set."""
T, K, BETA = 11, 4, 0.3
"""Short phases: rounding has no time to grow in a net that does not contract."""

TWICE = 2.0
"""The weight update may err at most this many times as much as torch's own arithmetic of the same precision."""
FLOOR = {torch.float32: 5e-6, torch.float64: 1e-11}
"""Where torch happens to err less, a hundred roundings are granted: of numbers of the size of the change in a layer
far from the output, which is a small difference of states. In float64 the library of one processor sums otherwise than
that of another: 1.4e-12 has been seen three convolutions deep."""
STARTS = {torch.float32: 5, torch.float64: 1}
"""Draws over which an error is taken together: in float32 the error of a single one is a matter of luck."""
STATES = {torch.float32: 2e-5, torch.float64: 1e-12}
"""Eleven steps with slopes of up to 4 on inputs of order 1."""

SIZES = {1: (5, 13), 2: (10, 33, 40), 3: (4, 17, 20, 36), 4: (7, 40, 9, 24, 30)}
"""Layers of moving neurons: their sizes, output first."""
MAPS: dict[str, dict[str, Any]] = {
    "two maps": {"input_shape": (1, 12, 12), "channels": (5, 3), "flat": (4,), "kernel": 3},
    "padded, two flat": {"input_shape": (2, 13, 11), "channels": (20, 6), "flat": (4, 7), "kernel": 3, "padding": 1},
    "one map, zones of nine": {"input_shape": (1, 9, 9), "channels": (17,), "flat": (3,), "kernel": 4, "pool": 3},
    "three maps, no pooling": {"input_shape": (2, 9, 9), "channels": (4, 9, 5), "flat": (6,), "kernel": 3, "pool": 1},
}
Build = Callable[[int], PrimitiveDynamics]


@dataclass(frozen=True)
class Case:
    """What is trained and how; `build(seed)` draws one network in float64."""

    name: str
    build: Build
    method: str = "ep"
    schedule: Schedule = "synchronous"
    networks: int | None = None
    samples: int = 7

    def __str__(self) -> str:
        count = "one" if self.networks is None else f"{self.networks} stacked"
        return f"{self.name}, {self.method}, {self.schedule}, {count}, {self.samples} samples"

    def model(self, place: Place, seed: int = 0) -> PrimitiveDynamics:
        models = [self.build(100 * seed + r) for r in range(self.networks or 1)]
        return (models[0] if self.networks is None else stack(models)).to(place.device, place.dtype)

    def estimator(self, **options: Any) -> Estimator:
        if self.method == "bptt":
            return BPTT(**{"T": T, "K": K, "schedule": self.schedule} | options)
        nudging = self.method.removeprefix("ep-") if self.method != "ep" else "one-sided"
        return EP(**{"T": T, "K": K, "beta": BETA, "schedule": self.schedule, "nudging": nudging} | options)

    def order(self, rows: int, seed: int = 0) -> Tensor:
        """(n, B) or (n, R, B) sample numbers."""
        lead = (rows,) if self.networks is None else (rows, self.networks)
        return torch.randint(N, (*lead, self.samples), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Place:
    """Where an engine runs and in what precision."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64


EXACT = Place()
"""The reference's place."""


def layered_nets() -> Iterator[tuple[str, Build]]:
    """Both settings, depths 1 to 4, every activation, and each option by itself."""
    for depth, sizes in SIZES.items():
        for sigma in ("sigmoid", "tanh", "hard-sigmoid"):
            yield f"P depth {depth} {sigma}", layered(sizes, activation=sigma)
            yield f"EB depth {depth} {sigma}", energy_based(sizes, activation=sigma)
    yield "P without biases", layered(SIZES[3], bias=False)
    yield "EB without biases", energy_based(SIZES[3], bias=False)
    for sigma in ("sigmoid", "tanh", "hard-sigmoid"):
        yield f"P nudged inside, {sigma}", layered(SIZES[2], activation=sigma, nudge_site="inside")
    for depth in (1, 2, 3):
        yield f"EB depth {depth} clipped", energy_based(SIZES[depth], clip=True)
        yield f"EB depth {depth} without output slope", energy_based(SIZES[depth], output_slope=False)


def layered(sizes: tuple[int, ...], **options: Any) -> Build:
    return lambda seed: Layered(sizes, init="default", seed=seed, dtype=torch.float64, **options)


def energy_based(sizes: tuple[int, ...], **options: Any) -> Build:
    return layered(sizes, setting="energy-based", eps=0.3, **options)


def conv_nets() -> Iterator[tuple[str, Build]]:
    for name, sizes in MAPS.items():
        for sigma in ("hard-sigmoid", "sigmoid", "tanh"):
            yield f"{name}, {sigma}", convolutional(sizes, activation=sigma)
    yield "two maps, without biases", convolutional(MAPS["two maps"], bias=False)
    yield "padded, two flat, nudged inside", convolutional(MAPS["padded, two flat"], nudge_site="inside")


def convolutional(sizes: dict[str, Any], **options: Any) -> Build:
    return lambda seed: Convolutional(seed=seed, dtype=torch.float64, **sizes, **options)


def layered_cases() -> list[Case]:
    return list(_cases(layered_nets()))


def conv_cases() -> list[Case]:
    return list(_cases(conv_nets()))


def _cases(nets: Iterator[tuple[str, Build]]) -> Iterator[Case]:
    """Every net with every method and schedule; stacks and batch sizes in turn."""
    batches = (7, 1, 20, 13)
    for i, (name, build) in enumerate(nets):
        for j, method in enumerate(("ep", "bptt")):
            for k, schedule in enumerate(("synchronous", "alternating") if build(0).bipartite else ("synchronous",)):
                yield Case(name, build, method, schedule, (None, 3)[(i + j + k) % 2], batches[(i + j + 2 * k) % 4])


def data(model: PrimitiveDynamics, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """Images in [0, 1] that float32 holds exactly, one-hot targets, labels."""
    source = torch.Generator().manual_seed(5)
    assert model.input_shape is not None
    images = torch.rand(N, *model.input_shape, generator=source).to(place.device, place.dtype)
    outputs = model.init_state(images[:0].unsqueeze(0))[0].shape[-1]
    labels = torch.randint(outputs, (N,), generator=source)
    return images, one_hot(labels, outputs, place.dtype).to(place.device), labels.to(place.device)


def job_for(model: PrimitiveDynamics, case: Case, place: Place, rate: float, **options: Any) -> Job:
    """Every parameter has a learning rate of its own."""
    groups = [{"params": [p], "lr": rate * (1.0 + 0.1 * i)} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    return Job(model, SquaredError(), case.estimator(**options), optimizer, *data(model, place), case.networks)


def train(
    engine: Engine, model: PrimitiveDynamics, case: Case, place: Place, rows: int, rate: float = 0.05, **options: Any
) -> Runner:
    """A runner after `rows` iterations; the model's parameters are updated."""
    runner = engine.runner(job_for(model, case, place, rate, **options))
    runner.run(case.order(rows).to(place.device))
    return runner


def changes(engine: Engine, start: PrimitiveDynamics, case: Case, place: Place) -> dict[str, Tensor]:
    """What one iteration adds to each parameter. The rate is large, so that the sum does not round the change away."""
    model = copy.deepcopy(start).to(place.device, place.dtype)
    train(engine, model, case, place, 1, rate=8.0)
    before = dict(start.named_parameters())
    return {name: p.detach().cpu().double() - before[name].detach().double() for name, p in model.named_parameters()}


def error(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact| in the Euclidean norm."""
    return float((actual - exact).norm() / exact.norm().clamp_min(1e-30))


def check_gradient(engine: Engine, case: Case, place: Place) -> None:
    """One weight update is that of the reference, as exactly as the precision gives."""
    host = replace(place, device="cpu")
    starts = [case.model(host, seed) for seed in range(STARTS[place.dtype])]
    exact, plain, ours = (
        [changes(by, start, case, where) for start in starts]
        for by, where in ((Eager(), EXACT), (Eager(), host), (engine, place))
    )
    for name in exact[0]:
        true, torchs, mine = (torch.stack([run[name] for run in runs]) for runs in (exact, plain, ours))
        allowed = max(TWICE * error(torchs, true), FLOOR[place.dtype])
        assert error(mine, true) <= allowed, f"{case}: the gradient of {name}"


def check_training(engine: Engine, case: Case, place: Place) -> None:
    """Three iterations lead to the reference's weights and counts."""
    start = case.model(replace(place, device="cpu"))
    model, twin = copy.deepcopy(start).to(place.device), copy.deepcopy(start).double()
    counts, expected = (
        train(by, net, case, where, 3).tally.read()
        for by, net, where in ((engine, model, place), (Eager(), twin, EXACT))
    )
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert error(p.detach().cpu().double(), q.detach()) <= 100 * FLOOR[place.dtype], f"{case}: {name}"
    for name in ("samples", "errors", "bad"):
        assert counts[name] == expected[name], f"{case}: {name}"
    for name in ("loss", "residual", "worst"):
        ours, theirs = torch.tensor(counts[name]), torch.tensor(expected[name])
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=100 * FLOOR[place.dtype]), f"{case}: {name}"


def check_relaxation(engine: Engine, case: Case, place: Place) -> None:
    """The free phase ends in the reference's state with its residual, from zero and from a given state."""
    model = case.model(place)
    twin = copy.deepcopy(model).to("cpu", torch.float64)
    images, _, _ = data(model, place)
    rows = case.order(1, seed=3)[0]
    x = images[rows.to(place.device)]
    for steps, start in ((T, None), (T - 1, None), (T - 1, random_state(twin, x))):
        phase = Phase(steps, case.schedule)
        ours = engine.relaxation(model, x, phase, start and moved(start, place))
        exact = Eager().relaxation(twin, x.cpu().double(), phase, start)
        assert ours.steps == steps
        for a, b in zip((*ours.state, ours.residual), (*exact.state, exact.residual), strict=True):
            assert a.shape == b.shape
            assert float((a.cpu().double() - b).abs().max()) <= STATES[place.dtype], f"{case}: {steps} steps"


def random_state(model: PrimitiveDynamics, x: Tensor) -> State:
    source = torch.Generator().manual_seed(9)
    zero = model.init_state(x.cpu())
    return tuple(torch.rand(layer.shape, generator=source).double() for layer in zero)


def moved(s: State, place: Place) -> State:
    return tuple(layer.to(place.device, place.dtype) for layer in s)


def check_settled(engine: Engine, case: Case, place: Place, steps: int = 400) -> None:
    """Leaving the free phase at a fixed point changes no bit of what is learnt, and some sample leaves early.

    Not every sample does: rounding may keep a neuron moving by its last bit for ever.
    """
    model = case.model(place)
    stopped, full = copy.deepcopy(model), copy.deepcopy(model)
    for net, stop in ((stopped, "settled"), (full, "never")):
        train(engine, net, case, place, 2, T=steps, stop=stop)
    for (name, p), q in zip(stopped.named_parameters(), full.parameters(), strict=True):
        assert torch.equal(p, q), f"{case}: {name}"
    x = data(model, place)[0][case.order(1)[0].to(place.device)]
    samples = model.sample_dims(x) - 1
    used = []
    for i in range(case.samples):
        one = x.narrow(samples, i, 1)
        early = engine.relaxation(model, one, Phase(steps, case.schedule, stop="settled"))
        late = engine.relaxation(model, one, Phase(steps, case.schedule))
        assert all(torch.equal(a, b) for a, b in zip(early.state, late.state, strict=True))
        used.append(early.steps)
    assert min(used) < steps


def check_calls(engine: Engine, case: Case, place: Place) -> None:
    """Iterations in one call or in several: the same bits, and counting starts anew after a reset."""
    model = case.model(place)
    together, apart = copy.deepcopy(model), copy.deepcopy(model)
    order = case.order(4).to(place.device)
    engine.runner(job_for(together, case, place, 0.05)).run(order)
    runner = engine.runner(job_for(apart, case, place, 0.05))
    runner.run(order[:3])
    runner.reset()
    runner.run(order[3:])
    for (name, p), q in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert torch.equal(p, q), f"{case}: {name}"
    assert runner.tally.read()["samples"] == [float(case.samples)] * (case.networks or 1)


def check_frozen(engine: Engine, case: Case, place: Place) -> None:
    """A network that meets a number that is not finite stays as it was before; the others go on."""
    model = case.model(place)
    job = job_for(model, case, place, 0.05)
    order = case.order(4)
    poisoned = int(order[2].flatten()[0])
    order[order == poisoned] = (poisoned + 1) % N
    order[2].view(-1)[0] = poisoned
    job.images[poisoned].view(-1)[0] = float("nan")
    before = copy.deepcopy(model)
    engine.runner(job_for(before, case, place, 0.05)).run(order[:2].to(place.device))
    runner = engine.runner(job)
    runner.run(order.to(place.device))
    assert runner.tally.read()["bad"] == [2.0] + [-1.0] * ((case.networks or 1) - 1)
    for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True):
        ours, theirs = (v.detach() if case.networks is None else v.detach()[0] for v in (p, q))
        assert torch.equal(ours, theirs), f"{case}: {name} moved after it was frozen"
        assert torch.isfinite(p).all()
        if case.networks is not None:
            assert not torch.equal(p[1:], q[1:]), f"{case}: {name} of the other networks stopped"
