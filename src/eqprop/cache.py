"""The cache folder: downloaded data, and compiled code that only this user's processes may have written."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from eqprop.files import write_bytes

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
DIGEST = ".sha256"
"""Suffix of the file beside a piece of code that holds its digest."""


class CacheError(OSError):
    """There is no folder that is safe to load compiled code from."""


def cache_folder(*parts: str) -> Path:
    """The subfolder `parts` of eqprop/ in $EQPROP_CACHE, else in $XDG_CACHE_HOME, else in ~/.cache."""
    given = os.environ.get("EQPROP_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(given) if given else Path.home() / ".cache"
    except RuntimeError:  # no HOME, and the user is not in the password file
        home = _temporary() / f"cache-{os.getuid()}"
    return home.joinpath("eqprop", *parts)


def code_folder() -> Path:
    """The folder for compiled code, which nobody else can write to; raises CacheError if none can be made.

    The cache folder if it is this user's, else one per user among the temporary files, so that every process finds
    what another has compiled.
    """
    complaints = []
    for place in (lambda: cache_folder("code"), lambda: _temporary() / f"eqprop-{os.getuid()}" / "code"):
        try:
            return _private(place())
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            complaints.append(f"{where}{error.strerror or error}")
    raise CacheError(f"no private folder for compiled code ({'; '.join(complaints)}). Set $EQPROP_CACHE to one.")


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise CacheError("there is no temporary folder that can be written; set $TMPDIR to one") from error


def _private(folder: Path) -> Path:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    # Whoever can write to the parent can put another folder in this one's place.
    for place in (folder, folder.parent):
        facts = place.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            raise CacheError(f"{place} is not a folder")
        if facts.st_uid != os.getuid():
            raise CacheError(f"{place} belongs to another user")
        if facts.st_mode & OTHERS_WRITE:
            place.chmod(stat.S_IMODE(facts.st_mode) & ~OTHERS_WRITE)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"{folder} cannot be written")
    return folder


def store_code(path: Path, content: bytes) -> None:
    """Write code and its digest, the digest last: code without one is not loaded."""
    for place, what in ((path, content), (_digest_file(path), hashlib.sha256(content).hexdigest().encode())):
        write_bytes(place, what)
        place.chmod(0o700)  # whatever the umask


def stored_code(path: Path) -> bytes | None:
    """Code as `store_code` wrote it; None if it is missing, damaged, a link, or may be another user's."""
    code, digest = _read_own(path), _read_own(_digest_file(path))
    if code is None or digest is None or hashlib.sha256(code).hexdigest().encode() != digest:
        return None
    return code


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + DIGEST)


def _read_own(path: Path) -> bytes | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & OTHERS_WRITE:
            return None
        return file.read()
