"""The random signs of beta: one a network and iteration, from a hash, so that a run needs no generator to go on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

BITS = 256
"""Signs of one digest: its bits, the highest first, 1 standing for +1 and 0 for -1."""


def random_sign(seed: int, iteration: int) -> int:
    """+1 or -1: bit i mod 256 of SHA-256 of "eqprop signs SEED BLOCK", BLOCK = i div 256."""
    block, bit = divmod(iteration, BITS)
    return 1 if _digest(seed, block) >> (BITS - 1 - bit) & 1 else -1


def _digest(seed: int, block: int) -> int:
    return int.from_bytes(hashlib.sha256(f"eqprop signs {seed} {block}".encode()).digest(), "big")


@dataclass(frozen=True)
class Signs:
    """The signs of a training run.

    seeds   one a network: a network draws the same signs stacked with others as alone
    first   the iteration a runner begins with, counted from the start of the training
    """

    seeds: tuple[int, ...] = field(default=(0,))
    first: int = 0

    def rows(self, start: int, n: int) -> Tensor:
        """(n, R) of +1 and -1 in float64, for n iterations from `start` on, counted from `first`."""
        begin = self.first + start
        columns = [list(_signs(seed, begin, begin + n)) for seed in self.seeds]
        return torch.tensor(columns, dtype=torch.float64).view(len(self.seeds), n).T.contiguous()


def _signs(seed: int, begin: int, end: int) -> Iterator[float]:
    block, digest = -1, 0
    for i in range(begin, end):
        if i // BITS != block:
            block = i // BITS
            digest = _digest(seed, block)
        yield 1.0 if digest >> (BITS - 1 - i % BITS) & 1 else -1.0
