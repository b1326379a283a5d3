"""What training needs of memory: EP keeps no trajectory, BPTT keeps the K steps it goes back through."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eqprop import BPTT, EP, SquaredError
from eqprop.data import one_hot
from eqprop.estimators import Estimator
from eqprop.models import Layered
from eqprop.relax import relax


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside it that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.seen or not size:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak(estimator: Estimator) -> int:
    torch.manual_seed(0)
    model = Layered((10, 64, 64), activation="tanh", seed=0)
    x, y = torch.rand(32, 64), one_hot(torch.arange(32) % 10, 10)
    with Live() as live:
        estimator.gradient(model, SquaredError(), x, y)
    return live.peak


def test_ep_needs_no_more_memory_for_longer_phases() -> None:
    for options in ({}, {"nudging": "symmetric"}, {"schedule": "sweeps"}):
        short = peak(EP(T=10, K=4, beta=0.5, **options))  # type: ignore[arg-type]
        assert peak(EP(T=80, K=4, beta=0.5, **options)) == short  # type: ignore[arg-type]
        assert peak(EP(T=10, K=40, beta=0.5, **options)) == short  # type: ignore[arg-type]


def test_bptt_needs_memory_for_the_steps_it_goes_back_through_and_no_others() -> None:
    short, far = peak(BPTT(T=40, K=4)), peak(BPTT(T=40, K=34))
    state = 4 * 32 * (10 + 64)
    assert peak(BPTT(T=80, K=4)) == short
    assert far - short >= 30 * state


def test_phases_one_after_the_other_need_less_memory_than_side_by_side() -> None:
    symmetric = EP(T=10, K=4, beta=0.5, nudging="symmetric")
    assert peak(replace(symmetric, side_by_side=False)) < 0.8 * peak(symmetric)


def test_what_keeps_its_states_is_seen() -> None:
    """The measure itself: a phase that keeps every state grows with T."""

    def kept(T: int) -> int:
        model = Layered((10, 64, 64), activation="tanh", seed=0)
        with Live() as live:
            relax(model, torch.rand(32, 64), T, keep=T)
        return live.peak

    state = 4 * 32 * (10 + 64)
    assert kept(40) - kept(20) >= 20 * state
