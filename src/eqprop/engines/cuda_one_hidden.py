"""Whole training iterations of nets with one hidden layer in two CUDA kernels (see kernels/one_hidden.cu)."""

from __future__ import annotations

import ctypes
from dataclasses import fields

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines import nvrtc
from eqprop.engines.base import Engine, Job, Runner, Tally, learning_rates, needs_plain_sgd
from eqprop.estimators import BPTT, EP, Estimator
from eqprop.models import Layered
from eqprop.relax import Phase, Relaxation, relax, settled_below
from eqprop.state import State

ITERATIONS_PER_GRAPH = 50
"""Enough that the host's work per graph disappears, few enough that a short run wastes little."""

LONGEST_BATCH = 32
SHARED_LIMIT = 200 * 1024
ACTIVATIONS = {"sigmoid": 0, "tanh": 1}


class _Args(ctypes.Structure):
    """`Args` of one_hidden.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("W01", "b0", "W12", "b1", "images", "targets", "labels", "order")),
        *((name, ctypes.c_void_p) for name in ("counters", "drive", "u1", "u0", "g01", "s1", "s0", "t1", "t0")),
        *((name, ctypes.c_void_p) for name in ("stats", "tally")),
        *((name, ctypes.c_int) for name in ("R", "T", "K", "alternating", "stop")),
        *((name, ctypes.c_float) for name in ("beta", "eps", "tolerance", "lr01", "lr12", "lrb0", "lrb1")),
    ]


class OneHiddenRunner(Runner):
    """A graph of many iterations, replayed; order, counters and tallies stay on the device."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.model, Layered), "refused otherwise"
        self.job, self.model, self.device = job, job.model, job.images.device
        self.networks = job.networks or 1
        self._tally = torch.zeros(len(fields(Tally)), self.networks, dtype=torch.float64, device=self.device)
        self._tally[-1] = -1.0
        self.done = 0
        self.batch = 0
        visible = self.model.input_rate(job.images)
        self.images, self.targets, self.labels = visible.contiguous(), job.targets.contiguous(), job.labels.contiguous()

    @property
    def tally(self) -> Tally:  # type: ignore[override]
        return Tally(*self._tally.unbind(0))

    def reset(self) -> None:
        self._tally[:-1] = 0.0

    def run(self, order: Tensor) -> None:
        order = order.reshape(len(order), self.networks, -1)
        if order.shape[-1] != self.batch:
            self._build(order.shape[-1])
        for rows in order.split(self.order.shape[0]):
            self._run(rows)

    def _run(self, rows: Tensor) -> None:
        count = len(rows)
        self.order[:count].copy_(rows, non_blocking=True)
        self.counters.copy_(torch.tensor([0, count, self.done, 0], dtype=torch.int32), non_blocking=True)
        # One more update than relaxations: the last gradient is applied by an iteration that only updates.
        for _ in range(-(-(count + 1) // ITERATIONS_PER_GRAPH)):
            self.graph.replay()
        self.done += count

    def _build(self, batch: int) -> None:
        """Compile for this batch size, lay out the buffers, capture the graph."""
        model, estimator, R = self.model, self.job.estimator, self.networks
        outputs, hidden, visible = model.sizes
        padded = -(-hidden // 128) * 128
        splits = -(-(visible // 4) // 49)
        definitions = _definitions(model, estimator) | {"H": hidden, "NO": outputs, "NI": visible, "B": batch}
        module = nvrtc.Module("one_hidden.cu", definitions)
        self.relax = module.kernel("relax", _trail_bytes(model, estimator))
        self.update = module.kernel("update_and_drive", 4 * (32 * 196 + 2 * batch * 196 + batch * 32))
        self.advance = module.kernel("advance")
        self.blocks = (-(-hidden // 32) * splits + -(-outputs * hidden // 1024)) * R
        self.threads = padded // 4 + -(-outputs * _lanes(model) // 32) * 32
        self.batch = batch

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.order = buffer(3000, R, batch, dtype=torch.int32)
        self.counters = buffer(4, dtype=torch.int32)
        self.buffers = {
            "drive": buffer(splits, R, batch, padded),
            "u1": buffer(R, batch, padded),
            "u0": buffer(R, batch, 16),
            "g01": buffer(R, batch, outputs, padded),
            "stats": buffer(R, batch, 4),
            "s1": buffer(R, batch, padded),
            "s0": buffer(R, batch, 16),
            "t1": buffer(R, batch, padded),
            "t0": buffer(R, batch, 16),
        }
        self.arguments = self._arguments()
        self._capture()

    def _arguments(self) -> _Args:
        job, estimator, model = self.job, self.job.estimator, self.model
        rates = learning_rates(job)
        tensors = {**dict(model.named_parameters()), **self.buffers, "images": self.images, "targets": self.targets}
        tensors |= {"labels": self.labels, "order": self.order, "counters": self.counters, "tally": self._tally}
        pointers = {name: t.data_ptr() for name, t in tensors.items()}
        return _Args(
            **pointers,
            R=self.networks,
            T=estimator.T,
            K=estimator.K,
            alternating=estimator.schedule == "alternating",
            stop=estimator.stop == "settled",
            beta=getattr(estimator, "beta", 0.0),
            eps=model.eps,
            tolerance=settled_below(torch.float32, estimator.tolerance),
            lr01=rates["W01"],
            lr12=rates["W12"],
            lrb0=rates.get("b0", 0.0),
            lrb1=rates.get("b1", 0.0),
        )

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(ITERATIONS_PER_GRAPH):
                self.update.launch(self.blocks, 256, [self.arguments, ctypes.c_int(i)], early=True)
                self.relax.launch(
                    self.networks * self.batch, self.threads, [self.arguments, ctypes.c_int(i)], early=True
                )
            counters = ctypes.c_void_p(self.counters.data_ptr())
            self.advance.launch(1, 1, [counters, ctypes.c_int(ITERATIONS_PER_GRAPH)])

    def states(self) -> tuple[State, State]:
        """The free states of the last iteration and, after EP, the nudged ones."""
        outputs, hidden, _ = self.model.sizes
        free, last = (
            (self.buffers[a][..., :outputs].clone(), self.buffers[b][..., :hidden].clone())
            for a, b in (("s0", "s1"), ("t0", "t1"))
        )
        return free, last


def _definitions(model: Layered, estimator: Estimator) -> dict[str, int]:
    return {
        "METHOD": int(isinstance(estimator, BPTT)),
        "ENERGY": int(model.energy_based),
        "ACT": ACTIVATIONS[model.activation.name],
        "CLIP": int(model.clip),
        "OUTPUT_SLOPE": int(model.output_slope),
        "LANES": _lanes(model),
    }


def _lanes(model: Layered) -> int:
    """Threads that share an output unit's dot product: the faster of 8, 16 and 32 as measured on an H200."""
    return 16 if model.energy_based else 8


def _trail_bytes(model: Layered, estimator: Estimator) -> int:
    """Shared memory for the states (and inputs) that BPTT keeps."""
    if not isinstance(estimator, BPTT):
        return 0
    padded = -(-model.sizes[1] // 128) * 128
    return 4 * estimator.K * (padded + 16) * (2 if model.energy_based else 1)


class OneHidden(Engine):
    name = "cuda-one-hidden"

    def refuses(
        self,
        model: Dynamics,
        cost: Cost | None = None,
        estimator: Estimator | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> str | None:
        if (reason := nvrtc.unavailable()) is not None:
            return reason
        if type(model) is not Layered or model.depth != 2:
            return f"it runs layered nets with one hidden layer, and the model is {_describe(model)}."
        if (reason := _refuses_model(model)) is not None:
            return reason
        if cost is not None and type(cost) is not SquaredError:
            return f"its cost is the squared error, and the cost is {type(cost).__name__}."
        if estimator is not None:
            if type(estimator) not in (EP, BPTT):
                return f"it computes EP and BPTT, and the estimator is {type(estimator).__name__}."
            if _trail_bytes(model, estimator) > SHARED_LIMIT:
                return f"K={estimator.K} states of {model.sizes[1]} units do not fit a block's shared memory."
        return needs_plain_sgd(optimizer)

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        return relax(model, x, phase, state)

    def runner(self, job: Job) -> Runner:
        return OneHiddenRunner(job)


def _refuses_model(model: Layered) -> str | None:
    parameter = model.weight(0)
    outputs, hidden, visible = model.sizes
    if parameter.device.type != "cuda" or parameter.dtype != torch.float32:
        return f"it computes in float32 on a CUDA device, and the model is {parameter.dtype} on {parameter.device}."
    if model.activation.name not in ACTIVATIONS:
        return f"it knows the activations {', '.join(ACTIVATIONS)}, and the model has {model.activation.name}."
    if outputs > 16 or hidden > 2048 or hidden % 4 or visible % 4:
        return (
            f"it takes up to 16 outputs, up to 2048 hidden units and sizes that are multiples of 4, and the sizes are "
            f"{model.sizes}."
        )
    return None


def _describe(model: Dynamics) -> str:
    if isinstance(model, Layered):
        return f"a layered net with {model.depth - 1} hidden layers"
    return type(model).__name__
