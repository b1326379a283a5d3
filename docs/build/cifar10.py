"""CIFAR-10: the blocks and the picture of docs/cifar10.md, and its sentence in README.md."""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.build import table1
from docs.build.gdu import comparisons
from docs.build.results import Document, documents
from docs.build.text import table
from eqprop import papers
from eqprop.report.figures import Panel, error_curves
from eqprop.report.runs import CIFAR_HEADINGS, KINDS, counted_trials, points, published_cells

NETS = {"B": ("B", "B-twin", "B-bptt"), "A": ("A", "A-twin"), "small": ("small", "small-twin", "small-bptt")}


def rows() -> dict[str, Document]:
    """By name, what was trained."""
    return {d["row"]: d for d in documents("cifar10") if "row" in d}


def results_block() -> str:
    """The rows that were trained; a row that was not is no row."""
    trained = {name: row for name, row in papers.cifar_rows().items() if name in rows()}
    cells = {row.about: published_cells(row, rows()[name]) for name, row in trained.items()}
    lines = [[name, about, *rest] for about, (name, *rest) in cells.items()]
    return table(["row", "what it is", *CIFAR_HEADINGS[1:]], lines, words=2)


def summary_block() -> str:
    """Table 1 in short, and what was trained on CIFAR-10, on how much, in a sentence."""
    ep, twin = (published_cells(papers.cifar_rows()[name], rows()[name]) for name in ("small", "small-twin"))
    data = rows()["small"]["data"]
    trained = f"{data['training_samples']:,} training and {data['test_samples']:,} test images"
    said = (
        f"CIFAR-10: three convolutions, {trained}, {ep[3]} epochs, {ep[2]} seeds:\n{ep[1]} % wrong by EP, {twin[1]} % "
        "by backprop through the same net passed once ([details](docs/cifar10.md))."
    )
    return f"{table1.summary_block()}\n\n{said}"


def precision_block() -> str:
    """Cosines of updates with those in float32, at the ends of epochs: of the whole, and of the worst parameter."""
    lines = []
    for name, d in rows().items():
        for trial in counted_trials(d):
            if found := [(g["whole"], min(g.values())) for g in trial.get("cosines_with_float32", []) if g]:
                shown = (found[0], found[-1], map(min, *found) if len(found) > 1 else found[0])
                lines.append([f"{name}, seed {trial['seed']}", *(f"{a:.4f}, {b:.4f}" for a, b in shown)])
    return table(["whole, worst parameter", "first epoch", "last epoch", "lowest of all"], lines)


def gdu_block() -> str:
    found = [d for d in documents("cifar10") if "neurons" in d]
    return comparisons({f"{d['trained']['epochs']} epochs, T {d['T']}, beta {d['beta']:g}": d for d in found})


def curves() -> Figure:
    """Errors over the epochs, EP beside its twin and BPTT, a panel per net that was trained."""
    panels = []
    for net, names in NETS.items():
        own = {next(iter(d["estimators"])): counted_trials(d) for name in names if (d := rows().get(name))}
        drawn = {(e, kind): points(trials, kind) for e, trials in own.items() for kind in KINDS}
        panels += [Panel(net, drawn, papers.cifar_rows()[net].spec.results)] if own else []
    return error_curves(panels)
