"""d f / d z of a scalar function, real or analytic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def derivative(f: Tensor, inputs: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """df/dz for each input z, None where f does not depend on it.

    For an analytic f of complex inputs it is the complex derivative. torch's own gradient is its conjugate, the
    direction of steepest ascent of Re f; on real inputs the two are one.
    """
    grads = torch.autograd.grad(f, inputs, torch.ones_like(f), create_graph=create_graph, allow_unused=True)
    return tuple(g.conj().resolve_conj() if g is not None and g.is_complex() else g for g in grads)
