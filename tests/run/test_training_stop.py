"""Stopping for real: signals, kill -9, two processes on one folder, full disks, damaged folders."""

from __future__ import annotations

import os
import pty
import random
import resource
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from helpers.training_runs import (
    assert_same_bits,
    command,
    environment,
    few_images,
    kill,
    metrics,
    start,
    wait_for,
    weights,
    write_idx,
    write_small_toml,
)

from eqprop.run import Watch, resume, train
from eqprop.run.checkpoint import checkpoint_file, read_checkpoint
from eqprop.run.log import Line
from eqprop.run.loop import Interruption, Stopped
from eqprop.run.watch import Progress

EPOCHS = 25
"""Of 20 iterations, each ending with a checkpoint: some seconds of frequent writing."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, an experiment, and the undisturbed run."""
    folder = tmp_path_factory.mktemp("stop")
    write_idx(folder / "data", few_images())
    experiment = write_small_toml(folder / "small.toml", EPOCHS)
    train(experiment, folder / "whole", data=folder / "data", trials=2, threads=1)
    return folder


def training(place: Path, out: Path) -> tuple[object, ...]:
    return ("train", place / "small.toml", "--data", place / "data", "--trials", 2, "--out", out)


def resuming(place: Path, out: Path) -> tuple[object, ...]:
    return ("resume", out, "--data", place / "data")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_says_how_to_go_on_and_leaves_with_its_code(
    place: Path, tmp_path: Path, number: int, code: int
) -> None:
    out = tmp_path / "run"
    process = start(*training(place, out))
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert f"Continue with: eqprop resume {out}" in stderr
    assert "Traceback" not in stderr
    assert not read_checkpoint(out / "ep").finished
    resume(out, data=place / "data")
    assert_same_bits(place / "whole", out)


def test_the_command_to_continue_can_be_copied_into_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever characters the folder has, and with the function that built the network."""
    (tmp_path / "my net.py").write_text(
        "import eqprop\n\ndef build(seed):\n    return eqprop.models.Layered((10, 8, 784), seed=seed)\n"
    )
    target, out = f"{tmp_path}/my net.py:build", tmp_path / "a & b"
    with monkeypatch.context() as patch:
        patch.setattr(Interruption, "requested", property(lambda self: True))
        with pytest.raises(Stopped, match="Continue with: ") as stopped:
            train(target, out, data=few_images(), epochs=1)
    words = shlex.split(str(stopped.value).partition("Continue with: ")[2])
    assert words == ["eqprop", "resume", str(out), "--model", target]
    with pytest.raises(FileExistsError, match=r"Continue it with eqprop resume '.*a & b'"):
        train(target, out, data=few_images(), epochs=1)


@pytest.mark.slow
def test_a_run_under_nohup_goes_on_after_a_hangup(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(*training(place, out))
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert_same_bits(place / "whole", out)


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_the_run(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = command(*training(place, out))
    child, terminal = pty.fork()
    if child == 0:
        os.execve(words[0], words, {**environment(), "TERM": "xterm"})
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() and time.monotonic() < end:
        if select.select([terminal], [], [], 0.01)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert not read_checkpoint(out / "ep").finished
    resume(out, data=place / "data")
    assert_same_bits(place / "whole", out)


def kill_at_random_and_resume(place: Path, out: Path, kills: int, seed: int) -> int:
    """Kill the run so often at random moments, resuming each time; returns how often it was still running."""
    chance = random.Random(seed)
    hit = 0
    process = start(*training(place, out))
    wait_for(out / "experiment.json", process)
    for n in range(kills):
        time.sleep(chance.uniform(0.0, 0.6))
        hit += process.poll() is None
        kill(process)
        if n + 1 < kills:
            before = (out / ".lock").read_text()
            process = start(*resuming(place, out))
            # Until the next process holds the folder, so that the moment is one of its own.
            while process.poll() is None and (out / ".lock").read_text() == before:
                time.sleep(0.005)
    resume(out, data=place / "data")
    return hit


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills_at_random_moments_leave_no_trace(place: Path, tmp_path: Path, seed: int) -> None:
    assert kill_at_random_and_resume(place, tmp_path / "run", kills=10, seed=seed) >= 5
    assert_same_bits(place / "whole", tmp_path / "run")


def test_two_processes_cannot_write_one_folder(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*training(place, out))
    wait_for(out / "metrics.jsonl", process)
    with pytest.raises(BlockingIOError, match="is being written by another process") as refused:
        resume(out, data=place / "data")
    assert str(process.pid) in str(refused.value)
    kill(process)
    resume(out, data=place / "data")
    assert_same_bits(place / "whole", out)


class Enough(Exception):
    pass


class UntilEpoch(Watch):
    def epoch(self, lines: Sequence[Line], progress: Progress) -> None:
        if lines[0]["epoch"] == 3:
            raise Enough


def begun_run(place: Path, out: Path) -> Path:
    """A run with three epochs done."""
    with pytest.raises(Enough):
        train(place / "small.toml", out, data=place / "data", trials=2, watch=UntilEpoch())
    assert read_checkpoint(out / "ep").position.epoch == 3
    return out


def check_nothing_lost(
    place: Path, out: Path, full: Callable[[], AbstractContextManager[None]], words: tuple[str, ...]
) -> None:
    """Resume while nothing can be written: told in words, what was there stays, and goes on when there is room."""
    before, lines = weights(out), metrics(out)
    with full(), pytest.raises(OSError) as refused:
        resume(out, data=place / "data")
    for word in ("Could not save to", f"eqprop resume {out}", *words):
        assert word in str(refused.value)
    after = weights(out)
    assert all(before[name].equal(after[name]) for name in before)
    assert metrics(out)[: len(lines)] == lines
    resume(out, data=place / "data")
    assert_same_bits(place / "whole", out)


def test_a_file_that_cannot_be_written_whole_loses_nothing(place: Path, tmp_path: Path) -> None:
    """A limit on the size of files makes the write of the weights fail in the middle."""
    out = begun_run(place, tmp_path / "run")
    size = checkpoint_file(out / "ep").stat().st_size

    @contextmanager
    def limited() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    check_nothing_lost(place, out, limited, ("File too large",))


def test_a_full_disk_loses_nothing(place: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")

    @contextmanager
    def filled() -> Iterator[None]:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "other").write_bytes(b"x" * (free - 8192))
        yield
        (disk / "other").unlink()

    try:
        check_nothing_lost(
            place, begun_run(place, disk / "run"), filled, ("No space left on device", "free some space")
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def damaged(place: Path, out: Path) -> Path:
    shutil.copytree(place / "whole", out)
    return out
