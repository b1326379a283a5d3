"""Operations of torch written in jax.numpy, by operation.

Types are not converted here: a result takes the type that torch found while tracing (see `Lowered`), so no rule of
promotion is written twice.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from eqprop.engines.traced import CannotTrace
from eqprop.engines.xla.windows import (
    Array,
    adaptive_avg_pool,
    adaptive_avg_pool_backward,
    avg_pool,
    avg_pool_backward,
    convolution,
    convolution_backward,
    max_pool,
    max_pool_backward,
    nearest_back,
    unpool,
)

_aten = torch.ops.aten

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.dtype("float32"),
    torch.float64: np.dtype("float64"),
    torch.complex64: np.dtype("complex64"),
    torch.complex128: np.dtype("complex128"),
    torch.bool: np.dtype("bool"),
    torch.uint8: np.dtype("uint8"),
    torch.int8: np.dtype("int8"),
    torch.int16: np.dtype("int16"),
    torch.int32: np.dtype("int32"),
    torch.int64: np.dtype("int64"),
}


def dtype_of(kind: torch.dtype) -> Any:
    if kind not in DTYPES:
        raise CannotTrace(f"it computes in {str(kind).removeprefix('torch.')}, which is not lowered")
    return DTYPES[kind]


def _axes(dims: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Dimensions to reduce; None or none at all: every one."""
    if dims is None:
        return None
    return (dims,) if isinstance(dims, int) else tuple(dims) or None


def _reduction(function: Callable[..., Array]) -> Callable[..., Array]:
    def reduce(x: Array, dims: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
        x = x if dtype is None else x.astype(dtype_of(dtype))
        return function(x, axis=_axes(dims), keepdims=keepdim)

    return reduce


def _overall(function: Callable[..., Array]) -> Callable[..., Array]:
    """A reduction over all dimensions."""
    return lambda x: function(x)


def _var(x: Array, dims: Any = None, correction: int | None = None, keepdim: bool = False) -> Array:
    return jnp.var(x, axis=_axes(dims), ddof=1 if correction is None else correction, keepdims=keepdim)


def _var_mean(x: Array, *dims: Any, **options: Any) -> tuple[Array, Array]:
    axes = _axes(dims[0] if dims else None)
    return _var(x, *dims, **options), jnp.mean(x, axis=axes, keepdims=options.get("keepdim", False))


def _extreme(values: Callable[..., Array], places: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """(values, indices) along a dimension."""

    def find(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        return values(x, axis=dim, keepdims=keepdim), places(x, axis=dim, keepdims=keepdim)

    return find


def _place(function: Callable[..., Array]) -> Callable[..., Array]:
    def find(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        return function(x, axis=dim, keepdims=keepdim)

    return find


def _expand(x: Array, sizes: Sequence[int], implicit: bool = False) -> Array:
    new = len(sizes) - x.ndim
    return jnp.broadcast_to(x, [x.shape[i - new] if n == -1 else n for i, n in enumerate(sizes)])


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[_at(x, dim, slice(start, end, step))]


def _at(x: Array, dim: int, place: Any) -> tuple[Any, ...]:
    """An index of one dimension."""
    return (*[slice(None)] * (dim % x.ndim), place)


def _slice_scatter(x: Array, new: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    return x.at[_at(x, dim, slice(start, end, step))].set(new)


def _pick(x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


def _squeeze(x: Array, dims: int | Sequence[int]) -> Array:
    wanted = [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple(d % x.ndim for d in wanted if x.ndim and x.shape[d] == 1))


def _parts(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=dim)


def _index(x: Array, places: Sequence[Array | None]) -> Array:
    return x[tuple(slice(None) if p is None else p for p in places)]


def _index_put(x: Array, places: Sequence[Array | None], new: Array, accumulate: bool = False) -> Array:
    at = x.at[tuple(slice(None) if p is None else p for p in places)]
    return at.add(new) if accumulate else at.set(new)


def _along(x: Array, dim: int, places: Array) -> tuple[Array, ...]:
    """The whole index of elements that `places` names along a dimension, as in torch's gather and scatter."""
    grid = list(jnp.indices(places.shape, sparse=True))
    grid[dim % x.ndim] = places
    return tuple(grid)


def _scatter(x: Array, dim: int, places: Array, new: Any) -> Array:
    index = _along(x, dim, places)
    part = new if isinstance(new, int | float | complex) else new[tuple(slice(n) for n in places.shape)]
    return x.at[index].set(part)


def _scatter_add(x: Array, dim: int, places: Array, new: Array) -> Array:
    return x.at[_along(x, dim, places)].add(new[tuple(slice(n) for n in places.shape)])


def _sort(x: Array, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Array, Array]:
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> tuple[Array, Array]:
    values, order = _sort(x, dim, descending=largest)
    return lax.slice_in_dim(values, 0, k, axis=dim % x.ndim), lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)


def _pad(x: Array, edges: Sequence[int], value: float = 0.0) -> Array:
    pairs = [(edges[i], edges[i + 1], 0) for i in range(0, len(edges), 2)][::-1]
    return lax.pad(x, jnp.asarray(value, x.dtype), [*[(0, 0, 0)] * (x.ndim - len(pairs)), *pairs])


def _softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    return jax.nn.softmax(x, axis=dim)


def _log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    return jax.nn.log_softmax(x, axis=dim)


def _power(x: Array, y: Array) -> Array:
    if isinstance(y, int | float) and float(y).is_integer() and abs(y) <= 8:
        return lax.integer_pow(x, int(y)) if jnp.issubdtype(x.dtype, jnp.inexact) or y >= 0 else x ** int(y)
    return jnp.power(x, y)


def _divide(a: Array, b: Array, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return a / b if rounding_mode is None else jnp.trunc(a / b)


def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    x = x if low is None else jnp.maximum(x, jnp.asarray(low, x.dtype))
    return x if high is None else jnp.minimum(x, jnp.asarray(high, x.dtype))


def _leaky(x: Array, slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, x * slope)


def _gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate != "none")


def _arange(start: float, end: float, step: float = 1, **_: Any) -> Array:
    return np.arange(start, end, step)


def _view(x: Array, sizes: Sequence[int]) -> Array:
    return x.reshape(tuple(sizes))


def _like(x: Array, value: Any, **_: Any) -> Array:
    return jnp.full(x.shape, value)


def _view_as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean = jnp.mean(x, axes, keepdims=True)
    rstd = lax.rsqrt(jnp.var(x, axes, keepdims=True) + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


def _group_norm(
    x: Array, weight: Array | None, bias: Array | None, n: int, c: int, rest: int, groups: int, eps: float
) -> tuple[Array, Array, Array]:
    parts = x.reshape(n, groups, -1)
    mean = jnp.mean(parts, -1, keepdims=True)
    rstd = lax.rsqrt(jnp.var(parts, -1, keepdims=True) + eps)
    y = ((parts - mean) * rstd).reshape(x.shape)
    per_channel = (c, *[1] * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(per_channel)
    return (y if bias is None else y + bias.reshape(per_channel)), mean[..., 0], rstd[..., 0]


def _same(x: Array, *_: Any, **__: Any) -> Array:
    return x


def _diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


def _diagonal_scatter(x: Array, new: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    places = np.arange(new.shape[-1])
    last = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    last = last.at[..., places + max(0, -offset), places + max(0, offset)].set(new)
    return jnp.moveaxis(last, (-2, -1), (dim1, dim2))


def _unfold(x: Array, dim: int, size: int, step: int) -> Array:
    """Windows along a dimension, their places last."""
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


def _trilinear(a: Array, b: Array, c: Array, *dims: Any) -> Array:
    """The sum over some dimensions of a product of three, each given new dimensions first."""
    product: Array = 1
    for v, new in zip((a, b, c), dims, strict=False):
        product = product * jnp.expand_dims(v, tuple(new))
    return jnp.sum(product, tuple(dims[3]))


def _replicated_back(grad: Array, x: Array, edges: Sequence[int]) -> Array:
    """The derivative of padding by the nearest value."""
    pairs = [(0, 0)] * (x.ndim - len(edges) // 2) + [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)][::-1]
    return jax.vjp(lambda v: jnp.pad(v, pairs, "edge"), x)[1](grad)[0]


def _cumulative(function: Callable[..., Array]) -> Callable[..., Array]:
    def along(x: Array, dim: int, **_: Any) -> Array:
        return function(x, axis=dim)

    return along


_UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": jnp.abs, "acos": jnp.arccos, "acosh": jnp.arccosh, "asin": jnp.arcsin, "asinh": jnp.arcsinh,
    "atan": jnp.arctan, "atanh": jnp.arctanh, "bitwise_not": jnp.bitwise_not, "ceil": jnp.ceil, "cos": jnp.cos,
    "cosh": jnp.cosh, "erf": lax.erf, "erfc": lax.erfc, "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1,
    "floor": jnp.floor, "isinf": jnp.isinf, "isnan": jnp.isnan, "log": jnp.log,
    "log10": jnp.log10, "log1p": jnp.log1p, "log2": jnp.log2, "logical_not": jnp.logical_not, "neg": operator.neg,
    "reciprocal": lambda x: 1.0 / x, "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)), "round": jnp.round,
    "rsqrt": lax.rsqrt, "sigmoid": jax.nn.sigmoid, "sign": jnp.sign, "sin": jnp.sin,
    "sinh": jnp.sinh, "sqrt": jnp.sqrt, "tan": jnp.tan, "tanh": jnp.tanh, "trunc": jnp.trunc,
    "lgamma": lax.lgamma, "digamma": lax.digamma, "erfinv": lax.erf_inv, "angle": jnp.angle, "_conj": jnp.conj,
    "_conj_physical": jnp.conj, "view_as_real": _view_as_real,
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
}  # fmt: skip

_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "mul": operator.mul, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor, "remainder": jnp.remainder, "fmod": jnp.fmod,
}  # fmt: skip


def _sum_of(a: Array, b: Array, alpha: float = 1) -> Array:
    return a + _scaled(b, alpha)


def _scaled(a: Array, factor: float) -> Array:
    return a if factor == 1 else factor * a


def _difference_of(a: Array, b: Array, alpha: float = 1) -> Array:
    return a - _scaled(b, alpha)


TABLE: dict[Any, Callable[..., Any]] = {
    **{getattr(_aten, name).default: function for name, function in _UNARY.items()},
    **{getattr(getattr(_aten, name), kind): f for name, f in _BINARY.items() for kind in ("Tensor", "Scalar")},
    _aten.add.Tensor: _sum_of,
    _aten.add.Scalar: _sum_of,
    _aten.sub.Tensor: _difference_of,
    _aten.sub.Scalar: _difference_of,
    _aten.div.Tensor: _divide,
    _aten.div.Scalar: _divide,
    _aten.div.Tensor_mode: _divide,
    _aten.pow.Tensor_Scalar: _power,
    _aten.pow.Tensor_Tensor: _power,
    _aten.pow.Scalar: _power,
    _aten.atan2.default: jnp.arctan2,
    _aten.hypot.default: jnp.hypot,
    _aten.maximum.default: jnp.maximum,
    _aten.minimum.default: jnp.minimum,
    _aten.logical_and.default: jnp.logical_and,
    _aten.logical_or.default: jnp.logical_or,
    _aten.logical_xor.default: jnp.logical_xor,
    _aten.clamp.default: _clamp,
    _aten.clamp.Tensor: _clamp,
    _aten.hardtanh.default: lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    _aten.leaky_relu.default: _leaky,
    _aten.gelu.default: _gelu,
    _aten.where.self: jnp.where,
    _aten.complex.default: lax.complex,
    _aten.mm.default: jnp.matmul,
    _aten.bmm.default: jnp.matmul,
    _aten.addmm.default: lambda c, a, b, beta=1, alpha=1: _scaled(c, beta) + _scaled(a @ b, alpha),
    _aten._trilinear.default: _trilinear,
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.max_pool2d_with_indices.default: max_pool,
    _aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    _aten.max_unpool2d.default: unpool,
    _aten.avg_pool2d.default: avg_pool,
    _aten.avg_pool2d_backward.default: avg_pool_backward,
    _aten._adaptive_avg_pool2d.default: adaptive_avg_pool,
    _aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool_backward,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.sum.dim_IntList: _reduction(jnp.sum),
    _aten.mean.default: _reduction(jnp.mean),
    _aten.mean.dim: _reduction(jnp.mean),
    _aten.prod.default: _reduction(jnp.prod),
    _aten.prod.dim_int: _reduction(jnp.prod),
    _aten.amax.default: _reduction(jnp.max),
    _aten.amin.default: _reduction(jnp.min),
    _aten.any.default: _reduction(jnp.any),
    _aten.any.dim: _reduction(jnp.any),
    _aten.any.dims: _reduction(jnp.any),
    _aten.var.correction: _var,
    _aten.var_mean.correction: _var_mean,
    _aten.max.default: _overall(jnp.max),
    _aten.min.default: _overall(jnp.min),
    _aten.max.dim: _extreme(jnp.max, jnp.argmax),
    _aten.min.dim: _extreme(jnp.min, jnp.argmin),
    _aten.argmax.default: _place(jnp.argmax),
    _aten.argmin.default: _place(jnp.argmin),
    _aten.cumsum.default: _cumulative(jnp.cumsum),
    _aten.cumprod.default: _cumulative(jnp.cumprod),
    _aten.sort.default: _sort,
    _aten.topk.default: _topk,
    _aten.view.default: _view,
    _aten.permute.default: jnp.transpose,
    _aten.unsqueeze.default: jnp.expand_dims,
    _aten.squeeze.dims: _squeeze,
    _aten.expand.default: _expand,
    _aten.repeat.default: lambda x, times: jnp.tile(x, tuple(times)),
    _aten.flip.default: lambda x, dims: jnp.flip(x, tuple(dims)),
    _aten.cat.default: lambda parts, dim=0: jnp.concatenate([p for p in parts if p.shape != (0,)], dim),
    _aten.split_with_sizes.default: _parts,
    _aten.select.int: _pick,
    _aten.slice.Tensor: _slice,
    _aten.diagonal.default: _diagonal,
    _aten.slice_scatter.default: _slice_scatter,
    _aten.diagonal_scatter.default: _diagonal_scatter,
    _aten.unfold.default: _unfold,
    _aten.index.Tensor: _index,
    _aten.index_put.default: _index_put,
    _aten.index_select.default: lambda x, dim, places: jnp.take(x, places, axis=dim),
    _aten.gather.default: lambda x, dim, places, **_: x[_along(x, dim, places)],
    _aten.scatter.src: _scatter,
    _aten.scatter.value: _scatter,
    _aten.scatter_add.default: _scatter_add,
    _aten.embedding.default: lambda weight, places, *_: weight[places],
    _aten.constant_pad_nd.default: _pad,
    _aten.replication_pad2d_backward.default: _replicated_back,
    _aten.upsample_nearest2d_backward.default: nearest_back,
    _aten.full.default: lambda sizes, value, **_: jnp.full(tuple(sizes), value),
    _aten.full_like.default: _like,
    _aten.scalar_tensor.default: lambda value, **_: jnp.asarray(value),
    _aten._efficientzerotensor.default: lambda sizes, **_: jnp.zeros(tuple(sizes)),
    _aten.arange.start_step: _arange,
    _aten.empty.memory_format: lambda sizes, *_, **__: jnp.zeros(tuple(sizes)),
    _aten.empty_permuted.default: lambda sizes, *_, **__: jnp.zeros(tuple(sizes)),
    _aten.new_empty_strided.default: lambda x, sizes, *_, **__: jnp.zeros(tuple(sizes)),
    _aten._to_copy.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten.copy.default: lambda x, new, *_: jnp.broadcast_to(new, x.shape),
    _aten.lift_fresh_copy.default: _same,
}
"""torch's operations by what computes them."""

KEPT = (_aten.max_unpool2d.default, _aten.diagonal_scatter.default, _aten.unfold.default)
"""Operations that torch would write by slower ones, or by changes in place."""

_MORE = "elu linalg_vector_norm native_batch_norm upsample_nearest2d diagonal_scatter"
WRITTEN = tuple(getattr(_aten, name) for name in _MORE.split())
"""Operations outside the core set that torch can write by others."""
