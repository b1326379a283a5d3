"""Parts of messages: unknown names with the nearest match, values, commands to copy; numbers; expected errors."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from difflib import get_close_matches

EXPECTED_ERRORS = (ValueError, TypeError, OSError, ArithmeticError, ImportError)
"""Raised by bad input, a bad file or a diverging state; anything else is a bug and keeps its traceback."""


def unknown(what: str, got: str, known: Iterable[str], other: str = "") -> str:
    """`Unknown experiment 'P-1'; expected one of ... Did you mean 'P-1h'?`; `other` is appended to the known names."""
    names = list(known)
    listing = ", ".join([*names, other] if other else names)
    return f"Unknown {what} {shown(got)}; expected one of {listing}.{did_you_mean(got, names)}"


def command(*words: object) -> str:
    """`eqprop resume 'my run'`: a command to copy into a shell, whatever characters its words have."""
    return shlex.join(["eqprop", *map(str, words)])


def shown(value: object, most: int = 80) -> str:
    """A value in an error message, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list that is too deep
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def plain(value: float) -> str:
    """A positive number in three digits without an exponent: 1,770 or 0.0123."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:.10f}".rstrip("0").rstrip(".")


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A sentence suggesting the nearest known name; empty if none is near."""
    folded = {name.lower(): name for name in known}
    near = get_close_matches(got.lower()[:100], folded, n=1, cutoff=0.4)
    return f" Did you mean {folded[near[0]]!r}?" if near else ""
