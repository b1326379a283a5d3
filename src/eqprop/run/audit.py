"""Where the free phases of a trained run end: the share of samples that are not at rest and how far, per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eqprop.data import Streamed
from eqprop.dynamics import Dynamics
from eqprop.estimators.named import BACKPROP
from eqprop.gdu.settling import audit
from eqprop.physical.machine import Machine
from eqprop.relax import NotFiniteError, relax
from eqprop.run.evaluate import evaluation_phase
from eqprop.run.session import Session

AUDITED = 32
"""Training samples that are relaxed for it, the first ones."""


def audited(session: Session, estimator: str, model: Dynamics) -> dict[str, Any] | None:
    """Of a trained network, with the phase that errors are measured with: {"samples": 32, "layers": {...}}.

    None where nothing settles (backprop), or where settling is work of a machine: its readings are in the log.
    """
    spec = session.spec
    if estimator == BACKPROP or spec.phases.start == "initialised" or isinstance(session.images, Streamed):
        return None
    if isinstance(model, Machine):
        return None
    images = session.images
    stored = images.first(min(AUDITED, images.train_samples))[0].cpu()
    weight = next(model.parameters())
    x = session.inputs(stored.to(weight.device), model).to(weight.dtype)
    try:
        s = relax(model, x, replace(evaluation_phase(spec), checked=True)).state
    except NotFiniteError:
        return None
    return {"samples": len(x), "layers": audit(model, x, s)}
