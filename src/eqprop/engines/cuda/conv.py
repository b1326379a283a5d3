"""Whole training iterations of convolutional nets in three CUDA kernels (see kernels/conv.cu)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eqprop.engines.base import Job, Runner, learning_rates
from eqprop.engines.cuda import nvrtc
from eqprop.engines.cuda.job import CapturedRunner, KernelEngine
from eqprop.estimators import BPTT, EP, Estimator
from eqprop.models import Convolutional
from eqprop.state import State

ACTIVATIONS = {"sigmoid": 0, "tanh": 1, "hard-sigmoid": 2}
ITERATIONS_PER_GRAPH = 20
THREADS = 256
MOST_CHANNELS, MOST_BELOW, MOST_OUTPUTS, MOST_IMAGES = 64, 32, 16, 3
SIDE, BELOW_SIDE, KERNEL = 4, 12, 5
"""Largest sides of h0, h1 and the filters; smaller ones are padded with zeros."""

# Sizes of kernels/conv_net.cuh and kernels/conv_learn.cuh.
TAP_BYTES = 4096
PACKED_BYTES = 2 * 25 * TAP_BYTES
PAIR_BYTES = 4 * (8 * 64 * 16 + 4 * 144 * 16)
SHARED_BYTES = PACKED_BYTES + 4 * 144 * 16 + 16384 + 2048
PRIVATE = 32
WIDE = 1024
PLACES = BELOW_SIDE**2
STATE = 16 + WIDE + MOST_BELOW * PLACES
GATHERED = 2

_BUFFERS = ("packed", "own", "pairs", "part", "gfc", "g0", "g12", "gs", "states", "stats")


class _ConvArgs(ctypes.Structure):
    """`Args` of kernels/conv_net.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("images", "targets", "labels", "order", "counters")),
        *((name, ctypes.c_void_p) for name in ("W01", "b0", "W12", "b1", "Wfc", "bfc")),
        *((name, ctypes.c_void_p) for name in (*_BUFFERS, "tally")),
        *((name, ctypes.c_int) for name in ("R", "T", "K", "alternating", "stop", "steps")),
        *((name, ctypes.c_float) for name in ("beta", "tolerance")),
        *((name, ctypes.c_float) for name in ("lr01", "lrb0", "lr12", "lrb1", "lrfc", "lrbfc")),
    ]


PARAMETERS = {"W01": "Wconv01", "b0": "bconv0", "W12": "Wconv12", "b1": "bconv1", "Wfc": "Wfc01", "bfc": "bfc0"}
"""Parameter names in the kernels, and in the model."""


class ConvRunner(CapturedRunner):
    """Convolutional nets.

    Changes of at most 2^-24, the last bit of a float32 near 1, are not sent on in the free phase, so that a sample
    settles and its remaining steps cost little. With stop="settled" a sample leaves once its states repeat bit for bit;
    its final state is exactly the one after all T steps.
    """

    def __init__(self, job: Job) -> None:
        assert isinstance(job.model, Convolutional), "refused otherwise"
        super().__init__(job)
        self.model = job.model

    def _run(self, rows: Tensor) -> None:
        self.take_order(rows)
        # The caller may have changed the weights between runs.
        self.pack.launch(-(-self.model.get_parameter("Wconv01").numel() // THREADS), THREADS, [self.arguments])
        for _ in range(-(-len(rows) // ITERATIONS_PER_GRAPH)):
            self.graph.replay()

    def _prepare(self, batch: int) -> None:
        self.prepare_order(batch)
        module = nvrtc.Module("conv.cu", self._definitions())
        self.pack, self.update = module.kernel("pack"), module.kernel("update")
        self.relax, self.gather = module.kernel("relax", SHARED_BYTES), module.kernel("gather", PAIR_BYTES)
        self._lay_out()
        self.arguments = self._arguments()
        advance, counters = module.kernel("advance"), ctypes.c_void_p(self.counters.data_ptr())
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(ITERATIONS_PER_GRAPH):
                self._launch(i)
            advance.launch(1, 1, [counters, ctypes.c_int(ITERATIONS_PER_GRAPH)])

    def _launch(self, i: int) -> None:
        arguments = [self.arguments, ctypes.c_int(i)]
        self.relax.launch(self.networks * self.batch, THREADS, arguments)
        self.gather.launch(self.networks * self.groups * KERNEL, 128, arguments)
        self.update.launch(self.networks * self._update_blocks(), THREADS, arguments)

    def _update_blocks(self) -> int:
        """UPDATE_BLOCKS of kernels/conv_learn.cuh."""
        d = self._definitions()
        window = d["KS"] ** 2
        small = d["C1"] * d["CI"] * window + d["C1"] + d["C0"] + d["NO"]
        counts = (d["C0"] * d["C1"] * d["KS"], d["NO"] * d["C0"] * d["H0H"] * d["H0W"], small)
        return sum(-(-count // THREADS) for count in counts)

    def _definitions(self) -> dict[str, int]:
        model = self.model
        (c0, h0, w0), (c1, h1, w1), (ci, ih, iw) = *model.maps, model.image
        sizes = {"C0": c0, "H0H": h0, "H0W": w0, "C1": c1, "H1H": h1, "H1W": w1, "CI": ci, "IH": ih, "IW": iw}
        return sizes | {
            "KS": model.kernel,
            "NO": model.flat[0],
            "B": self.batch,
            "METHOD": int(isinstance(self.job.estimator, BPTT)),
            "ACT": ACTIVATIONS[model.activation.name],
        }

    def _lay_out(self) -> None:
        R, cells = self.networks, self.networks * self.batch
        self.steps = self.job.estimator.K if isinstance(self.job.estimator, BPTT) else 1
        self.groups = -(-self.batch // GATHERED)
        self.buffers = {
            "packed": self.buffer(R, PACKED_BYTES, dtype=torch.uint8),
            "own": self.buffer(cells, self.steps, PRIVATE, THREADS),
            "pairs": self.buffer(cells, self.steps, PAIR_BYTES, dtype=torch.uint8),
            "part": self.buffer(R, self.groups, 25, 64, 32),
            "gfc": self.buffer(cells, self.model.flat[0], WIDE),
            "g0": self.buffer(cells, WIDE),
            "g12": self.buffer(cells, 32, self.model.image[0] * self.model.kernel**2 + 1),
            "gs": self.buffer(cells, 16),
            "states": self.buffer(2, cells, STATE),
            "stats": self.buffer(cells, 4),
        }

    def _arguments(self) -> _ConvArgs:
        estimator, rates, model = self.job.estimator, learning_rates(self.job), self.model
        # EP's kernels return the change due to the nudge; the gradient is -1/beta times that  [eq:ep-grad].
        unit = -1.0 / estimator.beta if isinstance(estimator, EP) else 1.0
        parameters = dict(model.named_parameters())
        return _ConvArgs(
            **self.common_arguments(),
            **{ours: parameters[name].data_ptr() for ours, name in PARAMETERS.items() if name in parameters},
            **{name: self.buffers[name].data_ptr() for name in _BUFFERS},
            steps=self.steps,
            **{"lr" + ours.removeprefix("W"): unit * rates.get(name, 0.0) for ours, name in PARAMETERS.items()},
        )

    def states(self) -> tuple[State, State]:
        """The free states of the last iteration and, after EP, the nudged ones: (R, B, ...) per layer."""
        (c0, h0, w0), (c1, h1, w1) = self.model.maps
        table = self.buffers["states"].view(2, self.networks, self.batch, STATE).clone()
        free, last = (
            (
                t[..., : self.model.flat[0]],
                t[..., 16 : 16 + WIDE].unflatten(-1, (-1, SIDE, SIDE))[..., :c0, :h0, :w0],
                t[..., 16 + WIDE :].unflatten(-1, (-1, BELOW_SIDE, BELOW_SIDE))[..., :c1, :h1, :w1],
            )
            for t in table
        )
        return free, last


class ConvEngine(KernelEngine):
    name = "cuda-conv"
    models = (Convolutional,)
    activations = ACTIVATIONS

    # Measured on an H200 with the paper's net: torch in large batches takes 0.16 ms per sample and network, an
    # iteration 1.3 ms for up to a hundred of them.
    evaluated_from = 8

    def refuses_net(self, model: Convolutional, estimator: Estimator | None) -> str | None:
        if torch.cuda.get_device_capability(next(model.parameters()).device)[0] != 9:
            return f"it needs a Hopper GPU (compute capability 9.x), and the device is {torch.cuda.get_device_name()}."
        if len(model.maps) != 2 or len(model.flat) != 1:
            found = f"{len(model.maps)} and {len(model.flat)}"
            return f"it supports two convolutions and one flat layer, and the net has {found}."
        if model.pool != 2 or model.padding != 0 or model.kernel > KERNEL:
            return (
                f"it supports 2 x 2 pooling, no padding and filters up to {KERNEL} x {KERNEL}, and the net has pool "
                f"{model.pool}, padding {model.padding}, kernel {model.kernel}."
            )
        (c0, *sides), (c1, *below) = model.maps
        fits = (
            c0 <= MOST_CHANNELS and c1 <= MOST_BELOW and model.flat[0] <= MOST_OUTPUTS and model.image[0] <= MOST_IMAGES
        )
        if not fits or max(sides) > SIDE or max(below) > BELOW_SIDE:
            return (
                f"it supports up to {MOST_CHANNELS} x {SIDE} x {SIDE} over {MOST_BELOW} x {BELOW_SIDE} x {BELOW_SIDE} "
                f"units, {MOST_OUTPUTS} outputs and {MOST_IMAGES} image channels, and the net has {model.maps}, "
                f"{model.flat[0]} and {model.image[0]}."
            )
        return None

    def runner(self, job: Job) -> Runner:
        return ConvRunner(job)
