"""Gradients of `backward` by programs: the reference's for any model, and never those of a model that was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eqprop import BPTT, EP, RBP, ContinualEP, HolomorphicEP, SquaredError, State, engines
from eqprop.cost import Cost, FunctionCost, Problem
from eqprop.dynamics import PrimitiveDynamics
from eqprop.engines.xla import Xla, shared_programs
from eqprop.estimators import Estimator
from eqprop.models import Convolutional, Layered, stack
from eqprop.relax import Phase, relax
from tests.helpers.own_nets import own_model

USUAL = EP(8, 4, beta=0.5)
SIZES = (3, 140, 150)
"""Large enough that the program reads a parameter where it lies."""


class Own(PrimitiveDynamics):
    """A model with everything that may change between calls."""

    def __init__(self, gain: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        out, hidden, inputs = SIZES
        self.W = nn.Parameter(0.1 * torch.randn(out, hidden, generator=source))
        self.V = nn.Parameter(0.1 * torch.randn(hidden, inputs, generator=source))
        self.register_buffer("mask", torch.ones(hidden))
        self.scale, self.gain = 0.9, gain

    def init_state(self, x: Tensor) -> State:
        return x.new_zeros(len(x), SIZES[0]), x.new_zeros(len(x), SIZES[1])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        hidden = (s[1] * self.mask * (x @ self.V.T)).sum(-1)
        return self.gain() * self.scale * ((s[0] * (s[1] @ self.W.T)).sum(-1) + hidden)

    def squash(self, s: State) -> State:
        return tuple(torch.tanh(v) for v in s)


def batch(model: Any, n: int = 5) -> tuple[Tensor, Tensor]:
    source, dtype = torch.Generator().manual_seed(1), next(model.parameters()).dtype
    shape = getattr(model, "input_shape", None) or (SIZES[-1],)
    lead = (n,) if model.networks is None else (model.networks, n)
    x = torch.rand(*lead, *shape, generator=source, dtype=torch.float64).to(dtype)
    outputs = model.init_state(x)[0].shape[-1]
    return x, torch.rand(*lead, outputs, generator=source, dtype=torch.float64).to(dtype)


def found(model: Any, engine: str, estimator: Estimator = USUAL, cost: Cost | None = None, n: int = 5) -> list[Tensor]:
    model.zero_grad()
    x, y = batch(model, n)
    free = estimator.backward(model, cost or SquaredError(), x, y, engine=engine)
    return [*free.state, free.residual, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(model: Any, estimator: Estimator = USUAL, cost: Cost | None = None, n: int = 5) -> list[Tensor]:
    ours, theirs = (found(model, engine, estimator, cost, n) for engine in ("xla", "eager"))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        most = (1e-9 if a.dtype == torch.float64 else 2e-4) * max(1e-3, float(b.abs().max()))
        torch.testing.assert_close(a, b, rtol=0.0, atol=most)
    return theirs


def in_place(model: Own) -> None:
    with torch.no_grad():
        model.V.mul_(0.5)
        model.W += 0.1


def by_data(model: Own) -> None:
    model.V.data = 0.3 * model.V.data


def replaced(model: Own) -> None:
    model.V = nn.Parameter(0.3 * model.V.detach())


def half_masked(model: Own) -> None:
    model.mask = torch.arange(SIZES[1]) % 2.0


def patched(model: Own) -> None:
    model.squash = lambda s: tuple(torch.sigmoid(v) for v in s)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Own], object]] = {
    "weights edited in place": in_place,
    "a parameter's data": by_data,
    "a parameter replaced": replaced,
    "a parameter frozen": lambda model: model.V.requires_grad_(False),
    "another type": lambda model: model.double(),
    "a buffer replaced": half_masked,
    "a buffer edited": lambda model: model.mask.mul_(0.5),
    "a method patched": patched,
    "a number": lambda model: setattr(model, "scale", 0.4),
    "a hook": lambda model: model.register_forward_hook(lambda *_: None),
}


@pytest.mark.filterwarnings("ignore:.*runs on the eager engine")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_is_seen_at_once(name: str) -> None:
    model = Own()
    before = assert_same(model)
    CHANGES[name](model)
    with engines.use("auto"):
        after = found(model, "auto")
    now = found(model, "eager")
    for a, b in zip(after, now, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if name not in ("another type", "a hook"):
        alike = len(before) == len(now) and all(map(torch.allclose, before, now))
        assert not alike, "the change matters"


def test_a_number_in_a_closure_and_the_size_of_a_batch() -> None:
    gain = 1.0
    model = Own(lambda: gain)
    first = assert_same(model)
    gain = 0.5
    second = assert_same(model)
    assert not torch.allclose(first[0], second[0], rtol=1e-3)
    assert len(assert_same(model, n=7)[0]) == 7
    assert_same(model, n=5)


def test_a_change_that_the_watch_misses_is_found_at_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls 1, 2, 4, 8 are compared with the reference."""
    monkeypatch.setattr("eqprop.engines.traced.Fingerprint.changed", lambda self: False)
    model = Own()
    for _ in range(3):
        assert_same(model)
    model.scale = 0.4
    with pytest.warns(UserWarning, match="The step of Own had changed unseen; it was compiled again"):
        assert_same(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(model)


ESTIMATORS: list[Estimator] = [
    EP(8, 4, beta=0.3, nudging="symmetric"),
    EP(9, 4, beta=0.3, schedule="sweeps"),
    EP(40, 4, beta=0.3, stop="settled"),
    EP(8, 4, beta=0.3, form="difference"),
    BPTT(9, 4),
    RBP(20, 6),
    ContinualEP(8, 4, beta=0.3, rates=0.01),
    HolomorphicEP(8, 4, beta=0.1),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_estimators(estimator: Estimator) -> None:
    assert_same(Own().double(), estimator)


@pytest.mark.parametrize("seed", range(3))
def test_random_models(seed: int) -> None:
    """A few of those that `python -m benchmarks.lowered` goes through with every estimator."""
    model, cost, x, y, _ = own_model(seed)
    problem = Problem(model, cost, x, y)
    start = USUAL.begin(problem)
    free, grads = shared_programs().gradient(problem, USUAL, start, falls_back=False)
    reference, expected = USUAL.computed(problem, start)
    torch.testing.assert_close(free.state, reference.state, rtol=1e-9, atol=1e-11)
    assert grads.keys() == expected.keys()
    for p, g in expected.items():
        torch.testing.assert_close(grads[p], g, rtol=1e-7, atol=1e-9)


def test_nets_of_the_package() -> None:
    nets = [
        stack([Layered((5, 9, 21), seed=seed) for seed in range(2)]),
        Convolutional((1, 8, 8), (3,), (5,), kernel=3, padding=1, pool=2, seed=0),
    ]
    for net in nets:
        assert_same(net.double(), EP(11, 4, beta=-0.4, schedule="alternating"))


def test_other_costs() -> None:
    model = Own()
    quartic = FunctionCost(lambda s, y: (s[0] - y).square().square().sum(-1))
    assert not torch.allclose(assert_same(model)[-1], assert_same(model, cost=quartic)[-1], rtol=1e-3)


def test_gradients_that_are_kept_stay_as_they_are() -> None:
    model = Own()
    first = found(model, "xla")
    copies = [v.clone() for v in first]
    in_place(model)
    second = found(model, "xla")
    assert all(map(torch.equal, first, copies))
    assert not torch.equal(first[-1], second[-1])


def test_what_is_not_finite_is_said() -> None:
    model = Own()
    x, y = batch(model)
    found(model, "xla")
    y[0, 0] = torch.inf
    with pytest.raises(ValueError, match="The target y holds 1 values that are not finite"):
        USUAL.backward(model, SquaredError(), x, y, engine="xla")


def test_a_model_without_a_program_is_left_to_the_reference_with_one_warning() -> None:
    class Looking(Own):
        def primitive(self, x: Tensor, s: State) -> Tensor:
            return super().primitive(x, s) * (1.0 if float(s[0].sum()) < 1e9 else 2.0)

    model = Looking()
    with pytest.raises(ValueError, match="'xla' cannot serve Looking: it reads the values of a tensor"):
        found(model, "xla")
    with pytest.warns(UserWarning, match="Looking runs on the eager engine, which is slower: it reads the values"):
        found(model, "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, found(model, "auto"), found(model, "eager")))


@pytest.mark.parametrize(
    "phase", [Phase(9), Phase(10, "alternating"), Phase(11, "sweeps"), Phase(300, stop="settled")], ids=repr
)
def test_free_phases(phase: Phase) -> None:
    model = Layered((5, 30, 40), seed=0).double()
    x, start = batch(model)[0], tuple(torch.rand(5, n, dtype=torch.float64) for n in (5, 30))
    for state in (None, start):
        ours, theirs = Xla().relaxation(model, x, phase, state), relax(model, x, phase, state)
        torch.testing.assert_close(ours.state, theirs.state, rtol=0.0, atol=1e-12)
        torch.testing.assert_close(ours.residual, theirs.residual, rtol=0.0, atol=1e-12)
        assert phase.stop == "settled" or ours.steps == theirs.steps


def test_memory_does_not_grow_with_the_steps() -> None:
    """One program serves any T, which is one of its inputs: what it asks for is the same."""
    model = Own()
    for T in (100, 10_000):
        found(model, "xla", EP(T, 4, beta=0.5))
    memory = shared_programs()._memories[model]
    assert len(memory.programs) == 1


def test_an_implicit_nudge_is_compared_at_a_beta_that_it_has() -> None:
    """At a beta of -1, which symmetric nudging would take, it has no solution."""
    net = Layered(SIZES, activation="hard-sigmoid", nudge_site="implicit", seed=0).double()
    assert_same(net, EP(8, 4, beta=0.2, nudging="symmetric"))
