"""eqprop sweep: how good a device must be."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eqprop.cli import command
from eqprop.cli.common import (
    Experiment,
    Json,
    Preset,
    Quiet,
    bars,
    check_json,
    check_out,
    give_json,
    new_console,
    one_process,
    stopping,
)
from eqprop.cli.options import with_settings
from eqprop.report.figures import save, write_figure
from eqprop.report.sweep import WORDS, cosines_of, errors_of, sweep_figure
from eqprop.run.own import own_code
from eqprop.run.sweep import sweep, values_of

FIGURE = "sweep"
PANEL = "Swept, one or two: FIRST:LAST:COUNT, or values such as 4,6,8"
SETTINGS = (
    *("machine", "imperfections", "machine_options", "T", "K", "beta", "estimator", "rates", "batch", "epochs", "data"),
    *("samples", "test_samples", "validation", "seed", "trials", "device", "engine"),
)


def _axis(what: str, *flags: str) -> Any:
    return typer.Option(*flags, metavar="VALUES", help=what, rich_help_panel=PANEL)


@command(
    "sweep",
    "eqprop sweep P-1h --noise 0:0.1:5 --weight-bits 4,6,8,10 --samples 2000 --epochs 5 --out sweep",
    "eqprop sweep drn-xs --mismatch 0:0.5:6 --trials 3 --epochs 1",
)
@with_settings(*SETTINGS)
def sweep_devices(
    experiment: Experiment,
    settings: dict[str, Any],
    noise: Annotated[str | None, _axis("Noise of every neuron at every step.", "--noise", "--state-noise")] = None,
    read_noise: Annotated[str | None, _axis("Noise of readings.", "--read-noise")] = None,
    weight_bits: Annotated[str | None, _axis("Bits of weights; none: no grid.", "--weight-bits")] = None,
    state_bits: Annotated[str | None, _axis("Bits of neurons at every step.", "--state-bits")] = None,
    read_bits: Annotated[str | None, _axis("Bits of readings.", "--read-bits")] = None,
    weight_limit: Annotated[str | None, _axis("Limit of weights.", "--weight-limit")] = None,
    mismatch: Annotated[str | None, _axis("Spread of the weights, fixed per device.", "--mismatch")] = None,
    drift: Annotated[str | None, _axis("Spread that is added with each write.", "--drift")] = None,
    missing: Annotated[str | None, _axis("Share of weights that are 0.", "--missing")] = None,
    asymmetry: Annotated[str | None, _axis("Difference between updates up and down.", "--asymmetry")] = None,
    preset: Preset = None,
    out: Annotated[Path | None, typer.Option(help=r"Folder. \[default: sweeps/NAME]")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Points trained at a time; one per core by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """How good must a device be? Train a net on devices that differ in one or two imperfections. Resumable.

    Every device begins with the same weights and mini-batches. Writes FOLDER/sweep.json and a picture: the test error,
    and the cosine of EP's gradient on the device with the exact one of the perfect net with the same weights.
    --imperfect gives imperfections that all devices share.
    """
    given = {"state_noise": noise, "read_noise": read_noise, "weight_bits": weight_bits, "state_bits": state_bits}
    given |= {"read_bits": read_bits, "weight_limit": weight_limit, "mismatch": mismatch, "drift": drift}
    given |= {"missing": missing, "asymmetry": asymmetry}
    one_process("sweep")
    check_json(as_json)
    check_out(out)
    axes = {name: values_of(name, text) for name, text in given.items() if text is not None}
    folder = out or Path("sweeps") / Path(experiment.partition(":")[0]).stem
    with stopping(), own_code(experiment), bars() as progress:
        task = progress.add_task("points", total=1.0, visible=not quiet)

        def watch(done: int, total: int, record: Mapping[str, Any]) -> None:
            progress.update(task, completed=done / total)

        document = sweep(experiment, axes, folder, jobs=jobs, watch=watch, preset=preset, **settings)
    write_figure(folder / FIGURE, save(sweep_figure(document)))
    give_json(document, as_json)
    if as_json != "-" and not quiet:
        _show(document, folder)


def _show(document: Mapping[str, Any], folder: Path) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{document['name']} on imperfect devices")
    for name in document["axes"]:
        table.add_column(WORDS[name], justify="right")
    for heading in ("test error", "cosine with the exact gradient"):
        table.add_column(heading, justify="right")
    for point in document["points"]:
        cells = ["none" if v is None else f"{v:g}" for v in point["at"].values()]
        errors, cosines = errors_of(point), cosines_of(point)
        table.add_row(
            *cells,
            f"{sum(errors) / len(errors):.2f} %" if errors else "diverged",
            f"{sum(cosines) / len(cosines):.3f}" if cosines else "–",
        )
    console = new_console(file=sys.stdout)
    console.print(table)
    console.print(f"Record and picture: {folder}/sweep.json, {folder}/{FIGURE}.png", soft_wrap=True)
