"""Messages about names nobody knows: the nearest known one, and all of them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, got: str, known: Iterable[str]) -> str:
    """`Unknown record 'P-1': expected one of ... Did you mean 'P-1h'?`"""
    names = list(known)
    folded = {name.lower(): name for name in names}
    near = get_close_matches(got.lower(), folded, n=1, cutoff=0.4)
    hint = f" Did you mean {folded[near[0]]!r}?" if near else ""
    return f"Unknown {what} {got!r}; expected one of {', '.join(names)}.{hint}"
