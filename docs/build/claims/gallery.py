"""docs/figures.md: the paper's figures, drawn anew, each beside its caption, settings, command, time and verdict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from matplotlib.figure import Figure

from docs.build import table1
from docs.build.claims.rules import Row, shown, verdict
from docs.build.gdu import compared, traces
from docs.build.text import duration
from eqprop.report.paper import FIGURES, Comparison, PaperFigure

COMMAND = "eqprop reproduce figures --out figures"
PLACE = "pictures/paper"
INTRODUCTION = f"""# The figures of the paper, drawn anew

All 22 figures of the paper, drawn by one command. Each has a caption in our words and a sentence on what agrees with
the paper's figure and what differs.

```bash
{COMMAND}
```

Times are those of the comparisons with BPTT on two cores. Training takes up to ten minutes on a large GPU, hours on two
cores, so training curves are drawn from stored runs, whose machine and commit stand below each; `eqprop reproduce
table1` trains them. Settings and verdicts are explained under [the paper, claim by claim](paper.md).
"""


def pictures() -> dict[str, Callable[[], Figure]]:
    """What draws each, by its file below docs/pictures."""
    return {f"paper/{file_name(n)}": partial(_draw, figure) for n, figure in enumerate(FIGURES, start=1)}


def file_name(number: int) -> str:
    return f"fig-{number:02d}-{FIGURES[number - 1].name}"


def _draw(figure: PaperFigure) -> Figure:
    return figure.draw({name: Comparison(compared(name), traces(name)) for name in figure.needs})


def gallery(found: list[Row]) -> str:
    """The page, from the rows of the figures in their order."""
    return "\n".join([INTRODUCTION, *(_entry(number, row) for number, row in enumerate(found, start=1))])


def _entry(number: int, row: Row) -> str:
    caption = row.says[0].upper() + row.says[1:]
    lines = [f"## {row.place}", f"![{caption}]({PLACE}/{file_name(number)}.svg)", f"*{caption}.*", row.seen]
    facts = [f"Settings: {row.settings}.", f"Time: {_time(number)}.", f"File: `{row.makes}`."]
    lines.append(" ".join(facts))
    if row.rule:
        lines.append(f"**{verdict(row)}**: {shown(row)}. Rule: {row.why}.")
    return "\n\n".join(lines) + "\n"


def _time(number: int) -> str:
    figure = FIGURES[number - 1]
    if figure.needs:
        return duration(sum(compared(name)["seconds"] for name in figure.needs))
    if not figure.trained:
        return "drawing alone"
    seconds = table1.matched()[figure.trained].whole_seconds
    return f"stored; the ten trainings took {duration(seconds)} on one H200"
