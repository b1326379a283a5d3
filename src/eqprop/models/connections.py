"""Connections between layers: each adds <post, A(pre)> to Phi and knows A, its feedback and its weight gradient.

    Dense("h1", "out")                                       every neuron to every neuron
    Conv("x", "h1", kernel=3, padding=1, pool=2)             convolution, then pooling
    Transposed("code", "image", kernel=3, stride=2)          transposed convolution
    Skip("h1", "h3")                                         neuron to neuron; a 1 x 1 skip is Conv(..., kernel=1)
    Lateral("h1")                                            symmetric, within a layer
    Dense("h1", "h2", feedback_gain=0.1)                     weaker on the way back: then there is no Phi
    Dense("h1", "h2", untied=True)                           weights of its own on the way back

A connection of your own needs only its forward map; the rest follows by automatic differentiation of <post, A(pre)>,
which is also what the hand-written formulas are tested against:

    @register("gated")
    @dataclass(frozen=True)
    class Gated(Connection):
        def weights(self, pre, post):
            return {"W": Weight((*post, *pre), fan_in=pre[0], fan_out=post[0])}

        def forward(self, pre, theta):
            return pre @ torch.tanh(theta["W"]).mT
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor, nn

from eqprop.autodiff import derivative, leaf

Shape = tuple[int, ...]
Theta = Mapping[str, Tensor]
InitFunction = Callable[[str, tuple[int, ...], torch.Generator], Tensor]
Init = Literal["glorot", "default"] | InitFunction

MOST_WEIGHTS = 500_000_000
"""The largest network built, in weights: 2 GB in float32, as much again for each gradient."""

CONNECTIONS: dict[str, type[Connection]] = {}
"""Connections by the names that files give them."""

Kind = TypeVar("Kind", bound="type[Connection]")


def register(name: str) -> Callable[[Kind], Kind]:
    """Make a connection of your own known by a name, so that files can ask for it."""

    def add(kind: Kind) -> Kind:
        if CONNECTIONS.get(name, kind) is not kind:
            raise ValueError(f"The connection {name!r} is {CONNECTIONS[name].__name__} already. Choose another name.")
        CONNECTIONS[name] = kind
        return kind

    return add


class Weight(NamedTuple):
    """A parameter to draw: its shape, and the fans and the gain that set its initial range."""

    shape: Shape
    fan_in: int
    fan_out: int
    gain: float = 1.0


class Ends(NamedTuple):
    """The activity at the two ends of a connection, (B, ...) each."""

    post: Tensor
    pre: Tensor


@dataclass(frozen=True)
class Connection:
    """<post, A(pre)> as a term of Phi, A given by `forward`. A frozen description: the network holds the parameters.

    pre, post   names of layers, "x" being the input; the same twice for a connection within a layer
    name        of its weight; by default made from the layers' names
    gain        factor of the initial range of its weights
    forward_gain, feedback_gain     factors of A(pre) on its way to post and of the feedback on its way to pre
    untied      whether the feedback has weights of its own, "B", shaped as "W"; of a convolution it still passes the
                pooling as the way there did, so that it follows the maxima of W * pre
    feedback_angle  degrees from W at which those begin, B = sin a R + cos a W with R drawn as W is; 90: R alone

    Where both gains are equal and the weights tied, the term of Phi is that gain times <post, A(pre)>; else a net with
    this connection has no Phi (see `Graph.conservative`).

    A subclass gives `forward` and, where it learns, `weights`. `feedback`, `weight_gradient` and `both` are there to be
    written by hand where speed matters.
    """

    pre: str
    post: str
    name: str | None = field(default=None, kw_only=True)
    gain: float = field(default=1.0, kw_only=True)
    forward_gain: float = field(default=1.0, kw_only=True)
    feedback_gain: float = field(default=1.0, kw_only=True)
    untied: bool = field(default=False, kw_only=True)
    feedback_angle: float = field(default=90.0, kw_only=True)

    linear: ClassVar[bool] = False
    """Whether A is linear in pre: contrasts then take differences before sums at both ends."""

    @property
    def conservative(self) -> bool:
        """Whether the way back is the derivative of the way there."""
        return self.forward_gain == self.feedback_gain and not self.untied

    @property
    def piecewise_linear(self) -> bool:
        """Whether the feedback does not change with small changes of pre."""
        return self.linear

    unties: ClassVar[bool | None] = None
    """Whether its way back can have weights of its own; None: where it is linear."""

    stacks: ClassVar[bool] = False
    """Whether its formulas also serve stacked networks, (R, B, ...), whose weights have a leading dimension."""

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        """The parameters between layers of these shapes, by short name ("W"); none by default."""
        return {}

    def check(self, pre: Shape, post: Shape) -> None:
        """Raise ValueError if A does not lead from a layer of shape `pre` to one of shape `post`."""

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        """A(pre), shaped as post or with its neurons in a row. theta holds the parameters by their short names."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(pre, theta), shaped as the layer post.")

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        """d<post, A(pre)>/dpre, shaped as pre."""
        return self.autodiff_feedback(post, pre, theta)

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        """d<post, A(pre)>/dtheta, summed over the samples."""
        return self.autodiff_weight_gradient(post, pre, theta)

    def returning(self, names: Mapping[str, str], own: str) -> dict[str, str]:
        """The names of the feedback's parameters where it has weights of its own: in the place of W, or beside it."""
        return {**names, "W": own}

    def back_gradient(self, post: Tensor, pre: Tensor, moved: Tensor, theta: Theta) -> Tensor:
        """d<feedback(post) at pre, moved>/dB, summed over the samples; theta holds what the feedback reads."""
        return self.weight_gradient(post, moved, theta)["W"]

    def both(self, post: Tensor, pre: Tensor, theta: Theta) -> tuple[Tensor, Tensor]:
        """A(pre) and the feedback, for connections that can share work between them."""
        return self.forward(pre, theta), self.feedback(post, pre, theta)

    def passed(self, pre: Tensor, theta: Theta) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """A(pre), and post -> the feedback, where post is only known after A(pre)."""
        return self.forward(pre, theta), lambda post: self.feedback(post, pre, theta)

    def contrast(self, plus: Ends, minus: Ends, theta: Theta, change: Ends | None = None) -> dict[str, Tensor]:
        """d<post, A(pre)>/dtheta at plus minus the same at minus, summed over the samples.

        Differences are taken before sums, so that a small change is not lost in the rounding of two large numbers.
        `change` is plus - minus where it is known better than by subtracting them.
        """
        if not theta:
            return {}
        given, change = change is not None, changed(plus, minus) if change is None else change
        moved = self.weight_gradient(change.post, plus.pre, theta)
        if plus.pre is minus.pre:
            return moved
        if self.linear:
            other = self.weight_gradient(minus.post, change.pre, theta)
            return {name: moved[name] + other[name] for name in moved}
        ends = (minus.pre.double() + change.pre, minus.pre.double()) if given else (plus.pre, minus.pre)
        post, wide = minus.post.to(ends[0].dtype), {name: v.to(ends[0].dtype) for name, v in theta.items()}
        one, two = (self.weight_gradient(post, pre, wide) for pre in ends)
        return {name: moved[name] + (one[name] - two[name]).to(moved[name].dtype) for name in moved}

    def around(self, at: Ends, theta: Theta, back: Theta) -> ConnectionDeparture:
        """What A and the feedback change by when the layers move from here; `back` holds the feedback's parameters."""
        return LinearDeparture(self, theta, back) if self.linear else WideDeparture(self, at, theta, back)

    def operations(self, pre: Shape, post: Shape) -> int:
        """Multiplications and additions of A for one sample; the feedback takes as many. 0 if unknown."""
        return 0

    @final
    def autodiff_feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        """The oracle of `feedback`. Differentiable again where gradients are recorded."""
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = leaf(pre)  # within a layer post is the same tensor, which does not count
            out = self.forward(inputs, theta)
            found = derivative((post.reshape_as(out) * out).sum(), (inputs,), create_graph=recording)[0]
        return torch.zeros_like(pre) if found is None else found

    @final
    def autodiff_weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        """The oracle of `weight_gradient`."""
        if not theta:
            return {}
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = {name: leaf(value) for name, value in theta.items()}
            out = self.forward(pre, leaves)
            found = derivative((post.reshape_as(out) * out).sum(), tuple(leaves.values()), create_graph=recording)
        pairs = zip(theta.items(), found, strict=True)
        return {name: torch.zeros_like(value) if g is None else g for (name, value), g in pairs}

    def __str__(self) -> str:
        return f"{self.pre} -> {self.post}"

    def describe(self) -> str:
        """What it is, in a few words."""
        return type(self).__name__


def changed(plus: Ends, minus: Ends) -> Ends:
    """plus - minus at both ends; an end that is the same tensor has not moved."""
    return Ends(plus.post - minus.post, plus.pre if plus.pre is minus.pre else plus.pre - minus.pre)


def fed(total: Tensor | None) -> Tensor:
    """The sum of a layer's inputs, which every layer has."""
    assert total is not None, "every layer is fed"
    return total


class ConnectionDeparture(Protocol):
    """A connection's maps around a state, as functions of how far its layers have moved from there."""

    def forward(self, pre: Tensor) -> Tensor:
        """A(pre* + pre) - A(pre*)."""

    def feedback(self, post: Tensor, pre: Tensor) -> Tensor:
        """The same of the feedback."""

    def both(self, post: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """Both, for connections that can share work between them."""


@dataclass(frozen=True)
class LinearDeparture:
    """Of a connection linear in pre: the maps themselves."""

    connection: Connection
    theta: Theta
    back: Theta

    def forward(self, pre: Tensor) -> Tensor:
        return self.connection.forward(pre, self.theta)

    def feedback(self, post: Tensor, pre: Tensor) -> Tensor:
        return self.connection.feedback(post, pre, self.back)

    def both(self, post: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        if self.theta is self.back:
            return self.connection.both(post, pre, self.theta)
        return self.forward(pre), self.feedback(post, pre)


class WideDeparture:
    """Of any other: two values in float64 and their difference, which is exact to 1e-16 of the values."""

    def __init__(self, connection: Connection, at: Ends, theta: Theta, back: Theta) -> None:
        self.connection, self.dtype = connection, at.pre.dtype
        self.at = Ends(at.post.double(), at.pre.double())
        self.theta, self.back = ({name: v.double() for name, v in part.items()} for part in (theta, back))
        self.known = connection.forward(self.at.pre, self.theta)
        self.known_back = connection.feedback(*self.at, self.back)

    def forward(self, pre: Tensor) -> Tensor:
        return (self.connection.forward(self.at.pre + pre, self.theta) - self.known).to(self.dtype)

    def feedback(self, post: Tensor, pre: Tensor) -> Tensor:
        new = self.connection.feedback(self.at.post + post, self.at.pre + pre, self.back)
        return (new - self.known_back).to(self.dtype)

    def both(self, post: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward(pre), self.feedback(post, pre)


@register("dense")
@final
@dataclass(frozen=True)
class Dense(Connection):
    """A(pre) = W pre, layers flattened: every neuron to every neuron."""

    linear: ClassVar[bool] = True
    stacks: ClassVar[bool] = True

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        rows, columns = math.prod(post), math.prod(pre)
        return {"W": Weight((rows, columns), columns, rows)}

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return _rows(pre, theta["W"]) @ theta["W"].mT

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        back = _rows(post, theta["W"]) @ theta["W"]
        return back if back.dim() == pre.dim() else back.view_as(pre)

    def both(self, post: Tensor, pre: Tensor, theta: Theta) -> tuple[Tensor, Tensor]:
        weight = theta["W"]
        forward, back = _rows(pre, weight) @ weight.mT, _rows(post, weight) @ weight
        return forward, back if back.dim() == pre.dim() else back.view_as(pre)

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        return {"W": _rows(post, theta["W"]).mT @ _rows(pre, theta["W"])}

    def operations(self, pre: Shape, post: Shape) -> int:
        return 2 * math.prod(pre) * math.prod(post)


def _rows(layer: Tensor, weight: Tensor) -> Tensor:
    """(B, n), or (R, B, n) where the weight is that of stacked networks, (R, n, m)."""
    return layer if layer.dim() == weight.dim() else layer.flatten(weight.dim() - 1)


@register("lateral")
@final
@dataclass(frozen=True)
class Lateral(Connection):
    """S within a layer, symmetric, without self-connections: S = (W + W^T)/2 off the diagonal.

    Phi gets 1/2 s . S s and the layer S s. Half of that is A(s), half its feedback. Give the layer's name once.
    """

    post: str = ""

    linear: ClassVar[bool] = True
    stacks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.post not in ("", self.pre):
            raise ValueError(f"Lateral({self.pre!r}, {self.post!r}) joins two layers; it is within one. Use Dense.")
        object.__setattr__(self, "post", self.pre)

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        n = math.prod(pre)
        return {"W": Weight((n, n), n, n)}

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return (_rows(pre, theta["W"]) @ (0.5 * _symmetric(theta["W"]))).view_as(pre)

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        return self.forward(post, theta)

    def both(self, post: Tensor, pre: Tensor, theta: Theta) -> tuple[Tensor, Tensor]:
        half = self.forward(pre, theta)
        return half, half

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        pairs = _rows(post, theta["W"]).mT @ _rows(pre, theta["W"])
        return {"W": 0.5 * _symmetric(pairs)}

    def operations(self, pre: Shape, post: Shape) -> int:
        return math.prod(pre) ** 2  # half of a product, which serves as A and as the feedback


def _symmetric(weight: Tensor) -> Tensor:
    """(W + W^T)/2 with zeros on the diagonal."""
    even = 0.5 * (weight + weight.mT)
    return even - torch.diag_embed(even.diagonal(dim1=-2, dim2=-1))


@register("skip")
@final
@dataclass(frozen=True)
class Skip(Connection):
    """A(pre) = w pre, neuron to neuron; one w per channel of an image, per neuron of a flat layer.

    learned     False fixes w at `gain`
    """

    learned: bool = field(default=True, kw_only=True)

    linear: ClassVar[bool] = True
    stacks: ClassVar[bool] = True

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        return {"W": Weight((1, pre[0], *[1] * (len(pre) - 1)), 1, 1)} if self.learned else {}

    def check(self, pre: Shape, post: Shape) -> None:
        if pre != post:
            raise ValueError(
                f"Skip {self} joins a layer of {pre} to one of {post}; expected the same shape. Change the layers, or "
                "use Conv(..., kernel=1, stride=...)."
            )

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return theta["W"] * pre if self.learned else self.gain * pre

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        return self.forward(post, theta)

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        if not self.learned:
            return {}
        shared = [n for n, size in enumerate(theta["W"].shape) if size == 1]  # samples and, of images, places
        return {"W": (post * pre).sum(shared, keepdim=True)}

    def operations(self, pre: Shape, post: Shape) -> int:
        return 2 * math.prod(pre)


def add_parameters(
    module: nn.Module, wanted: Mapping[str, Weight], init: Init, seed: int | None, dtype: torch.dtype | None
) -> None:
    """Draw and register the wanted parameters in the given order. Glorot sets biases (one dimension) to zero.

    They are drawn on the CPU in float64, then rounded, so a seed gives the same weights on every device and in every
    precision.
    """
    if (count := sum(math.prod(p.shape) for p in wanted.values())) > MOST_WEIGHTS:
        raise ValueError(f"The net has {count:,} weights; at most {MOST_WEIGHTS:,} are built. Make it smaller.")
    if not (init in ("glorot", "default") or callable(init)):
        raise ValueError(f"init is {init!r}; expected 'glorot', 'default' or a function (name, shape, generator).")
    # Without a seed it comes from torch's global generator, so torch.manual_seed applies.
    chosen = int(torch.randint(2**62, ())) if seed is None else seed
    source = torch.Generator().manual_seed(chosen)
    for name, p in wanted.items():
        value = _draw(name, p, init, source).to(dtype or torch.get_default_dtype())
        module.register_parameter(name, nn.Parameter(value))


def _draw(name: str, p: Weight, init: Init, source: torch.Generator) -> Tensor:
    if callable(init):
        value = init(name, p.shape, source).detach()
        if tuple(value.shape) != p.shape:
            raise ValueError(f"init returned shape {tuple(value.shape)} for {name}; expected {p.shape}.")
        return value
    if init == "glorot":
        bound = math.sqrt(6.0 / (p.fan_in + p.fan_out)) if len(p.shape) > 1 else 0.0
    else:
        bound = 1.0 / math.sqrt(p.fan_in)
    uniform = torch.rand(p.shape, generator=source, dtype=torch.float64)
    return (2.0 * uniform - 1.0) * (p.gain * bound)
