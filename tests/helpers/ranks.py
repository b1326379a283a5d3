"""Start ranks as torchrun does, forked from a process that has everything imported: each costs milliseconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from eqprop.cli import load_commands, main
from eqprop.engines import load_engine
from eqprop.provenance import commit
from eqprop.training import distributed

LIMIT = 120.0
"""Seconds that the ranks of one job may take."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, negative for a signal, and what it wrote to standard error."""

    code: int
    stderr: str


@dataclass(frozen=True)
class Job:
    """Ranks that are running, and where the standard error of each goes."""

    pids: tuple[int, ...]
    logs: tuple[Path, ...]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def wait(self, limit: float = LIMIT) -> list[Ended]:
        return [self._wait(n, time.monotonic() + limit) for n in range(len(self.pids))]

    def _wait(self, n: int, end: float) -> Ended:
        while True:
            found, status = os.waitpid(self.pids[n], os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                return Ended(code, self.logs[n].read_text(errors="replace") if self.logs[n].exists() else "")
            if time.monotonic() > end:
                os.kill(self.pids[n], signal.SIGKILL)
                os.waitpid(self.pids[n], 0)
                return Ended(124, "took too long")
            time.sleep(0.005)


def prepare() -> None:
    """Import here what every rank would import for itself: torch's optimizers bring a compiler along."""
    torch.set_num_threads(1)
    load_engine("eager")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    load_commands(["train"])
    load_commands(["resume"])
    os.environ.setdefault("EQPROP_COMMIT", commit() or "unknown")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(size: int, work: Callable[[int], object], folder: Path, more: Mapping[str, str] | None = None) -> Job:
    """Fork `size` ranks that each call work(rank)."""
    folder.mkdir(parents=True, exist_ok=True)
    port, pids, logs = free_port(), [], []
    for rank in range(size):
        log = folder / f"rank-{rank}.stderr"
        child = os.fork()
        if child == 0:
            given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(value) for name, value in given.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(more or {})})
            _become(lambda rank=rank: work(rank), log)  # type: ignore[misc]
        pids.append(child)
        logs.append(log)
    return Job(tuple(pids), tuple(logs))


def _become(work: Callable[[], object], log: Path) -> None:
    """Work in this forked process, and leave without the parent's clean-up."""
    code = 70
    try:
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(to, 1)
        os.dup2(to, 2)
        torch.set_num_threads(1)
        work()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0:
            distributed._leave()
        os._exit(code)


def command(*words: object) -> Callable[[int], None]:
    """The command line, as work for a rank."""

    def work(rank: int) -> None:
        sys.argv = ["eqprop", *map(str, words)]
        main()

    return work


def run(size: int, work: Callable[[int], object], folder: Path) -> list[Ended]:
    return start(size, work, folder).wait()


def check(ended: list[Ended]) -> None:
    for rank, one in enumerate(ended):
        assert one.code == 0, f"rank {rank} ended with {one.code}: {one.stderr[-2000:]}"
