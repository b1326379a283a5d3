"""Shared set-up: property tests draw the same examples every time, long tests say so, one browser serves all pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.browser import Browser, find_browser
from hypothesis import HealthCheck, settings

from eqprop import engines
from eqprop.data import images

pytest_plugins = ["helpers.long_tests", "helpers.records"]

settings.register_profile(
    "eqprop", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("eqprop")

# The nets here are tiny: a second thread costs far more in waiting than it gives, above all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def mnist_is_unpacked_once() -> Iterator[None]:
    """The files that come with the package: a sixth of a second each time, and many tests read them."""
    read = images.read_idx
    once = cache(read)
    with pytest.MonkeyPatch.context() as patch:
        packaged = images.MNIST_DIRECTORY
        patch.setattr(images, "read_idx", lambda path: (once if Path(path).parent == packaged else read)(path))
        yield


@pytest.fixture(autouse=True)
def reference_computes() -> Iterator[None]:
    """Let `backward` use the reference unless a test names an engine: most tests call it once or twice."""
    with engines.use("eager"):
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    started = Browser(program)
    yield started
    started.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """The one browser of all tests, with no error and no request noted yet."""
    chromium.errors.clear()
    chromium.requests.clear()
    return chromium
