"""Stop training in every way: kills, full disks, signals.

Afterwards a resume must end with the bits of a run left alone.
Every case follows from the seed and its number. A case trains in a process of its own, forked from one that has the
command line imported:

  kill      SIGKILL at a random moment, or before a file operation chosen at random, or in the middle of a write;
            one to three times in a row
  disk      from a file operation chosen at random on, every write fails (no space, over quota, input/output error);
            or the size of files is limited. The command must exit with 2 and one sentence
  signals   SIGINT, SIGTERM or SIGHUP at a random moment. The command must save and exit with 128 + the signal

    python tests/campaigns/stops.py --kill 60 --disk 20 --signals 20 --out results/campaigns.json
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from helpers.forked import Child, fork

from eqprop.cli import load_commands, main
from eqprop.provenance import commit, provenance
from eqprop.run import train
from eqprop.run.checkpoint import read_checkpoint
from eqprop.run.folder import LOCK, is_run
from eqprop.run.log import WALL_TIME, read_metrics

LEGS = ("ep", "bptt")
LIMIT = 60.0
"""Seconds that one command may take."""
OPERATIONS = ("open", "fsync", "replace", "unlink", "mkdir", "rename", "chmod")
"""Functions of os that change files; `open` counts if it creates one."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class Writing:
    """A file opened for writing, whose write may be cut in the middle."""

    def __init__(self, file: Any, fault: Fault) -> None:
        self.file, self.fault = file, fault

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        if self.fault.is_next():
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            self.fault.strike()
        self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Fault:
    """Strikes at the operation number `at` of this process: kills it, or raises an OSError from then on."""

    def __init__(self, at: int, error: int | None = None) -> None:
        self.at, self.error, self.done = at, error, 0

    def is_next(self) -> bool:
        self.done += 1
        return self.done == self.at or (self.error is not None and self.done > self.at)

    def strike(self) -> None:
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.error, os.strerror(self.error or 0))

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        fdopen = os.fdopen

        def opened(handle: int, mode: str = "r", *rest: Any, **others: Any) -> Any:
            file = fdopen(handle, mode, *rest, **others)
            return Writing(file, self) if "r" not in mode else file

        os.fdopen = opened  # type: ignore[assignment]

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            changes = name != "open" or (len(given) > 1 and given[1] & os.O_CREAT)
            # A full disk still deletes.
            if changes and self.is_next() and not (self.error is not None and name == "unlink"):
                self.strike()
            return function(*given, **named)

        return call


@dataclass
class Outcome:
    """The counts of one campaign. `wrong` describes every case that broke a promise."""

    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "counts": dict(sorted(self.counts.items())),
            "wrong": self.wrong,
            "seconds": round(self.seconds, 1),
        }


class Place:
    """A folder with data, an experiment and a run left alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _write_data(folder / "data")
        (folder / "small.toml").write_text(
            "T = 4\nK = 2\nbeta = 0.2\nepochs = 6\nbatch = 10\n[model]\nsizes = [10, 16, 784]\n"
            '[optimizer.rates]\n"*" = 0.1\n'
        )
        self.whole = folder / "whole"
        # Here, so that the processes forked later have everything imported.
        train(folder / "small.toml", self.whole, data=folder / "data", estimators=LEGS, trials=2, threads=1)
        timed = self.start(folder / "timed")
        _await_begin(folder / "timed", timed)
        begun = time.monotonic()
        ended = timed.wait(LIMIT)
        assert ended.code == 0, ended.stderr
        self.seconds = time.monotonic() - begun
        counter = Fault(at=-1)
        ended = self.start(folder / "counted", counter, folder / "operations").wait(LIMIT)
        assert ended.code == 0, ended.stderr
        self.operations = int((folder / "operations").read_text())
        shutil.rmtree(folder / "counted")

    def words(self, out: Path) -> list[str]:
        if is_run(out):
            return ["resume", str(out), "--data", str(self.folder / "data"), "--quiet"]
        train = ["train", str(self.folder / "small.toml"), "--estimator", ",".join(LEGS), "--trials", "2"]
        return [*train, "--data", str(self.folder / "data"), "--threads", "1", "--out", str(out), "--quiet"]

    def start(self, out: Path, fault: Fault | None = None, count: Path | None = None, size: int | None = None) -> Child:
        """Train or resume in a forked process, which writes to `count` how many file operations it did."""
        words = self.words(out)

        def work() -> None:
            sys.argv = ["eqprop", *words]
            if size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            if fault is not None:
                fault.install()
            main()

        def last(code: int) -> None:
            if count is not None and fault is not None:
                at = fault.done  # writing is an operation too
                count.write_text(str(at))

        return fork(work, self.folder / f"{out.name}.stderr", last)

    def differs(self, out: Path) -> str | None:
        """How a finished run differs from the one left alone; None if not at all."""
        a, b = ([{k: v for k, v in x.items() if k != WALL_TIME} for x in read_metrics(f)] for f in (self.whole, out))
        if a != b:
            return f"metrics: {len(b)} lines, expected {len(a)} equal ones"
        for leg in LEGS:
            one, other = read_checkpoint(self.whole / leg), read_checkpoint(out / leg)
            if one.position != other.position or one.weights.keys() != other.weights.keys():
                return f"{leg}: another checkpoint"
            if not all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights):
                return f"{leg}: other weights"
        left = [str(p.relative_to(out)) for p in out.rglob("*.part")]
        return f"left behind: {', '.join(left)}" if left else None


def _write_data(folder: Path) -> None:
    """Random images as IDX files."""
    folder.mkdir()
    draw = random.Random(0)
    for stem, n in (("train", 100), ("t10k", 40)):
        head = struct.pack(">BBBBIII", 0, 0, 8, 3, n, 28, 28)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(head + draw.randbytes(n * 784))
        labels = bytes(draw.randrange(10) for _ in range(n))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, n) + labels)


def _await_begin(out: Path, child: Child) -> None:
    """Until the child holds the folder, so that the moment chosen is one of its training."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            if (out / LOCK).read_text().strip() == str(child.pid):
                return
        except OSError:
            pass
        if child.has_ended:
            return
        time.sleep(0.001)


def kill_case(place: Place, out: Path, draw: random.Random, counts: Counter[str]) -> str | None:
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            started = place.start(out)
            _await_begin(out, started)
            time.sleep(draw.uniform(0.0, place.seconds))
            started.kill(signal.SIGKILL)
            how = "at a moment"
        else:
            started = place.start(out, Fault(draw.randint(1, place.operations)))
            how = "at a file operation"
        ended = started.wait(LIMIT)
        if ended.code not in (0, -signal.SIGKILL):
            return f"ended with {ended.code}: {ended.stderr[-300:]}"
        counts[f"killed {how}" if ended.code else "finished before the kill"] += 1
    return None


def disk_case(place: Place, out: Path, draw: random.Random, counts: Counter[str]) -> str | None:
    if draw.random() < 0.3:
        size = draw.randint(1, 60_000)
        ended, what = place.start(out, size=size).wait(LIMIT), "file size limited"
    else:
        error = draw.choice(FULL)
        fault = Fault(draw.randint(1, place.operations), error)
        ended, what = place.start(out, fault).wait(LIMIT), os.strerror(error)
    if ended.code == 0:
        counts["finished before the disk was full"] += 1
        return None
    sentence = "Could not save to" in ended.stderr or "Cannot write to" in ended.stderr
    if ended.code != 2 or "Traceback" in ended.stderr or not sentence:
        return f"{what}: ended with {ended.code}: {ended.stderr[-300:]}"
    counts[what] += 1
    return None


def signal_case(place: Place, out: Path, draw: random.Random, counts: Counter[str]) -> str | None:
    number = draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    started = place.start(out)
    _await_begin(out, started)
    time.sleep(draw.uniform(0.0, place.seconds))
    started.kill(number)
    ended = started.wait(LIMIT)
    if ended.code == 0:
        counts["finished before the signal"] += 1
    elif ended.code == 128 + number and "Stopped and saved" in ended.stderr:
        counts[f"saved on {number.name}"] += 1
    elif ended.code in (-number, 130) and "Traceback" not in ended.stderr:
        counts[f"ended by {number.name} outside the training loop"] += 1
    else:
        return f"{number.name}: ended with {ended.code}: {ended.stderr[-300:]}"
    return None


CASES: dict[str, Callable[[Place, Path, random.Random, Counter[str]], str | None]] = {
    "kill": kill_case,
    "disk": disk_case,
    "signals": signal_case,
}


def run(
    kind: str,
    cases: int,
    seed: int,
    place: Place,
    show: Callable[[str], None] = lambda text: None,
    keep: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run a campaign. After each case a resume must finish with the bits of the run left alone.

    show    called with a sentence about each case that broke a promise
    keep    called after every case, so that a campaign that is cut short leaves what it found
    """
    outcome, begun = Outcome(), time.monotonic()
    for n in range(cases):
        out = place.folder / f"{kind}-{n}"
        wrong = CASES[kind](place, out, random.Random(f"{kind} {seed} {n}"), outcome.counts)
        if wrong is None:
            ended = place.start(out).wait(LIMIT)
            wrong = f"resume ended with {ended.code}: {ended.stderr[-300:]}" if ended.code else place.differs(out)
        if wrong is not None:
            outcome.wrong.append(f"case {n}: {wrong}")
            show(f"{kind} {n}: {wrong}")
        outcome.cases += 1
        shutil.rmtree(out, ignore_errors=True)
        outcome.seconds = time.monotonic() - begun
        keep(outcome)
    return outcome


def campaigns(
    wanted: dict[str, int],
    seed: int,
    show: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict[str, Outcome]], None] = lambda found: None,
) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    load_commands(["train"])
    load_commands(["resume"])
    os.environ["EQPROP_COMMIT"] = commit() or "unknown"
    with tempfile.TemporaryDirectory(prefix="eqprop-stops-") as scratch:
        place, found = Place(Path(scratch)), dict[str, Outcome]()
        for kind, cases in wanted.items():
            if cases:
                found[kind] = run(kind, cases, seed, place, show, lambda now, kind=kind: keep({**found, kind: now}))  # type: ignore[misc]
        return found


def documents(found: dict[str, Outcome], seed: int) -> Iterator[dict[str, Any]]:
    made = {**provenance(), "command": " ".join(["stops.py", *sys.argv[1:-1], Path(sys.argv[-1]).name])}
    for kind, outcome in found.items():
        yield {"campaign": kind, "seed": seed, "root": os.getuid() == 0, **outcome.to_dict(), "provenance": made}


def command_line() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for kind in CASES:
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="N", help="number of cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the counts as JSON; the last option")
    given = parser.parse_args()

    def keep(found: dict[str, Outcome]) -> None:
        if given.out is not None:
            given.out.write_text(json.dumps(list(documents(found, given.seed)), indent=1) + "\n")

    wanted = {kind: getattr(given, kind) for kind in CASES}
    found = campaigns(wanted, given.seed, lambda text: print(text, flush=True), keep)
    for kind, outcome in found.items():
        print(f"{kind}: {json.dumps(outcome.to_dict())}")
    return 1 if any(outcome.wrong for outcome in found.values()) else 0


if __name__ == "__main__":
    sys.exit(command_line())
