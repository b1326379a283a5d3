"""Every operation that is lowered computes what torch computes, and so do the derivatives of what is built of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eqprop.engines.traced import CannotTrace, trace
from eqprop.engines.xla.lowering import Lowered, operations
from eqprop.engines.xla.operations import TABLE

aten = torch.ops.aten
ROUNDINGS = {torch.float32: 2e-5, torch.float64: 1e-12, torch.complex64: 2e-5, torch.complex128: 1e-12}
"""A few dozen roundings of numbers of order 1; XLA's float32 tanh and exp are off by several of them."""

REAL = (torch.float32, torch.float64)
BOTH = (*REAL, torch.complex64, torch.complex128)


class Case(NamedTuple):
    """A function of tensors of these shapes; `slopes` compares its derivative too."""

    name: str
    function: Callable[..., Tensor | Sequence[Tensor]]
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[torch.dtype, ...] = REAL
    slopes: bool = True
    low: float = -1.5


PLACES = torch.tensor([[2, 0, 1, 1], [0, 0, 2, 1], [1, 2, 2, 0]])
A, B = (3, 4), (4, 5)
IMAGE, LINE = (2, 4, 9, 8), (2, 4, 9)
FLAGS = torch.tensor([True, False, True, True])
WHOLE = torch.arange(12).reshape(3, 4)


def unary() -> list[Case]:
    """Functions of one number."""
    analytic = "cos cosh exp neg reciprocal sin sinh sigmoid tanh square sgn abs tan"
    steps = "ceil floor round trunc sign isnan isinf isfinite"
    inside = "acos asin atanh erfinv"
    above = "log log10 log1p log2 rsqrt sqrt lgamma acosh"
    rest = "asinh atan erf erfc exp2 expm1 relu relu6 leaky_relu"
    found = [Case(n, getattr(torch, n), (A,), BOTH) for n in analytic.split()]
    found += [Case(n, getattr(torch, n), (A,), slopes=False) for n in steps.split()]
    found += [Case(n, lambda x, n=n: getattr(torch, n)(0.6 * x), (A,)) for n in inside.split()]
    found.append(Case("digamma", lambda x: torch.digamma(x + 2.0), (A,), slopes=False))
    shift = {"acosh": 3.0}
    found += [Case(n, lambda x, n=n: getattr(torch, n)(x + shift.get(n, 2.0)), (A,)) for n in above.split()]
    named = torch, F
    found += [Case(n, next(getattr(m, n) for m in named if hasattr(m, n)), (A,)) for n in rest.split()]
    return found


def elementwise() -> list[Case]:
    return [
        Case("add", lambda x, y: torch.add(x, y, alpha=0.3) + 1.5, (A, A), BOTH),
        Case("sub", lambda x, y: 2.0 - torch.sub(x, y, alpha=0.3), (A, (4,)), BOTH),
        Case("mul", lambda x, y: 3 * x * y, (A, (3, 1)), BOTH),
        Case("div", lambda x, y: x / (y + 2.5) / 3.0 + 1.0 / (x + 4.0), (A, A), BOTH),
        Case("div floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), (A, A), slopes=False),
        Case("div trunc", lambda x: torch.div(x, 0.4, rounding_mode="trunc"), (A,), slopes=False),
        Case("pow 2", lambda x: x**2 + x**3 + (x + 3) ** -1, (A,), BOTH),
        Case("pow .5", lambda x: (x + 2) ** 0.5 + (x + 2) ** 2.5, (A,)),
        Case("pow tensor", lambda x, y: (x + 2) ** y + 2.0**y, (A, A)),
        Case("atan2", torch.atan2, (A, A)),
        Case("hypot", torch.hypot, (A, A)),
        Case("maximum", torch.maximum, (A, A)),
        Case("minimum", torch.minimum, (A, A)),
        Case("clamp", lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1) + x.clamp(max=0.2), (A,)),
        Case("clamp by tensors", lambda x, y: torch.clamp(x, y - 0.5, y + 0.5), (A, A)),
        Case("hardtanh", lambda x: F.hardtanh(x, -0.3, 0.4), (A,)),
        Case("elu, selu, celu", lambda x: F.elu(x) + F.selu(x) + F.celu(x), (A,)),
        Case("softplus, silu, mish", lambda x: F.softplus(x) + F.silu(x) + F.mish(x), (A,)),
        Case("gelu", lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), (A,)),
        Case("hardsigmoid, hardswish", lambda x: F.hardsigmoid(x) + F.hardswish(3 * x), (A,), REAL[:1]),
        Case("logsigmoid, softsign", lambda x: F.logsigmoid(x) + F.softsign(x), (A,)),
        Case(
            "tanhshrink, softshrink", lambda x: F.tanhshrink(x) + F.softshrink(x) + F.hardshrink(x), (A,), slopes=False
        ),
        Case("threshold", lambda x: F.threshold(x, 0.1, 0.3) + F.glu(x), ((4, 2),), slopes=False),
        Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), (A, A)),
        Case("remainder, fmod", lambda x: torch.remainder(x, 0.4) + torch.fmod(x, 0.4), (A,), slopes=False),
        Case("remainder of tensors", lambda x, y: torch.remainder(x, y) + torch.fmod(x, y), (A, A), slopes=False),
        Case("where", lambda x, y: torch.where(x > y, x * y, -x), (A, A)),
        Case("comparisons", lambda x, y: [x < y, x <= y, x > y, x >= y, x == y, x != y], (A, A), slopes=False),
        Case("with numbers", lambda x: [x < 0, x <= 0, x > 0, x >= 0, x == 0, x != 0], (A,), slopes=False),
        Case("logical", lambda x, y: ((x > 0) & (y > 0)) | ~(x < y) ^ (y > x), (A, A), slopes=False),
        Case(
            "logical of numbers",
            lambda x, y: [
                torch.logical_and(x, y),
                torch.logical_or(x, y),
                torch.logical_xor(x, y),
                torch.logical_not(x),
            ],
            (A, A),
            slopes=False,
        ),
        Case(
            "bits",
            lambda x: [WHOLE & 3, WHOLE | 5, WHOLE ^ 6, ~WHOLE, WHOLE ^ WHOLE.T.reshape(3, 4)],
            (A,),
            slopes=False,
        ),
        Case(
            "whole numbers", lambda x: [WHOLE / 3, WHOLE * 2.5, WHOLE.sum(), WHOLE // 5, WHOLE % 5], (A,), slopes=False
        ),
        Case("mixed types", lambda x: x * WHOLE + FLAGS * x + torch.tensor(2) * x, (A,), BOTH),
        Case(
            "conversions",
            lambda x: [x.double(), x.float(), x.long(), x.bool(), (x > 0).to(x.dtype)],
            (A,),
            slopes=False,
        ),
        Case("complex parts", lambda x, y: torch.complex(x, y).abs() + torch.complex(x, y).angle(), (A, A)),
        Case("real, imag", lambda x: x.real * 2 + x.imag, (A,), BOTH[2:]),
        Case("conj", lambda x: x.conj() * x + x.conj().resolve_conj(), (A,), BOTH[2:]),
        Case("to complex", lambda x: (x.to(x.dtype.to_complex()) * 1j).imag, (A,)),
        Case("to real", lambda x: torch.view_as_real(x), (A,), BOTH[2:]),
        Case("from real", lambda x: torch.view_as_complex(x), ((3, 2),)),
        Case("nan_to_num", lambda x: torch.nan_to_num(x / x.clamp(min=0)), (A,), slopes=False),
        Case("constants", lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.dtype), (A,), BOTH),
        Case("likes", lambda x: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 2) + x, (A,), BOTH),
        Case("made", lambda x: x + torch.zeros(4) + torch.full((4,), 0.5) + torch.arange(4) + x.new_ones(4), (A,)),
        Case("ranges", lambda x: x + torch.arange(1.0, 3.0, 0.5) + torch.linspace(0, 1, 4) + torch.eye(4)[0], (A,)),
        Case("fill", lambda x: aten.fill.Scalar(x, 2.0) + aten.copy(x, x[:1]), (A,), slopes=False),
        Case("in place", lambda x: (x * 2).add_(1).mul_(x).clamp_(-1, 1).tanh_(), (A,)),
        Case("alias", lambda x: aten.alias(x.detach()) + x.clone().contiguous(), (A,), BOTH, slopes=False),
    ]


def products() -> list[Case]:
    return [
        Case("mm", lambda x, y: x @ y, (A, B), BOTH),
        Case("mv, dot", lambda x, y: (x @ y) * torch.dot(y, y), (A, (4,)), BOTH),
        Case("addmm", lambda x, y: torch.addmm(x[:, :1], x, y, alpha=0.5), (A, B), BOTH),
        Case("bmm", lambda x, y: torch.bmm(x, y) @ y.mT, ((2, 3, 4), (2, 4, 5)), BOTH),
        Case("baddbmm", lambda x, y: torch.baddbmm(y[:, :3, :1], x, y), ((2, 3, 4), (2, 4, 5))),
        Case("linear", lambda x, w, b: F.linear(x, w, b), (A, (5, 4), (5,)), BOTH),
        Case("bilinear", lambda x, y, w: F.bilinear(x, y, w), (A, (3, 2), (5, 4, 2))),
        Case("einsum", lambda x, y: torch.einsum("bi,bj,ij->b", x, x, y @ y.T), (A, B), BOTH),
        Case("einsum of three", lambda x, y: torch.einsum("bhi,bhj->bij", x, y), ((2, 3, 4), (2, 3, 5)), BOTH),
        Case("outer, trace", lambda x: torch.outer(x[0], x[1]).trace() + torch.kron(x, x).sum(), (A,), BOTH),
        Case("norms", lambda x: x.norm() + torch.linalg.vector_norm(x, dim=-1) + F.normalize(x, dim=-1).sum(), (A,)),
        Case("cosine", lambda x, y: F.cosine_similarity(x, y) + F.pairwise_distance(x, y), (A, A)),
        Case(
            "attention",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            ((2, 1, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
        ),
    ]


def reductions() -> list[Case]:
    return [
        Case("sum", lambda x: [x.sum(), x.sum(-1), x.sum((0, 1), keepdim=True)], (A,), BOTH),
        Case("mean", lambda x: [x.mean(), x.mean(0), x.mean(-1, keepdim=True)], (A,), BOTH),
        Case("prod", lambda x: [(x + 3).prod(), (x + 3).prod(-1)], (A,)),
        Case("extremes", lambda x: [x.amax(-1), x.amin((0, 1)), x.max(), x.min()], (A,)),
        Case("max along", lambda x: [*x.max(-1), *x.min(0, keepdim=True)], (A,), slopes=False),
        Case("slopes of max along", lambda x: x.max(-1).values + x.min(-1).values, (A,)),
        Case("argmax", lambda x: [x.argmax(-1), x.argmin(0), x.argmax()], (A,), slopes=False),
        Case("any, all", lambda x: [(x > 0).any(), (x > 0).any(0), (x > 0).all(-1)], (A,), slopes=False),
        Case("any of several", lambda x: aten.any.dims((x > 0), [0, 1]), (A,), slopes=False),
        Case("sums as they are", lambda x: [aten.sum.default(x), aten.mean.default(x), aten.any.default(x > 0)], (A,)),
        Case("var, std", lambda x: [x.var(), x.var(-1), x.std(0), x.var(-1, correction=0)], (A,)),
        Case("cumsum, cumprod", lambda x: [x.cumsum(0), (x + 2).cumprod(-1)], (A,)),
        Case("logsumexp", lambda x: torch.logsumexp(x, -1), (A,)),
        Case("softmax", lambda x: [x.softmax(-1), x.log_softmax(0), F.softmin(x, -1)], (A,)),
        Case("sort", lambda x: [*x.sort(-1), *x.sort(0, descending=True), *x.topk(2)], (A,), slopes=False),
        Case("slopes of sort", lambda x: [x.sort(-1).values, x.topk(2).values], (A,)),
        Case(
            "losses",
            lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y) + F.l1_loss(x, y) + F.huber_loss(x, y),
            (A, A),
        ),
        Case("cross-entropy", lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3])), (A,)),
        Case("binary", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (A, A)),
        Case("layer norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (A, (4,), (4,))),
        Case("layer norm, bare", lambda x: F.layer_norm(x, (4,)), (A,)),
        Case("group norm", lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGE, (4,), (4,))),
        Case(
            "batch norm",
            lambda x, w, b: F.batch_norm(x, torch.linspace(0, 1, 4, dtype=x.dtype), w.detach() ** 2 + 1, w, b),
            (IMAGE, (4,), (4,)),
        ),
        Case("batch norm of the batch", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (IMAGE, (4,), (4,))),
    ]


def shapes() -> list[Case]:
    return [
        Case("views", lambda x: x.view(4, 3).T.reshape(-1).unflatten(0, (3, 4)), (A,), BOTH),
        Case("permute", lambda x: x.permute(2, 0, 1).transpose(0, 1).movedim(0, -1), ((2, 3, 4),), BOTH),
        Case("squeeze", lambda x: x[None].unsqueeze(-1).squeeze().squeeze(0), (A,), BOTH),
        Case("squeeze of one", lambda x: [aten.squeeze.dim(x[None], 0), x[:, None].squeeze((0, 1))], (A,)),
        Case("expand", lambda x: x[:, :1].expand(3, 5) + x[:, 1:2].expand(-1, 5), (A,), BOTH),
        Case("repeat", lambda x: [x.repeat(2, 1, 3), x.repeat_interleave(2, 0), x.tile(2)], (A,)),
        Case("flip, roll", lambda x: x.flip(0, 1) + x.roll(1, -1) + x.rot90(2), (A,), BOTH),
        Case(
            "cat, stack",
            lambda x, y: [torch.cat([x, y], -1), torch.stack([x, y], 1), torch.hstack([x, y])],
            (A, A),
            BOTH,
        ),
        Case("split", lambda x: [*x.split(3, -1), *x.chunk(2, -1), *x.unbind(0), *x.tensor_split(3, -1)], (A,), BOTH),
        Case("select, slice", lambda x: x[1] + x[0, 1:3].sum() + x[:, ::2].sum() + x[..., -1].sum(), (A,), BOTH),
        Case("scatter into a slice", lambda x, y: aten.slice_scatter(x, y[:, :2], 1, 1, 3), (A, A)),
        Case("scatter into a row", lambda x, y: aten.select_scatter(x, y[0], 0, 1), (A, A)),
        Case(
            "diagonals",
            lambda x: x.diagonal() * torch.diag_embed(x.diagonal()).sum(0) + x.tril() + x.triu(1),
            ((4, 4),),
        ),
        Case("index", lambda x: x[torch.tensor([2, 0])] * x[torch.tensor([0, 1]), torch.tensor([1, 1])].sum(), (A,)),
        Case("index of columns", lambda x: x[:, torch.tensor([2, 0, 2])], (A,), BOTH),
        Case("index select", lambda x: x.index_select(1, torch.tensor([3, 0, 0])), (A,)),
        Case("index put", lambda x, y: x.index_put((torch.tensor([0, 2]),), y[:2], accumulate=True), (A, A)),
        Case("index put once", lambda x, y: x.index_put((torch.tensor([0, 2]),), y[:2]), (A, A)),
        Case("index add", lambda x, y: x.index_add(0, torch.tensor([0, 2, 0]), y), (A, A)),
        Case("gather", lambda x: x.gather(0, PLACES) * torch.take_along_dim(x, PLACES, 0), (A,)),
        Case("scatter", lambda x, y: x.scatter(0, PLACES.flip(0) * 0 + WHOLE % 3, y), ((3, 4), (3, 4)), slopes=False),
        Case("scatter value", lambda x: x.scatter(0, PLACES, 2.0), (A,)),
        Case("scatter add", lambda x, y: x.scatter_add(0, PLACES, y), (A, A)),
        Case("embedding", lambda w: F.embedding(PLACES, w), ((3, 5),)),
        Case("pad", lambda x: F.pad(x, (1, 2, 0, 1), value=0.5) + F.pad(x, (1, 2), "constant")[:1], (A,), BOTH),
        Case("pad, cutting", lambda x: F.pad(x, (-1, 0)), (A,)),
        Case("mirrored", lambda x: F.pad(x, (1, 2, 2, 1), "reflect") + F.pad(x, (1, 2, 2, 1), "replicate"), (IMAGE,)),
        Case("round", lambda x: F.pad(x, (1, 2, 2, 1), "circular"), (IMAGE,)),
        Case("pixel shuffle", lambda x: F.pixel_shuffle(x, 2), (IMAGE,)),
        Case("empty", lambda x: aten.empty.memory_format([2, 3]).shape[0] * x, (A,), slopes=False),
        Case("unfold", lambda x: x.unfold(-1, 3, 2), (IMAGE,), slopes=False),
        Case("nearest", lambda x: F.interpolate(x, scale_factor=2.0), (IMAGE,)),
    ]


def images() -> list[Case]:
    kernel = (6, 4, 3, 3)
    found = [
        Case("conv", F.conv2d, (IMAGE, kernel, (6,))),
        Case("conv, strided", lambda x, w: F.conv2d(x, w, stride=2, padding=1), (IMAGE, kernel)),
        Case(
            "conv, uneven", lambda x, w: F.conv2d(x, w, stride=(2, 3), padding=(1, 2), dilation=(2, 1)), (IMAGE, kernel)
        ),
        Case("conv, groups", lambda x, w: F.conv2d(x, w, padding=1, groups=2), (IMAGE, (6, 2, 3, 3))),
        Case("conv, same", lambda x, w: F.conv2d(x, w, padding="same"), (IMAGE, kernel)),
        Case("conv 1d", lambda x, w, b: F.conv1d(x, w, b, stride=2), (LINE, (6, 4, 3), (6,))),
        Case("conv 3d", lambda x, w: F.conv3d(x, w, padding=1), ((2, 2, 4, 5, 4), (3, 2, 3, 3, 3))),
        Case("transposed", F.conv_transpose2d, (IMAGE, (4, 6, 3, 3), (6,))),
        Case(
            "transposed, strided",
            lambda x, w: F.conv_transpose2d(x, w, stride=3, padding=1, output_padding=2),
            (IMAGE, (4, 6, 3, 3)),
        ),
        Case(
            "transposed, groups",
            lambda x, w: F.conv_transpose2d(x, w, stride=2, dilation=2, groups=2),
            (IMAGE, (4, 3, 3, 3)),
        ),
        Case("transposed 1d", lambda x, w: F.conv_transpose1d(x, w, stride=2), (LINE, (4, 3, 3))),
        Case("max 1d", lambda x: F.max_pool1d(x, 2), (LINE,)),
        Case("average 1d", lambda x: F.avg_pool1d(x, 3, 2), (LINE,)),
        Case("average", lambda x: F.avg_pool2d(x, 2), (IMAGE,)),
        Case("average, padded", lambda x: F.avg_pool2d(x, 3, 2, 1), (IMAGE,)),
        Case("average, inner", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (IMAGE,)),
        Case("average, divisor", lambda x: F.avg_pool2d(x, 3, divisor_override=4), (IMAGE,)),
        Case("adaptive", lambda x: F.adaptive_avg_pool2d(x, 1) + F.adaptive_avg_pool2d(x, (3, 4)).sum(), (IMAGE,)),
    ]
    pools: dict[str, tuple[object, ...]] = {
        "max": (2,),
        "max of three": (3,),
        "max, overlapping": (3, 2),
        "max, padded": (3, 2, 1),
        "max, dilated": (2, 2, 0, 2),
        "max, ceiling": (2, 2, 0, 1, True),
    }
    for name, window in pools.items():
        found.append(Case(name, lambda x, w=window: F.max_pool2d(x, *w), (IMAGE,)))  # type: ignore[misc]
        found.append(
            Case(
                f"{name}, places", lambda x, w=window: F.max_pool2d(x, *w, return_indices=True), (IMAGE,), slopes=False
            )  # type: ignore[misc]
        )
    return [*found, Case("unpool", pooled_back, (IMAGE, (2, 4, 4, 4))), Case("unpool alone", placed, ((1, 1, 2, 2),))]


def pooled_back(x: Tensor, h: Tensor) -> Tensor:
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(h * values, places, 2, output_size=x.shape[-2:])


def placed(h: Tensor) -> Tensor:
    return F.max_unpool2d(h, torch.tensor([[[[5, 3], [8, 14]]]]), 2)


CASES = [*unary(), *elementwise(), *products(), *reductions(), *shapes(), *images()]


def drawn(case: Case, kind: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    wide = torch.complex128 if kind.is_complex else torch.float64
    return [torch.randn(shape, generator=source, dtype=wide).clamp(case.low, 1.5).to(kind) if not kind.is_complex
            else torch.randn(shape, generator=source, dtype=wide).to(kind) for shape in case.shapes]  # fmt: skip


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiled once and run once."""


def lowered(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the function's graph gives in XLA."""
    graph = trace(function, inputs, operations())
    part = Lowered(graph)

    def run(given: list[object], constants: list[object]) -> object:
        return part(part.prepare(given, dict(zip(part.constants, constants, strict=True))))

    with jax.enable_x64(True):
        program = jax.jit(run, compiler_options=QUICK)
        found = program([v.numpy() for v in inputs], [v.numpy() for v in part.constants.values()])
        return [torch.from_numpy(np.array(v)) for v in found]


def as_list(found: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def values_and_slopes(case: Case, kind: torch.dtype, *inputs: Tensor) -> list[Tensor]:
    """The values, and where there are any, the derivative of a weighted sum of them."""
    if not case.slopes:
        return as_list(case.function(*inputs))
    with torch.enable_grad():
        leaves = [v.detach().requires_grad_() for v in inputs]
        found = as_list(case.function(*leaves))
        total = torch.zeros((), dtype=kind.to_real())
        for v in found:
            part = v.real + 0.5 * v.imag if v.is_complex() else v
            if not v.requires_grad:
                continue
            weights = torch.arange(v.numel(), dtype=part.dtype).reshape(v.shape) * 0.1 + 0.3
            total = total + (part * weights).sum()
        return [*(v.detach() for v in found), *torch.autograd.grad(total, leaves)]


def kinds_of(case: Case, quick: bool) -> list[torch.dtype]:
    """The widest types, or the others: what is wrong in a lowering is wrong in each of them."""
    wide = [kind for kind in case.kinds if kind not in (torch.float32, torch.complex64)] or list(case.kinds)
    return wide if quick else [kind for kind in case.kinds if kind not in wide]


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["", "narrow"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operation_computes_what_torch_computes(case: Case, quick: bool) -> None:
    for kind in kinds_of(case, quick):
        inputs, function = drawn(case, kind), partial(values_and_slopes, case, kind)
        expected, found = function(*inputs), lowered(function, inputs)
        assert len(expected) == len(found)
        for a, b in zip(expected, found, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype or not a.is_floating_point()
            size = max(1.0, float(a.abs().max())) if a.numel() and a.is_floating_point() else 1.0
            assert torch.allclose(a.to(b.dtype), b, rtol=0.0, atol=ROUNDINGS[kind] * size, equal_nan=True)


def test_every_operation_of_the_table_has_a_case() -> None:
    seen: set[object] = set()
    for case in CASES:
        for kind in kinds_of(case, quick=True):
            graph = trace(partial(values_and_slopes, case, kind), drawn(case, kind), operations())
            seen |= {node.target for node in graph.graph.nodes}
    unseen = sorted(str(op) for op in set(TABLE) - seen)
    assert not unseen, ", ".join(unseen)


def test_an_operation_outside_the_table_is_named() -> None:
    graph = trace(lambda x: [torch.linalg.det(x)], [torch.eye(3)], operations())
    with pytest.raises(CannotTrace, match="_linalg_det"):
        Lowered(graph)


def test_sums_over_steps_are_made_of_the_smallest_that_they_are_linear_in() -> None:
    def step(x: Tensor, s: Tensor) -> list[Tensor]:
        return [
            s.tanh(),
            (s.T @ x).T.neg() / 4.0,  # in s: 4 x 5 numbers are added, not 5 x 5
            ((s * s).T @ x.exp()).mul(2.0),  # in the square of s
            (s.T @ s) / 3.0,  # in the product of two that move
            (x / s).sum(0),  # in nothing but itself
            x.sum(0) * 2.0,  # which never moves
        ]

    x, states = torch.randn(4, 5, dtype=torch.float64), torch.rand(3, 4, 5, dtype=torch.float64) + 1.0
    part = Lowered(trace(step, (x, states[0]), operations()), moving=1)
    chains = part.chains(5)
    assert [chain[0].meta["val"].shape for chain in chains] == [(4, 5), (4, 5), (5, 5), (5,), (5,)]
    assert chains[0][0] is part.inputs[1]
    assert chains[1][0] is not part.inputs[1]
    assert chains[2][0].target is aten.mm.default
    with jax.enable_x64(True):
        prepared = part.prepare([x.numpy()], {})
        found = [part.terms(prepared, [s.numpy()], chains) for s in states]
        sums = part.sums(prepared, [sum(terms) for terms in zip(*(terms[1:] for terms in found), strict=True)], chains)
    wanted = [sum(parts) for parts in zip(*(step(x, s)[1:] for s in states), strict=True)]
    for ours, theirs in zip(sums, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(np.array(ours)), theirs, rtol=0.0, atol=1e-12)
