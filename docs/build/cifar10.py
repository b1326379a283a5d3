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

LAPTOP = ("cifar10-laptop", "cifar10-laptop-backprop")
"""Of the field's rows, by EP and by backprop."""
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
    """Table 1 in short, and what was trained on all of CIFAR-10, in a sentence."""
    ep, twin = ({d["row"]: d for d in documents("field") if "row" in d}[name] for name in LAPTOP)
    (by_ep,), (by_twin,) = ([e["test_error_mean"] for e in d["estimators"].values()] for d in (ep, twin))
    (trials,) = (e["trials"] for e in ep["estimators"].values())
    seeds, data = len(trials), ep["data"]
    minutes = sum(check["cpu_minutes"] for check in ep["checks"].values()) / seeds
    said = (
        f"CIFAR-10, all {data['training_samples']:,} images, a predictive-coding net, {ep['epochs']} epochs, "
        f"{seeds} seed{'s' * (seeds > 1)}, {minutes:.0f} minutes of a processor:\n{by_ep:.2f} % wrong by EP, "
        f"{by_twin:.2f} % by backprop through the same net ([details](docs/field.md))."
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
