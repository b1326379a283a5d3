"""The order of the samples: a permutation per trial and epoch, drawn on the CPU from a hash of seed and epoch.

A run needs no generator state to go on: seed, epoch and iteration say which mini-batch comes next, on every
device and for every method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def order_seed(seed: int, epoch: int) -> int:
    """The first 63 bits of SHA-256 of "eqprop batches SEED EPOCH"."""
    digest = hashlib.sha256(f"eqprop batches {seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_order(seed: int, epoch: int, samples: int, batch: int) -> Tensor:
    """(samples // batch, batch) sample numbers; what does not fill a mini-batch is left out, others each epoch."""
    if batch > samples:
        raise ValueError(
            f"A mini-batch of {batch} needs {batch} training samples; there are {samples}. Lower the batch."
        )
    generator = torch.Generator().manual_seed(order_seed(seed, epoch))
    whole = samples // batch
    return torch.randperm(samples, generator=generator)[: whole * batch].view(whole, batch)


def stacked_order(seeds: Sequence[int], epoch: int, samples: int, batch: int) -> Tensor:
    """(n, R, batch): the orders of R trials side by side."""
    return torch.stack([epoch_order(seed, epoch, samples, batch) for seed in seeds], dim=1)
