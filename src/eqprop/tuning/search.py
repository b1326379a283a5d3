"""Hyper-parameter search: Optuna's sampler and pruner over short trainings, with any number of workers.

Optuna is optional and imported only here. First the study: its storage, its sampler, and recovery of trials whose
worker died; then the search itself.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eqprop.data import Images
from eqprop.files import open_lock, take_lock
from eqprop.provenance import provenance
from eqprop.run.api import begin_or_resume
from eqprop.run.checkpoint import digest
from eqprop.run.dataset import describe
from eqprop.run.folder import LOCK
from eqprop.run.log import Line, read_metrics
from eqprop.run.loop import Stopped
from eqprop.run.session import Session
from eqprop.run.spec import Spec
from eqprop.run.watch import Progress, Watch
from eqprop.tuning.effort import Effort, as_experiment, settings_of, short_training
from eqprop.tuning.probe import weight_names
from eqprop.tuning.recipe import BETA_RANGE, largest_beta, without_held_out

try:
    import optuna
    from optuna import TrialPruned
    from optuna.samplers import TPESampler
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise ImportError(
        "A search needs Optuna 5 or newer, which is not installed: pip install 'eqprop[tune]'. Without it, eqprop tune "
        "NAME still follows the paper's recipe."
    ) from error

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
ATTEMPTS = 3
"""How many times a trial may be restarted: one that runs out of memory would kill every worker."""

SETTINGS, WORKERS = "settings", ".workers"


def open_storage(where: str) -> BaseStorage:
    """Open a database by URL, such as sqlite:///study.db, or a journal file."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if "://" in where:
                sqlite = where.startswith("sqlite")
                return RDBStorage(where, engine_kwargs={"connect_args": {"timeout": 60}} if sqlite else None)
            # Absolute: the lock must name the same file whatever a worker's current directory.
            path = Path(where).resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            return optuna.storages.JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
    except Exception as error:
        raise ValueError(
            f"Cannot open the storage {where!r}: {_first_line(error)}. Give sqlite:///FILE, another database as a URL, "
            "or the path of a journal file."
        ) from error


def open_study(where: str, name: str, seed: int, settings: Mapping[str, Any]) -> Study:
    """Open the study, creating it if missing. Raises if it has other settings."""
    storage = open_storage(where)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5)
    try:
        study = optuna.create_study(
            storage=storage, study_name=name, sampler=Seeded(seed), pruner=pruner, load_if_exists=True
        )
    except Exception as error:
        raise ValueError(f"The storage {where!r} holds no study that can be read: {_first_line(error)}.") from error
    there = study.user_attrs.get(SETTINGS)
    if there is None:
        study.set_user_attr(SETTINGS, dict(settings))
    elif there != dict(settings):
        other = [key for key in {*there, *settings} if there.get(key) != settings.get(key)]
        raise ValueError(
            f"The study {name!r} in {where} was begun with other settings ({', '.join(sorted(other))}). Use those "
            "settings to resume it, or another --storage."
        )
    return study


class Seeded(TPESampler):
    """Optuna's TPE sampler, reseeded for every trial from the search's seed and the trial's place.

    A search by one worker then draws the same values whether or not it was interrupted.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, multivariate=True, constant_liar=True)
        self.seed = seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        # Failed trials are restarted under a new number and do not count as draws.
        failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        place = trial.number - sum(other.number < trial.number for other in failed)
        TPESampler.__init__(self, seed=self.seed + place, multivariate=True, constant_liar=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder: one worker at a time, the others wait."""
    handle = open_lock(folder / LOCK)
    try:
        take_lock(handle, folder / LOCK, wait=True)
        yield
    finally:
        os.close(handle)


class Workers:
    """A lock that all workers of a search share while they run a trial; the system frees it when one dies.

    So whoever finds nobody else holding it knows that every trial still marked as running lost its worker.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / WORKERS
        self.handle = open_lock(self.path)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def join(self, study: Study) -> list[int]:
        """Share the lock; before that, queue again what dead workers left. Returns the numbers of their trials."""
        left = abandoned(study) if take_lock(self.handle, self.path, wait=False) else []
        fcntl.flock(self.handle, fcntl.LOCK_SH)
        return left

    def leave(self) -> None:
        """Release it between trials, so that those who wait can find out who is gone."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)


def abandoned(study: Study) -> list[int]:
    """Fail the trials marked as running and queue their values again, to resume from their run folders."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for trial in running:
        study.tell(trial.number, state=TrialState.FAIL)
        failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        if sum(other.params == trial.params for other in failed) <= ATTEMPTS:
            queue_again(study, trial.params)
    return [trial.number for trial in running]


def queue_again(study: Study, values: Mapping[str, Any]) -> None:
    if values:
        study.enqueue_trial(dict(values))


def wait(seconds: float = 0.5) -> None:
    time.sleep(seconds)


def optuna_version() -> str:
    return str(optuna.__version__)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


STEPS_FACTOR, RATES_FACTOR = 4, 10
"""The search spans a quarter to four times the spec's T and K, a tenth to ten times its rates."""


@dataclass(frozen=True)
class Space:
    """Inclusive ranges of T, K, beta and each weight's rate, all searched on a logarithmic scale."""

    T: tuple[int, int]
    K: tuple[int, int]
    beta: tuple[float, float]
    rates: dict[str, tuple[float, float]]


def space_around(spec: Spec, weights: Sequence[str]) -> Space:
    """Ranges around the spec's values; for beta, the paper's range extended to include it."""
    beta = abs(spec.phases.beta)
    rates = {name: rate for name, rate in spec.rates(weights).items() if rate > 0.0}
    return Space(
        T=_steps(spec.phases.T),
        K=_steps(spec.phases.K),
        beta=(min(BETA_RANGE[0], beta), max(largest_beta(spec), beta)),
        rates={name: (rate / RATES_FACTOR, rate * RATES_FACTOR) for name, rate in rates.items()},
    )


def _steps(value: int) -> tuple[int, int]:
    return max(value // STEPS_FACTOR, 1), value * STEPS_FACTOR


def suggest(trial: Trial, space: Space) -> dict[str, Any]:
    """Draw values from the sampler, keyed by their names in the study."""
    values: dict[str, Any] = {
        "T": trial.suggest_int("T", *space.T, log=True),
        "K": trial.suggest_int("K", *space.K, log=True),
        "beta": trial.suggest_float("beta", *space.beta, log=True),
    }
    return values | {key: trial.suggest_float(key, *ends, log=True) for key, ends in _keyed(space.rates).items()}


def own_values(spec: Spec, space: Space) -> dict[str, Any]:
    """The spec's own values, where a search begins."""
    phases = spec.phases
    return {"T": phases.T, "K": phases.K, "beta": abs(phases.beta), **_keyed(spec.rates(space.rates))}


def with_values(spec: Spec, values: Mapping[str, Any]) -> Spec:
    """The spec with these values; K is capped at T, as BPTT requires, and beta keeps its sign."""
    rates = {key.removeprefix("lr "): float(f"{v:.3g}") for key, v in values.items() if key.startswith("lr ")}
    return spec.override(
        T=values["T"],
        K=min(values["K"], values["T"]),
        beta=math.copysign(float(f"{values['beta']:.3g}"), spec.phases.beta),
        rates={**spec.optimizer.rates, **rates},
    )


def _keyed(rates: Mapping[str, Any]) -> dict[str, Any]:
    return {f"lr {name}": value for name, value in rates.items()}


TRIALS = "trials"


@dataclass(frozen=True)
class Search:
    """What to search, where, and within which budget. All workers of a search get the same.

    trials      total number of finished trials over all workers and restarts; several workers may finish a few more
    storage     sqlite:///FILE or another database URL, or the path of a journal file
    validation  training samples to hold out; None: a sixth, and at most half of those trained on
    """

    session: Session
    folder: Path
    trials: int
    storage: str
    budget: float = 600.0
    tell: Callable[[str], None] = lambda text: None
    validation: int | None = None

    @cached_property
    def plan(self) -> tuple[Spec, Space, Effort]:
        """The spec, the ranges, and how long each trial trains."""
        part = without_held_out(self.session, self.validation)
        space = space_around(self.session.spec, weight_names(part.model, part.cost))
        return self.session.spec, space, short_training(part, self.budget, self.trials, self.validation)


@dataclass(frozen=True)
class BestTrial:
    """The best trial as a spec, and a document with all trials."""

    spec: Spec
    document: dict[str, Any]


def study_of(search: Search, spec: Spec, space: Space, effort: Effort) -> tuple[Study, Effort]:
    """Open the study and return it with the effort per trial; a new one begins with the spec's own values.

    An existing study keeps its effort, so asking for more trials changes only their number.
    """
    settings = {
        "experiment": digest(settings_of(spec)),
        "space": digest(asdict(space)),
        "data": search.session.images.sha256,
    }
    if search.validation is not None:
        settings["validation"] = str(search.validation)
    with alone(search.folder):
        study = open_study(search.storage, f"eqprop {spec.name}", spec.run.seed, settings)
        if "effort" not in study.user_attrs:
            study.set_user_attr("effort", asdict(effort))
        study.enqueue_trial(own_values(spec, space), skip_if_exists=True)
    return study, Effort(**study.user_attrs["effort"])


def search(wanted: Search) -> BestTrial:
    """Work on the study until it has its trials, alone or with other workers; return the best."""
    work(wanted)
    return result(wanted)


def work(wanted: Search) -> None:
    """Run trials as one worker until the study has enough."""
    spec, space, effort = wanted.plan
    study, effort = study_of(wanted, spec, space, effort)
    objective = Objective(wanted, spec, space, effort)
    with Workers(wanted.folder) as workers:
        while (finished := count(study, *FINISHED)) < wanted.trials:
            for number in workers.join(study):
                wanted.tell(f"trial {number} was abandoned by a dead worker; resuming it")
            enough = finished + count(study, TrialState.RUNNING) >= wanted.trials
            if enough:
                wanted.tell(f"{finished} of {wanted.trials} trials done; waiting for other workers")
            else:
                study.optimize(objective, n_trials=1)
            workers.leave()
            if enough:
                wait()


def count(study: Study, *states: TrialState) -> int:
    return len(study.get_trials(deepcopy=False, states=states))


@dataclass(frozen=True)
class Objective:
    """The held-out error after a short training with a trial's values.

    The run folder is named after the values, so a restarted trial finds its earlier progress.
    """

    search: Search
    spec: Spec
    space: Space
    effort: Effort

    def __call__(self, trial: Trial) -> float:
        values = suggest(trial, self.space)
        spec = with_values(self.spec, values).override(epochs=self.effort.epochs)
        folder = self.search.folder / TRIALS / digest(settings_of(spec))[:16]
        trial.set_user_attr("folder", str(folder.relative_to(self.search.folder)))
        report = PruningWatch(trial, self.effort.epochs, self.search.tell)
        report.past(read_metrics(folder))
        images = self.search.session.images
        assert isinstance(images, Images), "a search takes no stream"
        try:
            result = begin_or_resume(
                spec,
                folder,
                watch=report,
                samples=self.effort.samples,
                validation=self.effort.validation,
                data=images,
                model=self.search.session.own,
            )
        except Stopped:
            queue_again(trial.study, trial.params)
            raise
        except BlockingIOError as error:
            raise TrialPruned("another worker has the same values") from error
        trained = result.summary["estimators"][spec.estimator.kind]["trials"][0]
        if trained["diverged"]:
            trial.set_user_attr("diverged", True)
            raise TrialPruned("diverged")
        trial.set_user_attr("train_error", trained["train_error"][-1])
        trial.set_user_attr("seconds", result.summary["seconds"])
        return float(trained["test_error"][-1])


class PruningWatch(Watch):
    """Report the held-out error of every epoch to the study, and end a trial that should be pruned."""

    def __init__(self, trial: Trial, epochs: int, tell: Callable[[str], None]) -> None:
        self.trial, self.epochs, self.tell = trial, epochs, tell

    def past(self, lines: Sequence[Line]) -> None:
        """Report epochs that an earlier worker completed."""
        for line in lines:
            self._report(line)

    def epoch(self, lines: Sequence[Line], progress: Progress) -> None:
        for line in lines:
            self._report(line)
            self.tell(f"trial {self.trial.number}: epoch {line['epoch']}, held-out error {_percent(line)}")
        # After the last epoch, pruning saves nothing.
        if progress.epoch < self.epochs and self.trial.should_prune():
            raise TrialPruned("worse than half of the others")

    def _report(self, line: Line) -> None:
        if line["test_error"] is not None:
            self.trial.report(line["test_error"], line["epoch"])


def result(wanted: Search) -> BestTrial:
    """The best finished trial, and all trials ready for JSON."""
    spec, space, effort = wanted.plan
    study, effort = study_of(wanted, spec, space, effort)
    if count(study, TrialState.COMPLETE) == 0:
        raise ArithmeticError(
            f"None of the {count(study, *FINISHED)} trials completed: all diverged. Use initial weights that settle "
            "(--init default), or start the search from smaller learning rates."
        )
    best = study.best_trial
    chosen = as_experiment(with_values(spec, best.params))
    document = {
        "name": spec.name,
        "seed": spec.run.seed,
        "budget": wanted.budget,
        "effort": asdict(effort),
        "space": asdict(space),
        "data": describe(wanted.session.images),
        "best": best.number,
        "held_out_error": best.value,
        "experiment": chosen.to_dict(),
        "trials": [_trial_dict(trial) for trial in study.get_trials(deepcopy=False)],
        "optuna": optuna_version(),
        "provenance": provenance(torch.device(spec.run.device)),
    }
    return BestTrial(chosen, document)


def _trial_dict(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "values": trial.params,
        "held_out_error": trial.value if trial.state is TrialState.COMPLETE else None,
        "by_epoch": list(trial.intermediate_values.values()),
        "diverged": trial.user_attrs.get("diverged", False),
        "train_error": trial.user_attrs.get("train_error"),
        "folder": trial.user_attrs.get("folder"),
    }


def _percent(line: Line) -> str:
    return "--" if line["test_error"] is None else f"{line['test_error']:.2f} %"
