"""The examples run as they stand, one in a process of its own, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.pages import run_block

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIGURE = r"(\d\.\d+e[+-]\d+)"


def run(name: str, folder: Path) -> str:
    """What the example prints in an empty folder, in this process, which has torch imported."""
    out = run_block(folder, (EXAMPLES / name).read_text(encoding="utf-8"))
    assert list(folder.iterdir()) == []
    return out


def run_alone(name: str, folder: Path) -> str:
    """The same as a user starts it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(folder.iterdir()) == []
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(pattern, text)]


def test_every_example_is_tested() -> None:
    tested = re.findall(r'run(?:_alone)?\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    by_readme = {"my_net.py"}  # trained as Start has it
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*tested, *by_readme}


def test_own_model(tmp_path: Path) -> None:
    out = run("own_model.py", tmp_path)
    residual, gap, twin = (numbers(rf"{what}.* {FIGURE}", out)[0] for what in ("residual", "nabla", "steady states"))
    assert residual < 1e-12
    assert gap < 1e-9
    assert twin < 1e-12
    losses = numbers(r"loss (\d+\.\d+)", out)
    assert losses[-1] < 0.1 * losses[0]
    assert out.rstrip().endswith("4 of 4 right")


def test_field_nets(tmp_path: Path) -> None:
    out = run("field_nets.py", tmp_path)
    heads = re.findall(r"([\d,]+) parameters, ([\d,.]+) M operations", out)
    assert heads == [("3,843,850", "641.7"), ("3,859,210", "755.1"), ("9,742,858", "1,266.8")]


def test_quickstart(tmp_path: Path) -> None:
    out = run_alone("quickstart.py", tmp_path)
    losses = numbers(r"mean loss (\d+\.\d+)", out)
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    (error,) = numbers(r"(\d+\.\d) %", out)
    assert error < 30.0


def test_toy_gdu(tmp_path: Path) -> None:
    out = run("toy_gdu.py", tmp_path)
    assert "T 5000, K 80" in out
    rows = {row[0]: [float(v) for v in row[2:]] for row in re.findall(rf"(\w+) +(\d+){rf' +{FIGURE}' * 6}", out)}
    assert rows.keys() == {"s0", "s1", "W01", "W0x", "W1x"}
    for largest, mean, largest_fine, mean_fine, largest_limit, mean_limit in rows.values():
        assert mean < largest < 0.05
        assert mean_fine < largest_fine
        # A tenth of beta, a tenth of the error; and none in the limit.
        assert 9.0 < mean / mean_fine < 11.0
        assert mean_limit < largest_limit < 1e-9
