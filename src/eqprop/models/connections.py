"""Connections between layers: each adds <post, A(pre)> to Phi and knows A, its feedback and its weight gradient.

    Dense("h1", "out")                                       every neuron to every neuron
    Conv("x", "h1", kernel=3, padding=1, pool=2)             convolution, then pooling
    Transposed("code", "image", kernel=3, stride=2)          transposed convolution
    Skip("h1", "h3")                                         neuron to neuron; a 1 x 1 skip is Conv(..., kernel=1)
    Lateral("h1")                                            symmetric, within a layer

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
from typing import ClassVar, Literal, NamedTuple, TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from eqprop.autodiff import derivative
from eqprop.messages import unknown
from eqprop.models.convolutional import pool as max_pool
from eqprop.models.convolutional import unpool as max_unpool

Shape = tuple[int, ...]
Theta = Mapping[str, Tensor]
Pooling = Literal["max", "average", "soft"]


class Weight(NamedTuple):
    """A parameter to draw: its shape, and the fans its initial range is computed from."""

    shape: Shape
    fan_in: int
    fan_out: int


class Ends(NamedTuple):
    """The activity at the two ends of a connection, (B, ...) each."""

    pre: Tensor
    post: Tensor


@dataclass(frozen=True)
class Connection:
    """<post, A(pre)> as a term of Phi, A given by `forward`. A frozen description: the network holds the parameters.

    pre, post   names of layers, "x" being the input; the same twice for a connection within a layer
    name        of its weight; by default made from the layers' names
    gain        factor of the initial range of its weights

    A subclass gives `forward` and, where it learns, `weights`. `feedback`, `weight_gradient` and `both` are there to be
    written by hand where speed matters.
    """

    pre: str
    post: str
    name: str | None = field(default=None, kw_only=True)
    gain: float = field(default=1.0, kw_only=True)

    linear: ClassVar[bool] = False
    """Whether A is linear in pre: contrasts then take differences before sums at both ends."""

    @property
    def piecewise_linear(self) -> bool:
        """Whether the feedback does not change with small changes of pre."""
        return self.linear

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

    def both(self, ends: Ends, theta: Theta) -> tuple[Tensor, Tensor]:
        """A(pre) and the feedback, for connections that can share work between them."""
        return self.forward(ends.pre, theta), self.feedback(ends.post, ends.pre, theta)

    def contrast(self, plus: Ends, minus: Ends, theta: Theta) -> dict[str, Tensor]:
        """d<post, A(pre)>/dtheta at plus minus the same at minus, summed over the samples.

        Differences are taken before sums, so that a small change is not lost in the rounding of two large numbers.
        """
        if not theta:
            return {}
        moved = self.weight_gradient(plus.post - minus.post, plus.pre, theta)
        if plus.pre is minus.pre:
            return moved
        if self.linear:
            other = self.weight_gradient(minus.post, plus.pre - minus.pre, theta)
            return {name: moved[name] + other[name] for name in moved}
        one, two = (self.weight_gradient(minus.post, ends.pre, theta) for ends in (plus, minus))
        return {name: moved[name] + (one[name] - two[name]) for name in moved}

    def operations(self, pre: Shape, post: Shape) -> int:
        """Multiplications and additions of A for one sample; the feedback takes as many. 0 if unknown."""
        return 0

    @final
    def autodiff_feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        """The oracle of `feedback`. Differentiable again where gradients are recorded."""
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            # A view, so that only this use of pre counts: within a layer post is the same tensor.
            leaf = _leaf(pre)
            out = self.forward(leaf, theta)
            found = derivative((post.reshape_as(out) * out).sum(), (leaf,), create_graph=recording)[0]
        return torch.zeros_like(pre) if found is None else found

    @final
    def autodiff_weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        """The oracle of `weight_gradient`."""
        if not theta:
            return {}
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = {name: _leaf(value) for name, value in theta.items()}
            out = self.forward(pre, leaves)
            found = derivative((post.reshape_as(out) * out).sum(), tuple(leaves.values()), create_graph=recording)
        pairs = zip(theta.items(), found, strict=True)
        return {name: torch.zeros_like(value) if g is None else g for (name, value), g in pairs}

    def __str__(self) -> str:
        return f"{self.pre} -> {self.post}"

    def describe(self) -> str:
        """What it is, in a few words."""
        return type(self).__name__


def _leaf(v: Tensor) -> Tensor:
    view = v.view_as(v)
    return view if view.requires_grad else view.requires_grad_()


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
        return (_rows(post, theta["W"]) @ theta["W"]).view_as(pre)

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        return {"W": _rows(post, theta["W"]).mT @ _rows(pre, theta["W"])}

    def operations(self, pre: Shape, post: Shape) -> int:
        return 2 * math.prod(pre) * math.prod(post)


def _rows(layer: Tensor, weight: Tensor) -> Tensor:
    """(B, n), or (R, B, n) where the weight is that of stacked networks, (R, n, m)."""
    return layer.flatten(weight.dim() - 1)


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

    def both(self, ends: Ends, theta: Theta) -> tuple[Tensor, Tensor]:
        half = self.forward(ends.pre, theta)
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


@final
@dataclass(frozen=True)
class Conv(Connection):
    """A(pre) = P(W * pre), a convolution and the pooling of its result.

    kernel, stride, padding, groups     as of torch's conv2d; channels are those of the layers
    pool                                zones of pool x pool, side by side; 1: none
    pooling                             "max", "average" or "soft": sum of z exp(z) over sum of exp(z)
    """

    kernel: int = field(default=3, kw_only=True)
    stride: int = field(default=1, kw_only=True)
    padding: int = field(default=0, kw_only=True)
    groups: int = field(default=1, kw_only=True)
    pool: int = field(default=1, kw_only=True)
    pooling: Pooling = field(default="max", kw_only=True)

    stacks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(unknown("pooling", self.pooling, POOLINGS))
        _check_window(self, self.kernel, self.stride, self.padding, self.groups)
        if not isinstance(self.pool, int) or self.pool < 1:
            raise ValueError(f"Conv {self} has pool={self.pool!r}; expected the side of a zone, 1 for no pooling.")

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        window = self.kernel**2
        inputs, outputs = pre[0] // self.groups, post[0]
        return {"W": Weight((outputs, inputs, self.kernel, self.kernel), inputs * window, outputs * window)}

    @property
    def piecewise_linear(self) -> bool:
        return self.pool == 1 or self.pooling != "soft"

    def maps(self, pre: Shape, post: Shape) -> Shape:
        """The shape before pooling."""
        sides = ((n + 2 * self.padding - self.kernel) // self.stride + 1 for n in pre[1:])
        return (post[0], *sides)

    def check(self, pre: Shape, post: Shape) -> None:
        _check_images(self, pre, post, self.groups)
        channels, *sides = self.maps(pre, post)
        _check_result(self, pre, post, (channels, *(n // self.pool for n in sides)))

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return self._respond(pre, theta).values

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        return self._back(self._spread(post, pre, theta), pre, theta)

    def both(self, ends: Ends, theta: Theta) -> tuple[Tensor, Tensor]:
        found = self._respond(ends.pre, theta)
        return found.values, self._back(found.spread(ends.post), ends.pre, theta)

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        return {"W": self._pair(self._spread(post, pre, theta), pre, theta)}

    def contrast(self, plus: Ends, minus: Ends, theta: Theta) -> dict[str, Tensor]:
        """As of a linear connection, between the layer before pooling and pre."""
        moved = self._spread(plus.post - minus.post, plus.pre, theta)
        if plus.pre is minus.pre:
            return {"W": self._pair(moved, plus.pre, theta)}
        before = self._spread(minus.post, minus.pre, theta)
        if not self._spreads_evenly:
            moved = moved + (self._spread(minus.post, plus.pre, theta) - before)
        return {"W": self._pair(moved, plus.pre, theta) + self._pair(before, plus.pre - minus.pre, theta)}

    def operations(self, pre: Shape, post: Shape) -> int:
        return 2 * math.prod(self.maps(pre, post)) * (pre[0] // self.groups) * self.kernel**2

    def describe(self) -> str:
        changed = [f"{self.kernel} x {self.kernel}"]
        changed += [f"stride {self.stride}"] if self.stride > 1 else []
        changed += [f"padding {self.padding}"] if self.padding else []
        changed += [f"{self.groups} groups"] if self.groups > 1 else []
        changed += [f"{self.pooling}-pool {self.pool}"] if self.pool > 1 else []
        return f"Conv {', '.join(changed)}"

    @property
    def _spreads_evenly(self) -> bool:
        """Whether the way back through the pooling is the same at every pre."""
        return self.pool == 1 or self.pooling == "average"

    def _respond(self, pre: Tensor, theta: Theta) -> Pooled:
        h, w, networks = _joined(pre, theta["W"])
        z = F.conv2d(h, w, None, self.stride, self.padding, groups=networks * self.groups)
        return POOLINGS[self.pooling](_parted(z, theta["W"]), self.pool)

    def _spread(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        """d<post, P(z)>/dz at z = W * pre; without pooling, or with averages, z is not needed."""
        if self.pool == 1:
            return post
        if self._spreads_evenly:
            sides = ((n + 2 * self.padding - self.kernel) // self.stride + 1 for n in pre.shape[-2:])
            return _spread_evenly(post, self.pool, tuple(sides))
        return self._respond(pre, theta).spread(post)

    def _back(self, z: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        joined, w, networks = _joined(z, theta["W"])
        # What a stride left over at the far side comes back as zeros.
        rest = [(n + 2 * self.padding - self.kernel) % self.stride for n in pre.shape[-2:]]
        groups = networks * self.groups
        return _parted(F.conv_transpose2d(joined, w, None, self.stride, self.padding, rest, groups), theta["W"])

    def _pair(self, z: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        """d sum(z . (W * pre)) / dW."""
        (h, w, networks), (joined, _, _) = _joined(pre, theta["W"]), _joined(z, theta["W"])
        grad = conv2d_weight(h, w.shape, joined, self.stride, self.padding, 1, networks * self.groups)
        return grad.view_as(theta["W"])


@final
@dataclass(frozen=True)
class Transposed(Connection):
    """A(pre) = W~ * pre, a transposed convolution: with a stride the layer post is larger than pre.

    kernel, stride, padding, rest, groups   as of torch's conv_transpose2d, rest being its output_padding
    """

    kernel: int = field(default=3, kw_only=True)
    stride: int = field(default=1, kw_only=True)
    padding: int = field(default=0, kw_only=True)
    rest: int = field(default=0, kw_only=True)
    groups: int = field(default=1, kw_only=True)

    linear: ClassVar[bool] = True
    stacks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_window(self, self.kernel, self.stride, self.padding, self.groups)
        if not isinstance(self.rest, int) or not 0 <= self.rest < self.stride:
            raise ValueError(f"Transposed {self} has rest={self.rest!r}; expected a number from 0 below the stride.")

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        window = self.kernel**2
        inputs, outputs = pre[0], post[0] // self.groups
        return {"W": Weight((inputs, outputs, self.kernel, self.kernel), inputs * window, outputs * window)}

    def check(self, pre: Shape, post: Shape) -> None:
        _check_images(self, pre, post, self.groups)
        sides = ((n - 1) * self.stride - 2 * self.padding + self.kernel + self.rest for n in pre[1:])
        _check_result(self, pre, post, (post[0], *sides))

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        h, w, networks = _joined(pre, theta["W"])
        groups = networks * self.groups
        return _parted(F.conv_transpose2d(h, w, None, self.stride, self.padding, self.rest, groups), theta["W"])

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        h, w, networks = _joined(post, theta["W"])
        return _parted(F.conv2d(h, w, None, self.stride, self.padding, groups=networks * self.groups), theta["W"])

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        (h, w, networks), (z, _, _) = _joined(post, theta["W"]), _joined(pre, theta["W"])
        grad = conv2d_weight(h, w.shape, z, self.stride, self.padding, 1, networks * self.groups)
        return {"W": grad.view_as(theta["W"])}

    def operations(self, pre: Shape, post: Shape) -> int:
        return 2 * math.prod(pre) * (post[0] // self.groups) * self.kernel**2

    def describe(self) -> str:
        return f"Transposed {self.kernel} x {self.kernel}, stride {self.stride}"


def _joined(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, int]:
    """Stacked networks as groups of one convolution: (R, B, C, H, W) -> (B, R C, H, W), the weights likewise."""
    if weight.dim() == 4:
        return h, weight, 1
    return h.transpose(0, 1).flatten(1, 2), weight.flatten(0, 1), weight.shape[0]


def _parted(z: Tensor, weight: Tensor) -> Tensor:
    return z if weight.dim() == 4 else z.unflatten(1, (weight.shape[0], -1)).transpose(0, 1)


class Pooled(NamedTuple):
    """P(z), and h -> d<h, P(z)>/dz."""

    values: Tensor
    spread: Callable[[Tensor], Tensor]


def _max(z: Tensor, size: int) -> Pooled:
    if size == 1:
        return Pooled(z, lambda h: h)
    found = max_pool(z, size)
    return Pooled(found.values, lambda h: max_unpool(h, found, size))


def _average(z: Tensor, size: int) -> Pooled:
    sides = (z.shape[-2], z.shape[-1])
    return Pooled(_zones(z, size).mean((-3, -1)), lambda h: _spread_evenly(h, size, sides))


def _spread_evenly(h: Tensor, size: int, sides: tuple[int, ...]) -> Tensor:
    return _unzoned(_each_zone(h / size**2).expand(*h.shape[:-1], size, h.shape[-1], size), sides)


def _soft(z: Tensor, size: int) -> Pooled:
    """P = sum_i p_i z_i, p = softmax(z) over the zone; dP/dz_i = p_i (1 + z_i - P). Also of complex numbers."""
    zones = _zones(z, size)  # (..., H, size, W, size)
    # The shift keeps exp in range and falls out again.
    powers = torch.exp(zones - zones.real.detach().amax((-3, -1), keepdim=True))
    p = powers / powers.sum((-3, -1), keepdim=True)
    values = (p * zones).sum((-3, -1))
    slopes = p * (1.0 + zones - _each_zone(values))
    return Pooled(values, lambda h: _unzoned(slopes * _each_zone(h), (z.shape[-2], z.shape[-1])))


def _zones(z: Tensor, size: int) -> Tensor:
    """(..., H size + rest, W size + rest) -> (..., H, size, W, size), the rests left out."""
    height, width = (n // size for n in z.shape[-2:])
    cut = z[..., : height * size, : width * size]
    return cut.unflatten(-1, (width, size)).unflatten(-3, (height, size))


def _each_zone(values: Tensor) -> Tensor:
    """(..., H, W) -> (..., H, 1, W, 1)."""
    return values.unsqueeze(-1).unsqueeze(-3)


def _unzoned(zones: Tensor, sides: tuple[int, ...]) -> Tensor:
    """The inverse of `_zones`, the rests filled with zeros."""
    z = zones.flatten(-4, -3).flatten(-2, -1)
    return F.pad(z, (0, sides[1] - z.shape[-1], 0, sides[0] - z.shape[-2]))


POOLINGS: dict[str, Callable[[Tensor, int], Pooled]] = {"max": _max, "average": _average, "soft": _soft}


def _check_window(c: Connection, kernel: int, stride: int, padding: int, groups: int) -> None:
    if any(not isinstance(n, int) for n in (kernel, stride, padding, groups)) or (
        min(kernel, stride, groups) < 1 or not 0 <= padding < kernel
    ):
        raise ValueError(
            f"{type(c).__name__} {c} has kernel={kernel!r}, stride={stride!r}, padding={padding!r}, groups={groups!r}; "
            "expected whole numbers, at least 1, and a padding from 0 below the kernel."
        )


def _check_images(c: Connection, pre: Shape, post: Shape, groups: int) -> None:
    name = type(c).__name__
    if len(pre) != 3 or len(post) != 3:
        raise ValueError(
            f"{name} {c} joins layers of {pre} and {post}; expected (channels, height, width) at both ends. Use Dense "
            "where a layer is flat."
        )
    if pre[0] % groups or post[0] % groups:
        raise ValueError(f"{name} {c} has groups={groups}, which do not divide {pre[0]} and {post[0]} channels.")


def _check_result(c: Connection, pre: Shape, post: Shape, got: Shape) -> None:
    if got != post:
        raise ValueError(
            f"{type(c).__name__} {c} makes {got} of {pre}, and the layer {c.post} is {post}. Change the layer, or the "
            "connection's kernel, stride, padding or pooling."
        )


CONNECTIONS: dict[str, type[Connection]] = {
    "dense": Dense,
    "conv": Conv,
    "transposed": Transposed,
    "skip": Skip,
    "lateral": Lateral,
}
"""Connections by the names that files give them."""

Kind = TypeVar("Kind", bound=type[Connection])


def register(name: str) -> Callable[[Kind], Kind]:
    """Make a connection of your own known by a name, so that files can ask for it."""

    def add(kind: Kind) -> Kind:
        if CONNECTIONS.get(name, kind) is not kind:
            raise ValueError(f"The connection {name!r} is {CONNECTIONS[name].__name__} already. Choose another name.")
        CONNECTIONS[name] = kind
        return kind

    return add
