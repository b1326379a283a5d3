"""What finds text that cannot be read, on pages made for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.browser import Browser

from docs.site.look import UNREADABLE
from docs.site.parameters import described, shown, undescribed

PAGE = "<!DOCTYPE html><meta name=viewport content='width=device-width'><body style='font:16px sans-serif'>{}"
READABLE = "<p>One <b>two</b> three.</p><pre><code>short = 1</code></pre><table><tr><td>a<td>b</table>"
FAULTY = {
    "overlap": "<p>Lower line</p><p style='margin-top:-34px'>Upper line</p>",
    "clipped": "<div style='width:60px;overflow:hidden;white-space:nowrap'>A long line of text</div>",
    "code is cut off": f"<pre style='width:200px;overflow:auto'><code>{'x' * 80}</code></pre>",
    "wider than the screen": "<div style='width:2000px'>wide</div>",
}


@pytest.mark.browser
@pytest.mark.parametrize("fault", [None, *FAULTY])
def test_what_cannot_be_read_is_found(tmp_path: Path, browser: Browser, fault: str | None) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(READABLE if fault is None else FAULTY[fault]))
    browser.open(page, width=390, mobile=True)
    found = browser.run(UNREADABLE)
    assert (found == []) if fault is None else any(one.startswith(fault) for one in found)


def test_rows_of_a_docstring_are_told_from_its_text() -> None:
    found = described(
        """What it does.

        T           steps,
                    many of them
        beta, y     two at once
        input_shape the shape

        Returns x  and y.
        """
    )
    assert found.text == "What it does.\n\nReturns x  and y."
    assert found.rows == {
        "T": "steps, many of them",
        "beta": "two at once",
        "y": "two at once",
        "input_shape": "the shape",
    }


def test_every_object_of_the_reference_describes_what_it_takes() -> None:
    names = list(shown(Path(__file__).resolve().parents[2] / "docs" / "api"))
    assert len(names) > 60
    assert {name: missing for name in names if (missing := undescribed(name))} == {}
    assert undescribed("docs.site.look.look") == ["browser", "page", "site", "width", "screenshots"]
