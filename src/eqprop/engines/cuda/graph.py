"""The reference iteration captured as a CUDA graph: any model, including your own, without the host in the loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.dynamics import Dynamics
from eqprop.engines.base import (
    EXCHANGE,
    PRECISIONS,
    STREAMED,
    Engine,
    Exchange,
    Job,
    Precision,
    Runner,
    Task,
    full_precision,
)
from eqprop.engines.eager import EagerRunner, stepping_in
from eqprop.estimators import EP
from eqprop.relax import Phase, Relaxation, relax
from eqprop.state import State

STEPS_PER_GRAPH = 400
"""Time steps per graph. Short iterations share a graph, which makes the host's work per replay negligible."""

LONGEST_RUN = 3000
WARM_UP = 3


class GraphRunner(EagerRunner):
    """`EagerRunner.iterate`, captured once per batch size and replayed.

    A free phase with stop="settled" runs all its steps: a graph has no early exit, and at a fixed point further steps
    change nothing. Where processes exchange gradients, the two halves of an iteration are captured apart.
    """

    def __init__(self, job: Job, precision: Precision = "float32") -> None:
        super().__init__(job, precision)
        self.estimator = replace(self.estimator, stop="never")
        self.position = torch.zeros(1, dtype=torch.int64, device=job.images.device)
        self.order: Tensor | None = None
        self.sign_rows: Tensor | None = None

    @in_own_precision
    @full_precision()
    def run(self, order: Tensor) -> None:
        self.job.check_unchanged()
        for rows in order.split(LONGEST_RUN):
            if self.order is None or self.order.shape[1:] != rows.shape[1:]:
                self._capture(rows)
            assert self.order is not None, "set by the capture"
            self.order[: len(rows)].copy_(rows)
            signs = self.next_signs(len(rows))
            if signs is not None and self.sign_rows is not None:
                self.sign_rows[: len(rows)].copy_(signs)
            self.position.zero_()
            if self.job.exchange is not None:
                for _ in range(len(rows)):
                    self._run_halves(self.job.exchange)
                continue
            for _ in range(len(rows) // self.per_graph):
                self.graph.replay()
            for _ in range(len(rows) % self.per_graph):
                self.single.replay()

    def _run_halves(self, exchange: Exchange) -> None:
        self.graph.replay()
        self.loss.copy_(exchange(self.gradients(), self.loss))
        self.single.replay()

    def take_rates(self) -> None:
        """The graph contains the rates, so the next run captures a new one."""
        self.order = None

    def reset(self) -> None:
        """Reset in place: the graph points to the tally's memory."""
        for name in self.tally.names():
            if name != "bad":
                getattr(self.tally, name).zero_()

    def _capture(self, rows: Tensor) -> None:
        device = self.job.images.device
        self.order = torch.zeros((LONGEST_RUN, *rows.shape[1:]), dtype=torch.int64, device=device)
        self.order[: len(rows)].copy_(rows)
        # Any signs will do for the warm-up; each run sets its own.
        done, self.sign_rows = self.done, self.next_signs(LONGEST_RUN)
        self.done = done
        self.per_graph = max(1, STEPS_PER_GRAPH // (self.estimator.T + self.estimator.K))
        saved = self._snapshot()
        try:
            self._record(saved)
        except BaseException:
            self.order = None  # an older graph reads an older order
            raise
        finally:
            self._restore(saved)

    def _record(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        self._warm_up(saved)
        self.graph, self.single = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        if self.job.exchange is not None:
            with torch.cuda.graph(self.graph):
                self.loss = self._captured_half()
            with torch.cuda.graph(self.single, pool=self.graph.pool()):
                self.update(self.loss)
            return
        for graph, count in ((self.graph, self.per_graph), (self.single, 1)):
            with torch.cuda.graph(graph):
                for _ in range(count):
                    self._captured_iteration()

    def _warm_up(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        """Run some iterations on a stream of their own, with less memory if they need more than there is."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._captured_iteration()
        except torch.OutOfMemoryError:
            ep = self.estimator
            if not (isinstance(ep, EP) and ep.nudging == "symmetric" and ep.side_by_side):
                raise
            warnings.warn(
                "The two nudged phases do not fit into the GPU's memory side by side: they run one after the other, "
                "which is slower. A smaller mini-batch would fit.",
                stacklevel=2,
            )
            self.estimator = replace(ep, side_by_side=False)
        else:
            torch.cuda.current_stream().wait_stream(side)
            return
        # Outside the handler, whose traceback holds on to the tensors that did not fit.
        torch.cuda.synchronize()
        self._restore(saved)
        torch.cuda.empty_cache()
        self._warm_up(saved)

    def _captured_iteration(self) -> None:
        loss = self._captured_half()
        if self.job.exchange is not None:  # in the warm-up only
            loss = self.job.exchange(self.gradients(), loss)
        self.update(loss)

    def _captured_half(self) -> Tensor:
        """The first half of an iteration, with the samples at `position`, which moves on."""
        assert self.order is not None, "laid out before capture"
        signs = None if self.sign_rows is None else self.sign_rows.index_select(0, self.position)[0]
        loss = self.learn(self.gather(self.order.index_select(0, self.position)[0]), signs)
        self.position += 1
        return loss

    def _snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Save what the warm-up must not change: parameters, optimizer, starts, tally, clock, position."""
        optimizer = self.job.optimizer
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        tensors += [getattr(self.tally, name) for name in self.tally.names()] + [self.clock, self.position]
        tensors += [] if self.job.start is None else list(self.job.start.tensors.values())
        tensors += getattr(self.job.after, "tensors", [])
        return [(t, t.detach().clone()) for t in tensors]

    @torch.no_grad()
    def _restore(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in saved:
            tensor.copy_(value)
        # Momentum that the warm-up created begins at zero: the first step then makes it the gradient, as in SGD.
        known = {id(tensor) for tensor, _ in saved}
        for state in self.job.optimizer.state.values():
            for new in state.values():
                if isinstance(new, Tensor) and id(new) not in known:
                    new.zero_()


BEGIN_AT_ZERO = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Optimizers whose state begins at zero, so that what a warm-up did to it can be undone."""


def refuses_optimizer(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Why steps of this optimizer cannot be captured, as a sentence; None if they can."""
    if optimizer is None:
        return None
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if type(optimizer) is torch.optim.SGD:
        damped = any(group["momentum"] and group["dampening"] for group in groups)
        return "SGD's first step takes no dampening, and a graph repeats one step." if damped else None
    if not all(group.get("capturable", False) for group in groups):
        return f"{name} must be created with capturable=True to be part of a graph."
    if not optimizer.state and type(optimizer) not in BEGIN_AT_ZERO:
        return f"{name} creates its state at the first step, which a graph cannot undo."
    return None


@contextmanager
def rates_read_from(optimizer: torch.optim.Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Let steps read their learning rates from tensors, one per group, so that a captured step sees them change.

    Of torch's SGDs only the fused one can; other optimizers do where they are capturable.
    """
    fused = {"fused": True, "foreach": False} if type(optimizer) is torch.optim.SGD else {}
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.update(fused, lr=rate)
    try:
        yield
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.update({name: old[name] for name in ("lr", *fused)})


class CapturedEngine(Engine):
    name = "cuda-graph"
    device = "cuda"
    reference = True
    starts = ("zero", "persistent", "initialised", "carried")
    precisions = PRECISIONS

    def refuses_more(self, task: Task) -> str | None:
        if STREAMED in task.extras:
            return "it captures whole iterations, and samples are read from outside."
        if EXCHANGE in task.extras:
            return "it captures whole iterations, and processes exchange gradients in the middle of one."
        return refuses_optimizer(task.optimizer)

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        with full_precision(), stepping_in(self.precision):
            return relax(model, x, phase, state)

    def runner(self, job: Job) -> Runner:
        return GraphRunner(job, self.precision)
