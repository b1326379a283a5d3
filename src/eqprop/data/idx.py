"""Reader for IDX files, the format of MNIST and its relatives.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

ELEMENT_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


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
    content = path.read_bytes()
    if content[:2] == GZIP_MAGIC:
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                f"{path} is a damaged gzip file ({error}); expected a complete one. Get the file again."
            ) from error
    return Idx(path, content, _elements(path, content))


def _elements(path: Path, content: bytes) -> NDArray[Any]:
    kind = ELEMENT_TYPES.get(content[2]) if len(content) >= 4 and content[:2] == b"\0\0" else None
    start = 4 + 4 * content[3] if kind else 0
    if kind is None or start == 4:
        raise ValueError(
            f"{path} is not an IDX file: it starts with {content[:4].hex(' ') or 'nothing'}; expected 00 00, an "
            "element type and 1 dimension or more. Check that this is the right file."
        )
    shape = tuple(int(n) for n in np.frombuffer(content[4:start].ljust(start - 4, b"\0"), ">u4"))
    expected, got = start + math.prod(shape) * np.dtype(kind).itemsize, len(content)
    if got != expected or 0 in shape:
        size = " x ".join(map(str, shape))
        how = "is cut short" if got < expected else "has trailing data" if got > expected else "holds nothing"
        raise ValueError(f"{path} {how}: it has {got} bytes, and its header says {size} elements. Get the file again.")
    return np.frombuffer(content, kind, offset=start).reshape(shape)
