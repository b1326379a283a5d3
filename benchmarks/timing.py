"""Time chunks of training iterations. Contestants take turns, so that load on the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

CHUNKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 3000)
"""Allowed iterations per chunk; 3000 is one epoch of the paper."""


@dataclass
class Contestant:
    """A callable that runs n training iterations, and its timings.

    times   seconds per iteration, one value per chunk  done    iterations run so far
    """

    run: Callable[[int], None]
    device: torch.device
    longest: int = CHUNKS[-1]
    chunk: int = 1
    setup: float = 0.0

    def __post_init__(self) -> None:
        self.times: list[float] = []
        self.done = 0

    def seconds(self, n: int) -> float:
        """Wall time of n iterations, including the device's work."""
        wait(self.device)
        start = time.perf_counter()
        self.run(n)
        wait(self.device)
        self.done += n
        return time.perf_counter() - start

    def prepare(self, target: float) -> None:
        """Warm up (compilers, graphs, caches), then choose a chunk that takes about `target` seconds.

        `setup` is the extra time of the first iteration.
        """
        first = self.seconds(1)
        n, took = 1, self.seconds(1)
        while took < target / 10 and n < self.longest:
            n = min(10 * n, self.longest)
            took = self.seconds(n)
        self.setup = max(0.0, first - took / n)
        fitting = [c for c in CHUNKS if c <= self.longest and c * took / n <= target]
        self.chunk = fitting[-1] if fitting else 1

    def time_chunk(self) -> None:
        self.times.append(self.seconds(self.chunk) / self.chunk)

    @property
    def us(self) -> float:
        """Microseconds per iteration, the median over chunks."""
        return 1e6 * median(self.times)

    @property
    def spread_us(self) -> float:
        """The interquartile range over chunks."""
        if len(self.times) < 2:
            return 0.0
        low, _, high = quantiles(self.times, n=4, method="inclusive")
        return 1e6 * (high - low)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(contestants: Sequence[Contestant], rounds: int, slow: Contestant, slow_rounds: int) -> None:
    """Time one chunk per contestant and round; `slow` joins only in `slow_rounds` of them, spread evenly."""
    for i in range(rounds):
        if (i + 1) * slow_rounds // rounds > i * slow_rounds // rounds:
            slow.time_chunk()
        for contestant in contestants:
            contestant.time_chunk()
