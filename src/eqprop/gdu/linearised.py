"""A model linearised at a state: products with J = dF/ds and with what parameters receive, as often as wanted.

All in reverse mode, on graphs recorded once. A product with J itself differentiates the product with its transpose,
which is linear, once more: exact, and for small tensors many times faster than forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import trainable
from eqprop.state import State

Receive = Callable[[State], Sequence[Tensor]]


class Linearised:
    """F around a state s, sample by sample."""

    def __init__(self, model: Dynamics, x: Tensor, s: State) -> None:
        self.model, self.x, self.s = model, x, s
        with torch.no_grad():
            self.drive = model.drive(x)
        with torch.enable_grad():
            inputs, push = leaves(s), leaves(tuple(torch.zeros_like(v) for v in s))
            self._step = Tangent(model.step(self.drive, inputs, push), (*inputs, *push))
        self._receive: Receive | None = None

    def product(self, v: State, push: State | None = None) -> State:
        """J v, or J v + N p where p is a nudge and N how it enters the step."""
        return self._step((*v, *(tuple(torch.zeros_like(a) for a in v) if push is None else push)))

    def squashed(self, v: State) -> State:
        """D v, where D is the derivative of squash at dPhi/ds(s): diag(sigma') on a prototypical net."""
        if not isinstance(self.model, PrimitiveDynamics):
            raise TypeError(f"{type(self.model).__name__} has no primitive, so there is no squash to differentiate.")
        with torch.no_grad():
            inputs = leaves(self.model.gradient(self.drive, self.s))
        with torch.enable_grad():
            return Tangent(self.model.squash(inputs), inputs)(v)

    def synapses(self, v: State) -> dict[str, Tensor]:
        """d^2Phi/dtheta ds v, or (dF/dtheta)^T v without a primitive: what parameters get of a move v, batch mean."""
        if self._receive is None:
            self._receive = self._record_parameters()
        return dict(zip(trainable(self.model), self._receive(v), strict=True))

    @torch.enable_grad()
    def _record_parameters(self) -> Receive:
        """Differentiate `contrast`, since it is what EP uses.

        Where it is itself made by automatic differentiation it carries no graph; dPhi/ds does, and its derivative by
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
    """v -> (d outputs / d inputs) v, on the graph by which `outputs` were made from `inputs`."""

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
    """(d outputs / d inputs)^T v. Outputs that depend on nothing pull on nothing."""
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
