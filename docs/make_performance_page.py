"""Fill the tables and figures of performance.md from results/bench/*.json; with --check, only say if they are current.

    python docs/make_performance_page.py [--check]

The text of the page is written by hand; the marked blocks are made here, so that no measured number on it is typed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blocks import write_or_check

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ lies beside the package
from benchmarks.floors import dependent_steps, floors, work
from eqprop.experiments.paper import PAPER, named_experiment

HERE = Path(__file__).resolve().parent
PAGE = HERE / "performance.md"
RESULTS = HERE.parent / "results" / "bench"
NOTHING = "*Not measured yet.*"

Json = dict[str, Any]

CASE = ("name", "preset", "method", "schedule", "stop", "weights", "trials", "engine")
"""What is measured by a row."""


class Results:
    """Every measurement in a folder, by what it holds."""

    def __init__(self, folder: Path) -> None:
        files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
        self.benches = {name: found for name, found in files.items() if "rows" in found}
        self.scalings = {name: found for name, found in files.items() if "scaling" in found}
        self.rests = {name: found for name, found in files.items() if "rest" in found}
        self.peaks = {place(found["machine"]): found["peaks"] for found in files.values() if "peaks" in found}

    def by_machine(self) -> dict[str, list[Json]]:
        """All rows of each machine that are right; of a case that was measured twice the later one."""
        cases: dict[str, dict[tuple[object, ...], Json]] = {}
        for found in sorted(self.benches.values(), key=lambda f: f["machine"]["date"]):
            latest = cases.setdefault(place(found["machine"]), {})
            latest |= {tuple(row[key] for key in CASE): row for row in found["rows"]}
        return {where: [r for r in rows.values() if r["speedup"] is not None] for where, rows in cases.items()}


def place(machine: Json) -> str:
    """The device a measurement was made on."""
    return machine["processor"] if machine["device"] == "cpu" else machine["device"]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table; the first `words` columns to the left, numbers to the right."""
    rule = ["---" if n < words else "---:" for n in range(len(headings))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def number(value: float | None) -> str:
    """Three digits, or all of a large number."""
    if value is None:
        return "--"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def work_table(results: Results) -> str:
    """What an iteration of one trial has to do, from the sizes alone."""
    rows = []
    for experiment in PAPER.values():
        own = work(experiment)
        rows.append(
            (
                experiment.name,
                f"{experiment.T} + {experiment.K}",
                *(number(1e-6 * experiment.batch * v) for v in (own.drive, own.step)),
                *(number(1e-6 * own.flops(experiment, method, 1)) for method in ("ep", "bptt")),
                str(dependent_steps(experiment)),
            )
        )
    headings = ("experiment", "T + K", "drive", "a step", "EP iteration", "BPTT iteration", "dependent steps")
    return table(headings, rows)


def floors_table(results: Results) -> str:
    """Floors and what is reached, a table a machine."""
    parts = []
    for machine, rows in results.by_machine().items():
        if machine not in results.peaks:
            continue
        peaks = results.peaks[machine]
        lines = [
            line for name in PAPER for method in ("ep", "bptt") if (line := _floor_line(name, method, rows, peaks))
        ]
        headings = (
            "experiment",
            "engine",
            "trials",
            "arithmetic",
            "latency",
            "all steps",
            "x floor",
            "all exact means",
        )
        parts.append(f"**{machine}** ({_peaks_in_words(peaks)})\n\n" + table(headings, lines, words=2))
    return "\n\n".join(parts) or NOTHING


def _floor_line(name: str, method: str, rows: Sequence[Json], peaks: Json) -> tuple[str, ...] | None:
    mine = [r for r in rows if (r["name"], r["method"], r["preset"]) == (name, method, "paper")]
    if not mine:
        return None
    # The most trials that were measured: side by side is how a table of results is made.
    trials = max(r["trials"] for r in mine)
    mine = [r for r in mine if r["trials"] == trials]
    every = [r for r in mine if r["schedule"] == "synchronous" and r["stop"] == "never"]
    exact = [r for r in mine if r["stop"] == "never" or r["weights"] == "trained"]
    best = min(every or mine, key=lambda r: r["us_per_iteration"])
    least = floors(named_experiment(name), method, trials, peaks)
    reached = best["us_per_iteration"] if every else None
    return (
        f"{name} {method.upper()}",
        best["engine"],
        str(trials),
        number(least.arithmetic),
        number(least.latency),
        number(reached),
        "--" if reached is None else f"{reached / least.higher:.1f}",
        number(min((r["us_per_iteration"] for r in exact), default=None)),
    )


def _peaks_in_words(peaks: Json) -> str:
    said = [f"{peaks['float32_flops'] / 1e9:,.0f} GFLOP/s in float32"]
    if peaks.get("half_flops"):
        said.append(f"{peaks['half_flops'] / 1e9:,.0f} in half precision")
    if peaks.get("block_step_us"):
        said.append(f"{peaks['block_step_us']:.2f} us for a dependent step inside a block")
    if peaks.get("exchange_us"):
        said.append(f"{peaks['exchange_us']:.2f} us for one with an exchange")
    return ", ".join(said)


def results_table(results: Results) -> str:
    """Every row of every file, as measured."""
    parts = []
    for name, found in results.benches.items():
        machine = found["machine"]
        headings = (
            "experiment",
            "engine",
            "trials",
            "us/iteration",
            "us/step",
            "naive twin",
            "ratio",
            "error",
            "torch's",
        )
        lines = [_result_line(row) for row in found["rows"]]
        title = f"**{place(machine)}**, torch {machine['torch']}, {machine['date'][:10]}"
        source = f"`results/bench/{name}.json`, commit {(machine['commit'] or 'unknown')[:12]}"
        parts.append(f"{title} ({source})\n\n" + table(headings, lines, words=2))
        if found.get("skipped"):
            parts.append("\n".join(_skipped_line(s) for s in found["skipped"]))
    return "\n\n".join(parts) or NOTHING


def _skipped_line(skipped: Json) -> str:
    return f"- {skipped['name']} {skipped['method'].upper()}, {skipped['engine']}: {skipped['reason']}"


def _result_line(row: Json) -> tuple[str, ...]:
    extras = [row["schedule"]] if row["schedule"] != "synchronous" else []
    if row["stop"] == "settled":
        before = f" after {row['iterations_before']}" if row["weights"] == "trained" else ""
        extras.append(f"settled, {row['weights']} weights{before}")
    error, plain = ("--" if row[key] is None else f"{row[key]:.1e}" for key in ("max_error", "naive_max_error"))
    return (
        f"{row['name']} {row['method'].upper()}" + ("" if row["preset"] == "paper" else f", `{row['preset']}`"),
        row["engine"] + (f" ({'; '.join(extras)})" if extras else ""),
        str(row["trials"]),
        f"{number(row['us_per_iteration'])} ± {number(row['spread_us'])}",
        number(row["us_per_step"]),
        f"{number(row['naive_us_per_iteration'])} ± {number(row['naive_spread_us'])}",
        "refused" if row["speedup"] is None else number(row["speedup"]),
        error,
        plain,
    )


def projection_table(results: Results) -> str:
    """The projected time of Table 1, a table a machine."""
    parts = []
    for found in results.benches.values():
        if "table1" not in found:
            continue
        every, exact = found["table1"]["all_steps"], found["table1"]["all_exact_means"]
        seconds = [{(p["name"], p["method"]): p["seconds"] for p in total["rows"]} for total in (every, exact)]
        lines = [
            (f"{name} {method.upper()}", *(_duration(times.get((name, method))) for times in seconds))
            for name in PAPER
            for method in ("ep", "bptt")
        ]
        lines.append(("**whole table**", *(_duration(total["seconds"]) for total in (every, exact))))
        title = f"**{place(found['machine'])}**, commit {(found['machine']['commit'] or 'unknown')[:12]}"
        parts.append(f"{title}\n\n" + table(("row", "all steps", "all exact means"), lines))
    return "\n\n".join(parts) or NOTHING


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "--"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def scaling_figures(results: Results) -> str:
    """The curves, a figure a machine, and where they are from."""
    parts = []
    for name, found in results.scalings.items():
        machine = found["machine"]
        base = ", ".join(f"{axis} {value}" for axis, value in found["base"].items())
        parts.append(
            f"![Time per iteration over batch, depth, width and trials on {place(machine)}](performance-{name}.svg)\n\n"
            f"**{place(machine)}**, torch {machine['torch']}: EP on a prototypical net, T = {found['T']}, "
            f"K = {found['K']}; one size varies, the others stay at {base} (`results/bench/{name}.json`)."
        )
    return "\n\n".join(parts) or NOTHING


def draw(found: Json, path: Path) -> None:
    """Four panels: microseconds per iteration over each size, on logarithmic axes, a line an engine."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "eqprop", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    axes = list(found["base"])
    figure, panels = pyplot.subplots(1, len(axes), figsize=(11, 2.8), sharey=True, layout="constrained")
    engines = list(dict.fromkeys(p["engine"] for p in found["scaling"]))
    for axis, panel in zip(axes, panels, strict=True):
        for engine in engines:
            points = [p for p in found["scaling"] if p["axis"] == axis and p["engine"] == engine]
            times = [p["us_per_iteration"] for p in points]
            panel.plot([p[axis] for p in points], times, marker="o", markersize=3, label=engine)
        panel.set(xscale="log", yscale="log", xlabel=axis)
        ticks = sorted({p[axis] for p in found["scaling"] if p["axis"] == axis})
        panel.set_xticks(ticks, [str(t) for t in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("us per iteration")
    panels[-1].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Creator": "eqprop"})
    pyplot.close(figure)


def rest_table(results: Results) -> str:
    """Samples that repeat a state before the free phase is over, and how far the others still move."""
    headings = ["experiment", "weights", "schedule", "T", "samples at rest", "residual, median", "largest"]
    told = []
    for name, found in results.rests.items():
        lines = [
            (
                *(row[key] for key in ("name", "weights", "schedule")),
                str(row["T"]),
                f"{row['at_rest']} of {row['samples']}",
                f"{row['residual_median']:.1e}",
                f"{row['residual_max']:.1e}",
            )
            for row in found["rest"]
        ]
        machine = found["machine"]
        where = f"{place(machine)}, torch {machine['torch']}, seed {found['seed']}"
        source = f"(`results/bench/{name}.json`, commit {(machine['commit'] or 'unknown')[:12]})"
        told.append(f"{table(headings, lines, words=3)}\n\n{where} {source}")
    return "\n\n".join(told) or NOTHING


BLOCKS: dict[str, Callable[[Results], str]] = {
    "work": work_table,
    "floors": floors_table,
    "results": results_table,
    "rest": rest_table,
    "table1": projection_table,
    "scaling": scaling_figures,
}


def makers(results: Results) -> dict[str, Callable[[], str]]:
    return {name: partial(make, results) for name, make in BLOCKS.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fill docs/performance.md from results/bench/*.json.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the page is not current")
    given = parser.parse_args(arguments)
    results = Results(RESULTS)
    write_or_check(PAGE, makers(results), given.check)
    for name, found in results.scalings.items():
        figure = HERE / f"performance-{name}.svg"
        if not given.check:
            draw(found, figure)
        elif not figure.is_file():
            sys.exit(f"There is no {figure.name}. Run: python docs/make_performance_page.py")


if __name__ == "__main__":
    main()
