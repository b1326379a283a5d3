"""What the training tests share: a small real data set, a small experiment, runs in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eqprop
from eqprop.cli import main
from eqprop.data import Images, mnist
from eqprop.models.layered import LayeredNet
from eqprop.run import Stopped, resume, train
from eqprop.run.checkpoint import read_checkpoint
from eqprop.run.log import WALL_TIME, read_metrics
from eqprop.run.loop import Interruption
from eqprop.run.spec import Spec
from eqprop.run.watch import Watch

SMALL = Spec.of(
    optimizer="SGD",
    estimator="ep",
    name="small",
    model=LayeredNet((10, 24, 784)),
    T=8,
    K=4,
    beta=0.2,
    epochs=3,
    rates={"W12": 0.1, "W01": 0.05},
)


@cache
def whole_mnist() -> Images:
    return mnist()


def few_images(train: int = 400, test: int = 100) -> Images:
    """The first images of MNIST."""
    whole = whole_mnist()
    return Images(
        whole.train_x[:train].clone(),
        whole.train_y[:train].clone(),
        whole.test_x[:test].clone(),
        whole.test_y[:test].clone(),
        whole.shape,
        whole.classes,
        "few",
        f"{train} and {test} of {whole.sha256}",
    )


def write_idx(folder: Path, images: Images) -> Path:
    """The same images as IDX files, for the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, x, y in (("train", images.train_x, images.train_y), ("t10k", images.test_x, images.test_y)):
        pixels = (x * 255).round().to(torch.uint8)
        head = struct.pack(">BBBBIII", 0, 0, 8, 3, len(x), *images.shape)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(head + pixels.numpy().tobytes())
        labels = struct.pack(">BBBBI", 0, 0, 8, 1, len(y)) + y.to(torch.uint8).numpy().tobytes()
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(labels)
    return folder


def write_small_toml(path: Path, epochs: int) -> Path:
    """The same network with fewer steps still, for runs that are stopped and resumed."""
    path.write_text(
        f"""T = 4
K = 2
beta = {SMALL.phases.beta}
epochs = {epochs}
estimator = "ep"
model = {{ sizes = [10, 24, 784] }}
optimizer = {{ kind = "SGD", rates = {{ W12 = 0.1, W01 = 0.05 }} }}
"""
    )
    return path


def weights(folder: Path, leg: str = "ep") -> dict[str, Tensor]:
    return read_checkpoint(folder / leg).weights


def metrics(folder: Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl, wall times aside."""
    return [{k: v for k, v in line.items() if k != WALL_TIME} for line in read_metrics(folder)]


def assert_same_bits(a: Path, b: Path, legs: tuple[str, ...] = ("ep",)) -> None:
    assert metrics(a) == metrics(b)
    for leg in legs:
        one, other = weights(a, leg), weights(b, leg)
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), f"{leg} {name} differs"
        assert read_checkpoint(a / leg).position == read_checkpoint(b / leg).position


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "eqprop", *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def finish(*words: object, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment(), timeout=timeout)


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """Until the file is there; a process that ends before is an error, told with what it said."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.005)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def summary(text: str) -> dict[str, object]:
    content = json.loads(text)
    assert isinstance(content, dict)
    return content


class Asking(Watch):
    """Asks the run to stop after a number of chunks, as a signal would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
        self.left = chunks
        self.asked = False
        monkeypatch.setattr(Interruption, "requested", property(lambda _: self.asked))

    def progress(self, progress: object) -> None:
        self.left -= 1
        self.asked = self.left == 0


def start_of_whole_and_cut(
    experiment: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch, data: Images, **options: Any
) -> dict[str, Tensor]:
    """Train whole, and stopped inside an epoch and resumed: all bits are the same. Return what its start has kept."""
    whole, cut = folder / "whole", folder / "cut"
    train(experiment, whole, data=data, **options)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        train(experiment, cut, data=data, watch=Asking(patch, 3), **options)
    assert read_checkpoint(cut / experiment.estimator.kind).position.iteration > 0, "stopped inside an epoch"
    resume(cut, data=data)
    assert_same_bits(whole, cut, (experiment.estimator.kind,))
    kept, found = (read_checkpoint(run / experiment.estimator.kind).start for run in (whole, cut))
    assert kept.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in kept.items())
    return kept


def explosive_network(seed: int) -> eqprop.Dynamics:
    """Linear and unstable once its weight has grown: a state that explodes."""
    theta = {"a": torch.tensor(0.5), "V": torch.ones(10, 784) * 1e-3}

    def phi(x: Tensor, s: eqprop.State, theta: Any) -> Tensor:
        return 0.5 * theta["a"] * s[0].square().sum(-1) + (s[0] * (x @ theta["V"].T)).sum(-1)

    return eqprop.from_primitive(phi, theta, layers=(10,))


def call_main(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["eqprop", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def write_cifar(folder: Path, train: int = 200, test: int = 40, seed: int = 0) -> Path:
    """Generated images in the files of CIFAR-10: a class is a colour and a corner, under noise."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    sizes = {**{f"data_batch_{n}.bin": train // 5 for n in range(1, 6)}, "test_batch.bin": test}
    for name, count in sizes.items():
        labels = torch.randint(0, 10, (count,), generator=draw)
        x = torch.randint(0, 120, (count, 3, 32, 32), generator=draw)
        for image, label in zip(x, labels.tolist(), strict=True):
            top, left = 16 * (label % 2), 16 * (label // 5)
            image[label % 3, top : top + 16, left : left + 16] += 100 + 3 * label
        rows = torch.cat([labels[:, None], x.flatten(1)], 1).to(torch.uint8)
        (folder / name).write_bytes(rows.numpy().tobytes())
    return folder
