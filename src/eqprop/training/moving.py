"""Continual EP's learning rates: whether they are small enough, tried before a training begins."""

from __future__ import annotations

import math

from eqprop.data import one_hot
from eqprop.estimators import EP, ContinualEP
from eqprop.training.order import epoch_order
from eqprop.training.plan import Plan

TOO_FAR = 0.5
"""The distance to EP's gradient, beside its length, from which a continual gradient is no longer like it."""


def drift(plan: Plan) -> float:
    """How far continual EP's gradient is from EP's on the first mini-batch of trial 0, beside the length of EP's."""
    record, images = plan.record, plan.images
    model = plan.network((0,))
    rows = epoch_order(record.seed, 0, len(images.train_x), record.batch)[0].to(images.train_x.device)
    x, y = plan.inputs(images.train_x[rows], model), one_hot(images.train_y[rows], images.classes, plan.dtype)
    moving = plan.estimator("ep", model)
    assert isinstance(moving, ContinualEP), "asked of continual EP only"
    still = EP(moving.T, moving.K, moving.schedule, moving.stop, checked=False, beta=moving.beta)
    cost = plan.cost(model)
    free, expected = still.gradient(model, cost, x, y)
    _, found = ContinualEP(0, moving.K, checked=False, beta=moving.beta, rates=moving.rates).gradient(
        model, cost, x, y, free.state
    )
    away = sum(float((found[p] - g).square().sum()) for p, g in expected.items())
    length = sum(float(g.square().sum()) for g in expected.values())
    return float((away / length) ** 0.5) if length else 0.0


def warning(plan: Plan) -> str | None:
    """What to say of a run whose parameters move too fast during the second phase; None for every other."""
    if plan.record.estimator != "continual" or "ep" not in plan.settings.methods:
        return None
    far = drift(plan)
    if far <= TOO_FAR:
        return None
    how = f"is {far:.2g} times the length of EP's away from it" if math.isfinite(far) else "is not finite"
    return (
        "continual EP is far from EP at these learning rates: on the first mini-batch its gradient "
        f"{how}. The parameters move too fast during the second phase. Lower the rates (--lr), or raise beta."
    )
