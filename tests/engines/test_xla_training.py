"""Training in programs is training by the reference: every optimizer that is served, extras, stacks, resumed runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eqprop import BPTT, EP, RBP, SquaredError, State, from_energy
from eqprop.cost import FunctionCost
from eqprop.data import one_hot
from eqprop.dynamics import PrimitiveDynamics
from eqprop.engines.base import Job
from eqprop.engines.eager import EagerRunner
from eqprop.engines.xla import Xla
from eqprop.engines.xla.optimizers import rules_of
from eqprop.engines.xla.training import XlaRunner
from eqprop.estimators import Estimator
from eqprop.models import Dense, Layered, Network, stack
from eqprop.starts import Persistent

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SIZES = (3, 8, 12)
N, B = 60, 6
JOINTS = [Dense("x", "h"), Dense("h", "out")]
USUAL = EP(8, 4, beta=0.5)
ROUNDING = 2e-5
"""Of float32 weights after a dozen iterations, relative to the largest."""

SERVED: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9), amsgrad=True, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, maximize=True),
}


FIRST = "W_h_x"


def positive() -> Network:
    """A net whose first weights are kept non-negative."""

    class Clamped(Network):
        def constrained(self) -> dict[str, Tensor]:
            return {FIRST: self.get_parameter(FIRST).clamp(min=0.0)}

    return Clamped(12, {"out": 3, "h": 8}, JOINTS, seed=0)


def samples(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(SIZES[0], (N,), generator=source)
    return torch.rand(N, SIZES[-1], generator=source, dtype=dtype), one_hot(labels, SIZES[0], dtype), labels


def job(
    make: Make = SERVED["sgd"],
    model: PrimitiveDynamics | None = None,
    estimator: Estimator = USUAL,
    cost: Any = None,
    **options: Any,
) -> Job:
    model = Layered(SIZES, seed=0) if model is None else copy.deepcopy(model)
    cost = SquaredError() if cost is None else cost
    x, y, labels = samples(next(model.parameters()).dtype)
    return Job(model, cost, estimator, make(model.parameters()), x, y, labels, **options)


def order(n: int = 12, networks: int | None = None) -> Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randint(N, (n, B) if networks is None else (n, networks, B), generator=source)


def weights(job: Job) -> list[Tensor]:
    return [p.detach() for p in job.model.parameters()]


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((p - q).abs().max() / q.abs().max().clamp(min=1e-3)) for p, q in zip(a, b, strict=True))


def both(*parts: Tensor, **options: Any) -> tuple[XlaRunner, EagerRunner]:
    """A job run by programs, in these parts, and by the reference."""
    ours, theirs = XlaRunner(job(**options), Xla()), EagerRunner(job(**options))
    for part in parts:
        ours.run(part)
        theirs.run(part)
    return ours, theirs


def assert_same(ours: XlaRunner, theirs: EagerRunner, rounding: float = ROUNDING) -> None:
    assert apart(weights(ours.job), weights(theirs.job)) < rounding
    a, b = ours.tally.read(), theirs.tally.read()
    for name, values in b.items():
        assert a[name] == pytest.approx(values, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("name", SERVED)
def test_optimizers_step_as_torch(name: str) -> None:
    first, rest = order().split(5)[0], order()[5:]
    ours, theirs = both(first, rest, make=SERVED[name])
    assert rules_of(ours.job.optimizer) is not None
    assert ours.known, "it trained in programs"
    # Adam divides by the size of the gradient, so that the smallest are as good as their rounding.
    assert_same(ours, theirs, 1e-3 if "adam" in name or name == "amsgrad" else ROUNDING)
    a, b = (runner.job.optimizer.state_dict()["state"] for runner in (ours, theirs))
    assert a.keys() == b.keys()
    for key, kept in b.items():
        assert a[key].keys() == kept.keys()
        for what, value in kept.items():
            assert a[key][what].dtype == value.dtype
            torch.testing.assert_close(a[key][what], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", SERVED)
def test_steps_to_the_last_digits(name: str) -> None:
    """The step alone, from the same gradients: a dozen steps differ by no more than a rounding each."""
    import jax
    import jax.numpy as jnp

    p = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(2)))
    q, optimizer = p.detach().numpy().copy(), SERVED[name]([p])
    (rule,) = rules_of(optimizer).values()
    kept: Any = tuple(rule.read(p, {}))
    with jax.enable_x64(True):
        for t in range(12):
            p.grad = torch.randn(50, generator=torch.Generator().manual_seed(t))
            q, kept = rule.step(
                jnp.asarray(q), jnp.asarray(p.grad.numpy()), kept, jnp.float64(optimizer.defaults["lr"])
            )
            optimizer.step()
    assert float((torch.tensor(jax.device_get(q)) - p.detach()).abs().max()) < 12 * 1.2e-7 * float(
        p.detach().abs().max()
    )


@pytest.mark.parametrize(
    "estimator",
    [
        EP(8, 4, beta=0.5, nudging="symmetric"),
        EP(8, 4, beta=0.5, nudging="random-sign"),
        EP(9, 4, beta=0.5, schedule="alternating"),
        EP(9, 4, beta=0.5, schedule="sweeps"),
        EP(40, 4, beta=0.5, stop="settled"),
        BPTT(9, 4, schedule="sweeps"),
        RBP(30, 6),
    ],
    ids=repr,
)
def test_estimators(estimator: Estimator) -> None:
    assert_same(*both(*order().split(7), estimator=estimator))


def test_stacked_networks_with_signs() -> None:
    model = stack([Layered(SIZES, seed=seed) for seed in range(2)])
    estimator = EP(8, 4, beta=0.5, nudging="random-sign")
    ours, theirs = both(*order(12, 2).split(7), model=model, estimator=estimator, networks=2, clip=0.05)
    assert ours.known
    assert_same(ours, theirs)


def test_clip_constraint_and_rates() -> None:
    ours, theirs = both(order(), model=positive(), clip=0.05)
    assert_same(ours, theirs)
    assert float(ours.job.model.get_parameter(FIRST).detach().min()) == 0.0
    free = XlaRunner(job(model=Network(12, {"out": 3, "h": 8}, JOINTS, seed=0)), Xla())
    free.run(order())
    assert float(free.job.model.get_parameter(FIRST).detach().min()) < 0.0
    for runner in (ours, theirs):
        runner.job.optimizer.param_groups[0]["lr"] = 0.01
        runner.take_rates()
        runner.run(order())
    assert_same(ours, theirs)


def test_own_energies_and_costs() -> None:
    def energy(x: Tensor, s: State, theta: dict[str, Tensor]) -> Tensor:
        r0, r1 = map(torch.tanh, s)
        inner = 0.5 * (s[0].square().sum(-1) + s[1].square().sum(-1))
        return inner - (r0 * (r1 @ theta["W"].T)).sum(-1) - (r1 * (x @ theta["V"].T)).sum(-1)

    source = torch.Generator().manual_seed(3)
    theta = {"W": torch.randn(3, 8, generator=source), "V": torch.randn(8, 12, generator=source)}
    model = from_energy(energy, theta, (3, 8), eps=0.3)
    cost = FunctionCost(lambda s, y: (s[0] - y).square().square().sum(-1))
    assert_same(*both(order(), model=model, cost=cost, make=SERVED["momentum"]))


def test_what_only_torch_steps_has_its_gradients_from_programs() -> None:
    x, _, _ = samples()
    for options in (
        {"make": lambda p: torch.optim.RMSprop(p, 1e-3)},
        {"start": "persistent"},
    ):
        a, b = dict(options), dict(options)
        if "start" in options:
            a["start"], b["start"] = (Persistent(Layered(SIZES, seed=0), x) for _ in range(2))
        ours, theirs = XlaRunner(job(**a), Xla()), EagerRunner(job(**b))
        for runner in (ours, theirs):
            runner.run(order())
        assert not ours.known
        assert_same(ours, theirs, 1e-3)


def test_stopped_and_resumed_has_the_same_bits() -> None:
    whole = XlaRunner(job(SERVED["adam"]), Xla())
    whole.run(order(20))
    first = XlaRunner(job(SERVED["adam"]), Xla())
    first.run(order(20)[:7])
    resumed = job(SERVED["adam"], model=first.job.model)
    resumed.optimizer.load_state_dict(first.job.optimizer.state_dict())
    XlaRunner(resumed, Xla()).run(order(20)[7:])
    assert all(map(torch.equal, weights(resumed), weights(whole.job)))
    assert not all(map(torch.equal, weights(first.job), weights(whole.job)))


def test_a_network_that_diverges_is_frozen_and_the_other_goes_on() -> None:
    model = stack([Layered(SIZES, seed=seed) for seed in range(2)])
    with torch.no_grad():
        next(iter(model.parameters()))[1, 0, 0] = float("nan")
    options: dict[str, Any] = {"model": model, "networks": 2, "make": SERVED["momentum"]}
    ours, theirs = both(*order(12, 2).split(7), **options)
    assert ours.tally.read()["bad"] == theirs.tally.read()["bad"] == [-1.0, 0.0]
    for p, q, first in zip(ours.job.model.parameters(), theirs.job.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p[0], q[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(p[1], first[1], rtol=0.0, atol=0.0, equal_nan=True)


def test_a_change_of_the_model_is_seen() -> None:
    class Scaled(PrimitiveDynamics):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.scale = nn.Parameter(torch.eye(3, 12)), 0.5

        def init_state(self, x: Tensor) -> State:
            return (x.new_zeros(len(x), 3),)

        def primitive(self, x: Tensor, s: State) -> Tensor:
            return self.scale * (s[0] * (x @ self.W.T)).sum(-1)

    ours, theirs = both(order(), model=Scaled())
    unchanged = copy.deepcopy(ours.job.model)
    for runner in (ours, theirs):
        runner.job.model.scale = 0.1
        runner.run(order())
    assert_same(ours, theirs)
    still = XlaRunner(job(model=unchanged), Xla())
    still.run(order())
    assert apart(weights(still.job), weights(theirs.job)) > ROUNDING


def test_no_more_than_there_are() -> None:
    runner = XlaRunner(job(), Xla())
    with pytest.raises(IndexError, match="expected 0 to 59"):
        runner.run(torch.full((2, B), N))


def test_wide_types() -> None:
    ours, theirs = both(order(), model=Layered(SIZES, seed=0).double())
    assert_same(ours, theirs, 1e-12)


def test_a_model_that_has_no_program() -> None:
    class Reading(Network):
        def step(self, drive: Any, s: State, push: Any = None) -> State:
            if float(s[0].sum()) > 1e9:
                raise AssertionError
            return super().step(drive, s, push)

    reading = Reading(12, {"out": 3, "h": 8}, JOINTS, seed=0)
    with pytest.raises(ValueError, match="cannot serve Reading: it reads the values"):
        XlaRunner(job(model=reading), Xla()).run(order())
    left = XlaRunner(job(model=reading), Xla(), falls_back=True)
    with pytest.warns(UserWarning, match="trains on the eager engine"):
        left.run(order())
    theirs = EagerRunner(job(model=reading))
    theirs.run(order())
    assert all(map(torch.equal, weights(left.job), weights(theirs.job)))
