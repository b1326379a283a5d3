"""Checkpoints of a leg: weights, optimizer and start, verified by SHA-256 and never unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from eqprop.files import write_bytes, write_json
from eqprop.starts import Persistent, Start
from eqprop.training.folder import FORMAT, OLD_FORMAT, read_json

CHECKPOINT = "checkpoint.json"
KINDS = ("weights-", "optimizer-", "start-")
"""Prefixes of the tensor files of a checkpoint."""


@dataclass(frozen=True)
class Position:
    """Progress of a leg: finished epochs, and iterations of the next one."""

    epoch: int = 0
    iteration: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume.

    weights         "TRIAL.PARAMETER" -> tensor, separate for each trial even if they are stacked
    optimizer       the optimizer's state_dict, tensors and numbers
    tally           the runner's counts in the unfinished epoch: name -> list over trials
    diverged        trial -> where and why it was stopped
    start           "TRIAL.NAME" -> tensor: where the free phases start (see `eqprop.starts`); empty for zero
    start_source    fingerprint of the training data that `start` belongs to
    still           whether the weights have not changed since the epoch began
    """

    position: Position
    finished: bool
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    tally: dict[str, list[float]]
    diverged: dict[str, dict[str, Any]]
    seconds: float
    epoch_seconds: float
    engine: str
    run: str = field(default="")
    start: dict[str, Tensor] = field(default_factory=dict)
    start_source: str = ""
    still: bool = False

    def to_dict(self) -> dict[str, Any]:
        skipped = ("weights", "optimizer", "start")
        return {k: v for k, v in asdict_shallow(self).items() if k not in skipped} | {"position": asdict(self.position)}


def asdict_shallow(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, without copying the tensors in them."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the new files, switch to them, then remove those of the previous checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    place = f"{checkpoint.position.epoch:04d}-{checkpoint.position.iteration:06d}"
    tensors, rest = split_tensors(checkpoint.optimizer)
    weights = _write_tensors(folder, f"weights-{place}", checkpoint.weights)
    optimizer = _write_tensors(folder, f"optimizer-{place}", tensors)
    content = {"format": FORMAT, **checkpoint.to_dict(), "weights": weights, "optimizer": {**optimizer, "rest": rest}}
    named = {CHECKPOINT, weights["file"], optimizer["file"]}
    if checkpoint.start:
        content["start"] = _write_tensors(folder, f"start-{place}", checkpoint.start)
        named.add(content["start"]["file"])
    write_json(folder / CHECKPOINT, content)
    for old in folder.iterdir():
        if old.name not in named and (old.suffix == ".part" or old.name.startswith(KINDS)):
            old.unlink(missing_ok=True)


def has_checkpoint(folder: Path) -> bool:
    return (folder / CHECKPOINT).is_file()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a leg's checkpoint and verify its files by SHA-256."""
    path = folder / CHECKPOINT
    content = read_json(path, "the last checkpoint")
    try:
        if content["format"] not in (FORMAT, OLD_FORMAT):
            raise ValueError(
                f"{path} has format {content['format']}; this version reads {OLD_FORMAT} and {FORMAT}. Use the version "
                "that wrote it."
            )
        weights = _read_tensors(folder, content["weights"])
        tensors = _read_tensors(folder, content["optimizer"])
        apart = ("position", "weights", "optimizer", "start", "start_source", "still")
        return Checkpoint(
            position=Position(**content["position"]),
            weights=weights,
            optimizer=join_tensors(tensors, _rest(content["optimizer"])),
            start=_read_tensors(folder, content["start"]) if "start" in content else {},
            start_source=content.get("start_source", ""),
            still=bool(content.get("still")),
            **{k: content[k] for k in Checkpoint.__dataclass_fields__ if k not in apart},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); expected a checkpoint. Restore it from a copy."
        ) from error


def _rest(optimizer: dict[str, Any]) -> Any:
    """The non-tensor part of the optimizer's state, under any key: version 0.1.0 used another name."""
    return next(value for key, value in optimizer.items() if key not in ("file", "sha256"))


def _write_tensors(folder: Path, stem: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write under a name with the content's digest, so that no file a checkpoint refers to is ever overwritten."""
    content = save_tensors({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    sha256 = hashlib.sha256(content).hexdigest()
    path = folder / f"{stem}-{sha256[:8]}.safetensors"
    write_bytes(path, content)
    return {"file": path.name, "sha256": sha256}


def _read_tensors(folder: Path, entry: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / Path(str(entry["file"])).name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the checkpoint refers to it. Restore it from a copy.")
    content = path.read_bytes()
    got = hashlib.sha256(content).hexdigest()
    if got != entry["sha256"]:
        raise ValueError(
            f"{path} does not match the checkpoint: its SHA-256 is {got[:16]}..., expected "
            f"{str(entry['sha256'])[:16]}... It is truncated or modified; restore it from a copy."
        )
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}). Restore it from a copy.") from error


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
