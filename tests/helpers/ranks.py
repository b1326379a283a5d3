"""Start ranks as torchrun does, forked from a process that has everything imported: each costs milliseconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from eqprop.cli import load_commands, main
from eqprop.engines import load_engine
from eqprop.provenance import commit
from eqprop.run import distributed
from helpers.forked import Child, Ended, fork

LIMIT = 120.0
"""Seconds that the ranks of one job may take."""


@dataclass(frozen=True)
class Job:
    """Ranks that are running."""

    ranks: tuple[Child, ...]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.ranks[rank].kill(number)

    def wait(self, limit: float = LIMIT) -> list[Ended]:
        return [rank.wait(limit) for rank in self.ranks]


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
    port = str(free_port())

    def join(rank: int) -> None:
        given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in given.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(more or {})})
        torch.set_num_threads(1)
        work(rank)

    def leave(code: int) -> None:
        if code == 0:
            distributed._leave()

    return Job(tuple(fork(partial(join, rank), folder / f"rank-{rank}.stderr", leave) for rank in range(size)))


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
