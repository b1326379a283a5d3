"""Where the free phases of a trained run end: the share of samples that are not at rest and how far, per layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eqprop.data import Streamed
from eqprop.estimators.named import BACKPROP
from eqprop.gdu.settling import audit
from eqprop.physical.machine import Machine
from eqprop.relax import NotFiniteError, relax
from eqprop.run.evaluate import evaluation_phase, load
from eqprop.run.session import Session

AUDITED = 32
"""Training samples that are relaxed for it, the first ones."""


def audited(session: Session, folder: Path, estimator: str, trial: int) -> dict[str, Any] | None:
    """Of a trial's last weights, with the phase that errors are measured with: {"samples": 32, "layers": {...}}.

    None where nothing settles (backprop), or where settling is work of a machine: its readings are in the log.
    """
    spec = session.spec
    if estimator == BACKPROP or spec.phases.start == "initialised" or isinstance(session.images, Streamed):
        return None
    found = load(folder, estimator, trial, model=session.own)
    if isinstance(found.model, Machine):
        return None
    images = session.images
    stored = images.first(min(AUDITED, images.train_samples))[0].cpu()
    x = session.inputs(stored, found.model).to(next(found.model.parameters()).dtype)
    try:
        s = relax(found.model, x, replace(evaluation_phase(spec), checked=True)).state
    except NotFiniteError:
        return None
    return {"samples": len(x), "layers": audit(found.model, x, s)}
