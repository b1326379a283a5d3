"""A wheel brings the C engine along: it runs where there is no compiler."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import eqprop
from eqprop import EP, SquaredError
from eqprop.engines import Task, choose
assert eqprop.__file__.startswith(sys.argv[1]), eqprop.__file__
for dtype in (torch.float32, torch.float64):
    for model in (eqprop.models.Layered((3, 6, 4), dtype=dtype), eqprop.models.Convolutional(dtype=dtype)):
        print(choose("auto", Task(model, SquaredError(), EP(4, 2))).name)
"""


def build(folder: Path, **variables: str) -> tuple[Path, str]:
    """A wheel of the checkout, built from a copy without what lies about in it, and the log of its building."""
    copy = folder / "copy"
    for name in ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / name), str(target)], check=True)
    words = ["wheel", "--no-deps", "--no-build-isolation", "--verbose", "--wheel-dir", str(folder), str(copy)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels with machine code are built for x86-64")
def test_a_wheel_runs_the_c_engine_without_a_compiler(tmp_path: Path) -> None:
    wheel, _ = build(tmp_path)
    assert "py3-none-linux" in wheel.name
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        content.extractall(tmp_path / "site")
    assert sum(name.endswith(".so") for name in names) == 8
    assert not [name for name in names if name.startswith(("benchmarks", "tests", "docs"))]
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path), "EQPROP_NO_COMPILER": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRAIN, str(tmp_path / "site")], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["cpu"] * 4, done.stderr


def test_a_pure_wheel_says_so(tmp_path: Path) -> None:
    wheel, log = build(tmp_path, EQPROP_PURE_WHEEL="1")
    assert "copying src/eqprop/engines/cpu/csrc/layered.c" in log, "the log of setuptools"
    assert "_Warning" not in log
    assert wheel.name.endswith("py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert not [name for name in names if name.startswith(("benchmarks", "tests", "docs"))]
    assert "eqprop/engines/cpu/csrc/layered.c" in names
