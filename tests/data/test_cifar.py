"""CIFAR's binary files: small generated ones stand in for the published; those marked realdata read the real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training_runs import assert_same_bits

from eqprop import data, train
from eqprop.data import cifar, sources
from eqprop.data.cifar import CIFAR10, CIFAR100, BinarySet
from eqprop.models.layered import LayeredNet
from eqprop.run import evaluate
from eqprop.run.spec import Spec

ROWS = 6


def rows(chosen: BinarySet, seed: int, n: int = ROWS) -> bytes:
    source = np.random.default_rng(seed)
    labels = source.integers(0, 20, (n, chosen.labels))
    labels[:, -1] = source.integers(0, chosen.classes, n)
    return np.concatenate([labels, source.integers(0, 256, (n, 3072))], 1).astype(np.uint8).tobytes()


def contents(chosen: BinarySet) -> dict[str, bytes]:
    files = {name: rows(chosen, seed) for seed, name in enumerate(chosen.rows)}
    if chosen.names:
        files[chosen.names] = "\n".join(f"class_{n}" for n in range(chosen.classes)).encode()
    return files


def packed(chosen: BinarySet, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in {"readme.html": b"<html>", **files}.items():
            member = tarfile.TarInfo(f"{chosen.inside}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def small(chosen: BinarySet) -> BinarySet:
    """The set with ROWS images per file and the digests of its generated files."""
    files = contents(chosen)
    return replace(
        chosen,
        rows=dict.fromkeys(chosen.rows, ROWS),
        files={name: hashlib.md5(files[name]).hexdigest() for name in chosen.files},
        md5=hashlib.md5(packed(chosen, files)).hexdigest(),
        sha256="",
    )


@pytest.fixture(params=[CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def chosen(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BinarySet:
    """A small set under the name of the real one, with an empty cache and no network."""
    monkeypatch.setenv("EQPROP_CACHE", str(tmp_path / "cache"))
    made = small(request.param)
    monkeypatch.setitem(sources.CIFARS, made.name, made)
    monkeypatch.setattr(sources, "download", lambda source, folder: pytest.fail(f"asked the network for {source}"))
    return made


def folder_of(chosen: BinarySet, place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for name, content in contents(chosen).items():
        (place / name).write_bytes(content)
    return place


def archive_of(chosen: BinarySet, place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / chosen.archive).write_bytes(packed(chosen, contents(chosen)))
    return place / chosen.archive


def cache_of(chosen: BinarySet, tmp_path: Path) -> Path:
    return tmp_path / "cache" / "eqprop" / "data" / chosen.name


def check_content(chosen: BinarySet, images: data.Images) -> None:
    files = [contents(chosen)[name] for name in chosen.rows]
    row = chosen.labels + 3072
    for content, x, y in (
        (b"".join(files[:-1]), images.train_x, images.train_y),
        (files[-1], images.test_x, images.test_y),
    ):
        assert len(x) == len(content) // row
        for n in range(len(x)):
            assert x[n].numpy().tobytes() == content[n * row + chosen.labels : (n + 1) * row]
            assert int(y[n]) == content[n * row + chosen.labels - 1]
    assert (images.shape, images.classes) == ((3, 32, 32), chosen.classes)
    assert (images.train_x.dtype, images.dtype, images.train_y.dtype) == (torch.uint8, torch.float32, torch.int64)
    assert len(images.class_names) == chosen.classes
    assert images.sha256 == hashlib.sha256(b"".join(files[:-1])).hexdigest()


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_files_and_archive_in_the_cache_give_the_set(chosen: BinarySet, form: str, tmp_path: Path) -> None:
    (folder_of if form == "folder" else archive_of)(chosen, cache_of(chosen, tmp_path))
    before = sorted(cache_of(chosen, tmp_path).iterdir())
    images = data.open_set(chosen.name.upper())
    check_content(chosen, images)
    assert images.name == chosen.name
    assert sorted(cache_of(chosen, tmp_path).iterdir()) == before, "nothing is unpacked"


def test_a_changed_byte_is_noticed(chosen: BinarySet, tmp_path: Path) -> None:
    place = cache_of(chosen, tmp_path)
    if chosen.files:
        folder_of(chosen, place)
        damaged = bytearray((place / "data_batch_2.bin").read_bytes())
        damaged[500] ^= 1
        (place / "data_batch_2.bin").write_bytes(damaged)
        words = r"data_batch_2\.bin is not the published file of CIFAR-10: its MD5 is .* expected .*Get the file again"
    else:
        files = contents(chosen)
        files["train.bin"] = bytes([files["train.bin"][0] ^ 1]) + files["train.bin"][1:]
        place.mkdir(parents=True)
        (place / chosen.archive).write_bytes(packed(chosen, files))
        words = r"cifar-100-binary\.tar\.gz is not the published file of CIFAR-100.*Delete .* to download it again"
    with pytest.raises(ValueError, match=words):
        data.open_set(chosen.name)


def test_every_kind_of_truncated_archive_is_reported(chosen: BinarySet, tmp_path: Path) -> None:
    path = archive_of(chosen, tmp_path)
    whole = path.read_bytes()
    for length in (0, 1, 5, 100, len(whole) // 2, len(whole) * 9 // 10):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not the published file"):
            cifar.read_published(chosen, path)


REAL = Path(os.environ.get("EQPROP_CIFAR10", "no folder"))


@pytest.fixture(scope="module")
def real() -> data.Images:
    """The folder in $EQPROP_CIFAR10, or the cache."""
    return data.cifar10(REAL if REAL.exists() else None)


@pytest.mark.realdata
def test_the_real_set_is_the_published_one(real: data.Images) -> None:
    assert (real.train_x.shape, real.test_x.shape) == ((50_000, 3072), (10_000, 3072))
    assert real.sha256 == CIFAR10.sha256
    assert torch.bincount(real.train_y).tolist() == [5000] * 10
    assert torch.bincount(real.test_y).tolist() == [1000] * 10
    assert [real.class_names[n] for n in real.train_y[:5]] == ["frog", "truck", "truck", "deer", "automobile"]
    x = real.train_x.view(-1, 3, 1024).double() / 255
    torch.testing.assert_close(x.mean((0, 2)).float(), torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4, rtol=0.0)
    torch.testing.assert_close(x.std((0, 2)).float(), torch.tensor([0.2470, 0.2435, 0.2616]), atol=1e-4, rtol=0.0)


def test_bytes_train_and_evaluate_as_the_floats_they_stand_for(tmp_path: Path) -> None:
    images = data.open_set(folder_of(CIFAR10, tmp_path / "mine"))
    floats = replace(images, train_x=images.floats(images.train_x), test_x=images.floats(images.test_x))
    net = LayeredNet((10, 8, 3072))
    rates = {"W12": 0.05, "W01": 0.02}
    experiment = Spec.of("tiny", model=net, optimizer="SGD", estimator="ep", T=4, K=2, epochs=1, rates=rates, batch=5)
    for name, given in (("bytes", images), ("floats", floats)):
        train(experiment, tmp_path / name, data=given)
    assert_same_bits(tmp_path / "bytes", tmp_path / "floats")
    assert evaluate(tmp_path / "bytes", data=images)["ep"][0]["test_error"] is not None
