"""The wheel is pure, and holds what the package reads at run time."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_wheel_is_pure_and_whole(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy / name)], check=True)
    words = ["wheel", "--no-deps", "--no-build-isolation", "--verbose", "--wheel-dir", str(tmp_path), str(copy)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_Warning" not in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert not [name for name in names if name.startswith(("benchmarks", "tests", "docs")) or name.endswith(".so")]
    for part in ("engines/cuda/kernels", "papers", "data/mnist", "report"):
        held = {f"eqprop/{path.relative_to(ROOT / 'src/eqprop')}" for path in (ROOT / "src/eqprop" / part).glob("*.*")}
        assert held
        assert held <= {*names}, part
