"""The live display of a training run on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from eqprop.cli.common import new_console
from eqprop.estimators.named import label
from eqprop.messages import plain
from eqprop.relax import in_sweeps
from eqprop.run.dataset import data_name
from eqprop.run.log import Line
from eqprop.run.session import Leg, Session
from eqprop.run.watch import Progress, Watch, duration


class Display(Watch):
    """A live display, redrawn in place; warnings scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or new_console(stderr=True)
        self.session: Session | None = None
        self.leg: Leg | None = None
        self.status = Progress(0, 0, (), 0.0, 0.0)
        self.tests: dict[tuple[str, int], tuple[float | None, float | None]] = {}
        self.bars = Bars(
            TextColumn("{task.description:>14}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            expand=True,
        )
        self.epochs: TaskID = self.bars.add_task("epochs")
        self.iterations: TaskID = self.bars.add_task("iterations")
        self.live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def begin(self, session: Session, folder: Path) -> None:
        self.session = session
        spec = session.spec
        T, K = (f"{n}{in_sweeps(n, session.groups)}" for n in (spec.phases.T, spec.phases.K))
        phases = f"T={T} K={K} beta={spec.phases.beta:g}"
        where = f"{spec.run.device}  -> {folder}"
        what = f" ({spec.preset}) on {data_name(session.data)}  {spec.model}  {phases}  {where}"
        self.console.print(Text.assemble((spec.name, "bold"), what))
        self.live.start()

    def begin_leg(self, leg: Leg, engine: str, epoch: int) -> None:
        assert self.session is not None, "begin comes first"
        self.leg = leg
        epochs = self.session.spec.optimizer.epochs
        self.bars.update(self.epochs, total=epochs, completed=epoch, description=label(leg.estimator))
        self.bars.update(self.iterations, total=self.session.iterations, completed=0, description=engine)

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
        self.console.print(Text.assemble(("warning:", "yellow"), f" {message}"))

    def note(self, message: str) -> None:
        self.console.print(Text(message))

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
        speed = f"{plain(self.status.per_second)} iterations/s, {duration(self.status.seconds_left)} left"
        return Group(self.bars, table, speed)


def _percent(value: float | None) -> str:
    return "--" if value is None else f"{value:.2f} %"
