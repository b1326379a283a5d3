"""Fill the README's table of measured results from the files under results/; with --check, only say if it is current.

python docs/make_readme.py [--check]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from blocks import write_or_check
from make_table1_page import ESTIMATORS, Published, by_network, published

from eqprop.experiments.paper import PAPER

ROOT = Path(__file__).resolve().parent.parent


def gdu_rows() -> list[str]:
    rows = []
    for path in sorted((ROOT / "results" / "gdu").glob("*/gdu.json")):
        result = json.loads(path.read_text())
        groups = [*result["neurons"].values(), *result["synapses"].values()]
        errors = [group["rmse"] for group in groups if group["rmse"] is not None]
        label, unsettled = f"{result['name']}, beta {result['beta']:g}", result["residual"]["unsettled"]
        label += ", free phase alternating" if result.get("schedule") == "alternating" else ""
        spread = f"{min(errors):.0e} to {max(errors):.0e}"
        rows.append(f"| {label} | {spread} | {unsettled} of {result['batch']} | {result['seconds']:.0f} s |")
    if not rows:
        return []
    head = ["| GDU, preset paper | RMSE over layers and weights | samples not settled | time |", "|---|---|---|---|"]
    return [*head, *rows, ""]


def training_rows() -> list[str]:
    rows = []
    for path in sorted((ROOT / "results" / "training").glob("*.json")):
        result = json.loads(path.read_text())
        for estimator, found in result["estimators"].items():
            seeds = ", ".join(str(trial["seed"]) for trial in found["trials"])
            epochs = len(found["trials"][0]["test_error"])
            rows.append(
                f"| {result['name']} {estimator.upper()}, preset {result['preset']} | {epochs} | {seeds} | "
                f"{found['test_error_mean']:.2f} % | {found['train_error_mean']:.2f} % | {result['engine']}, "
                f"{result['provenance']['threads']} CPU thread, {result['seconds']:.0f} s |"
            )
    if not rows:
        return []
    head = [
        "| training on MNIST | epochs | seed | test error | running train error | how |",
        "|---|---:|---:|---:|---:|---|",
    ]
    return [*head, *rows, ""]


def table1_rows() -> list[str]:
    """The paper's Table 1 as far as it was run: as printed, and other presets where they come nearer."""
    files = [f for f in by_network(list(published(ROOT / "results" / "table1"))) if not f.alternating]
    printed = {f.experiment.name: f for f in files if f.experiment.preset == "paper"}
    shown = [f for f in files if f.experiment.preset == "paper" or _is_better(f, printed.get(f.experiment.name))]
    if not shown:
        return []
    rows = []
    for one in shown:
        cells = [one.experiment.name, one.experiment.preset]
        for estimator in ESTIMATORS:
            paper = one.experiment.paper_results[estimator]
            cells += [_ours(one, estimator), f"{paper.test:.2f} ± {paper.test_std:.2f}"]
        rows.append("| " + " | ".join([*cells, f"{one.found['seconds']:,.0f} s{_on_cpu(one)}"]) + " |")
    told = [one.method(m) for one in shown for m in ESTIMATORS]
    seeds = sorted({trial["seed"] for estimator in told if estimator for trial in estimator["trials"]})
    devices = sorted({s["provenance"]["device"] for one in shown for s in one.found["provenance"]} - {"cpu"}) or ["CPU"]
    where = f"{len(seeds)} trials (seeds {', '.join(map(str, seeds))}) on {', '.join(devices)}"
    return [
        f"Test errors in percent, {where}; bold: reproduced, within two of the paper's standard deviations. "
        f"{_come_out(files)} [What the presets change, and what does not come out as printed](docs/table1.md).",
        "",
        "| Table 1 | preset | EP | paper | BPTT | paper | took |",
        "|---|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
    ]


def _come_out(files: list[Published]) -> str:
    """How many cells of the paper's table are reproduced."""
    cells = [
        (f.experiment.name, estimator, f.experiment.preset)
        for f in files
        for estimator in ESTIMATORS
        if f.reproduced(estimator)
    ]
    printed = [cell for cell in cells if cell[-1] == "paper"]
    some, every = {cell[:-1] for cell in cells}, len(PAPER) * len(ESTIMATORS)
    return f"{len(printed)} of {every} cells come out as printed, {len(some)} under some preset."


def _on_cpu(one: Published) -> str:
    """Where a row was not trained on a GPU as the others."""
    devices = {(s["provenance"]["device"], s["provenance"]["threads"]) for s in one.found["provenance"]}
    threads = next((count for device, count in devices if device == "cpu"), 0)
    return f", {threads} CPU thread{'s' * (threads > 1)}" if threads else ""


def _ours(one: Published, estimator: str) -> str:
    told = one.method(estimator)
    if told is None:
        return "–"
    error = f"{told['test_error_mean']:.2f} ± {told['test_error_std']:.2f}"
    epochs, wanted = one.epochs(estimator), one.experiment.epochs
    if epochs < wanted:
        return f"{error} after {epochs} of {wanted} epochs"
    return f"**{error}**" if one.reproduced(estimator) else error


def _is_better(one: Published, printed: Published | None) -> bool:
    """Whether an estimator's mean error is lower than as printed, where that was run at all."""

    def error(of: Published | None, estimator: str) -> float:
        told = None if of is None else of.method(estimator)
        return math.inf if told is None else float(told["test_error_mean"])

    return any(error(one, estimator) < error(printed, estimator) for estimator in ESTIMATORS)


def bench_rows() -> list[str]:
    """EP on each experiment and device: the fastest of the newest measurements. The page has all of them."""
    files = [json.loads(path.read_text()) for path in (ROOT / "results" / "bench").glob("*.json")]
    newest: dict[tuple[str, ...], tuple[float, str]] = {}
    for result in sorted((f for f in files if "rows" in f), key=lambda f: str(f["machine"]["date"])):
        for row in result["rows"]:
            if row.get("speedup") and row["method"] == "ep" and row["preset"] == "paper":
                case = (result["machine"]["device"], row["name"], row["schedule"], row["stop"])
                newest[case] = (row["us_per_iteration"], _bench_row(result["machine"], row))
    best: dict[tuple[str, ...], tuple[float, str]] = {}
    for case, found in newest.items():
        best[case[:2]] = min(found, best.get(case[:2], found))
    if not best:
        return []
    head = ["| training iteration | engine | networks | us | times the obvious code |", "|---|---|---:|---:|---:|"]
    return [*head, *(best[case][1] for case in sorted(best)), ""]


def _bench_row(machine: dict[str, Any], row: dict[str, Any]) -> str:
    where = machine["device"] if machine["device"] != "cpu" else f"{machine['threads']} CPU threads"
    how = ", ".join(v for v in (row["schedule"], row["stop"]) if v not in ("synchronous", "never"))
    label = f"{row['name']} {row['method'].upper()}" + (f" ({how})" if how else "")
    engine = f"{row['engine']}, {where}"
    return f"| {label} | {engine} | {row['trials']} | {row['us_per_iteration']:,.0f} | {row['speedup']:,.0f} |"


def measured() -> str:
    return "\n".join([*table1_rows(), *gdu_rows(), *training_rows(), *bench_rows()])


def main() -> None:
    write_or_check(ROOT / "README.md", {"measured": measured}, check="--check" in sys.argv)


if __name__ == "__main__":
    main()
