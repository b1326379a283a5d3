"""The fuzz campaigns: a short form always, the long form with -m slow."""

from __future__ import annotations

import pytest
from campaigns.fuzz import KINDS, MIXED, Case, Outcome, judge, named_by, run, within


def faults(outcome: Outcome) -> str:
    return "\n".join(f"{f.kind} {f.number}: {f.what}: {f.words}\n{f.detail}" for f in outcome.faults[:5])


def test_a_few_cases_of_every_kind() -> None:
    found = run({MIXED: 15}, seed=1, seconds=120.0, fresh=False)[MIXED]
    assert not found.faults, faults(found)
    assert found.cases == 15
    assert {"0", "2"} <= set(found.codes)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), list(zip(KINDS, (5000, 2000, 2000), strict=True)))
def test_thousands_of_cases(kind: str, count: int) -> None:
    found = run({kind: count}, seed=2, seconds=7200.0)[kind]
    assert not found.faults, faults(found)
    assert found.cases == count


def test_the_judge_finds_what_must_not_be() -> None:
    assert judge(0, "", "", []) == (None, "")
    assert judge(2, "eqprop: T is 0; expected an integer.", "", []) == (None, "")
    assert judge(None, "", "Traceback ...", [])[0] == "traceback"
    assert judge(0, "", "", ["/etc/passwd"])[0] == "outside"
    assert judge(2, "eqprop: 'NoneType' object is not subscriptable", "", [])[0] == "raw message"
    assert judge(2, "", "", [])[0] == "silent"
    assert judge(-11, "", "", [])[0] == "exit code"


def test_what_the_words_allow_to_be_written() -> None:
    assert named_by(["train", "x.toml", "--out", "a", "--json=b", "--data", "c"]) == ["a", "b"]
    assert named_by(["resume", "run", "-q"]) == ["run"]
    assert named_by(["evaluate", "run"]) == []
    assert within("/a/b/c", ["/a/b"])
    assert not within("/a/bc", ["/a/b"])
    assert Case(["list"]).may_write == []
