"""Every code block of the README runs as it stands; commands that take long run with fewer samples."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers.pages import ROOT, code_blocks, run_block, run_here

README = ROOT / "README.md"
SHORTER = {
    "train": ["--samples", "200", "--test-samples", "100", "--epochs", "1", "--quiet", "--out", "runs/p1h"],
    "toy": ["--T", "300"],
}
"""What a command gets in addition, so that it ends within seconds."""


def test_every_block_is_run() -> None:
    languages = re.findall(r"^```(\w+)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(languages) == ["bash", "python", "python"]


def test_it_is_read_in_three_minutes() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert [line for line in lines if len(line) > 120] == []
    (summary,) = re.findall(r"<!-- begin summary -->\n(.*?)<!-- end summary -->", "\n".join(lines), re.S)
    assert len(summary.splitlines()) <= 11, "one table, and a sentence about CIFAR-10"
    last = "\n".join(lines).partition("## Read on")[2].strip().partition("\n\n")[0]
    assert len(re.findall(r"\]\(", last)) == 5, "five links"


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


def test_the_commands_of_the_text_run_in_turn(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    found = [shlex.split(words) for words in re.findall(r"`(eqprop [^`]+)`", text) if " --help" not in words]
    assert [words[1] for words in found] == ["gdu", "train", "report", "doctor"]
    run_block(tmp_path, IN_TURN.format(lines=[_shortened(words) for words in found]))
    assert (tmp_path / "runs" / "p1h" / "report.html").is_file()


def test_start_leads_to_an_own_net_in_three_commands(tmp_path: Path) -> None:
    first, *others = code_blocks(ROOT / "docs" / "index.md", "bash")[0].splitlines()
    assert first == "pip install ."
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "my_net.py", tmp_path / "examples")
    lines = [shlex.split(line) for line in others]
    assert [words[1] for words in lines] == ["train", "report"]
    run_block(tmp_path, IN_TURN.format(lines=[_shortened(words) for words in lines]))
    page = (tmp_path / "runs" / "mine" / "report.html").read_text(encoding="utf-8")
    for promised in ("Errors by class", "Worst answers", "How the state settles", "The doctor"):
        assert promised in page, promised


def _shortened(words: list[str]) -> list[str]:
    more = next((options for name, options in SHORTER.items() if name in words), [])
    return [*words, *(more if "--out" not in words else [w for w in more if w not in ("--out", "runs/p1h")])]
