"""A comparison for the eye: a table, the error budget, and the sentence that names what limits the match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eqprop.gdu.release import Release
from eqprop.gdu.shares import Shares

PARTS = ("residual", "finite_beta", "output_slope", "asymmetry", "rounding", "unsettled")
KINDS = ("neurons", "synapses", "biases")


def show(document: Mapping[str, Any], console: Console) -> None:
    console.print(Text(_heading(document), style="bold"))
    console.print(Text(_settling(document)))
    console.print(_metrics(document))
    console.print(_budget(document))
    console.print(Text(_jacobian(document)))
    if "release" in document:  # a document of an earlier version has none
        console.print(Text(str(Release(**document["release"]))))
    if document.get("shares"):
        console.print(Text(str(Shares(**document["shares"]))))
    console.print(Text(document["budget"]["verdict"], style="bold"))


def _heading(d: Mapping[str, Any]) -> str:
    turns = " alternating" if d.get("schedule") == "alternating" else ""
    phases = f"T = {d['T']}{turns}, K = {d['K']}, beta = {d['beta']:g}"
    if d.get("nudge") == "inside":
        phases += " inside sigma"
    if d.get("cost", "squared-error") != "squared-error":
        phases += f", {d['cost']}"
    what = f"{d['name']} ({d['preset']}{_training(d['trained']) if 'trained' in d else ''})"
    return f"{what}: {phases}, {d['samples']} samples, {d['dtype']}, {d['seconds']:.1f} s"


def _training(trained: Mapping[str, Any]) -> str:
    n = trained.get("epochs")  # a document of an earlier version has none
    long = "" if n is None else f" for {n} epoch{'s' if n != 1 else ''}"
    return f", trained by {trained['method']}{long}, trial {trained['trial']}"


def _settling(d: Mapping[str, Any]) -> str:
    r = d["residual"]
    state = "all samples settled" if not r["unsettled"] else f"{r['unsettled']} of {d['batch']} samples NOT settled"
    dropped = f", {r['dropped']} left out" if r["dropped"] else ""
    return f"residual: max {r['max']:.1e}, median {r['median']:.1e} after {d['steps']} steps; {state}{dropped}"


def _metrics(d: Mapping[str, Any]) -> Table:
    title = "EP's updates against BPTT's gradients"
    if d["settled"]:
        title += " (settled: the RMSE of the settled samples alone)"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("group")
    settled = d["settled"]
    for heading in ("RMSE", *(["settled"] if settled else []), "cumulative", "sign", "cosine", "norm", "left out"):
        table.add_column(heading, justify="right")
    for kind in KINDS:
        for name, m in d[kind].items():
            left_out = f"{m['left_out']} of {m['elements']}" if m["left_out"] else "-"
            rest = [_short(settled[kind][name]["rmse"])] if settled else []
            figures = [_short(m["rmse_cumulative"]), _fixed(m["sign"]), _fixed(m["cosine"]), _short(m["norm"])]
            table.add_row(name, _short(m["rmse"]), *rest, *figures, left_out)
        table.add_section()
    return table


def _budget(d: Mapping[str, Any]) -> Table:
    title = "Error budget: parts of the RMSE (means over groups; together no less than it)"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("")
    for heading in ("RMSE", *PARTS):
        table.add_column(heading.replace("_", "\n"), justify="right")
    for kind in ("neurons", "synapses"):
        parts = d["budget"]["parts"][kind]
        table.add_row(kind, _short(parts["rmse"]), *(_short(parts[name]) for name in PARTS))
    return table


def _jacobian(d: Mapping[str, Any]) -> str:
    b = d["budget"]
    radius = b["spectral_radius"]
    contracts = "contracts" if radius < 1.0 else "does not contract"
    return (
        f"Jacobian: asymmetry {b['asymmetry']:.1e} (0 symmetric, 1 antisymmetric), spectral radius {radius:.4f} "
        f"({contracts}); saturated neurons: {100 * b['saturated']:.1f} %"
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
