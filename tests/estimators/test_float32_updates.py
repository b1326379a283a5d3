"""float32 updates against float64, parameter by parameter, on every model and with every estimator."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from helpers.nets import (
    asymmetric,
    batch,
    convolutional,
    energy_based,
    named,
    prototypical,
    random_like,
    toy,
)
from helpers.tolerances import TIMES_PRODUCT
from torch import Tensor

from eqprop import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Dynamics,
    Estimator,
    HolomorphicEP,
    Phase,
    PrimitiveDynamics,
    SquaredError,
    from_primitive,
    relax,
)
from eqprop.cost import Nudge
from eqprop.models import Conv, Dense, Network
from eqprop.state import State, subtract

SAMPLES, T, K, BETA = 20, 40, 8, 0.1


def own() -> Dynamics:
    """A primitive without formulas of its own: Phi by automatic differentiation."""
    weights = {"W": random_like((3, 5), 1), "V": random_like((5, 4), 2)}

    def phi(x: Tensor, s: State, theta: dict[str, Tensor]) -> Tensor:
        s0, s1 = s
        return (s0 * (s1 @ theta["W"].T)).sum(-1) + (s1 * (x @ theta["V"].T)).sum(-1)

    model = from_primitive(phi, weights, layers=(3, 5), squash=torch.tanh)
    model.input_shape = (4,)
    return model


MODELS: dict[str, Dynamics] = {
    "toy": toy(),
    "energy-based, sigmoid": energy_based(3, "sigmoid"),
    "energy-based, tanh": energy_based(3),
    "prototypical": prototypical(3, "sigmoid"),
    "two maps": convolutional(input_shape=(1, 28, 28), channels=(8, 4), kernel=5),
    "three maps, no pooling": convolutional(input_shape=(1, 12, 12), channels=(5, 4, 3), padding=1, pool=1),
    "graph with maps": Network(
        (1, 12, 12),
        {"out": 3, "h2": (4, 6, 6), "h1": (3, 12, 12)},
        [Conv("x", "h1", padding=1), Conv("h1", "h2", padding=1, pool=2), Dense("h2", "out"), Dense("h1", "out")],
        "hard-sigmoid",
        init="default",
        seed=0,
    ),
    "own primitive": own(),
    "own transition": asymmetric(),
}
ESTIMATORS: dict[str, Estimator] = {
    "ep": EP(T, K, beta=BETA),
    "ep-symmetric": EP(T, K, beta=BETA, nudging="symmetric"),
    "ep-holomorphic": HolomorphicEP(T, K, beta=BETA),
    "ep-continual": ContinualEP(T, K, beta=BETA, rates=1e-3),
    "bptt": BPTT(T, K),
    "rbp": RBP(T, K),
}
FORMULAS = [name for name in MODELS if not name.startswith("own")]


@dataclass(frozen=True)
class Pair:
    """One network in float32 and float64 with the same numbers, and a mini-batch for it."""

    single: Dynamics
    double: Dynamics
    x: Tensor
    y: Tensor

    def phases(self) -> tuple[State, State]:
        """The ends of the two phases in float32: free and nudged."""
        with torch.no_grad():
            free = relax(self.single, self.x, T).state
            return free, relax(self.single, self.x, Phase(K), free, Nudge(SquaredError(), self.y, BETA)).state


def pair(name: str) -> Pair:
    single = copy.deepcopy(MODELS[name]).float()
    x, y = batch(single, SAMPLES)
    return Pair(single, copy.deepcopy(single).double(), x.float(), y.float())


def wide(s: State) -> State:
    return tuple(v.double() for v in s)


def error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| over a whole parameter."""
    return float((found.double() - exact).norm() / exact.norm())


def product_error(state: State) -> float:
    """That of torch's float32 matrix product over as many terms as the widest layer's sum has: samples times places."""
    terms = max(SAMPLES * math.prod(v.shape[2:]) for v in state)
    found = []
    for seed in range(5):
        u, v = (random_like((terms, 24), 2 * seed + n).float() for n in (0, 1))
        found.append(error(u.mT @ v, u.double().mT @ v.double()))
    return max(found)


def amplification(free: State, nudged: State) -> float:
    """How far rounding a state reaches in a difference of states: |s| / |s^beta - s*| of the layer that moves least."""
    moved = subtract(nudged, free)
    return max(1.0, *(float(v.norm() / d.norm()) for v, d in zip(free, moved, strict=True)))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_contrast_of_two_float32_states_is_as_accurate_as_a_product(name: str) -> None:
    """The states are the same numbers in both precisions: what errs is the contrast alone."""
    two = pair(name)
    free, nudged = two.phases()
    assert isinstance(two.single, PrimitiveDynamics)
    assert isinstance(two.double, PrimitiveDynamics)
    found = two.single.contrast(two.x, nudged, free)
    exact = two.double.contrast(two.x.double(), wide(nudged), wide(free))
    allowed = TIMES_PRODUCT * product_error(free)
    if name == "toy" or name.startswith("energy-based"):
        allowed *= amplification(free, nudged)  # sigma(s) is rounded before it is subtracted
    for parameter, value in found.items():
        assert error(value, exact[parameter]) < allowed, parameter


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", MODELS)
def test_an_update_in_float32_errs_as_a_product_does(name: str, estimator: str) -> None:
    two, chosen = pair(name), ESTIMATORS[estimator]
    if estimator == "ep-holomorphic" and "map" in name:
        pytest.skip("there is no maximum of complex numbers")
    free, nudged = two.phases()
    _, single = chosen.gradient(two.single, SquaredError(), two.x, two.y)
    _, double = chosen.gradient(two.double, SquaredError(), two.x.double(), two.y.double())
    found, exact = named(two.single, single), named(two.double, double)
    allowed = TIMES_PRODUCT * product_error(free)
    if estimator.startswith("ep"):
        allowed *= amplification(free, nudged)  # states are rounded before they are subtracted
    if estimator == "ep-continual":
        allowed *= K  # once per step
    for parameter, value in found.items():
        assert error(value, exact[parameter]) < allowed, parameter
