"""Streamed samples: the experiment's order, whatever reads them; one sentence for what a data set does wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from eqprop import data
from eqprop.data.images import epoch_order, stacked_order


class Pictures(Dataset[Any]):
    """Sample n is a picture of 2 x 3 pixels filled with n, plus noise from every generator if asked for."""

    def __init__(self, n: int = 40, noise: bool = False, kind: torch.dtype = torch.float32) -> None:
        self.n, self.noise, self.kind = n, noise, kind

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, n: int) -> tuple[Any, Any]:
        x = torch.full((1, 2, 3), n, dtype=self.kind)
        if self.noise:
            x = x + torch.rand(1, 2, 3) + np.random.random() + random.random()  # noqa: NPY002
        return x, n % 4


class Broken(Pictures):
    """What sample 17 is instead."""

    def __init__(self, instead: Any) -> None:
        super().__init__()
        self.instead = instead

    def __getitem__(self, n: int) -> tuple[Any, Any]:
        return self.instead() if n == 17 else super().__getitem__(n)


def open_with(workers: int, train: Dataset[Any], **options: Any) -> data.Streamed:
    loaders = (
        DataLoader(part, batch_size=3, shuffle=True, num_workers=workers, **options) for part in (train, Pictures(11))
    )
    return data.streamed(*loaders, classes=4)


def collect(batches: Iterator[Any]) -> tuple[Tensor, Tensor, Tensor]:
    x, y, rows = zip(*batches, strict=True)
    return torch.stack(x), torch.stack(y), torch.stack(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_come_in_the_order_of_the_experiment(workers: int) -> None:
    streamed = open_with(workers, Pictures())
    assert (streamed.shape, streamed.classes, streamed.labelled) == ((1, 2, 3), 4, True)
    assert (streamed.train_samples, streamed.test_samples, streamed.dtype) == (40, 11, torch.float32)
    order = epoch_order(3, 5, 40, 8)
    x, y, rows = collect(streamed.batches(order, 3, 5))
    assert x.shape == (5, 8, 6)
    assert torch.equal(x, order.float().unsqueeze(-1).expand(5, 8, 6))
    assert torch.equal(y, order % 4)
    assert torch.equal(rows, order)
    assert y.dtype == torch.int64
    tested = list(streamed.in_order("test", 4))
    assert [len(batch.x) for batch in tested] == [4, 4, 3]
    assert torch.cat([batch.x for batch in tested])[:, 0].tolist() == list(range(11))


def test_what_transforms_draw_depends_on_seed_epoch_and_sample_alone() -> None:
    order = epoch_order(1, 0, 40, 8)
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]  # noqa: NPY002
    alone, _, _ = collect(open_with(0, Pictures(noise=True)).batches(order, 1, 0))
    streamed = open_with(2, Pictures(noise=True))
    by_workers, _, _ = collect(streamed.batches(order, 1, 0))
    assert torch.equal(alone, by_workers)
    resumed, _, _ = collect(streamed.batches(order[3:], 1, 0))
    assert torch.equal(resumed, alone[3:])
    flipped, _, _ = collect(open_with(0, Pictures(noise=True)).batches(order.flip(1), 1, 0))
    assert torch.equal(flipped.flip(1), alone)
    noise = [alone - order.unsqueeze(-1)]
    for seed, epoch in ((1, 1), (2, 0)):
        other, _, _ = collect(open_with(0, Pictures(noise=True)).batches(order, seed, epoch))
        noise.append(other - order.unsqueeze(-1))
    assert all(len(part.unique()) > 0.9 * part.numel() for part in noise)
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])  # type: ignore[index]  # noqa: NPY002
    assert random.getstate() == state[2]


def test_stacked_runs_get_what_each_would_get_alone() -> None:
    streamed = open_with(0, Pictures(noise=True))
    x, y, rows = collect(streamed.batches(stacked_order((4, 9), 2, 40, 5), (4, 9), 2))
    assert x.shape == (8, 2, 5, 6)
    assert rows.shape == y.shape == (8, 2, 5)
    for run, seed in enumerate((4, 9)):
        alone = collect(streamed.batches(epoch_order(seed, 2, 40, 5), seed, 2))
        assert all(torch.equal(a, b[:, run]) for a, b in zip(alone, (x, y, rows), strict=True))


def raises() -> Any:
    raise KeyError("no such file\nsecond line")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("instead", "words"),
    [
        (raises, r"Sample 17 of the training data raised KeyError: .*no such file"),
        (lambda: (torch.full((1, 2, 3), float("nan")), 1), "Sample 17 of the training data holds NaN or infinity"),
        (lambda: (torch.zeros(1, 3, 2), 1), r"Sample 17 .* has shape \(1, 3, 2\); expected \(1, 2, 3\)"),
        (lambda: (torch.zeros(1, 2, 3), 4), "Sample 17 .* has the label 4; expected a whole number from 0 to 3"),
        (lambda: (torch.zeros(1, 2, 3), -1), "has the label -1"),
        (lambda: (torch.zeros(1, 2, 3), 1.5), "has the label 1.5"),
        (lambda: (torch.zeros(1, 2, 3), [1, 2]), r"has the label of shape \(2,\)"),
        (lambda: (torch.zeros(1, 2, 3, dtype=torch.uint8), 1), "is torch.uint8; expected torch.float32"),
        (lambda: torch.zeros(1, 2, 3), "is Tensor; expected a pair"),
        (lambda: ("picture", 3), "holds no numbers"),
    ],
)
def test_a_bad_sample_is_named_in_one_sentence(workers: int, instead: Any, words: str) -> None:
    streamed = open_with(workers, Broken(instead))
    order = torch.arange(40).view(5, 8)
    batches = streamed.batches(order)
    good = [next(batches), next(batches)]  # the mini-batches before are delivered
    assert torch.equal(torch.stack([batch.rows for batch in good]), order[:2])
    with pytest.raises(ValueError, match=words) as caught:
        next(batches)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_worker_that_is_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)

    def die() -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    batches = open_with(1, Broken(die)).batches(torch.arange(40).view(5, 8))
    next(batches)
    words = "worker processes that read the training data stopped: .+ try num_workers=0"
    with pytest.raises(OSError, match=words) as caught:
        list(batches)
    assert "\n" not in str(caught.value)
    # What is noticed is not raised again from a signal handler.
    assert subprocess.run(["true"], check=True).returncode == 0


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(3), 1


class Empty(Pictures):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (Endless(), "training data is Endless, whose samples have no numbers"),
        (DataLoader(Endless()), "training data is Endless, whose samples have no numbers"),
        (Empty(), "training data is empty"),
        (7, "training data is int"),
        ([(torch.zeros(0), 1)], "is empty; expected at least one number"),
        ([1, 2], "Sample 0 of the training data is int; expected a pair"),
    ],
)
def test_what_cannot_be_streamed_is_refused(train: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        data.streamed(train, Pictures(), classes=4)


@pytest.mark.gpu
def test_batches_are_pinned_and_arrive_on_the_device() -> None:
    streamed = open_with(2, Pictures(noise=True))
    order = epoch_order(1, 0, 40, 8)
    here = collect(streamed.batches(order, 1, 0))
    there = collect(streamed.to("cuda").batches(order, 1, 0))
    assert all(part.is_cuda for part in there)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
