"""eqprop list."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eqprop.cli import app
from eqprop.cli.common import (
    Json,
    Preset,
    check_json,
    give_json,
)
from eqprop.experiments.architecture import LayeredNet
from eqprop.experiments.experiment import Record
from eqprop.experiments.io import find_record, to_plain
from eqprop.experiments.literature import LITERATURE
from eqprop.experiments.paper import PRESETS, RECORDS, printed_record


@app.command("list")
def list_records(
    name: Annotated[str | None, typer.Argument(help="One record, in full.")] = None,
    preset: Preset = "paper",
    as_json: Json = None,
) -> None:
    """The records: what each is, its settings, what the paper reports."""
    check_json(as_json)
    chosen = [find_record(name, preset)] if name else list(_preset(preset).values())
    if as_json is not None:
        give_json({record.name: to_plain(record) for record in chosen}, as_json)
        if as_json == "-":
            return
    console = Console()
    console.print(_table(chosen, preset))
    if name:
        console.print(json.dumps(to_plain(chosen[0]), indent=2), highlight=False)
    _show_changes(console, [record.name for record in chosen])
    if not name:
        _show_literature(console)


def _show_literature(console: Console) -> None:
    for row in LITERATURE:
        if row.record is None:
            steps = f"T {row.T}" + ("" if row.K is None else f"  K {row.K}")
            said = f"{row.source}, {row.errors} %, {steps}  {row.epochs} epochs"
            console.print(f"In the paper's table as well, not a record: {said}", highlight=False, soft_wrap=True)


def _show_changes(console: Console, names: list[str]) -> None:
    for other in PRESETS[1:]:
        for record in RECORDS[other].values():
            printed = printed_record(record)
            if record.name in names and printed is not None:
                changes = ", ".join(map(str, record.changes(printed)))
                console.print(f"--preset {other} {record.name}: {changes}", highlight=False, soft_wrap=True)


def _preset(preset: str) -> dict[str, Record]:
    if preset not in RECORDS:
        find_record("P-1h", preset)
    return RECORDS[preset]


def _table(records: list[Record], preset: str) -> Table:
    """Three lines a record, so that it fits a terminal of 80 columns."""
    table = Table(title=f"Records, preset {preset}", show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("network, steps, learning rates")
    table.add_column("paper, %: test (train)", no_wrap=True)
    for r in records:
        net = r.architecture
        eps = f"  ε {net.eps}" if isinstance(net, LayeredNet) and net.eps else ""
        reported = [f"{method.upper():4} {x}" for method, x in r.reported.items()]
        what = [
            f"{net}, {getattr(net, 'activation', 'own')}, {r.init}",
            f"T {r.T}  K {r.K}  β {r.beta}{eps}  {r.epochs} epochs",
            "  ".join(f"{name} {rate}" for name, rate in r.learning_rates.items()),
            *([", ".join(special)] if (special := _special(r)) else []),
        ]
        table.add_row(_broken(r.name), "\n".join(what), "\n".join(reported) or "--")
    return table


def _special(record: Record) -> list[str]:
    """What a record does otherwise than the paper's: how it begins, how it nudges."""
    start = [] if record.start == "zero" else [f"{record.start} start"]
    return start + ([] if record.estimator == "one-sided" else [record.estimator])


def _broken(name: str) -> str:
    """A long name on two lines, broken behind a hyphen, so that the other columns keep their width."""
    if len(name) <= 14 or "-" not in name:
        return name
    cut = min((i + 1 for i, c in enumerate(name) if c == "-"), key=lambda i: abs(i - len(name) / 2))
    return f"{name[:cut]}\n{name[cut:]}"
