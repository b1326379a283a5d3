"""One net of three layers in every form that a model may have, with its formulas written out (see `written_out`).

Phi = <tanh s0, A tanh s1> + <tanh s1, B tanh s2> + c <tanh s2, C tanh s0> + <s2, V x> + <s1, b>; with c = 0 it is
bipartite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eqprop import PrimitiveDynamics, from_energy, from_primitive, from_transition
from eqprop.models import Dense, Layered, Network
from eqprop.state import State, zero_state
from helpers.nets import F64, random_like
from helpers.written_out import Layers, Net, Theta

SIZES, INPUTS = (2, 3, 4), 3
EPS = 0.4
CHAIN, ALL = ((2,), (1,), (0,)), ((1,), (2, 0))


def parameters() -> dict[str, Tensor]:
    shapes = {"A": (2, 3), "B": (3, 4), "C": (4, 2), "V": (4, 3), "b": (3,)}
    return {name: random_like(shape, seed, -0.7, 0.7) for seed, (name, shape) in enumerate(shapes.items())}


def phi(x: Tensor, s: Sequence[Tensor], theta: Theta, loop: float = 1.0) -> Tensor:
    r0, r1, r2 = (torch.tanh(layer) for layer in s)
    pairs = (r0 * (r1 @ theta["A"].mT)).sum(-1) + (r1 * (r2 @ theta["B"].mT)).sum(-1)
    closed = (r2 * (r0 @ theta["C"].mT)).sum(-1)
    return pairs + loop * closed + (s[2] * (x @ theta["V"].mT)).sum(-1) + (s[1] * theta["b"]).sum(-1)


def slope(x: Tensor, s: Sequence[Tensor], theta: Theta, loop: float = 1.0) -> Layers:
    r0, r1, r2 = r = [torch.tanh(layer) for layer in s]
    d0, d1, d2 = (1.0 - v * v for v in r)
    return (
        d0 * (r1 @ theta["A"].mT + loop * (r2 @ theta["C"])),
        d1 * (r0 @ theta["A"] + r2 @ theta["B"].mT) + theta["b"],
        d2 * (r1 @ theta["B"] + loop * (r0 @ theta["C"].mT)) + x @ theta["V"].mT,
    )


def open_phi(x: Tensor, s: Sequence[Tensor], theta: Theta) -> Tensor:
    return phi(x, s, {**theta, "C": torch.zeros(4, 2, dtype=s[0].dtype)}, 0.0)


def open_slope(x: Tensor, s: Sequence[Tensor], theta: Theta) -> Layers:
    return slope(x, s, {**theta, "C": torch.zeros(4, 2, dtype=s[0].dtype)}, 0.0)


class Own(PrimitiveDynamics):
    """A user's class: no formula but Phi; two groups that depend only on each other, so that it can alternate."""

    bipartite = True

    def __init__(self) -> None:
        super().__init__()
        for name, value in parameters().items():
            if name != "C":
                setattr(self, name, nn.Parameter(value))

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, [(n,) for n in SIZES], x.shape[:1])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return open_phi(x, s, dict(self.named_parameters()))

    def squash(self, s: State) -> State:
        return tuple(torch.sigmoid(layer) for layer in s)

    def half_step(self, drive: Any, s: State, parity: int) -> State:
        return self.group_step(drive, s, range(parity, len(s), 2))


class Halves(Own):
    """The same with groups of its own for sweeps."""

    def sweep(self, layers: int) -> tuple[tuple[int, ...], ...]:
        return ALL


def own(kind: type[Own]) -> Net:
    return Net(kind(), open_slope, open_phi, ((1,), (0, 2)) if kind is Own else ALL, torch.sigmoid)


def primitive(squash: Callable[[Tensor], Tensor] | None, inside: bool = False) -> Net:
    model = from_primitive(phi, parameters(), SIZES, squash, "inside" if inside else "outside")
    return Net(model, slope, phi, CHAIN, squash, inside)


def energy() -> Net:
    """E = 1/2 |s|^2 - phi, so Phi = (1 - eps)/2 |s|^2 + eps phi."""

    def e(x: Tensor, s: Sequence[Tensor], theta: Theta) -> Tensor:
        return 0.5 * squares(s) - phi(x, s, theta)

    def leaky(x: Tensor, s: Layers, theta: Theta) -> Tensor:
        return 0.5 * (1.0 - EPS) * squares(s) + EPS * phi(x, s, theta)

    def leaky_slope(x: Tensor, s: Layers, theta: Theta) -> Layers:
        return tuple((1.0 - EPS) * v + EPS * d for v, d in zip(s, slope(x, s, theta), strict=True))

    return Net(from_energy(e, parameters(), SIZES, eps=EPS), leaky_slope, leaky, CHAIN, eps=EPS)


def squares(s: Sequence[Tensor]) -> Tensor:
    return torch.stack([(layer * layer).sum(-1) for layer in s]).sum(0)


def transition() -> Net:
    """No primitive has this F for a derivative: each layer is squashed by itself after the fact."""

    def f(x: Tensor, s: Sequence[Tensor], theta: Theta) -> Layers:
        return tuple(0.8 * torch.tanh(v) for v in slope(x, s, theta))

    return Net(from_transition(f, parameters(), SIZES), f, None, CHAIN)


def layered(inside: bool = False) -> Net:
    """Formulas by hand: s0 - W01 - s1 - W12 - s2 - W2x - x, prototypical."""
    options: dict[str, Any] = {"init": "default", "seed": 3, "dtype": F64}
    model = Layered((2, 3, 4, 3), "prototypical", "tanh", nudge_site="inside" if inside else "outside", **options)

    def slope_by_hand(x: Tensor, s: Layers, theta: Theta) -> Layers:
        s0, s1, s2 = s
        return (
            s1 @ theta["W01"].mT + theta["b0"],
            s0 @ theta["W01"] + s2 @ theta["W12"].mT + theta["b1"],
            s1 @ theta["W12"] + x @ theta["W23"].mT + theta["b2"],
        )

    def phi_by_hand(x: Tensor, s: Layers, theta: Theta) -> Tensor:
        s0, s1, s2 = s
        pairs = (s0 * (s1 @ theta["W01"].mT)).sum(-1) + (s1 * (s2 @ theta["W12"].mT)).sum(-1)
        biases = (s0 * theta["b0"]).sum(-1) + (s1 * theta["b1"]).sum(-1) + (s2 * theta["b2"]).sum(-1)
        return pairs + (s2 * (x @ theta["W23"].mT)).sum(-1) + biases

    return Net(model, slope_by_hand, phi_by_hand, ((1,), (0, 2)), torch.tanh, inside)


def graph() -> Net:
    """A ring of three layers, energy-based: Phi of the activities tanh s, with a leak."""
    links = [Dense("x", "s2", name="V"), Dense("s1", "s0", name="A"), Dense("s2", "s1", name="B")]
    model = Network(
        INPUTS,
        {"s0": 2, "s1": 3, "s2": 4},
        [*links, Dense("s0", "s2", name="C")],
        "tanh",
        setting="energy-based",
        eps=EPS,
        groups=(("s2",), ("s1",), ("s0",)),
        bias=False,
        seed=1,
        dtype=F64,
    )

    def seen(theta: Theta, s: Layers) -> Theta:
        return {**theta, "b": torch.zeros(3, dtype=s[0].dtype)}

    def ring(x: Tensor, s: Layers, theta: Theta) -> Tensor:
        fed = (torch.tanh(s[2]) * (torch.tanh(x) @ theta["V"].mT)).sum(-1)
        closed = phi(x, s, seen(theta, s)) - (s[2] * (x @ theta["V"].mT)).sum(-1)
        return 0.5 * (1.0 - EPS) * squares(s) + EPS * (closed + fed)

    def ring_slope(x: Tensor, s: Layers, theta: Theta) -> Layers:
        bare = slope(torch.zeros_like(x), s, seen(theta, s))
        fed = (1.0 - torch.tanh(s[2]).square()) * (torch.tanh(x) @ theta["V"].mT)
        total = (*bare[:2], bare[2] + fed)
        return tuple((1.0 - EPS) * v + EPS * d for v, d in zip(s, total, strict=True))

    return Net(model, ring_slope, ring, CHAIN, eps=EPS)


NETS: dict[str, Callable[[], Net]] = {
    "autodiff Phi": lambda: primitive(None),
    "autodiff Phi, squashed": lambda: primitive(torch.sigmoid),
    "autodiff Phi, nudged inside": lambda: primitive(torch.sigmoid, inside=True),
    "energy": energy,
    "own class": lambda: own(Own),
    "own class, own groups": lambda: own(Halves),
    "formulas by hand": layered,
    "formulas by hand, nudged inside": lambda: layered(inside=True),
    "graph": graph,
    "transition": transition,
}
