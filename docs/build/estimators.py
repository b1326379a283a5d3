"""The estimators: the blocks of docs/estimators.md."""

from __future__ import annotations

import math
from statistics import mean, median

from benchmarks.estimators import title
from docs.build.results import Document, documents
from docs.build.text import listed, table
from eqprop.report.runs import machine


def bias_block() -> str:
    """Cosine with the true gradient and distance to the limit, at a usual beta and at the experiment's."""
    found = documents("estimators/bias.json")
    columns = [(d, beta) for d in found for beta in (0.1, d["beta_of_experiment"])]
    lines = []
    for form in found[0]["forms"]:
        cells = []
        for d, beta in columns:
            own, at = d["forms"][form], d["betas"].index(beta)
            cells.append(f"{own['cosine'][at]:.4f}, {own['distance'][at]:.0e}")
        lines.append([form, *cells])
    lines.append(["limit beta → 0", *(f"{d['limit_cosine']:.4f}, 0" for d, _ in columns)])
    return table(["cosine, distance", *(f"{title(d)}, beta {beta:g}" for d, beta in columns)], lines)


def slope(found: Document, form: str) -> float:
    """Of the distance against beta, over the two smallest betas where it is above rounding."""
    points = zip(found["betas"], found["forms"][form]["distance"], strict=True)
    (b0, v0), (b1, v1) = [(b, v) for b, v in points if v is not None and v > 1e-11][:2]
    return math.log(v1 / v0) / math.log(b1 / b0)


def orders_block() -> str:
    found = documents("estimators/bias.json")
    forms = [form for form in found[0]["forms"] if form != "continual"]
    return table(["estimator", *map(title, found)], [[f, *(f"{slope(d, f):.2f}" for d in found)] for f in forms])


def cost_block() -> str:
    found = documents("estimators/cost.json")
    lines = []
    for form in found[0]["seconds"]:
        cells = []
        for d in found:
            own, base = (median(d["seconds"][f]) for f in (form, "one-sided"))
            cells.append(f"{1e3 * own:.2f} ({own / base:.1f} ×)")
        lines.append([form, *cells])
    heads = [f"{d['engines']['one-sided']}, {machine(d['provenance'])}" for d in found]
    return table(["ms per iteration, P-1h", *heads], lines)


def training_block() -> str:
    found = documents("estimators/train.json")[0]
    lines = []
    for form, own in found["forms"].items():
        error = f"{own['test_error'][-1]:.2f} %" if own["test_error"] else "diverged"
        lines.append([form, error, listed("–" if v is None else f"{v:.4f}" for v in own["loss"])])
    return table(["estimator", f"test error after {found['epochs']} epochs", "mean loss per epoch"], lines)


def own_models_block() -> str:
    """Means over the seeds for each of the models."""
    (found,) = documents("own-models.json")
    columns = [(key, name) for key in ("cosine", "test_error") for name in found["nets"][0][key]]
    heads = [f"{name}: {'cosine' if key == 'cosine' else 'error, %'}" for key, name in columns]
    shown = lambda net, key, name: "–" if None in net[key][name] else f"{mean(net[key][name]):.2f}"  # noqa: E731
    return table(["model", *heads], [[net["name"], *(shown(net, *c) for c in columns)] for net in found["nets"]])
