"""A pytest plugin: `--record FILE` writes what became of every test that ran, and how long each function took, as JSON.

With several workers the controlling process writes.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from eqprop.provenance import provenance


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write outcomes and seconds as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config.getoption("--record")), "record")


class Record:
    """Outcomes by test function, over its parameters."""

    def __init__(self, path: Path) -> None:
        self.path, self.begun = path.resolve(), time.monotonic()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: Counter[str] = Counter()
        self.failed: list[str] = []
        self.provenance = provenance()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        self.seconds[name] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name][report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)
        self.write()

    def write(self) -> None:
        """After every test, so that a campaign that is ended leaves what it found."""
        tests = {name: {**found, "seconds": round(self.seconds[name], 1)} for name, found in self.outcomes.items()}
        content = {
            **{what: sum(found[what] for found in self.outcomes.values()) for what in ("passed", "skipped")},
            "failed": self.failed,
            "seconds": round(time.monotonic() - self.begun, 1),
            "tests": dict(sorted(tests.items())),
            "provenance": self.provenance,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n")
