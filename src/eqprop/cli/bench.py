"""eqprop bench."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from eqprop.benchmarks.command import Request, check_target, device_named, exit_code, words
from eqprop.benchmarks.measure import Effort, measure
from eqprop.benchmarks.scaling import AXES, Curves, measure_scaling
from eqprop.cli import app
from eqprop.cli.options import Preset, Threads, give_json

DEFAULT = Effort()


@app.command("bench")
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Records. [default: all six]")] = None,
    method: Annotated[str, typer.Option(help="ep, bptt, or both joined by a comma.")] = "ep,bptt",
    engine: Annotated[str, typer.Option(help="Engines by name, joined by commas.")] = "auto",
    schedule: Annotated[str, typer.Option(help="synchronous, alternating, or both.")] = "synchronous",
    stop: Annotated[str, typer.Option(help="never, settled, or both.")] = "never",
    trials: Annotated[int, typer.Option(help="Networks side by side.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: cuda if there is one]")] = None,
    preset: Preset = "paper",
    table1: Annotated[bool, typer.Option("--table1", help="Project the time of the whole of Table 1.")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Curves over batch, depth, width and trials.")] = False,
    rounds: Annotated[int, typer.Option(help="Chunks timed for each engine.")] = DEFAULT.rounds,
    plain_rounds: Annotated[int, typer.Option(help="Chunks timed for the plain twin.")] = DEFAULT.plain_rounds,
    chunk_seconds: Annotated[float, typer.Option(help="About how long a chunk takes.")] = DEFAULT.chunk_seconds,
    check_iterations: Annotated[int, typer.Option(help="Of the correctness check.")] = DEFAULT.check_iterations,
    trained: Annotated[int, typer.Option(help="Iterations before a settled stop is timed.")] = DEFAULT.trained,
    threads: Threads = None,
    as_json: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="The result as JSON.")] = None,
) -> None:
    """Time every engine against the plain twin: the paper's algorithm written the obvious way.

    An engine is checked first; one that is not as good as float32 gets no ratio, and the command ends with code 1.
    """
    check_target(as_json)
    _set_threads(threads)
    screen = Console(stderr=as_json == "-")
    effort = Effort(rounds, plain_rounds, chunk_seconds, check_iterations, trained)
    if scaling:
        curves = Curves(words(engine), device_named(device), effort=effort)
        result = measure_scaling(curves, screen.print)
        give_json(result, as_json)
        screen.print(scaling_table(result))
        return
    request = Request(
        tuple(names or ()), method, engine, schedule, stop, trials, device, preset, table1=table1, effort=effort
    )
    plan = request.plan()
    with screen.status("Measuring") as status:
        result = measure(plan, lambda text: status.update(text))
    give_json(result, as_json)
    show(screen, result)
    if exit_code(result):
        raise typer.Exit(exit_code(result))


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"--threads is {threads}; expected 1 or more.")
    import torch

    torch.set_num_threads(threads)


def show(screen: Console, result: dict[str, Any]) -> None:
    """The result for people: a line a row, then what was skipped, the tolerance and the projection."""
    if result["interrupted"]:
        screen.print("Interrupted: these are the rows that were finished.", style="red")
    screen.print(rows_table(result))
    # A reason may hold for several schedules and stops; it is told once.
    told = {f"{s['name']} {s['method']}, {s['engine']}: {s['reason']}": None for s in result["skipped"]}
    for text in told:
        screen.print(text, highlight=False)
    for row in result["rows"]:
        if row["refused"]:
            screen.print(f"{row['name']} {row['method']}, {row['engine']}: no ratio: {row['refused']}", style="red")
    screen.print(result["tolerance"], style="dim", highlight=False)
    for title, key in (("all steps", "all_steps"), ("all exact means", "all_exact_means")):
        if "table1" in result:
            screen.print(f"Table 1, {title}: {projection(result['table1'][key])}", highlight=False)


def rows_table(result: dict[str, Any]) -> Table:
    machine = result["machine"]
    place = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    trials = max((row["trials"] for row in result["rows"]), default=1)
    title = f"{place}, torch {machine['torch']}; {trials} network{'s' * (trials > 1)} side by side; medians ± spread"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("record", no_wrap=True)
    table.add_column("engine", min_width=12, overflow="fold")
    for heading in ("us/iteration", "us/step", "plain us", "ratio", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        ratio = "--" if row["speedup"] is None else f"{row['speedup']:.1f}"
        error = "--" if row["max_error"] is None else f"{row['max_error']:.0e}"
        table.add_row(
            f"{row['name']} {row['method']}",
            how(row),
            f"{row['us_per_iteration']:,.0f} ± {row['spread_us'] / row['us_per_iteration']:.0%}",
            f"{row['us_per_step']:.2f}",
            f"{row['plain_us_per_iteration']:,.0f}",
            ratio,
            error,
        )
    return table


def how(row: dict[str, Any]) -> str:
    """The engine, and what is not the ordinary way."""
    said = [row["engine"]]
    if row["schedule"] != "synchronous":
        said.append(row["schedule"])
    if row["stop"] == "settled":
        said.append(f"settled ({row['weights']})")
    return ", ".join(said)


def projection(total: dict[str, Any]) -> str:
    if total["seconds"] is None:
        return f"open, without {', '.join(total['missing'])}"
    seconds = total["seconds"]
    return f"{seconds / 60:.1f} minutes" if seconds < 36_000 else f"{seconds / 3600:.1f} hours"


def scaling_table(result: dict[str, Any]) -> Table:
    table = Table(title="us per iteration")
    for heading in ("axis", *AXES, "engine"):
        table.add_column(heading)
    table.add_column("us/iteration", justify="right")
    for point in result["scaling"]:
        table.add_row(
            point["axis"],
            *(str(point[axis]) for axis in AXES),
            point["engine"],
            f"{point['us_per_iteration']:,.0f} ± {point['spread_us']:,.0f}",
        )
    return table
