"""Convolutions and pooling as connections, and the paper's convolutional nets made of them  [exp:conv]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, final

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from eqprop.dynamics import NudgeSite
from eqprop.messages import unknown
from eqprop.models.activations import Activation, activation
from eqprop.models.connections import (
    Connection,
    ConnectionDeparture,
    Dense,
    Ends,
    Init,
    Shape,
    Theta,
    Weight,
    changed,
    register,
)
from eqprop.models.graph import INPUT, Graph, Wiring
from eqprop.models.settings import ModelSettings, from_input
from eqprop.settings import Finite, Positive, about

Image = tuple[int, int, int]
Pooling = Literal["max", "average", "soft"]


class Window(NamedTuple):
    """How a kernel moves over an image, as of torch's conv2d."""

    padding: int = 0
    stride: int = 1
    groups: int = 1


def conv(h: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """W * h + b  [defconv]."""
    joined, w, networks = _joined(h, weight)
    b = bias if bias is None or networks == 1 else bias.flatten()
    return _parted(F.conv2d(joined, w, b, window.stride, window.padding, 1, networks * window.groups), weight)


def conv_transpose(z: Tensor, weight: Tensor, window: Window, rest: Sequence[int] = (0, 0)) -> Tensor:
    """W~ * z: convolution with the flipped kernel, back to the size before the convolution, which left out a `rest`."""
    joined, w, networks = _joined(z, weight)
    back = F.conv_transpose2d(joined, w, None, window.stride, window.padding, rest, networks * window.groups)
    return _parted(back, weight)


def conv_weight(h: Tensor, z: Tensor, weight: Tensor, window: Window) -> Tensor:
    """z * h: the derivative of sum(z . (W * h)) with respect to W, summed over the batch  [lma3]."""
    if h.is_complex() or z.is_complex():  # torch has no such gradient on the CPU
        a, b, c, d = (conv_weight(u, v, weight.real, window) for u in _parts(h) for v in _parts(z))
        return torch.complex(a - d, b + c)
    (joined, w, networks), (out, _, _) = _joined(h, weight), _joined(z, weight)
    grad = conv2d_weight(joined, w.shape, out, window.stride, window.padding, 1, networks * window.groups)
    return grad.view_as(weight)


def _joined(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, int]:
    """Stacked networks as groups of one convolution: (R, B, C, H, W) -> (B, R C, H, W), the weights likewise."""
    if weight.dim() == 4:
        return h, weight, 1
    return h.transpose(0, 1).flatten(1, 2), weight.flatten(0, 1), weight.shape[0]


def _parted(z: Tensor, weight: Tensor) -> Tensor:
    """(B, R C, H, W) -> (R, B, C, H, W)."""
    return z if weight.dim() == 4 else z.unflatten(1, (weight.shape[0], -1)).transpose(0, 1)


def _parts(h: Tensor) -> tuple[Tensor, Tensor]:
    return (h.real, h.imag) if h.is_complex() else (h, torch.zeros_like(h))


class Pooled(NamedTuple):
    """P(z), and h -> d<h, P(z)>/dz."""

    values: Tensor
    spread: Callable[[Tensor], Tensor]


def max_pool(z: Tensor, size: int) -> Pooled:
    """The maximum of each size x size zone; h goes back to the positions of the maxima, zero elsewhere  [invpool]."""
    if size == 1:
        return Pooled(z, lambda h: h)
    lead, sides = z.shape[:-3], (z.shape[-2], z.shape[-1])
    values, indices = F.max_pool2d(z.flatten(0, -4), size, return_indices=True)

    def spread(h: Tensor) -> Tensor:
        return F.max_unpool2d(h.flatten(0, -4), indices, (size, size), output_size=sides).unflatten(0, lead)

    return Pooled(values.unflatten(0, lead), spread)


def average_pool(z: Tensor, size: int) -> Pooled:
    sides = (z.shape[-2], z.shape[-1])
    return Pooled(_zones(z, size).mean((-3, -1)), lambda h: _spread_evenly(h, size, sides))


def _spread_evenly(h: Tensor, size: int, sides: tuple[int, ...]) -> Tensor:
    return _unzoned(_each_zone(h / size**2).expand(*h.shape[:-1], size, h.shape[-1], size), sides)


def soft_pool(z: Tensor, size: int) -> Pooled:
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


POOLINGS: dict[str, Callable[[Tensor, int], Pooled]] = {"max": max_pool, "average": average_pool, "soft": soft_pool}


class Moved(NamedTuple):
    """P(z + dz) - P(z), and (h, dh) -> how far d<h, P(z)>/dz moves when h moves by dh too."""

    values: Tensor
    spread: Callable[[Tensor, Tensor], Tensor]


PoolDeparture = Callable[[Tensor], Moved]
"""dz -> what a pooling around a z changes by."""


def max_departure(z: Tensor, size: int) -> PoolDeparture:
    """P(z + dz) - P(z) = max over the zone of (z - P(z)) + dz: dz alone where the maximum stays where it is.

    Where two places tie, the one that dz raises more becomes the maximum, the one-sided derivative. Moves that are
    equal there too leave it at the first, as in `max_pool`.
    """
    found = max_pool(z, size)
    if size == 1:
        return lambda dz: Moved(dz, lambda h, dh: dh)
    sides = (z.shape[-2], z.shape[-1])
    below = z - _unzoned(_each_zone(found.values).expand(_zones(z, size).shape), sides)

    def moved(dz: Tensor) -> Moved:
        now = max_pool(below + dz, size)
        # The first difference is zero but where the maximum has moved.
        return Moved(now.values, lambda h, dh: (now.spread(h) - found.spread(h)) + now.spread(dh))

    return moved


def average_departure(z: Tensor, size: int) -> PoolDeparture:
    """An average is linear."""

    def moved(dz: Tensor) -> Moved:
        now = average_pool(dz, size)
        return Moved(now.values, lambda h, dh: now.spread(dh))

    return moved


def soft_departure(z: Tensor, size: int) -> PoolDeparture:
    """P = sum p z: dP = sum dp (z - P) + p' dz, dp = p expm1(dz - log sum p exp dz)."""
    zones, sides = _zones(z, size), (z.shape[-2], z.shape[-1])
    powers = torch.exp(zones - zones.amax((-3, -1), keepdim=True))
    p = powers / powers.sum((-3, -1), keepdim=True)
    off = zones - (p * zones).sum((-3, -1), keepdim=True)
    slopes = p * (1.0 + off)

    def moved(dz: Tensor) -> Moved:
        move = _zones(dz, size)
        mean = (p * move).sum((-3, -1), keepdim=True)
        apart = move - mean
        dp = p * torch.expm1(apart - torch.log1p((p * torch.expm1(apart)).sum((-3, -1), keepdim=True)))
        # sum dp = 0 and sum p = 1 take P and the mean of the moves out of the sums.
        change = mean + (dp * off + (p + dp) * apart).sum((-3, -1), keepdim=True)
        dslopes = dp * (1.0 + off) + (p + dp) * (move - change)

        def spread(h: Tensor, dh: Tensor) -> Tensor:
            return _unzoned(dslopes * _each_zone(h) + (slopes + dslopes) * _each_zone(dh), sides)

        return Moved(change.squeeze(-1).squeeze(-2), spread)

    return moved


DEPARTURES: dict[str, Callable[[Tensor, int], PoolDeparture]] = {
    "max": max_departure,
    "average": average_departure,
    "soft": soft_departure,
}


@register("conv")
@final
@dataclass(frozen=True)
class Conv(Connection):
    """A(pre) = P(W * pre), a convolution and the pooling of its result.

    kernel, stride, padding, groups     as of torch's conv2d; channels are those of the layers
    pool                                zones of pool x pool, side by side; 1: none
    pooling                             "max", "average" or "soft": sum of z exp(z) over sum of exp(z)
    bias                                A(pre) = P(W * pre + b). Up to rounding it is the layer's own bias, which it
                                        replaces in `Convolutional`: every pooling here has P(z + b) = P(z) + b.
    """

    kernel: int = field(default=3, kw_only=True)
    stride: int = field(default=1, kw_only=True)
    padding: int = field(default=0, kw_only=True)
    groups: int = field(default=1, kw_only=True)
    pool: int = field(default=1, kw_only=True)
    pooling: Pooling = field(default="max", kw_only=True)
    bias: bool = field(default=False, kw_only=True)

    stacks: ClassVar[bool] = True
    unties: ClassVar[bool | None] = True

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(unknown("pooling", self.pooling, POOLINGS))
        _check_window(self, self.kernel, self.window)
        if not isinstance(self.pool, int) or self.pool < 1:
            raise ValueError(f"Conv {self} has pool={self.pool!r}; expected the side of a zone, 1 for no pooling.")

    @property
    def window(self) -> Window:
        return Window(self.padding, self.stride, self.groups)

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        area, inputs, outputs = self.kernel**2, pre[0] // self.groups, post[0]
        fans = (inputs * area, outputs * area)
        found = {"W": Weight((outputs, inputs, self.kernel, self.kernel), *fans)}
        return found | ({"b": Weight((outputs,), *fans)} if self.bias else {})

    @property
    def piecewise_linear(self) -> bool:
        return self.pool == 1 or self.pooling != "soft"

    def maps(self, pre: Shape, post: Shape) -> Shape:
        """The shape before pooling."""
        return (post[0], *self._sides(pre))

    def _sides(self, pre: Shape) -> tuple[int, ...]:
        return tuple((n + 2 * self.padding - self.kernel) // self.stride + 1 for n in pre[-2:])

    def check(self, pre: Shape, post: Shape) -> None:
        _check_images(self, pre, post, self.groups)
        _check_result(self, pre, post, (post[0], *(n // self.pool for n in self._sides(pre))))

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return self._respond(pre, theta).values

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        return self.back(self._spread(post, pre, theta), pre, theta)

    def both(self, post: Tensor, pre: Tensor, theta: Theta) -> tuple[Tensor, Tensor]:
        found = self._respond(pre, theta)
        return found.values, self.back(found.spread(post), pre, theta)

    def passed(self, pre: Tensor, theta: Theta) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        found = self._respond(pre, theta)
        return found.values, lambda post: self.back(found.spread(post), pre, theta)

    def returning(self, names: Mapping[str, str], own: str) -> dict[str, str]:
        return {**names, "B": own}

    def back_gradient(self, post: Tensor, pre: Tensor, moved: Tensor, theta: Theta) -> Tensor:
        return conv_weight(moved, self._spread(post, pre, theta), theta["W"], self.window)

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        return self._by_weights(post, conv_weight(pre, self._spread(post, pre, theta), theta["W"], self.window))

    def contrast(self, plus: Ends, minus: Ends, theta: Theta, change: Ends | None = None) -> dict[str, Tensor]:
        """As of a linear connection, between the layer before pooling and pre."""
        given, weight = change is not None, theta["W"]
        change = changed(plus, minus) if change is None else change
        if plus.pre is minus.pre:
            return self._by_weights(
                change.post, conv_weight(plus.pre, self._spread(change.post, plus.pre, theta), weight, self.window)
            )
        if given and not self._spreads_evenly:
            before, moved = self._departed(change, minus, theta)
        else:
            before = self._spread(minus.post, minus.pre, theta)
            moved = self._moved(plus, minus, before, theta, change)
        total = conv_weight(plus.pre, moved, weight, self.window)
        return self._by_weights(change.post, total + conv_weight(change.pre, before, weight, self.window))

    def _moved(self, plus: Ends, minus: Ends, before: Tensor, theta: Theta, change: Ends) -> Tensor:
        """How far d<post, P(z)>/dz moved; `before` is the one at minus."""
        if self._moves_values:
            return self._spread(plus.post, plus.pre, theta) - before
        moved = self._spread(change.post, plus.pre, theta)
        return moved if self._spreads_evenly else moved + (self._spread(minus.post, plus.pre, theta) - before)

    def _departed(self, change: Ends, minus: Ends, theta: Theta) -> tuple[Tensor, Tensor]:
        """d<post, P(z)>/dz at minus and how far it moved, from the change itself."""
        z = conv(minus.pre, theta["W"], theta.get("b"), self.window)
        before = POOLINGS[self.pooling](z, self.pool).spread(minus.post)
        moved = DEPARTURES[self.pooling](z, self.pool)(conv(change.pre, theta["W"], None, self.window))
        return before, moved.spread(minus.post, change.post)

    def around(self, at: Ends, theta: Theta, back: Theta) -> ConnectionDeparture:
        return ConvDeparture(self, at, back)  # which holds W too

    def _by_weights(self, post: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """With the gradient of b, all of post: in each zone the slopes of the pooling sum to 1."""
        return {"W": weight, "b": post.sum((-4, -2, -1))} if self.bias else {"W": weight}

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

    @property
    def _moves_values(self) -> bool:
        """Whether the way back copies numbers, so that differences after it are as exact as before."""
        return self.pool > 1 and self.pooling == "max"

    def _respond(self, pre: Tensor, theta: Theta) -> Pooled:
        return POOLINGS[self.pooling](conv(pre, theta["W"], theta.get("b"), self.window), self.pool)

    def _spread(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        """d<post, P(z)>/dz at z = W * pre; without pooling, or with averages, z is not needed."""
        if self.pool == 1:
            return post
        if self._spreads_evenly:
            return _spread_evenly(post, self.pool, self._sides(tuple(pre.shape)))
        return self._respond(pre, theta).spread(post)

    def back(self, z: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        """W~ * z, shaped as pre; B~ * z where the way back has weights of its own."""
        # What a stride left over at the far side comes back as zeros.
        rest = [(n + 2 * self.padding - self.kernel) % self.stride for n in pre.shape[-2:]]
        return conv_transpose(z, theta.get("B", theta["W"]), self.window, rest)


class ConvDeparture:
    """A convolution and its pooling around a state: nothing is subtracted that is nearly equal."""

    def __init__(self, connection: Conv, at: Ends, theta: Theta) -> None:
        self.connection, self.at, self.theta = connection, at, theta
        z = conv(at.pre, theta["W"], theta.get("b"), connection.window)
        self.pool = DEPARTURES[connection.pooling](z, connection.pool)

    def forward(self, pre: Tensor) -> Tensor:
        return self._moved(pre).values

    def feedback(self, post: Tensor, pre: Tensor) -> Tensor:
        return self._back(self._moved(pre), post)

    def both(self, post: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        moved = self._moved(pre)
        return moved.values, self._back(moved, post)

    def _moved(self, pre: Tensor) -> Moved:
        return self.pool(conv(pre, self.theta["W"], None, self.connection.window))

    def _back(self, moved: Moved, post: Tensor) -> Tensor:
        return self.connection.back(moved.spread(self.at.post, post), self.at.pre, self.theta)


@register("transposed")
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
        _check_window(self, self.kernel, self.window)
        if not isinstance(self.rest, int) or not 0 <= self.rest < self.stride:
            raise ValueError(f"Transposed {self} has rest={self.rest!r}; expected a number from 0 below the stride.")

    @property
    def window(self) -> Window:
        return Window(self.padding, self.stride, self.groups)

    def weights(self, pre: Shape, post: Shape) -> dict[str, Weight]:
        area, inputs, outputs = self.kernel**2, pre[0], post[0] // self.groups
        return {"W": Weight((inputs, outputs, self.kernel, self.kernel), inputs * area, outputs * area)}

    def check(self, pre: Shape, post: Shape) -> None:
        _check_images(self, pre, post, self.groups)
        sides = ((n - 1) * self.stride - 2 * self.padding + self.kernel + self.rest for n in pre[1:])
        _check_result(self, pre, post, (post[0], *sides))

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return conv_transpose(pre, theta["W"], self.window, (self.rest, self.rest))

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        return conv(post, theta["W"], None, self.window)

    def weight_gradient(self, post: Tensor, pre: Tensor, theta: Theta) -> dict[str, Tensor]:
        return {"W": conv_weight(post, pre, theta["W"], self.window)}

    def operations(self, pre: Shape, post: Shape) -> int:
        return 2 * math.prod(pre) * (post[0] // self.groups) * self.kernel**2

    def describe(self) -> str:
        return f"Transposed {self.kernel} x {self.kernel}, stride {self.stride}"


def _check_window(c: Connection, kernel: int, window: Window) -> None:
    padding, stride, groups = window
    if any(not isinstance(n, int) for n in (kernel, *window)) or (
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


@final
class Convolutional(Graph):
    """Flat layers s0 (output), s1, ... over convolutional layers h0, h1, ..., over the image x = h^{N_conv}.

    Phi = sum_n s^n . Wfc_{n,n+1} . s^{n+1} + sum_n h^n . P(Wconv_{n,n+1} * h^{n+1} + b),   s_{t+1} = sigma(dPhi/ds),
    where s^{N_fc} is h0 flattened and P is max-pooling; biases are added to each layer's input, before pooling in
    convolutions. The inverse pooling uses the arg-max of the current state. Contrasts are those of [deltaconv] for
    filters and of [delta-fc] for flat layers.

    activation  sigma, by name or as a function
    kernel      side of a filter
    padding     zeros around a map
    pool        side of the pooling
    bias        whether there are biases
    untied      whether layers have weights of their own on the way back, Bfc01, Bconv01, ...; there is no Phi then.
                The inverse pooling is that of the way there
    feedback_angle  degrees from the weights at which those begin; 90: independent of them
    init        how weights are drawn
    seed        of the weights; None: torch's own stream
    dtype       of the weights; None: torch's default
    input_shape     (channels, height, width) of x
    channels        of h0, h1, ..., from the output side, as the layers are numbered; (64, 32) in the paper
    flat            sizes of s0, s1, ...; (10,) in the paper; empty, (), if a readout reads h0
    nudge_site      "outside" is sigma(dPhi/ds) + push, the paper's; "inside" is sigma(dPhi/ds + push)
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int] = (1, 28, 28),
        channels: Sequence[int] = (64, 32),
        flat: Sequence[int] = (10,),
        activation: str | Activation | Callable[[Tensor], Tensor] = "hard-sigmoid",
        *,
        kernel: int = 5,
        padding: int = 0,
        pool: int = 2,
        bias: bool = True,
        nudge_site: NudgeSite = "outside",
        untied: bool = False,
        feedback_angle: float = 90.0,
        init: Init = "default",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        image, channels, flat = tuple(input_shape), tuple(channels), tuple(flat)
        _check_channels(channels, flat)
        maps = _map_shapes(image, channels, kernel, padding, pool)
        layers: dict[str, Shape] = {f"s{n}": (size,) for n, size in enumerate(flat)}
        layers |= {f"h{n}": shape for n, shape in enumerate(maps)}
        links: list[Connection] = []
        for post, pre in pairwise((*layers, INPUT)):
            kind, n = post[0], int(post[1:])
            back: dict[str, Any] = {"untied": untied and pre != INPUT, "feedback_angle": feedback_angle}
            if kind == "s":
                links.append(Dense(pre, post, name=f"Wfc{n}{n + 1}", **back))
            else:
                name = f"Wconv{n}{n + 1}"
                links.append(Conv(pre, post, kernel=kernel, padding=padding, pool=pool, bias=bias, name=name, **back))
        sigma = _activation(activation)
        net = Wiring(image, layers, tuple(links[::-1]), (sigma,) * len(layers), bias=bias, nudge_site=nudge_site)
        super().__init__(net, init, seed, dtype)
        self.image, self.channels, self.flat, self.maps = image, channels, flat, maps
        self.kernel, self.padding, self.pool, self.activation = kernel, padding, pool, sigma

    def weight_name(self, c: Connection, short: str) -> str:
        return f"bconv{c.post[1:]}" if short == "b" else super().weight_name(c, short)

    def bias_name(self, layer: str) -> str | None:
        return f"bfc{layer[1:]}" if self.bias and layer[0] == "s" else None

    def _mean(self, total: Tensor, samples: int) -> Tensor:
        return total / samples  # not times 1/B: recorded runs depend on the last bit


# The constructor's argument of the same name shadows the function.
_activation = activation


@final
class ConvolutionalNet(ModelSettings, frozen=True):
    """`Convolutional` as data."""

    input_shape: Annotated[tuple[Positive, Positive, Positive], about("Shape of an image, channels first.")] = (
        1,
        28,
        28,
    )
    channels: Annotated[tuple[Positive, ...], about("Maps per convolution, from the output side.")] = (64, 32)
    flat: Annotated[tuple[Positive, ...], about("Neurons per fully connected layer, the output first.")] = (10,)
    activation: Annotated[str, about("Activation of every layer, or a table by layer.")] = "hard-sigmoid"
    kernel: Annotated[int, about("Side of the kernels.", ge=1)] = 5
    padding: Annotated[int, about("Zeros around an image.", ge=0)] = 0
    pool: Annotated[int, about("Side of the zones that are pooled.", ge=1)] = 2
    bias: Annotated[bool, about("Whether layers have biases.")] = True
    untied: Annotated[bool, about("Whether the way back has weights of its own, Bfc01, Bconv01, ...")] = False
    feedback_angle: Annotated[Finite, about("Degrees from the weights at which those begin; 90: independent.")] = 90.0
    kind: Literal["convolutional"] = "convolutional"

    network = Convolutional

    def without_output(self) -> ConvolutionalNet:
        return msgspec.structs.replace(self, flat=self.flat[1:])

    def __str__(self) -> str:
        maps = f"{from_input(self.channels)} maps of {self.kernel} x {self.kernel}"
        return f"{maps}, pool {self.pool}, {from_input(self.flat)}"


def _check_channels(channels: Shape, flat: Shape) -> None:
    if not channels or min((*channels, *flat)) < 1:
        raise ValueError(
            f"channels is {channels} and flat is {flat}; expected positive sizes from the output side, with at least "
            "one convolution, such as channels=(64, 32), flat=(10,)."
        )


def _map_shapes(image: Shape, channels: Shape, kernel: int, padding: int, pool: int) -> tuple[Image, ...]:
    """The shapes of h0, h1, ..., computed from the input; raises if one would be empty."""
    if len(image) != 3 or min(image) < 1 or kernel < 1 or pool < 1 or not 0 <= padding < kernel:
        raise ValueError(
            f"input_shape {image}, kernel {kernel}, padding {padding}, pool {pool}; expected (channels, height, "
            "width), positive sizes, and a padding below the kernel."
        )
    _, height, width = image
    shapes: list[Image] = []
    for count in reversed(channels):
        height, width = ((side + 2 * padding - kernel + 1) // pool for side in (height, width))
        if height < 1 or width < 1:
            raise ValueError(
                f"An image of {image} is too small: nothing is left for layer h{len(channels) - len(shapes) - 1}. Use "
                "fewer convolutional layers, a smaller kernel or pool, or padding."
            )
        shapes.append((count, height, width))
    return tuple(reversed(shapes))
