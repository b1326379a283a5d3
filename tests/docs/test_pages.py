"""Pages say what results/ says; their links lead somewhere, their code runs, their commands exist."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.pages import PAGES, ROOT, code_blocks, run_block

from docs.build.__main__ import BLOCKS, PICTURES, makers, read_text, stale, svg
from docs.build.text import filled
from eqprop import papers
from eqprop.cli import load_commands

A, B = "<!-- begin a -->\nold\n<!-- end a -->", "<!-- begin b c -->\n<!-- end b c -->"
MAKERS = {"a": lambda: r"new \1", "b c": lambda: "two\nlines"}
MADE_BY_THE_SITE = ("play/index.html", "zoo.md", "settles.svg")
"""What is only there once the site is built; some pages are made from the Python file of their name."""
GLOSSARY = (
    *("GDU", "EB", "P", "preset", "settled", "residual", "alternating", "primitive", "process", "naive twin"),
    *("experiment", "estimator", "problem", "activity", "nudge site", "paper result"),
)


def test_pages_are_what_the_results_say() -> None:
    assert stale() == []


SPECS = [
    pytest.param(block, id=f"{page.name}{n}")
    for page in PAGES
    for n, block in enumerate(code_blocks(page, "toml"))
    if "entry-points" not in block
]


@pytest.mark.parametrize("block", SPECS)
def test_a_file_of_settings_on_a_page_is_read(block: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(block, encoding="utf-8")
    assert papers.find(path).preset == "own"


def test_a_page_that_is_not_current_is_noticed() -> None:
    page = "docs/table1.md"
    assert filled(read_text(page).replace("| P-1h | ", "| P-1h | 9"), makers(page)) == read_text(page)


def test_a_picture_is_the_same_each_time_it_is_drawn() -> None:
    first, second = (svg(PICTURES["paper/fig-14-saw-teeth"]()) for _ in range(2))
    assert first == second
    assert first.startswith("<?xml")


def test_no_text_of_a_picture_is_scaled_to_nothing() -> None:
    """Letters drawn as paths are small numbers times a scale, which has more than a digit."""
    pictures = sorted((ROOT / "docs" / "pictures").rglob("*.svg"))
    assert [p.name for p in pictures if re.search(r"scale\(-?0(?:\.0*)?[ )]", p.read_text(encoding="utf-8"))] == []
    drawn = svg(PICTURES["paper/fig-01-theorem"]())
    assert "<text" not in drawn
    scales = [float(n) for found in re.findall(r"scale\(([^)]*)\)", drawn) for n in found.split()]
    assert scales
    assert all(abs(n) > 1e-3 for n in scales)


def test_blocks_are_filled_and_the_text_is_kept() -> None:
    made = filled(f"before\n{B}\nbetween <!-- a remark -->\n{A}\nafter\n", MAKERS)
    new_a = "<!-- begin a -->\nnew \\1\n<!-- end a -->"
    new_b = "<!-- begin b c -->\ntwo\nlines\n<!-- end b c -->"
    assert made == f"before\n{new_b}\nbetween <!-- a remark -->\n{new_a}\nafter\n"
    assert filled(made, MAKERS) == made


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        (f"{A}\n{B}\n<!-- begin d -->\n<!-- end d -->", "has the blocks a, b c, d; expected a, b c, each once"),
        (A, "has the blocks a; expected a, b c"),
        (f"{A}\n{B}\n{A}", "has the blocks a, b c, a; expected a, b c, each once"),
        (f"<!-- begin a -->\n{B}", "expected each begin before its own end"),
        (f"<!-- begin a -->\n{B}\n<!-- end a -->", "expected each begin before its own end"),
        (f"{A}\n{B}\n<!-- end a -->", "expected each begin before its own end"),
    ],
)
def test_a_wrong_block_is_noticed(page: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        filled(page, MAKERS)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target or target in MADE_BY_THE_SITE:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() and file.suffix == ".md":
            file = file.with_suffix(".py")
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    folder = ROOT / "docs" / "pictures"
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert there == {f"{name}.svg" for name in PICTURES}
    assert [name for name in PICTURES if f"pictures/{name}.svg" not in text] == []


BLOCKS_OF_PYTHON = [
    pytest.param(code, id=f"{page.name} {n}")
    for page in PAGES[1:]
    for n, code in enumerate(code_blocks(page, "python"))
]


@pytest.mark.parametrize("code", BLOCKS_OF_PYTHON)
def test_python_on_a_page_runs(code: str, tmp_path: Path) -> None:
    run_block(tmp_path, code)


def commands(page: Path) -> list[list[str]]:
    """The eqprop commands of a page: those in blocks, and those in the text."""
    blocks = "\n".join(code_blocks(page, "bash")).splitlines()
    inline = re.findall(
        r"`(eqprop [^`]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    lines = [shlex.split(line, comments=True) for line in [*blocks, *inline]]
    return [words[1:] for words in lines if words[:1] == ["eqprop"] and not words[1].startswith("--")]


@cache
def all_commands() -> Any:
    return typer.main.get_command(load_commands())


def complaint(words: list[str]) -> str:
    """What is wrong with a command: one that does not exist, or an option it does not have."""
    command = all_commands()
    while hasattr(command, "commands") and words:
        name, *words = words
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    strange = [w for w in words if w.startswith("--") and w not in {*known, "--help"}]
    return f"no option {strange[0]}" if strange else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_on_a_page_exist(page: Path) -> None:
    assert [(words, wrong) for words in commands(page) if (wrong := complaint(words))] == []


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert len(commands(ROOT / "docs" / "gdu.md")) >= 8
    assert complaint(["bench", "P-1h"]) == "no command bench"
    assert complaint(["train", "P-1h", "--methods", "ep"]) == "no option --methods"
    assert complaint(["reproduce", "table1", "--out", "a"]) == ""


def test_pages_keep_to_plain_english() -> None:
    words = re.compile(r"\b(told|besides)\b|\bone a (layer|sample|network|parameter|file|class)\b")
    files = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    assert [(p.name, m[0]) for p in files for m in words.finditer(p.read_text(encoding="utf-8"))] == []


def test_the_glossary_defines_every_term() -> None:
    section = read_text("docs/notation.md").partition("## Glossary")[2].partition("\n## ")[0]
    defined = [
        term.strip() for cell in re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE) for term in cell.split(",")
    ]
    assert [term for term in GLOSSARY if term not in defined] == []


def test_the_readme_stays_short() -> None:
    assert len(read_text("README.md").splitlines()) <= 100
    assert set(BLOCKS) <= {str(page.relative_to(ROOT)) for page in PAGES}
