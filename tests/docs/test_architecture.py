"""The map of the source follows the source: every name and file on it exists."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CODE = re.findall(r"`([^`]+)`", PAGE)
NAMES = [name for name in CODE if re.fullmatch(r"eqprop(\.\w+)+", name)]
FILES = [name for name in CODE if re.fullmatch(r"[\w/]+(\.\w+)?", name) and "/" in name]
ENTRIES = re.findall(r"`(\w+)` in `([\w/]+\.py)`", PAGE)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name: str) -> None:
    resolve_name(name)


@pytest.mark.parametrize("name", FILES)
def test_every_file_exists(name: str) -> None:
    assert (ROOT / "src" / "eqprop" / name).exists() or (ROOT / name).exists()


@pytest.mark.parametrize(("name", "file"), ENTRIES)
def test_every_table_stands_where_the_map_says(name: str, file: str) -> None:
    assert re.search(rf"^{name}\b", (ROOT / "src" / "eqprop" / file).read_text(), re.MULTILINE)


def test_the_map_names_every_folder_of_the_package() -> None:
    folders = {f.name for f in (ROOT / "src" / "eqprop").iterdir() if f.is_dir() and (f / "__init__.py").exists()}
    assert folders == {name.rstrip("/") for name in FILES if name.rstrip("/") in folders}
    assert len(NAMES) > 10
    assert len(ENTRIES) > 5
