"""The search with Optuna: the same draws whoever draws them, several workers, and workers that die."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.training_runs import SMALL, call_main, few_images, finish, kill, start, write_idx

from eqprop import papers
from eqprop.models.layered import LayeredNet
from eqprop.run.loop import Stopped
from eqprop.run.session import bind
from eqprop.run.spec import Spec
from eqprop.tuning.search import (
    BestTrial,
    Search,
    own_values,
    search,
    space_around,
    with_values,
)

STORAGES = ("journal", "sqlite")


def wanted(folder: Path, trials: int, experiment: Spec = SMALL, **options: Any) -> Search:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"storage": str(folder / "study.journal"), "budget": 0.01} | options
    return Search(bind(experiment, few_images(1200, 50)), folder, trials=trials, **given)


def drawn(found: BestTrial) -> list[tuple[Any, ...]]:
    """What was tried and what came out, of the trials that ended."""
    ended = [t for t in found.document["trials"] if t["state"] in ("complete", "pruned")]
    return [(t["values"], t["state"], t["held_out_error"], t["by_epoch"]) for t in ended]


def test_the_space_holds_the_record_and_values_come_back() -> None:
    space = space_around(SMALL, ["W01", "W12"])
    assert space.T == (2, 32)
    assert space.rates["W12"] == (SMALL.optimizer.rates["W12"] / 10, SMALL.optimizer.rates["W12"] * 10)
    assert with_values(SMALL, own_values(SMALL, space)) == SMALL
    negative = SMALL.override(beta=-0.2)
    assert with_values(negative, own_values(negative, space_around(negative, ["W01", "W12"]))) == negative
    assert with_values(SMALL, {"T": 5, "K": 9, "beta": 0.123456, "lr W01": 0.0123456}).phases.K == 5


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> BestTrial:
    return search(wanted(tmp_path_factory.mktemp("six"), 6))


def test_a_search_begins_with_the_record_and_ends_with_its_best(six: BestTrial) -> None:
    trials = six.document["trials"]
    assert len(trials) == 6
    assert with_values(SMALL, trials[0]["values"]) == SMALL
    errors = {t["number"]: t["held_out_error"] for t in trials if t["held_out_error"] is not None}
    assert errors[six.document["best"]] == min(errors.values()) == six.document["held_out_error"]
    assert six.spec == with_values(SMALL, trials[six.document["best"]]["values"])
    assert len({json.dumps(t["values"]) for t in trials}) == 6


def test_a_search_in_two_sessions_draws_as_in_one(six: BestTrial, tmp_path: Path) -> None:
    search(wanted(tmp_path, 2))
    assert drawn(search(wanted(tmp_path, 6))) == drawn(six)
    other = search(wanted(tmp_path / "seed", 2, SMALL.override(seed=1)))
    assert other.document["trials"][1]["values"] != six.document["trials"][1]["values"]


def test_a_search_that_was_stopped_takes_its_trial_up_again(six: BestTrial, tmp_path: Path) -> None:
    def stop(text: str) -> None:
        if text.startswith("trial 2: epoch 1"):
            raise Stopped("asked to", 130)

    with pytest.raises(Stopped):
        search(wanted(tmp_path, 6, tell=stop))
    again = search(wanted(tmp_path, 6))
    assert drawn(again) == drawn(six)
    assert [t["state"] for t in again.document["trials"]].count("fail") == 1


def test_trials_that_diverge_are_given_up_and_none_left_is_told(tmp_path: Path) -> None:
    unbounded = LayeredNet((10, 12, 784), "energy-based", "sigmoid", eps=0.5)
    hot = SMALL.override(model=unbounded, rates={"W12": 1e20, "W01": 1e20})
    with pytest.raises(ArithmeticError, match="None of the 2 trials completed: all diverged"):
        search(wanted(tmp_path, 2, hot))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and an experiment with many short epochs, so that a worker can be caught between two of them."""
    folder = tmp_path_factory.mktemp("place")
    write_idx(folder / "data", few_images(240, 50))
    (folder / "small.toml").write_text(
        "T = 30\nK = 10\nbeta = 0.2\nepochs = 8\n[model]\nsizes = [10, 64, 784]\n[optimizer.rates]\n"
        "W12 = 0.1\nW01 = 0.05\n"
    )
    return folder


def words(place: Path, out: Path, storage: str, trials: int) -> list[object]:
    where = out / "study.journal" if storage == "journal" else f"sqlite:///{out.parent / 'study.db'}"
    common = ["tune", place / "small.toml", "--data", place / "data", "--out", out, "--threads", 1]
    return [*common, "--search", trials, "--storage", where, "--budget", 2, "--engine", "eager"]


def caught(process: subprocess.Popen[str], out: Path, seconds: float = 150.0) -> str:
    """Halt a worker in the middle of a trial, an epoch or more into it; the folder of that trial."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        for lock in out.glob("trials/*/.lock"):
            folder = lock.parent
            if lock.read_text().strip() != str(process.pid) or not (folder / "metrics.jsonl").exists():
                continue
            process.send_signal(signal.SIGSTOP)
            if not (folder / "result.json").exists() and holds_nothing(out):
                return f"trials/{folder.name}"
            process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    raise AssertionError("no trial was seen running")


def holds_nothing(out: Path) -> bool:
    """Whether the halted worker is not in the middle of writing to the storage, which would keep others waiting."""
    if list(out.glob("study.journal?*lock*")):
        return False
    if not (out.parent / "study.db").exists():
        return True
    with closing(sqlite3.connect(out.parent / "study.db", timeout=0.0)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        database.rollback()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_two_workers_and_one_is_killed(storage: str, place: Path, tmp_path: Path) -> None:
    """The survivor finishes the search, the dead one's trial included, from its checkpoint."""
    out = tmp_path / "out"
    one = start(*words(place, out, storage, 4))
    folder = caught(one, out)
    other = start(*words(place, out, storage, 4))
    time.sleep(4.0)  # the other finds a worker in a trial: it must wait for it to die before taking up its trial
    kill(one)
    printed, complaint = other.communicate(timeout=300)
    assert other.returncode == 0, complaint
    document = json.loads((out / "search.json").read_text())
    states = [t["state"] for t in document["trials"]]
    assert states.count("complete") + states.count("pruned") == 4
    assert states.count("fail") == 1
    again = [t for t in document["trials"] if t["folder"] == folder]
    assert [t["state"] for t in again] in (["fail", "complete"], ["fail", "pruned"])
    assert again[0]["values"] == again[1]["values"]
    sessions = json.loads((out / again[-1]["folder"] / "environment.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert "eqprop train" in printed
    assert document["experiment"]["phases"]["T"] == papers.find(out / "best.toml").phases.T


@pytest.mark.slow
def test_a_killed_search_goes_on_to_the_same_end(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "killed" / "out"
    process = start(*words(place, out, "sqlite", 3))
    caught(process, out)
    kill(process)
    time.sleep(2.1)
    done = finish(*words(place, out, "sqlite", 3), timeout=300)
    assert done.returncode == 0, done.stderr
    whole = tmp_path / "whole" / "out"
    assert call_main(monkeypatch, *words(place, whole, "sqlite", 3), "-q") == 0
    killed, never = (json.loads((folder / "search.json").read_text()) for folder in (out, whole))

    def ended(document: dict[str, Any]) -> list[tuple[Any, ...]]:
        trials = [t for t in document["trials"] if t["state"] in ("complete", "pruned")]
        return [(t["values"], t["held_out_error"], t["by_epoch"]) for t in trials]

    assert ended(killed) == ended(never)
    assert killed["experiment"] == never["experiment"]


def processes(out: Path) -> set[int]:
    """The processes that trained the trials."""
    return {int(path.read_text()) for path in out.glob("trials/*/.lock")}


@pytest.mark.slow
def test_workers_of_one_command(place: Path, tmp_path: Path) -> None:
    """Enough trials that the second, which begins later by the time a process takes to start, has its share."""
    out = tmp_path / "out"
    done = finish(*words(place, out, "journal", 12), "--workers", 2, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads((out / "search.json").read_text())
    assert len(processes(out)) == 2
    states = [t["state"] for t in document["trials"]]
    assert states.count("complete") + states.count("pruned") >= 12


def test_a_study_of_other_settings_is_not_mixed(tmp_path: Path) -> None:
    search(wanted(tmp_path, 1))
    with pytest.raises(ValueError, match=r"begun with other settings \(experiment, space\)"):
        search(wanted(tmp_path, 2, SMALL.override(T=12)))
    with pytest.raises(ValueError, match=r"begun with other settings \(validation\)"):
        search(wanted(tmp_path, 2, validation=300))


@pytest.mark.parametrize(
    ("storage", "complaint"),
    [
        ("sqlite:///no/such/folder/study.db", "Cannot open the storage"),
        ("nosuchdatabase://x", "Cannot open the storage"),
        ("garbage.journal", "garbage.journal"),
    ],
)
def test_a_bad_storage_is_told(
    storage: str,
    complaint: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.journal").write_text("this is no journal\nnor is this\n")
    asked = ("tune", place / "small.toml", "--data", place / "data", "--out", "out", "--search", 2, "--threads", 1)
    assert call_main(monkeypatch, *asked, "--storage", storage) == 2
    assert complaint in capsys.readouterr().err
