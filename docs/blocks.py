"""The blocks of a page that a script makes: what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.

The text around them is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from eqprop.files import write_text

Makers = Mapping[str, Callable[[], str]]
"""Name of a block -> what makes its content."""

MARKER = re.compile(r"<!-- (begin|end) ([^\n]*?) -->")


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
    for name in names:
        if name not in makers:
            raise ValueError(f"The page has a block {name!r} that nothing fills; expected {', '.join(makers)}.")
    for name in makers:
        if name not in names:
            raise ValueError(f"The page has no block {name!r}; expected <!-- begin {name} --> and <!-- end {name} -->.")
        if names.count(name) > 1:
            raise ValueError(f"The page has {names.count(name)} blocks {name!r}; expected one.")
    if markers != [(word, name) for name in names for word in ("begin", "end")]:
        got = ", ".join(" ".join(marker) for marker in markers)
        raise ValueError(f"The markers of the page are {got}; expected each begin before its own end.")


def write_or_check(path: Path, makers: Makers, check: bool) -> None:
    """Fill the page; to check is to change nothing, and to exit with 1 where filling would."""
    before = path.read_text(encoding="utf-8")
    after = filled(before, makers)
    if not check:
        write_text(path, after)
    elif after != before:
        sys.exit(f"{path.name} is not current: run its script in docs/ without --check.")
    else:
        print(f"{path.name} is current.")
