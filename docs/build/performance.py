"""Times: the blocks of docs/performance.md and docs/kernels.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import precision
from benchmarks.floors import dependent_steps, floors, work
from docs.build.results import Document, documents
from docs.build.text import commit, duration, large, table
from eqprop import papers
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
    """A table per record of `benchmarks.precision`, and where it was made."""
    made, key, words = {"precision": (precision, "form", 3)}[what]
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


def peers_block(found: Document | None = None) -> str:
    """A gradient by everybody who computes it, in CPU milliseconds."""
    one = documents("bench/peers.json")[0] if found is None else found
    names = list(dict.fromkeys(name for row in one["gradients"] for name in row["ms"]))
    heads = {
        "ours": "`ep.backward`",
        "torch": "a loop in torch",
        "jax": "JAX, grad, jit",
        "numpy": "numpy, formulas",
    }
    lines = []
    for row in one["gradients"]:
        times = [large(row["ms"][name]) if name in row["ms"] else "–" for name in names]
        worst = max((off for name, off in row["off"].items() if name == "ours"), default=0.0)
        lines.append([row["name"], row["batch"], *times, f"{row['ours/jax']:.2f}", f"{worst:.0e}"])
    titles = ["gradient", "batch", *(heads.get(name, name) for name in names), "ours / JAX", "off by"]
    made = one["provenance"]
    note = f"CPU ms, T = {one['settings']['T']}, K = {one['settings']['K']}; {place(made)}, commit {commit(made)}."
    return f"{table(titles, lines)}\n\n{note}"


def loops_block(found: Document | None = None) -> str:
    """Whole iterations by the loop of the README and by `train`, and first calls."""
    one = documents("bench/peers.json")[0] if found is None else found
    lines = [
        [row["name"], large(1e3 * row["ms"]["loop"]), large(1e3 * row["ms"]["train"]), f"{row[RATE]:.2f}"]
        for row in one["loops"]
    ]
    firsts = [[what, f"{seconds:.1f}"] for what, seconds in one["first_calls_s"].items()]
    heads = ["iteration", "loop with `ep.backward`: CPU µs", "`train`: CPU µs", "rate of the loop"]
    return f"{table(heads, lines)}\n\n{table(['a first gradient', 'CPU s, imports included'], firsts)}"


RATE = "loop's rate"
