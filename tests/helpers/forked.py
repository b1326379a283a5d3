"""Processes forked from one that has everything imported: each costs milliseconds."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, negative for a signal, and what it wrote to standard error."""

    code: int
    stderr: str


@dataclass(frozen=True)
class Child:
    """A running process, and where its output goes."""

    pid: int
    log: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    @property
    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float) -> Ended:
        """How it ends; after that many seconds it is killed."""
        end = time.monotonic() + seconds
        while not self.has_ended:
            if time.monotonic() > end:
                self.kill()
                os.waitpid(self.pid, 0)
                return Ended(124, "took too long")
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Ended(code, self.log.read_text(errors="replace") if self.log.exists() else "")


def fork(work: Callable[[], object], log: Path, last: Callable[[int], object] = lambda code: None) -> Child:
    """Work in a forked process, which leaves without the parent's clean-up; `last` takes its exit code before that."""
    child = os.fork()
    if child:
        return Child(child, log)
    code = 70
    try:
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(to, 1)
        os.dup2(to, 2)
        work()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            last(code)
        finally:
            os._exit(code)
