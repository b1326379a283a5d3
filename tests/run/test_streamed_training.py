"""Runs on samples read by number while they are used: the same bits as from memory, stopped and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.training_runs import SMALL, Asking, assert_same_bits, few_images, metrics, weights
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eqprop.data import Images, Streamed, streamed
from eqprop.data.augment import Augmentation, Normalisation
from eqprop.run import evaluate, resume, train
from eqprop.run.loop import Stopped
from eqprop.run.spec import Spec

AUGMENTED = SMALL.override(
    epochs=2,
    augmentation=Augmentation(flip=True, crop=2),
    normalisation=Normalisation((0.1,), (0.3,)),
    warmup=0.3,
)


class Numbered(Dataset[tuple[Tensor, int]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, n: int) -> tuple[Tensor, int]:
        return self.x[n].view(28, 28), int(self.y[n])


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def stream(images: Images, workers: int = 0) -> Streamed:
    halves = (Numbered(images.train_x, images.train_y), Numbered(images.test_x, images.test_y))
    loaders = [DataLoader(half, num_workers=workers) for half in halves]
    return streamed(*loaders, classes=10)


@pytest.mark.parametrize("start", ["zero", "persistent", "carried"])
def test_it_trains_as_from_memory(tmp_path: Path, images: Images, start: str) -> None:
    experiment = AUGMENTED.override(start=start)
    train(experiment, tmp_path / "read", data=stream(images), engine="eager")
    train(experiment, tmp_path / "held", data=images, engine="eager")
    assert_same_bits(tmp_path / "read", tmp_path / "held")
    assert (
        evaluate(tmp_path / "read", data=stream(images))["ep"][0]["test_error"]
        == metrics(tmp_path / "read")[-1]["test_error"]
    )


@pytest.mark.parametrize("experiment", [SMALL, AUGMENTED], ids=["plain samples", "augmented"])
def test_a_stopped_run_resumes_bit_for_bit(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, experiment: Spec
) -> None:
    train(experiment, tmp_path / "whole", data=stream(images))
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        train(experiment, tmp_path / "cut", data=stream(images), watch=Asking(patch, 4))
    with pytest.raises(ValueError, match="Give the same data again"):
        resume(tmp_path / "cut")
    resume(tmp_path / "cut", data=stream(images))
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.filterwarnings("error")
def test_workers_and_parts_of_the_set(tmp_path: Path, images: Images) -> None:
    options = {"validation": 100, "samples": 200, "test_samples": 50, "epochs": 1}
    train(AUGMENTED, tmp_path / "read", data=stream(images, workers=1), **options)
    train(AUGMENTED, tmp_path / "held", data=images, engine="eager", **options)
    one, other = weights(tmp_path / "read"), weights(tmp_path / "held")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_sample_that_cannot_be_used_is_named_and_the_run_is_kept(tmp_path: Path, images: Images) -> None:
    broken = images.train_x.clone()
    broken[317, 5] = torch.nan
    bad = stream(replace(images, train_x=broken))
    with pytest.raises(ValueError, match="317"):
        train(SMALL, tmp_path / "run", data=bad)
    assert (tmp_path / "run" / "ep" / "checkpoint.safetensors").exists()
