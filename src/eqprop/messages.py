"""Error messages for unknown names: the name, the valid ones, the nearest match."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, got: str, known: Iterable[str], other: str = "") -> str:
    """`Unknown experiment 'P-1'; expected one of ... Did you mean 'P-1h'?`; `other` is appended to the known names."""
    names = list(known)
    listing = ", ".join([*names, other] if other else names)
    return f"Unknown {what} {got!r}; expected one of {listing}.{did_you_mean(got, names)}"


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A sentence suggesting the nearest known name; empty if none is near."""
    folded = {name.lower(): name for name in known}
    near = get_close_matches(got.lower(), folded, n=1, cutoff=0.4)
    return f" Did you mean {folded[near[0]]!r}?" if near else ""
