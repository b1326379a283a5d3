"""The GDU laboratory: the blocks and pictures of docs/gdu.md, and the GDU part of docs/beyond.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from statistics import fmean
from typing import Any

from docs.build.results import RESULTS, Document, only, pick
from docs.build.text import listed, number, span, table
from eqprop import papers

NAMES = ("toy", "EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h", "P-conv")
PARTS = ("residual", "finite_beta", "output_slope", "asymmetry", "rounding", "unsettled")
SILENCED = ("neurons", "saturated", "unheard", "unheard_saturated")
SEEDS, BETAS = range(5), (0.1, 0.01, 0.001, 0.0001)
USUAL = {"preset": "paper", "seed": 0, "schedule": "synchronous", "dtype": "float64", "trained": None}
USUAL |= {"nudge_site": "outside", "cost": "squared-error"}


def compared(name: str, **other: Any) -> Document:
    """The comparison of an experiment at its own settings, but for those given."""
    return only("gdu", **{"name": name, "beta": papers.find(name, "gdu").phases.beta, **USUAL, **other})


@cache
def traces(name: str) -> Document:
    return dict(json.loads((RESULTS / "gdu" / name / "traces.json").read_text(encoding="utf-8")))


def errors(found: Document, kind: str, key: str = "rmse") -> list[float]:
    return [m[key] for m in found[kind].values() if m[key] is not None]


def mean_error(found: Document) -> float:
    return float(found["budget"]["parts"]["synapses"]["rmse"])


def largest(found: Document, kind: str = "synapses") -> str:
    parts: Mapping[str, float] = {p: v for p in PARTS if (v := found["budget"]["parts"][kind][p]) is not None}
    name = max(parts, key=lambda n: parts[n])
    return f"{name.replace('_', ' ')} {number(parts[name])}"


def results_block() -> str:
    return comparisons({name: compared(name) for name in NAMES})


def comparisons(found: Mapping[str, Document]) -> str:
    """A line per comparison, and one for its settled samples where others did not settle."""
    lines = []
    for name, d in found.items():
        left = f"{n} of {d['batch']}" if (n := d["residual"]["unsettled"]) else "none"
        lines.append([name, d["budget"]["outcome"], *_figures(d), left, largest(d)])
        if d["settled"]:
            lines.append([f"{name}, settled samples only", "", *_figures(d["settled"]), "left out", ""])
    heads = ["experiment", "GDU property", "RMSE neurons", "RMSE synapses", "worst cosine", "not settled"]
    return table([*heads, "largest part of the error"], lines, words=2)


def _figures(found: Document) -> list[str]:
    worst = min(errors(found, "synapses", "cosine"))
    return [span(errors(found, "neurons")), span(errors(found, "synapses")), number(worst)]


def budget_block() -> str:
    lines = []
    for name in NAMES:
        for kind in ("synapses", "neurons"):
            parts = compared(name)["budget"]["parts"][kind]
            lines.append([name, kind, number(parts["rmse"]), *(number(parts[p]) for p in PARTS if p != "rounding")])
    heads = [p.replace("_", " ") for p in PARTS if p != "rounding"]
    return table(["experiment", "", "RMSE", *heads], lines, words=2)


def authors_block() -> str:
    lines = []
    for name in NAMES:
        d = compared(name, preset="authors")
        shown = d["convention"]["synapses_shown"]
        figures = [span(errors(d, "neurons")), span(errors(d, "synapses", shown))]
        says = papers.find(name, "gdu").notes.removeprefix("The paper on the RMSE: ").removesuffix(".")
        lines.append([name, says, d["batch"], *figures, largest(d)])
    heads = ["experiment", "the paper on its RMSE", "samples", "RMSE neurons", "RMSE synapses (cumulative)"]
    return table([*heads, "largest part"], lines, words=2)


def silence_block() -> str:
    """Neurons of P-conv whose EP process is zero and BPTT's is not, beside those that are saturated."""
    found = compared("P-conv")
    lines = [[name, *(n[key] for key in SILENCED)] for name, n in found["silenced"].items()]
    heads = ["layer", "neurons × samples", "saturated", "silent in EP alone", "of these saturated"]
    parts = found["budget"]["parts"]["synapses"]
    note = "For synapses it is the outputs that count: EP's nudge bypasses the sigma' that BPTT sees there, and the "
    note += f"budget gives that part {number(parts['output_slope'])} of an RMSE of {number(parts['rmse'])}."
    return f"{table(heads, lines)}\n\n{note}"


def seeds_block() -> str:
    lines = []
    for name in ("EB-1h", "EB-2h", "P-1h", "P-2h", "P-3h", "P-conv"):
        for schedule in ("synchronous", "alternating") if name in ("P-2h", "P-3h") else ("synchronous",):
            found = [compared(name, seed=seed, schedule=schedule) for seed in SEEDS]
            means, unsettled = (number(mean_error(d)) for d in found), (d["residual"]["unsettled"] for d in found)
            worst = min(cosine for d in found for cosine in errors(d, "synapses", "cosine"))
            lines.append([name, schedule, listed(means), listed(unsettled), number(worst)])
    heads = ["experiment", "free phase", "mean RMSE of synapses, seeds 0 to 4", "samples not settled", "worst cosine"]
    return table(heads, lines, words=2)


def nudge_site_block() -> str:
    lines = []
    for name in ("P-1h", "P-2h"):
        for site in ("outside", "inside"):
            found = [compared(name, nudge_site=site, beta=beta) for beta in BETAS]
            lines.append([name, site, *(f"{mean_error(d):.1e}" for d in found), largest(found[-1])])
    heads = ["net", "nudge site", *(f"beta {beta:g}" for beta in BETAS), "largest part at the smallest beta"]
    return table(heads, lines, words=2)


def cross_entropy_block() -> str:
    lines = []
    for d in pick("gdu", cost="cross-entropy"):
        unsettled, alone = d["residual"]["unsettled"], "all settled"
        if d["settled"]:
            alone = f"{fmean(errors(d['settled'], 'synapses')):.1e} without {unsettled} of {d['batch']}"
        lines.append([d["name"], d["nudge_site"], f"{d['beta']:g}", f"{mean_error(d):.1e}", alone])
    return table(["net", "nudge site", "beta", "RMSE of synapses", "settled samples only"], lines, words=2)
