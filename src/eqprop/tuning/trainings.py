"""Short trainings, each in a run folder of its own: a recipe that was stopped finds those it has done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eqprop.cost import Cost
from eqprop.data import Images
from eqprop.dynamics import Dynamics
from eqprop.experiments.architecture import Factory
from eqprop.experiments.record import Record
from eqprop.training.load import load
from eqprop.training.metrics import read_metrics
from eqprop.training.run import begin_or_resume
from eqprop.training.watch import Progress, Watch
from eqprop.tuning.effort import Effort

FAILED = 100.0
"""The error, in percent, that a training that diverged counts with."""


@dataclass(frozen=True)
class Machine:
    """Where trainings run: options of `eqprop.train`."""

    device: str = "cpu"
    engine: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A short training: what was tried and what came out, in percent.

    train       the running error of the last epoch; FAILED if it diverged
    held_out    the error on the held-out samples after the last epoch
    unsettled   the share, in percent, of the free phases of the last epoch that had not settled
    """

    stage: str
    T: int
    K: int
    beta: float
    rates: dict[str, float]
    train: float
    held_out: float
    unsettled: float
    diverged: bool
    seconds: float
    folder: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Trainings:
    """Trains variants of a record for a short time on part of the training set; the test set is not in its reach."""

    images: Images
    effort: Effort
    machine: Machine
    out: Path
    own: Factory | None = None
    tell: Callable[[str], None] = lambda text: None
    done: list[Outcome] = field(default_factory=list)

    def run(self, record: Record, stage: str) -> Outcome:
        """Train, or take what a training of the same settings gave before."""
        rates = dict(record.learning_rates)
        same = next((o for o in self.done if _settings(o) == (record.T, record.K, record.beta, rates)), None)
        if same is not None:
            return same
        folder = self.out / stage
        self.tell(f"training {stage}")
        result = begin_or_resume(
            replace(record, epochs=self.effort.epochs),
            folder,
            watch=_Said(self.tell, f"training {stage}: epoch {{}}/{self.effort.epochs}"),
            methods="ep",
            samples=self.effort.samples,
            validation=self.effort.validation,
            data=self.images,
            model=self.own,
            **asdict(self.machine),
        )
        trial = result.summary["methods"]["ep"]["trials"][0]
        diverged = bool(trial["diverged"])
        outcome = Outcome(
            stage=stage,
            T=record.T,
            K=record.K,
            beta=record.beta,
            rates=rates,
            train=FAILED if diverged else trial["train_error"][-1],
            held_out=FAILED if diverged else trial["test_error"][-1],
            unsettled=FAILED if diverged else 100.0 * read_metrics(folder)[-1]["unsettled"],
            diverged=diverged,
            seconds=result.summary["seconds"],
            folder=str(folder.relative_to(self.out.parent)),
        )
        self.done.append(outcome)
        return outcome

    def trained(self, outcome: Outcome) -> tuple[Dynamics, Cost]:
        """The network a training left, and its cost."""
        network = load(self.out.parent / outcome.folder, "ep", model=self.own, device=self.machine.device)
        return network, vars(network)["cost"]


def _settings(outcome: Outcome) -> tuple[int, int, float, dict[str, float]]:
    return outcome.T, outcome.K, outcome.beta, outcome.rates


class _Said(Watch):
    """Passes on how far a training is."""

    def __init__(self, tell: Callable[[str], None], form: str) -> None:
        self.tell, self.form = tell, form

    def progress(self, progress: Progress) -> None:
        error = progress.train_errors[0]
        self.tell(self.form.format(progress.epoch + 1) + ("" if error is None else f", train error {error:.1f} %"))
