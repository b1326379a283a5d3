"""The data of a run: read and cut to size, described in its folder, and found again when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eqprop.data import Data, Images, Streamed, as_images, content_digest, open_set, set_name, split_validation
from eqprop.data.images import MNIST_DIGEST, MNIST_FINGERPRINT, check_device
from eqprop.run.own import OwnFunction
from eqprop.run.spec import DataSettings

TARGETS = "targets"
"""Field of the data in experiment.json: the numbers a sample has as its answer, where that is no class."""

Source = Images | Streamed | str | Path | None
"""Data, or a name or path to read it from; None: MNIST."""


def describe(images: Images | Streamed) -> dict[str, Any]:
    """Name, checksum and counts of the data."""
    return {
        "name": images.name,
        "sha256": images.sha256,
        "training_samples": images.train_samples,
        "test_samples": images.test_samples,
        **({"fingerprint": images.fingerprint} if images.fingerprint else {}),
        **({"class_names": list(images.class_names)} if images.class_names else {}),
        **({"classes": images.classes} if images.labelled else {TARGETS: images.classes}),
    }


def given_data(data: Data | Streamed) -> Source:
    """A name or path unchanged; anything else as `Images` with a fingerprint, to recognise it on resume."""
    if isinstance(data, Streamed):
        return data
    found = as_images(data)
    if not isinstance(found, Images):
        return found
    return replace(found, fingerprint=content_digest(found.train_x, found.train_y, found.test_x, found.test_y))


def read_images(
    source: Source, cut: DataSettings, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Images | Streamed:
    """Load a set, or take it as given; move it to the device and cut it to the size that the spec says."""
    check_device(device)
    if isinstance(source, Streamed):
        source = source.to(device)
        source = source.split_validation(cut.validation) if cut.validation else source
        return source.cut(cut.samples, cut.test_samples)
    return cut_images(source.to(device) if isinstance(source, Images) else open_set(source, device, dtype), cut)


def cut_images(images: Images, cut: DataSettings) -> Images:
    """Hold out validation samples, then keep the first samples of both parts."""
    if cut.validation:
        images = split_validation(images, cut.validation)
    if (n := cut.samples) is not None:
        _check_there(f"samples is {n}; {images.name}", n, images.train_samples, "training")
        images = replace(images, train_x=images.train_x[:n], train_y=images.train_y[:n])
    if (n := cut.test_samples) is not None:
        _check_there(f"test_samples is {n}; {images.name}", n, images.test_samples, "test")
        images = replace(images, test_x=images.test_x[:n], test_y=images.test_y[:n])
    if not len(images.test_x):
        raise ValueError(f"{images.name} has no test images. Hold out training images: --validation N.")
    return images


def _check_there(what: str, n: int, there: int, kind: str) -> None:
    if n > there:
        raise ValueError(f"{what} has {there} {kind} samples. Lower it.")


def where_from(source: Source) -> str | None:
    """The recorded origin of data: the name of a set, or a path; None for tensors that are not MNIST's."""
    if isinstance(source, Streamed):
        return None
    if isinstance(source, Images):
        return "mnist" if source.fingerprint == MNIST_FINGERPRINT else None
    name = set_name(source)
    return str(Path(str(source)).resolve()) if name is None else name


def source_fields(source: str | None) -> dict[str, str | None]:
    """The origin of data as fields of experiment.json."""
    name = None if source is None else set_name(source)
    return {"set": name, "directory": source if name is None else None}


def data_name(data: Mapping[str, Any]) -> str:
    """What a run's data is called, from its experiment.json."""
    return str(data.get("set") or data.get("name") or "data without a name")


def data_again(recorded: Mapping[str, Any], data: Data | Streamed, own: OwnFunction | None) -> Source:
    """The data of a run: as given, where its folder says it was, or from your own function."""
    if data is not None:
        return given_data(data)
    if source := recorded.get("set") or recorded.get("directory"):
        return str(source)
    # Tensors that were given and changed keep the checksum of the files they came from.
    if recorded.get("sha256") == MNIST_DIGEST and "fingerprint" not in recorded:
        return None
    if own is not None and (its := own.data()) is not None:
        return given_data(its)
    raise ValueError(
        f"The run was trained on arrays ({recorded.get('name')}), which its folder does not hold. Give the same data "
        "again with data=, or --model FILE.py:FUNCTION if that function returned it."
    )


def check_same_data(images: Images | Streamed, recorded: Mapping[str, Any], folder: Path) -> None:
    """Raise unless this is the data that the run was trained on."""
    got = describe(images)
    # Runs of data that was read from files have no fingerprint of the tensors; their sha256 is that of the files.
    may_lack = ("fingerprint", TARGETS)
    compared = [
        key for key in got if key not in ("name", "class_names") and not (key in may_lack and key not in recorded)
    ]
    differing = [key for key in compared if recorded.get(key) != got[key]]
    if differing:
        key = differing[0]
        raise ValueError(
            f"{folder} was trained on other data: {key} was {recorded.get(key)} ({recorded.get('name')}), now "
            f"{got[key]} ({got['name']}). Give the same data with --data, or data= in Python."
        )
