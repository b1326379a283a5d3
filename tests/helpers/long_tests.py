"""A pytest plugin: a test that takes long names itself on standard error, with its time and how many tests are done.

With several workers the controlling process speaks for all of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

DEFAULT = "30"
"""Seconds of silence per test, and between two lines about the same test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("long_test_seconds", "seconds after which a running test names itself", default=DEFAULT)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LongTests(float(config.getini("long_test_seconds"))), "long-tests")


class LongTests:
    """Watch the tests that have started and not ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.done = seconds, 0
        self.running: dict[str, tuple[float, float]] = {}  # by name: when it began, when it is next spoken of
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.error = os.dup(2)  # not yet captured here; while a test runs it may be

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        thread = threading.Thread(target=self.watch, daemon=True)
        thread.start()
        try:
            return (yield)
        finally:
            self.over.set()
            thread.join()
            os.close(self.error)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        now = time.monotonic()
        with self.lock:
            self.running[nodeid] = now, now + self.seconds

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        with self.lock:
            self.running.pop(nodeid, None)
            self.done += 1

    def watch(self) -> None:
        while not self.over.wait(min(1.0, self.seconds / 4)):
            now = time.monotonic()
            with self.lock:
                late = [(name, begun) for name, (begun, due) in self.running.items() if now >= due]
                self.running.update({name: (begun, now + self.seconds) for name, begun in late})
            for name, begun in late:
                line = f"\nstill running after {now - begun:.0f} s: {name} ({self.done} tests done)\n"
                os.write(self.error, line.encode())
