"""Data sets by name: MNIST from the package, others from a local folder or downloaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eqprop.cache import cache_folder
from eqprop.data.arrays import as_images, image_folder, is_image_folder, read_npz
from eqprop.data.cifar import CIFAR10, CIFAR100, CIFARS, BinarySet, layout_of, read_folder, read_published
from eqprop.data.images import FILES, Images, find_file, idx_directory, mnist
from eqprop.messages import did_you_mean
from eqprop.plugins import Table

Device = torch.device | str | None
TIMEOUT = 30.0
"""Seconds without a byte before a request times out."""


@dataclass(frozen=True)
class Source:
    """Where a set is published and how its files are verified.

    hosts       base URLs of the files, tried in this order
    files       digests by file name: SHA-256, or of another kind as "md5:..."
    advice      another way to get it
    contents    SHA-256 of each uncompressed file, by its name without .gz; empty if not known
    places      folders where operating system packages install it
    """

    title: str
    hosts: tuple[str, ...]
    files: Mapping[str, str]
    advice: str = ""
    contents: Mapping[str, str] = field(default_factory=dict)
    places: tuple[Path, ...] = ()

    def by_hand(self, folder: Path) -> str:
        advice = f" {self.advice}" if self.advice else ""
        return f"Or put {', '.join(self.files)} into {folder} yourself.{advice}"


class DownloadError(OSError):
    """A file could not be downloaded."""


def download(source: Source, folder: Path) -> None:
    """Download the files into the folder from the first host that has them. Verified, or raises."""
    try:
        import pooch
    except ImportError as error:
        raise ImportError(
            f"{source.title} is not on this machine, and getting it needs pooch: pip install 'eqprop[download]'. "
            f"{source.by_hand(folder)}"
        ) from error
    pooch.get_logger().setLevel("WARNING")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"Cannot create {folder} for {source.title}: {error.strerror or error}. Choose another with $EQPROP_CACHE."
        ) from error
    for name, digest in source.files.items():
        print(f"Downloading {name} of {source.title}", file=sys.stderr, flush=True)
        _get(source, name, digest, folder)


def _get(source: Source, name: str, digest: str, folder: Path) -> None:
    """Download one file, trying the hosts in order. It appears under its name once it is whole and verified."""
    import pooch
    import requests

    # Transfer compression would change the file.
    over_http = pooch.HTTPDownloader(headers={"Accept-Encoding": "identity"}, timeout=TIMEOUT)
    known, complaints = digest if ":" in digest else f"sha256:{digest}", []
    for host in source.hosts:
        try:
            pooch.retrieve(f"{host}{name}", known, fname=name, path=folder, downloader=over_http)
            return
        except requests.exceptions.RequestException as error:
            complaints.append(f"{host}: {error}")
        except ValueError as error:
            complaints.append(f"{host}: the file there is not the published one ({error})")
        except OSError as error:
            raise DownloadError(f"{name} of {source.title} could not be written to {folder}: {error}.") from error
    raise DownloadError(
        f"{name} of {source.title} could not be downloaded. {'; '.join(complaints)}. {source.by_hand(folder)}"
    )


FASHION_MNIST = Source(
    title="Fashion-MNIST",
    hosts=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
    ),
    files={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    contents={
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    places=(Path("/usr/share/datasets/fashion-mnist"),),
    advice="On Debian and Ubuntu: apt install dataset-fashion-mnist.",
)

KMNIST = Source(
    title="KMNIST",
    hosts=("https://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
    files={
        "train-images-idx3-ubyte.gz": "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
        "train-labels-idx1-ubyte.gz": "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
        "t10k-images-idx3-ubyte.gz": "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
        "t10k-labels-idx1-ubyte.gz": "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
    },
)

NAMED: dict[str, Source] = {"fashion-mnist": FASHION_MNIST, "kmnist": KMNIST}


def open_set(
    source: str | Path | None = None, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Images:
    """Load a set by name or from a directory; None is MNIST. A name takes precedence over a directory.

    CIFAR's images stay uint8, whatever `dtype`: see `Images.floats`.
    A named set is looked up in the cache, then in the folders of system packages, and otherwise downloaded into the
    cache. Files placed in the cache by hand work as well as downloaded ones.

    source      a name, a directory or an .npz file; None: MNIST
    device      where to put the tensors; None: the CPU
    dtype       of samples that are stored as floats
    """
    name = set_name(source)
    if name in _BUILT_IN:
        return _BUILT_IN[name](device, dtype)
    if name is not None:
        return _from_outside(name, SETS[name]).to(device)
    assert source is not None, "None is the name of MNIST"
    if Path(source).suffix == ".npz" and Path(source).is_file():
        return read_npz(Path(source)).to(device)
    is_folder = Path(source).is_dir() or ("/" in str(source) and not Path(source).suffix)
    if not is_folder:
        raise FileNotFoundError(
            f"There is no data set and no directory {str(source)!r}; expected {', '.join(SETS)}, a directory of IDX "
            "files, of CIFAR's binary files or of images (train/CLASS/*.png and test/CLASS/*.png), or an .npz file "
            f"with x, y, x_test and y_test.{did_you_mean(str(source), SETS)}"
        )
    return _directory(Path(source), device, dtype)


def _directory(folder: Path, device: torch.device | str | None, dtype: torch.dtype) -> Images:
    """A folder of IDX files, of CIFAR's binary files, or of images; an error names the IDX files, the oldest form."""
    if not any(_has(folder, name) for name in FILES):
        layout = layout_of(folder)
        if layout is not None:
            return read_folder(layout, folder, device)
        if is_image_folder(folder):
            return image_folder(folder, device)
    return idx_directory(folder, device, dtype)


def cifar10(place: str | Path | None = None, device: torch.device | str | None = None) -> Images:
    """CIFAR-10 as uint8 from its six binary files, or its archive, at `place`; by default from the cache.

    What is not in the cache is downloaded. Verified by the published MD5s, or raises.

    place       the directory of the files, or their archive; None: the cache
    device      where to put the tensors; None: the CPU
    """
    return _cifar(CIFAR10, place, device)


def cifar100(place: str | Path | None = None, device: torch.device | str | None = None) -> Images:
    """CIFAR-100 with its 100 fine labels, in the same way as `cifar10`."""
    return _cifar(CIFAR100, place, device)


def _cifar(chosen: BinarySet, place: str | Path | None, device: torch.device | str | None) -> Images:
    if place is not None:
        return read_published(chosen, Path(place), device)
    cache = cache_folder("data", chosen.name)
    if chosen.there(cache):
        return read_published(chosen, cache, device)
    if not (cache / chosen.archive).is_file():
        advice = f"Files unpacked from it serve too: {', '.join(chosen.rows)}."
        download(Source(chosen.title, (chosen.host,), {chosen.archive: f"md5:{chosen.md5}"}, advice), cache)
    return read_published(chosen, cache / chosen.archive, device)


_BUILT_IN: dict[str, Callable[[Device, torch.dtype], Images]] = {
    "mnist": mnist,
    "fashion-mnist": lambda device, dtype: _named("fashion-mnist", device, dtype),
    "kmnist": lambda device, dtype: _named("kmnist", device, dtype),
    "cifar10": lambda device, dtype: _cifar(CIFARS["cifar10"], None, device),
    "cifar100": lambda device, dtype: _cifar(CIFARS["cifar100"], None, device),
}
NAMES = tuple(_BUILT_IN)
"""Names that `--data` accepts, and those from outside; anything else is a path."""

SETS: Table[Callable[..., Any]] = Table("data", _BUILT_IN, lambda name, part: part)
"""Data sets by name: built-in ones as functions of device and dtype; those from outside return what `data=` takes."""


def set_name(source: str | Path | None) -> str | None:
    """The set's name if `source` is one, None for a directory; a source of None is MNIST."""
    if source is None:
        return "mnist"
    name = str(source).lower()
    return name if name in SETS else None


def _from_outside(name: str, make: Callable[[], Any]) -> Images:
    found = as_images(make())
    if not isinstance(found, Images):
        return open_set(found)
    return replace(found, name=name)


def _named(name: str, device: torch.device | str | None, dtype: torch.dtype) -> Images:
    chosen, cache = NAMED[name], cache_folder("data", name)
    folder = next((place for place in (cache, *chosen.places) if _holds_all(place)), None)
    if folder is None:
        missing = {file: digest for file, digest in chosen.files.items() if not _has(cache, file.removesuffix(".gz"))}
        download(replace(chosen, files=missing), cache)
        folder = cache
    return replace(idx_directory(folder, device, dtype, sha256=chosen.contents), name=name)


def _has(folder: Path, name: str) -> bool:
    return find_file(folder, name) is not None


def _holds_all(folder: Path) -> bool:
    return all(_has(folder, name) for name in FILES)
