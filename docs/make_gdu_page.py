"""Fill the numbers into docs/gdu.md from the JSON under results/gdu: no number on that page is typed.

python docs/make_gdu_page.py            rewrite the marked blocks of docs/gdu.md
python docs/make_gdu_page.py --check    say whether they are up to date
python docs/make_gdu_page.py --time     time `eqprop gdu toy` from a cold start into results/gdu/timing.json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blocks import write_or_check

from eqprop.experiments.gdu import gdu_experiment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "gdu"
PAGE = ROOT / "docs" / "gdu.md"
NAMES = ("toy", "EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h", "P-conv")
PARTS = ("residual", "finite_beta", "output_slope", "asymmetry", "rounding", "unsettled")
SEEDS = (0, 1, 2, 3, 4)

Document = Mapping[str, Any]


def read(*path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RESULTS.joinpath(*path).read_text(encoding="utf-8"))
    return content


def experiment(name: str) -> dict[str, Any]:
    return read(name, "gdu.json")


def over_seeds(name: str) -> list[dict[str, Any]]:
    return [experiment(name) if seed == 0 else read("seeds", f"{name}-{seed}.json") for seed in SEEDS]


def number(value: float | None) -> str:
    """Two digits, as a reader writes them."""
    if value is None:
        return "–"
    if value == 0.0:
        return "0"
    return f"{value:.2g}" if 1e-3 <= abs(value) < 100 else f"{value:.0e}".replace("e-0", "e-")


def span(values: list[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} … {high}"


def errors(document: Document, kind: str, key: str = "rmse") -> list[float]:
    return [m[key] for m in document[kind].values() if m[key] is not None]


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(headings), " | ".join("---" for _ in headings), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def largest(document: Document, kind: str, among: tuple[str, ...] = PARTS) -> str:
    parts = {name: v for name in among if (v := document["budget"]["parts"][kind][name]) is not None}
    name = max(parts, key=lambda n: parts[n])
    return f"{name} {number(parts[name])}"


def experiments() -> list[tuple[str, dict[str, Any]]]:
    return [(name, experiment(name)) for name in NAMES]


def labelled() -> list[tuple[str, dict[str, Any]]]:
    """Every experiment, and each that has samples which have not settled once more without them."""
    found = []
    for name in NAMES:
        d = experiment(name)
        found.append((name, d))
        if d["settled"]:
            found.append((f"{name}, settled samples only", {**d, **d["settled"]}))
    return found


def results_block() -> str:
    rows = []
    for label, d in labelled():
        r = d["residual"]
        unsettled = f"{r['unsettled']} of {d['batch']}" if r["unsettled"] else "none"
        rows.append(
            [
                label,
                f"{number(r['max'])} / {number(r['median'])}",
                "left out" if label != d["name"] else unsettled,
                span(errors(d, "neurons")),
                span(errors(d, "synapses")),
                number(min(errors(d, "synapses", "sign"))),
                number(min(errors(d, "synapses", "cosine"))),
                released(d["release"]) if label == d["name"] else "–",
            ]
        )
    headings = ["experiment", "residual max / median", "not settled", "RMSE neurons", "RMSE synapses"]
    return table([*headings, "sign, worst", "cosine, worst", "tipped over"], rows)


def released(found: Mapping[str, Any]) -> str:
    """How many samples do not come back when the nudge lets them go, of those that had settled."""
    return f"{found['tipped']} of {found['samples']}" if found["tipped"] else "none"


def budget_block() -> str:
    rows = []
    for label, d in experiments():
        for kind in ("synapses", "neurons"):
            parts = d["budget"]["parts"][kind]
            rows.append([label, kind, number(parts["rmse"]), *(number(parts[name]) for name in PARTS)])
    return table(["experiment", "", "RMSE", *(name.replace("_", " ") for name in PARTS)], rows)


def jacobian_block() -> str:
    rows = []
    for label, d in experiments():
        b = d["budget"]
        percent = f"{100 * b['saturated']:.0f} %"
        rows.append([label, number(b["asymmetry"]), f"{b['spectral_radius']:.4f}", percent, b["outcome"]])
    return table(["experiment", "asymmetry of J", "spectral radius", "saturated neurons", "the GDU property"], rows)


def verdict_block() -> str:
    return "\n".join(f"- **{label}.** {d['budget']['verdict']}" for label, d in experiments())


def depth_block() -> str:
    """Root mean square of -nabla, layer by layer."""
    rows = []
    for name in NAMES:
        d = experiment(name)
        norms = {kind: " → ".join(number(m["norm"]) for m in d[kind].values()) for kind in ("neurons", "synapses")}
        rows.append([name, norms["neurons"], norms["synapses"]])
    return table(["experiment", "neurons, from the output", "synapses, from the output"], rows)


def paper_block() -> str:
    """Beside what the paper says, with the largest part of the error."""
    rows = []
    for label, d in labelled():
        said = gdu_experiment(d["name"]).paper_result if label == d["name"] else ""
        figures = f"neurons {span(errors(d, 'neurons'))}, synapses {span(errors(d, 'synapses'))}"
        causes = f"synapses: {largest(d, 'synapses')}; neurons: {largest(d, 'neurons')}"
        if label != d["name"]:
            causes = "; ".join(f"{kind}: {largest(d, kind, PARTS[:-1])}" for kind in ("synapses", "neurons"))
        rows.append([label, said, figures, causes])
    return table(["experiment", "the paper on the RMSE", "here", "largest part"], rows)


def precision_block() -> str:
    rows = []
    for name in ("EB-1h", "EB-2h", "EB-3h"):
        for label, d in (("float64", experiment(name)), ("float32", read("float32", f"{name}.json"))):
            figures = [span(errors(d, kind)) for kind in ("neurons", "synapses")]
            rows.append([name, label, number(d["residual"]["max"]), *figures, largest(d, "synapses")])
    return table(
        ["experiment", "dtype", "residual max", "RMSE neurons", "RMSE synapses", "largest part, synapses"], rows
    )


def authors_block() -> str:
    rows = []
    for name in NAMES:
        d = read("authors", f"{name}.json")
        shown = d["convention"]["synapses_shown"]
        figures = [span(errors(d, "neurons")), span(errors(d, "synapses", shown))]
        rows.append([name, str(d["batch"]), *figures, largest(d, "synapses")])
    return table(["experiment", "batch", "RMSE neurons", "RMSE synapses (cumulative)", "largest part, synapses"], rows)


def seeds_block() -> str:
    rows = []
    for name in ("EB-1h", "EB-2h", "P-1h", "P-2h", "P-3h", "P-conv"):
        found = over_seeds(name)
        means = [d["budget"]["parts"]["synapses"]["rmse"] for d in found]
        unsettled = [d["residual"]["unsettled"] for d in found]
        row = [name, ", ".join(number(v) for v in means), ", ".join(map(str, unsettled))]
        rows.append([*row, ", ".join(largest(d, "synapses").split()[0] for d in found)])
    return table(
        ["experiment", "mean RMSE of synapses, seeds 0–4", "samples not settled", "largest part, synapses"], rows
    )


def alternating_block() -> str:
    """The experiments with samples that go back and forth, their free phase both ways."""
    rows = []
    for name in ("P-2h", "P-3h"):
        for label, found in (("synchronous", over_seeds(name)), ("alternating", over_seeds(f"{name}-alternating"))):
            means = ", ".join(number(d["budget"]["parts"]["synapses"]["rmse"]) for d in found)
            unsettled = ", ".join(str(d["residual"]["unsettled"]) for d in found)
            outcomes = [d["budget"]["outcome"] for d in found]
            told = ", ".join(f"{o} ({outcomes.count(o)})" for o in dict.fromkeys(outcomes))
            worst = min(cosine for d in found for cosine in errors(d, "synapses", "cosine"))
            rows.append([name, label, means, unsettled, number(worst), told])
    heads = ["experiment", "free phase", "mean RMSE of synapses, seeds 0–4", "samples not settled", "cosine, worst"]
    made = experiment("P-3h-alternating")["provenance"]
    note = f"Alternating: {made['processor']}, torch {made['torch']}, commit {str(made['commit'])[:7]}."
    return f"{table([*heads, 'the GDU property'], rows)}\n\n{note}"


def must_hold_block() -> str:
    """Each promise with what was measured."""
    coarse, fine = experiment("toy"), read("toy-beta-0.001", "gdu.json")
    worst, tenth = (max(errors(d, "neurons") + errors(d, "synapses")) for d in (coarse, fine))
    rows: list[tuple[str, str, bool]] = [
        ("toy, beta 0.01: every group at most 2e-2", number(worst), worst <= 2e-2),
        ("toy, beta 0.001: ten times less", f"{number(tenth)} ({worst / tenth:.1f} times less)", tenth <= worst / 9.5),
    ]
    for name, limit, text in (
        ("EB-1h", 2e-2, "about 1e-2 or less"),
        ("EB-2h", 0.2, "about 1e-1 or less"),
        ("EB-3h", 0.2, "about 1e-1 or less"),
    ):
        found = max(errors(experiment(name), "neurons") + errors(experiment(name), "synapses"))
        rows.append((f"{name}: {text}", number(found), found <= limit))
    conv = errors(experiment("P-conv"), "synapses")
    rows.append(("P-conv: synapses a few 1e-1", span(conv), min(conv) >= 0.1 and max(conv) < 1.0))
    saw, smooth = _teeth("P-1h"), _teeth("EB-1h")
    rows.append(("saw teeth in P: BPTT exactly 0 at every other step", f"P-1h: {number(saw[0])}", saw[0] == 0.0))
    rows.append(("… EP of the order of beta there", f"P-1h: {number(saw[1])} of its largest step", saw[1] < 0.05))
    rows.append(("none in EB", f"EB-1h: {number(smooth[0])} of its largest step", smooth[0] > 0.05))
    timing = read("timing.json")
    cold, total = timing["toy_cold_start_seconds"], sum(experiment(name)["seconds"] for name in NAMES)
    rows.append(("`eqprop gdu toy` in under 15 s from a cold start", f"{cold:.1f} s", cold < 15))
    rows.append(("all eight experiments in under 10 minutes", f"{total / 60:.1f} minutes", total < 600))
    return table(["promise", "measured", ""], [[a, b, "holds" if ok else "**does not hold**"] for a, b, ok in rows])


def _teeth(name: str) -> tuple[float, float]:
    """Of the output layer of one sample, the largest value at odd t beside the largest of all: BPTT's and EP's.

    For the energy-based net the smallest instead, over the first ten steps: that there is no gap.
    """
    trace = read(name, "traces.json")["neurons"]["s0"]
    pick = max if name.startswith("P") else min
    bptt, ep = (pick(trace[k][1:10:2]) / max(trace[k]) for k in ("rms_bptt", "rms_ep"))
    return bptt, ep


def provenance_block() -> str:
    p, timing = experiment("EB-3h")["provenance"], read("timing.json")
    made = ", ".join(f"{name} {experiment(name)['seconds']:.0f} s" for name in NAMES)
    load = ", ".join(f"{v:.1f}" for v in timing["load_average"])
    return (
        f"Made with `{p['command']}`: eqprop {p['eqprop']} at commit `{p['commit']}`, torch {p['torch']}, Python "
        f"{p['python']}, {p['processor']}, {p['cores']} cores, {p['threads']} threads, {p['date'][:10]}. "
        f"Seconds an experiment: {made}. The cold start is the median of {timing['runs']} runs (load average {load})."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "results": results_block,
    "budget": budget_block,
    "jacobian": jacobian_block,
    "verdicts": verdict_block,
    "depth": depth_block,
    "paper": paper_block,
    "precision": precision_block,
    "authors": authors_block,
    "seeds": seeds_block,
    "alternating": alternating_block,
    "must hold": must_hold_block,
    "provenance": provenance_block,
}


def measure_cold_start(runs: int = 3) -> None:
    """`eqprop gdu toy` in a new process, as often as asked."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "eqprop", "gdu", "toy"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    content = {
        "toy_cold_start_seconds": statistics.median(seconds),
        "all": seconds,
        "runs": runs,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    (RESULTS / "timing.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"{statistics.median(seconds):.1f} s")


def main() -> None:
    if "--time" in sys.argv:
        measure_cold_start()
        return
    write_or_check(PAGE, BLOCKS, check="--check" in sys.argv)


if __name__ == "__main__":
    main()
