"""Every command of Start and the tutorials is run, shortened, in the order of the page; those that are not say why.

The commands of README and the first three of Start are run by test_readme.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from helpers.pages import ROOT
from helpers.training_runs import SMALL, call_main

from docs.site.tutorial import cells
from eqprop.run import train

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
PAGES = [ROOT / "docs" / "index.md", *TUTORIALS]
FEW = ("--samples", "100", "--epochs", "1", "--threads", "1")
SHORTER: dict[str, tuple[str, ...]] = {
    "gdu toy": ("--T", "300", "--threads", "1"),
    "gdu": ("--T", "50", "--threads", "1"),
    "train deep-10": ("--samples", "500", *FEW[2:], "--test-samples", "50", "--quiet"),
    "train my.toml": ("--data", "data.npz", "--epochs", "1", "--quiet"),
    "train": (*FEW, "--test-samples", "50", "--quiet"),
    "sweep": ("--noise", "0,0.02", "--weight-bits", "8", *FEW[:4], "--test-samples", "50", "--jobs", "1", "--quiet"),
    "tune": ("--budget", "1", "--threads", "1", "--quiet"),
    "reproduce table1": ("--trials", "1", *FEW, "--quiet"),
}
"""What a command gets in addition, so that it ends within seconds; of an option given twice the second counts."""
NOT_RUN = {
    "7_cifar10.py": "needs CIFAR-10 and a GPU for hours; test_reproduce_cifar10.py runs them on small nets",
}
"""Pages whose commands are only looked up (test_pages.py), with the reason."""
LONG = ("5_choosing.py", "6_table1.py", "11_how_good.py", "12_depth.py")
"""Pages whose commands take seconds even when shortened."""
A_CAUSE = 1
"""The exit code of the doctor where it names a cause, as it may of a net trained on a hundred samples."""
OWN = """
import torch, eqprop

def energy(x, s, theta):
    return 0.5 * (s[0] ** 2).sum(-1) - (torch.tanh(s[0]) * (x @ theta["W"])).sum(-1)

def build(seed):
    x = torch.randn(120, 6)
    y = (x.sum(1) > 0).long()
    model = eqprop.from_energy(energy, {"W": torch.randn(6, 2) / 3}, layers=(2,), eps=0.5)
    return model, eqprop.SquaredError(), x, y
"""
BOARD = """
class MyBoard(Board):
    def __init__(self, model):
        super().__init__(model, Chip())
"""


def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    return "\n".join(re.sub(r"^# ?", "", cell.text, flags=re.M) for cell in cells(text) if cell.markdown)


def commands_of(page: Path) -> list[list[str]]:
    """The commands in blocks and in the text, each once; a command's name alone is none."""
    text = text_of(page)
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    inline = re.findall(r"`(eqprop [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    lines += [" ".join(line.split()) for line in inline]
    found = [tuple(shlex.split(line.replace("...", ""), comments=True)) for line in lines]
    return [
        list(words[1:])
        for words in dict.fromkeys(found)
        if words[0] == "eqprop" and len(words) > 2 and "examples/my_net.py:build" not in words
    ]


def shortened(words: list[str]) -> list[str]:
    name = next((name for name in SHORTER if words[: len(name.split())] == name.split()), None)
    return [*words, *(SHORTER[name] if name else ())]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages speak of: own models, a board, its settings, a trained run."""
    for name in ("my.py", "my_model.py", "FILE.py"):
        (tmp_path / name).write_text(OWN)
    device = (ROOT / "docs" / "tutorials" / "10_device.py").read_text(encoding="utf-8").partition("\nboard = ")[0]
    (tmp_path / "board.py").write_text(device + BOARD)
    draw = np.random.default_rng(0)
    x, y = draw.random((120, 36), np.float32), draw.integers(0, 3, 120)
    np.savez(tmp_path / "data.npz", x=x, y=y, x_test=x[:30], y_test=y[:30])
    (tmp_path / "my.toml").write_text(
        'T = 5\nK = 5\nbeta = 0.2\nestimator = "ep-symmetric"\nnudge_site = "inside"\nrates = { "*" = 0.01 }\n'
        '[model]\nkind = "layered"\nsizes = [3, 24, 36]\nactivation = "tanh"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.name in LONG else []) for p in PAGES]
)
def test_the_commands_of_a_page_run_in_turn(
    page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = commands_of(page)
    if page.name in NOT_RUN:
        assert lines, "nothing is left out for nothing"
        pytest.skip(NOT_RUN[page.name])
    if any("RUN" in words for words in lines):
        train(SMALL, reader / "RUN", samples=100, test_samples=50, epochs=1, threads=1)
    for words in lines:
        code = call_main(monkeypatch, *shortened(words))
        said = capsys.readouterr()
        assert code == 0 or (words[0] == "doctor" and code == A_CAUSE), (words, said.err)


def test_commands_are_found_in_blocks_and_in_the_text() -> None:
    found = {page.stem: commands_of(page) for page in PAGES}
    assert ["sweep", "my.py:build"] in found["11_how_good"]
    assert ["reproduce", "table1", "--rows", "P-1h", "--trials", "5", "--out", "table1"] in found["6_table1"]
    assert sum(map(len, found.values())) > 20
