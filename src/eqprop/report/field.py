"""The table of learning rules: what each row reached, beside its yardstick and what was published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eqprop import papers
from eqprop.report.runs import counted_trials
from eqprop.run.metrics import deviation

FIELD_HEADINGS = (
    *("row", "test error, % (best epoch)", "beside its yardstick", "published", "cosine before, after"),
    *("seeds", "epochs", "CPU minutes a seed"),
)
Document = Mapping[str, Any]


def field_cells(row: papers.PublishedRow, found: Mapping[str, Document]) -> list[str]:
    """A row from what was published of all rows, by name. What is not trained yet says so, with its estimated time."""
    published = row.published or "–"
    own = found.get(row.name)
    if own is None:
        return [row.name, "not trained yet", "–", published, "–", f"0 of {row.seeds}", "–", f"about {row.minutes:g}"]
    trials = counted_trials(own)
    reached, planned = own["epochs_reached"], own["epochs"]
    minutes = [check["cpu_minutes"] for check in own["checks"].values() if check.get("cpu_minutes")]
    return [
        row.name,
        _errors(own, trials),
        _beside(own, None if row.beside is None else found.get(row.beside)),
        published,
        _cosines(own),
        str(len(trials)) if len(trials) >= row.seeds else f"{len(trials)} of {row.seeds}",
        str(reached) if reached == planned else f"{reached} of {planned}",
        f"{sum(minutes) / len(minutes):.1f}" if minutes else "–",
    ]


def _errors(own: Document, trials: list[Mapping[str, Any]]) -> str:
    """Mean and deviation over seeds, with the best epoch's mean; of rows followed on held-out images the test error."""
    (summary,) = own["estimators"].values()
    if summary["test_error_mean"] is None:
        return "diverged"
    if held_out := tested_once(own):
        std = deviation(list(held_out.values()))
        spread = "" if std is None else f" ± {std:.2f}"
        return f"{sum(held_out.values()) / len(held_out):.2f}{spread}"
    spread = "" if summary["test_error_std"] is None else f" ± {summary['test_error_std']:.2f}"
    best = [min(trial["test_error"]) for trial in trials if trial["test_error"]]
    return f"{summary['test_error_mean']:.2f}{spread}" + (f" ({sum(best) / len(best):.2f})" if best else "")


def tested_once(own: Document) -> dict[int, float]:
    """By seed, the error on the test set of runs whose epochs were followed on held-out training images."""
    seeds = [trial["seed"] for trial in counted_trials(own)]
    return {seed: e for seed in seeds if (e := own["checks"].get(f"seed-{seed}", {}).get("test_error")) is not None}


def paired(own: Document, other: Document) -> list[float]:
    """The differences of last test errors, seed by seed, of seeds that both have after as many epochs."""
    if own["epochs_reached"] != other["epochs_reached"]:
        return []
    last = [
        tested_once(each) or {t["seed"]: t["test_error"][-1] for t in counted_trials(each) if t["test_error"]}
        for each in (own, other)
    ]
    return [error - last[1][seed] for seed, error in last[0].items() if seed in last[1]]


def _beside(own: Document, other: Document | None) -> str:
    gaps = [] if other is None else paired(own, other)
    return f"{sum(gaps) / len(gaps):+.2f} ({len(gaps)} paired)" if gaps else "–"


def _cosines(own: Document) -> str:
    """The lowest over the parameters and seeds, before and after."""
    shown = []
    for when in ("before", "after"):
        found = [check[when] for check in own["checks"].values() if check.get(when)]
        each = [c for one in found for c in one.get("cosines", {}).values() if c is not None and not math.isnan(c)]
        shown.append(f"{min(each):.4f}" if each else "–")
    return ", ".join(shown)
