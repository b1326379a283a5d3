"""How a run reports progress: not at all, as lines of text, or as TensorBoard events."""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.estimators.named import label
from eqprop.messages import plain, unknown
from eqprop.plugins import Table
from eqprop.relax import in_sweeps
from eqprop.run.dataset import data_name
from eqprop.run.log import Line
from eqprop.run.session import Leg, Session


@dataclass(frozen=True)
class Progress:
    """Progress of a leg: finished epochs, iterations of the current one, running errors per trial, speed, time left.

    `seconds_whole` estimates the duration of the whole leg.
    """

    epoch: int
    iteration: int
    train_errors: tuple[float | None, ...]
    per_second: float
    seconds_left: float
    seconds_whole: float = 0.0


FAR_FROM_REST = 2e-3
"""A mean residual above which EP's updates stop being gradients. Runs that reach the paper's errors stay below 5e-4,
those that EP's two-cycles keep from them are above 5e-3 (see the free phases in results/table1)."""
NOT_FALLING, AFTER_EPOCHS = 0.98, 3
"""A loss that is above this share of the first epoch's, after so many epochs, is not falling."""
STANDS_STILL = 1e-6
"""A relative change of the weights over an epoch below which they stand still: gradients, or rates, are tiny."""
BY_CHANCE, AFTER_ITERATIONS = 0.95, 500
"""An error above this share of that by chance, after so many iterations, is one by chance."""
GOOD = 20.0
"""Below this error in percent a loss may stay where it is."""


@dataclass(frozen=True)
class Course:
    """How one trial went so far: its lines, iterations per epoch, the error by chance in percent, and how far the
    weights moved in the last epoch, relative to their size (None if that is not known). Without labels, errors are
    the variance that is left."""

    lines: Sequence[Line]
    iterations: int
    chance: float
    moved: float | None
    labelled: bool = True

    def concern(self) -> str | None:
        """The first sign that something is wrong, None for a healthy course."""
        last = self.lines[-1]
        error, epoch = last["train_error"], last["epoch"]
        wrong = error is None or error > GOOD
        if last.get("radius", 0.0) >= 1.0:
            return f"the step's Jacobian has |l| = {last['radius']:.3g} at free states: they no longer settle"
        if epoch > 1 and last["estimator"].startswith("ep") and last["residual_mean"] > FAR_FROM_REST:
            share, residual = 100 * last["unsettled"], last["residual_mean"]
            return f"{share:.2g} % of the free phases end away from rest, by {residual:.1e} in the mean"
        if wrong and self.moved is not None and self.moved < STANDS_STILL and self.iterations * epoch >= 100:
            return f"an epoch moved the weights by only {self.moved:.1e} of their size"
        if error is not None and self.iterations * epoch >= AFTER_ITERATIONS and error > BY_CHANCE * self.chance:
            kind = (
                "answers are wrong, as by chance"
                if self.labelled
                else "variance of the targets is left, as by their mean"
            )
            return f"after {self.iterations * epoch} iterations {error:.0f} % of the {kind}"
        losses = [line["loss"] for line in self.lines]
        if wrong and len(losses) >= AFTER_EPOCHS and min(losses[1:]) > NOT_FALLING * losses[0]:
            return f"the loss has not fallen since epoch 1 ({losses[0]:.3g}, now {losses[-1]:.3g})"
        return None


class Watch:
    """Receives every event of a run; this base class ignores them. Override what you need, and pass it to `train`:

    begin, end      of the whole run               begin_leg   of one estimator on trials that run together
    progress        every half second or so        epoch       after every epoch, with its lines of metrics
    measure         after every epoch and for every trial, with its network: your own metrics, by name
    stop            after every epoch: a reason to end this leg early, or None
    warn            a sentence the user should read        note    what takes time now, such as compiling
    """

    def begin(self, session: Session, folder: Path) -> None: ...

    def begin_leg(self, leg: Leg, engine: str, epoch: int) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def epoch(self, lines: Sequence[Line], progress: Progress) -> None: ...

    def measure(self, network: Dynamics, cost: Cost, line: Line) -> Mapping[str, float]:
        """Your own metrics of a network, added to its line in metrics.jsonl. Do not change the network."""
        return {}

    def stop(self, lines: Sequence[Line]) -> str | None:
        """Why to end the leg now, given all of its lines so far; None to go on."""
        return None

    def warn(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...

    def end(self) -> None: ...


class Several(Watch):
    """Passes every event to several watches. One whose terminal or pipe is gone is left out: that ends no run.

    What a watch measures, and when it stops, does not depend on who reads it.
    """

    def __init__(self, *watches: Watch) -> None:
        self.watches: list[Watch] = []
        for watch in watches:
            self.watches.extend(watch.watches if isinstance(watch, Several) else [watch])
        self.gone: set[Watch] = set()

    def _each(self, event: str, *given: object) -> None:
        for watch in (watch for watch in self.watches if watch not in self.gone):
            try:
                getattr(watch, event)(*given)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EPIPE):
                    raise
                self.gone.add(watch)

    begin = partialmethod(_each, "begin")
    begin_leg = partialmethod(_each, "begin_leg")
    progress = partialmethod(_each, "progress")
    epoch = partialmethod(_each, "epoch")
    warn = partialmethod(_each, "warn")
    note = partialmethod(_each, "note")
    end = partialmethod(_each, "end")

    def measure(self, network: Dynamics, cost: Cost, line: Line) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for watch in self.watches:
            measured = watch.measure(network, cost, line)
            if twice := next((name for name in measured if name in found), None):
                raise ValueError(f"Two watches measure {twice!r}. Rename one.")
            found.update(measured)
        return found

    def stop(self, lines: Sequence[Line]) -> str | None:
        return next((reason for watch in self.watches if (reason := watch.stop(lines)) is not None), None)


class EarlyStopping(Watch):
    """Ends a leg when the mean of a metric over its trials has not fallen for `patience` epochs.

    patience    epochs without a fall after which to stop
    metric      a field of metrics.jsonl, also one that a watch of your own measures
    """

    def __init__(self, patience: int, metric: str = "test_error") -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ValueError(f"patience is {patience!r}; expected a whole number above 0, of epochs.")
        self.patience, self.metric = patience, metric

    def stop(self, lines: Sequence[Line]) -> str | None:
        if lines and all(self.metric not in line for line in lines):
            raise ValueError(unknown("metric", self.metric, lines[-1]))
        means = epoch_means(lines, self.metric)
        if not means:
            return None
        best = min(means, key=lambda epoch: means[epoch])
        if max(means) - best < self.patience:
            return None
        what = self.metric.replace("_", " ")
        return f"the {what} has not fallen since epoch {best} ({means[best]:.4g})"


def epoch_means(lines: Sequence[Line], metric: str) -> dict[int, float]:
    """The mean of a metric over the trials that have it, by epoch; NaN is no number."""
    found: dict[int, list[float]] = {}
    for line in lines:
        if line.get(metric) is not None and not math.isnan(line[metric]):
            found.setdefault(line["epoch"], []).append(line[metric])
    return {epoch: sum(values) / len(values) for epoch, values in sorted(found.items())}


class Lines(Watch):
    """One line per epoch, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.epochs = 0
        self.labels: dict[str, str] = {}

    def begin(self, session: Session, folder: Path) -> None:
        self.epochs = session.spec.optimizer.epochs
        self.labels = {estimator: label(estimator) for estimator in session.spec.estimators}
        spec, run = session.spec, session.spec.run
        together = "side by side" if run.stacked else "one after the other"
        trials = f"{run.trials} trials {together}" if run.trials > 1 else "1 trial"
        length = f"{counted(self.epochs, 'epoch')} of {counted(session.iterations, 'iteration')}"
        self._say(
            f"{spec.name} ({spec.preset}) on {data_name(session.data)}, {', '.join(spec.estimators)}, {trials}, "
            f"{length} on {run.device} -> {folder}"
        )
        T, K, groups = spec.phases.T, spec.phases.K, session.groups
        sweeps = [f"T {T}{in_sweeps(T, groups)}, K {K}{in_sweeps(K, groups)}"] if groups else []
        self._say("; ".join([str(spec.model), *sweeps, *(session.changes_from_paper or ())]))

    def begin_leg(self, leg: Leg, engine: str, epoch: int) -> None:
        trials = "trial " + ", ".join(str(t) for t in leg.trials)
        label, begun = self.labels[leg.estimator], f", from epoch {epoch + 1}" if epoch else ""
        self._say(f"{label}, {trials}, engine {engine}{begun}")

    def epoch(self, lines: Sequence[Line], progress: Progress) -> None:
        if not lines:
            return
        test, train = (_percent([line[name] for line in lines]) for name in ("test_error", "train_error"))
        self._say(
            f"{lines[0]['estimator']} epoch {lines[0]['epoch']}/{self.epochs}: test {test}, "
            f"train {train}, {plain(progress.per_second)} it/s, {duration(progress.seconds_left)} left"
        )

    def warn(self, message: str) -> None:
        self._say(f"warning: {message}")

    def note(self, message: str) -> None:
        self._say(message)

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


NOT_DRAWN = ("trial", "seed", "epoch", "seconds", "residual_worst")
"""Numbers of a line of metrics that are no curve of TensorBoard's."""


class Events(Watch):
    """TensorBoard events in the run folder's `tensorboard`, where tensorboard is installed."""

    def __init__(self, writer_class: type[Any]) -> None:
        self.writer_class = writer_class
        self.folder = Path()
        self.writer: Any = None

    @classmethod
    def if_installed(cls) -> Watch:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return Watch()
        return cls(SummaryWriter)

    @classmethod
    def installed(cls) -> Watch:
        """The same, or raise if it is not installed."""
        found = cls.if_installed()
        if isinstance(found, cls):
            return found
        raise ValueError(
            "The logger tensorboard needs the package tensorboard, which is not installed: pip install "
            "'eqprop[tensorboard]', or omit the logger."
        )

    def begin(self, session: Session, folder: Path) -> None:
        self.folder = folder / "tensorboard"

    def begin_leg(self, leg: Leg, engine: str, epoch: int) -> None:
        self.end()
        # Make readers hide events newer than the checkpoint that the run resumes from.
        self.writer = self.writer_class(str(self.folder / leg.folder), purge_step=epoch + 1)

    def epoch(self, lines: Sequence[Line], progress: Progress) -> None:
        for line in lines:
            for name, value in line.items():
                if isinstance(value, int | float) and name not in NOT_DRAWN:
                    self.writer.add_scalar(f"{name}/trial{line['trial']}", value, line["epoch"])
        self.writer.flush()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


LOGGERS: Table[Callable[[], Watch]] = Table(
    "logger", {"lines": Lines, "tensorboard": Events.installed}, lambda name, part: part
)
"""Watches by name, for `--logger`: functions without arguments that make one."""


def as_watch(watch: Watch | str | None) -> Watch:
    """A watch as given, or by its name; None is silent."""
    return named_watch(watch) if isinstance(watch, str) else watch or Watch()


def named_watch(name: str) -> Watch:
    if name not in LOGGERS:
        raise ValueError(unknown("logger", name, LOGGERS))
    return LOGGERS[name]()


def _percent(values: Sequence[float | None]) -> str:
    return " ".join("--" if v is None else f"{v:.2f}" for v in values) + " %"


def counted(n: int, noun: str) -> str:
    """ "1 epoch", "2 epochs"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
