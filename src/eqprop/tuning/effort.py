"""Short trainings within a budget, and the output folder of a tuning, which only the same request may resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from eqprop.cost import Cost
from eqprop.data import Images
from eqprop.dynamics import Dynamics
from eqprop.files import write_json
from eqprop.models.graph import Graph
from eqprop.run.api import begin_or_resume
from eqprop.run.evaluate import load
from eqprop.run.folder import check_free, read_json
from eqprop.run.log import read_metrics
from eqprop.run.own import Factory
from eqprop.run.session import Session
from eqprop.run.spec import Spec
from eqprop.run.watch import Progress, Watch

TRAININGS = 16
"""Approximate number of short trainings in a recipe."""

LEAST_SAMPLES = 400
LEAST_EPOCHS = 2


@dataclass(frozen=True)
class StepCost:
    """Cost of a dependent step on a kind of machine: latency in seconds, operations per second."""

    latency: float
    operations: float


PACES = {"cpu": StepCost(15e-6, 1e11), "cuda": StepCost(20e-6, 1e13)}
"""Round figures for the engines on two server cores and on a large GPU."""
BY_AUTODIFF = StepCost(130e-6, 1e11)
"""The same for a step of one's own function on a CPU: measured 118 to 295 microseconds for three small energies, AMD
EPYC, one thread, torch 2.13."""


@dataclass(frozen=True)
class Effort:
    """Size of a short training: samples, epochs, held-out samples for testing, and expected seconds."""

    samples: int
    epochs: int
    validation: int
    seconds: float


def iteration_seconds(session: Session, pace: StepCost) -> float:
    """(T + K) (latency + a step's operations / pace) + those of input and contrast, of a mini-batch by EP."""
    spec, model = session.spec, session.model
    parameters = sum(p.numel() for p in model.parameters())
    step, fixed = (spec.optimizer.batch * n / pace.operations for n in (model.operations(), 6 * parameters))
    return (spec.phases.T + spec.phases.K) * (pace.latency + step) + fixed


def short_training(
    session: Session, budget: float, trainings: int = TRAININGS, validation: int | None = None
) -> Effort:
    """Samples and epochs such that `trainings` runs at the spec's T and K fit into `budget` seconds."""
    check_budget(budget)
    each = iteration_seconds(session, _pace(session))
    batch, total = session.spec.optimizer.batch, session.images.train_samples
    # Testing relaxes every held-out sample once per epoch, which adds about a fifth.
    iterations = budget / trainings / each / 1.2
    # Without those asked for, which the session holds out already.
    most = total - held_out(total) if validation is None else total
    least = min(max(LEAST_SAMPLES, batch), most)
    samples = int(min(max(iterations * batch / LEAST_EPOCHS, least), most)) // batch * batch
    samples = max(_two_digits_down(samples) // batch * batch, batch)
    epochs = max(min(int(iterations * batch / samples), session.spec.optimizer.epochs), LEAST_EPOCHS)
    validation = min(held_out(total), max(samples // 2, batch)) if validation is None else validation
    return Effort(samples, epochs, validation, epochs * samples / batch * each * 1.2)


def _pace(session: Session) -> StepCost:
    device = torch.device(session.spec.run.device).type
    if device == "cpu" and not isinstance(session.model, Graph):  # which has formulas written by hand
        return BY_AUTODIFF
    return PACES.get(device, PACES["cpu"])


def check_budget(budget: float) -> None:
    if not (math.isfinite(budget) and budget > 0):
        raise ValueError(f"The budget is {budget}; expected a number of seconds above 0, such as 600.")


def held_out(total: int, asked: int | None = None) -> int:
    """As many as asked for, or a sixth of the training samples: 10,000 of MNIST's 60,000."""
    return max(total // 6, 1) if asked is None else asked


def _two_digits_down(value: int) -> int:
    unit = 10 ** max(len(str(value)) - 2, 0)
    return value // unit * unit


@dataclass
class Clock:
    """Seconds since the tuning began, against the limit by which it should end."""

    limit: float
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def allows(self, seconds: float) -> bool:
        """Whether work that takes so long would still end in time."""
        return self.elapsed + seconds <= self.limit


FAILED = 100.0
"""Error in percent assigned to a training that diverged."""


@dataclass(frozen=True)
class Outcome:
    """Settings and result of a short training. Errors are in percent.

    train       running error of the last epoch; FAILED if it diverged
    held_out    error on the held-out samples after the last epoch
    unsettled   percentage of free phases in the last epoch that did not settle
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


@dataclass
class Trainings:
    """Train variants of a spec briefly on part of the training set, never on the test set."""

    images: Images
    effort: Effort
    out: Path
    clock: Clock
    own: Factory | None = None
    device: str = "cpu"
    tell: Callable[[str], None] = lambda text: None
    done: list[Outcome] = field(default_factory=list)
    longest: float = 0.0

    def in_time(self) -> bool:
        """Whether one more training, if it takes as long as the longest so far, would end in time."""
        return self.clock.allows(self.longest)

    def run(self, spec: Spec, stage: str) -> Outcome:
        """Train, or return the earlier outcome of the same settings."""
        phases, rates = spec.phases, dict(spec.optimizer.rates)
        same = next((o for o in self.done if _settings(o) == (phases.T, phases.K, phases.beta, rates)), None)
        if same is not None:
            return same
        folder, began = self.out / stage, self.clock.elapsed
        self.tell(f"training {stage}")
        result = begin_or_resume(
            spec.override(epochs=self.effort.epochs),
            folder,
            watch=_TellingWatch(self.tell, f"training {stage}: epoch {{}}/{self.effort.epochs}"),
            samples=self.effort.samples,
            validation=self.effort.validation,
            data=self.images,
            model=self.own,
        )
        trial = result.summary["estimators"][spec.estimator.kind]["trials"][0]
        diverged = bool(trial["diverged"])
        outcome = Outcome(
            stage=stage,
            T=phases.T,
            K=phases.K,
            beta=phases.beta,
            rates=rates,
            train=FAILED if diverged else trial["train_error"][-1],
            held_out=FAILED if diverged else trial["test_error"][-1],
            unsettled=FAILED if diverged else 100.0 * read_metrics(folder)[-1]["unsettled"],
            diverged=diverged,
            seconds=result.summary["seconds"],
            folder=str(folder.relative_to(self.out.parent)),
        )
        self.done.append(outcome)
        self.longest = max(self.longest, self.clock.elapsed - began)
        return outcome

    def trained(self, outcome: Outcome) -> tuple[Dynamics, Cost]:
        """The trained network of an outcome, and its cost."""
        found = load(self.out.parent / outcome.folder, model=self.own, device=self.device)
        return found.model, found.cost


def _settings(outcome: Outcome) -> tuple[int, int, float, dict[str, float]]:
    return outcome.T, outcome.K, outcome.beta, outcome.rates


class _TellingWatch(Watch):
    """Report the progress of a training."""

    def __init__(self, tell: Callable[[str], None], form: str) -> None:
        self.tell, self.form = tell, form

    def progress(self, progress: Progress) -> None:
        error = progress.train_errors[0]
        self.tell(self.form.format(progress.epoch + 1) + ("" if error is None else f", train error {error:.1f} %"))


REQUEST = "request.json"
MACHINE = ("device", "engine", "threads")


def settings_of(spec: Spec) -> dict[str, Any]:
    """All settings but those of the machine, which may differ from worker to worker."""
    found = spec.to_dict()
    return {**found, "run": {name: value for name, value in found["run"].items() if name not in MACHINE}}


def as_experiment(spec: Spec) -> Spec:
    """What tuning hands to a user: no paper's numbers, nothing held out, and no setting of this machine."""
    run = msgspec.structs.replace(spec.run, threads=None, stacked=None)
    spec = spec.override(preset="own", published={}, source="", notes="", data={"validation": 0})
    return msgspec.structs.replace(spec, run=run)


def prepare_folder(folder: Path, request: Mapping[str, Any]) -> bool:
    """Create the folder and save the request. True if the same request was already there.

    Raises if the folder holds another request or other files.
    """
    wanted = json.loads(json.dumps(request))
    if (folder / REQUEST).is_file():
        _check_same(folder, read_json(folder / REQUEST, "the request of the tuning"), wanted)
        return True
    check_free(folder)
    try:
        write_json(folder / REQUEST, wanted)
    except OSError as error:
        raise type(error)(f"Cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error
    return False


def _check_same(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    other = [
        f"{name} {_short(wanted.get(name))} instead of {_short(there.get(name))}"
        for name in sorted({*there, *wanted})
        if there.get(name) != wanted.get(name)
    ]
    if other:
        raise ValueError(
            f"{folder} holds a tuning with other settings ({'; '.join(other)}). Use those settings to resume it, "
            "or choose another --out."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
