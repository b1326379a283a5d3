"""CPU threads: chosen by the size of the work, never by how busy the machine is; --threads overrides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.training_runs import SMALL, call_main, few_images

from eqprop.engines import threads_for, using_threads
from eqprop.models import Convolutional, Layered, Toy
from eqprop.run import train


@pytest.fixture(autouse=True)
def four() -> Iterator[None]:
    """As on a machine with four cores."""
    with using_threads(4):
        yield


def test_small_work_takes_one_thread_and_large_work_all() -> None:
    net = Layered((10, 512, 784), seed=0)
    assert threads_for(net, torch.zeros(20, 784)) == 1
    assert threads_for(net, torch.zeros(5000, 784)) == 4
    assert threads_for(Toy(), torch.zeros(1, 10)) == 1
    conv = Convolutional((1, 28, 28), seed=0)
    assert threads_for(conv, torch.zeros(1, 1, 28, 28)) < threads_for(conv, torch.zeros(60, 1, 28, 28))


@pytest.mark.parametrize(("given", "used"), [(None, 1), (3, 3)])
def test_gdu_and_train_choose_alike_and_record_it(
    given: int | None, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = () if given is None else ("--threads", given)
    assert call_main(monkeypatch, "gdu", "toy", "--T", 60, "--K", 2, "--json", tmp_path / "gdu.json", *words) == 0
    assert json.loads((tmp_path / "gdu.json").read_text())["provenance"]["threads"] == used
    train(SMALL, tmp_path / "run", data=few_images(), epochs=1, engine="eager", threads=given)
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["experiment"]["run"]["threads"] == used
    session = json.loads((tmp_path / "run" / "environment.json").read_text())["sessions"][0]
    assert session["provenance"]["threads"] == used
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("given", "first", "expected"),
    [
        ({}, "", "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "", "7"),
        ({"OMP_WAIT_POLICY": "active"}, "", "None"),
        ({}, "import torch; ", "None"),
    ],
    ids=["default", "the user's own", "a policy", "torch is loaded already"],
)
def test_threads_that_wait_soon_sleep(given: dict[str, str], first: str, expected: str) -> None:
    clean = {name: v for name, v in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = f"{first}import eqprop, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    ended = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == expected
