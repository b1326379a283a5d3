"""The difference form of a nudged phase: exact for moves of any size, on every net and activation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import mpmath
import pytest
import torch
from helpers.nets import batch, random_like
from torch import Tensor
from torch.testing import assert_close

from eqprop import EP, Dynamics, Relaxation, SquaredError, from_energy, from_transition, relax
from eqprop.cost import Problem
from eqprop.models import Conv, Convolutional, Dense, Lateral, Layered, Network, Skip, Toy, Transposed, stack
from eqprop.models.activations import ACTIVATIONS, Activation
from eqprop.models.connections import Connection, Theta
from eqprop.state import State

BOUND = 1e-5
"""Of a parameter's update in float32 against float64, from the same state of rest."""
OWN = Activation("mish", lambda v: v * torch.tanh(torch.nn.functional.softplus(v)))
"""An activation without a formula for its difference."""
SIZES = [1e-12, 1e-9, 1e-6, 1e-3, 1.0]


def in_many_digits(name: str, row: Sequence[float], moves: Sequence[float]) -> list[float]:
    """sigma(a + e) - sigma(a) with 60 digits."""
    with mpmath.workdps(60):
        a = [mpmath.mpf(v) for v in row]
        moved = [v + mpmath.mpf(e) for v, e in zip(a, moves, strict=True)]
        return [float(q - p) for p, q in zip(_sigma(name, a), _sigma(name, moved), strict=True)]


def _sigma(name: str, row: list[mpmath.mpf]) -> list[mpmath.mpf]:
    if name == "softmax":
        powers = [mpmath.exp(v) for v in row]
        return [p / sum(powers) for p in powers]
    f = {
        "tanh": mpmath.tanh,
        "sigmoid": lambda v: 1 / (1 + mpmath.exp(2 - 4 * v)),
        "logistic": lambda v: 1 / (1 + mpmath.exp(-v)),
        "softplus": lambda v: mpmath.log(1 + mpmath.exp(v)),
        "identity": lambda v: v,
        "hard-sigmoid": lambda v: min(max(v, 0), 1),
        "half-hard-sigmoid": lambda v: min(max(v / 2, 0), 1),
        "relu": lambda v: max(v, 0),
        "relu6": lambda v: min(max(v, 0), 6),
        "mish": lambda v: v * mpmath.tanh(mpmath.log(1 + mpmath.exp(v))),
    }[name]
    return [mpmath.mpf(f(v)) for v in row]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sigma", [*ACTIVATIONS.values(), OWN], ids=lambda sigma: sigma.name)
def test_an_activation_gives_its_difference_to_rounding_at_any_size(sigma: Activation, size: float) -> None:
    a, e = random_like((6, 8), 0, -3.0, 3.0), size * random_like((6, 8), 1, -1.0, 1.0)
    for dtype, allowed in ((torch.float64, 2e-14 if sigma is not OWN else 1e-10), (torch.float32, 1e-6)):
        at, move = a.to(dtype), e.to(dtype)
        rows = [in_many_digits(sigma.name, *pair) for pair in zip(at.tolist(), move.tolist(), strict=True)]
        exact = torch.tensor(rows, dtype=torch.float64)
        with torch.no_grad():
            assert float((sigma.difference(at, move) - exact).norm()) <= allowed * float(exact.norm())
            subtracted = sigma(at + move) - sigma(at)
        if dtype == torch.float32 and size < 1e-8:  # which the plain form cannot see at all
            assert float((subtracted - exact).norm()) > 0.5 * float(exact.norm())


@pytest.mark.parametrize("sigma", [s for s in (*ACTIVATIONS.values(), OWN) if s.elementwise], ids=lambda s: s.name)
def test_the_slope_too(sigma: Activation) -> None:
    a, e = random_like((40,), 0, -3.0, 3.0), 1e-3 * random_like((40,), 1, -1.0, 1.0)
    with torch.no_grad():
        assert_close(sigma.slope_around(a)(e), sigma.slope(a + e) - sigma.slope(a), rtol=1e-9, atol=1e-15)
        found, exact = (
            sigma.slope_around(a.float())(e.float()),
            sigma.slope_around(a.float().double())(e.float().double()),
        )
        assert_close(found.double(), exact, rtol=1e-4, atol=1e-8)


def test_a_difference_of_saturated_neurons_is_a_number() -> None:
    for sigma in (ACTIVATIONS[name] for name in ("tanh", "logistic", "sigmoid", "softplus")):
        for a in (-200.0, -20.0, 20.0, 200.0):
            for e in (-300.0, -10.0, 10.0, 300.0):
                found = sigma.difference(torch.tensor([a]), torch.tensor([e]))
                assert bool(torch.isfinite(found).all()), (sigma.name, a, e)


class Gated(Connection):
    """A connection without formulas of its own, not linear in pre."""

    def weights(self, pre: tuple[int, ...], post: tuple[int, ...]) -> dict[str, object]:  # type: ignore[override]
        return Dense.weights(self, pre, post)  # type: ignore[arg-type]

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return torch.tanh(pre) @ theta["W"].mT


def graph(pooling: str = "max", **options: object) -> Network:
    links = [
        Conv("x", "h1", padding=1),
        Conv("h1", "h2", padding=1, pool=2, pooling=pooling),  # type: ignore[arg-type]
        Dense("h2", "out"),
        Dense("h1", "out"),
    ]
    return Network((2, 8, 8), {"out": 5, "h2": (4, 4, 4), "h1": (4, 8, 8)}, links, **({"activation": "tanh"} | options))


def mixed(**options: object) -> Network:
    links = [
        Dense("x", "a"),
        Gated("a", "b"),
        Lateral("b"),
        Skip("a", "b", name="S", gain=0.3),
        Dense("b", "out"),
        Dense("a", "out"),
    ]
    return Network(6, {"out": 5, "b": 8, "a": 8}, links, **({"activation": OWN} | options))  # type: ignore[arg-type]


def energy() -> Dynamics:
    theta = {"W": 0.5 * random_like((5, 8), 1), "V": 0.5 * random_like((8, 6), 2)}

    def own_energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        s0, s1 = s
        squares = 0.5 * ((s0 * s0).sum(-1) + (s1 * s1).sum(-1))
        return (
            squares
            - (torch.tanh(s1) @ theta["W"].T * torch.tanh(s0)).sum(-1)
            - (torch.tanh(s1) * (x @ theta["V"].T)).sum(-1)
        )

    return from_energy(own_energy, theta, (5, 8), eps=0.3, input_shape=(6,))


def transition() -> Dynamics:
    theta = {"W": 0.4 * random_like((5, 8), 1), "B": 0.4 * random_like((5, 8), 3), "V": 0.5 * random_like((8, 6), 2)}

    def step(x: Tensor, s: State, theta: Theta) -> State:
        return torch.tanh(s[1] @ theta["W"].T), torch.tanh(s[0] @ theta["B"] + x @ theta["V"].T)

    return from_transition(step, theta, (5, 8), input_shape=(6,))


NETS = {
    **{
        f"prototypical, {name}": lambda name=name: Layered(
            (5, 20, 20, 10), "prototypical", name, init="default", seed=0
        )
        for name in ACTIVATIONS
    },
    **{
        f"energy-based, {name}": lambda name=name: Layered((5, 20, 20, 10), "energy-based", name, eps=0.2, seed=0)
        for name in ACTIVATIONS
        if ACTIVATIONS[name].elementwise and name not in ("identity", "softplus")  # whose energies have no bottom
    },
    "clipped": lambda: Layered((5, 20, 10), "energy-based", "hard-sigmoid", eps=0.2, clip=True, seed=0),
    "output without slope": lambda: Layered(
        (5, 20, 10), "energy-based", "sigmoid", eps=0.2, output_slope=False, seed=0
    ),
    "toy": lambda: Toy((5, 20, 10), seed=0),
    "convolutional": lambda: Convolutional((1, 28, 28), (6, 4), (5,), "tanh", seed=0),
    "skips": lambda: graph(seed=0),
    "skips, inside": lambda: graph(nudge_site="inside", seed=0),
    "soft pools": lambda: graph("soft", seed=0),
    "average pools": lambda: graph("average", seed=0),
    "implicit": lambda: Layered((5, 20, 10), "prototypical", "tanh", nudge_site="implicit", seed=0),
    "implicit, clamped": lambda: graph(activation="hard-sigmoid", nudge_site="implicit", seed=0),
    "implicit, energy-based": lambda: graph(setting="energy-based", eps=0.3, nudge_site="implicit", seed=0),
    "implicit, energy-based, at rest": lambda: Layered(
        (5, 20, 10), "energy-based", "tanh", eps=0.5, nudge_site="implicit", init="default", seed=0
    ),
    "own parts": lambda: mixed(seed=0),
    "own parts, energy-based": lambda: mixed(setting="energy-based", eps=0.3, seed=0),
    "own energy": energy,
    "own transition": transition,
}
SWEPT = ("skips, inside", "energy-based, tanh", "own energy")


class Twins:
    """A net in float32 and float64, both at the float32 state that a free phase ended in."""

    def __init__(self, name: str) -> None:
        self.model = NETS[name]().float()
        x, y = batch(self.model, 8)
        self.x, self.y = x.float(), y.float()
        self.free = relax(self.model, self.x, 60)
        self.wide = copy.deepcopy(self.model).double()
        self.wide_free = replace(self.free, state=tuple(v.double() for v in self.free.state))

    def errors(self, ep: EP) -> dict[str, float]:
        """Of each parameter's update in float32 against float64."""
        found = ep.estimate(Problem(self.model, SquaredError(), self.x, self.y), self.free)[1]
        exact = ep.estimate(Problem(self.wide, SquaredError(), self.x.double(), self.y.double()), self.wide_free)[1]
        return {n: float((found[n].double() - g).norm() / g.norm()) for n, g in exact.items() if float(g.norm())}


@cache
def twins(name: str) -> Twins:
    torch.manual_seed(0)
    return Twins(name)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("name", NETS)
def test_updates_in_float32_are_those_of_float64(name: str, beta: float) -> None:
    for nudging in ("one-sided", "symmetric"):
        if "implicit" in name and nudging == "symmetric" and beta == 1.0:
            continue  # whose solution is not unique at beta = -1
        ep = EP(60, 12, beta=beta, nudging=nudging, form="difference", checked=False)  # type: ignore[arg-type]
        errors = twins(name).errors(ep)
        assert errors
        assert max(errors.values()) < BOUND, errors


@pytest.mark.parametrize("name", SWEPT)
def test_in_sweeps_too(name: str) -> None:
    ep = EP(60, 12, beta=1e-4, form="difference", schedule="sweeps", checked=False)
    assert max(twins(name).errors(ep).values()) < BOUND


def test_those_of_the_plain_form_err_as_one_over_beta() -> None:
    ep = EP(60, 12, nudging="symmetric", checked=False)
    for name in ("prototypical, tanh", "energy-based, sigmoid", "convolutional", "skips", "own energy"):
        small, large = (max(twins(name).errors(replace(ep, beta=beta)).values()) for beta in (1e-5, 1e-3))
        assert 30.0 < small / large < 300.0, name


@pytest.mark.parametrize("name", NETS)
def test_at_rest_both_forms_agree(name: str) -> None:
    """In float64, where rounding is far below; away from rest they differ by the drift alone."""
    model = NETS[name]().double()
    x, y = batch(model, 4)
    problem = Problem(model, SquaredError(), x, y)
    rest = relax(model, x, 3000)
    if float(rest.residual.max()) > 1e-13:
        pytest.skip("this net does not come to rest at these weights")
    for form in ({"nudging": "one-sided"}, {"nudging": "symmetric"}, {"schedule": "sweeps-same"}):
        plain, moved = (
            EP(0, 12, beta=0.3, form=kind, checked=False, **form).estimate(problem, rest)[1]  # type: ignore[arg-type]
            for kind in ("plain", "difference")
        )
        assert_close(moved, plain, rtol=1e-8, atol=1e-11)


def test_drift_enters_the_plain_form_only() -> None:
    model = NETS["energy-based, tanh"]().double()
    x, y = batch(model, 4)
    problem = Problem(model, SquaredError(), x, y)

    def off(form: str, T: int, beta: float) -> float:
        exact = EP(0, 12, beta=beta, form="difference", checked=False).estimate(problem, relax(model, x, 3000))[1]
        found = EP(0, 12, beta=beta, form=form, checked=False).estimate(problem, relax(model, x, T))[1]  # type: ignore[arg-type]
        return max(float((found[n] - g).norm() / g.norm()) for n, g in exact.items())

    for beta in (1e-2, 1e-4):
        assert off("difference", 60, beta) < 1.0
    assert off("plain", 60, 1e-4) > 50.0 * off("plain", 60, 1e-2) > 50.0  # residual / beta


@pytest.mark.parametrize("name", ["prototypical, tanh", "energy-based, sigmoid", "own energy", "own transition"])
def test_the_processes_sum_to_the_update(name: str) -> None:
    two = twins(name)
    ep = EP(60, 6, beta=1e-5, form="difference", checked=False)
    problem = Problem(two.model, SquaredError(), two.x, two.y)
    steps = list(ep.steps(two.model, SquaredError(), two.x, two.y, two.free))
    for parameter, g in ep.estimate(problem, two.free)[1].items():
        total = torch.stack([step.synapses[parameter].double() for step in steps]).sum(0)
        assert float((total + g.double()).norm()) < BOUND * float(g.norm())
    assert all(layer.dtype == torch.float32 for step in steps for layer in step.neurons)


def test_stacked_networks_are_each_their_own() -> None:
    for make in (lambda seed: graph(seed=seed), lambda seed: mixed(seed=seed)):
        nets = [make(seed).float() for seed in (0, 1)]
        both = stack(nets)
        pairs = [batch(net, 4) for net in nets]
        x, y = (torch.stack([pair[k].float() for pair in pairs]) for k in (0, 1))
        ep = EP(20, 6, beta=1e-5, form="difference")
        found = ep.gradient(both, SquaredError(), x, y)[1]
        for r, net in enumerate(nets):
            alone = ep.gradient(net, SquaredError(), x[r], y[r])[1]
            for p, g in zip(both.parameters(), alone.values(), strict=True):
                assert_close(found[p][r], g, rtol=1e-4, atol=1e-7)


def test_a_nudge_too_weak_for_the_plain_form_is_refused_there_alone() -> None:
    model = Layered((5, 20, 10), seed=0)
    x, y = (v.float() for v in batch(model, 4))
    with pytest.raises(ValueError, match="rounds away"):
        EP(20, 5, beta=1e-7).gradient(model, SquaredError(), x, y)
    free, grads = EP(20, 5, beta=1e-7, form="difference").gradient(model, SquaredError(), x, y)
    assert isinstance(free, Relaxation)
    assert all(float(g.abs().max()) > 0.0 for g in grads.values())
    with pytest.raises(ValueError, match="expected 'plain' or 'difference'"):
        EP(20, 5, form="other")  # type: ignore[arg-type]


def test_a_tie_of_a_pool_goes_where_the_move_leads() -> None:
    """P(z + dz) - P(z) at a tie is the larger of the two moves: the one-sided derivative."""
    from eqprop.models.convolutional import max_departure, max_pool

    z = torch.tensor([[[[1.0, 1.0], [0.0, 0.5]]]])
    dz = torch.tensor([[[[-1e-9, 2e-9], [1.0e-9, 0.0]]]])
    moved = max_departure(z, 2)(dz)
    assert_close(moved.values, torch.tensor([[[[2e-9]]]]))
    spread = moved.spread(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 3e-9))
    assert_close(spread, torch.tensor([[[[-1.0, 1.0 + 3e-9], [0.0, 0.0]]]]))
    assert bool((max_pool(z + dz, 2).values == max_pool(z, 2).values).all())  # lost by subtraction


def test_transposed_convolutions_are_linear() -> None:
    links = [Dense("x", "code"), Transposed("code", "image", stride=2, rest=1, padding=1), Dense("image", "out")]
    model = Network(6, {"out": 5, "image": (2, 8, 8), "code": (3, 4, 4)}, links, "tanh", seed=0)
    x, y = (v.float() for v in batch(model, 4))
    free = relax(model, x, 60)
    ep = EP(60, 8, beta=1e-5, form="difference", checked=False)
    found = ep.estimate(Problem(model, SquaredError(), x, y), free)[1]
    wide, state = copy.deepcopy(model).double(), tuple(v.double() for v in free.state)
    exact = ep.estimate(Problem(wide, SquaredError(), x.double(), y.double()), replace(free, state=state))[1]
    assert all(float((found[n] - g).norm()) < BOUND * float(g.norm()) for n, g in exact.items())
