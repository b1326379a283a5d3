"""Checkpoints of a leg: one safetensors file each, verified by a digest of all it holds and never unpickled.

The metadata of the file hold what is no tensor, as JSON; every tensor is named KIND/NAME, such as `weights/0.W01`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from eqprop.files import read_bytes, sync_folder, write_bytes
from eqprop.starts import Persistent, Start

LAST, BEST = "checkpoint", "best"
"""Names of checkpoints in a leg's folder: the last one, and the one with the lowest test error if it is kept."""
SUFFIX = ".safetensors"
KINDS = ("weights", "optimizer", "start", "average")
FORMAT = 3

Count = Annotated[int, msgspec.Meta(ge=0)]


class DamagedError(ValueError):
    """A checkpoint that cannot be used: changed, incomplete, or of another network."""


@dataclass(frozen=True)
class Position:
    """Progress of a leg: finished epochs, and iterations of the next one."""

    epoch: Count = 0
    iteration: Count = 0


@dataclass(frozen=True)
class Divergence:
    """Where and why a trial was stopped."""

    epoch: Count
    iteration: Count
    reason: str


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a checkpoint says besides its tensors.

    tally           the runner's counts in the unfinished epoch: name -> list over trials
    diverged        trial -> where and why it was stopped
    run             identity of the run (see `plan.identity`)
    start_source    fingerprint of the training data that `Checkpoint.start` belongs to
    guard           what keeps free phases at rest (see `rest.Guard`); empty without
    work            what a machine in the loop has done so far (see `eqprop.physical.Work`); empty without
    settling        trial -> where its free phases end (see `audit`), at the end of a leg; empty before
    """

    position: Position
    finished: bool
    tally: dict[str, list[float]]
    diverged: dict[int, Divergence]
    seconds: float
    epoch_seconds: float
    engine: str
    run: str = ""
    start_source: str = ""
    guard: dict[str, float] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)
    settling: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Head):
    """Everything needed to resume.

    weights         "TRIAL.PARAMETER" -> tensor, separate for each trial even if they are stacked
    optimizer       the optimizer's state_dict, tensors and numbers
    start           "TRIAL.NAME" -> tensor: where the free phases start (see `eqprop.starts`); empty for zero
    average         "TRIAL.PARAMETER" -> the averaged weights, and "power" (see `extras.Average`); empty without
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    start: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)

    @property
    def head(self) -> Head:
        """The same without tensors."""
        return Head(**{one.name: getattr(self, one.name) for one in fields(Head)})


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON in the metadata of a checkpoint; `optimizer` refers to tensors (see `split_tensors`)."""

    format: Literal[3]
    head: Head
    optimizer: Any


def kept(epoch: int) -> str:
    """The name of the checkpoint after an epoch, if it is kept."""
    return f"epoch-{epoch:04d}"


def checkpoint_file(leg: Path, name: str = LAST) -> Path:
    """The file of a checkpoint in a leg's folder."""
    return leg / f"{name}{SUFFIX}"


def write_checkpoint(leg: Path, checkpoint: Checkpoint, name: str = LAST) -> None:
    """Replace the checkpoint of that name: a reader finds the earlier one or the new one, never a mix."""
    if not leg.is_dir():
        leg.mkdir()
        sync_folder(leg.parent)
    optimizer, rest = split_tensors(checkpoint.optimizer)
    kinds = (checkpoint.weights, optimizer, checkpoint.start, checkpoint.average)
    tensors = {
        f"{kind}/{key}": value.detach().cpu().contiguous()
        for kind, found in zip(KINDS, kinds, strict=True)
        for key, value in found.items()
    }
    text = json.dumps({"format": FORMAT, "head": asdict(checkpoint.head), "optimizer": rest})
    metadata = {"eqprop": text, "digest": _digest(text, tensors)}
    write_bytes(checkpoint_file(leg, name), save_tensors(tensors, metadata), parents=False)


def read_checkpoint(leg: Path, name: str = LAST) -> Checkpoint:
    """Read a checkpoint of a leg's folder and verify all of it."""
    path = checkpoint_file(leg, name)
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing. Restore it from a copy.") from None
    try:
        tensors, metadata = load_tensors(content), _metadata(content)
        text = metadata["eqprop"]
        if metadata["digest"] != _digest(text, tensors):
            raise DamagedError(f"{path} is damaged: it does not match its own digest. Restore it from a copy.")
        found = msgspec.convert(json.loads(text), _Content, str_keys=True)
        parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for place, tensor in tensors.items():
            kind, _, key = place.partition("/")
            parts[kind][key] = tensor
        optimizer = join_tensors(parts["optimizer"], found.optimizer)
    except DamagedError:
        raise
    except (SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(
            f"{path} is damaged ({error}); expected a checkpoint of format {FORMAT}. Restore it from a copy."
        ) from error
    return Checkpoint(**vars(found.head), **{**parts, "optimizer": optimizer})


def _metadata(content: bytes) -> dict[str, str]:
    """What a safetensors file says in its header, the JSON after a length in eight bytes."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return found


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the JSON and of the names, types, shapes and bytes of the tensors."""
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_weights(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Raise unless the checkpoint holds exactly these weights by name, shape and dtype, all finite.

    A trial that diverged is not trained any more and may hold anything finite or not.
    """
    for name, like in expected.items():
        found = checkpoint.weights.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            got = "nothing" if found is None else f"{tuple(found.shape)} {_kind(found)}"
            raise DamagedError(
                f"The checkpoint has {got} for the weights {name}; expected {tuple(like.shape)} {_kind(like)}. It "
                "belongs to another network, or was changed: restore it from a copy."
            )
        if int(name.partition(".")[0]) not in checkpoint.diverged and not bool(torch.isfinite(found).all()):
            raise DamagedError(
                f"The weights {name} of the checkpoint are not finite, and its trial has not diverged: the checkpoint "
                "was changed. Restore it from a copy."
            )
    strange = next((name for name in checkpoint.weights if name not in expected), None)
    if strange is not None:
        raise DamagedError(f"The checkpoint has weights {strange}, which this network lacks. Restore it from a copy.")


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def split_tensors(state: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Split an optimizer's state_dict into tensors by path, and JSON that refers to them."""
    tensors: dict[str, Tensor] = {}

    def rest(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {"tensor": path}
        if isinstance(value, dict):
            return {"dict": [[key, rest(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [rest(item, f"{path}/{n}") for n, item in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(
            f"The optimizer keeps a {type(value).__name__} ({path}), which cannot be saved without pickle. Use another "
            "optimizer, such as SGD or Adam."
        )

    return tensors, rest(state, "state")


def join_tensors(tensors: dict[str, Tensor], rest: Any) -> Any:
    """The inverse of `split_tensors`."""
    if isinstance(rest, dict):
        ((kind, content),) = rest.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dict":
            return {key: join_tensors(tensors, item) for key, item in content}
        items = [join_tensors(tensors, item) for item in content]
        return tuple(items) if kind == "tuple" else items
    return rest


def digest(values: object) -> str:
    """SHA-256 of a JSON value, independent of key order; ties a checkpoint to its experiment."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def source_of(start: Start | None) -> str:
    """Fingerprint of the training data a start belongs to; empty for an initialiser, which fits any data."""
    return start.source if isinstance(start, Persistent) else ""


def saved_start(start: Start | None, trials: Sequence[int]) -> dict[str, Tensor]:
    """TRIAL.NAME -> tensor. Persistent states not yet written are all zero and are not saved."""
    if start is None or (isinstance(start, Persistent) and not start.touched):
        return {}
    return {
        f"{trial}.{name}": tensor if len(trials) == 1 else tensor[r]
        for r, trial in enumerate(trials)
        for name, tensor in start.tensors.items()
    }


@torch.no_grad()
def restore_start(start: Start | None, trials: Sequence[int], checkpoint: Checkpoint) -> None:
    """Restore the start from a checkpoint; refuse states of other data."""
    if start is None or not checkpoint.start:
        return
    if checkpoint.start_source != source_of(start):
        raise ValueError(
            "The states in the checkpoint belong to other training samples, or to these in another order: their "
            f"fingerprint is {checkpoint.start_source[:16]}..., that of the data given is {source_of(start)[:16]}... "
            "Give the data the run started with (--data). The run has not been changed."
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
            "another network or to other data: give those the run started with."
        )
    return found
