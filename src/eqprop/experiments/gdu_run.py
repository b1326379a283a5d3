"""A comparison as a document: what was compared, what was found, where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.experiments.gdu_records import GduRecord
from eqprop.gdu import Convention, Options, Report, compare
from eqprop.models import CrossEntropy
from eqprop.provenance import provenance
from eqprop.relax import Schedule

FORMAT = 1
NAMES: dict[type[Cost], str] = {SquaredError: "squared-error", CrossEntropy: "cross-entropy"}
"""The costs of records as documents call them; one's own goes by the name of its class."""
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Subject:
    """What is put on the bench: a model with its batch, the phases, and the names the document carries."""

    name: str
    preset: str
    model: Dynamics
    cost: Cost
    x: Tensor
    y: Tensor
    T: int
    K: int
    beta: float
    seed: int
    init: str | None
    convention: Convention
    trained: dict[str, Any] | None = None
    """The method and the trial of a run that the weights come from, and how long it had been trained."""
    schedule: Schedule = "synchronous"
    """Of the free phase."""

    @classmethod
    def of_record(cls, record: GduRecord, dtype: torch.dtype, device: str = "cpu") -> Subject:
        cost, x, y = record.data(dtype)
        model = record.build(dtype).to(device)
        return cls(
            name=record.name,
            preset=record.preset,
            model=model,
            cost=cost.to(device),
            x=x.to(device),
            y=y.to(device),
            T=record.T,
            K=record.K,
            beta=record.beta,
            seed=record.seed,
            init=record.init,
            convention=record.convention,
        )


def run(
    subject: Subject, drop_unsettled: bool = False, progress: Callable[[float], None] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare, and return the document and the traces as plain values."""
    options = Options(
        drop_unsettled=drop_unsettled,
        convention=subject.convention,
        seed=subject.seed,
        schedule=subject.schedule,
        progress=progress,
    )
    report = compare(subject.model, subject.cost, subject.x, subject.y, subject.T, subject.K, subject.beta, options)
    return document(subject, report, drop_unsettled), {"name": subject.name, **report.traces_to_dict()}


def document(subject: Subject, report: Report, drop_unsettled: bool) -> dict[str, Any]:
    """The content of gdu.json."""
    found = report.to_dict()
    head = {
        "name": subject.name,
        "preset": subject.preset,
        **{key: found.pop(key) for key in ("T", "K", "beta", "dtype", "schedule")},
        "batch": len(subject.x),
        "seed": subject.seed,
        "init": subject.init,
        "nudge": getattr(subject.model, "nudge", "outside"),
        "cost": NAMES.get(type(subject.cost), type(subject.cost).__name__),
        "drop_unsettled": drop_unsettled,
        **({"trained": subject.trained} if subject.trained else {}),
    }
    return {**head, **found, "format": FORMAT, "provenance": provenance(subject.x.device)}


def same_settings(document: dict[str, Any], record: GduRecord, dtype: str, drop_unsettled: bool) -> bool:
    """Whether a document is what this record would give, so that it need not be made again."""
    wanted = {
        "name": record.name,
        "preset": record.preset,
        "T": record.T,
        "K": record.K,
        "beta": record.beta,
        "dtype": dtype,
        "batch": record.batch,
        "seed": record.seed,
        "init": record.init,
        "nudge": record.nudge,
        "cost": record.cost,
        "schedule": "synchronous",
        "drop_unsettled": drop_unsettled,
        "format": FORMAT,
    }
    # A document of an earlier version does not say what had no alternative then.
    found = {"nudge": "outside", "cost": "squared-error", "schedule": "synchronous", **document}
    return all(found.get(key) == value for key, value in wanted.items())
