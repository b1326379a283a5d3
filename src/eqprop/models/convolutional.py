"""Convolutional nets in the prototypical setting: convolution and pooling, then fully connected layers  [exp:conv]."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from eqprop.dynamics import NudgeSite, PrimitiveDynamics, set_nudge_site
from eqprop.models.activations import Activation, activation
from eqprop.models.init import Init, Wanted, add_parameters
from eqprop.models.layered import layered_parameters
from eqprop.state import LayerParameters, State, zero_state


class Pooled(NamedTuple):
    """P(z), with the positions of the maxima in z and the size of z for the inverse."""

    values: Tensor
    indices: Tensor
    size: tuple[int, int]


def conv(h: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """W * h + b  [defconv]."""
    if weight.dim() == 4:
        return F.conv2d(h, weight, bias, padding=padding)
    networks = weight.shape[0]
    flat_bias = None if bias is None else bias.flatten()
    z = F.conv2d(_join(h), weight.flatten(0, 1), flat_bias, padding=padding, groups=networks)
    return _part(z, networks)


def conv_transpose(z: Tensor, weight: Tensor, padding: int) -> Tensor:
    """W~ * z: convolution with the flipped kernel, padded to restore the size before the convolution."""
    if weight.dim() == 4:
        return F.conv_transpose2d(z, weight, padding=padding)
    networks = weight.shape[0]
    return _part(F.conv_transpose2d(_join(z), weight.flatten(0, 1), padding=padding, groups=networks), networks)


def conv_weight(h: Tensor, z: Tensor, weight: Tensor, padding: int) -> Tensor:
    """z * h: the derivative of sum(z . (W * h)) with respect to W, summed over the batch  [lma3]."""
    if weight.dim() == 4:
        return conv2d_weight(h, weight.shape, z, padding=padding)
    networks = weight.shape[0]
    shape = weight.flatten(0, 1).shape
    grad = conv2d_weight(_join(h), shape, _join(z), padding=padding, groups=networks)
    return grad.unflatten(0, (networks, -1))


def pool(z: Tensor, size: int) -> Pooled:
    """P(z): the maximum of each size x size window, and its position."""
    values, indices = F.max_pool2d(z.flatten(0, -4), size, return_indices=True)
    lead = z.shape[:-3]
    return Pooled(values.unflatten(0, lead), indices.unflatten(0, lead), (z.shape[-2], z.shape[-1]))


def unpool(h: Tensor, pooled: Pooled, size: int) -> Tensor:
    """P^-1(h): h at the positions of the maxima, zero elsewhere  [invpool]."""
    spread = F.max_unpool2d(h.flatten(0, -4), pooled.indices.flatten(0, -4), (size, size), output_size=pooled.size)
    return spread.unflatten(0, h.shape[:-3])


def _join(h: Tensor) -> Tensor:
    """(R, B, C, H, W) -> (B, R C, H, W)."""
    return h.transpose(0, 1).flatten(1, 2)


def _part(z: Tensor, networks: int) -> Tensor:
    """(B, R C, H, W) -> (R, B, C, H, W)."""
    return z.unflatten(1, (networks, -1)).transpose(0, 1)


class ConvDrive(NamedTuple):
    """The part that is constant during a phase: the pooled response to x and the positions of its maxima."""

    visible: Pooled


@final
class Convolutional(PrimitiveDynamics):
    """Flat layers s0 (output), s1, ... over convolutional layers h0, h1, ..., over the image x = h^{N_conv}.

    Phi = sum_n s^n . Wfc_{n,n+1} . s^{n+1} + sum_n h^n . P(Wconv_{n,n+1} * h^{n+1} + b),   s_{t+1} = sigma(dPhi/ds),
    where s^{N_fc} is h0 flattened and P is max-pooling; biases are added to each layer's input, before pooling in
    convolutions. The inverse pooling uses the arg-max of the current state.

    input_shape     (channels, height, width) of x
    channels        of h0, h1, ..., from the output side, as the layers are numbered; (64, 32) in the paper
    flat            sizes of s0, s1, ...; (10,) in the paper; empty, (), if a readout reads h0
    nudge_site      "outside" is sigma(dPhi/ds) + push, the paper's; "inside" is sigma(dPhi/ds + push)
    """

    bipartite = True  # except that the inverse pooling uses the arg-max of the layer's own state

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
        init: Init = "default",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.image, self.input_shape = tuple(input_shape), tuple(input_shape)
        self.channels, self.flat = tuple(channels), tuple(flat)
        self.kernel, self.padding, self.pool, self.bias = kernel, padding, pool, bias
        self.activation = _activation(activation)
        self.maps = self._map_shapes()
        set_nudge_site(self, nudge_site)
        add_parameters(self, self._wanted(), init, seed, dtype)

    def _map_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """The shapes of h0, h1, ..., computed from the input; raises if one would be empty."""
        if not self.channels or min((*self.channels, *self.flat)) < 1:
            raise ValueError(
                f"channels is {self.channels} and flat is {self.flat}; expected positive sizes from the output side, "
                "with at least one convolution, such as channels=(64, 32), flat=(10,)."
            )
        if (
            len(self.image) != 3
            or min(self.image) < 1
            or self.kernel < 1
            or self.pool < 1
            or not 0 <= self.padding < self.kernel
        ):
            raise ValueError(
                f"input_shape {self.input_shape}, kernel {self.kernel}, padding {self.padding}, pool {self.pool}; "
                "expected (channels, height, width), positive sizes, and a padding below the kernel."
            )
        _, height, width = self.image
        shapes: list[tuple[int, int, int]] = []
        for count in reversed(self.channels):
            height, width = ((side + 2 * self.padding - self.kernel + 1) // self.pool for side in (height, width))
            if height < 1 or width < 1:
                raise ValueError(
                    f"An image of {self.input_shape} is too small: nothing is left for layer "
                    f"h{len(self.channels) - len(shapes) - 1}. Use fewer convolutional layers, a smaller kernel or "
                    "pool, or padding."
                )
            shapes.append((count, height, width))
        return tuple(reversed(shapes))

    def _wanted(self) -> list[Wanted]:
        window = (self.kernel, self.kernel)
        flat = [(pair, ()) for pair in pairwise((*self.flat, math.prod(self.maps[0])))]
        maps = [(pair, window) for pair in pairwise((*self.channels, self.image[0]))]
        wanted = []
        for ((rows, columns), kernel), (names, bias) in zip([*flat, *maps], self.layer_parameters, strict=True):
            fans = (columns * math.prod(kernel), rows * math.prod(kernel))
            wanted.append(Wanted(names[0], (rows, columns, *kernel), *fans))
            if bias is not None:
                wanted.append(Wanted(bias, (rows,), *fans))
        return wanted

    @property
    def layer_names(self) -> tuple[str, ...]:
        return (*(f"s{n}" for n in range(len(self.flat))), *(f"h{n}" for n in range(len(self.channels))))

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return convolutional_parameters(len(self.flat), len(self.channels), self.bias)

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, [*((n,) for n in self.flat), *self.maps], x.shape[:-3])

    def filters(self, n: int) -> tuple[Tensor, Tensor | None]:
        """Wconv_{n,n+1} and its bias."""
        return getattr(self, f"Wconv{n}{n + 1}"), getattr(self, f"bconv{n}") if self.bias else None

    def weight(self, n: int) -> Tensor:
        return getattr(self, f"Wfc{n}{n + 1}")

    def response(self, h: Tensor, n: int) -> Pooled:
        """P(Wconv_{n,n+1} * h + b) with the positions of its maxima."""
        return pool(conv(h, *self.filters(n), self.padding), self.pool)

    def split(self, s: State) -> tuple[State, State]:
        return s[: len(self.flat)], s[len(self.flat) :]

    def primitive(self, x: Tensor, s: State) -> Tensor:
        flat, maps = self.split(s)
        chain = (*flat, maps[0].flatten(-3))
        phi = torch.zeros((), dtype=x.dtype, device=x.device)
        for n in range(len(flat)):
            inputs = chain[n + 1] @ self.weight(n).mT
            if self.bias:
                inputs = inputs + getattr(self, f"bfc{n}").unsqueeze(-2)
            phi = phi + (chain[n] * inputs).sum(-1)
        for n, (h, below) in enumerate(zip(maps, (*maps[1:], x), strict=True)):
            phi = phi + (h * self.response(below, n).values).flatten(-3).sum(-1)
        return phi

    def drive(self, x: Tensor) -> ConvDrive:
        return ConvDrive(self.response(x, len(self.channels) - 1))

    def gradient(self, drive: ConvDrive, s: State) -> State:
        return self._gradient(drive, s, range(len(s)))

    def group_gradient(self, drive: ConvDrive, s: State, layers: Collection[int]) -> State:
        return self._gradient(drive, s, layers)

    def _gradient(self, drive: ConvDrive, s: State, wanted: Collection[int]) -> State:
        """dPhi/ds for the wanted layers; the others are returned unchanged."""
        flat, maps = self.split(s)
        chain = (*flat, maps[0].flatten(-3))
        out = list(s)
        first = len(flat)
        for n in range(first):
            if n in wanted:
                inputs = chain[n + 1] @ self.weight(n).mT
                if self.bias:
                    inputs = inputs + getattr(self, f"bfc{n}").unsqueeze(-2)
                out[n] = inputs if n == 0 else inputs + chain[n - 1] @ self.weight(n - 1)
        responses = [
            self.response(maps[n + 1], n) if first + n in wanted or first + n + 1 in wanted else None
            for n in range(len(maps) - 1)
        ]
        for n in range(len(maps)):
            if first + n not in wanted:
                continue
            pooled = drive.visible if n == len(maps) - 1 else responses[n]
            assert pooled is not None, "computed above for every wanted layer"
            feedback = self._feedback(flat, maps, responses, n)
            out[first + n] = pooled.values if feedback is None else pooled.values + feedback
        return tuple(out)

    def _feedback(self, flat: State, maps: State, responses: Sequence[Pooled | None], n: int) -> Tensor | None:
        """The input of h_n from the layer nearer the output: F^-1(Wfc^T s) or W~ * P^-1(h_{n-1})  [lma2]."""
        if n == 0 and not flat:
            return None
        if n == 0:
            return (flat[-1] @ self.weight(len(flat) - 1)).unflatten(-1, self.maps[0])
        pooled = responses[n - 1]
        assert pooled is not None, "computed for every wanted layer"
        return conv_transpose(unpool(maps[n - 1], pooled, self.pool), self.filters(n - 1)[0], self.padding)

    @property
    def output_bounds(self) -> tuple[float, float] | None:
        return self.activation.bounds

    def squash(self, s: State) -> State:
        return tuple(self.activation(layer) for layer in s)

    def half_step(self, drive: ConvDrive, s: State, parity: int) -> State:
        wanted = range(parity, len(s), 2)
        moved = self._gradient(drive, s, wanted)
        return tuple(self.activation(v) if n in wanted else v for n, v in enumerate(moved))

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """(1/B) (P^-1(h+^n) * h+^{n+1} - P^-1(h-^n) * h-^{n+1}) for filters  [deltaconv], flat layers as [delta-fc].

        Differences come first, du v+ + u- dv: the sums over samples and places are far larger than what they differ in.
        """
        samples = x.shape[-4]
        pairs = self._flat_contrast(s_plus, s_minus) | self._map_contrast(x, s_plus, s_minus)
        return {name: g / samples for name, g in pairs.items()}

    def _flat_contrast(self, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        plus, minus = ((*flat, maps[0].flatten(-3)) for flat, maps in map(self.split, (s_plus, s_minus)))
        out = {}
        for n in range(len(self.flat)):
            moved = plus[n] - minus[n]
            out[f"Wfc{n}{n + 1}"] = moved.mT @ plus[n + 1] + minus[n].mT @ (plus[n + 1] - minus[n + 1])
            if self.bias:
                out[f"bfc{n}"] = moved.sum(-2)
        return out

    def _map_contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        (_, plus), (_, minus) = self.split(s_plus), self.split(s_minus)
        out = {}
        for n in range(len(self.channels)):
            name, (weight, _) = f"Wconv{n}{n + 1}", self.filters(n)
            moved = plus[n] - minus[n]
            if n + 1 == len(self.channels):
                out[name] = conv_weight(x, unpool(moved, self.response(x, n), self.pool), weight, self.padding)
            else:
                after, before = (unpool(maps[n], self.response(maps[n + 1], n), self.pool) for maps in (plus, minus))
                out[name] = conv_weight(plus[n + 1], after - before, weight, self.padding)
                out[name] = out[name] + conv_weight(plus[n + 1] - minus[n + 1], before, weight, self.padding)
            if self.bias:
                out[f"bconv{n}"] = moved.sum((-4, -2, -1))
        return out


# The constructor's argument of the same name shadows the function.
_activation = activation


def convolutional_parameters(flat: int, maps: int, bias: bool = True) -> tuple[LayerParameters, ...]:
    """Wfc01 and bfc0, ... for the flat layers, then Wconv01 and bconv0, ... for the maps."""
    return layered_parameters(flat, bias, "fc") + layered_parameters(maps, bias, "conv")
