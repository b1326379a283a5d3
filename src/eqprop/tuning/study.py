"""The study of a search: its storage, its sampler, and recovery of trials whose worker died.

Optuna is optional and imported only here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eqprop.files import open_lock, take_lock
from eqprop.training.folder import LOCK

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

__all__ = ["FrozenTrial", "Study", "Trial", "TrialPruned", "TrialState", "adopt_orphans", "alone", "open_study"]

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
