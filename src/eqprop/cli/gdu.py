"""eqprop gdu: check an experiment by name, your own net, or a trained run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from eqprop import papers
from eqprop.cli import command
from eqprop.cli.common import (
    Examined,
    Json,
    OfRun,
    Trial,
    check_json,
    check_out,
    give_json,
    new_console,
    progress_bar,
)
from eqprop.cli.options import factory, with_settings
from eqprop.engines.base import PRECISIONS
from eqprop.messages import unknown
from eqprop.provenance import provenance
from eqprop.run.laboratory import Weights, compare, find_problem, lost_in, nudging_table
from eqprop.run.own import own_code
from eqprop.run.spec import declared
from eqprop.run.watch import counted

DTYPES = {"float64": torch.float64, "float32": torch.float32}
KEPT = ("batch", "seed", "device", "threads", "precision", "form")
OF_TRAINING = [f.flat for f in declared() if f.section in ("estimator", "optimizer", "run") and f.flat not in KEPT]
"""Settings that a comparison does not have, of sections from which it keeps only a few."""


@command("gdu", "eqprop gdu EB-1h --T 400", "eqprop gdu my.py:build --T 1000 --K 20 --beta 0.01 --out mine")
@with_settings(without=OF_TRAINING, defaults=False)
def gdu(
    target: Examined,
    settings: dict[str, Any],
    preset: Annotated[str | None, typer.Option(help=r"gdu, gdu-authors, paper, ... \[default: gdu]")] = None,
    dtype: Annotated[str, typer.Option(hidden=True, help="float64 or float32.")] = "float64",
    drop_unsettled: Annotated[
        bool, typer.Option("--drop-unsettled", metavar="", hidden=True, help="Omit samples that have not settled.")
    ] = False,
    nudging: Annotated[
        str | None, typer.Option(help="all, or positive,centered, ...: compare nudging rules by beta instead.")
    ] = None,
    estimator: OfRun = None,
    trial: Trial = None,
    out: Annotated[Path | None, typer.Option(help="Folder for gdu.json, traces.json and figures/.")] = None,
    json: Json = None,
) -> None:
    """Does EP compute the gradient of this model, and if not, why?

    Compares EP's updates with BPTT's gradients, step by step and layer by layer, and splits the error into its causes.
    An experiment of Table 2 (toy, EB-1h, EB-2h, EB-3h, P-1h, P-2h, P-3h, P-conv) runs with the settings of that table,
    its preset gdu; a net of your own with T 1000, K 20, beta 0.01; a run folder with its own weights and settings.
    --precision NAME also says how much of the update is lost with products in that precision. --nudging all compares
    nudging rules with the exact gradient at rest instead, and prints the order of their bias in beta.
    """
    check_json(json)
    check_out(out)
    if dtype not in DTYPES:
        raise ValueError(unknown("dtype", dtype, DTYPES))
    precision = settings.pop("precision", None)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(unknown("precision", precision, PRECISIONS))
    if preset is None and "gdu" in papers.presets(papers.known_name(target) or ""):
        preset = "gdu"
    console = new_console(file=sys.stderr if json == "-" else sys.stdout)
    with own_code(settings.get("function") or target):
        weights = Weights(estimator, trial)
        subject = find_problem(target, preset, settings, factory(settings), weights, DTYPES[dtype], trains=False)
        if nudging is not None:
            table = nudging_table(subject, nudging)
            console.print(Text(str(table)), soft_wrap=True)
            give_json(
                {"name": subject.spec.name, **table.to_dict(), "provenance": provenance(subject.problem.x.device)}, json
            )
            return
        with progress_bar(subject.spec.name) as tell:
            document, report = compare(subject, drop_unsettled=drop_unsettled, progress=tell)
        if precision is not None:
            document["precision"] = lost_in(subject, precision)
    if out is not None:
        from eqprop.report.gdu import write_folder

        write_folder(out, document, report.traces_to_dict())
    console.print(Text(_heading(document), style="bold"))
    if precision is not None:
        console.print(_precision(document["precision"]))
    console.print(Text(str(report)), soft_wrap=True)
    if out is not None:
        console.print(Text(f"Figures as PNG and PDF: {out / 'figures'}"))
    give_json(document, json)


def _heading(d: Mapping[str, Any]) -> str:
    """What the report itself does not know: which experiment this is, and what its net has been through."""
    said = [{"inside": "nudge inside sigma", "implicit": "implicit nudge"}.get(d["nudge_site"], "")]
    said += ["difference form" if d.get("form") == "difference" else ""]
    said += [d["cost"] if d["cost"] != "squared-error" else "", f"{d['seconds']:.1f} s"]
    what = f"{d['name']} ({d['preset']}{_training(d['trained']) if 'trained' in d else ''})"
    return f"{what}: {', '.join(filter(None, said))}"


def _training(trained: Mapping[str, Any]) -> str:
    return f", trained by {trained['estimator']} for {counted(trained['epochs'], 'epoch')}, trial {trained['trial']}"


def _precision(found: Mapping[str, Any]) -> Table:
    what = f"nudging {found['nudging']}, {found['form']} form"
    title = f"EP's update, {what}, with products in {found['declared']}, against float32's"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("parameter")
    for heading in ("cosine", "norm", "float32 with float64: cosine", "norm"):
        table.add_column(heading, justify="right")
    for name, one in found["with_float32"].items():
        itself = found["float32_with_float64"][name]
        values = [part[what] for part in (one, itself) for what in ("cosine", "norm")]
        table.add_row(name, *("-" if value is None else f"{value:.4f}" for value in values))
    return table
