"""Hyper-parameter search: Optuna's sampler and pruner over short trainings, with any number of workers.

Optuna is optional and imported only here. First the study: its storage, its sampler, and recovery of trials whose
worker died; then the search itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import time
import uuid
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
from eqprop.tuning.effort import Effort, settings_of, short_training
from eqprop.tuning.probe import weight_names
from eqprop.tuning.recipe import BETA_RANGE, largest_beta, without_held_out

try:
    import optuna
    from optuna import TrialPruned
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler, TPESampler
    from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise ImportError(
        "A search needs Optuna 5 or newer, which is not installed: pip install 'eqprop[tune]'. Without it, eqprop tune "
        "NAME still follows the paper's recipe."
    ) from error

HEARTBEAT, GRACE = 10, 60
"""Seconds between heartbeats in a database, and without one until a trial counts as abandoned."""

NAMELESS = 60.0
"""Seconds after which a trial that has not named its worker never will: the worker died at once."""

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
ATTEMPTS = 3
"""How many times a trial may be restarted: one that runs out of memory would kill every worker."""

SETTINGS, WORKER, WORKERS = "settings", "worker", "workers"


def open_storage(where: str) -> BaseStorage:
    """Open a database by URL, such as sqlite:///study.db, with heartbeats; or a journal file."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if "://" in where:
                return RDBStorage(
                    where,
                    engine_kwargs={"connect_args": {"timeout": 60}} if where.startswith("sqlite") else None,
                    heartbeat_interval=HEARTBEAT,
                    grace_period=GRACE,
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=ATTEMPTS),
                )
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


class Seeded(BaseSampler):
    """Optuna's TPE sampler, reseeded for every draw from the search's seed, the trial's position and the value's name.

    A search by one worker then draws the same values whether or not it was interrupted.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _of(self, study: Study, trial: FrozenTrial, what: str) -> TPESampler:
        # Failed trials are restarted under a new number and do not count as draws.
        failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        place = trial.number - sum(other.number < trial.number for other in failed)
        digest = hashlib.sha256(f"eqprop search {self.seed} {place} {what}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        return TPESampler(seed=seed, multivariate=True, constant_liar=True)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(study, trial, "together").infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(study, trial, "together").sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(study, trial, param_name).sample_independent(study, trial, param_name, param_distribution)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder: one worker at a time, the others wait."""
    handle = open_lock(folder / LOCK)
    try:
        take_lock(handle, folder / LOCK, wait=True)
        yield
    finally:
        os.close(handle)


@contextmanager
def signed_on(folder: Path) -> Iterator[str]:
    """Register a worker and yield its name; its lock file stays locked as long as the process lives."""
    name = uuid.uuid4().hex
    path = folder / WORKERS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield name
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def is_gone(folder: Path, worker: str) -> bool:
    """Whether a worker that signed on in this folder has died. False if it never signed on."""
    try:
        handle = os.open(folder / WORKERS / worker, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


Seen = dict[int, float]
"""Trials without a worker's name, and when this process first saw each, on a clock that is never set back."""


def adopt_orphans(study: Study, folder: Path, seen: Seen | None = None) -> list[int]:
    """Fail the trials whose workers died and queue their values again, to resume from their run folders.

    Returns their numbers. Needs no heartbeat on the worker's own machine; across machines a database's heartbeat does
    the same.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    adopted, seen = [], {} if seen is None else seen
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _is_orphan(trial, folder, seen) and _fail(study, trial):
            adopted.append(trial.number)
            failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
            if sum(other.params == trial.params for other in failed) <= ATTEMPTS:
                queue_again(study, trial.params)
    return adopted


def _is_orphan(trial: FrozenTrial, folder: Path, seen: Seen) -> bool:
    owner = trial.user_attrs.get(WORKER)
    if owner is None:
        return time.monotonic() - seen.setdefault(trial.number, time.monotonic()) > NAMELESS
    return is_gone(folder, owner)


def _fail(study: Study, trial: FrozenTrial) -> bool:
    """Fail the trial. False if another process did so first."""
    try:
        study.tell(trial.number, state=TrialState.FAIL)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
        return False
    return True


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
    with signed_on(wanted.folder) as worker:
        objective = Objective(wanted, spec, space, effort, worker)
        seen: dict[int, float] = {}
        while (finished := count(study, *FINISHED)) < wanted.trials:
            for number in adopt_orphans(study, wanted.folder, seen):
                wanted.tell(f"trial {number} was abandoned by a dead worker; resuming it")
            if finished + count(study, TrialState.RUNNING) >= wanted.trials:
                wanted.tell(f"{finished} of {wanted.trials} trials done; waiting for other workers")
                wait()
                continue
            study.optimize(objective, n_trials=1)


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
    worker: str

    def __call__(self, trial: Trial) -> float:
        trial.set_user_attr(WORKER, self.worker)
        values = suggest(trial, self.space)
        spec = with_values(self.spec, values).override(epochs=self.effort.epochs)
        folder = self.search.folder / TRIALS / digest(settings_of(spec))[:16]
        trial.set_user_attr("folder", str(folder.relative_to(self.search.folder)))
        report = Report(trial, self.effort.epochs, self.search.tell)
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


class Report(Watch):
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
    chosen = with_values(spec, best.params).override(preset="own", published={}, source="", notes="")
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
