"""Image sets as tensors, and the order of their samples.

The order is a permutation per trial and epoch, drawn on the CPU from a hash of seed and epoch. Resuming a run needs no
generator state: seed, epoch and iteration determine the next mini-batch on every device and for every estimator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from eqprop.data.idx import Idx, read_idx

MNIST_DIRECTORY = Path(__file__).parent / "mnist"
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
FILES = tuple(MNIST_SHA256)
MNIST_DIGEST = "c5097fdd51cfdbe7695fd9df3612695696864b5c424f58d843ffdc5d335e9914"
"""`Images.sha256` of MNIST."""
MNIST_FINGERPRINT = "61e839b25c9fe06f39ffa760ec9544a035b59b7cf2bbf5db7329babc96d96e1d"
"""`Images.fingerprint` of its tensors in float32: `sha256` stays when tensors are replaced."""


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: x holds one flat sample per row; y the labels 0 .. classes-1, int64, or targets of floats.

    To make one from your own arrays use `from_arrays`.

    train_x, test_x     one flat sample per row: floats as the network takes them, or uint8 (see `floats`)
    train_y, test_y     labels 0 .. classes-1, int64, (N,), or targets of floats, (N, outputs)
    shape               of one sample, such as (28, 28) or (3, 32, 32)
    classes             the number of classes, or the columns of the targets
    name                what pages and messages call the set
    sha256              identifies the set: the digest of the uncompressed training images and labels files, and of test
                        files that are not those of the published set; or of the arrays. A split keeps it
    fingerprint         the digest of the tensors, where they were given
    class_names         what the classes are called, if the data says so
    """

    train_x: Tensor  # (N, pixels)
    train_y: Tensor  # (N,) labels, or (N, outputs) targets
    test_x: Tensor  # (M, pixels)
    test_y: Tensor  # (M,) or (M, outputs)
    shape: tuple[int, ...]
    classes: int
    name: str
    sha256: str
    fingerprint: str = ""
    class_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        size = " x ".join(str(n) for n in self.shape)
        return (
            f"Images({self.name!r}: {len(self.train_x)} training and {len(self.test_x)} test images, "
            f"{size}, {self.classes} {'classes' if self.labelled else 'outputs'}, {self.train_x.dtype}, "
            f"{self.train_x.device})"
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type of the samples as floats: float32 for uint8."""
        return torch.float32 if self.train_x.dtype == torch.uint8 else self.train_x.dtype

    @property
    def train_samples(self) -> int:
        return len(self.train_x)

    @property
    def test_samples(self) -> int:
        return len(self.test_x)

    def first(self, n: int) -> tuple[Tensor, Tensor]:
        """The first n training samples as they are stored, (n, pixels), and their answers."""
        return self.train_x[:n], self.train_y[:n]

    def floats(self, x: Tensor) -> Tensor:
        """Samples of this set as the network takes them without normalisation."""
        return as_floats(x, self.dtype)

    @property
    def labelled(self) -> bool:
        """Whether y holds class numbers; if not, it holds targets."""
        return not self.train_y.is_floating_point()

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """What the cost compares outputs with, (B, classes): one-hot rows for labels, targets as they are."""
        return y.to(dtype) if y.is_floating_point() else one_hot(y, self.classes, dtype)

    def to(self, device: torch.device | str | None) -> Images:
        names = ("train_x", "train_y", "test_x", "test_y")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def sample(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw n distinct training images (n, pixels), as floats, and labels (n,); the same on every machine."""
        chosen = self.rows(n, seed)
        return self.floats(self.train_x[chosen]), self.train_y[chosen]

    def rows(self, n: int, seed: int) -> Tensor:
        """The rows of such a sample."""
        if not 1 <= n <= len(self.train_x):
            raise ValueError(
                f"Cannot draw a sample of {n} images: {self.name} has {len(self.train_x)} training images. "
                f"Choose n from 1 to {len(self.train_x)}."
            )
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(len(self.train_x), generator=generator)[:n].to(self.train_x.device)

    def as_type(self, dtype: torch.dtype) -> Images:
        """The same with floats of this type; bytes stay bytes."""
        if self.train_x.dtype in (dtype, torch.uint8):
            return self
        return replace(self, train_x=self.train_x.to(dtype), test_x=self.test_x.to(dtype))


def as_floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 divided by 255; floats unchanged, whatever their type."""
    if x.dtype != torch.uint8:
        return x
    # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently.
    return x.to(dtype) / x.new_full((), 255.0, dtype=dtype)


def mnist(device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Images:
    """Load the MNIST shipped with the package, verified against its known SHA-256.

    device  where to put the tensors; None: the CPU
    dtype   of the samples; torch.uint8 keeps bytes
    """
    check_destination(device, dtype)
    return _images(_mnist_files(MNIST_DIRECTORY), MNIST_DIRECTORY, device, dtype, 10)


@lru_cache(maxsize=1)
def _mnist_files(directory: Path) -> dict[str, Idx]:
    """The shipped files, read and verified once in a process: 55 MB."""
    return _files(directory, MNIST_SHA256)


def idx_directory(
    path: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    classes: int = 10,
    sha256: Mapping[str, str] | None = None,
) -> Images:
    """Load a directory with the four files of MNIST's layout: Fashion-MNIST, KMNIST or your own.

    The files are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
    t10k-labels-idx1-ubyte; a dot before idx and a .gz ending are accepted, and an uncompressed file is preferred.

    path        the directory
    device      where to put the tensors; None: the CPU
    dtype       of the samples
    classes     the number of classes
    sha256      required digests of the uncompressed files, by these names
    """
    check_destination(device, dtype)
    return _images(_files(Path(path), sha256 or {}), Path(path), device, dtype, classes)


def _files(directory: Path, sha256: Mapping[str, str]) -> dict[str, Idx]:
    files = {name: read_idx(_find(directory, name)) for name in FILES}
    for name, expected in sha256.items():
        if (got := files[name].sha256()) != expected:
            raise ValueError(
                f"{files[name].path} is not the expected file: the SHA-256 of its content is {got}, expected "
                f"{expected}. It was changed or damaged: get it again (reinstall, if it came with the package)."
            )
    return files


def _images(
    files: Mapping[str, Idx], directory: Path, device: torch.device | str | None, dtype: torch.dtype, classes: int
) -> Images:
    train_images, train_labels, test_images, test_labels = (files[name] for name in FILES)
    _check_pair(train_images, train_labels, classes)
    _check_pair(test_images, test_labels, classes)
    if train_images.values.shape[1:] != test_images.values.shape[1:]:
        raise ValueError(
            f"{directory}: training images are {train_images.values.shape[1:]} pixels and test images "
            f"{test_images.values.shape[1:]}; expected one size. Take all four files from one set."
        )
    digest_of_both = hashlib.sha256(train_images.content)
    digest_of_both.update(train_labels.content)
    if digest_of_both.hexdigest() == MNIST_DIGEST:
        for file in (test_images, test_labels):
            if file.sha256() not in MNIST_SHA256.values():
                digest_of_both.update(file.content)  # another test set: not MNIST
    height, width = train_images.values.shape[1:]
    return Images(
        train_x=_pixels(train_images, device, dtype),
        train_y=_labels(train_labels, device),
        test_x=_pixels(test_images, device, dtype),
        test_y=_labels(test_labels, device),
        shape=(height, width),
        classes=classes,
        name=directory.resolve().name,
        sha256=digest_of_both.hexdigest(),
    )


def split_validation(images: Images, n: int) -> Images:
    """Hold out the LAST n training images as the test set, for choosing hyper-parameters.

    The real test set is not in the result, so a choice made with it cannot leak test data.
    """
    total = len(images.train_x)
    if not 1 <= n < total:
        raise ValueError(
            f"Cannot hold out {n} of the {total} training images of {images.name}: both parts need at least "
            f"one. Choose n from 1 to {total - 1}."
        )
    kept = total - n
    return replace(
        images,
        train_x=images.train_x[:kept],
        train_y=images.train_y[:kept],
        test_x=images.train_x[kept:],
        test_y=images.train_y[kept:],
        name=f"{images.name} (training images 0-{kept - 1}, tested on {kept}-{total - 1})",
    )


def one_hot(labels: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn labels (...,) into targets (..., classes): 1 at the label, 0 elsewhere.

    Checking the values synchronises with the device: convert a whole set at once, not every mini-batch.

    labels      numbers 0 .. classes-1, of any shape
    classes     their number
    dtype       of the targets
    """
    if labels.dtype != torch.int64:
        raise ValueError(f"one_hot got labels of {labels.dtype}; expected torch.int64. Convert with labels.long().")
    if labels.numel():
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"one_hot got labels from {low} to {high}; expected 0 to {classes - 1}. Check the labels or "
                f"the number of classes (now {classes})."
            )
    return (labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)).to(dtype)


def find_file(directory: Path, name: str) -> Path | None:
    """Find one of `FILES` in a directory under any accepted spelling, uncompressed first; None if missing."""
    there = (directory / candidate for candidate in _spellings(name))
    return next((path for path in there if path.is_file()), None)


def _spellings(name: str) -> list[str]:
    return [f"{spelling}{end}" for end in ("", ".gz") for spelling in (name, name.replace("-idx", ".idx"))]


def _find(directory: Path, name: str) -> Path:
    if not directory.is_dir():
        raise FileNotFoundError(f"There is no directory {directory}. Give the directory that holds {', '.join(FILES)}.")
    found = find_file(directory, name)
    if found is not None:
        return found
    there = sorted(entry.name for entry in directory.iterdir())
    listing = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "") if there else "nothing"
    expected = ", ".join(_spellings(name))
    raise FileNotFoundError(
        f"{directory} has no {name}: it holds {listing}. Expected one of {expected}. Put the file there."
    )


def _check_pair(images: Idx, labels: Idx, classes: int) -> None:
    if images.values.ndim != 3 or images.values.dtype != "u1":
        raise ValueError(
            f"{images.path} holds {images.values.ndim}-dimensional {images.values.dtype.name}; expected "
            "3-dimensional uint8 (number, height, width). Check that this is an images file."
        )
    if labels.values.ndim != 1 or labels.values.dtype != "u1":
        raise ValueError(
            f"{labels.path} holds {labels.values.ndim}-dimensional {labels.values.dtype.name}; expected "
            "1-dimensional uint8. Check that this is a labels file."
        )
    if images.values.size == 0 or len(images.values) != len(labels.values):
        raise ValueError(
            f"{images.path} holds {len(images.values)} images of {images.values.shape[1:]} pixels, and "
            f"{labels.path} {len(labels.values)} labels; expected equal numbers, at least one. "
            "Take both files from one set."
        )
    if labels.values.max() >= classes:
        raise ValueError(
            f"{labels.path} holds the label {labels.values.max()}; expected 0 to {classes - 1}. "
            "Check the file, or set `classes`."
        )


def check_destination(device: torch.device | str | None, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"Pixels cannot be {dtype}: they are in [0, 1]. Use torch.float32 or torch.float64.")
    check_device(device)


def check_device(device: torch.device | str | None) -> None:
    """Raise unless tensors with values can be made on the device."""
    try:
        made = torch.empty(0, device=device)
        reason = "its tensors hold no values" if made.is_meta else None
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if reason is not None:
        raise ValueError(f"Cannot use device {str(device)!r}: {reason}. Use 'cpu', or a device this machine has.")


def _pixels(images: Idx, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    # Divide on the CPU, so that pixels are bit-identical on every device.
    flat = images.values.reshape(len(images.values), -1)
    return torch.tensor(flat).to(dtype).div_(255).to(device)


def _labels(labels: Idx, device: torch.device | str | None) -> Tensor:
    return torch.tensor(labels.values, dtype=torch.int64).to(device)


def order_seed(seed: int, epoch: int) -> int:
    """The first 63 bits of SHA-256 of "eqprop batches SEED EPOCH"."""
    digest = hashlib.sha256(f"eqprop batches {seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_order(seed: int, epoch: int, samples: int, batch: int) -> Tensor:
    """(samples // batch, batch) sample indices. The incomplete last mini-batch is dropped; it differs every epoch."""
    if batch > samples:
        raise ValueError(
            f"A mini-batch of {batch} needs {batch} training samples; there are {samples}. Lower the batch."
        )
    generator = torch.Generator().manual_seed(order_seed(seed, epoch))
    whole = samples // batch
    return torch.randperm(samples, generator=generator)[: whole * batch].view(whole, batch)


def stacked_order(seeds: Sequence[int], epoch: int, samples: int, batch: int) -> Tensor:
    """(n, R, batch): the orders of R trials, stacked."""
    return torch.stack([epoch_order(seed, epoch, samples, batch) for seed in seeds], dim=1)
