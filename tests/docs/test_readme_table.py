"""The README's table of measured results: made from the files, each with its preset and its verdict."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from helpers.pages import page_maker, write_row


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return page_maker("make_readme")


def test_the_readme_is_current(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_readme.py", "--check"])
    page.main()


def test_other_presets_are_shown_where_they_are_better_and_what_is_reproduced_is_bold(
    page: ModuleType, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "ROOT", tmp_path)
    folder = page.ROOT / "results" / "table1"
    write_row(folder, "paper", "P-2h", test=3.0, epochs=50)
    write_row(folder, "authors", "P-2h", test=3.1, epochs=50)
    write_row(folder, "tuned", "P-2h", test=2.15, epochs=50)
    write_row(folder, "tuned", "P-conv", test=1.5, epochs=40)
    write_row(folder, "tuned", "P-3h", test=2.0, epochs=98)
    made = page.table1_rows()
    assert "0 of 12 cells come out as printed, 1 under some preset." in made[0]
    rows = [line for line in made if line.startswith("| P-")]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| P-2h", "paper", "3.00 ± 0.10"],
        ["| P-2h", "tuned", "**2.15 ± 0.10**"],
        ["| P-3h", "tuned", "2.00 ± 0.10 after 98 of 100 epochs"],
        ["| P-conv", "tuned", "1.50 ± 0.10"],
    ]
