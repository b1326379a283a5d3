"""The marked blocks of a page: filled where each has its maker, refused where one is amiss."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from helpers.pages import page_maker

A, B = "<!-- begin a -->\nold\n<!-- end a -->", "<!-- begin b c -->\n<!-- end b c -->"
MAKERS = {"a": lambda: r"new \1", "b c": lambda: "two\nlines"}


@pytest.fixture(scope="module")
def blocks() -> ModuleType:
    return page_maker("blocks")


def test_blocks_are_filled_and_the_text_kept(blocks: ModuleType) -> None:
    made = blocks.filled(f"before\n{B}\nbetween <!-- a remark -->\n{A}\nafter\n", MAKERS)
    new_a = "<!-- begin a -->\nnew \\1\n<!-- end a -->"
    new_b = "<!-- begin b c -->\ntwo\nlines\n<!-- end b c -->"
    assert made == f"before\n{new_b}\nbetween <!-- a remark -->\n{new_a}\nafter\n"
    assert blocks.filled(made, MAKERS) == made


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        (f"{A}\n{B}\n<!-- begin d -->\n<!-- end d -->", "has a block 'd' that nothing fills"),
        (A, "has no block 'b c'"),
        (f"{A}\n{B}\n{A}", "has 2 blocks 'a'; expected one"),
        (f"<!-- begin a -->\n{B}", "expected each begin before its own end"),
        (f"<!-- begin a -->\n{B}\n<!-- end a -->", "expected each begin before its own end"),
        (f"{A}\n{B}\n<!-- end a -->", "expected each begin before its own end"),
    ],
)
def test_a_block_that_is_amiss_is_noticed(blocks: ModuleType, page: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        blocks.filled(page, MAKERS)


def test_to_check_changes_nothing(blocks: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{A}\n{B}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="page.md is not current"):
        blocks.write_or_check(page, MAKERS, check=True)
    assert page.read_text(encoding="utf-8") == f"{A}\n{B}\n"
    blocks.write_or_check(page, MAKERS, check=False)
    blocks.write_or_check(page, MAKERS, check=True)
    assert capsys.readouterr().out == "page.md is current.\n"
