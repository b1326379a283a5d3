"""The run folder: its files, and the lock that lets one process write.

experiment.json     the experiment and settings as they ran, written first and never changed
environment.json    versions, machine, commit and engines of every session that wrote to the folder
metrics.jsonl       one line per estimator, trial and epoch
ESTIMATOR/          checkpoint.json, and the weights and optimizer files it names
augmented.png       training images as the first epoch sees them, if they are augmented
result.json         the final result, when the run is finished

Runs of version 0.1.0 (format 1) still load; their experiment.json is called record.json.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from eqprop.files import open_lock, read_bytes, refuse_link, take_lock, write_json
from eqprop.messages import command
from eqprop.run.distributed import Ranks

EXPERIMENT, ENVIRONMENT, METRICS, RESULT, LOCK = (
    "experiment.json",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    ".lock",
)
OLD_EXPERIMENT = "record.json"
TURNS = ".turns"
"""Locked while one of several ranks writes metrics.jsonl."""
AUGMENTED = "augmented.png"
"""Sixteen training images as the first epoch sees them, if they are augmented."""
FILES = (EXPERIMENT, OLD_EXPERIMENT, ENVIRONMENT, METRICS, RESULT)
FORMAT, OLD_FORMAT = 2, 1


def default_folder(name: str, root: Path = Path("runs")) -> Path:
    """runs/p-1h-20250131-142501, with a numeric suffix if that exists."""
    stem = f"{file_name(name.lower())}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (root / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def file_name(name: str) -> str:
    """A name as one part of a path: letters, digits and -_. only, at most 50, none of them a leading dot."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:50].strip(".-") or "run"


def is_run(folder: Path) -> bool:
    return experiment_file(folder).is_file()


def experiment_file(folder: Path) -> Path:
    """The file that describes a run: experiment.json, or record.json if version 0.1.0 wrote it."""
    old = folder / OLD_EXPERIMENT
    return old if old.is_file() else folder / EXPERIMENT


def prepare_new(folder: Path) -> None:
    """Create the folder of a new run; refuse one that is not empty."""
    if is_run(folder):
        raise FileExistsError(
            f"{folder} already holds a run. Continue it with {command('resume', folder)}, or choose another --out."
        )
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected a folder for the run. Choose another --out.")
    # A run stopped before it started leaves only a lock and temporary files.
    foreign = [p.name for p in folder.iterdir() if p.name != LOCK and p.suffix != ".part"] if folder.exists() else []
    if foreign:
        listing = ", ".join(sorted(foreign)[:5]) + (", ..." if len(foreign) > 5 else "")
        raise FileExistsError(
            f"{folder} is not empty and not a run (it holds {listing}). Choose a new or an empty folder with --out."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(open_lock(folder / LOCK))
    except OSError as error:
        raise type(error)(
            f"Cannot write to {folder}: {error.strerror or error}. Choose a folder you may write to with --out."
        ) from error


@dataclass(frozen=True)
class Held:
    """A run folder whose lock this process holds."""

    folder: Path
    handle: int

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wrap every write: refuse a folder that is no longer the locked one, and explain what fails."""
        self.check()
        try:
            yield
        except OSError as error:
            self.check()
            if error.errno is None:  # already a sentence
                raise
            raise explain_full_disk(self.folder, error) from error

    def check(self) -> None:
        """Raise if the folder was deleted, moved or replaced. Its name would lead to another folder, or to none."""
        try:
            there = os.stat(self.folder / LOCK, follow_symlinks=False)
        except OSError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self.handle)):
            raise FileNotFoundError(
                f"{self.folder} was deleted, moved or replaced during the run (its {LOCK} is gone), so nothing more "
                "was written. If you moved it, continue with: eqprop resume NEW_FOLDER"
            )


@contextmanager
def locked_by_first(folder: Path, ranks: Ranks) -> Iterator[Held]:
    """Rank 0 holds the folder's lock; the others hold the file open, to notice a folder that was replaced."""
    with ExitStack() as stack:
        with ranks.in_step():
            held = stack.enter_context(locked(folder)) if ranks.leads else None
        with ranks.in_step():
            if held is None and not is_seen(folder):
                raise FileNotFoundError(
                    f"rank {ranks.rank} does not see the run folder {folder} that rank 0 writes. Choose an --out on a "
                    "disk that every machine shares."
                )
        if held is None:
            handle = open_lock(folder / LOCK)
            stack.callback(os.close, handle)
            held = Held(folder, handle)
        yield held


def is_seen(folder: Path) -> bool:
    return (folder / LOCK).is_file()


@contextmanager
def locked(folder: Path) -> Iterator[Held]:
    """Hold the folder's lock. The system releases it when the process ends, however it ends."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no run folder {folder}.")
    for name in FILES:
        refuse_link(folder / name)
    try:
        handle = open_lock(folder / LOCK)
    except OSError as error:
        raise type(error)(f"Cannot write to {folder}: {error.strerror or error}.") from error
    try:
        if not take_lock(handle, folder / LOCK, wait=False):
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise BlockingIOError(
                f"{folder} is being written by another process ({owner}). Wait until it ends, or stop it."
            )
        # A second hard link could be someone else's file.
        if os.fstat(handle).st_nlink == 1:
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        _clear_unfinished(folder)
        yield Held(folder, handle)
    finally:
        os.close(handle)


def _clear_unfinished(folder: Path) -> None:
    """Remove temporary files left by a process that was killed while writing."""
    for name in FILES:
        for part in folder.glob(f".{name}.*.part"):
            part.unlink(missing_ok=True)


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


def sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions that wrote to the folder, oldest first: provenance and engines."""
    path = folder / ENVIRONMENT
    found = read_json(path, "the environment").get("sessions", []) if path.exists() else []
    if not isinstance(found, list) or not all(isinstance(s, dict) and _are_dicts(s) for s in found):
        raise ValueError(f"{path} is damaged: expected a list of sessions with provenance. Restore it from a copy.")
    return found


def _are_dicts(session: dict[str, Any]) -> bool:
    return all(isinstance(session.get(name), dict) for name in ("provenance", "engines"))


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
