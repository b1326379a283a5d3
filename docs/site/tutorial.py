"""Tutorials: Python scripts in cells (`# %%`, and `# %% [markdown]` for text), executed and turned into pages.

A cell's output stands under it. A script asserts its own numbers, so a page is built only if they hold. Run as
`python -m docs.site.tutorial FILE ...` it executes scripts and prints how long each took.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

WIDTH = 80
BOX = re.compile("[\u2500-\u257f]")
CELL = re.compile(r"^# %%(?P<kind>.*)$", re.M)


def scripts(docs: Path) -> list[Path]:
    """The scripts that become pages: tutorials, and how-to pages with measurements."""
    return [*sorted((docs / "tutorials").glob("[0-9]*.py")), *sorted((docs / "howto").glob("*.py"))]


@dataclass(frozen=True)
class Cell:
    """A piece of a script; `line` is where it begins."""

    text: str
    markdown: bool
    line: int


@dataclass(frozen=True)
class Page:
    """A tutorial as Markdown, and its figures by file name."""

    markdown: str
    figures: dict[str, bytes]
    seconds: float


def cells(source: str) -> list[Cell]:
    """The cells of a script; what stands before the first marker is not shown."""
    marks = list(CELL.finditer(source))
    ends = [m.start() for m in marks[1:]] + [len(source)]
    return [
        Cell(source[m.end() : end].strip("\n"), "[markdown]" in m["kind"], source.count("\n", 0, m.end()) + 1)
        for m, end in zip(marks, ends, strict=True)
    ]


def execute(path: Path) -> Page:
    """Run a script cell by cell in one namespace."""
    source, started = path.read_text(encoding="utf-8"), time.monotonic()
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    parts, figures = [], {}
    first = CELL.search(source)
    exec(compile(source[: first.start() if first else 0], str(path), "exec"), space)
    for cell in cells(source):
        if cell.markdown:
            parts.append(re.sub(r"^# ?", "", cell.text, flags=re.M))
            continue
        parts.append(f"```python\n{cell.text}\n```")
        printed = _run(cell, path, space)
        if printed:
            parts.append(f'```text title="Output"\n{wrapped(printed.rstrip())}\n```')
        for figure in _figures():
            name = f"{path.stem}-{len(figures)}.svg"
            figures[name] = figure
            parts.append(f"![Figure drawn by the code above]({name})")
    return Page("\n\n".join(parts) + "\n", figures, time.monotonic() - started)


def wrapped(printed: str) -> str:
    """Sentences that are wider than a page continue on lines of their own; tables stay as they are."""
    lines = []
    for line in printed.split("\n"):
        sentence = len(line) > WIDTH and not BOX.search(line)
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) if sentence else [line]
    return "\n".join(lines)


def _run(cell: Cell, path: Path, space: dict[str, Any]) -> str:
    out = io.StringIO()
    # Blank lines keep the line numbers of a traceback those of the file.
    code = compile("\n" * cell.line + cell.text, str(path), "exec")
    with contextlib.redirect_stdout(out):
        exec(code, space)
    return out.getvalue()


def _figures() -> list[bytes]:
    drawn = []
    for number in plt.get_fignums():
        content = io.BytesIO()
        plt.figure(number).savefig(content, format="svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(number)
        drawn.append(content.getvalue())
    return drawn


def main() -> None:
    for name in sys.argv[1:]:
        page = execute(Path(name))
        print(f"{name}: {page.seconds:.1f} s, {len(page.figures)} figures")


if __name__ == "__main__":
    main()
