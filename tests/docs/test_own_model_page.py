"""The three commands of the page on your own model, with its file as it stands; MNIST instead of a download."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from helpers.pages import ROOT, code_blocks, run_here

PAGE = ROOT / "docs" / "own-model.md"
SHORTER = {
    "doctor": ["--data", "mnist", "--T", "200"],
    "train": ["--data", "mnist", "--samples", "2000", "--test-samples", "500", "--quiet"],
}


@pytest.mark.slow
def test_an_energy_becomes_a_trained_network_and_a_page_in_three_commands(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(code_blocks(PAGE, "python")[0])
    lines = [shlex.split(line, comments=True) for line in code_blocks(PAGE, "bash")[0].splitlines()]
    assert [words[:2] for words in lines] == [["eqprop", "doctor"], ["eqprop", "train"], ["eqprop", "report"]]
    said = [run_here(tmp_path, sys.executable, "-m", *words, *SHORTER.get(words[1], [])) for words in lines]
    assert "No cause found" in said[0]
    page = (tmp_path / "runs" / "mine" / "report.html").read_text(encoding="utf-8")
    assert "my-build" in page
    assert "Errors by class" in page
    assert "own cost" not in page, "the squared error is nobody's own"
