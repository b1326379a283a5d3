"""Fill the measured blocks of docs/beyond.md from results/, and draw its figure: no number on it is typed.

python docs/make_beyond_page.py --collect RUN...    run folders into results/beyond, a file each
python docs/make_beyond_page.py --draw              RMSE against beta, from results/gdu/inside
python docs/make_beyond_page.py                     rewrite the marked blocks
python docs/make_beyond_page.py --check             say whether they are up to date
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocks import write_or_check

from eqprop.files import write_bytes, write_json
from eqprop.report.figures import BLUE, ORANGE, drawn, new_figure, save
from eqprop.training.folder import EXPERIMENT, RESULT, read_json, sessions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "beyond.md"
BEYOND, INSIDE = ROOT / "results" / "beyond", ROOT / "results" / "gdu" / "inside"
BETAS = (0.1, 0.01, 0.001, 0.0001)
NETS, NUDGES = ("P-1h", "P-2h"), ("outside", "inside")
EPOCHS = (1, 5, 10, 15, 20, 30)
"""Whole runs are shown at these epochs, where they have come so far."""

Document = dict[str, Any]


def collect(folders: list[str]) -> None:
    """A run as one file: result, experiment, data and provenance."""
    for folder in map(Path, folders):
        plain = read_json(folder / EXPERIMENT, "the experiment of the run")
        made = dict(sessions(folder)[0]["provenance"])
        # Where a run folder lay on the machine that made it is nobody's concern.
        made["command"] = re.sub(r"--out \S*/", "--out runs/", made["command"])
        content = {
            **read_json(folder / RESULT, "the result of the run"),
            "experiment": plain["experiment"],
            "changes_from_paper": plain["changes_from_paper"],
            "settings": plain["settings"],
            "data": {key: value for key, value in plain["data"].items() if key != "directory"},
            "provenance": made,
        }
        write_json(BEYOND / f"{folder.name}.json", content)
        print(BEYOND / f"{folder.name}.json")


def read(path: Path) -> Document:
    content: Document = json.loads(path.read_text(encoding="utf-8"))
    return content


def compared(net: str, nudge: str, beta: float) -> Document:
    return read(INSIDE / f"{net}-{nudge}-{beta:g}.json")


def synapses(document: Document) -> float:
    return float(document["budget"]["parts"]["synapses"]["rmse"])


def draw() -> None:
    for ending, content in save(figure()).items():
        write_bytes(INSIDE / f"beta.{ending}", content)


@drawn
def figure() -> Figure:
    """A panel a net, the mean RMSE of its synapses against beta with the nudge outside and inside."""
    figure = new_figure(7.0, 2.8)
    for ax, net in zip(figure.subplots(1, len(NETS), sharey=True), NETS, strict=True):
        for nudge, colour, marker in zip(NUDGES, (ORANGE, BLUE), ("o", "s"), strict=True):
            values = [synapses(compared(net, nudge, beta)) for beta in BETAS]
            ax.loglog(BETAS, values, color=colour, marker=marker, markersize=4, label=f"nudge {nudge} sigma")
        ax.set(title=net, xlabel=r"$\beta$")
    figure.axes[0].set_ylabel("RMSE of the synapses")
    figure.axes[0].legend()
    return figure


def gdu_block() -> str:
    head = [
        "| net | nudge | " + " | ".join(f"beta {beta:g}" for beta in BETAS) + " | largest part at the smallest beta |",
        "|---|---|" + "---:|" * len(BETAS) + "---|",
    ]
    rows = []
    for net in NETS:
        for nudge in NUDGES:
            found = [compared(net, nudge, beta) for beta in BETAS]
            parts = {k: v for k, v in found[-1]["budget"]["parts"]["synapses"].items() if k != "rmse" and v is not None}
            largest = max(parts, key=lambda name: parts[name])
            errors = " | ".join(f"{synapses(d):.1e}" for d in found)
            rows.append(f"| {net} | {nudge} | {errors} | {largest} ({parts[largest]:.1e}) |")
    return "\n".join([*head, *rows])


@dataclass(frozen=True)
class Trained:
    """A row of the table of trainings: its trials, from one file or several."""

    label: str
    estimator: str
    documents: list[Document]

    @property
    def trials(self) -> list[Document]:
        found = [trial for d in self.documents for trial in d["estimators"][self.estimator]["trials"]]
        return sorted(found, key=lambda trial: trial["seed"])

    @property
    def epochs(self) -> int:
        return min(len(trial["test_error"]) for trial in self.trials)

    def mean(self, kind: str, epoch: int) -> float:
        return statistics.fmean(trial[kind][epoch - 1] for trial in self.trials)


def trained() -> list[Trained]:
    """Outside, inside and BPTT. Two of the outside runs are those of the README's table."""
    older = sorted((ROOT / "results" / "training").glob("p-1h-ep-seed-[01].json"))
    files = {
        ("EP, nudge outside", "ep"): [*older, *sorted(BEYOND.glob("p1h-outside*.json"))],
        ("EP, nudge inside", "ep"): sorted(BEYOND.glob("p1h-inside*.json")),
        ("BPTT", "bptt"): sorted(BEYOND.glob("p1h-bptt*.json")),
    }
    return [Trained(label, estimator, [read(path) for path in paths]) for (label, estimator), paths in files.items()]


def training_block() -> str:
    """Test error and, in parentheses, running train error, in percent."""
    rows = trained()
    shown = [epoch for epoch in EPOCHS if epoch <= max(row.epochs for row in rows)]
    head = ["| test % (train %) after epoch | " + " | ".join(map(str, shown)) + " | seeds |"]
    head.append("|---|" + "---:|" * len(shown) + "---|")
    lines = []
    for row in rows:
        cells = [
            f"{row.mean('test_error', epoch):.2f} ({row.mean('train_error', epoch):.2f})" if epoch <= row.epochs else ""
            for epoch in shown
        ]
        seeds = ", ".join(str(trial["seed"]) for trial in row.trials)
        lines.append(f"| {row.label} | {' | '.join(cells)} | {seeds} |")
    return "\n".join([*head, *lines])


def reading_block() -> str:
    """The train errors side by side at the last epoch that all three have."""
    rows = trained()
    last = min(row.epochs for row in rows)
    errors = ", ".join(f"{row.label} {row.mean('train_error', last):.2f} %" for row in rows)
    return f"Running train error after {last} epochs: {errors}."


def cross_entropy_block() -> str:
    head = ["| GDU with cross-entropy | nudge | beta | RMSE of the synapses | of the settled samples alone |"]
    head.append("|---|---|---:|---:|---|")
    rows = []
    for path in sorted(INSIDE.glob("*-cross-entropy.json")):
        d = read(path)
        unsettled = d["residual"]["unsettled"]
        alone = "all settled"
        if d["settled"]:
            errors = [m["rmse"] for m in d["settled"]["synapses"].values() if m["rmse"] is not None]
            alone = f"{statistics.fmean(errors):.1e} ({unsettled} of {d['batch']} had not settled)"
        rows.append(f"| {d['name']} | {d['nudge_site']} | {d['beta']:g} | {synapses(d):.1e} | {alone} |")
    return "\n".join([*head, *rows, "", *_runs("p1h-ce*.json", "P-1h with cross-entropy on MNIST")])


def data_block() -> str:
    return "\n".join(_runs("fashion*.json", "P-1h, EP, Fashion-MNIST"))


def _runs(pattern: str, what: str) -> list[str]:
    head = [f"| {what} | epochs | seeds | test error | running train error | engine |", "|---|---:|---|---:|---:|---|"]
    rows = []
    for path in sorted(BEYOND.glob(pattern)):
        d = read(path)
        found = d["estimators"]["ep"]
        experiment = d["experiment"]
        setting = (
            f"T {experiment['T']}, K {experiment['K']}, beta {experiment['beta']:g}, nudge {experiment['nudge_site']}"
        )
        epochs = len(found["trials"][0]["test_error"])
        seeds = ", ".join(str(t["seed"]) for t in found["trials"])
        errors = f"{found['test_error_mean']:.2f} % | {found['train_error_mean']:.2f} %"
        rows.append(f"| {setting} | {epochs} | {seeds} | {errors} | {d['engine']} |")
    return [*head, *rows] if rows else []


BLOCKS: dict[str, Callable[[], str]] = {
    "gdu": gdu_block,
    "training": training_block,
    "reading": reading_block,
    "cross entropy": cross_entropy_block,
    "data": data_block,
}


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--collect"]:
        collect(words[1:])
        return
    if words == ["--draw"]:
        draw()
        return
    write_or_check(PAGE, BLOCKS, check=words == ["--check"])


if __name__ == "__main__":
    main()
