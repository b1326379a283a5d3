"""Whole training iterations of nets with two to four hidden layers in two CUDA kernels (see kernels/deep.cu)."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.engines.base import Job, Runner, learning_rates
from eqprop.engines.cuda import nvrtc
from eqprop.engines.cuda.job import JobArgs, KernelRunner, LayeredEngine
from eqprop.estimators import BPTT, Estimator
from eqprop.models import Layered
from eqprop.state import State

LAYERS = 5
WARPS = 8
HELPERS = 4
"""Extra warps of a block, which compute the outputs; the others hold weights between hidden layers."""
THREADS = 32 * (WARPS + HELPERS)
WIDEST = 32
"""Largest number of 16-unit tiles in a layer: a warp's registers hold one row of that many weight tiles."""
CLUSTERS = (2, 4, 8, 16)
SAMPLES = 7
"""Most samples per cluster. A tensor-core product has eight columns; seven are enough for the paper's batch of 20."""
LARGEST_RANGE = 32
"""Largest allowed bound of the outputs. They are quantised relative to it; above this, states would lose digits."""
WORKERS = 4
"""Workers of a block that updates a 64 x 64 tile of weights (kernels/inner_weights.cuh)."""
SCRATCH, OUTPUT_SCRATCH = 6 * 640 * 4, 16 * 36 * 4
"""Scratch bytes for a warp, and for a helper, while loading weights (kernels/tile.cuh, outputs.cuh)."""
FRAGMENT_BYTES = 1536
"""Bytes of the weights from the outputs to two tiles (kernels/spot.cuh)."""
SHARED_BYTES = 232_448
"""Shared memory per block on a device with clusters."""

_Pointers = ctypes.c_void_p * LAYERS
Role = tuple[int, int, int]
"""Layer, pair of tiles, part."""


class _DeepArgs(ctypes.Structure):
    """`Args` of deep.cu."""

    _fields_ = [
        ("job", JobArgs),
        ("W", ctypes.c_void_p * 4),
        ("b", ctypes.c_void_p * 4),
        *((name, _Pointers) for name in ("activity", "errors", "states", "inputs", "s", "t")),
        ("moved", ctypes.c_void_p),
        ("roles", ctypes.c_void_p),
        ("moved_count", ctypes.c_int),
        ("lr", ctypes.c_float * 4),
        ("lrb", ctypes.c_float * 4),
        ("output_range", ctypes.c_float),
    ]


def _tiles(units: int) -> int:
    """Tiles of a hidden layer, rounded up to an even number."""
    return -(-units // 32) * 2


@dataclass(frozen=True)
class Layout:
    """Assignment of tiles to the warps of a cluster, and the layout of shared memory.

    blocks        roles per block: (layer, pair of tiles, part), at most WARPS; the two warps of a pair are adjacent at
                  an even index, the four of a layer between two hidden ones start at a multiple of four
    sizes         of the dynamic layers, output first
    samples       most samples per cluster
    bptt          whether errors are exchanged too
    """

    blocks: tuple[tuple[Role, ...], ...]
    sizes: tuple[int, ...]
    samples: int
    bptt: bool

    def heard(self, rank: int) -> set[int]:
        """The layers whose states a block receives."""
        return {m for n, _, _ in self.blocks[rank] for m in (n - 1, n + 1) if 0 <= m < len(self.sizes)}

    def listeners(self, n: int) -> int:
        """The blocks that receive layer n, which are adjacent: index of the first + 256 * their number."""
        ranks = [rank for rank in range(len(self.blocks)) if n in self.heard(rank)]
        assert ranks == list(range(ranks[0], ranks[-1] + 1))
        return ranks[0] + 256 * len(ranks)

    @property
    def shares(self) -> list[tuple[int, int]]:
        """The helpers, as (block, helper), that sum the outputs' input from layer 1, at least two tiles each."""
        helpers = [(rank, i) for i in range(HELPERS) for rank in range(len(self.blocks)) if 1 in self.heard(rank)]
        return helpers[: _tiles(self.sizes[1]) // 2]

    @property
    def places(self) -> list[int]:
        """First tile of each layer in a block's area, always even. A block receives only even or only odd layers."""
        starts, ends = [], [0, 0]
        for n, size in enumerate(self.sizes):
            starts.append(ends[n % 2])
            ends[n % 2] += _tiles(size)
        return starts

    @property
    def most(self) -> int:
        return max(map(_tiles, self.sizes[1:]))

    @property
    def chunks(self) -> int:
        """Pairs of tiles that a warp receives: half of the widest layer."""
        return -(-self.most // 4)

    @property
    def area(self) -> int:
        """Tiles in a block's area, enough for every warp to read a tile for each of its weights."""
        return max(place + 4 * self.chunks for place in self.places)

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets in shared memory.

        EXTRAS     in blocks of layer 1: low bytes of the weights to the outputs
        FRAGMENTS  in blocks that receive layer 1: weights of the outputs
        OUTPUTS    in blocks that receive the outputs: shares of their sums
        PARTIALS   partial sums exchanged between warps; from here on, scratch while weights are loaded
        SLOTS      states received from other blocks
        """
        shares = self.shares
        in_a_block = max(Counter(rank for rank, _ in shares).values())
        fragments = in_a_block * -(-_tiles(self.sizes[1]) // 2 // len(shares)) * FRAGMENT_BYTES
        outputs = 2 * len(shares) * (256 + 32 * max(0, self.sizes[0] - 8))
        side = WARPS * 2 * self.chunks * 512
        extras = WARPS * 256
        partials = side + max(fragments, extras + outputs)
        places = {"EXTRAS": side, "FRAGMENTS": side, "OUTPUTS": side + extras}
        return places | {"PARTIALS": partials, "SLOTS": partials + WARPS // 2 * 3072}

    @property
    def definitions(self) -> dict[str, int]:
        """Preprocessor definitions for deep.cu."""
        depth = len(self.sizes)
        heard = [self.listeners(n) for n in range(depth)]
        per_layer = {"N": self.sizes, "PLACE": self.places, "HEARD": heard}
        named = {f"{k}{n}": v[n] if n < depth else 0 for k, v in per_layer.items() for n in range(LAYERS)}
        return named | {
            "DEPTH": depth,
            "CLUSTER": len(self.blocks),
            "LISTENERS": max(heard) // 256,
            "SHARES": len(self.shares),
            "MOST": self.most,
            "AREA": self.area,
            **self.offsets,
        }

    @property
    def shared_bytes(self) -> int:
        slots = 2 * self.area * self.samples * 48 + (2 * LAYERS + 2) * 8
        errors = 2 * (self.area + LAYERS) * 8 if self.bptt else 0
        scratch = WARPS * SCRATCH + HELPERS * OUTPUT_SCRATCH
        return max(self.offsets["SLOTS"] + slots + errors, self.offsets["PARTIALS"] + scratch)

    def table(self) -> list[list[int]]:
        """`roles` of deep.cu.

        For a warp: layer, pair, part, and the barriers it arms (1: its source's, 2: the outputs'). For a helper: its
        share of the outputs' sums or -1, and the index of that share within the block.
        """
        rows, shares = [], self.shares
        for rank, block in enumerate(self.blocks):
            armed: set[int] = set()
            for n, pair, part in [*block, *[(-1, 0, 0)] * (WARPS - len(block))]:
                source = n - 1 if part >= 2 or n == len(self.sizes) - 1 else n + 1
                hears = [source] if n != 1 else [source, 0]
                arms = sum(1 << i for i, m in enumerate(hears) if n >= 0 and m not in armed)
                armed.update(hears if n >= 0 else [])
                rows.append([n, pair, part, arms])
            here = [helper for block_of, helper in shares if block_of == rank]
            for i in range(HELPERS):
                share = [shares.index((rank, i)), here.index(i)] if i in here else [-1, 0]
                rows.append([*share, 0, 0])
        return rows


def layout(sizes: tuple[int, ...], samples: int = SAMPLES, bptt: bool = True) -> Layout | None:
    """The smallest cluster that holds the dynamic layers for this many samples; None if there is none.

    Even and odd layers live in different blocks, so that a block receives few tiles.
    """
    depth = len(sizes)
    units: list[list[tuple[Role, ...]]] = [[], []]
    for n in range(1, depth):
        team = 4 if 2 <= n < depth - 1 else 2
        units[n % 2] += [tuple((n, pair, part) for part in range(team)) for pair in range(_tiles(sizes[n]) // 2)]
    weight = [sum(map(len, u)) for u in units]
    for count in CLUSTERS:
        even = min(range(1, count), key=lambda k: max(-(-weight[0] // k), -(-weight[1] // (count - k))))
        blocks = (*_share_out(units[0], even), *_share_out(units[1], count - even))
        found = Layout(blocks, sizes, samples, bptt)
        if max(map(len, blocks)) <= WARPS and found.shared_bytes <= SHARED_BYTES:
            return found
    return None


def _share_out(units: list[tuple[Role, ...]], blocks: int) -> list[tuple[Role, ...]]:
    """Distribute the units evenly over blocks, in order; teams of four first, so that each starts at a multiple."""
    edges = [len(units) * i // blocks for i in range(blocks + 1)]
    shares = [sorted(units[a:b], key=len, reverse=True) for a, b in pairwise(edges)]
    return [tuple(role for unit in share for role in unit) for share in shares]


def output_range(model: Layered, estimator: Estimator, largest_target: float = 1.0) -> float:
    """A power of two that bounds the outputs' rates; infinity if they are unbounded.

    A prototypical output is sigma + beta (y - s), with sigma in [-1, 1] and y the target.
    """
    beta = 0.0 if model.energy_based or isinstance(estimator, BPTT) else abs(getattr(estimator, "beta", 0.0))
    bound = math.inf if beta >= 1 else (1 + beta * largest_target) / (1 - beta)
    return 2.0 ** math.ceil(math.log2(bound)) if math.isfinite(bound) else math.inf


class DeepRunner(KernelRunner):
    iterations_per_graph = 50

    def build(self) -> None:
        model, B, depth = self.model, self.batch, self.model.depth
        self.output_range = output_range(model, self.job.estimator, float(self.targets.abs().max()))
        if self.output_range > LARGEST_RANGE:
            raise nvrtc.CudaError("Targets this large leave the kernels too few digits for the states.")
        self.sample_groups = -(-B // SAMPLES)
        plan = layout(model.sizes[:depth], -(-B // self.sample_groups), isinstance(self.job.estimator, BPTT))
        assert plan is not None, "refused otherwise"
        self.cluster = len(plan.blocks)
        self.compile("deep.cu", plan.definitions | {"QUICK": 1, "GROUPS": self.sample_groups})
        self.relax = self.module.kernel("relax", plan.shared_bytes, self.cluster)
        # Per worker, two pages of rates and errors, then its sums (kernels/inner_weights.cuh).
        pages, sums = WORKERS * 2 * (2 * min(B, 28) * 64) * 4, WORKERS * (64 * 64 + 64) * 4
        self.update = self.module.kernel("update", max(self.input_tile_bytes, pages, sums))
        self.roles = torch.tensor(plan.table(), dtype=torch.int32, device=self.device)
        self._lay_out()
        tiles = sum(-(-model.sizes[n] // 64) * -(-model.sizes[n + 1] // 64) for n in range(depth - 1))
        self.update_blocks = self.input_blocks + tiles + 1
        self.arguments = self._arguments()
        if self.takes_turns:
            # At the end of a graph, all networks wait for the last one.
            self.iterations_per_graph = 100

    def _lay_out(self) -> None:
        model, R, B, K = self.model, self.networks, self.batch, self.job.estimator.K
        bptt = isinstance(self.job.estimator, BPTT)
        tiles = [-(-model.sizes[n] // 16) for n in range(model.depth)]
        self.moved = self.buffer(R * self.sample_groups, self.job.estimator.T // 16 + 2, dtype=torch.int32)

        def layers(slots: int, wanted: bool = True) -> list[Tensor]:
            return [self.buffer(slots, R, B, count * 16) for count in tiles] if wanted else []

        self.layers = {
            "activity": layers(K if bptt else 2),
            "errors": layers(K, bptt),
            "states": layers(K, bptt and model.energy_based),
            "inputs": layers(K, bptt and model.energy_based),
            "s": layers(1, self.keeps_states),
            "t": layers(1, self.keeps_states),
        }

    def _arguments(self) -> _DeepArgs:
        model, rates = self.model, learning_rates(self.job)
        inner = range(model.depth - 1)
        pointers = {name: _Pointers(*(t.data_ptr() for t in tensors)) for name, tensors in self.layers.items()}
        return _DeepArgs(
            job=self.job_args(),
            W=(ctypes.c_void_p * 4)(*(model.weight(n).data_ptr() for n in inner)),
            b=(ctypes.c_void_p * 4)(*(model.get_parameter(f"b{n}").data_ptr() for n in inner if model.bias)),
            **pointers,
            moved=self.moved.data_ptr(),
            roles=self.roles.data_ptr(),
            moved_count=self.moved.shape[1],
            lr=(ctypes.c_float * 4)(*(rates[f"W{n}{n + 1}"] for n in inner)),
            lrb=(ctypes.c_float * 4)(*(rates.get(f"b{n}", 0.0) for n in inner)),
            output_range=self.output_range,
        )

    def capture(self) -> None:
        here = torch.cuda.current_stream()
        branches = [torch.cuda.Stream() for _ in range(self.networks if self.takes_turns else 1)]
        for first, branch in enumerate(branches):
            branch.wait_stream(here)
            with torch.cuda.stream(branch):
                for i in range(self.iterations_per_graph):
                    self.launch(i, first, self.networks // len(branches))
        for branch in branches:
            here.wait_stream(branch)

    @property
    def takes_turns(self) -> bool:
        """Whether the device cannot hold all clusters at once.

        Clusters then take turns, and if all networks ran in step, the last turn would leave most of the device idle; so
        networks do not wait for each other. If all fit, running in step is better: a cluster whose slot is taken by
        another network's update waits for a whole relaxation (P-2h with BPTT on an H200: 820 us instead of 460).
        """
        return self.networks * self.sample_groups > self.relax.clusters_at_once(THREADS, self.cluster)

    def launch(self, i: int, first: int, count: int) -> None:
        """Launch iteration i of the graph for `count` networks starting at `first`."""
        arguments = [self.arguments, *map(ctypes.c_int, (i, first, count))]
        self.update.launch(self.update_blocks * count, 256, arguments)
        self.relax.launch(self.cluster * self.sample_groups * count, THREADS, arguments[:3], cluster=self.cluster)

    def states(self) -> tuple[State, State]:
        """The free states of the last iteration and, after EP, the nudged ones; see `keeps_states`."""
        free, last = (
            tuple(t[0, ..., : self.model.sizes[n]].clone() for n, t in enumerate(self.layers[name]))
            for name in ("s", "t")
        )
        return free, last


class Deep(LayeredEngine):
    name = "cuda-deep"

    # Measured on an H200, ten thousand samples on each of five of the paper's nets: torch in large batches takes 1.54 s
    # (EB-2h), 0.18 (P-2h) and 0.65 (P-3h), growing with the number of nets; iterations take 0.46, 0.10 and 0.41.
    evaluated_from = 80

    def refuses_net(self, model: Layered, estimator: Estimator | None) -> str | None:
        if not 3 <= model.depth <= LAYERS:
            return f"it runs nets with two to four hidden layers, and the sizes are {model.sizes}."
        if max(map(_tiles, model.sizes[:-1])) > WIDEST or any(size % 4 for size in model.sizes[1:]):
            return f"hidden sizes must be a multiple of 4 and at most {16 * WIDEST} units; the sizes are {model.sizes}."
        if layout(model.sizes[:-1]) is None:
            return (
                f"the hidden layers must fit {CLUSTERS[-1]} blocks (three of 512 units or four of 256 do), "
                f"and the sizes are {model.sizes}."
            )
        if estimator is not None and output_range(model, estimator) > LARGEST_RANGE:
            return "it quantises states relative to their bound, and with this beta outputs can be too large."
        properties = torch.cuda.get_device_properties(model.weight(0).device)
        if properties.major < 9:
            return f"{properties.name} has no clusters of blocks (compute capability 9.0 or newer is needed)."
        if getattr(properties, "shared_memory_per_block_optin", 0) < SHARED_BYTES:
            return f"{properties.name} has too little shared memory for its blocks."
        return super().refuses_net(model, estimator)

    def runner(self, job: Job) -> Runner:
        return DeepRunner(job)
