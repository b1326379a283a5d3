"""Results as papers print them, and the rule by which a result reproduces one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eqprop.messages import shown

WITHIN = 2.0
"""A result reproduces one if it is at most this many of the paper's standard deviations from the paper's mean."""
ROUNDING = 1e-9
"""So that the ends of the interval, which are printed in hundredths, belong to it."""
USUAL_STD = 0.1
"""Assumed deviation of a published error without one; the paper's own rows have 0.04 to 0.21."""

_NUMBER = r"(\d+(?:\.\d+)?)"
_PRINTED = re.compile(rf"(~?)\s*{_NUMBER}(?:\s*±\s*{_NUMBER})?(?:\s*\(~?{_NUMBER}\))?")


@dataclass(frozen=True)
class PaperResult:
    """Errors in percent as printed in the paper, over five trials  [table-results].

    None for a deviation or a train error that is not published; `about` where the paper prints "~" before them.
    """

    test: float
    test_std: float | None = None
    train: float | None = None
    about: bool = False

    @classmethod
    def parse(cls, text: str) -> PaperResult:
        """ "2.00 ± 0.13 (0.20)": test error, deviation, train error; the first alone is enough. "~2.2 (~0)": about."""
        found = _PRINTED.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"A published result is {shown(text)}; expected percent such as 2.00 ± 0.13 (0.20).")
        test, std, train = (None if n is None else float(n) for n in found.groups()[1:])
        assert test is not None, "the pattern has a first number"
        return cls(test, std, train, bool(found.group(1)))

    def __str__(self) -> str:
        if self.about:
            return f"~{self.test:g}" + ("" if self.train is None else f" (~{self.train:g})")
        spread = "" if self.test_std is None else f" ± {self.test_std:.2f}"
        return f"{self.test:.2f}{spread}" + ("" if self.train is None else f" ({self.train:.2f})")


def reproduces(test_error: float, paper: PaperResult) -> bool:
    """Whether a mean test error in percent is at most two of the paper's deviations from its mean, on either side."""
    deviation = USUAL_STD if paper.test_std is None else paper.test_std
    return abs(test_error - paper.test) <= WITHIN * deviation + ROUNDING
