"""Pooling and convolutions of images in jax.numpy.

Of the ways to write them these are fast within a loop: pooling by slices and comparisons, its inverse by comparing
places, convolutions with channels last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
"""A jax array, or what stands for one while jax traces."""


class Zones(NamedTuple):
    """Which place of each pooling zone holds its maximum: `places` counts along the image's rows, as torch does."""

    places: Array
    window: PoolingZones


class PoolingZones(NamedTuple):
    """How pooling zones lie on an image, (height, width) each; `sides` are the image's."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    sides: tuple[int, int]
    results: tuple[int, int]

    @property
    def apart(self) -> bool:
        """Whether zones lie side by side, so that a place belongs to one at most."""
        return self.stride == self.size and self.padding == (0, 0) and self.dilation == (1, 1)

    def offsets(self) -> Iterable[tuple[int, int]]:
        """The places within a zone, in the order in which torch compares them."""
        return itertools.product(range(self.size[0]), range(self.size[1]))

    def numbers(self, offset: tuple[int, int]) -> Array:
        """The places in the image of one place within every zone, (results)."""
        rows, columns = (
            np.arange(n, dtype=np.int32) * stride + o * dilation - padding
            for n, stride, o, dilation, padding in zip(
                self.results, self.stride, offset, self.dilation, self.padding, strict=True
            )
        )
        return rows[:, None] * self.sides[1] + columns


def _pair(v: int | Sequence[int], default: Sequence[int] = ()) -> tuple[int, int]:
    given = [v] if isinstance(v, int) else list(v) or list(default)
    return given[0], given[-1]


def _window(
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> PoolingZones:
    sides = _pair(shape[-2:])
    k, p, d = _pair(size), _pair(padding), _pair(dilation)
    s = _pair(stride, k)
    counts = [_results(*one, ceil) for one in zip(sides, k, s, p, d, strict=True)]
    return PoolingZones(k, s, p, d, sides, _pair(counts))


def _results(side: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    """How many zones fit along a side; with `ceil`, the last may begin inside and end outside."""
    room = side + 2 * p - d * (k - 1) - 1
    count = (-(-room // s) if ceil else room // s) + 1
    return count - 1 if ceil and (count - 1) * s >= side + p else count


def _cut(x: Array, window: PoolingZones, fill: float) -> list[Array]:
    """For each place within a zone, the values there of every zone; `fill` outside the image."""
    span = [
        (n - 1) * s + (k - 1) * d + 1
        for n, s, k, d in zip(window.results, window.stride, window.size, window.dilation, strict=True)
    ]
    beyond = [max(0, need - side - p) for need, side, p in zip(span, window.sides, window.padding, strict=True)]
    if any(window.padding) or any(beyond):
        edges = [(p, after, 0) for p, after in zip(window.padding, beyond, strict=True)]
        x = lax.pad(x, jnp.asarray(fill, x.dtype), [*[(0, 0, 0)] * (x.ndim - 2), *edges])
    found = []
    for a, b in window.offsets():
        rows, columns = (
            slice(o * d, o * d + (n - 1) * s + 1, s)
            for o, d, n, s in zip((a, b), window.dilation, window.results, window.stride, strict=True)
        )
        found.append(x[..., rows, columns])
    return found


def max_pool(x: Array, *window: Any, **options: Any) -> tuple[Array, Zones]:
    """By slices and comparisons: the first of equal maxima, and any NaN, as torch chooses."""
    w = _window(x.shape, *window, **options)
    values = _cut(x, w, -math.inf)
    first, *others = w.offsets()
    best, places = values[0], jnp.broadcast_to(w.numbers(first), values[0].shape)
    for offset, v in zip(others, values[1:], strict=True):
        here = w.numbers(offset)
        better = (v > best) | jnp.isnan(v)
        best, places = jnp.where(better, v, best), jnp.where(better, here, places)
    return best, Zones(places, w)


def _spread(h: Array, zones: Zones) -> Array:
    """h at the places of the maxima, zero elsewhere; where zones overlap, the sum."""
    w = zones.window
    return _spread_apart(h, zones) if w.apart else sum(_shifted(h, zones, o) for o in w.offsets())


def _spread_apart(h: Array, zones: Zones) -> Array:
    """Compare every place with that of its zone's maximum."""
    w = zones.window
    rows, columns = (n * k for n, k in zip(w.results, w.size, strict=True))

    def each(v: Array) -> Array:
        wide = jnp.broadcast_to(v[..., :, None, :, None], (*v.shape[:-1], w.size[0], v.shape[-1], w.size[1]))
        return wide.reshape(*v.shape[:-2], rows, columns)

    numbers = (np.arange(rows, dtype=np.int32)[:, None] * w.sides[1]) + np.arange(columns, dtype=np.int32)
    found = jnp.where(each(zones.places) == numbers, each(h), jnp.zeros((), h.dtype))
    return _fitted(found, w.sides)


def _shifted(h: Array, zones: Zones, offset: tuple[int, int]) -> Array:
    """The part of h whose maxima are at one place within their zones, put there."""
    w = zones.window
    zero = jnp.zeros((), h.dtype)
    part = jnp.where(zones.places == w.numbers(offset), h, zero)
    starts = [o * d - p for o, d, p in zip(offset, w.dilation, w.padding, strict=True)]
    edges = [
        (start, side - start - (n - 1) * s - 1, s - 1)
        for start, side, n, s in zip(starts, w.sides, w.results, w.stride, strict=True)
    ]
    return lax.pad(part, zero, [*[(0, 0, 0)] * (h.ndim - 2), *edges])


def _fitted(v: Array, sides: tuple[int, int]) -> Array:
    """Zeros added below and to the right, or what is too much cut off."""
    edges = [(0, side - n, 0) for side, n in zip(sides, v.shape[-2:], strict=True)]
    return (
        v if not any(e[1] for e in edges) else lax.pad(v, jnp.zeros((), v.dtype), [*[(0, 0, 0)] * (v.ndim - 2), *edges])
    )


def unpool(h: Array, zones: Zones | Array, sides: Sequence[int]) -> Array:
    if isinstance(zones, Zones) and zones.window.sides == tuple(sides) and zones.window.apart:
        return _spread_apart(h, zones)
    places = zones.places if isinstance(zones, Zones) else zones
    lead = h.shape[:-2]
    flat, put = (v.reshape(math.prod(lead), -1) for v in (places, h))
    empty = jnp.zeros((math.prod(lead), math.prod(sides)), h.dtype)
    return empty.at[jnp.arange(len(flat))[:, None], flat].set(put).reshape(*lead, *sides)


def max_pool_backward(
    grad: Array, x: Array, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, zones: Zones | Array
) -> Array:
    window = _window(x.shape, size, stride, padding, dilation, ceil)
    return _spread(grad, zones if isinstance(zones, Zones) else Zones(zones, window))


def avg_pool(
    x: Array,
    size: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> Array:
    w = _window(x.shape, size, stride, padding, (1,), ceil)
    return sum(_cut(x, w, 0.0)) / _pool_counts(w, count_padding, divisor).astype(x.dtype)


def avg_pool_backward(
    grad: Array, x: Array, size: Any, stride: Any, padding: Any, ceil: bool, count_padding: bool, divisor: int | None
) -> Array:
    w = _window(x.shape, size, stride, padding, (1,), ceil)
    part = grad / _pool_counts(w, count_padding, divisor).astype(grad.dtype)
    return jax.vjp(lambda v: sum(_cut(v, w, 0.0)), x)[1](part)[0]


def _pool_counts(w: PoolingZones, count_padding: bool, divisor: int | None) -> Any:
    """What each zone's sum is divided by."""
    if divisor:
        return np.full(w.results, divisor)
    each = []
    for n, s, k, p, side in zip(w.results, w.stride, w.size, w.padding, w.sides, strict=True):
        start = np.arange(n) * s - p
        end = np.minimum(start + k, side + p)
        each.append(end - start if count_padding else np.minimum(end, side) - np.maximum(start, 0))
    return each[0][:, None] * each[1]


def adaptive_avg_pool(x: Array, sides: Sequence[int]) -> Array:
    """Means over zones that share the sides as evenly as can be: a product with constant matrices."""
    rows, columns = (_shares(n, m).astype(x.dtype) for n, m in zip(x.shape[-2:], sides, strict=True))
    return rows @ x @ columns.T


def adaptive_avg_pool_backward(grad: Array, x: Array) -> Array:
    rows, columns = (_shares(n, m).astype(x.dtype) for n, m in zip(x.shape[-2:], grad.shape[-2:], strict=True))
    return rows.T @ grad @ columns


def _shares(side: int, results: int) -> np.ndarray[Any, Any]:
    """(results, side) the weight of each place in each mean."""
    found = np.zeros((results, side))
    for i in range(results):
        start, end = i * side // results, -(-(i + 1) * side // results)
        found[i, start:end] = 1.0 / (end - start)
    return found


def nearest_back(grad: Array, results: Sequence[int], sides: Sequence[int], *scales: float | None) -> Array:
    """The derivative of enlarging an image by its nearest values: the sum of what each place was repeated to."""
    found = []
    for n, side, scale in zip(results, sides[-2:], scales or (None, None), strict=True):
        step = 1.0 / scale if scale else side / n
        nearest = np.minimum(np.floor(np.arange(n) * step), side - 1)
        found.append((nearest[:, None] == np.arange(side)).astype(grad.dtype))
    rows, columns = found
    return rows.T @ grad @ columns


def convolution(
    x: Array,
    w: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    rest: Sequence[int],
    groups: int,
) -> Array:
    """With channels last inside: XLA's fast path in a loop, which it takes for no other layout."""
    n = x.ndim - 2
    stride, padding, dilation, rest = (
        list(v) * n if len(v) == 1 else list(v) for v in (stride, padding, dilation, rest)
    )
    if transposed:
        y = _transposed(x, w, stride, padding, dilation, rest, groups)
    else:
        y = _channels_last(
            x, jnp.moveaxis(w, (0, 1), (-1, -2)), stride, [(p, p) for p in padding], [1] * n, dilation, groups
        )
    return y if bias is None else y + bias.reshape(-1, *[1] * n)


def _transposed(
    x: Array,
    w: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    rest: Sequence[int],
    groups: int,
) -> Array:
    """What each place spreads around it: one product, then a sum of shifted images.

    With strides or groups, a convolution of the spread input with the flipped kernel.
    """
    inputs, outputs, *sides = w.shape
    if groups == 1 and set(stride) == {1}:
        y = jnp.moveaxis(x, 1, -1) @ jnp.moveaxis(w, 1, -1).reshape(inputs, -1)
        y = y.reshape(*y.shape[:-1], -1, outputs)
        whole = [n + (k - 1) * d + r for n, k, d, r in zip(x.shape[2:], sides, dilation, rest, strict=True)]
        total = jnp.zeros((len(x), *whole, outputs), y.dtype)
        for n, offset in enumerate(itertools.product(*map(range, sides))):
            start = (0, *(o * d for o, d in zip(offset, dilation, strict=True)), 0)
            part = lax.dynamic_slice(total, start, (len(x), *x.shape[2:], outputs)) + y[..., n, :]
            total = lax.dynamic_update_slice(total, part, start)
        inside = (slice(p, n - p) for p, n in zip(padding, whole, strict=True))
        return jnp.moveaxis(total[(slice(None), *inside)], -1, 1)
    flipped = jnp.flip(w, range(2, w.ndim)).reshape(groups, inputs // groups, outputs, *sides)
    kernel = jnp.moveaxis(flipped, (1, 0, 2), (-3, -2, -1)).reshape(*sides, inputs // groups, groups * outputs)
    edges = [(d * (k - 1) - p, d * (k - 1) - p + r) for d, k, p, r in zip(dilation, sides, padding, rest, strict=True)]
    return _channels_last(x, kernel, [1] * len(sides), edges, stride, dilation, groups)


def _channels_last(
    x: Array,
    kernel: Array,
    stride: Sequence[int],
    edges: Sequence[tuple[int, int]],
    spread: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Array:
    """A convolution of x (B, C, ...) with a kernel (..., C / groups, outputs)."""
    n = x.ndim - 2
    letters = "DHW"[3 - n :]
    layout = ("N" + letters + "C", letters + "IO", "N" + letters + "C")
    y = lax.conv_general_dilated(
        jnp.moveaxis(x, 1, -1), kernel, stride, edges, spread, dilation, layout, feature_group_count=groups
    )
    return jnp.moveaxis(y, -1, 1)


def convolution_backward(
    grad: Array,
    x: Array,
    w: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    rest: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Array | None, ...]:
    n = x.ndim - 2
    stride, padding, dilation = (list(v) * n if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    by_input = by_weight = None
    if wanted[0]:
        spans = [
            x.shape[2 + i]
            - ((grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (w.shape[2 + i] - 1) + 1)
            for i in range(n)
        ]
        by_input = convolution(grad, w, None, stride, padding, dilation, not transposed, spans, groups)
        by_input = by_input[(..., *(slice(side) for side in x.shape[2:]))]
    if wanted[1] and groups == 1:
        image, response = (grad, x) if transposed else (x, grad)
        by_weight = _by_kernel(image, response, w.shape[2:], stride, padding, dilation)
    elif wanted[1]:

        def forward(v: Array) -> Array:
            return convolution(x, v, None, stride, padding, dilation, transposed, rest, groups)

        by_weight = jax.vjp(forward, w)[1](grad)[0]
    return by_input, by_weight, grad.sum((0, *range(2, grad.ndim))) if wanted[2] else None


def _by_kernel(
    x: Array, y: Array, sides: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Array:
    """The sum over places of what y says there times what a kernel there sees of x: a product per row of the kernel."""
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(y.shape[2:], stride, sides, dilation, strict=True)]
    edges = [(p, max(0, need - n - p)) for n, p, need in zip(x.shape[2:], padding, reach, strict=True)]
    image = jnp.pad(jnp.moveaxis(x, 1, -1), [(0, 0), *edges, (0, 0)])
    response = jnp.moveaxis(y, 1, -1).reshape(-1, y.shape[1])

    def seen(offset: Sequence[int]) -> Array:
        places = zip(offset, y.shape[2:], stride, dilation, strict=True)
        return image[(slice(None), *(slice(o * d, o * d + (n - 1) * s + 1, s) for o, n, s, d in places))]

    rows = []
    for first in itertools.product(*map(range, sides[:-1])):
        windows = jnp.concatenate([seen((*first, last)) for last in range(sides[-1])], -1)
        rows.append(response.T @ windows.reshape(-1, windows.shape[-1]))
    kernel = jnp.stack(rows, 1).reshape(y.shape[1], *sides, x.shape[1])
    return jnp.moveaxis(kernel, -1, 1)
