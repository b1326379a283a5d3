"""Tutorials: Python scripts in cells (`# %%`, and `# %% [markdown]` for text), executed into pages and notebooks.

A cell's output stands under it. A script asserts its own numbers, so a page is built only if they hold.

    python -m docs.site.tutorial [FILE ...]

executes scripts, all if none is named, writes their notebooks to docs/notebooks and prints how long each took.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
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
import torch
from matplotlib.figure import Figure

WIDTH = 88
BOX = re.compile("[\u2500-\u257f]")
FOLDED = """<details markdown="1"><summary>{}</summary>

{}

</details>"""
MOST_LINES = 20
"""Of an output that is shown unfolded."""
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
class Done:
    """A cell that was executed, with what it printed and drew, as SVG and PNG."""

    text: str
    markdown: bool
    printed: str = ""
    figures: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Page:
    """A tutorial that was executed."""

    stem: str
    cells: tuple[Done, ...]
    seconds: float

    @property
    def figures(self) -> dict[str, bytes]:
        """The figures as SVG, by file name."""
        drawn = [svg for cell in self.cells for svg, _ in cell.figures]
        return {f"{self.stem}-{n}.svg": svg for n, svg in enumerate(drawn)}

    @property
    def markdown(self) -> str:
        parts, names = [], iter(self.figures)
        for cell in self.cells:
            code = f"```python\n{cell.text}\n```"
            if not cell.markdown and _only_checks(cell.text):
                code = FOLDED.format("Checked when this page was built", code)
            parts.append(cell.text if cell.markdown else code)
            if cell.printed:
                parts.append(_output(wrapped(cell.printed.rstrip())))
            parts += [f"![Figure drawn by the code above]({next(names)})" for _ in cell.figures]
        return "\n\n".join(parts) + "\n"

    @property
    def notebook(self) -> str:
        """The same as a notebook (nbformat 4.5), with its outputs."""
        made = [_notebook_cell(n, cell) for n, cell in enumerate(self.cells)]
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _notebook_cell(number: int, cell: Done) -> dict[str, Any]:
    whole = {"id": f"cell-{number}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
    if cell.markdown:
        return {"cell_type": "markdown", **whole}
    printed = {"output_type": "stream", "name": "stdout", "text": cell.printed.splitlines(keepends=True)}
    outputs: list[dict[str, Any]] = [printed] if cell.printed else []
    for _, png in cell.figures:
        data = {"image/png": base64.b64encode(png).decode("ascii")}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return {"cell_type": "code", "execution_count": None, "outputs": outputs, **whole}


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
    torch.set_default_dtype(torch.float32)  # as in a fresh process, whatever the script before this one set
    source, started = path.read_text(encoding="utf-8"), time.monotonic()
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    done = []
    first = CELL.search(source)
    exec(compile(source[: first.start() if first else 0], str(path), "exec"), space)
    for cell in cells(source):
        if cell.markdown:
            done.append(Done(re.sub(r"^# ?", "", cell.text, flags=re.M), markdown=True))
        else:
            printed, value = _run(cell, path, space)
            done.append(Done(cell.text, False, printed, tuple(_figures(value))))
    return Page(path.stem, tuple(done), time.monotonic() - started)


def _output(text: str) -> str:
    """What a cell printed; folded where it would fill the screen."""
    lines = text.count("\n") + 1
    if lines <= MOST_LINES:
        return f'```text title="Output"\n{text}\n```'
    return FOLDED.format(f"Output, {lines} lines", f"```text\n{text}\n```")


def _only_checks(code: str) -> bool:
    """Whether a cell does nothing but assert: a reader may pass over it."""
    return all(isinstance(part, ast.Assert) for part in ast.parse(code).body)


def wrapped(printed: str) -> str:
    """Sentences that are wider than a page continue on lines of their own; tables stay as they are."""
    lines = []
    for line in printed.split("\n"):
        sentence = len(line) > WIDTH and not BOX.search(line)
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) if sentence else [line]
    return "\n".join(lines)


def _run(cell: Cell, path: Path, space: dict[str, Any]) -> tuple[str, Any]:
    """What a cell printed, and the value that it ends with."""
    out, value = io.StringIO(), None
    # Blank lines keep the line numbers of a traceback those of the file.
    tree = ast.parse("\n" * cell.line + cell.text, str(path))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, str(path), "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), space)
    return out.getvalue(), value


def _figures(value: object) -> list[tuple[bytes, bytes]]:
    """As SVG and PNG: those of pyplot, and one that a cell ends with."""
    drawn = [plt.figure(number) for number in plt.get_fignums()]
    if isinstance(value, Figure) and value not in drawn:
        drawn.append(value)
    made = [tuple(_saved(figure, form) for form in ("svg", "png")) for figure in drawn]
    plt.close("all")
    return [(svg, png) for svg, png in made]


def _saved(figure: Figure, form: str) -> bytes:
    content = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    figure.savefig(content, format=form, bbox_inches="tight", metadata=metadata, dpi=80)
    return content.getvalue()


def main() -> None:
    docs = Path(__file__).resolve().parents[1]
    (docs / "notebooks").mkdir(exist_ok=True)
    for path in [Path(name) for name in sys.argv[1:]] or scripts(docs):
        page = execute(path)
        (docs / "notebooks" / f"{path.stem}.ipynb").write_text(page.notebook, encoding="utf-8")
        print(f"{path}: {page.seconds:.1f} s, {len(page.figures)} figures")


if __name__ == "__main__":
    main()
