"""The Jacobian J = dF/ds at a state, by products with vectors: is it symmetric, does it contract?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eqprop.dynamics import PrimitiveDynamics
from eqprop.gdu.linearised import Linearised
from eqprop.state import State

PROBES = 8
"""Pairs of random vectors per sample from which the asymmetry is estimated."""

KRYLOV = 60
"""Steps of Arnoldi's iteration from which the spectral radius is estimated."""

SATURATED_BELOW = 0.01
"""A neuron counts as saturated where sigma' is below this."""


def flat(s: State) -> Tensor:
    """The layers of each sample in one row, (B, N)."""
    return torch.cat([layer.flatten(1) for layer in s], 1)


def unflat(rows: Tensor, like: State) -> State:
    parts = rows.split([layer[0].numel() for layer in like], 1)
    return tuple(part.view_as(layer) for part, layer in zip(parts, like, strict=True))


def flat_product(around: Linearised) -> Callable[[Tensor], Tensor]:
    """v -> J v on rows (B, N), J being that of each sample at its state."""
    return lambda rows: flat(around.product(unflat(rows, around.s)))


def asymmetry(product: Callable[[Tensor], Tensor], rows: Tensor, seed: int) -> float:
    """|J - J^T| / (2 |J - c|) in Frobenius norm, estimated by random probes of u.Jv - v.Ju; 0 ... 1.

    c is the multiple of the identity nearest to J: the leak of an energy-based net is symmetric whatever its
    weights are, and would hide them. 0 is symmetric, 1 antisymmetric, 0.7 what independent weights give.
    """
    source = torch.Generator().manual_seed(seed)
    odd, even, trace, size, samples = [], [], 0.0, 0.0, []
    for _ in range(PROBES):
        u, v = (torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows) for _ in range(2))
        ju, jv = product(u), product(v)
        uv, vu, dot = (u * jv).sum(1), (v * ju).sum(1), (u * v).sum(1)
        odd.append(uv - vu)
        samples.append((uv, vu, dot))
        trace += float((u * ju).sum() + (v * jv).sum())
        size += float((u * u).sum() + (v * v).sum())
    c = trace / size
    for uv, vu, dot in samples:
        even.append(0.5 * ((uv - c * dot).square() + (vu - c * dot).square()))
    whole = float(torch.stack(even).double().mean())
    return 0.5 * (float(torch.stack(odd).double().square().mean()) / whole) ** 0.5 if whole > 0.0 else 0.0


def spectral_radius(product: Callable[[Tensor], Tensor], rows: Tensor, seed: int) -> float:
    """max |lambda(J)| over the samples, by Arnoldi's iteration from a random vector.

    Below 1 the steady state attracts, and the closer to 1 the slower.
    """
    source = torch.Generator().manual_seed(seed)
    size = min(KRYLOV, rows.shape[1])
    q = torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows)
    basis = [q / q.norm(dim=1, keepdim=True)]
    hessenberg = torch.zeros(rows.shape[0], size, size, dtype=torch.float64)
    for k in range(size):
        w = product(basis[k])
        # Twice is enough: a second pass removes what rounding left of the first.
        for _ in range(2):
            for j, q in enumerate(basis):
                h = (q * w).sum(1, keepdim=True)
                w = w - h * q
                hessenberg[:, j, k] += h[:, 0].double().cpu()
        norm = w.norm(dim=1, keepdim=True)
        if k + 1 == size or not bool((norm > 0).any()):
            break
        hessenberg[:, k + 1, k] = norm[:, 0].double().cpu()
        basis.append(w / norm.clamp_min(torch.finfo(w.dtype).tiny))
    return float(torch.linalg.eigvals(hessenberg).abs().max())


@torch.no_grad()
def saturated(around: Linearised, seed: int) -> float:
    """The fraction of neurons, of all samples, that cannot carry a signal: sigma' below `SATURATED_BELOW`.

    sigma' is that of squash on a prototypical net, and of the model's `activation` at s on an energy-based one. Of
    a model without either, a neuron counts that does not respond at all: a zero row of J.
    """
    s = around.s
    if isinstance(around.model, PrimitiveDynamics):
        slope = flat(around.squashed(tuple(torch.ones_like(layer) for layer in s)))
        own = getattr(getattr(around.model, "activation", None), "slope", None)
        if bool((slope == 1.0).all()) and own is not None:
            slope = flat(tuple(own(layer) for layer in s))
        if not bool((slope == 1.0).all()):
            return _fraction(slope.abs() < SATURATED_BELOW)
    source = torch.Generator().manual_seed(seed)
    product = flat_product(around)
    silent = torch.ones_like(flat(s), dtype=torch.bool)
    for _ in range(2):
        v = torch.randn(silent.shape, generator=source, dtype=torch.float64).to(s[0])
        silent &= product(v) == 0.0
    return _fraction(silent)


def _fraction(mask: Tensor) -> float:
    return float(mask.double().mean())
