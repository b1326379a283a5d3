"""The pages on the paper: docs/paper.md with what holds and what does not, docs/paper/*.md a page per section."""

from __future__ import annotations

import tomllib
from collections import Counter
from functools import cache

from docs.build import table1
from docs.build.claims.gallery import gallery
from docs.build.claims.rules import FOLDER, HOLDS, NOT, UNDER, UNMEASURED, WORDS, Row, rows, shown, verdict
from docs.build.text import duration, table

SECTIONS = {
    "introduction": "Abstract and introduction",
    "background": "Section 2: background",
    "discrete-time": "Section 3: EP in discrete time",
    "experiments": "Section 4: experiments",
    "discussion": "Section 5: discussion",
    "proof": "Appendix A: proof of the theorem",
    "notations": "Appendix B: losses, primitive function, index",
    "gdu": "Appendix C: the GDU experiments",
    "convolutional": "Appendix D: the convolutional net",
    "training": "Appendix E: training",
}
"""The pages in the paper's order."""
KINDS = ("claim", "figure", "label")
HEADINGS = {"claim": "What it says", "figure": "Figures", "label": "Equations, theorems, tables, sections"}
VERDICTS = (HOLDS, UNDER, NOT, UNMEASURED, WORDS)
TITLE = "# The paper, claim by claim"
INTRODUCTION = """
Read *Updates of Equilibrium Prop Match Gradients of Backprop Through Time in an RNN with Static Input* (Ernoult et al.,
NeurIPS 2019, [arXiv:1905.13633](https://arxiv.org/abs/1905.13633)) beside this page: every labelled item and every
sentence that says what was found has a row, with the command that shows it, our number and a verdict.
[Table 1](table1.md) and the [figures](figures.md) have pages of their own; symbols and conventions are under
[notation](notation.md).

A verdict is computed from `results/` by the rule beside it. Rules were written before the numbers that they judge,
except where the numbers are older than this page.

- **holds**: under every condition listed.
- **holds under** ...: only under those: a preset, a precision or a net.
- **not reproduced**: under none.
- **not measured yet**: there is a command, and no result.
- **not quantitative**: nothing to compute, such as a heading.

Presets: `paper` as printed, `authors` as their code runs, `tuned` with the fewest changes that reproduce the number.
"""


@cache
def seconds() -> dict[str, float]:
    """How long the commands take."""
    return tomllib.loads((FOLDER / "commands.toml").read_text(encoding="utf-8"))


def takes(command: str) -> str:
    """How long a command takes; that of Table 1 as its stored trainings did."""
    if not command.startswith(TABLE_1):
        return duration(seconds()[command])
    words = command.split()
    given = dict(zip(words[3::2], words[4::2], strict=True))
    estimators = given.get("--estimator", "ep,bptt").split(",")
    own = [r for r in table1.rows() if r.own_schedule and r.experiment.preset == given.get("--preset", "paper")]
    asked = [r for r in own if r.experiment.name in given.get("--rows", r.experiment.name).split(",")]
    spent = sum(r.whole_seconds if len(estimators) == 2 else r.seconds(estimators[0]) for r in asked)
    return f"{duration(spent)} on one H200"


TABLE_1 = "eqprop reproduce table1"


def every(page: str) -> list[Row]:
    return [row for kind in KINDS for row in rows(page, kind)]


def overview() -> str:
    """docs/paper.md."""
    lines, together = [], Counter[str]()
    for page, title in SECTIONS.items():
        found = Counter(verdict(row).word for row in every(page))
        together += found
        lines.append([f"[{title}](paper/{page}.md)", *(found[word] or "" for word in VERDICTS)])
    lines.append(["together", *(together[word] for word in VERDICTS)])
    failed = [(page, row) for page in SECTIONS for row in every(page) if verdict(row).word == NOT]
    missed = [[_place(row), f"[{_says(row)}](paper/{page}.md)", shown(row)] for page, row in failed]
    parts = [TITLE, INTRODUCTION.strip(), table(["", *VERDICTS], lines), "## What is not reproduced"]
    return "\n\n".join([*parts, table(["where", "the paper", "ours"], missed, words=3)]) + "\n"


def section(page: str) -> str:
    """docs/paper/PAGE.md."""
    parts = [f"# {SECTIONS[page]}", "[How to read the verdicts](../paper.md)."]
    for kind in KINDS:
        if found := rows(page, kind):
            heads = ["where", "the paper", "see it", "ours", "verdict"]
            parts += [f"## {HEADINGS[kind]}", table(heads, [_cells(row) for row in found], words=5)]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    return [_place(row), _says(row), _see(row), shown(row), _judged(row)]


def _place(row: Row) -> str:
    return row.place + (f"<br>`{row.label}`" if row.label else "")


def _says(row: Row) -> str:
    return ": ".join(part for part in (row.says, row.symbol) if part)


def _see(row: Row) -> str:
    """The command with its time, what it makes, and the names in the code."""
    parts = [f"`{row.show}` ({takes(row.show)})"] if row.show else []
    parts += [f"→ `{row.makes}`"] if row.makes else []
    return "<br>".join([*parts, *(f"`{name}`" for name in row.code)])


def _judged(row: Row) -> str:
    parts = [f"**{verdict(row)}**" if row.rule else str(verdict(row))]
    parts += [f"Rule: {row.why}: `{row.rule}`."] if row.rule else []
    return "<br>".join([*parts, *([row.note] if row.note else [])])


def pages() -> dict[str, str]:
    """Every page by its path from the root of the repository."""
    figures = [row for page in SECTIONS for row in rows(page, "figure")]
    sections = {f"docs/paper/{page}.md": section(page) for page in SECTIONS}
    return {"docs/paper.md": overview(), "docs/figures.md": gallery(figures), **sections}
