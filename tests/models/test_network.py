"""Nets as graphs: every hand-written piece against automatic differentiation, the shipped nets, bad graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from helpers.contract import Case, check_model
from helpers.graphs import Own, networks
from helpers.nets import F64, batch, convolutional, energy_based, prototypical, random_like, toy
from helpers.tolerances import SAME_FORMULA
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.testing import assert_close

from eqprop import EP, HolomorphicEP, PrimitiveDynamics, SquaredError
from eqprop.models import Activation, Connection, Conv, Dense, Lateral, Network, Skip, Transposed
from eqprop.models.connections import CONNECTIONS, Theta, register
from eqprop.models.graph import colouring

EXACT = 1e-10


def close(actual: object, expected: object) -> None:
    assert_close(actual, expected, rtol=EXACT, atol=EXACT)


def states(net: PrimitiveDynamics, x: Tensor, count: int = 2) -> list[Any]:
    return [Case(net, x, x).state(which) for which in range(count)]


def pieces_agree(net: Network, x: Tensor) -> None:
    """Feedback and weight gradient of each connection, dPhi/ds whole and by group, and the contrast."""
    s, other = states(net, x)
    with torch.no_grad():
        drive = net.drive(x)
        whole = net.gradient(drive, s)
        close(whole, net.autodiff_gradient(x, s))
        for group in net.sweep(len(s)):
            part = net.group_gradient(drive, s, group)
            close(part, tuple(whole[n] if n in group else v for n, v in enumerate(s)))
        close(net.contrast(x, s, other), net.autodiff_contrast(x, s, other))
        for c, theta in net.weights_of():
            pre, post = (random_like((len(x), *net.shape(end)), len(end)) for end in (c.pre, c.post))
            post = pre if c.pre == c.post else post + 0.1
            close(c.feedback(post, pre, theta), c.autodiff_feedback(post, pre, theta))
            close(c.weight_gradient(post, pre, theta), c.autodiff_weight_gradient(post, pre, theta))
            forward, back = c.both(post, pre, theta)
            close((forward, back), (c.forward(pre, theta), c.feedback(post, pre, theta)))


@settings(max_examples=220, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks())
def test_random_graphs_agree_with_automatic_differentiation(net: Network) -> None:
    pieces_agree(net, random_like((2, *net.input_shape), 0, 0.0))


def mixed(**options: Any) -> Network:
    """Every kind of connection, two per kind of pooling, activations of its own per layer."""
    chosen: dict[str, Any] = {"seed": 0, "dtype": F64, "activation": {"out": "identity", "h3": "sigmoid", "*": "tanh"}}
    return Network(
        (2, 6, 6),
        {"out": 3, "h4": (2, 2, 2), "h3": (4, 3, 3), "h2": (4, 3, 3), "h1": (2, 6, 6)},
        [
            Conv("x", "h1", padding=1, gain=0.5),
            Conv("h1", "h2", stride=2, padding=1, groups=2, gain=0.5),
            Skip("h2", "h3", gain=0.3),
            Conv("h2", "h3", kernel=1, gain=0.3, name="W_point"),
            Conv("h1", "h3", padding=1, pool=2, pooling="soft", gain=0.3, name="W_soft"),
            Conv("h1", "h4", padding=1, pool=3, pooling="average", gain=0.3),
            Conv("x", "h4", padding=1, pool=3, gain=0.3),
            Lateral("h4", gain=0.3),
            Transposed("h4", "h2", kernel=2, gain=0.3),
            Own("h3", "out", gain=0.3),
            Dense("h4", "out", gain=0.3),
        ],
        **chosen | options,
    )


CASES: dict[str, Callable[[], Network]] = {
    "prototypical": mixed,
    "energy-based": lambda: mixed(setting="energy-based", eps=0.4),
    "nudged inside": lambda: mixed(nudge_site="inside", bias=False),
    "declared groups": lambda: mixed(groups=[("h1", "h2"), ("h3",), ("out", "h4")]),
}


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_the_contract_of_models(build: Callable[[], Network]) -> None:
    net = build()
    check_model(Case(net, *batch(net)))


def test_holomorphic_ep_serves_convolutions_that_are_analytic() -> None:
    """Its contrast is between complex states."""
    links = [
        Conv("x", "h1", padding=1, pool=2, pooling="soft"),
        Conv("h1", "h2", stride=2, groups=2),
        Transposed("h2", "h1", kernel=3),
        Dense("h2", "out"),
    ]
    layers: dict[str, Any] = {"out": 3, "h2": (4, 1, 1), "h1": (2, 3, 3)}
    net = Network((2, 6, 6), layers, links, "tanh", dtype=F64, seed=0)
    x, y = batch(net)
    exact = HolomorphicEP(30, 4, beta=0.2, points=8).gradient(net, SquaredError(), x, y)[1]
    near = EP(30, 4, beta=1e-4, nudging="symmetric").gradient(net, SquaredError(), x, y)[1]
    assert_close(exact, near, rtol=1e-4, atol=1e-6)


def as_graph(model: str) -> Network:
    """The shipped nets of `helpers.nets` written as graphs."""
    if model == "toy":
        links: list[Connection] = [Dense("s1", "s0"), Dense("x", "s0"), Dense("x", "s1")]
        net = Network(4, {"s0": 3, "s1": 6}, links, "tanh", setting="energy-based", eps=0.7, dtype=F64)
    elif model == "conv":
        links = [
            Dense("h0", "s0", name="Wfc01"),
            Conv("h1", "h0", pool=2, name="Wconv01"),
            Conv("x", "h1", pool=2, name="Wconv12"),
        ]
        net = Network((1, 10, 10), {"s0": 3, "h0": (3, 1, 1), "h1": (2, 4, 4)}, links, dtype=F64, seed=0)
    else:
        links = [Dense("s1", "s0"), Dense("s2", "s1"), Dense("x", "s2", name="W23")]
        energy: dict[str, Any] = {"setting": "energy-based", "eps": 0.7, "clip": True} if model == "EB" else {}
        net = Network(4, {"s0": 3, "s1": 5, "s2": 5}, links, "sigmoid", dtype=F64, seed=0, **energy)
    return net


SHIPPED: dict[str, Callable[[], PrimitiveDynamics]] = {
    "P": lambda: prototypical(3, "sigmoid"),
    "EB": lambda: energy_based(3, "sigmoid", clip=True),
    "toy": toy,
    "conv": convolutional,
}


@pytest.mark.parametrize("which", SHIPPED)
def test_the_shipped_nets_written_as_graphs_are_those_nets(which: str) -> None:
    model, net = SHIPPED[which](), as_graph(which)
    values = [p.detach() for _, p in model.named_parameters()]
    names = {"bfc0": "b0", "bconv0": "b_h0", "bconv1": "b_h1"}
    theirs = {names.get(name, name): p for name, p in model.named_parameters()}
    assert theirs.keys() == dict(net.named_parameters()).keys()
    assert len(values) == len(theirs)
    net.load_state_dict(theirs)
    x, y = batch(model)
    s, other = states(model, x)
    with torch.no_grad():
        push = (0.3 * y, *[None] * (len(s) - 1))
        ours, expected = (m.step(m.drive(x), s, push) for m in (net, model))
        assert_close(ours, expected, rtol=0.0, atol=SAME_FORMULA)
        found = {names.get(name, name): g for name, g in model.contrast(x, s, other).items()}
        assert_close(net.contrast(x, s, other), found, rtol=0.0, atol=SAME_FORMULA)
        assert_close(net.primitive(x, s), model.primitive(x, s), rtol=0.0, atol=SAME_FORMULA)
    assert net.bipartite == model.bipartite


@pytest.mark.parametrize("which", ["P", "EB", "conv"])
def test_the_same_seed_draws_the_same_weights(which: str) -> None:
    model, net = SHIPPED[which](), as_graph(which)
    for ours, theirs in zip(net.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@dataclass(frozen=True)
class WrongFeedback(Connection):
    """W in the forward map, W without its sign in the feedback."""

    linear = True

    def weights(self, pre: Any, post: Any) -> Any:
        return Dense(self.pre, self.post).weights(pre, post)

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return pre @ theta["W"].mT

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        return post @ theta["W"].abs()


def test_a_wrong_feedback_is_noticed_by_a_wide_margin() -> None:
    net = Network(4, {"out": 3, "h": 5}, [Dense("x", "h"), WrongFeedback("h", "out")], "tanh", seed=0, dtype=F64)
    x, _ = batch(net)
    (s,) = states(net, x, 1)
    with torch.no_grad():
        ours, right = net.gradient(net.drive(x), s), net.autodiff_gradient(x, s)
    close(ours[0], right[0])
    gap = float((ours[1] - right[1]).abs().max() / right[1].abs().max())
    assert gap > 1e8 * EXACT
    with pytest.raises(AssertionError):
        pieces_agree(net, x)


def test_a_connection_registered_by_name_is_known_to_files() -> None:
    try:
        assert register("own")(Own) is Own
        assert CONNECTIONS["own"] is Own
        with pytest.raises(ValueError, match="'own' is Own already"):
            register("own")(WrongFeedback)
    finally:
        del CONNECTIONS["own"]


def test_colours() -> None:
    chain = [Dense("x", "d"), Dense("d", "c"), Dense("c", "b"), Dense("b", "a")]
    assert colouring("abcd", chain) == (("b", "d"), ("a", "c"))
    ring = [Dense("x", "a"), Dense("a", "b"), Dense("b", "c"), Dense("c", "a"), Lateral("b")]
    groups = colouring("abc", ring)
    assert len(groups) == 3
    assert groups[-1] == ("a",)
    assert mixed().groups[-1][0] == "out"


def small(layers: dict[str, Any] | None = None, connections: Any = None, **options: Any) -> Network:
    default = [Dense("x", "h"), Dense("h", "out")]
    return Network((1, 8, 8), layers or {"out": 2, "h": 4}, default if connections is None else connections, **options)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "sizes that do not fit": (
        lambda: small({"out": 2, "h": (4, 3, 3)}, [Conv("x", "h", pool=2, padding=1), Dense("h", "out")]),
        r"Conv x -> h makes \(4, 4, 4\) of \(1, 8, 8\), and the layer h is \(4, 3, 3\)\. Change",
    ),
    "a flat layer for a convolution": (lambda: small(connections=[Conv("x", "h"), Dense("h", "out")]), "Use Dense"),
    "groups that do not divide": (
        lambda: small({"out": 2, "h": (4, 6, 6)}, [Conv("x", "h", groups=2), Dense("h", "out")]),
        "groups=2, which do not divide 1 and 4",
    ),
    "a skip between shapes": (
        lambda: small(connections=[Dense("x", "h"), Dense("h", "out"), Skip("h", "out")]),
        "expected the same shape",
    ),
    "a layer nobody feeds": (lambda: small(connections=[Dense("x", "out")]), "Nothing feeds the layer 'h'"),
    "an input nobody reads": (
        lambda: small(connections=[Dense("out", "h"), Dense("h", "out", name="V")]),
        "No connection begins at the input",
    ),
    "one name twice": (
        lambda: small(connections=[Dense("x", "h"), Dense("h", "out"), Dense("h", "out")]),
        "Two parameters are named 'W_out_h'.*name=",
    ),
    "an unknown layer": (
        lambda: small(connections=[Dense("x", "h"), Dense("h", "outt")]),
        "names a layer 'outt', which is not there; the layers are out, h, x. Did you mean 'out'",
    ),
    "into the input": (lambda: small(connections=[Dense("h", "x")]), "leads into the input"),
    "a layer named x": (lambda: small({"out": 2, "x": 3}), "A layer is named 'x'"),
    "an activation for nobody": (lambda: small(activation={"hh": "tanh", "*": "tanh"}), "names a layer 'hh'"),
    "a layer without activation": (lambda: small(activation={"h": "tanh"}), "has none for out"),
    "a group with a stranger": (lambda: small(groups=[("out",), ("hidden",)]), "'hidden', which is not there"),
    "a layer in no group": (lambda: small(groups=[("out",)]), "has h in none or several"),
    "a lateral between two": (lambda: Lateral("h", "out"), "joins two layers; it is within one"),
    "a padding as large as the kernel": (lambda: Conv("x", "h", kernel=2, padding=2), "a padding from 0 below"),
    "an unknown pooling": (lambda: Conv("x", "h", pooling="mean"), "Unknown pooling 'mean'"),  # type: ignore[arg-type]
    "eps of a prototypical net": (lambda: small(eps=0.2), "apply to the energy-based setting only"),
    "no eps": (lambda: small(setting="energy-based"), "Got no eps.*such as eps=0.2"),
    "an own map that does not fit": (
        lambda: small(connections=[Short("x", "h"), Dense("h", "out")]),
        r"Short x -> h makes \(1, 1\) of a sample of \(1, 8, 8\); expected \(1, 4\)",
    ),
}


@dataclass(frozen=True)
class Short(Connection):
    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return pre.flatten(1)[:, :1]


@pytest.mark.parametrize(("build", "message"), BAD.values(), ids=BAD)
def test_a_bad_graph_is_refused_in_one_sentence(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_table_of_a_net() -> None:
    text = str(mixed())
    assert "prototypical: " in text
    assert "h2     4 x 3 x 3  tanh" in text
    assert "h1 -> h3    Conv 3 x 3, padding 1, soft-pool 2" in text
    assert "per phase" in text


def test_the_picture_of_a_net(tmp_path: Path) -> None:
    net = mixed(activation={"out": Activation("a<b", torch.tanh), "*": "tanh"})
    picture = net.draw()
    root = ElementTree.fromstring(picture)
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {*net.names, "x", "4 x 3 x 3", "a<b"} <= set(texts)
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [f"{c}: {c.describe()}" for c in net.connections]
    boxes = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) == len(net.names) + 1
    assert len({box.get("fill") for box in boxes}) == len(net.groups) + 1
    assert len({(box.get("x"), box.get("y")) for box in boxes}) == len(boxes)
    picture.save(tmp_path / "net.svg")
    assert (tmp_path / "net.svg").read_text(encoding="utf-8") == picture == picture._repr_svg_()
