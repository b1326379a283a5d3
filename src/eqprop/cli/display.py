"""What commands show on a terminal: the live display of a run, progress bars, a GDU comparison as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from eqprop.experiments.experiment import label
from eqprop.gdu.free import Release
from eqprop.gdu.report import Concentration
from eqprop.training.metrics import Line
from eqprop.training.plan import Leg, Plan
from eqprop.training.watch import Progress, Watch, duration


class Display(Watch):
    """Redrawn in place; warnings and finished epochs scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.plan: Plan | None = None
        self.leg: Leg | None = None
        self.status = Progress(0, 0, (), 0.0, 0.0)
        self.tests: dict[tuple[str, int], tuple[float | None, float | None]] = {}
        self.bars = Bars(
            TextColumn("{task.description:>14}"), BarColumn(bar_width=None), MofNCompleteColumn(), expand=True
        )
        self.epochs: TaskID = self.bars.add_task("epochs")
        self.iterations: TaskID = self.bars.add_task("iterations")
        self.live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def begin(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        experiment, settings = plan.experiment, plan.settings
        phases = f"T={experiment.T} K={experiment.K} beta={experiment.beta}"
        self.console.print(
            f"[bold]{experiment.name}[/bold] ({experiment.preset})  {experiment.architecture}  {phases}  "
            f"{settings.device}  -> {folder}",
            highlight=False,
        )
        self.live.start()

    def begin_leg(self, leg: Leg, engine: str, epoch: int) -> None:
        assert self.plan is not None, "begin comes first"
        self.leg = leg
        self.bars.update(
            self.epochs, total=self.plan.experiment.epochs, completed=epoch, description=label(leg.estimator)
        )
        self.bars.update(self.iterations, total=self.plan.iterations, completed=0, description=engine)

    def progress(self, progress: Progress) -> None:
        self.status = progress
        self.bars.update(self.epochs, completed=progress.epoch)
        self.bars.update(self.iterations, completed=progress.iteration)

    def epoch(self, lines: Sequence[Line], progress: Progress) -> None:
        for line in lines:
            best = self.tests.get((line["estimator"], line["trial"]), (None, None))[1]
            error = line["test_error"]
            best = error if best is None or (error is not None and error < best) else best
            self.tests[line["estimator"], line["trial"]] = (error, best)
        self.progress(progress)

    def warn(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {message}", highlight=False)

    def end(self) -> None:
        self.live.stop()

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("trial", "train error, running", "test error", "lowest so far"):
            table.add_column(heading, justify="right")
        if self.leg is not None:
            running = self.status.train_errors or (None,) * len(self.leg.trials)
            for trial, error in zip(self.leg.trials, running, strict=True):
                test, best = self.tests.get((self.leg.estimator, trial), (None, None))
                table.add_row(str(trial), _percent(error), _percent(test), _percent(best))
        speed = f"{self.status.per_second:.3g} iterations/s, {duration(self.status.seconds_left)} left"
        return Group(self.bars, table, speed)


def _percent(value: float | None) -> str:
    return "--" if value is None else f"{value:.2f} %"


def bars() -> Bars:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar for one comparison; the function given is told the fraction done."""
    with bars() as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)


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
    if document.get("concentration"):
        console.print(Text(str(Concentration(**document["concentration"]))))
    console.print(Text(document["budget"]["verdict"], style="bold"))


def _heading(d: Mapping[str, Any]) -> str:
    turns = " alternating" if d.get("schedule") == "alternating" else ""
    phases = f"T = {d['T']}{turns}, K = {d['K']}, beta = {d['beta']:g}"
    if d.get("nudge_site") == "inside":
        phases += " inside sigma"
    if d.get("cost", "squared-error") != "squared-error":
        phases += f", {d['cost']}"
    what = f"{d['name']} ({d['preset']}{_training(d['trained']) if 'trained' in d else ''})"
    return f"{what}: {phases}, {d['samples']} samples, {d['dtype']}, {d['seconds']:.1f} s"


def _training(trained: Mapping[str, Any]) -> str:
    n = trained.get("epochs")  # a document of an earlier version has none
    by = trained.get("estimator", trained.get("method"))
    long = "" if n is None else f" for {n} epoch{'s' if n != 1 else ''}"
    return f", trained by {by}{long}, trial {trained['trial']}"


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
