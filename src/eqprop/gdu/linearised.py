"""The Jacobian J = dF/ds at a state, through products with vectors: is it symmetric, does it contract?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import trainable
from eqprop.state import State

Receive = Callable[[State], Sequence[Tensor]]


class Linearised:
    """F linearised at a state s, per sample."""

    def __init__(self, model: Dynamics, x: Tensor, s: State) -> None:
        self.model, self.x, self.s = model, x, s
        with torch.no_grad():
            self.drive = model.drive(x)
        with torch.enable_grad():
            inputs, push = leaves(s), leaves(tuple(torch.zeros_like(v) for v in s))
            self._step = Tangent(model.step(self.drive, inputs, push), (*inputs, *push))
        self._receive: Receive | None = None

    def product(self, v: State, push: State | None = None) -> State:
        """J v, or J v + N p, where p is a nudge and N the derivative of the step by the nudge."""
        return self._step((*v, *(tuple(torch.zeros_like(a) for a in v) if push is None else push)))

    def squashed(self, v: State) -> State:
        """D v, where D is the derivative of squash at dPhi/ds(s): diag(sigma') for a prototypical net."""
        if not isinstance(self.model, PrimitiveDynamics):
            raise TypeError(
                f"{type(self.model).__name__} has no primitive, so no squash to differentiate; expected a "
                "PrimitiveDynamics. Define it with eqprop.from_primitive."
            )
        with torch.no_grad():
            inputs = leaves(self.model.gradient(self.drive, self.s))
        with torch.enable_grad():
            return Tangent(self.model.squash(inputs), inputs)(v)

    def synapses(self, v: State) -> dict[str, Tensor]:
        """The batch mean of d^2Phi/dtheta ds v, the parameters' response to a move v; (dF/dtheta)^T v without Phi."""
        if self._receive is None:
            self._receive = self._record_parameters()
        return dict(zip(trainable(self.model), self._receive(v), strict=True))

    @torch.enable_grad()
    def _record_parameters(self) -> Receive:
        """Differentiate `contrast`, since EP uses it.

        If it is itself computed by automatic differentiation it has no graph; dPhi/ds has one, and its derivative by
        theta is the same.
        """
        model, x, s = self.model, self.x, self.s
        if isinstance(model, PrimitiveDynamics):
            inputs = leaves(s)
            contrast = model.contrast(x, inputs, s)
            received = tuple(contrast[name] for name in trainable(model))
            if any(g.requires_grad for g in received):
                return Tangent(received, inputs)
            out = model.gradient(model.drive(x), s)
        else:
            out = model.step(model.drive(x), s)
        parameters, samples = tuple(trainable(model).values()), len(x)
        return lambda v: [g / samples for g in _pull(out, parameters, v)]


class Tangent:
    """v -> (d outputs / d inputs) v, on the graph that computed `outputs` from `inputs`."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._u = leaves(tuple(torch.zeros_like(o) for o in outputs))
        self._pulled = _pull(outputs, inputs, self._u, create_graph=True)

    def __call__(self, v: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return _pull(self._pulled, self._u, v)


def leaves(s: State) -> State:
    return tuple(v.detach().requires_grad_() for v in s)


def _pull(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], v: Sequence[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """(d outputs / d inputs)^T v. Outputs without a graph contribute zero."""
    live = [(o, a) for o, a in zip(outputs, v, strict=True) if o.requires_grad]
    if not live:
        return tuple(torch.zeros_like(i) for i in inputs)
    return torch.autograd.grad(
        [o for o, _ in live],
        inputs,
        [a for _, a in live],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )


PROBES = 8
"""Pairs of random vectors per sample used to estimate the asymmetry."""

KRYLOV = 60
"""Steps of Arnoldi's iteration used to estimate the spectral radius."""

SATURATED_BELOW = 0.01
"""A neuron counts as saturated where sigma' is below this."""


def flat(s: State) -> Tensor:
    """All layers of each sample in one row, (B, N)."""
    return torch.cat([layer.flatten(1) for layer in s], 1)


def unflat(rows: Tensor, like: State) -> State:
    parts = rows.split([layer[0].numel() for layer in like], 1)
    return tuple(part.view_as(layer) for part, layer in zip(parts, like, strict=True))


def flat_product(around: Linearised) -> Callable[[Tensor], Tensor]:
    """v -> J v on rows (B, N), with J per sample at its state."""
    return lambda rows: flat(around.product(unflat(rows, around.s)))


def asymmetry(product: Callable[[Tensor], Tensor], rows: Tensor, seed: int) -> float:
    """|J - J^T| / (2 |J - c|) in Frobenius norm, estimated by random probes of u.Jv - v.Ju; 0 ... 1.

    c is the multiple of the identity nearest to J: the leak of an energy-based net is always symmetric and would
    mask the weights. 0 is symmetric, 1 antisymmetric; independent weights give 0.7.
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

    Below 1 the steady state attracts; the closer to 1, the slower.
    """
    source = torch.Generator().manual_seed(seed)
    size = min(KRYLOV, rows.shape[1])
    q = torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows)
    basis = [q / q.norm(dim=1, keepdim=True)]
    hessenberg = torch.zeros(rows.shape[0], size, size, dtype=torch.float64)
    for k in range(size):
        w = product(basis[k])
        # Two passes are enough: the second removes the rounding error of the first.
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
    """The fraction of neurons over all samples that cannot carry a signal: sigma' below `SATURATED_BELOW`.

    sigma' is that of squash for a prototypical net, and of the model's `activation` at s for an energy-based one.
    For a model with neither, a neuron counts if it does not respond at all: a zero row of J.
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
