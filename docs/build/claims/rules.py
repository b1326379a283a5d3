"""Rows and rules: what the paper says, which numbers of ours stand against it, and the verdict they give.

A row is data, in a TOML file beside this one. `read` names the numbers, `rule` is an expression over them, and `cases`
are the conditions under which the rule is asked again. Rules are committed before the numbers that they judge.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import pairwise
from math import isnan
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import msgspec

from docs.build.claims.sources import selected
from docs.build.text import number, span

FOLDER = Path(__file__).parent
HOLDS, UNDER, NOT, UNMEASURED, WORDS = (
    *("holds", "holds under", "not reproduced", "not measured yet", "not quantitative"),
)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A labelled item of the paper, or something that it says.

    says        the paper's words or number, in a few words of ours
    place       where it stands, as printed: "(9)", "Section 4.3", "Figure 3"
    label       the paper's LaTeX label
    anchor      a few of the paper's words by which the sentence is found
    symbol      of an equation
    code        names in eqprop
    show        a command that shows it
    makes       the file or picture that the command makes
    read        the numbers, by name: `from` a source, `at` a path in its documents, other fields to select them
    cases       conditions by name, each with fields that go into every `read`, or under a name into that one
    rule        an expression over the numbers; without one the row is not quantitative
    why         why the rule is what it is
    ours        what to show of the numbers: text with expressions in braces
    note        what else a reader should know
    settings    of a figure: the experiment behind it
    picture     of a figure: its name in `eqprop.report.paper.FIGURES`
    seen        of a figure: what agrees with the paper's caption and what differs, looked at
    check       a kind of `CHECKS`, which gives the fields from `show` to `ours` of an equation
    """

    says: str
    place: str
    label: str = ""
    anchor: str = ""
    symbol: str = ""
    code: tuple[str, ...] = ()
    show: str = ""
    makes: str = ""
    read: dict[str, dict[str, Any]] = {}
    cases: dict[str, dict[str, Any]] = {}
    rule: str = ""
    why: str = ""
    ours: str = ""
    note: str = ""
    settings: str = ""
    picture: str = ""
    seen: str = ""
    check: str = ""


EQUATIONS = "claims/equations.json"
CHECKS: dict[str, dict[str, str]] = {
    "exact": {
        "rule": "error[0] <= 1e-10",
        "why": "an identity, in float64",
        "ours": "off by {error[0]}",
    },
    "order": {
        "rule": "0.9 <= order[0] <= 1.1",
        "why": "a limit as beta goes to 0: what is missing must fall in proportion to beta",
        "ours": "the difference falls as beta to the power {order[0]}",
    },
}
"""How an equation is judged: by what `python -m benchmarks.equations` measures on small nets, kept under its label."""


class Leaf(NamedTuple):
    """A number in a document, and how to change it."""

    container: Any
    key: str | int

    @property
    def value(self) -> Any:
        return self.container[self.key]


Numbers = dict[str, list[Any]]


@cache
def rows(page: str, kind: str) -> tuple[Row, ...]:
    """The rows of a page that are a "claim", a "label" or a "figure", in the paper's order."""
    content = tomllib.loads((FOLDER / f"{page}.toml").read_text(encoding="utf-8"))
    return tuple(_checked(row) for row in msgspec.convert(content.get(kind, []), list[Row]))


def _checked(row: Row) -> Row:
    if not row.check:
        return row
    name = {"exact": "error", "order": "order"}[row.check]
    read = {name: {"from": EQUATIONS, "at": f"{row.check}.{row.label or row.place}"}}
    shown = {"show": "python -m benchmarks.equations", "makes": f"results/{EQUATIONS}"}
    return msgspec.structs.replace(row, read=read, **shown, **CHECKS[row.check])


def leaves(row: Row, case: str) -> dict[str, list[Leaf]] | None:
    """The numbers that the row reads under a case; None if some were not measured yet."""
    found: dict[str, list[Leaf]] = {}
    for name, read in row.read.items():
        fields = {**read, **_for(name, row, case)}
        source, at = fields.pop("from"), fields.pop("at")
        found[name] = []
        if (documents := selected(source, fields)) is None:
            return None
        for document in documents:
            shown = document.get("convention", {}).get("synapses_shown", "rmse")
            found[name] += _at(document, at.replace("shown", shown).split("."))
        if not found[name]:
            return None
    return found


def _for(name: str, row: Row, case: str) -> dict[str, Any]:
    """What a case puts into this read: its fields for all, and those under the name of the read."""
    fields = row.cases.get(case, {})
    return {key: value for key, value in fields.items() if key not in row.read} | fields.get(name, {})


def _at(value: Any, path: list[str]) -> Iterator[Leaf]:
    """Every place that a path leads to; * stands for any part of a name, and a number counts along a list.

    What is null or not a number counts as well: no rule holds with it.
    """
    step, *rest = path
    if isinstance(value, list):
        keys: list[Any] = list(range(len(value))) if step == "*" else [int(step)]
    else:
        keys = [key for key in value if fnmatchcase(key, step)] if set("*[") & set(step) else [step]
    for key in keys:
        if rest:
            yield from _at(value[key], rest)
        else:
            yield Leaf(value, key)


def numbers(row: Row, case: str) -> Numbers | None:
    found = leaves(row, case)
    return None if found is None else {name: [leaf.value for leaf in own] for name, own in found.items()}


def paired(a: list[float], b: list[float]) -> list[float]:
    """a - b, seed by seed."""
    return [one - other for one, other in zip(a, b, strict=True)]


def steps(values: list[float]) -> list[float]:
    """Each value over the one before."""
    return [later / before for before, later in pairwise(values)]


def rising(values: list[float]) -> bool:
    return all(step > 1.0 for step in steps(values))


def falling(values: list[float]) -> bool:
    return all(step < 1.0 for step in steps(values))


def standard_error(values: list[float]) -> float:
    return stdev(values) / len(values) ** 0.5


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, len, map, max, min, round, set, sorted, str, sum, zip)},
    **{f.__name__: f for f in (median, paired, steps, rising, falling, standard_error)},
    "mean": fmean,
    "deviation": stdev,
}
"""What a rule may call."""


def evaluate(expression: str, values: Numbers) -> Any:
    """An expression of a row, which is ours, over its numbers."""
    return eval(expression, {"__builtins__": {}, **FUNCTIONS, **values})


class Verdict(NamedTuple):
    """What the rule says; `under` are the cases in which it holds, if only in some."""

    word: str
    under: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.word} {'; '.join(self.under)}" if self.under else self.word


def verdict(row: Row) -> Verdict:
    if not row.rule:
        return Verdict(WORDS)
    judged = {case: judge(row, case) for case in row.cases or ("",)}
    holding = tuple(case for case, good in judged.items() if good)
    if all(good is None for good in judged.values()):
        return Verdict(UNMEASURED)
    if len(holding) == len(judged):
        return Verdict(HOLDS)
    return Verdict(UNDER, holding) if holding else Verdict(NOT)


def judge(row: Row, case: str) -> bool | None:
    """Whether the rule holds in a case; None if it was not measured yet. With a number missing or NaN it does not."""
    values = numbers(row, case)
    return None if values is None else _whole(list(values.values())) and bool(evaluate(row.rule, values))


def _whole(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_whole, value))
    return value is not None and not (isinstance(value, float) and isnan(value))


def shown(row: Row) -> str:
    """Our numbers, a case after the other."""
    if not row.ours:
        return ""
    parts = []
    for case in row.cases or ("",):
        values = numbers(row, case)
        text = "–" if values is None else re.sub(r"\{([^{}]+)\}", partial(_filled, values=values), row.ours)
        parts.append(f"{case}: {text}" if case else text)
    return "<br>".join(parts)


def _filled(expression: re.Match[str], values: Numbers) -> str:
    return _text(evaluate(expression[1], values))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return span(value) if all(isinstance(v, int | float) for v in value) else ", ".join(dict.fromkeys(value))
    return number(value) if isinstance(value, float) else str(value)
