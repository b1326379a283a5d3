"""Markdown from values: tables, numbers, and the marked blocks of a page that they fill."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Makers = Mapping[str, Callable[[], str]]
"""Name of a block -> what makes its content."""

MARKER = re.compile(r"<!-- (begin|end) ([^\n]*?) -->")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table; the first `words` columns to the left, numbers to the right."""
    rule = ["---" if n < words else "---:" for n in range(len(headings))]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (headings, rule, *rows))


def number(value: float | None) -> str:
    """Two digits."""
    if value is None:
        return "–"
    if value == 0.0:
        return "0"
    return f"{value:.2g}" if 1e-3 <= abs(value) < 100 else f"{value:.0e}".replace("e-0", "e-")


def span(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} … {high}"


def large(value: float | None) -> str:
    """Three digits, or all of a large number."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def by_name(values: Mapping[str, float]) -> str:
    return listed(f"{name} {value:g}" for name, value in values.items())


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def commit(made: Mapping[str, Any]) -> str:
    return str(made["commit"])[:7] + ("-dirty" if str(made["commit"]).endswith("-dirty") else "")


def filled(page: str, makers: Makers) -> str:
    """The page with every block made anew."""
    _check_markers(page, makers)
    for name, make in makers.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return page


def _check_markers(page: str, makers: Makers) -> None:
    """One block for each maker, one maker for each block; no block inside another or without an end."""
    markers: list[tuple[str, str]] = MARKER.findall(page)
    names = [name for word, name in markers if word == "begin"]
    if sorted(names) != sorted(makers):
        raise ValueError(f"The page has the blocks {listed(names) or 'none'}; expected {listed(makers)}, each once.")
    if markers != [(word, name) for name in names for word in ("begin", "end")]:
        got = listed(" ".join(marker) for marker in markers)
        raise ValueError(f"The markers of the page are {got}; expected each begin before its own end.")
