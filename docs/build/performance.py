"""Times: the blocks and the picture of docs/performance.md and docs/kernels.md."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks import nets, precision
from benchmarks.floors import dependent_steps, floors, work
from docs.build.results import Document, documents
from docs.build.text import commit, duration, large, table
from eqprop import papers
from eqprop.report.figures import drawn, new_figure
from eqprop.report.runs import machine as place

CASE = ("name", "preset", "method", "schedule", "stop", "weights", "trials", "engine")
"""What a row measures."""
BOTH = ("ep", "bptt")


def machine(found: Document) -> str:
    made = found["machine"]
    return str(made["processor"] if made["device"] == "cpu" else made["device"])


def by_machine(found: Sequence[Document]) -> dict[str, list[Document]]:
    """Every row that was right, by machine; of a case measured twice the later one."""
    cases: dict[str, dict[tuple[object, ...], Document]] = {}
    for one in sorted((d for d in found if "preset" in d.get("rows", [{}])[0]), key=lambda d: d["machine"]["date"]):
        cases.setdefault(machine(one), {}).update({tuple(r[key] for key in CASE): r for r in one["rows"]})
    return {where: [r for r in rows.values() if r["speedup"] is not None] for where, rows in cases.items()}


def printed(rows: Sequence[Document], name: str, method: str) -> list[Document]:
    """The measurements of a network as printed, with the most trials side by side."""
    own = [r for r in rows if (r["name"], r["method"], r["preset"]) == (name, method, "paper")]
    most = max((r["trials"] for r in own), default=0)
    return [r for r in own if r["trials"] == most]


def expect_block(found: Sequence[Document] | None = None) -> str:
    """Per network the fastest training iteration on each machine, and how that compares with the obvious code."""
    machines = by_machine(documents("bench") if found is None else found)
    lines = []
    for name in papers.of_paper():
        for method in BOTH:
            cells = [f"{name} {method.upper()}"]
            for rows in machines.values():
                ran = [r for r in printed(rows, name, method) if r["stop"] == "never"]
                for r in sorted(ran, key=lambda r: r["us_per_iteration"])[:1]:
                    how = "" if r["schedule"] == "synchronous" else f" ({r['schedule']})"
                    cells += [large(r["us_per_iteration"]) + how, str(r["trials"]), large(r["speedup"])]
                cells += [] if ran else ["–"] * 3
            lines.append(cells)
    heads = [text for where in machines for text in (f"{where}: µs", "networks", "× obvious")]
    return table(["iteration", *heads], lines)


def projection_block(found: Sequence[Document] | None = None) -> str:
    """The time of Table 1, five trials each, on each machine."""
    files = [d for d in (documents("bench") if found is None else found) if "table1" in d]
    totals = [d["table1"]["all_exact_means"] for d in files]
    seconds = [{(p["name"], p["method"]): p["seconds"] for p in total["rows"]} for total in totals]
    lines = [
        [f"{name} {method.upper()}", *(duration(times.get((name, method))) for times in seconds)]
        for name in papers.of_paper()
        for method in BOTH
    ]
    lines.append(["**whole table**", *(duration(total["seconds"]) for total in totals)])
    note = "; ".join(f"{machine(d)}: torch {d['machine']['torch']}, commit {commit(d['machine'])}" for d in files)
    return f"{table(['row', *map(machine, files)], lines)}\n\n{note}."


def measured(what: str, found: Sequence[Document] | None = None) -> str:
    """A table per record of `benchmarks.nets`, or of `benchmarks.precision`, and where it was made."""
    made, key, words = {"nets": (nets, "naive_cosine", 2), "precision": (precision, "form", 3)}[what]
    files = [d for d in (documents("bench") if found is None else found) if key in d.get("rows", [{}])[0]]
    notes = [f"{place(m := d['machine'])}: torch {m['torch']}, commit {commit(m)}." for d in files]
    return "\n\n".join(f"{table(*made.cells(d), words)}\n\n{note}" for d, note in zip(files, notes, strict=True))


def work_block() -> str:
    """What an iteration of one network has to do, from the sizes alone."""
    lines = []
    for experiment in papers.paper_rows().values():
        own = work(experiment)
        millions = [own.drive * experiment.optimizer.batch, own.step * experiment.optimizer.batch]
        millions += [own.flops(experiment, method, 1) for method in BOTH]
        steps = f"{experiment.phases.T} + {experiment.phases.K}"
        lines.append([experiment.name, steps, *(large(1e-6 * v) for v in millions), dependent_steps(experiment)])
    return table(["experiment", "T + K", "drive", "step", "EP", "BPTT", "dependent steps"], lines)


def floors_block(found: Sequence[Document] | None = None) -> str:
    """The two floors and what is reached with every step taken."""
    found = documents("bench") if found is None else found
    peaks, parts = {machine(d): d["peaks"] for d in found if "peaks" in d}, []
    for where, rows in by_machine(found).items():
        lines = []
        for name in papers.of_paper() if where in peaks else ():
            for method in BOTH:
                ran = printed(rows, name, method)
                if every := [r for r in ran if (r["schedule"], r["stop"]) == ("synchronous", "never")]:
                    best = min(every, key=lambda r: r["us_per_iteration"])
                    least = floors(papers.find(name), method, best["trials"], peaks[where])
                    reached, errors = best["us_per_iteration"], (best["max_error"], best["naive_max_error"])
                    cells = [f"{name} {method.upper()}", best["engine"], best["trials"], large(least.arithmetic)]
                    cells += [large(least.latency), f"{large(reached)} ± {large(best['spread_us'])}"]
                    lines.append([*cells, f"{reached / least.higher:.1f}", *(f"{e:.0e}" for e in errors)])
        if lines:
            heads = ["", "engine", "networks", "arithmetic", "latency", "reached", "× floor", "error", "torch's"]
            parts.append(f"**{where}**, µs per iteration\n\n{table(heads, lines, words=2)}")
    return "\n\n".join(parts)


@drawn
def scaling(net: str = "layered") -> Figure:
    """Microseconds per iteration over each size, a line per engine."""
    found = next(d for d in documents("bench") if "scaling" in d and d.get("net", "layered") == net)
    axes, figure = list(found["base"]), new_figure(10.0, 2.6)
    panels = figure.subplots(1, len(axes), sharey=True)
    for axis, panel in zip(axes, panels, strict=True):
        own = [p for p in found["scaling"] if p["axis"] == axis]
        for engine in dict.fromkeys(p["engine"] for p in own):
            points = [(p[axis], p["us_per_iteration"]) for p in own if p["engine"] == engine]
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=engine)
        ticks = sorted({p[axis] for p in own})
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.set_xticks(ticks, [str(t) for t in ticks])
        panel.minorticks_off()
    panels[0].set_ylabel("µs per iteration")
    panels[-1].legend(fontsize=8)
    return figure
