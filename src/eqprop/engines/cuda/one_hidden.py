"""Whole training iterations of nets with one hidden layer in two CUDA kernels (see kernels/one_hidden.cu)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from eqprop.engines.base import Engine, Job, Runner, Task, learning_rates
from eqprop.engines.cuda.job import LONGEST_RUN, JobArgs, KernelRunner, LayeredEngine
from eqprop.estimators import BPTT, EP, Estimator, Nudging, Signs
from eqprop.models import Layered
from eqprop.state import State

SHARED_LIMIT = 200 * 1024
NUDGINGS: tuple[Nudging, ...] = ("one-sided", "symmetric", "random-sign")
"""In the order of their numbers in the kernels."""


class _OneHiddenArgs(ctypes.Structure):
    """`Args` of one_hidden.cu."""

    _fields_ = [
        ("job", JobArgs),
        *((name, ctypes.c_void_p) for name in ("W01", "b0", "u0", "g01", "s1", "s0", "t1", "t0")),
        *((name, ctypes.c_float) for name in ("lr01", "lrb0")),
        ("signs", ctypes.c_void_p),
    ]


class OneHiddenRunner(KernelRunner):
    iterations_per_graph = 250

    def build(self) -> None:
        outputs, hidden, _ = self.model.sizes
        R, B = self.networks, self.batch
        nudging = getattr(self.job.estimator, "nudging", "one-sided")
        self.compile("one_hidden.cu", {"NO": outputs, "QUICK": 1, "NUDGING": NUDGINGS.index(nudging)})
        self.relax = self.module.kernel("relax", _trail_bytes(self.model, self.job.estimator))
        self.update = self.module.kernel("update_and_drive", self.input_tile_bytes)
        self.threads = self.padded // 4 + -(-outputs // 2 * 16 // 32) * 32
        self.blocks = (self.input_blocks + -(-outputs * hidden // 1024)) * R
        self.buffers = {
            "u0": self.buffer(R, B, 16),
            "g01": self.buffer(R, B, outputs, self.padded),
        }
        if self.keeps_states:
            self.buffers |= {name: self.buffer(R, B, self.padded) for name in ("s1", "t1")}
            self.buffers |= {name: self.buffer(R, B, 16) for name in ("s0", "t0")}
        if nudging == "random-sign":
            self.signs = self.job.signs or Signs(tuple(range(R)))
            self.buffers["signs"] = self.buffer(LONGEST_RUN, R)
        rates = learning_rates(self.job)
        self.arguments = _OneHiddenArgs(
            job=self.job_args(),
            W01=self.model.weight(0).data_ptr(),
            b0=self.model.get_parameter("b0").data_ptr() if self.model.bias else None,
            **{name: buffer.data_ptr() for name, buffer in self.buffers.items()},
            lr01=rates["W01"],
            lrb0=rates.get("b0", 0.0),
        )

    def _run(self, rows: Tensor) -> None:
        if "signs" in self.buffers:
            self.buffers["signs"][: len(rows)].copy_(self.signs.rows(self.done, len(rows)))
        super()._run(rows)

    def capture(self) -> None:
        for i in range(self.iterations_per_graph):
            arguments = [self.arguments, ctypes.c_int(i)]
            self.update.launch(self.blocks, 256, arguments, early=True)
            # Measured on an H200: long energy-based relaxations that start early keep the update's blocks waiting.
            self.relax.launch(self.networks * self.batch, self.threads, arguments, early=not self.model.energy_based)

    def states(self) -> tuple[State, State]:
        """The free states of the last iteration and, after EP, the nudged ones; see `keeps_states`."""
        outputs, hidden, _ = self.model.sizes
        free, last = (
            (self.buffers[a][..., :outputs].clone(), self.buffers[b][..., :hidden].clone())
            for a, b in (("s0", "s1"), ("t0", "t1"))
        )
        return free, last


def _trail_bytes(model: Layered, estimator: Estimator) -> int:
    """Shared memory for the states (and inputs) that BPTT keeps."""
    if not isinstance(estimator, BPTT):
        return 0
    padded = -(-model.sizes[1] // 128) * 128
    return 4 * estimator.K * (padded + 16) * (2 if model.energy_based else 1)


class OneHidden(LayeredEngine):
    name = "cuda-one-hidden"
    nudgings = NUDGINGS

    def automatic(self, task: Task) -> Engine | None:
        """Other nudging than one-sided only on request, until it is timed on a GPU."""
        estimator = task.estimator
        return None if isinstance(estimator, EP) and estimator.nudging != "one-sided" else self

    def refuses_net(self, model: Layered, estimator: Estimator | None) -> str | None:
        if model.depth != 2 or model.sizes[1] > 2048:
            return f"it runs nets with one hidden layer of up to 2048 units, and the sizes are {model.sizes}."
        if estimator is not None and _trail_bytes(model, estimator) > SHARED_LIMIT:
            return f"K={estimator.K} states of {model.sizes[1]} units do not fit a block's shared memory."
        return super().refuses_net(model, estimator)

    def runner(self, job: Job) -> Runner:
        return OneHiddenRunner(job)
