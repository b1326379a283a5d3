"""Every code block of the README runs as it stands; commands that take long run with fewer samples."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers.pages import ROOT, code_blocks, run_block, run_here, run_python

README = ROOT / "README.md"
SHORTER = {
    "train": ["--samples", "200", "--epochs", "1", "--quiet"],
    "tune": ["--budget", "1", "--quiet"],
    "table1": ["--rows", "P-1h", "--samples", "100", "--epochs", "1", "--trials", "1", "--quiet"],
}
"""What a command gets in addition, so that it ends within seconds."""


def test_every_block_is_run() -> None:
    languages = re.findall(r"^```(\w+)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(languages) == ["bash", "bash", "python", "python"]


@pytest.mark.slow
def test_it_installs(tmp_path: Path) -> None:
    (line,) = code_blocks(README, "bash")[0].splitlines()
    pytest.importorskip("setuptools")
    # A build leaves files behind, so it gets a copy.
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    words = [sys.executable, "-m", *shlex.split(line), "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    run_here(copy, *words, "--target", str(tmp_path / "there"))
    assert (tmp_path / "there" / "eqprop" / "data" / "mnist").is_dir()


def test_ten_lines_train_a_network(tmp_path: Path) -> None:
    out = run_block(tmp_path, code_blocks(README, "python")[0])
    assert int(re.fullmatch(r"test error (\d+) %\n", out)[1]) < 35  # type: ignore[index]


def test_an_own_model_has_the_gdu_property(tmp_path: Path) -> None:
    out = run_block(tmp_path, code_blocks(README, "python")[1])
    assert "The GDU property holds" in out


IN_TURN = """
import sys
from eqprop.cli import main
for words in {lines!r}:
    sys.argv = words
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None) or (words[1] == "doctor" and end.code == 1), (words, end.code)
"""
"""The doctor exits with 1 where it finds a cause, and a network trained on 200 samples may have one."""


@pytest.mark.parametrize(
    "left_out", [("tune", "doctor"), pytest.param((), marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_the_commands_run_in_turn(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    lines = []
    for line in code_blocks(README, "bash")[1].splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "eqprop"
        lines.append([*words, *next((options for name, options in SHORTER.items() if name in words), [])])
    assert len(lines) >= 8
    run_python(tmp_path, IN_TURN.format(lines=[words for words in lines if words[1] not in left_out]))
    assert (tmp_path / "runs" / "p1h" / "report.html").is_file()
    assert (tmp_path / "table1" / "paper" / "P-1h.json").is_file()
