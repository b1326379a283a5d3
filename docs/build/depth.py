"""Deep nets and the form of the nudged phase: the blocks of docs/depth.md."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from docs.build.results import Document, documents, only
from docs.build.text import by_name, duration, listed, number, table
from eqprop.report.runs import machine
from eqprop.run.metrics import deviation

BETAS = ("1", "0.1", "0.01", "0.001", "0.0001")
SHOWN = ("deep-10-ep", "deep-20-ep")


def forms() -> Document:
    return documents("deep/forms.json")[0]


def trainings(**fields: object) -> list[Document]:
    """Of deep nets, with these fields."""
    return [d for d in documents("deep/trainings.json") if all(d[name] == value for name, value in fields.items())]


def spread(values: list[float]) -> str:
    std = deviation(values)
    return f"{fmean(values):.2f}" + (f" ± {std:.2f}" if std is not None else "")


def cosines_block() -> str:
    """The least cosine of a weight's update with the exact gradient, by beta, in float32; at 0.1 in bfloat16 too."""
    lines = []
    for name, found in forms()["cosines"].items():
        if name == "provenance":
            continue
        rows = found["least_cosine"]
        for form in ("plain", "difference"):
            cells = [_cosine(rows[f"{beta} float32 {form}"]) for beta in BETAS]
            about = f"{name}, T {found['T']}, K {found['K']}" if form == "plain" else ""
            lines.append([about, form, *cells, _cosine(rows[f"0.1 bfloat16 {form}"])])
    return table(["net", "form", *(f"beta {b}" for b in BETAS), "beta 0.1, bfloat16"], lines, words=2)


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def bits_block() -> str:
    """Each weight's update on P-3h with 16-bit products against that of the same form in float64."""
    found = forms()["precision"]
    rows = [name for name in found if name != "provenance" and not name.endswith("float32")]
    weights = [n for n in found[rows[0]] if n.startswith("W")]
    return table(
        ["form, products", *weights],
        [[name.replace(" ", ", "), *(f"{found[name][w]:.4f}" for w in weights)] for name in rows],
    )


def speed_block() -> str:
    """CPU time of a training iteration, difference over plain."""
    found = forms()["speed"]
    nets = [name.removeprefix("xla ") for name in found if name.startswith("xla ")]
    cells = [[net, *(f"{found[f'{engine} {net}']['ratio']:.2f}" for engine in ("xla", "eager"))] for net in nets]
    made = machine(found["provenance"])
    return table(["net", "`xla`", "`eager`"], cells) + f"\n\nBatches of 20, median of nine turns, {made}."


def exponents_block() -> str:
    """Of the best beta, and how far the beta that is proposed errs from the best of a sweep."""
    lines = []
    for net, found in forms()["beta"].items():
        if net == "provenance":
            continue
        one, two = found["one-sided"], found["symmetric"]
        ratios = [p["error"] / p["least"] for f in (one, two) for p in f["proposed"].values()]
        cells = [one["drift"]["exponent"], one["resolution"]["exponent"], two["resolution"]["exponent"], max(ratios)]
        lines.append([net, *(f"{v:.2f}" for v in cells)])
    heads = [
        "net",
        "one-sided, residual",
        "one-sided, resolution",
        "symmetric, resolution",
        "proposed: error over the least",
    ]
    return table(heads, lines)


def trainings_block() -> str:
    """Each net by each rule: the error after the last epoch, and of the best epoch on the test set."""
    return table(
        ["net", "rule", "seeds", "epochs", "last, %", "best, %", "rate", "CPU time of a seed"],
        [_line(own) for own in _records() if own[0]["name"] != "P-3h"],
        words=2,
    )


def _records() -> Iterator[list[Document]]:
    for record in dict.fromkeys(d["record"] for d in documents("deep/trainings.json")):
        yield trainings(record=record)


def _line(own: list[Document]) -> list[object]:
    d = own[0]
    rule = "backprop" if d["estimator"] == "backprop" else f"EP, {d['form']} form, gain {d['feedback_gain']:g}"
    ran = min(len(o["test_error"]) for o in own)
    epochs = str(d["epochs"]) if ran == d["epochs"] else f"{ran} of {d['epochs']}"
    errors = [[o[which] for o in own] for which in ("last", "best")]
    seconds = fmean(o["cpu_seconds"] for o in own) if d["provenance"]["device"] == "cpu" else None
    rates = by_name(d["rates"]).removeprefix("* ") + (f", {d['decay']}" if d["decay"] != "none" else "")
    return [d["name"], rule, len(own), epochs, *map(spread, errors), rates, duration(seconds)]


def layers_block() -> str:
    """Seed 0: cosines of every layer's update in float32 with the exact gradient, before and after training."""
    lines = []
    for record in SHOWN:
        for d in trainings(record=record, seed=0):
            for when in ("before", "after"):
                for form in ("plain", "difference"):
                    each = d["cosines"].get(when, {}).get(form, {}).get("recurrent backprop", {})
                    lines.append([d["name"], when, form, listed(_cosine(v) for v in each.values())])
    return table(["net", "training", "form", "from the output's weights to the input's"], lines, words=4)


def residuals_block() -> str:
    """P-3h, `paper`: the error after each epoch beside the stored curve of the same seed, and residuals."""
    stored = only("table1/paper", name="P-3h", schedule="synchronous")["estimators"]["ep"]["trials"][0]["test_error"]
    lines = [["stored, plain", *(f"{e:.2f}" for e in stored[:5])]]
    notes = []
    for d in trainings(name="P-3h"):
        errors = [f"{e:.2f}" for e in d["test_error"]]
        lines.append([f"{d['form']} form", *(errors + ["–"] * 5)[:5]])
        last = next(r for r in reversed(d["largest_residual"]) if r)
        parts = listed(f"s{n} {number(v)}" for n, v in enumerate(last))
        notes.append(f"{d['form']} form: largest residuals after {len(errors)} epochs {parts}")
    return table(["P-3h, seed 0", *(f"epoch {n}" for n in range(1, 6))], lines) + "\n\n" + ". ".join(notes) + "."
