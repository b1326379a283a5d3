"""Your own data: arrays, tensors, dictionaries, torch datasets, loaders and image folders become one `Images`."""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from eqprop.data.images import Images, check_destination, check_device

Data = Images | str | Path | Mapping[str, Any] | Sequence[Any] | None
"""What `data=` takes: a name, a directory, an .npz file, `Images`, or arrays (see `as_images`)."""

PARTS = ("x", "y", "x_test", "y_test")
OTHER_NAMES = {"train_x": "x", "x_train": "x", "train_y": "y", "y_train": "y", "test_x": "x_test", "test_y": "y_test"}


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any,
    y_test: Any,
    *,
    name: str = "own data",
    classes: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Images:
    """A data set from numpy arrays, tensors or lists; shape, classes and checksum are computed.

    name        what pages and messages call the set
    device      where to put it; None: the CPU
    x, x_test   (N, ...) samples of any shape, with or without channels; uint8 is divided by 255
    y, y_test   class numbers 0, 1, ... or one-hot rows, to classify; any other numbers, (N,) or (N, outputs), are
                targets, and errors are then the percentage of their variance that is not explained
    classes     by default the largest class number plus one
    dtype       of the samples; torch.uint8 keeps bytes, a quarter of the memory: see `Images.floats`
    """
    floats = torch.float32 if dtype == torch.uint8 else dtype
    check_destination(device, floats)
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 1):
        raise ValueError(f"classes is {classes!r}; expected a whole number above 0.")
    given = {"x": _array(x, "x"), "x_test": _array(x_test, "x_test"), "y": _array(y, "y")}
    given["y_test"] = _array(y_test, "y_test")
    for samples, labels in (("x", "y"), ("x_test", "y_test")):
        _check_lengths(given, samples, labels)
    if given["x"].shape[1:] != given["x_test"].shape[1:]:
        raise ValueError(
            f"The samples of x have shape {tuple(given['x'].shape[1:])}, those of x_test "
            f"{tuple(given['x_test'].shape[1:])}; expected one shape. Prepare both in the same way."
        )
    train_x, test_x = (_samples(given[part], part, dtype) for part in ("x", "x_test"))
    train_y, test_y, found = _answers(given["y"], given["y_test"], classes, floats)
    made = Images(
        train_x,
        train_y,
        test_x,
        test_y,
        tuple(given["x"].shape[1:]) or (1,),
        found,
        name,
        content_digest(train_x, train_y, test_x, test_y),
    )
    return made.to(device)


def as_images(source: Any) -> Images | str | Path | None:
    """`Images` from whatever holds samples; a name, a path and None are returned unchanged.

    (x, y, x_test, y_test)      arrays, also as a dictionary with these keys
    (train, test)               two pairs (x, y), TensorDatasets, Datasets or DataLoaders

    A Dataset is read once, in its own order; shuffling, batch size and collation of a DataLoader are not used, because
    the experiment sets them. Random transforms are therefore drawn once.
    """
    if source is None or isinstance(source, Images | str | Path):
        return source
    if isinstance(source, Mapping):
        return from_arrays(**_named_parts(source))
    if isinstance(source, DataLoader | Dataset):
        raise ValueError(
            f"data is one {type(source).__name__}; expected two, (train, test). Give both, or split this one with "
            "torch.utils.data.random_split."
        )
    if not isinstance(source, tuple | list) or len(source) not in (2, 4):
        got = f"{len(source)} values" if isinstance(source, tuple | list) else type(source).__name__
        raise ValueError(
            f"data is {got}; expected a name, a directory, Images, (x, y, x_test, y_test), a dictionary of these, or "
            "(train, test) with two Datasets or DataLoaders."
        )
    if len(source) == 4:
        return from_arrays(*source)
    train, test = (part.dataset if isinstance(part, DataLoader) else part for part in source)
    check_numbering(train, test)
    return from_arrays(*_pair(train, "train"), *_pair(test, "test"))


def check_numbering(train: Any, test: Any) -> None:
    """Raise if both data sets name their classes and number them differently, as folders that lack some do."""
    named = [getattr(part, "classes", None) for part in (train, test)]
    if not all(isinstance(names, list | tuple) for names in named):
        return
    for n, (one, other) in enumerate(zip(*named, strict=False)):
        if one != other:
            raise ValueError(
                f"The class {n} is {one!r} in the training data and {other!r} in the test data; expected the same "
                "numbers. Give both data sets the same classes."
            )


def read_npz(path: Path) -> Images:
    """The arrays x, y, x_test and y_test of a file written by numpy.savez."""
    try:
        with np.load(path, allow_pickle=False) as held:
            parts = {name: held[name] for name in held.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); expected a file of numpy.savez with x, y, x_test and y_test."
        ) from error
    return from_arrays(**{**_named_parts(parts), "name": path.stem})


ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm")
MOST_BYTES = 1 << 32
"""The largest image folder read into memory, as uint8: 4 GiB."""


def is_image_folder(folder: Path) -> bool:
    """Whether the folder has subfolders with images, or train and test with such subfolders."""
    root = folder / "train" if (folder / "train").is_dir() else folder
    return any(path.suffix.lower() in ENDINGS for path in root.glob("*/*"))


def image_folder(path: str | Path, device: torch.device | str | None = None) -> Images:
    """Images of one size, grey or RGB, in train/CLASS/ and test/CLASS/, kept as uint8.

    Classes are numbered in the order of their names. Images are ordered by the SHA-256 of CLASS/FILE, the same on every
    machine, so that the first and the last ones are of all classes. Without train and test, with CLASS/ alone, there
    is no test set: hold out training images with `split_validation`.

    path        the directory
    device      where to put the tensors; None: the CPU
    """
    check_device(device)
    root = Path(path)
    halves = [root / "train", root / "test"] if (root / "train").is_dir() else [root]
    listings = [_class_files(half, least=2 if half is halves[0] else 1) for half in halves]
    names = tuple(listings[0])
    strange = next((name for name in listings[-1] if name not in names), None)
    if strange is not None:
        raise ValueError(f"{root / 'test'} has a class {strange!r}, which {root / 'train'} has not; expected the same.")
    first = next(iter(listings[0].values()))[0]
    read = [_read_files(listing, first, names) for listing in listings]
    channels = max(x.shape[1] for x, _ in read)
    size = read[0][0].shape[-2:]
    if len(read) == 1:
        read.append((read[0][0][:0], read[0][1][:0]))
    # Grey images among coloured ones have three equal channels.
    (train_x, train_y), (test_x, test_y) = ((x.expand(-1, channels, -1, -1).flatten(1), y) for x, y in read)
    digest = content_digest(train_x, train_y, test_x, test_y)
    shape = (*((channels,) if channels > 1 else ()), *size)
    made = Images(train_x, train_y, test_x, test_y, shape, len(names), root.resolve().name, digest, class_names=names)
    return made.to(device)


def _class_files(half: Path, least: int) -> dict[str, list[Path]]:
    """Image files by class, both sorted; hidden files are skipped."""
    classes = sorted(p for p in half.iterdir() if p.is_dir() and not p.name.startswith(".")) if half.is_dir() else []
    found = {place.name: sorted(p for p in place.iterdir() if not p.name.startswith(".")) for place in classes}
    empty = next((name for name, files in found.items() if not files), None)
    if len(found) < least or empty is not None:
        what = f"nothing in {empty}" if empty is not None else f"{len(found)} folders"
        raise ValueError(f"{half} has {what}; expected a folder with images for each of at least two classes.")
    other = next((p for files in found.values() for p in files if p.suffix.lower() not in ENDINGS), None)
    if other is not None:
        raise ValueError(f"{other} is not an image; expected {', '.join(ENDINGS)}. Remove or convert it.")
    return found


def _read_files(listing: Mapping[str, list[Path]], first: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """(N, C, H, W) of uint8 and (N,) labels; all images have the size of the first."""
    height, width = _pixels(first).shape[:2]
    total = sum(map(len, listing.values())) * height * width * 3
    if total > MOST_BYTES:
        raise ValueError(
            f"The images of {first.parents[1]} take {total / 1e9:.1f} GB of memory; at most {MOST_BYTES / 1e9:.1f} are "
            "read. Read them while training: see eqprop.data.streamed."
        )
    files = [(path, names.index(name)) for name, paths in listing.items() for path in paths]
    files.sort(key=lambda file: hashlib.sha256("/".join(file[0].parts[-2:]).encode()).digest())
    held = [_pixels(path) for path, _ in files]
    for (path, _), pixels in zip(files, held, strict=True):
        if pixels.shape[:2] != (height, width):
            raise ValueError(
                f"{path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, {first} {width} x {height}; expected one "
                "size. Resize them."
            )
    channels = max(pixels.shape[2] for pixels in held)
    wide = [np.broadcast_to(pixels, (height, width, channels)) for pixels in held]
    x = torch.from_numpy(np.stack(wide)).permute(0, 3, 1, 2).contiguous()
    return x, torch.tensor([label for _, label in files], dtype=torch.int64)


def _pixels(path: Path) -> Any:
    """(H, W, 1 or 3) of uint8."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            held = image.convert("RGBA") if image.mode == "P" or image.has_transparency_data else image
            if held.mode == "RGBA" and held.getchannel("A").getextrema() == (255, 255):  # nothing shines through
                held = held.convert("RGB")
            if held.mode == "1":
                held = held.convert("L")
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image ({error}). Replace or remove it.") from error
    if held.mode not in ("L", "RGB"):
        kind = "transparent parts" if held.mode == "RGBA" else f"the mode {held.mode}"
        raise ValueError(f"{path} has {kind}; expected 8 bits of grey or of RGB. Convert it.")
    return np.atleast_3d(np.asarray(held))


def content_digest(*tensors: Tensor) -> str:
    """SHA-256 of types, shapes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        held = tensor.detach().cpu().contiguous()
        digest.update(f"{held.dtype} {tuple(held.shape)} ".encode())
        digest.update(held.numpy().data if held.numel() else b"")
    return digest.hexdigest()


def _named_parts(given: Mapping[str, Any]) -> dict[str, Any]:
    parts = {OTHER_NAMES.get(name, name): value for name, value in given.items()}
    missing, strange = [p for p in PARTS if p not in parts], [n for n in given if OTHER_NAMES.get(n, n) not in PARTS]
    if missing or strange:
        raise ValueError(
            f"The data has the keys {', '.join(map(str, given)) or 'none'}; expected {', '.join(PARTS)}"
            f"{' and no others' if strange and not missing else ''}."
        )
    return parts


def _pair(part: Any, what: str) -> tuple[Any, Any]:
    """Samples and answers of one half of the data."""
    if isinstance(part, Dataset):
        part = _collected(part, what)
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise ValueError(
            f"The {what} data is {type(part).__name__}; expected a pair (x, y), a Dataset or a DataLoader. For arrays "
            "give all four: (x, y, x_test, y_test)."
        )
    return part[0], part[1]


def _collected(dataset: Any, what: str) -> tuple[Any, Any]:
    # A subclass may transform what it returns.
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return dataset.tensors
    # A map-style data set need not end by itself when iterated.
    numbered = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    items: Iterable[Any] = (dataset[n] for n in range(len(dataset))) if numbered else dataset
    pairs = list(items)
    if not pairs or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"The {what} data set {type(dataset).__name__} does not give pairs (x, y), or nothing at all; expected "
            "them. Wrap it in a Dataset that returns such pairs."
        )
    x, y = ([as_sample(pair[n]) for pair in pairs] for n in (0, 1))
    for name, rows in (("x", x), ("y", y)):
        odd = next((n for n, row in enumerate(rows) if row.shape != rows[0].shape), None)
        if odd is not None:
            raise ValueError(
                f"Sample {odd} of the {what} data has {name} of shape {tuple(rows[odd].shape)}, sample 0 "
                f"{tuple(rows[0].shape)}; expected one shape. Resize or pad them."
            )
    return torch.stack(x), torch.stack(y)


def as_sample(value: Any) -> Tensor:
    """A sample or answer as a tensor; an image of Pillow has its channels first, as networks take them."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if hasattr(value, "getbands"):
        if value.mode in ("P", "PA"):  # their pixels are numbers in a palette
            value = value.convert("RGBA" if value.has_transparency_data else "RGB")
        held = np.array(value)  # a copy, because Pillow's own is not writable
        return torch.from_numpy(np.ascontiguousarray(held.transpose(2, 0, 1)) if held.ndim == 3 else held)
    return torch.as_tensor(np.asarray(value))


def _array(value: Any, what: str) -> Tensor:
    found = value.detach() if isinstance(value, Tensor) else _from_numpy(value, what)
    if found.is_complex():
        raise ValueError(f"{what} is {found.dtype}; expected real numbers.")
    return found


def _from_numpy(value: Any, what: str) -> Tensor:
    try:
        held = np.asarray(value)
        return torch.from_numpy(np.ascontiguousarray(held.astype(held.dtype.newbyteorder("="), copy=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} is {type(value).__name__}, which holds no numbers ({error}); expected a numpy array or a tensor."
        ) from error


def _check_lengths(given: Mapping[str, Tensor], samples: str, labels: str) -> None:
    x, y = given[samples], given[labels]
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y) or len(x) == 0 or x[0].numel() == 0:
        raise ValueError(
            f"{samples} has shape {tuple(x.shape)} and {labels} {tuple(y.shape)}; expected the samples along the first "
            "dimension, equally many in both, and at least one."
        )


def _samples(x: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    flat = x.reshape(len(x), -1).cpu()
    if dtype == torch.uint8:
        if flat.dtype != torch.uint8:
            raise ValueError(f"{what} is {x.dtype}, which dtype=torch.uint8 would round; give bytes, or omit dtype.")
        return flat
    flat = flat.to(dtype).div(255) if flat.dtype == torch.uint8 else flat.to(dtype)
    _check_finite(flat, what)
    return flat


def _check_finite(rows: Tensor, what: str) -> None:
    bad = (~torch.isfinite(rows)).flatten(1).any(1)
    if bool(bad.any()):
        raise ValueError(
            f"{what} holds NaN or infinity, first in sample {int(bad.nonzero()[0])}; expected finite numbers. Remove "
            "or replace them."
        )


def _answers(y: Tensor, y_test: Tensor, classes: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Labels if both are class numbers or one-hot rows, else targets; and the number of classes or outputs."""
    both = tuple(part.reshape(len(part), -1).cpu() for part in (y, y_test))
    columns = [part.shape[1] for part in both]
    if columns[0] != columns[1]:
        raise ValueError(f"y has {columns[0]} numbers per sample, y_test {columns[1]}; expected equally many.")
    if columns[0] == 1 and not any(part.is_floating_point() for part in both):
        labels = tuple(part[:, 0].to(torch.int64) for part in both)
        return *labels, _classes(labels, classes)  # type: ignore[return-value]
    if classes is not None and classes != columns[0]:
        raise ValueError(f"classes is {classes}, but y has {columns[0]} numbers per sample; expected one per class.")
    if columns[0] > 1 and all(_is_one_hot(part) for part in both):
        return both[0].argmax(1), both[1].argmax(1), columns[0]
    targets = tuple(part.to(dtype) for part in both)
    for part, what in zip(targets, ("y", "y_test"), strict=True):
        _check_finite(part, what)
    return targets[0], targets[1], columns[0]


def _is_one_hot(rows: Tensor) -> bool:
    return bool(((rows == 0) | (rows == 1)).all() and (rows.sum(1) == 1).all())


def _classes(labels: tuple[Tensor, ...], classes: int | None) -> int:
    low, high = (int(bound(torch.stack([bound(part) for part in labels]))) for bound in (torch.min, torch.max))
    count = max(high + 1, 2) if classes is None else classes
    if low < 0 or high >= count:
        raise ValueError(
            f"The class numbers run from {low} to {high}; expected 0 to {count - 1}. Renumber them, for instance with "
            "numpy.unique(y, return_inverse=True)[1]."
        )
    return count
