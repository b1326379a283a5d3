"""CIFAR-10: the blocks and the picture of docs/cifar10.md, and its sentence in README.md."""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.build import table1
from docs.build.gdu import comparisons
from docs.build.results import Document, documents
from docs.build.text import table
from eqprop.experiments.literature import CIFAR_ROWS
from eqprop.report.figures import Panel, error_curves
from eqprop.report.runs import CIFAR_HEADINGS, KINDS, points, published_cells

NETS = {"B": ("B", "B-twin", "B-bptt"), "A": ("A", "A-twin"), "small": ("small", "small-twin", "small-bptt")}


def rows() -> dict[str, Document]:
    """By name, what was trained."""
    return {d["row"]: d for d in documents("cifar10") if "row" in d}


def results_block() -> str:
    lines = [[*published_cells(row, rows().get(name)), row.about] for name, row in CIFAR_ROWS.items()]
    return table([*CIFAR_HEADINGS, "what it is"], [[line[0], line[-1], *line[1:-1]] for line in lines], words=2)


def summary_block() -> str:
    """Table 1 in short, and what was trained on CIFAR-10 in a sentence."""
    cells = {name: published_cells(CIFAR_ROWS[name], found)[1] for name, found in rows().items()}
    missing = [name for name in CIFAR_ROWS if name not in cells]
    said = f"On CIFAR-10 ([table](docs/cifar10.md)) a small net for a laptop reaches {cells['small']} % by EP, "
    said += f"{cells['small-twin']} % as its feed-forward twin by backprop; {len(missing)} of {len(CIFAR_ROWS)} rows, "
    return f"{table1.summary_block()} {said}those that need a GPU, are not trained yet."


def precision_block() -> str:
    """Cosines of updates with those in float32, at the end of each epoch: of the whole and of the worst parameter."""
    lines = []
    for name, d in rows().items():
        for trial in next(iter(d["estimators"].values()))["trials"]:
            guard = trial.get("cosines_with_float32", [])
            cells = [f"{one['whole']:.4f}, {min(one.values()):.4f}" for one in guard if one]
            lines += [[f"{name}, seed {trial['seed']}", *cells]] if cells else []
    most = max((len(line) for line in lines), default=1)
    return table(["whole, worst parameter", *(f"epoch {n}" for n in range(1, most))], lines)


def gdu_block() -> str:
    found = [d for d in documents("cifar10") if "neurons" in d]
    return comparisons({f"{d['name']}, {d['trained']['epochs']} epochs, beta {d['beta']:g}": d for d in found})


def curves() -> Figure:
    """Errors over the epochs, EP beside its twin and BPTT, a panel per net that was trained."""
    panels = []
    for net, names in NETS.items():
        own = {e: r["trials"] for n in names if n in rows() for e, r in rows()[n]["estimators"].items()}
        drawn = {(e, kind): points(trials, kind) for e, trials in own.items() for kind in KINDS}
        panels += [Panel(net, drawn, CIFAR_ROWS[net].experiment.paper_results)] if own else []
    return error_curves(panels)
