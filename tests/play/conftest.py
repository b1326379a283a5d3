"""One browser and one page for every test of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import Browser, find_browser

from eqprop.report.play import write_play


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_play(tmp_path_factory.mktemp("play"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    started = Browser(program)
    yield started
    started.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Fails the test if the page asks for anything or puts an error in the console."""
    chromium.errors.clear()
    chromium.requests.clear()
    yield chromium
    assert chromium.errors == []
    assert [r for r in chromium.requests if not r.startswith(("file:", "data:"))] == []
