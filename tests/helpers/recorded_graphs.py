"""CUDA graphs on the CPU: what is captured is recorded operation by operation, and replayed into the same memory.

As on a GPU, a replay runs no Python, reads and writes the tensors of the capture, and an iteration that reads a value
back or makes a tensor of Python numbers cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

FORBIDDEN = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::lift_fresh")


class Recorded:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def pool(self) -> None:
        return None

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, kept in self.calls:
            found = tree_leaves(function(*args, **kwargs))
            for new, old in zip(found, kept, strict=True):
                if old is not None:
                    old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, graph: Recorded) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function._schema.name in FORBIDDEN:
            raise RuntimeError(f"{function} cannot be captured: it waits for the device")
        options = dict(kwargs or {})
        found = function(*args, **options)
        returns = function._schema.returns
        leaves = tree_leaves(found)
        made = leaves and all(one.alias_info is None for one in returns)
        kept = [_own(v) if made and isinstance(v, Tensor) else None for v in leaves]
        self.graph.calls.append((function, tree_map(_own, args), tree_map(_own, options), kept))
        return found


def _own(value: Any) -> Any:
    """The same memory, out of reach of those who change the tensor's shape or gradient."""
    return value.detach() if isinstance(value, Tensor) else value


@contextmanager
def _capturing(graph: Recorded, pool: object = None) -> Iterator[None]:
    with Recording(graph):
        yield


def recording(v: Tensor) -> bool:
    """Stands for `compiled.capturing`."""
    return isinstance(_get_current_dispatch_mode(), Recording)


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.cuda's graphs and streams be those of this file."""
    monkeypatch.setattr("eqprop.engines.compiled.capturing", recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", _capturing)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
