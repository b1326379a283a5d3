"""One page for every test of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import Browser

from eqprop.report.play import write_play


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_play(tmp_path_factory.mktemp("play"))


@pytest.fixture
def browser(browser: Browser) -> Iterator[Browser]:
    """Fails the test if the page asks for anything or puts an error in the console."""
    yield browser
    assert browser.errors == []
    assert [r for r in browser.requests if not r.startswith(("file:", "data:"))] == []
