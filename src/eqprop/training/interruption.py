"""Ctrl-C and termination as a wish: the present iteration ends, the run is saved, then it stops."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Stopped(KeyboardInterrupt):
    """A run was stopped by a signal and saved. `exit_code` is the shell's: 130 after Ctrl-C, 143 after a SIGTERM."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interruption:
    """While entered, SIGINT and SIGTERM only set `signal`; a second Ctrl-C interrupts at once.

    Outside the main thread, where Python allows no handlers, it leaves signals alone.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._wish)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _wish(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or signal.SIGINT)
