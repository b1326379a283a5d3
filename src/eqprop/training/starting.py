"""Where the free phases of a run begin: made from its record, saved and restored with its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics
from eqprop.experiments.record import Record
from eqprop.starts import Initialised, Persistent, Start
from eqprop.training.checkpoint import Checkpoint
from eqprop.training.settings import Settings


def make_start(record: Record, settings: Settings, model: Dynamics, x: Tensor) -> Start | None:
    """The record's start for these networks and training inputs, as it is before the first iteration."""
    if record.start == "persistent":
        return Persistent(model, x, "cpu" if settings.states == "cpu" else None)
    if record.start == "initialised":
        return Initialised(model, x, record.initialiser_rate)
    return None


def source_of(start: Start | None) -> str:
    """What ties the tensors of a start to its training data; an initialiser is tied to none."""
    return start.source if isinstance(start, Persistent) else ""


def saved_start(start: Start | None, trials: Sequence[int]) -> dict[str, Tensor]:
    """TRIAL.NAME -> tensor. States that nobody has kept yet are all zero, and need no room."""
    if start is None or (isinstance(start, Persistent) and not start.touched):
        return {}
    return {
        f"{trial}.{name}": tensor if len(trials) == 1 else tensor[r]
        for r, trial in enumerate(trials)
        for name, tensor in start.tensors.items()
    }


@torch.no_grad()
def restore_start(start: Start | None, trials: Sequence[int], checkpoint: Checkpoint) -> None:
    """Put the start where the checkpoint left it; refuse states of other data."""
    if start is None or not checkpoint.start:
        return
    if checkpoint.start_source != source_of(start):
        raise ValueError(
            "The states kept in the checkpoint belong to other training samples, or to these in another order: their "
            f"fingerprint is {checkpoint.start_source[:16]}..., that of the data given is {source_of(start)[:16]}... "
            "Give the data the run was begun with (--data). The run is as it was."
        )
    for r, trial in enumerate(trials):
        for name, tensor in start.tensors.items():
            place = tensor if len(trials) == 1 else tensor[r]
            place.copy_(_saved(checkpoint.start, f"{trial}.{name}", place))
    if isinstance(start, Persistent):
        start.touched = True


def _saved(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None or found.shape != like.shape:
        got = "nothing" if found is None else f"shape {tuple(found.shape)}"
        raise ValueError(
            f"The checkpoint has {got} for {name} of the start; expected shape {tuple(like.shape)}. It belongs to "
            "another network or to other data: give those the run was begun with."
        )
    return found
