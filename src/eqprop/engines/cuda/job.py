"""Shared by the engines with CUDA kernels: a job laid out on the device, iterations captured into a graph."""

from __future__ import annotations

import ctypes
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from eqprop.cost import SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine, Job, Runner, Tally, Task, full_precision, learning_rates
from eqprop.engines.cuda import nvrtc
from eqprop.engines.cuda.graph import GraphRunner
from eqprop.estimators import BPTT, EP, Estimator, Nudging
from eqprop.models import Convolutional, Layered
from eqprop.relax import Phase, Relaxation, relax, settled_below
from eqprop.state import State

LONGEST_RUN = 3000
"""Iterations whose order is copied to the device at once: an epoch of the paper."""

ACTIVATIONS = {"sigmoid": 0, "tanh": 1}
COLUMNS = 49 * 4
"""Columns of an input tile in kernels/input_layer.cuh."""
ROWS = 64
"""Rows of an input tile."""


class JobArgs(ctypes.Structure):
    """`Job` of kernels/job.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("images", "targets", "labels", "order", "counters", "W", "b")),
        *((name, ctypes.c_void_p) for name in ("drive", "u", "stats", "tally")),
        *((name, ctypes.c_int) for name in ("R", "T", "K", "alternating", "stop")),
        *((name, ctypes.c_float) for name in ("beta", "eps", "tolerance", "lr", "lrb")),
    ]


class CapturedRunner(Runner):
    """Many iterations per graph; order, counters and tallies stay on the device.

    Subclasses prepare for a batch size in `_prepare` and replay in `_run`. If the kernels cannot be compiled or
    launched, the graph engine takes over with a warning.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, job.images.device
        self.networks = job.networks or 1
        self.done, self.batch = 0, 0
        self.substitute: GraphRunner | None = None
        self._tally = torch.zeros(len(fields(Tally)), self.networks, dtype=torch.float64, device=self.device)
        self._tally[-1] = -1.0
        self.images, self.targets, self.labels = (t.contiguous() for t in (job.images, job.targets, job.labels))

    @property
    def tally(self) -> Tally:  # type: ignore[override]
        return Tally(*self._tally.unbind(0)) if self.substitute is None else self.substitute.tally

    def reset(self) -> None:
        self._tally[:-1] = 0.0
        if self.substitute is not None:
            self.substitute.reset()

    def take_rates(self) -> None:
        """The captured launches contain the rates, so the next run prepares again."""
        self.batch = 0
        if self.substitute is not None:
            self.substitute.take_rates()

    def run(self, order: Tensor) -> None:
        self.job.check_unchanged()
        rows = order.reshape(len(order), self.networks, -1)
        if self.substitute is None and rows.shape[-1] != self.batch:
            try:
                self._prepare(rows.shape[-1])
            except nvrtc.CudaError as error:
                warnings.warn(f"{error} The graph engine takes over.", RuntimeWarning, stacklevel=2)
                self.substitute = GraphRunner(self.job)
        if self.substitute is not None:
            self.substitute.run(order)
            return
        for part in rows.split(LONGEST_RUN):
            self._run(part)

    def states(self) -> tuple[State, State]:
        """The free states of the last iteration and, after EP, the nudged ones: (R, B, ...) per layer."""
        raise NotImplementedError(f"{type(self).__name__} keeps no states.")

    def free_states(self) -> State | None:
        return None if self.substitute is not None else self.states()[0]

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def prepare_order(self, batch: int) -> None:
        self.batch = batch
        self.order = self.buffer(LONGEST_RUN, self.networks, batch, dtype=torch.int32)
        self.counters = self.buffer(4, dtype=torch.int32)

    def take_order(self, rows: Tensor) -> None:
        """Copy the order of the next iterations to the device."""
        count = len(rows)
        self.order[:count].copy_(rows, non_blocking=True)
        self.counters.copy_(torch.tensor([0, count, self.done, 0], dtype=torch.int32), non_blocking=True)
        self.done += count

    def common_arguments(self) -> dict[str, Any]:
        """What the kernels of every engine are given, by the names of their fields."""
        estimator = self.job.estimator
        return {
            "images": self.images.data_ptr(),
            "targets": self.targets.data_ptr(),
            "labels": self.labels.data_ptr(),
            "order": self.order.data_ptr(),
            "counters": self.counters.data_ptr(),
            "tally": self._tally.data_ptr(),
            "R": self.networks,
            "T": estimator.T,
            "K": estimator.K,
            "alternating": estimator.schedule == "alternating",
            "stop": estimator.stop == "settled",
            "beta": getattr(estimator, "beta", 0.0),
            "tolerance": settled_below(torch.float32, estimator.tolerance),
        }

    @abstractmethod
    def _prepare(self, batch: int) -> None:
        """Allocate the buffers for this batch size, compile, capture the graph."""

    @abstractmethod
    def _run(self, rows: Tensor) -> None:
        """Run the iterations of rows (n, R, B), at most LONGEST_RUN."""


class KernelRunner(CapturedRunner):
    """Layered nets: subclasses compile in `build` and launch the iterations of a graph in `capture`."""

    iterations_per_graph = 50

    def __init__(self, job: Job) -> None:
        assert isinstance(job.model, Layered), "refused otherwise"
        super().__init__(job)
        self.model = job.model
        self.images = self.model.input_activity(self.images).contiguous()

    def _run(self, rows: Tensor) -> None:
        self.take_order(rows)
        # One more update than relaxations: a final update-only iteration applies the last gradient.
        for _ in range(-(-(len(rows) + 1) // self.iterations_per_graph)):
            self.graph.replay()

    def _prepare(self, batch: int) -> None:
        self.prepare_order(batch)
        self.padded = -(-self.model.sizes[-2] // 128) * 128
        self.splits = -(-self.model.sizes[-1] // COLUMNS)
        self.drive = self.buffer(self.splits, self.networks, batch, self.padded)
        self.u = self.buffer(self.networks, batch, self.padded)
        self.stats = self.buffer(2, self.networks, batch, 4)
        self.build()
        advance = self.module.kernel("advance")
        counters = ctypes.c_void_p(self.counters.data_ptr())
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.capture()
            advance.launch(1, 1, [counters, ctypes.c_int(self.iterations_per_graph)])

    @abstractmethod
    def capture(self) -> None:
        """Launch the kernels of the graph's iterations."""

    @property
    def input_blocks(self) -> int:
        """Number of blocks that hold a network's input weights."""
        return -(-self.model.sizes[-2] // ROWS) * self.splits

    @property
    def input_tile_bytes(self) -> int:
        return 4 * (ROWS * COLUMNS + 2 * self.batch * COLUMNS + self.batch * ROWS)

    def compile(self, source: str, definitions: dict[str, int]) -> None:
        model = self.model
        common = {
            "H": model.sizes[-2],
            "NI": model.sizes[-1],
            "B": self.batch,
            "METHOD": int(isinstance(self.job.estimator, BPTT)),
            "ENERGY": int(model.energy_based),
            "ACT": ACTIVATIONS[model.activation.name],
            "CLIP": int(model.clip),
            "OUTPUT_SLOPE": int(model.output_slope),
        }
        self.module = nvrtc.Module(source, common | definitions)

    def job_args(self) -> JobArgs:
        model, rates = self.model, learning_rates(self.job)
        n = model.depth - 1
        return JobArgs(
            **self.common_arguments(),
            W=model.weight(n).data_ptr(),
            b=getattr(model, f"b{n}").data_ptr() if model.bias else None,
            drive=self.drive.data_ptr(),
            u=self.u.data_ptr(),
            stats=self.stats.data_ptr(),
            eps=model.eps,
            lr=rates[f"W{n}{n + 1}"],
            lrb=rates.get(f"b{n}", 0.0),
        )

    @abstractmethod
    def build(self) -> None:
        """Compile the kernels and allocate what they need."""


class KernelEngine(Engine):
    """Common requirements of the CUDA kernels: float32 on a GPU, squared error, EP or BPTT, SGD without options."""

    device = "cuda"
    costs = (SquaredError,)
    estimators = (EP, BPTT)
    nudgings: tuple[Nudging, ...] = ("one-sided",)
    updates = True
    activations: Mapping[str, int] = {}
    """Supported activations and their numbers in the kernels."""

    def refuses_more(self, task: Task) -> str | None:
        if (reason := nvrtc.unavailable()) is not None:
            return reason
        model = task.model
        assert isinstance(model, Layered | Convolutional), "refused otherwise"
        parameter = next(model.parameters())
        if parameter.dtype != torch.float32:
            return f"it computes in float32, and the model is {parameter.dtype}."
        if model.activation.name not in self.activations:
            return f"it supports {', '.join(self.activations)}, and the model's activation is {model.activation.name}."
        if model.nudge_site == "inside" and not isinstance(task.estimator, BPTT):
            return "it nudges outside sigma, and the model nudges inside."
        return self.refuses_net(model, task.estimator)

    @abstractmethod
    def refuses_net(self, model: Any, estimator: Estimator | None) -> str | None:
        """Why sizes or phases do not fit the kernels; None if they do."""

    @full_precision()
    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        return relax(model, x, phase, state)


class LayeredEngine(KernelEngine):
    """Kernels for layered nets."""

    models = (Layered,)
    activations = ACTIVATIONS

    def refuses_net(self, model: Layered, estimator: Estimator | None) -> str | None:
        if model.sizes[0] > 16 or model.sizes[-2] % 4 or model.sizes[-1] % 4:
            return (
                "it supports up to 16 outputs, with the input and the adjacent layer multiples of 4 in size, "
                f"and the sizes are {model.sizes}."
            )
        return None
