"""Physical networks: the blocks of docs/physical.md."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from docs.build.results import Document, documents, flat
from docs.build.text import number, table
from eqprop.report.runs import machine
from eqprop.report.sweep import WORDS, cosines_of, errors_of
from eqprop.report.sweep import sweep_figure as drawn


def training_block() -> str:
    """A line per run: what was trained, on which device, and the error after each run's last epoch."""
    lines = []
    for d in documents("runs/physical.json"):
        e = flat(d["experiment"])
        for name, own in d["estimators"].items():
            published = e["published"].get(name, "–")
            for t in own["trials"]:
                once = t.get("tested")  # where its epochs were followed on held-out images
                lines.append(
                    [
                        e["name"],
                        _device(d["experiment"]["machine"]),
                        f"{len(t['test_error'])} of {e['epochs']}",
                        t["seed"],
                        f"{once['error'] if once else t['test_error'][-1]:.2f}",
                        "–" if once else f"{min(t['test_error']):.2f}",
                        published,
                        f"{t['work']['settles']:,}" if "work" in t else "–",
                    ]
                )
    heads = ["experiment", "device", "epochs", "seed", "test error, %", "best epoch", "published", "settles"]
    return table(heads, lines, words=2)


def _device(found: Document) -> str:
    kind, faults = found["kind"], found.get("imperfections") or {}
    names = ("weight_bits", "read_bits", "state_bits", "read_noise", "state_noise")
    words = [f"{name.replace('_', ' ')} {faults[name]:g}" for name in names if faults.get(name)]
    return ", ".join([*([] if kind == "none" else [kind]), *words]) or "perfect"


def held_out_block() -> str:
    """Settings of the quantised oscillators, by their error on held-out images."""
    (found,) = documents("physical/oscillators.json")
    lines = [
        [row["device"], f"{row['beta']:g}", row["K"], f"{row['rate']:g}", f"{row['error'][-1]:.2f}"]
        for row in found["rows"]
    ]
    return f"{table(['device', 'beta', 'K', 'rate', 'held-out error, %'], lines)}\n\n{machine(found['provenance'])}."


def ising_block() -> str:
    """The Ising net's settings, by its error on held-out images."""
    (found,) = documents("physical/ising.json")
    epochs = (5, 10, 15, 20, 24)
    lines = [
        [f"{row['average']:g}", row["crop"] or "none", *(f"{row['held_out_error'][n - 1]:.1f}" for n in epochs)]
        for row in found["rows"]
    ]
    heads = ["average", "shift, pixels", *(f"epoch {n}" for n in epochs)]
    return f"{table(heads, lines)}\n\n{machine(found['provenance'])}, seed 0."


def sweep_figure() -> Figure:
    """Errors and cosines over noise and bits."""
    return drawn(documents("physical/sweep.json")[0])


def sweep_block() -> str:
    """Test errors and cosines over noise and bits, and how long the sweep took."""
    (found,) = documents("physical/sweep.json")
    (down, rows), (across, columns) = found["axes"].items()
    at = {(p["at"][down], p["at"][across]): p for p in found["points"]}
    lines = []
    for row in rows:
        cells = [_point(at[row, column]) for column in columns]
        lines.append([f"{row:g}", *cells])
    heads = [f"{WORDS[down]} \\ {WORDS[across]}", *(f"{column:g}" for column in columns)]
    spec, seconds = found["spec"], sum(p["cpu_seconds"] for p in found["points"])
    text = (
        f"{spec['data']['samples']:,} images, {spec['optimizer']['epochs']} epochs, seed {spec['run']['seed']}: "
        f"{len(at)} trainings of {seconds / 60:.1f} CPU-minutes together, {found['seconds'] / 60:.1f} minutes on "
        f"{found['jobs']} cores ({found['provenance']['processor']})."
    )
    return f"{table(heads, lines)}\n\n{text}"


def _point(found: Document) -> str:
    (error,), (cosine,) = errors_of(found), cosines_of(found)
    return f"{error:.1f} ({cosine:.2f})"


def spice_block() -> str:
    (found,) = documents("physical/spice.json")
    worst = {
        diodes: {phase: max(one[diodes][phase][key] for one in found["nets"]) for phase in ("free", "nudged")}
        for diodes, key in (("ideal", "own"), ("real", "volts"))
    }
    lines = [
        ["ideal diodes: worst node, of its own voltage", *map(number, worst["ideal"].values())],
        ["1N4148: worst node, volts", *map(number, worst["real"].values())],
    ]
    trained: dict[str, Any] = found["training"]
    apart = max(trained["apart"].values())
    text = (
        f"{len(found['nets'])} random nets, {sum(one['nodes'] for one in found['nets']):,} nodes; {found['ngspice']}, "
        f"{machine(found['provenance'])}. After {trained['iterations']} iterations of drn-xs with ngspice as the "
        f"network ({trained['work']['settles']} settles) the weights differ from ours by at most {apart:.1e} of how "
        "far they moved."
    )
    return f"{table(['ngspice against eqprop', 'free', 'nudged'], lines)}\n\n{text}"
