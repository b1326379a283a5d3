"""The pages on the paper have a row for everything in it, and every verdict is what its rule makes of results/."""

from __future__ import annotations

import math
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import ROOT, run_here

from docs.build.claims.gallery import COMMAND, PLACE, file_name
from docs.build.claims.pages import KINDS, SECTIONS, every, pages, seconds
from docs.build.claims.rules import Leaf, Row, judge, leaves, rows, verdict
from docs.build.results import documents
from eqprop.report.paper import FIGURES

PAPER = Path(os.environ.get("EQPROP_PAPER", ROOT.parent / "shared" / "paper"))
QUICK, LONG = 5.0, 600.0
"""Seconds up to which a command of the pages runs in the suite, and from which it is left to whoever wants it."""

ALL = [
    pytest.param(row, id=f"{page}-{kind}-{n}")
    for page in SECTIONS
    for kind in KINDS
    for n, row in enumerate(rows(page, kind))
]
JUDGED = [one for one in ALL if one.values[0].rule]


@cache
def text() -> str:
    """The LaTeX of the paper on one line; the test is skipped where it is not at hand."""
    files = sorted(PAPER.glob("*.txt")) if PAPER.is_dir() else []
    if not files:
        pytest.skip(f"The paper is not in {PAPER}; give the folder of its LaTeX text in EQPROP_PAPER.")
    return " ".join(" ".join(path.read_text(encoding="utf-8") for path in files).split())


def labels() -> list[str]:
    return [row.label for page in SECTIONS for row in every(page) if row.label]


def of_kind(kind: str) -> list[Row]:
    return [row for page in SECTIONS for row in rows(page, kind)]


def test_there_is_a_row_for_every_label_figure_and_table() -> None:
    assert len(labels()) == len(set(labels())) == 92
    assert [row.place for row in of_kind("figure")] == [f"Figure {n}" for n in range(1, 23)]
    assert [row.place for row in of_kind("label") if row.place.startswith("Table")] == ["Table 1", "Table 2", "Table 3"]


def test_the_labels_are_those_of_the_paper() -> None:
    assert sorted(labels()) == sorted(re.findall(r"\\label\{([^}]+)\}", text()))
    assert len(of_kind("figure")) == text().count(r"\begin{figure}")
    assert text().count(r"\begin{table}") == 3


def test_every_figure_is_drawn_and_has_its_sentence() -> None:
    found, gallery = of_kind("figure"), pages()["docs/figures.md"]
    assert [row.picture for row in found] == [figure.name for figure in FIGURES]
    for number, row in enumerate(found, start=1):
        assert row.makes == f"figures/figures/{file_name(number)}.png"
        assert (ROOT / "docs" / PLACE / f"{file_name(number)}.svg").is_file()
        assert row.seen.endswith(".")
        assert row.settings
        assert row.show == COMMAND
        assert f"({PLACE}/{file_name(number)}.svg)" in gallery
    made = {row.makes for page in SECTIONS for row in every(page) if row.makes.startswith("figures/figures/fig")}
    assert made <= {row.makes for row in found}


ABOUT = (
    r"\sim 1\%",
    r"\sim 10^{-2}",
    r"\sim 10^{-1}",
    r"\sim 2.2",
    r"~0.90\%",
    r"~10^{-1}",
    r"\sim 0",
    r"three to five",
)
"""Every quantity that the text gives as "about", apart from those of distributions."""


def test_every_quantity_of_the_text_has_a_row() -> None:
    found = re.findall(r"(?:\\sim|\$~)\s*[\d\\][^$]{0,9}", text())
    assert {q for q in found if not any(known.lstrip("~") in q or q.strip("$") in known for known in ABOUT)} == {
        r"\sim 1 \%"
    }, "only another spelling of 1 %"


def test_the_pages_show_every_row() -> None:
    made = pages()
    for page in SECTIONS:
        shown = made[f"docs/paper/{page}.md"]
        for row in every(page):
            assert row.says in shown
            assert row.place in shown
            assert str(verdict(row)) in shown


Change = Callable[[Any], Any]
NUMBERS: tuple[Change, ...] = (
    *(lambda v: v * 10, lambda v: v / 10, lambda v: v * 1e4, lambda v: v / 1e4, lambda v: 0 * v, lambda v: -v),
    *(lambda v: v + 1, lambda v: v + 100, lambda v: 0 * v + 1),
)


def changed(value: Any, change: Change) -> Any:
    """The value after a change: numbers by the change itself, lists element by element, words and truths reversed."""
    if isinstance(value, list):
        return [changed(v, change) for v in value]
    if isinstance(value, bool):
        return not value
    return f"not {value}" if isinstance(value, str) else change(value)


def changes(rule: str, found: dict[str, list[Leaf]]) -> Iterator[list[tuple[Leaf, Any]]]:
    """Changes of one number, of all of one name, of all; of processes; into a number of the rule; by another name."""
    for name, own in found.items():
        for change in NUMBERS:
            yield from ([(leaf, changed(leaf.value, change))] for leaf in own)
            yield [(leaf, changed(leaf.value, change)) for leaf in own]
        if all(isinstance(leaf.value, list) for leaf in own):
            yield [(leaf, [v * 0.1**t for t, v in enumerate(leaf.value)]) for leaf in own]
            yield [(leaf, leaf.value[::-1]) for leaf in own]
        stated = re.findall(r"(?<![\w.])\d+(?:\.\d+)?", rule)
        yield from ([(leaf, changed(leaf.value, lambda _, n=n: float(n))) for leaf in own] for n in stated)
        for other, theirs in found.items():
            if other == name:
                continue
            yield [(leaf, theirs[0].value) for leaf in own]
            if len(theirs) == len(own):
                both = list(zip(own, theirs, strict=True))
                yield from (
                    [(a, b.value) for n, (a, b) in enumerate(both) if n != without] for without in range(-1, len(own))
                )
                yield from ([(a, changed(b.value, lambda v, n=n: float(n) * v)) for a, b in both] for n in stated)
    for change in NUMBERS:
        yield [(leaf, changed(leaf.value, change)) for own in found.values() for leaf in own]


def judged_with(row: Row, case: str, change: list[tuple[Leaf, Any]]) -> bool | None:
    """What the rule says of changed results; None where it cannot be evaluated."""
    kept = [(leaf, leaf.value) for leaf, _ in change]
    for leaf, value in change:
        leaf.container[leaf.key] = value
    try:
        return judge(row, case)
    except (ArithmeticError, ValueError):
        return None
    finally:
        for leaf, value in kept:
            leaf.container[leaf.key] = value


def measured(row: Row) -> dict[str, dict[str, list[Leaf]]]:
    """The numbers behind a row, by case."""
    return {case: found for case in row.cases or ("",) if (found := leaves(row, case)) is not None}


@pytest.mark.parametrize("row", JUDGED)
def test_a_change_of_the_result_flips_the_verdict_of_each_case(row: Row) -> None:
    found = measured(row)
    assert found or row.show, "what is not measured yet has a command"
    for case, numbers in found.items():
        turned = not judge(row, case)
        assert any(judged_with(row, case, change) is turned for change in changes(row.rule, numbers)), case


LOST = (None, math.nan)


@pytest.mark.parametrize("row", JUDGED)
def test_no_rule_holds_with_a_number_missing(row: Row) -> None:
    for case, numbers in measured(row).items():
        for leaf in (leaf for own in numbers.values() for leaf in (own[0], own[-1])):
            for value in LOST:
                lost = [value] * len(leaf.value) if isinstance(leaf.value, list) else value
                assert not judged_with(row, case, [(leaf, lost)]), (case, leaf.value)


def test_no_row_of_table_1_holds_with_four_trials() -> None:
    every_trial = [found["trials"] for d in documents("table1") for found in d["estimators"].values()]
    dropped = [trials.pop() for trials in every_trial]
    try:
        holding = [
            (row.says, case)
            for row in (one.values[0] for one in JUDGED)
            for case in row.cases or ("",)
            if any("trials" in read["at"] for read in row.read.values()) and judge(row, case)
        ]
    finally:
        for trials, last in zip(every_trial, dropped, strict=True):
            trials.append(last)
    assert holding == []


@pytest.mark.parametrize("row", JUDGED)
def test_a_rule_has_its_reason_its_command_and_its_number(row: Row) -> None:
    assert row.why
    assert row.show
    assert row.ours


def commands(quick: bool) -> list[str]:
    shown = {row.show for page in SECTIONS for row in every(page) if row.show}
    return sorted(command for command in shown if (seconds().get(command, 1e9) <= QUICK) == quick)


def module(command: str) -> list[str]:
    """The module that a command runs, and its words."""
    words = shlex.split(command)
    return words[2:] if words[0] == "python" else words


@pytest.mark.parametrize("command", commands(quick=True))
def test_a_quick_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where torch is imported already."""
    name, *words = module(command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *words])
    code = None
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=False)
    except SystemExit as end:
        code = end.code
    assert not code


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands(quick=False) if seconds().get(c, LONG) < LONG])
def test_a_long_command_runs(command: str, tmp_path: Path) -> None:
    run_here(tmp_path, sys.executable, "-m", *module(command))
