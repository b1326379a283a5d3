"""The page of learning rules, docs/field.md: rows of the papers' files beside what results/field holds of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from docs.build.results import Document, documents
from docs.build.text import number, table
from eqprop import papers
from eqprop.report.field import FIELD_HEADINGS, field_cells
from eqprop.report.runs import counted_trials


def _rows() -> dict[str, Document]:
    """By name, what was trained."""
    return {d["row"]: d for d in documents("field") if "row" in d}


def _holding(key: str) -> list[Document]:
    return [d for d in documents("field") if key in d]


def rows_block() -> str:
    """Every row, trained or not."""
    found, lines = _rows(), []
    for name, row in papers.field_rows().items():
        _, *cells = field_cells(row, found)
        source = row.spec.source or "this package"
        lines.append([f"`{name}`", f"{row.about} ({source})", *cells])
    return table(["row", "what it is", *FIELD_HEADINGS[1:]], lines, words=2)


def remarks_block() -> str:
    """Rows that are not reproduced."""
    found = [f"- `{name}`: {row.remark}" for name, row in papers.field_rows().items() if row.remark]
    return "\n".join(found) or "Every trained row is as expected."


def cosines_block() -> str:
    """Per parameter, seed 0, before and after training; and how far samples were from rest."""
    lines = []
    for name, d in _rows().items():
        check = next(iter(d["checks"].values()), {})
        for when in ("before", "after"):
            if cosines := check.get(when, {}).get("cosines"):
                said = ", ".join(f"{p} {c:.4f}" for p, c in cosines.items())
                lines.append([f"`{name}`", when, said, *_at_rest(check[when])])
            elif check.get(when):
                lines.append([f"`{name}`", when, check[when].get("no_gradient", "–"), *_at_rest(check[when])])
    return table(["row", "", "cosine with the exact gradient", "residual", "unsettled", "asymmetry"], lines, words=3)


def _at_rest(found: Mapping[str, Any]) -> list[str]:
    odd = found.get("asymmetry")
    share = f"{100.0 * found['unsettled']:.0f} %"
    return [number(found["residual"]), share, "–" if odd is None else f"{odd:.2f}"]


def asymmetry_block() -> str:
    """|J - J^T| / |J| after each epoch, the mean over seeds."""
    lines, epochs = [], 0
    for name, d in _rows().items():
        each = [check["asymmetry"] for check in d["checks"].values() if check.get("asymmetry")]
        if each:
            epochs = max(epochs, len(each[0]))
            begun = fmean(check["before"]["asymmetry"] for check in d["checks"].values() if check.get("asymmetry"))
            lines.append([f"`{name}`", f"{begun:.2f}", *(f"{fmean(one[n] for one in each):.2f}" for n in each[0])])
    return table(["row", "at first", *(f"epoch {n}" for n in range(1, epochs + 1))], lines)


def rates_block() -> str:
    """Held-out errors by which rates were chosen."""
    (found,) = _holding("rates")
    rates = sorted({one["rate"] for one in found["rates"]})
    errors = {(one["rule"], one["rate"]): one["held_out_error"][-1] for one in found["rates"]}
    rules = dict.fromkeys(one["rule"] for one in found["rates"])
    lines = [[f"`{rule}`", *(_error(errors.get((rule, rate))) for rate in rates)] for rule in rules]
    return table(["held-out error, %", *(f"rate {rate:g}" for rate in rates)], lines)


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def feedback_block() -> str:
    """784-256-10 with feedback at 0, held there or trained, beside backprop."""
    lines = []
    for d in _holding("by"):
        for way, one in d["by"].items():
            if "norm_of_B" in one:
                lines.append([way, d["settings"]["seed"], *_epochs(one), _short(one["norm_of_B"])])
    return table(["feedback", "seed", "test error by epoch, %", "norm of B"], lines, words=1)


def echo_block() -> str:
    """Echoes beside backpropagation through time, from the same weights and order of the digits."""
    lines = []
    for d in _holding("by"):
        for way, one in d["by"].items():
            if "loss" in one:
                least = {when: min(found.values()) for when, found in one["cosines"].items()}
                cells = [_short(one["loss"][-1]), f"{least['before']:.5f}, {least['after']:.5f}"]
                lines.append([way, d["settings"]["seed"], *_epochs(one), *cells, f"{one['cpu_minutes']:.1f}"])
    headings = ("by", "seed", "test error by epoch, %", "loss", "least cosine before, after", "CPU minutes")
    return table(headings, lines, words=1)


def _epochs(one: Mapping[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{error:.2f}" for error in one["test_error"])


def _short(value: float) -> str:
    return f"{value:.3g}"


def cost_block() -> str:
    """CPU time of a training step beside the twin's."""
    (found,) = _holding("cost")
    lines = [
        [f"`{one['experiment']}`", one["K"], f"{one['ratio']:.1f}", *(f"{v:.1f}" for v in one["milliseconds"])]
        for one in found["cost"]
    ]
    return table(["net", "K, updates of a layer", "times its twin", "ms a step", "its twin"], lines)


def nudging_block() -> str:
    """Nudging rules on Hopfield nets."""
    parts = []
    for d in _holding("betas"):
        lines = []
        for one in d["rows"]:
            cells = [f"{c:.4f} ({x:.0e})" for c, x in zip(one["cosines"], one["distances"], strict=True)]
            lines.append([one["rule"], *cells, "–" if one["order"] is None else f"{one['order']:.2f}"])
        parts.append(table([f"{d['name']}", *(f"beta {b:g}" for b in d["betas"]), "order"], lines))
    return "\n\n".join(parts)


def spread_block() -> str:
    """Penalty or none: errors by seed."""
    lines = []
    for name, d in _rows().items():
        if name.startswith("homeostasis"):
            errors = [f"{t['test_error'][-1]:.2f}" for t in counted_trials(d)]
            lines.append([f"`{name}`", ", ".join(errors)])
    return table(["row", "last test error by seed, %"], lines, words=2)
