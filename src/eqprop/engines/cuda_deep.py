"""Whole training iterations of nets with two to four hidden layers in two CUDA kernels (see kernels/deep.cu)."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine, Job, Runner, learning_rates
from eqprop.engines.cuda_job import JobArgs, KernelRunner, refuses_job
from eqprop.estimators import BPTT, Estimator
from eqprop.models import Layered
from eqprop.relax import Phase, Relaxation, relax
from eqprop.state import State

LAYERS = 5
SLOTS = 4
WARPS = 8
THREADS = 256
WIDE = 40
WIDEST = 72
"""Tiles of 16 inputs: up to WIDE a block holds three tiles of units, up to WIDEST two (see kernels/deep.cu)."""

_Pointers = ctypes.c_void_p * LAYERS


class _Args(ctypes.Structure):
    """`Args` of deep.cu."""

    _fields_ = [
        ("job", JobArgs),
        ("W", ctypes.c_void_p * 4),
        ("b", ctypes.c_void_p * 4),
        *((name, _Pointers) for name in ("packets", "rates", "errors", "states", "inputs", "s", "t")),
        ("moved", ctypes.c_void_p),
        ("roles", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("blocks", "first", "packet_count", "moved_count")),
        ("lr", ctypes.c_float * 4),
        ("lrb", ctypes.c_float * 4),
    ]


def _tiles(units: int) -> int:
    return -(-units // 16)


def _input_tiles(model: Layered, n: int) -> int:
    """Tiles of 16 units that layer n hears: its moving neighbours."""
    return sum(_tiles(model.sizes[m]) for m in (n - 1, n + 1) if 0 <= m < model.depth)


def roles(model: Layered, batch: int) -> list[tuple[int, int, int]]:
    """Which block of a network runs what: (layer, first tile, tiles)."""
    out = []
    for n in range(model.depth):
        most = min(3 if _input_tiles(model, n) <= WIDE else 2, THREADS // (4 * batch))
        count = _tiles(model.sizes[n])
        blocks = -(-count // most)
        edges = [count * i // blocks for i in range(blocks + 1)]
        out += [(n, first, last - first) for first, last in pairwise(edges)]
    return out


def groups(networks: int, most: int) -> list[tuple[int, int]]:
    """Networks in launches of at most `most`, as even as can be: (first, number)."""
    launches = -(-networks // most)
    edges = [networks * i // launches for i in range(launches + 1)]
    return [(first, last - first) for first, last in pairwise(edges)]


class DeepRunner(KernelRunner):
    iterations_per_graph = 10

    def build(self) -> None:
        model, R, B, depth = self.model, self.networks, self.batch, self.model.depth
        widest = max(_input_tiles(model, n) for n in range(depth))
        sizes = {f"N{n}": model.sizes[n] if n < depth else 0 for n in range(LAYERS)}
        self.compile("deep.cu", sizes | {"DEPTH": depth, "WIDEST": widest, "QUICK": 0})
        self.relax = self.module.kernel("relax", _shared_bytes(widest, B))
        self.update = self.module.kernel("update", max(self.input_tile_bytes, 2 * 4 * 2 * B * 64))
        table = roles(model, B)
        self.roles = torch.tensor(table, dtype=torch.int32, device=self.device)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.groups = groups(R, processors // len(table))
        self._lay_out()
        tiles = sum(-(-model.sizes[n] // 64) * -(-model.sizes[n + 1] // 64) for n in range(depth - 1))
        self.blocks = self.input_blocks + tiles * R + R
        self.launches = [self._arguments(first, len(table)) for first, _ in self.groups]

    def _lay_out(self) -> None:
        model, R, B, K = self.model, self.networks, self.batch, self.job.estimator.K
        bptt = isinstance(self.job.estimator, BPTT)
        tiles = [_tiles(model.sizes[n]) for n in range(model.depth)]
        each = [SLOTS * R * count * -(-B // 8) * 32 for count in tiles]
        self.packets = self.buffer(sum(each), 4, dtype=torch.int32)
        self.packet_starts = [sum(each[:n]) for n in range(model.depth)]
        self.moved = self.buffer(R, self.job.estimator.T // 16 + 2, dtype=torch.int32)

        def layers(slots: int, wanted: bool = True) -> list[Tensor]:
            return [self.buffer(slots, R, B, count * 16) for count in tiles] if wanted else []

        self.layers = {
            "rates": layers(K if bptt else 2),
            "errors": layers(K, bptt),
            "states": layers(K, bptt and model.energy_based),
            "inputs": layers(K, bptt and model.energy_based),
            "s": layers(1),
            "t": layers(1),
        }

    def _arguments(self, first: int, blocks: int) -> _Args:
        model, rates = self.model, learning_rates(self.job)
        inner = range(model.depth - 1)
        pointers = {name: _Pointers(*(t.data_ptr() for t in tensors)) for name, tensors in self.layers.items()}
        return _Args(
            job=self.job_args(),
            W=(ctypes.c_void_p * 4)(*(model.weight(n).data_ptr() for n in inner)),
            b=(ctypes.c_void_p * 4)(*(model.get_parameter(f"b{n}").data_ptr() for n in inner if model.bias)),
            packets=_Pointers(*(self.packets[start:].data_ptr() for start in self.packet_starts)),
            **pointers,
            moved=self.moved.data_ptr(),
            roles=self.roles.data_ptr(),
            blocks=blocks,
            first=first,
            packet_count=len(self.packets),
            moved_count=self.moved.shape[1],
            lr=(ctypes.c_float * 4)(*(rates[f"W{n}{n + 1}"] for n in inner)),
            lrb=(ctypes.c_float * 4)(*(rates.get(f"b{n}", 0.0) for n in inner)),
        )

    def launch(self, i: int) -> None:
        self.update.launch(self.blocks, 256, [self.launches[0], ctypes.c_int(i)])
        for (_, count), arguments in zip(self.groups, self.launches, strict=True):
            self.relax.launch(len(self.roles) * count, THREADS, [arguments, ctypes.c_int(i)], together=True)

    def states(self) -> tuple[State, State]:
        """The free states of the last iteration and, after EP, the nudged ones."""
        free, last = (
            tuple(t[0, ..., : self.model.sizes[n]].clone() for n, t in enumerate(self.layers[name]))
            for name in ("s", "t")
        )
        return free, last


def _shared_bytes(widest: int, batch: int) -> int:
    """Shared memory of a block: the low halves of its weights, and two pages of partial sums.

    The high halves pass through the pages on their way to registers.
    """
    plans = [(3, WIDE // WARPS)] + ([(2, -(-widest // WARPS))] if widest > WIDE else [])
    pages = 2 * WARPS * -(-batch // 8) * 192 * 4
    return max(WARPS * m * k * 512 + max(m * pages, WARPS * m * k * 512) for m, k in plans)


class Deep(Engine):
    name = "cuda-deep"
    # Weights are carried with 22 bits: on long chains the state is off by 2.4 times what float32 is (EB-2h on an H200).
    as_float32 = False

    def refuses(
        self,
        model: Dynamics,
        cost: Cost | None = None,
        estimator: Estimator | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> str | None:
        if (reason := refuses_job(model, cost, estimator, optimizer)) is not None:
            return reason
        assert isinstance(model, Layered), "refused otherwise"
        if not 3 <= model.depth <= LAYERS:
            return f"it runs nets with two to four hidden layers, and the sizes are {model.sizes}."
        if max(_input_tiles(model, n) for n in range(model.depth)) > WIDEST:
            return f"a layer's neighbours may have {16 * WIDEST} units together, and the sizes are {model.sizes}."
        properties = torch.cuda.get_device_properties(model.weight(0).device)
        if properties.major < 8 or getattr(properties, "shared_memory_per_block_optin", 0) < _shared_bytes(WIDEST, 24):
            return f"{properties.name} has too little shared memory for its blocks."
        needed = len(roles(model, 20))
        if needed > properties.multi_processor_count:
            return f"a network needs {needed} blocks at once, and the device has {properties.multi_processor_count}."
        return None

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        return relax(model, x, phase, state)

    def runner(self, job: Job) -> Runner:
        return DeepRunner(job)
