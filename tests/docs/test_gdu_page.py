"""docs/gdu.md says what results/gdu says, and keeps its promises."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from helpers.pages import page_maker

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gdu.md"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return page_maker("make_gdu_page")


def test_the_page_is_what_the_results_say(maker: ModuleType) -> None:
    maker.write_or_check(maker.PAGE, maker.BLOCKS, check=True)


def test_every_promise_holds(maker: ModuleType) -> None:
    rows = maker.must_hold_block().splitlines()[2:]
    assert len(rows) == 11
    assert [row for row in rows if not row.endswith("| holds |")] == []


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(pictures) == 11
    for picture in pictures:
        path = (PAGE.parent / picture).resolve()
        assert path.is_file()
        assert path.with_suffix(".pdf").is_file()
