"""The fuzz campaigns: a short form always, the long form with -m slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from campaigns import fuzz


def campaign(out: Path, *words: object) -> dict[str, Any]:
    """In a process of its own, which forks: here other tests have started threads."""
    line = [sys.executable, fuzz.__file__, *map(str, words), "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())
    return found  # type: ignore[no-any-return]


def test_a_few_cases_of_every_kind(tmp_path: Path) -> None:
    found = campaign(tmp_path / "out.json", "--mixed", 9, "--seed", 1)
    assert found["cases"] == 9
    assert {"0", "2"} <= found["exit_codes"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), list(zip(fuzz.KINDS, (5000, 2000, 2000), strict=True)))
def test_thousands_of_cases(tmp_path: Path, kind: str, count: int) -> None:
    found = campaign(tmp_path / "out.json", f"--{kind}", count, "--seed", 2, "--seconds", 7200)
    assert found["cases"] == count


def test_the_judge_finds_what_must_not_be() -> None:
    assert fuzz.judge(0, "", "", []) == (None, "")
    assert fuzz.judge(2, "eqprop: T is 0; expected an integer.", "", []) == (None, "")
    assert fuzz.judge(None, "", "Traceback ...", [])[0] == "traceback"
    assert fuzz.judge(0, "", "", ["/etc/passwd"])[0] == "outside"
    assert fuzz.judge(2, "eqprop: 'NoneType' object is not subscriptable", "", [])[0] == "raw message"
    assert fuzz.judge(2, "", "", [])[0] == "silent"
    assert fuzz.judge(-11, "", "", [])[0] == "exit code"
