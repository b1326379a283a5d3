"""The run folder: its files, and the lock that lets one process write.

experiment.json     the experiment and settings as they ran, written first and never changed
environment.json    versions, machine, commit and engines of every session that wrote to the folder
metrics.jsonl       one line per estimator, trial and epoch, appended
ESTIMATOR/          checkpoint.safetensors, and those kept: best.safetensors, epoch-0010.safetensors
augmented.png       training images as the first epoch sees them, if they are augmented
result.json         the final result, when the run is finished
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from eqprop.files import UNFINISHED, clear_unfinished, open_lock, read_bytes, take_lock, write_json
from eqprop.messages import command
from eqprop.run.distributed import Ranks

EXPERIMENT, ENVIRONMENT, METRICS, RESULT, LOCK = (
    "experiment.json",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    ".lock",
)
AUGMENTED = "augmented.png"
"""Sixteen training images as the first epoch sees them, if they are augmented."""
FORMAT = 3


def default_folder(name: str, root: Path = Path("runs")) -> Path:
    """runs/p-1h-20250131-142501, with a numeric suffix if that exists."""
    stem = f"{file_name(name.lower())}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (root / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def file_name(name: str) -> str:
    """A name as one part of a path: letters, digits and -_. only, at most 50, none of them a leading dot."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:50].strip(".-") or "run"


def is_run(folder: Path) -> bool:
    return (folder / EXPERIMENT).is_file()


def prepare_new(folder: Path) -> None:
    """Create the folder of a new run; refuse one that is not empty."""
    if is_run(folder):
        raise FileExistsError(
            f"{folder} already holds a run. Continue it with {command('resume', folder)}, or choose another --out."
        )
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(open_lock(folder / LOCK))
    except OSError as error:
        raise type(error)(
            f"Cannot write to {folder}: {error.strerror or error}. Choose a folder you may write to with --out."
        ) from error


def check_free(folder: Path) -> None:
    """Raise unless the folder is missing or empty, but for what a process leaves that was stopped as it began."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected a folder. Choose another --out.")
    foreign = [p.name for p in folder.iterdir() if p.name != LOCK and p.suffix != ".part"] if folder.exists() else []
    if foreign:
        listing = ", ".join(sorted(foreign)[:5]) + (", ..." if len(foreign) > 5 else "")
        raise FileExistsError(f"{folder} holds something else ({listing}). Choose a new or an empty folder with --out.")


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Wrap every write to a run folder: explain what fails."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # already a sentence
            raise
        raise explain_full_disk(folder, error) from error


@contextmanager
def locked_by_first(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Rank 0 holds the folder's lock, and all see the folder."""
    with ExitStack() as stack:
        with ranks.in_step():
            if ranks.leads:
                stack.enter_context(locked(folder))
        with ranks.in_step():
            if not (folder / LOCK).is_file():
                raise FileNotFoundError(
                    f"rank {ranks.rank} does not see the run folder {folder} that rank 0 writes. Choose an --out on a "
                    "disk that every machine shares."
                )
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and clear what a killed process left. The lock ends with the process, however it ends."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no run folder {folder}.")
    try:
        handle = open_lock(folder / LOCK)
    except OSError as error:
        why = str(error.strerror or error).rstrip(".")
        raise type(error)(f"Cannot write to {folder}: {why}.") from error
    try:
        if not take_lock(handle, folder / LOCK, wait=False):
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise BlockingIOError(
                f"{folder} is being written by another process ({owner}). Wait until it ends, or stop it."
            )
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        clear_unfinished(folder)
        clear_unfinished(folder, f"*/{UNFINISHED}")
        yield
    finally:
        os.close(handle)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object, or raise an error that says what is wrong with the file."""
    try:
        content = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} has no {path.name}, {what}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); expected JSON: {what}. Restore it from a copy.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object, {what}. Restore it from a copy.")
    return content


class _Entry(msgspec.Struct):
    """What a process that wrote to a run folder ran with."""

    provenance: dict[str, Any]
    engines: dict[str, Any]


def sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions that wrote to the folder, oldest first: provenance and engines."""
    path = folder / ENVIRONMENT
    found = read_json(path, "the environment").get("sessions", []) if path.exists() else []
    try:
        msgspec.convert(found, list[_Entry])
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{path} is damaged ({error}); expected a list of sessions with provenance. Restore it from a copy."
        ) from error
    return list(found)


def last_session(folder: Path) -> dict[str, Any] | None:
    return next(reversed(sessions(folder)), None)


def note_session(folder: Path, before: list[dict[str, Any]], session: dict[str, Any]) -> None:
    """Write the environment: earlier sessions, then this one."""
    write_json(folder / ENVIRONMENT, {"sessions": [*before, session]}, parents=False)


def explain_full_disk(folder: Path, error: OSError) -> OSError:
    """The same error, saying what is safe and what to do."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return type(error)(
        error.errno,
        f"Could not save to {folder}: {error.strerror or error}. Earlier checkpoints are intact; "
        f"{'free some space' if full else 'make the folder writable again'}, then continue with: "
        f"{command('resume', folder)}",
    )
