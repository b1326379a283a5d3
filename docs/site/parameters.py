"""Parameter tables of the reference, from docstrings.

A docstring of this project describes what an object takes in lines of a name, two spaces or more, and its meaning:

    T           steps of the free phase
    beta, y     a line may describe several

Griffe, which reads the source for mkdocstrings, gets them as the section that it makes a table of. A public class or
function that takes something and has no such line fails the build.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

ROW = re.compile(r"^(?P<names>\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*) {2,}(?P<text>\S.*)$")
LATER_ROW = re.compile(ROW.pattern.replace(" {2,}", " +"))
"""Below the first row a name may be so long that one space follows it."""
SHOWN = re.compile(r"^::: (eqprop[\w.]*)$", re.M)


@dataclass(frozen=True)
class Described:
    """A docstring without its lines of names, and what those say."""

    text: str
    rows: dict[str, str]


def described(docstring: str) -> Described:
    """Split a docstring: paragraphs whose first line names something, and the rest."""
    rest, rows = [], {}
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        found = _rows(paragraph.split("\n"))
        rows |= found
        rest += [] if found else [paragraph]
    return Described("\n\n".join(rest), rows)


def _rows(lines: list[str]) -> dict[str, str]:
    """name -> meaning of a paragraph of such lines; nothing if it is another paragraph, or code."""
    found: dict[str, str] = {}
    names: list[str] = []
    if not ROW.match(lines[0]):
        return {}
    for line in lines:
        if match := LATER_ROW.match(line):
            names = [name.strip("*") for name in match["names"].split(", ")]
            found |= dict.fromkeys(names, match["text"])
        elif line.startswith("    "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            return {}
    return found


class Parameters(griffe.Extension):
    """Hand the lines of names to Griffe in the form that it reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None or not (obj.is_class or obj.is_function):
            return
        found = described(obj.docstring.value)
        if not found.rows:
            return
        taken = _names(obj)
        sections = {"Args": [], "Attributes": []}  # type: dict[str, list[str]]
        for name, text in found.rows.items():
            sections["Args" if obj.is_function or name in taken else "Attributes"].append(f"    {name}: {text}")
        blocks = [f"{head}:\n" + "\n".join(rows) for head, rows in sections.items() if rows]
        obj.docstring.value = "\n\n".join([found.text, *blocks])


def _names(obj: griffe.Object) -> set[str]:
    """What a class is made with: the arguments of __init__, or the fields of a dataclass."""
    if not isinstance(obj, griffe.Class):
        return set()
    own = obj.members.get("__init__")
    return {p.name for p in own.parameters} if isinstance(own, griffe.Function) else set(obj.members)


def shown(folder: Path) -> Iterator[str]:
    """Every name that a page of the reference shows."""
    for page in sorted(folder.glob("*.md")):
        yield from SHOWN.findall(page.read_text(encoding="utf-8"))


def undescribed(name: str) -> list[str]:
    """What a class or function takes and its docstring says nothing of; a class counts as a whole."""
    value = _find(name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return []
    if inspect.isclass(value) and issubclass(value, BaseException):
        return []
    taken = [p for p in _taken(value) if not p.startswith("_")]
    rows = described(value.__doc__ or "").rows
    missing = [p for p in taken if p not in rows]
    return missing if inspect.isfunction(value) or (taken and not rows) else []


def _taken(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.name not in ("self", "cls", "args", "kwargs")]


def _find(name: str) -> Any:
    """The object of a dotted name: what the package exports; where that is a function of its module's name, the module.

    Not the other way round: `eqprop.data.mnist` is a function, and a folder of files.
    """
    first, *parts = name.split(".")
    value: Any = import_module(first)
    for n, part in enumerate(parts, start=1):
        if not hasattr(value, part):
            value = import_module(".".join([first, *parts[: n - 1]]))
        value = getattr(value, part) if hasattr(value, part) else import_module(".".join([first, *parts[:n]]))
    return value
