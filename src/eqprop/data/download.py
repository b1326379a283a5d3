"""Downloads into a cache: checked by SHA-256, shown, and taken up again where they broke off.

pooch fetches, checks and moves a file into its place only when it is whole; the part that it does not have, going on
with a broken download, is done here: what has arrived stays in NAME.part, and the rest is asked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 16
RETRIES = 2
"""How often a broken or wrong file is asked for again before giving up; each time from where it broke off."""
TIMEOUT = 30.0
"""Seconds without a byte after which a host counts as silent."""

Tell = Callable[[str, int, int | None], None]
"""Told the file's name, the bytes there are and, where the host says it, the bytes there will be."""


@dataclass(frozen=True)
class Source:
    """Files to get: the set they belong to, the web folders they are in, their SHA-256, another way to get them."""

    title: str
    hosts: tuple[str, ...]
    files: Mapping[str, str]
    advice: str = ""

    def by_hand(self, folder: Path) -> str:
        advice = f" {self.advice}" if self.advice else ""
        return f"Or put {', '.join(self.files)} into {folder} yourself.{advice}"


class DownloadError(OSError):
    """A file could not be fetched."""


def download(source: Source, folder: Path, tell: Tell | None = None) -> None:
    """Get the files into the folder, from the first host that has them. Whole and right, or an error in words."""
    _check_pooch(source, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"Cannot make {folder} for {source.title}: {error.strerror or error}. Choose another with $EQPROP_CACHE."
        ) from error
    with _alone(folder), _shown(source.title) if tell is None else _as_is(tell) as show:
        for name, digest in source.files.items():
            _get(source, name, digest, folder, show)


def _check_pooch(source: Source, folder: Path) -> None:
    try:
        import pooch
    except ImportError as error:
        raise ImportError(
            f"{source.title} is not on this machine, and getting it needs pooch: pip install 'eqprop[download]'. "
            f"{source.by_hand(folder)}"
        ) from error
    pooch.get_logger().setLevel("WARNING")  # what it does is shown here already


def _get(source: Source, name: str, digest: str, folder: Path, tell: Tell) -> None:
    """One file, from one host after the other."""
    import pooch
    import requests

    complaints = []
    for host in source.hosts:
        box = pooch.create(path=folder, base_url=host, registry={name: f"sha256:{digest}"}, retry_if_failed=RETRIES)
        try:
            box.fetch(name, downloader=_Resuming(folder / f"{name}.part", tell))
            return
        except requests.exceptions.RequestException as error:
            complaints.append(f"{host}: {_reason(error)}")
        except ValueError as error:
            complaints.append(f"{host}: the file there is not the published one ({error})")
        except OSError as error:
            raise DownloadError(f"{name} of {source.title} could not be written to {folder}: {error}.") from error
    part, kept = folder / f"{name}.part", ""
    if part.is_file():
        kept = f" The {part.stat().st_size} bytes that arrived are kept, and the next attempt goes on from there."
    raise DownloadError(
        f"{name} of {source.title} could not be downloaded. {'; '.join(complaints)}.{kept} {source.by_hand(folder)}"
    )


class _Resuming:
    """What pooch calls to fetch a URL: goes on with what an earlier attempt has left."""

    def __init__(self, part: Path, tell: Tell) -> None:
        self.part, self.tell = part, tell

    def __call__(self, url: str, output_file: Any, pooch: Any, check_only: bool = False) -> bool | None:
        import requests

        have = self.part.stat().st_size if self.part.is_file() else 0
        # A host that compresses once more on the way would change the file.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            if answer.status_code == 416:  # nothing follows: what is there is the whole file, or none of it
                self._finish(output_file)
                return None
            answer.raise_for_status()
            if answer.status_code != 206:
                have = 0
            self._receive(answer, have)
        self._finish(output_file)
        return None

    def _receive(self, answer: Any, have: int) -> None:
        import requests

        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with self.part.open("ab" if have else "wb") as file:
            for piece in answer.iter_content(CHUNK):
                file.write(piece)
                have += len(piece)
                self.tell(self.part.stem, have, total)
        if total is not None and have < total:
            raise requests.exceptions.ConnectionError(f"the connection ended after {have} of {total} bytes")

    def _finish(self, output_file: Any) -> None:
        """Hand the file over to pooch, which checks it. A wrong one is not gone on with."""
        os.replace(self.part, output_file)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    """The innermost cause, which is what went wrong; the layers around it repeat it at length."""
    cause: BaseException = error
    for _ in range(8):
        inner = cause.args[-1] if cause.args and isinstance(cause.args[-1], BaseException) else None
        inner = getattr(cause, "reason", None) if isinstance(getattr(cause, "reason", None), Exception) else inner
        if inner is None:
            break
        cause = inner
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two processes that want the same files: the second waits, and finds them there."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _as_is(tell: Tell) -> Iterator[Tell]:
    yield tell


@contextmanager
def _shown(title: str) -> Iterator[Tell]:
    """A bar on a terminal, one line a file elsewhere, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        begun: set[str] = set()

        def line(name: str, have: int, total: int | None) -> None:
            if name not in begun:
                begun.add(name)
                size = "" if total is None else f", {total / 1e6:.1f} MB"
                print(f"Downloading {name} of {title}{size}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def bar(name: str, have: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=have, total=total)

        yield bar
