"""Strict reader for IDX files, the format of MNIST and its relatives.

An IDX file is two zero bytes, a byte for the element type, a byte for the number of dimensions, the
dimensions as big-endian 32-bit integers, then exactly the elements those dimensions imply, big-endian.
Anything else is an error: a truncated file must never become a smaller data set.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

ELEMENT_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
PIECE = 1 << 24
MOST_BYTES = 1 << 30
"""The largest file read, uncompressed: 1 GiB, 20 times MNIST. A gzip file of 1 MB can hold this much."""
MOST_DIMENSIONS = 32


@dataclass(frozen=True, eq=False)
class Idx:
    """A decoded IDX file: `content` is the whole file, uncompressed, and `values` a view of its elements."""

    path: Path
    content: bytes
    values: NDArray[Any]

    def sha256(self) -> str:
        """SHA-256 of the uncompressed file: the same for a file and for any compression of it."""
        return hashlib.sha256(self.content).hexdigest()


def read_idx(path: str | Path) -> Idx:
    """Read the array in an IDX file. Compression is detected from the first bytes, not from the name.

    Raises FileNotFoundError for a missing file and ValueError for one that is not exactly an IDX file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give the path of an IDX file, compressed (.gz) or not.")
    with path.open("rb") as raw:
        compressed = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        if not compressed:
            return _decode(path, raw)
        with gzip.GzipFile(fileobj=raw) as stream:
            try:
                return _decode(path, cast(BinaryIO, stream))
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(
                    f"{path} is a damaged gzip file ({error}); expected a complete one. Get the file again."
                ) from error


def _decode(path: Path, stream: BinaryIO) -> Idx:
    head, dtype, dimensions = _read_header(path, stream)
    expected = math.prod(dimensions) * dtype.itemsize
    promise = f"its header says {_times(dimensions)} elements of {dtype.itemsize} byte(s), that is {expected} bytes"
    if expected > MOST_BYTES:
        raise ValueError(f"{path} is too large: {promise}; at most {MOST_BYTES} are read. Split it.")
    content = head + _read_up_to(stream, expected)
    got = len(content) - len(head)
    if got < expected:
        raise ValueError(f"{path} is cut short: {promise}, and it holds {got}. Get the file again.")
    # Reading past the last element also makes gzip verify its checksum.
    if stream.read(1):
        raise ValueError(f"{path} has trailing data: {promise}, and more follow. Get the file again.")
    try:
        values = np.frombuffer(content, dtype, offset=len(head)).reshape(dimensions)
    except ValueError as error:  # no elements, and dimensions whose product overflows without the zero
        raise ValueError(f"{path} is no array: {promise}. Get the file again.") from error
    return Idx(path, content, values)


def _read_header(path: Path, stream: BinaryIO) -> tuple[bytes, np.dtype[Any], tuple[int, ...]]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in ELEMENT_TYPES or not 1 <= magic[3] <= MOST_DIMENSIONS:
        known = ", ".join(f"{code:02x}" for code in ELEMENT_TYPES)
        raise ValueError(
            f"{path} is not an IDX file: it starts with {_hex(magic)}; expected 00 00, an element type "
            f"({known}) and 1 to {MOST_DIMENSIONS} dimensions. Check that this is the right file."
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError(
            f"{path} is cut short: its header says {magic[3]} dimensions, that is {4 * magic[3]} bytes, and "
            f"it holds {len(sizes)}. Get the file again."
        )
    dimensions = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
    return magic + sizes, np.dtype(ELEMENT_TYPES[magic[2]]), dimensions


def _read_up_to(stream: BinaryIO, n: int) -> bytes:
    """Read n bytes, or as many as there are. In pieces: a single read would allocate n bytes up front."""
    pieces = []
    while n > 0 and (piece := stream.read(min(n, PIECE))):
        pieces.append(piece)
        n -= len(piece)
    return b"".join(pieces)


def _times(dimensions: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in dimensions)


def _hex(data: bytes) -> str:
    return data.hex(" ") if data else "nothing (it is empty)"
