"""Atomic file writes, and reads that never follow a link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
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


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Links, devices and pipes are refused: they lead elsewhere, or never end."""
    with os.fdopen(_open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _open_regular(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise linked(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file. Restore it from a copy, or remove it.")
    return handle


def open_lock(path: Path) -> int:
    """Open a lock file, created if missing."""
    return _open_regular(path, os.O_RDWR | os.O_CREAT)


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


def linked(path: Path) -> OSError:
    """The error for a link where a run keeps a file or folder of its own."""
    where = os.readlink(path) if path.is_symlink() else "another place"
    return OSError(
        f"{path} is a symbolic link to {where}; expected a file or folder of the run itself. Links are not followed, "
        "since a run would change what they point to. Put a copy in its place, or remove it."
    )


def refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise linked(path)
