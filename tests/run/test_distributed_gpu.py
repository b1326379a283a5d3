"""Ranks on GPUs: two that share one through gloo, and one GPU each through NCCL. Not part of the default tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eqprop.run.checkpoint import read_checkpoint

LITTLE = ("--samples", "400", "--test-samples", "200", "--epochs", "2", "--device", "cuda", "--quiet")


def train(out: Path, processes: int, *more: str) -> list[float]:
    """Train P-1h, and return its running errors."""
    words = ["train", "P-1h", "--out", str(out), *LITTLE, *more]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "--", "eqprop"]
    command = [sys.executable, "-m", *(torchrun if processes > 1 else ["eqprop"]), *words]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["train_error"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "compiled"])
def test_two_ranks_on_the_gpus_there_are(tmp_path: Path, engine: str) -> None:
    """On one GPU they share it through gloo; on two or more each has its own, and NCCL."""
    alone = train(tmp_path / "one", 1, "--engine", "eager")
    together = train(tmp_path / "two", 2, "--engine", engine)
    assert all(abs(a - b) <= 100.0 / 400 for a, b in zip(alone, together, strict=True))
    one, two = (read_checkpoint(tmp_path / name / "ep").weights for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
