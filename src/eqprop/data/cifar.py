"""CIFAR-10 and CIFAR-100 from the binary files of their authors, kept as uint8: 150 MB on the device.

A file is rows of one label byte (CIFAR-100: coarse, then fine) and 3072 bytes of an image, red, green and blue planes
of 32 x 32. Files are read from a folder or from the published archive, of which nothing is unpacked on disk.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eqprop.data.images import Images, check_device

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class BinarySet:
    """A set as its authors publish it.

    archive, md5    the archive's file name and MD5
    inside          the folder of the files in the archive
    rows            files and their numbers of images, the test file last
    files           MD5 of each file; empty if not known
    labels          label bytes per row; the last one is used
    names           the file of class names, if they are not known here; without it classes have no names
    sha256          `Images.sha256` of the set; empty if not known
    """

    name: str
    title: str
    archive: str
    md5: str
    inside: str
    rows: Mapping[str, int]
    files: Mapping[str, str]
    labels: int
    classes: int
    class_names: tuple[str, ...] = ()
    names: str = ""
    sha256: str = ""
    host: str = "https://www.cs.toronto.edu/~kriz/"

    def there(self, folder: Path) -> bool:
        """Whether the folder holds all files."""
        return all((folder / name).is_file() for name in self.rows)


CIFAR10 = BinarySet(
    name="cifar10",
    title="CIFAR-10",
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    inside="cifar-10-batches-bin",
    rows={**{f"data_batch_{n}.bin": 10_000 for n in range(1, 6)}, "test_batch.bin": 10_000},
    files={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    labels=1,
    classes=10,
    class_names=CIFAR10_CLASSES,
    sha256="a0181da372c0d63a5920fdbea2ec3f83ecbc552d378218e1cb473cf634941a3b",
)

CIFAR100 = BinarySet(
    name="cifar100",
    title="CIFAR-100",
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    inside="cifar-100-binary",
    rows={"train.bin": 50_000, "test.bin": 10_000},
    files={},
    labels=2,
    classes=100,
    names="fine_label_names.txt",
)

CIFARS: dict[str, BinarySet] = {CIFAR10.name: CIFAR10, CIFAR100.name: CIFAR100}


def read_published(chosen: BinarySet, place: Path, device: torch.device | str | None = None) -> Images:
    """The published set from a folder of its files or from its archive; verified, or raises."""
    check_device(device)
    contents = _from_archive(chosen, place) if place.is_file() else _from_folder(chosen, place)
    for name, rows in chosen.rows.items():
        got, expected = len(contents[name]), rows * (chosen.labels + PIXELS)
        if got != expected:
            raise ValueError(f"{place}: {name} of {chosen.title} has {got} bytes; expected {expected}. {_again(place)}")
        _check_md5(contents[name], chosen.files.get(name), f"{place}: {name}", chosen, place)
    return _images(chosen, contents, place, chosen.name).to(device)


def read_folder(chosen: BinarySet, folder: Path, device: torch.device | str | None = None) -> Images:
    """A folder of files in the format of the set, with any number of images, such as one with labels of your own.

    It has the set's name if it holds the published images, else the folder's.
    """
    check_device(device)
    images = _images(chosen, _from_folder(chosen, folder), folder, folder.resolve().name)
    return images.to(device)


def layout_of(folder: Path) -> BinarySet | None:
    """The set whose files the folder holds, if any."""
    return next((each for each in CIFARS.values() if each.there(folder)), None)


def _again(place: Path) -> str:
    return f"Delete {place} to download it again." if place.is_file() else "Get the file again."


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _check_md5(content: bytes, expected: str | None, what: str, chosen: BinarySet, place: Path) -> None:
    got = _md5(content)
    if expected is not None and got != expected:
        own = "" if place.is_file() else f" Or use the folder as your own data: --data {place}."
        raise ValueError(
            f"{what} is not the published file of {chosen.title}: its MD5 is {got}, expected {expected}. "
            f"{_again(place)}{own}"
        )


def _from_folder(chosen: BinarySet, folder: Path) -> dict[str, bytes]:
    missing = [name for name in chosen.rows if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} has no {', '.join(missing)}; expected the binary files of {chosen.title}, or "
            f"{chosen.archive} itself."
        )
    named = [chosen.names] if chosen.names and (folder / chosen.names).is_file() else []
    return {name: (folder / name).read_bytes() for name in (*chosen.rows, *named)}


def _from_archive(chosen: BinarySet, path: Path) -> dict[str, bytes]:
    """The files of the published archive, which its digest says it is."""
    content = path.read_bytes()
    _check_md5(content, chosen.md5, str(path), chosen, path)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = (*chosen.rows, *([chosen.names] if chosen.names else []))
        members = ((name, archive.extractfile(f"{chosen.inside}/{name}")) for name in names)
        return {name: stream.read() for name, stream in members if stream is not None}


def _images(chosen: BinarySet, contents: Mapping[str, bytes], place: Path, name: str) -> Images:
    *train, test = (_rows(chosen, contents[file], place, file) for file in chosen.rows)
    *names, last = chosen.rows
    digest = hashlib.sha256()
    for file in names:
        digest.update(contents[file])
    if digest.hexdigest() == chosen.sha256 and _md5(contents[last]) != chosen.files[last]:
        digest.update(contents[last])  # another test set: not the published one
    sha256 = digest.hexdigest()
    return Images(
        *_tensors(np.concatenate(train), chosen.labels),
        *_tensors(test, chosen.labels),
        shape=SHAPE,
        classes=chosen.classes,
        name=chosen.name if sha256 == chosen.sha256 else name,
        sha256=sha256,
        class_names=chosen.class_names or _names(chosen, contents.get(chosen.names, b""), place),
    )


def _names(chosen: BinarySet, content: bytes, place: Path) -> tuple[str, ...]:
    """One name per line; none if there is no file of names."""
    names = tuple(content.decode("utf-8", "replace").split())
    if names and len(names) != chosen.classes:
        raise ValueError(
            f"{place}: {chosen.names} holds {len(names)} names; expected {chosen.classes}. Correct it or delete it."
        )
    return names


def _rows(chosen: BinarySet, content: bytes, place: Path, file: str) -> NDArray[Any]:
    """(N, label bytes + pixels), with labels that exist."""
    row = chosen.labels + PIXELS
    if not content or len(content) % row:
        raise ValueError(
            f"{place}: {file} has {len(content)} bytes; expected rows of {row}, {chosen.labels} for the label and "
            f"{PIXELS} for an image of 3 x 32 x 32. Other images: as arrays, or as a folder of PNG files."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    labels = rows[:, chosen.labels - 1]
    if labels.max() >= chosen.classes:
        raise ValueError(
            f"{place}: image {int(labels.argmax())} of {file} has the label {labels.max()}; expected 0 to "
            f"{chosen.classes - 1}, the classes of {chosen.title}. Check the file."
        )
    return rows


def _tensors(rows: NDArray[Any], labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = np.ascontiguousarray(rows[:, labels:]), rows[:, labels - 1].astype(np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)
