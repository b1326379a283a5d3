"""eqprop list: the experiments on one screen, or the parts that they are made of."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eqprop import papers
from eqprop.cli import command
from eqprop.cli.common import Json, check_json, give_json, new_console
from eqprop.run.spec import Spec
from eqprop.run.watch import counted

TABLE_2 = ("toy", "EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h", "P-conv")
"""As the paper prints it."""


@command("list", "eqprop list --all", "eqprop list --parts")
def list_experiments(
    everything: Annotated[
        bool, typer.Option("--all", metavar="", help="Also other papers' experiments, and every preset.")
    ] = False,
    parts: Annotated[
        bool, typer.Option("--parts", metavar="", help="List estimators, engines, costs, data sets, ... instead.")
    ] = False,
    as_json: Json = None,
) -> None:
    """List the experiments, or the parts that they are made of.

    Without options those of the paper: Table 1 (eqprop train) and Table 2 (eqprop gdu).
    """
    check_json(as_json)
    if parts:
        _list_parts(as_json)
        return
    names = papers.names() if everything else papers.of_paper()
    trained = [spec for name in names if (spec := papers.find(name)).preset not in papers.COMPARED]
    compared = sorted(papers.specs("gdu").values(), key=lambda spec: (*TABLE_2, spec.name).index(spec.name))
    if as_json is not None:
        found = {"trained": trained, "compared": compared}
        give_json({kind: {spec.name: spec.to_dict() for spec in specs} for kind, specs in found.items()}, as_json)
        if as_json == "-":
            return
    console = new_console()
    console.print(_trained(trained, everything))
    console.print(_compared(compared))
    if everything:
        for line in (*_presets(), *_literature()):
            console.print(line, soft_wrap=True)
        return
    console.print("EP and BPTT: published test errors, train errors in brackets.")
    others = counted(len(papers.names()) - len({*names, *(spec.name for spec in compared)}), "experiment")
    console.print(f"{others} of other papers: eqprop list --all. All settings: eqprop show NAME.")


def _trained(specs: Iterable[Spec], everything: bool) -> Table:
    title = "Table 1 of the paper, and other papers" if everything else "Table 1 of the paper"
    table = _table(f"{title}: eqprop train NAME", ("name",), ("T", "K", "beta", "epochs", "EP, %", "BPTT, %"))
    if everything:
        table.add_column("network")
    for spec in specs:
        phases, results = spec.phases, dict(spec.results)
        bptt = results.pop("bptt", "-")
        ep = ", ".join(map(str, results.values())) or "-"
        numbers = (phases.T, phases.K, f"{phases.beta:g}", spec.optimizer.epochs, ep, bptt)
        table.add_row(spec.name, *map(str, numbers), *([str(spec.model)] if everything else []))
    return table


def _compared(specs: Iterable[Spec]) -> Table:
    table = _table("Table 2 of the paper: eqprop gdu NAME", ("name", "network"), ("T", "K", "beta", "eps"))
    table.add_column("activation")
    for spec in specs:
        net: Any = spec.model
        eps = getattr(net, "eps", None)
        numbers = (spec.phases.T, spec.phases.K, f"{spec.phases.beta:g}", "-" if eps is None else f"{eps:g}")
        table.add_row(spec.name, str(net), *map(str, numbers), net.activation)
    return table


def _table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True
    )
    for heading in names:
        table.add_column(heading, no_wrap=heading == "name")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _presets() -> Iterator[str]:
    """What each preset changes."""
    for name in papers.names():
        first, *others = papers.presets(name)
        for preset in others:
            changes = papers.find(name, preset).changes(papers.find(name, first))
            yield f"{name} --preset {preset}: {', '.join(map(str, changes)) or 'the same settings'}"


def _literature() -> Iterator[str]:
    """Results that the paper's table cites and no experiment trains."""
    for row in papers.literature():
        if row.experiment is None:
            steps = f"T {row.T}" + ("" if row.K is None else f", K {row.K}")
            yield f"Also in Table 1, but no experiment here: {row.source}, {row.result} %, {steps}, {row.epochs} epochs"


def _list_parts(as_json: str | None) -> None:
    from eqprop.plugins import KINDS, origins

    # A table is known once its module is imported.
    for module in ("engines", "run.spec", "data", "run.watch"):
        importlib.import_module(f"eqprop.{module}")
    found = {kind: origins(kind) for kind in KINDS}
    give_json(found, as_json)
    if as_json == "-":
        return
    table = Table(title="Parts; register your own with eqprop.register or by an entry point")
    for heading in ("kind", "name", "from"):
        table.add_column(heading)
    for kind, names in found.items():
        for n, (name, origin) in enumerate(names.items()):
            table.add_row("" if n else kind, name, origin, end_section=n == len(names) - 1)
    new_console().print(table)
