"""The data sources' contract, on every form that `data=` takes, and on sources that break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.source_contract import (
    CHECKS,
    a_seed_draws_the_same_distinct_samples,
    it_has_what_it_says,
    opened_twice_it_is_the_same,
)
from helpers.training_runs import few_images, write_idx
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from eqprop import data
from eqprop.data import Images

CLASSES = ("ant", "bee", "cat")


def arrays() -> tuple[Any, ...]:
    draw = np.random.default_rng(0)
    return draw.random((24, 2, 4, 4)), np.arange(24) % 3, draw.random((9, 2, 4, 4)), np.arange(9) % 3


def in_npz(folder: Path) -> Path:
    np.savez(folder / "mine.npz", **dict(zip(("x", "y", "x_test", "y_test"), arrays(), strict=True)))
    return folder / "mine.npz"


def in_pictures(folder: Path) -> Path:
    draw = np.random.default_rng(1)
    for half, count in (("train", 5), ("test", 2)):
        for name in CLASSES:
            (folder / half / name).mkdir(parents=True)
            for n in range(count):
                pixels = draw.integers(0, 256, (5, 6, 3), np.uint8)
                Image.fromarray(pixels).save(folder / half / name / f"{n}.png")
    return folder


def in_cifars_files(folder: Path) -> Path:
    draw = np.random.default_rng(2)
    for name in [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]:
        rows = np.concatenate([draw.integers(0, 10, (4, 1)), draw.integers(0, 256, (4, 3072))], 1)
        (folder / name).write_bytes(rows.astype(np.uint8).tobytes())
    return folder


def tensors() -> tuple[TensorDataset, TensorDataset]:
    x, y, x_test, y_test = map(torch.from_numpy, arrays())
    return TensorDataset(x, y), TensorDataset(x_test, y_test)


def targets() -> tuple[Any, ...]:
    x, _, x_test, _ = arrays()
    return x, x[:, 0, 0, :2], x_test, x_test[:, 0, 0, :2]


SOURCES: dict[str, Callable[[Path], Any]] = {
    "mnist's files": lambda folder: write_idx(folder, few_images(30, 10)),
    "arrays": lambda folder: arrays(),
    "targets": lambda folder: targets(),
    "an npz file": in_npz,
    "pictures": in_pictures,
    "cifar's files": in_cifars_files,
    "data sets": lambda folder: tensors(),
    "streamed": lambda folder: data.streamed(*map(DataLoader, tensors()), classes=3),
}


def opened(source: Any) -> Any:
    found = source if isinstance(source, data.Streamed) else data.as_images(source)
    return data.open_set(found) if isinstance(found, str | Path) else found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_keeps_its_promises(name: str, check: Any, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path)
    check(lambda: opened(source))


class Random(Images):
    def sample(self, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(self.train_samples, (n,), generator=torch.Generator().manual_seed(seed))
        return self.train_x[rows], self.train_y[rows]


def test_a_wrong_source_is_noticed() -> None:
    made = data.from_arrays(*arrays())
    with pytest.raises(AssertionError):
        it_has_what_it_says(lambda: replace(made, classes=2))
    with pytest.raises(AssertionError):
        opened_twice_it_is_the_same(lambda: replace(made, train_x=torch.rand(24, 32)))
    with pytest.raises(AssertionError):
        a_seed_draws_the_same_distinct_samples(lambda: Random(**vars(made)))
