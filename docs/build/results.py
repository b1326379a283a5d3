"""The one loader of results/.

A file holds one document or a list of documents. What was measured is in the fields of a document, never in the name
of its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
TRACES = "traces.json"

Document = dict[str, Any]


@cache
def documents(path: str, root: Path = RESULTS) -> list[Document]:
    """Every document of a file or of a folder and those below it, except traces."""
    place = root / path
    files = sorted(p for p in place.rglob("*.json") if p.name != TRACES) if place.is_dir() else [place]
    found: list[Document] = []
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        found += content if isinstance(content, list) else [content]
    return found


def flat(experiment: Mapping[str, Any]) -> Document:
    """A spec as JSON with the settings of its sections by their own names."""
    sections = (experiment["model"], experiment["phases"], experiment["optimizer"])
    return {**experiment, **{name: value for section in sections for name, value in section.items()}}


def pick(path: str, **fields: Any) -> list[Document]:
    """The documents with these fields; a field that a document lacks counts as None."""
    return [d for d in documents(path) if all(d.get(name) == value for name, value in fields.items())]


def only(path: str, **fields: Any) -> Document:
    """The one document with these fields."""
    found = pick(path, **fields)
    if len(found) != 1:
        raise LookupError(f"results/{path} has {len(found)} documents with {fields}; expected one.")
    return found[0]
