"""Bad input: every error says what was got, what is expected and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.nets import F64, batch, convolutional, energy_based, prototypical, toy
from torch import Tensor

from eqprop import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Cost,
    Dynamics,
    FunctionCost,
    Phase,
    PrimitiveDynamics,
    SquaredError,
    from_primitive,
    from_transition,
    relax,
)
from eqprop.models import Convolutional, Layered, stack

NET = prototypical(2)
X, Y = batch(NET)
STATE = NET.init_state(X)
COST = SquaredError()
W = {"W": torch.ones(2, 3, dtype=F64)}
ROWS = torch.ones(4, 3, dtype=F64)


def phi(x: Tensor, s: Any, theta: Any) -> Tensor:
    return (s[0] @ theta["W"] * x).sum(-1)


def bare(x: Tensor, s: Any, theta: Any) -> Any:
    """A transition of one layer that forgets the tuple."""
    return s[0] + theta["W"].sum()


def pair() -> Layered:
    return stack([prototypical(2, seed=seed) for seed in range(2)])


CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "a rate of no parameter": (
        lambda: ContinualEP(5, 3, rates=dict.fromkeys((*dict(NET.named_parameters()), "W10"), 0.1)).gradient(
            NET, COST, X, Y
        ),
        ["'W10'", "Did you mean", "W01"],
    ),
    "x of a wrong width": (
        lambda: relax(NET, torch.ones(3, 7, dtype=F64), 1),
        ["(3, 7)", "(B, 4)", "x.reshape(-1, 4)"],
    ),
    "x flat for a convolution": (
        lambda: relax(convolutional(), torch.ones(2, 100, dtype=F64), 1),
        ["(2, 100)", "(B, 1, 10, 10)", "x.reshape(-1, 1, 10, 10)"],
    ),
    "x empty": (lambda: relax(NET, torch.ones(0, 4, dtype=F64), 1), ["(0, 4)", "no sample", "at least one"]),
    "x in float32": (lambda: relax(NET, X.float(), 1), ["torch.float32", "torch.float64", ".to("]),
    "x of one network for two": (lambda: relax(pair(), X, 1), ["(3, 4)", "(2, B, 4)", "2 stacked networks"]),
    "y as labels": (lambda: EP(5, 2).backward(NET, COST, X, Y.argmax(1)), ["(3,)", "(3, 3)", "eqprop.data.one_hot"]),
    "y of integers": (lambda: RBP(5, 2).backward(NET, COST, X, Y.long()), ["torch.int64", "torch.float64", ".to("]),
    "s of another batch": (
        lambda: relax(NET, X, 1, tuple(v[:2] for v in STATE)),
        ["(2, 3)", "(2, 5)", "(3, 3)", "(3, 5)", "model.init_state(x)"],
    ),
    "s with a layer too few": (lambda: relax(NET, X, 1, STATE[:1]), ["[(3, 3)]", "[(3, 3), (3, 5)]"]),
    "K above T for BPTT": (lambda: BPTT(T=5, K=6), ["K=6", "T=5", "Lower K or raise T"]),
    "T below 0": (lambda: EP(T=-1, K=2), ["T=-1", "0 or more"]),
    "an unknown schedule": (lambda: Phase(3, "random"), ["'random'", "'synchronous' or 'alternating'"]),  # type: ignore[arg-type]
    "a free phase that kept too little": (
        lambda: next(BPTT(T=9, K=4).steps(NET, COST, X, Y, relax(NET, X, 9, keep=2))),
        ["K=4", "kept 2", "relax(..., keep=4)"],
    ),
    "EP with beta 0": (lambda: EP(T=5, K=2, beta=0.0), ["beta=0.0", "non-zero", "0.1"]),
    "eps above 1": (lambda: toy(eps=1.5), ["eps is 1.5", "(0, 1]"]),
    "alternating with a leak": (
        lambda: relax(energy_based(2), X, Phase(3, "alternating")),
        ["Layered", "cannot alternate", "schedule='synchronous'"],
    ),
    "an unknown activation": (
        lambda: Layered((2, 3), activation="sigmod"),
        ["'sigmod'", "tanh, sigmoid, logistic, hard-sigmoid", "Did you mean 'sigmoid'?"],
    ),
    "an unknown setting": (lambda: Layered((2, 3), "eb"), ["'eb'", "'energy-based' or 'prototypical'"]),  # type: ignore[arg-type]
    "an image used up": (lambda: Convolutional((1, 8, 8)), ["(1, 8, 8)", "h0", "a smaller kernel or pool, or padding"]),
    "networks of two sizes": (lambda: stack([NET, prototypical(3)]), ["differ in type or shapes", "built alike"]),
    "a primitive that is one number": (
        lambda: relax(from_primitive(lambda x, s, theta: phi(x, s, theta).sum(), W, layers=(2,)), ROWS, 1),
        ["shape ()", "(4,)", "Sum over the neurons, not over the samples"],
    ),
    "a primitive cut off from the state": (
        lambda: relax(from_primitive(lambda x, s, theta: s[0].detach().sum(-1), W, layers=(2,)), ROWS, 1),
        ["does not depend on the state", "differentiable", "detach()"],
    ),
    "a transition that returns a tensor": (
        lambda: relax(from_transition(bare, W, layers=(2,)), ROWS, 1),
        ["(4, 2) float64", "(2,) float64", "a tuple with one tensor per layer"],
    ),
    "a cost that is cut off from the state": (
        lambda: EP(5, 2).backward(NET, FunctionCost(lambda s, y: (s[0].detach() - y).square().sum(-1)), X, Y),
        ["does not depend on the state", "differentiable", "detach()"],
    ),
    "a cost per neuron": (
        lambda: BPTT(5, 2).backward(NET, FunctionCost(lambda s, y: (s[0] - y).square()), X, Y),
        ["shape (3, 3)", "one value per sample", "Sum over the neurons"],
    ),
}


@pytest.mark.parametrize(("mistake", "said"), CASES.values(), ids=CASES)
def test_each_mistake_is_named_with_its_remedy(mistake: Callable[[], object], said: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        mistake()
    message = str(error.value)
    assert all(part in message for part in said), message
    assert message.endswith((".", "?")), message


def test_a_class_of_ones_own_says_what_it_lacks() -> None:
    class Nothing(PrimitiveDynamics):
        pass

    class NoPrimitive(PrimitiveDynamics):
        def init_state(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x,)

    class NoTransition(Dynamics):
        def init_state(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x,)

    for kind, missing in ((Nothing, "init_state"), (NoPrimitive, "primitive"), (NoTransition, "transition")):
        with pytest.raises(NotImplementedError, match=rf"{kind.__name__} must define {missing}\("):
            relax(kind(), torch.ones(2, 3), 1)
    with pytest.raises(NotImplementedError, match=r"Cost must define forward\(s, y, theta\)"):
        EP(1, 1).backward(NET, Cost(), X, Y)


def test_a_mistake_leaves_the_model_as_it_was() -> None:
    net = prototypical(2)
    for mistake in (
        lambda: EP(5, 2).backward(net, COST, X, Y[:2]),
        lambda: BPTT(5, 2).backward(net, COST, X[:, :2], Y),
    ):
        with pytest.raises(ValueError):
            mistake()
    assert all(p.grad is None for p in net.parameters())
