"""Atomic file writes, appends, reads of regular files, and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
from pathlib import Path


def write_bytes(path: Path, content: bytes, *, parents: bool = True) -> None:
    """Write to a temporary file, flush to disk, rename: readers see the old content or the new, never a mix.

    A link at `path` is replaced, not followed. Without `parents`, a missing folder is an error.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, content: str, *, parents: bool = True) -> None:
    write_bytes(path, content.encode("utf-8", "surrogateescape"), parents=parents)


def write_json(path: Path, content: object, *, parents: bool = True) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n", parents=parents)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk: without it, a power cut can undo a rename."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot flush a folder; they have their own guarantees.
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def append_text(path: Path, content: str) -> None:
    """Add to the end of a file, made if missing, and flush to disk: a reader may find the last line unfinished."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    with os.fdopen(handle, "ab") as file:
        file.write(content.encode("utf-8", "surrogateescape"))
        file.flush()
        os.fsync(file.fileno())


UNFINISHED = ".*.????????.part"
"""Temporary files of `write_bytes`; one that is left belongs to a process that was killed while writing."""


def clear_unfinished(folder: Path, pattern: str = UNFINISHED) -> None:
    """Remove temporary files that killed processes left in a folder which no other process writes now."""
    for part in folder.glob(pattern):
        if part.is_file():
            part.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Devices and pipes are left alone: they may never end."""
    _check_regular(path)
    return path.read_bytes()


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file. Restore it from a copy, or remove it.")


def open_lock(path: Path) -> int:
    """Open a lock file, created if missing."""
    _check_regular(path)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(f"{path} is a link, and what it points to may be another's. Remove the link.") from None


def take_lock(handle: int, path: Path, *, wait: bool) -> bool:
    """Lock an open file until it is closed. False if another process holds the lock and `wait` is False."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise OSError(
            f"Cannot lock {path}: {error.strerror or error}. Its file system has no locks, and without them two "
            "processes could damage the same files. Choose a folder on a local disk."
        ) from error
    return True
