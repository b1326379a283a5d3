"""Checkpoints of a leg: weights, optimizer and start, verified by SHA-256 and never unpickled."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from eqprop.files import read_bytes, refuse_link, sync_folder, write_bytes, write_json
from eqprop.run.folder import FORMAT, OLD_FORMAT, read_json
from eqprop.starts import Persistent, Start

CHECKPOINT = "checkpoint.json"
KINDS = ("weights-", "optimizer-", "start-", "average-")
"""Prefixes of the tensor files of a checkpoint."""
DIGEST = "digest"
"""Field of checkpoint.json with the digest of all others, which include those of the tensor files."""


class DamagedError(ValueError):
    """A checkpoint that cannot be used: changed, incomplete, or of another network."""


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
    average         "TRIAL.PARAMETER" -> the averaged weights, and "power" (see `extras.Average`); empty without
    still           whether the weights have not changed since the epoch began
    lines           the leg's lines of metrics.jsonl up to `position`; None if an earlier version wrote it
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
    lines: tuple[str, ...] | None = None
    average: dict[str, Tensor] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        skipped = ("weights", "optimizer", "start", "average")
        return {k: v for k, v in asdict_shallow(self).items() if k not in skipped} | {"position": asdict(self.position)}


def asdict_shallow(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, without copying the tensors in them."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the new files, switch to them, then remove those of the previous checkpoint."""
    refuse_link(folder)
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(folder.parent)
    place = f"{checkpoint.position.epoch:04d}-{checkpoint.position.iteration:06d}"
    tensors, rest = split_tensors(checkpoint.optimizer)
    weights = _write_tensors(folder, f"weights-{place}", checkpoint.weights)
    optimizer = _write_tensors(folder, f"optimizer-{place}", tensors)
    content = {"format": FORMAT, **checkpoint.to_dict(), "weights": weights, "optimizer": {**optimizer, "rest": rest}}
    named = {CHECKPOINT, weights["file"], optimizer["file"]}
    for kind, tensors in (("start", checkpoint.start), ("average", checkpoint.average)):
        if tensors:
            content[kind] = _write_tensors(folder, f"{kind}-{place}", tensors)
            named.add(content[kind]["file"])
    write_json(folder / CHECKPOINT, {**content, DIGEST: digest(content)}, parents=False)
    for old in folder.iterdir():
        if old.name not in named and (old.suffix == ".part" or old.name.startswith(KINDS)) and not old.is_dir():
            old.unlink(missing_ok=True)


BEST = "best"
"""Subfolder of a leg: the checkpoint with the lowest test error so far, if it is kept."""


def kept(epoch: int) -> str:
    """Subfolder of a leg: the checkpoint after an epoch, if it is kept."""
    return f"epoch-{epoch:04d}"


def has_checkpoint(folder: Path) -> bool:
    return os.path.lexists(folder / CHECKPOINT)


def survivors(folder: Path) -> list[str]:
    """Weight files of a leg after its first iteration: without a checkpoint.json they show that it was lost.

    Initial weights do not count. They follow from the seed, and a process killed before its first checkpoint was
    complete leaves them.
    """
    names = (path.name for path in folder.glob("weights-*")) if folder.is_dir() else ()
    return sorted(name for name in names if not name.startswith("weights-0000-000000"))


def set_aside(folder: Path) -> Path:
    """Rename a leg's folder, so that the leg can start again and nothing is deleted. Returns the new path."""
    candidates = (folder.with_name(f"{folder.name}.old{'' if n == 1 else f'-{n}'}") for n in range(1, 1000))
    place = next(path for path in candidates if not os.path.lexists(path))
    os.rename(folder, place)
    sync_folder(folder.parent)
    return place


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_position(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"epoch", "iteration"} and all(map(_is_count, value.values()))


def _is_tally(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(counts, list) and all(isinstance(count, int | float) for count in counts)
        for counts in value.values()
    )


def _is_diverged(value: Any) -> bool:
    return isinstance(value, dict) and all(
        trial.isdecimal()
        and isinstance(where, dict)
        and where.keys() == {"epoch", "iteration", "reason"}
        and _is_count(where["epoch"])
        and _is_count(where["iteration"])
        and isinstance(where["reason"], str)
        for trial, where in value.items()
    )


def _is_file(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("file", "sha256"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_lines(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_text, value)))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


REQUIRED: dict[str, Callable[[Any], bool]] = {
    "position": _is_position,
    "finished": _is_flag,
    "tally": _is_tally,
    "diverged": _is_diverged,
    "seconds": _is_seconds,
    "epoch_seconds": _is_seconds,
    "engine": _is_text,
    "run": _is_text,
    "weights": _is_file,
    "optimizer": _is_file,
}
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "start": _is_file,
    "average": _is_file,
    "start_source": _is_text,
    "still": _is_flag,
    "lines": _is_lines,
}
"""Fields of checkpoint.json; earlier versions wrote no lines, and no digest."""


def read_head(folder: Path) -> dict[str, Any]:
    """Read and verify a leg's checkpoint.json, but not the files it refers to."""
    refuse_link(folder)
    path = folder / CHECKPOINT
    try:
        content = read_json(path, "the last checkpoint")
    except ValueError as error:
        raise DamagedError(str(error)) from error
    if content.get("format", FORMAT) not in (FORMAT, OLD_FORMAT):
        raise ValueError(
            f"{path} has format {content['format']}; this version reads {OLD_FORMAT} and {FORMAT}. Use the version "
            "that wrote it."
        )
    written = content.pop(DIGEST, None)
    if written is not None and written != digest(content):
        raise DamagedError(f"{path} is damaged: it does not match its own digest. Restore it from a copy.")
    wrong = [name for name, fits in REQUIRED.items() if name not in content or not fits(content[name])]
    wrong += [name for name, fits in OPTIONAL.items() if name in content and not fits(content[name])]
    if wrong:
        raise DamagedError(
            f"{path} is damaged: {', '.join(wrong)} missing or not as expected in a checkpoint. Restore it from a copy."
        )
    return content


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a leg's checkpoint and verify its files by SHA-256."""
    content = read_head(folder)
    weights, tensors = (_read_tensors(folder, content[name]) for name in ("weights", "optimizer"))
    lines = content.get("lines")
    try:
        optimizer = join_tensors(tensors, _rest(content["optimizer"]))
    except (KeyError, TypeError, ValueError, StopIteration, RecursionError) as error:
        raise DamagedError(
            f"{folder / CHECKPOINT} is damaged (optimizer: {type(error).__name__}); expected the state of an "
            "optimizer. Restore it from a copy."
        ) from error
    as_they_are = ("finished", "tally", "diverged", "seconds", "epoch_seconds", "engine", "run")
    return Checkpoint(
        position=Position(**content["position"]),
        weights=weights,
        optimizer=optimizer,
        start=_read_tensors(folder, content["start"]) if "start" in content else {},
        average=_read_tensors(folder, content["average"]) if "average" in content else {},
        start_source=content.get("start_source", ""),
        still=content.get("still", False),
        lines=None if lines is None else tuple(lines),
        **{name: content[name] for name in as_they_are},
    )


def _rest(optimizer: dict[str, Any]) -> Any:
    """The non-tensor part of the optimizer's state, under any key: version 0.1.0 used another name."""
    return next(value for key, value in optimizer.items() if key not in ("file", "sha256"))


def _write_tensors(folder: Path, stem: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write under a name with the content's digest, so that no file a checkpoint refers to is ever overwritten."""
    content = save_tensors({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    sha256 = hashlib.sha256(content).hexdigest()
    path = folder / f"{stem}-{sha256[:8]}.safetensors"
    write_bytes(path, content, parents=False)
    return {"file": path.name, "sha256": sha256}


def _read_tensors(folder: Path, entry: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / Path(entry["file"]).name
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing; the checkpoint refers to it. Restore it from a copy.") from None
    got = hashlib.sha256(content).hexdigest()
    if got != entry["sha256"]:
        raise DamagedError(
            f"{path} does not match the checkpoint: its SHA-256 is {got[:16]}..., expected "
            f"{entry['sha256'][:16]}... It is truncated or modified; restore it from a copy."
        )
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise DamagedError(f"{path} is not a safetensors file ({error}). Restore it from a copy.") from error


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
        if name.partition(".")[0] not in checkpoint.diverged and not bool(torch.isfinite(found).all()):
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
