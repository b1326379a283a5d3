"""The data module against an independent decoding of the same files, and against damaged copies of them."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eqprop.data import Images, idx_directory, images, mnist, one_hot, read_idx

SHIPPED = images.MNIST_DIRECTORY
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = images.FILES


def unpack(name: str) -> bytes:
    return gzip.decompress((SHIPPED / f"{name}.gz").read_bytes())


def idx_bytes(array: np.ndarray) -> bytes:
    """An IDX file written from the format's description, for arrays the shipped files do not cover."""
    code = {"u1": 8, "i1": 9, "i2": 0xB, "i4": 0xC, "f4": 0xD, "f8": 0xE}[array.dtype.str[1:]]
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture(scope="module")
def full() -> Images:
    return mnist()


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """The shipped files in a directory of their own, free to be damaged."""
    directory = tmp_path / "digits"
    directory.mkdir()
    for name in images.FILES:
        shutil.copyfile(SHIPPED / f"{name}.gz", directory / f"{name}.gz")
    return directory


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A valid set of 6 + 4 images of 2 x 3 pixels in 3 classes, as plain files."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    generator = np.random.default_rng(0)
    for name, count in ((TRAIN_IMAGES, 6), (TEST_IMAGES, 4)):
        (directory / name).write_bytes(idx_bytes(generator.integers(0, 256, (count, 2, 3), np.uint8)))
    for name, count in ((TRAIN_LABELS, 6), (TEST_LABELS, 4)):
        (directory / name).write_bytes(idx_bytes((np.arange(count) % 3).astype(np.uint8)))
    return directory


def test_mnist_has_its_known_sizes_and_ranges(full: Images) -> None:
    assert full.train_x.shape == (60000, 784)
    assert full.test_x.shape == (10000, 784)
    assert full.train_y.shape == (60000,)
    assert full.test_y.shape == (10000,)
    assert (full.shape, full.classes, full.name) == ((28, 28), 10, "mnist")
    assert full.train_x.dtype == torch.float32
    assert full.train_y.dtype == torch.int64
    for pixels in (full.train_x, full.test_x):
        assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)


def test_mnist_labels_are_the_published_ones(full: Images) -> None:
    counts = torch.bincount(full.train_y, minlength=10).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert full.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert full.test_y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]


def test_mnist_agrees_with_an_independent_decoding(full: Images) -> None:
    for name, x in ((TRAIN_IMAGES, full.train_x), (TEST_IMAGES, full.test_x)):
        raw = np.frombuffer(unpack(name)[16:], np.uint8).reshape(-1, 784)
        assert np.array_equal(x.numpy(), raw.astype(np.float32) / np.float32(255))
    for name, y in ((TRAIN_LABELS, full.train_y), (TEST_LABELS, full.test_y)):
        assert np.array_equal(y.numpy(), np.frombuffer(unpack(name)[8:], np.uint8))


def test_digests_are_those_of_the_files_and_stand_in_the_notice(full: Images) -> None:
    notice = (SHIPPED / "NOTICE.md").read_text()
    for name, digest in images.MNIST_SHA256.items():
        assert hashlib.sha256(unpack(name)).hexdigest() == digest
        assert re.search(rf"^    {digest}  {name}$", notice, re.MULTILINE)
    assert full.sha256 == hashlib.sha256(unpack(TRAIN_IMAGES) + unpack(TRAIN_LABELS)).hexdigest()


def test_plain_and_compressed_files_in_every_spelling_give_the_same_set(copies: Path, full: Images) -> None:
    (copies / f"{TRAIN_LABELS}.gz").rename(copies / "train-labels.idx1-ubyte.gz")
    (copies / TEST_IMAGES).write_bytes(unpack(TEST_IMAGES))
    (copies / f"{TEST_IMAGES}.gz").unlink()
    (copies / "t10k-labels.idx1-ubyte").write_bytes(unpack(TEST_LABELS))
    (copies / f"{TEST_LABELS}.gz").write_bytes(b"the plain file comes first, this one is not opened")
    other = idx_directory(copies)
    for field in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(other, field), getattr(full, field))
    assert (other.name, other.sha256) == ("digits", full.sha256)


def test_any_directory_of_idx_files(tiny: Path) -> None:
    small = idx_directory(tiny, classes=3, dtype=torch.float64)
    assert small.train_x.shape == (6, 6)
    assert (small.shape, small.classes, small.name) == ((2, 3), 3, "tiny")
    assert small.test_y.tolist() == [0, 1, 2, 0]
    assert "6 training and 4 test images, 2 x 3, 3 classes" in repr(small)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_every_cut_of_a_file_is_an_error(tiny: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tiny / TRAIN_IMAGES
    whole = pack(path.read_bytes())
    path.write_bytes(whole)
    read_idx(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read_idx(path)


def test_changed_label_fails_the_checksum_of_the_shipped_set(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(unpack(TEST_LABELS))
    content[-1] ^= 1
    (copies / f"{TEST_LABELS}.gz").write_bytes(gzip.compress(content))
    # Still a valid set of ten classes: only the digest can tell.
    assert len(idx_directory(copies).test_y) == 10000
    monkeypatch.setattr(images, "MNIST_DIRECTORY", copies)
    with pytest.raises(ValueError, match=f"{TEST_LABELS}.*SHA-256.*expected {images.MNIST_SHA256[TEST_LABELS]}"):
        mnist()


def test_missing_files_and_directories_say_what_is_there(copies: Path, tmp_path: Path) -> None:
    (copies / f"{TRAIN_LABELS}.gz").unlink()
    with pytest.raises(FileNotFoundError, match=f"no {TRAIN_LABELS}: it holds t10k.*Expected one of .*Put"):
        idx_directory(copies)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=f"no {TRAIN_IMAGES}: it holds nothing"):
        idx_directory(empty)
    with pytest.raises(FileNotFoundError, match="There is no directory"):
        idx_directory(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_idx(empty)


@pytest.mark.gpu
def test_pixels_are_the_same_to_the_bit_on_the_device(full: Images) -> None:
    there = mnist(device="cuda")
    assert there.train_x.is_cuda
    assert there.train_y.is_cuda
    assert torch.equal(there.train_x.cpu(), full.train_x)
    for here, away in zip(full.sample(20, seed=3), there.sample(20, seed=3), strict=True):
        assert torch.equal(here, away.cpu())


@given(st.lists(st.integers(0, 6), max_size=30), st.sampled_from([torch.float32, torch.float64]))
def test_one_hot_has_a_single_one_at_the_label(labels: list[int], dtype: torch.dtype) -> None:
    y = torch.tensor(labels, dtype=torch.int64)
    targets = one_hot(y, 7, dtype)
    assert targets.shape == (len(labels), 7)
    assert targets.dtype == dtype
    assert torch.equal(targets.sum(-1), torch.ones(len(labels), dtype=dtype))
    assert torch.equal(targets.argmax(-1), y)
