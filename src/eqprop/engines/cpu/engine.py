"""The fast CPU engine: whole phases and training iterations in C on all cores, with no Python in the loop."""

from __future__ import annotations

import ctypes
import functools
import math
import time
import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from eqprop.cost import Problem, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine, Job, Runner, Tally, Task, checked_rows, has_bare_sgd, load_engine
from eqprop.engines.cpu.binding import Net, NoLibraryError, library, net_of, networks_of, refuses_net, unit_of
from eqprop.engines.traced import Fingerprint
from eqprop.estimators import BPTT, EP, Estimator, Grads, Signs
from eqprop.models import Convolutional, Layered
from eqprop.relax import SWEEPS, Phase, Relaxation, prepare, relax, settled_below
from eqprop.state import State, first_bad_layer

CALL_SECONDS = 0.2
"""Approximate length of one call into C: keyboard interrupts are handled between calls."""


class CpuRunner(Runner):
    """Mini-batch, phases, gradient and SGD step in one C loop.

    Other optimizers get their gradients from C, one iteration at a time, and step in Python. Random-sign nudging and
    jobs with a `start` also run one iteration at a time: each needs its own signs, or the state to begin from.
    """

    def __init__(self, job: Job) -> None:
        _check_data(job)
        self.job = job
        self.networks = job.networks or 1
        self.tally = Tally.zeros(self.networks, torch.device("cpu"))
        self.iteration = 0
        self.targets, self.labels = job.targets.detach().contiguous(), job.labels.to(torch.int64).contiguous()
        self.bare = has_bare_sgd(job)
        drawn = isinstance(job.estimator, EP) and job.estimator.nudging == "random-sign"
        self.signs = (job.signs or Signs(tuple(range(self.networks)))) if drawn else None
        self.images = net_of(job.model, self.networks).images(job.images.detach())
        self._bind()

    def run(self, order: Tensor) -> None:
        self.job.check_unchanged()
        rows = checked_rows(order, self.job.networks, len(self.images))
        rows = rows.view(rows.shape[0], self.networks, rows.shape[-1])
        if not rows.numel():
            return
        if self._addresses() != self.addresses:
            self._bind()
        self._describe(rows)
        counts = torch.stack([getattr(self.tally, name) for name in Tally.names()])  # (7, R)
        self.net.table.point("tally", counts)
        if self.bare:
            self._run_in_c(rows)
        else:
            self._run_with_optimizer(rows)
        for name, count in zip(Tally.names(), counts, strict=True):
            getattr(self.tally, name).copy_(count)

    def _bind(self) -> None:
        """Pass the job's addresses to the C code; again whenever a parameter moves in memory."""
        job = self.job
        self.net = net_of(job.model, self.networks)
        self.addresses = self._addresses()
        table = self.net.table
        table.point("images", self.images)
        table.point("targets", self.targets)
        table.point("labels", self.labels)
        describe_estimator(self.net, job.estimator, job.images.dtype)

    def _addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.job.model.parameters()]

    def _describe(self, rows: Tensor) -> None:
        """Set what may change between calls of `run`: batch size, threads, learning rates."""
        self.net.table.set(batch=rows.shape[-1], threads=torch.get_num_threads(), gradients_only=not self.bare)
        rates = {p: float(group["lr"]) for group in self.job.optimizer.param_groups for p in group["params"]}
        held = [w.parameter for w in self.net.held]
        self.net.describe_gradients([rates[p] if p in rates and p.requires_grad else math.nan for p in held])

    def _call(self, rows: Tensor) -> None:
        table = self.net.table
        table.set(iterations=rows.shape[0], first=self.iteration)
        table.point("order", rows)
        function = library(self.net.unit, self.images.dtype).train
        if function(ctypes.byref(table.struct)):
            raise MemoryError(
                f"Out of memory: batch {rows.shape[-1]}, K={self.job.estimator.K}. Lower the batch size or K."
            )
        self.iteration += rows.shape[0]

    def _run_in_c(self, rows: Tensor) -> None:
        for held in self.net.held:
            held.fetch()
        try:
            if self.job.start is None and self.signs is None:
                self._call_for_a_while(rows)
            else:
                for one in rows.split(1):
                    self._iterate(one)
        finally:
            for held in self.net.held:
                held.give_back()

    def _call_for_a_while(self, rows: Tensor) -> None:
        done, count = 0, 1
        while done < len(rows):
            part = rows[done : done + count]
            began = time.perf_counter()
            self._call(part)
            took = (time.perf_counter() - began) / len(part)
            done, count = done + len(part), max(1, int(CALL_SECONDS / max(took, 1e-9)))

    def _iterate(self, one: Tensor) -> None:
        """Run one iteration, (1, R, B), with its signs of beta and from the job's `start`."""
        if self.signs is not None:
            describe_beta(self.net, self.job.estimator, self.signs.rows(self.iteration, 1)[0].tolist())
        start = self.job.start
        if start is None:
            self._call(one)
            return
        numbers = one[0, 0] if self.job.networks is None else one[0]
        x = self.job.images[numbers]
        begun = start.begin(x, numbers)
        given = self.net.to_c(begun)
        reached = tuple(torch.empty_like(layer) for layer in given)
        self.net.describe_state(given, reached)
        self._call(one)
        start.end(x, numbers, begun, self.net.from_c(reached))

    def _run_with_optimizer(self, rows: Tensor) -> None:
        optimizer = self.job.optimizer
        for i in range(len(rows)):
            for held in self.net.held:
                held.fetch()
            self._iterate(rows[i : i + 1])
            optimizer.zero_grad(set_to_none=True)
            for held in self.net.held:
                if held.parameter.requires_grad:
                    held.parameter.grad = held.unpadded(held.gradient_rows()).clone()
            optimizer.step()


def describe_estimator(net: Net, estimator: Estimator, dtype: torch.dtype) -> None:
    assert isinstance(estimator, EP | BPTT), "others are refused"
    net.table.set(
        T=estimator.T,
        K=estimator.K,
        bptt=isinstance(estimator, BPTT),
        inside=net.model.nudge_site == "inside",
        symmetric=isinstance(estimator, EP) and estimator.nudging == "symmetric",
        alternating=estimator.schedule == "alternating",
        settled=estimator.stop == "settled",
        tolerance=settled_below(dtype, estimator.tolerance),
    )
    describe_beta(net, estimator, [1.0] * net.table.struct.networks)


def describe_beta(net: Net, estimator: Estimator, each: Sequence[float]) -> None:
    """Set beta with a sign per network."""
    beta = float(estimator.beta) if isinstance(estimator, EP) and not isinstance(estimator.beta, Tensor) else 1.0
    net.table.list_numbers("beta", [beta * sign for sign in each], ctypes.c_double)


def _check_data(job: Job) -> None:
    model, parameter = job.model, next(job.model.parameters())
    for what, tensor in (("images", job.images), ("targets", job.targets)):
        if tensor.dtype != parameter.dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"The {what} are {tensor.dtype} on {tensor.device}; expected {parameter.dtype} on the CPU, like the "
                "model's parameters. Convert them with .to(...)."
            )
    outputs = model.init_state(job.images[:0])[0].shape[-1]
    if job.images.shape[1:] != model.input_shape or job.targets.shape != (len(job.images), outputs):
        raise ValueError(
            f"The images have shape {tuple(job.images.shape)} and the targets {tuple(job.targets.shape)}; expected "
            f"(N, {', '.join(map(str, model.input_shape or ()))}) and (N, {outputs})."
        )
    if job.labels.shape != job.images.shape[:1]:
        raise ValueError(f"The labels have shape {tuple(job.labels.shape)}; expected ({len(job.images)},).")


BAD = Tally.names().index("bad")


class CpuGradients:
    """The gradient of single mini-batches of one model.

    watch   of what the model is: while it does not change, no engine has to be asked again whether it serves it
    """

    def __init__(self, model: Dynamics, networks: int) -> None:
        self.watch, self.networks = Fingerprint(model), networks
        self.net = net_of(model, networks)
        self.addresses = [p.data_ptr() for p in model.parameters()]
        held = [w.parameter for w in self.net.held]
        self.learned = [p.requires_grad for p in held]
        self.fetched = [w for w in self.net.held if w.copied]
        self.counts = torch.empty(len(Tally.names()), networks, dtype=torch.float64)
        self.net.table.point("tally", self.counts)
        self.net.table.set(gradients_only=True, iterations=1, first=0)
        self.batch = 0
        self.estimator: Estimator | None = None

    def fits(self, model: Dynamics, networks: int) -> bool:
        """Whether it is still the gradient of this model."""
        same = networks == self.networks and self.addresses == [p.data_ptr() for p in model.parameters()]
        return same and not self.watch.changed()

    def __call__(self, problem: Problem, estimator: Estimator, s: State) -> tuple[Relaxation, Grads, bool]:
        """The free phase, the gradients, and whether all numbers are finite."""
        net, table, x = self.net, self.net.table, problem.x
        self._describe(estimator, x.shape[problem.model.sample_dims(x) - 1], x.dtype)
        given = net.to_c(s)
        reached, residual = tuple(map(torch.empty_like, given)), x.new_empty(s[0].shape[:-1])
        for held in self.fetched:
            held.fetch()
        table.set(threads=torch.get_num_threads())
        table.point("images", net.images(x))
        table.point("targets", problem.y.contiguous())
        table.point("residuals", residual)
        net.describe_state(given, reached)
        self.counts.fill_(-1.0)  # no network is frozen, and nobody reads the others
        if library(net.unit, x.dtype).train(ctypes.byref(table.struct)):
            raise MemoryError(f"Out of memory: batch {self.batch}, K={estimator.K}. Lower the batch size or K.")
        grads = {h.parameter: h.given_gradient() for h, learned in zip(net.held, self.learned, strict=True) if learned}
        free = Relaxation(
            net.from_c(reached), estimator.T, residual, residual < settled_below(x.dtype, estimator.tolerance)
        )
        # Where the sums overflow, the reference looks again.
        fine = math.isfinite(float(x.sum()) + float(problem.y.sum())) and max(self.counts[BAD].tolist()) < 0.0
        return free, grads, fine

    def _describe(self, estimator: Estimator, batch: int, dtype: torch.dtype) -> None:
        """Pass what has changed since the last call."""
        net, table = self.net, self.net.table
        fresh = [held.renewed() for held in net.held]
        if True in fresh:
            net.describe_gradients([0.0 if learned else math.nan for learned in self.learned])
        if estimator is not self.estimator:
            self.estimator = estimator
            describe_estimator(net, estimator, dtype)
            if isinstance(beta := getattr(estimator, "beta", None), Tensor):
                table.list_numbers("beta", beta.expand(self.networks).tolist(), ctypes.c_double)
        if batch != self.batch:
            self.batch = batch
            order = torch.arange(batch * self.networks)
            table.set(batch=batch)
            table.point("order", order)
            table.point("labels", torch.zeros_like(order))


class Cpu(Engine):
    """The paper's nets, the squared error, EP and BPTT, in float32 or float64. Needs a C compiler.

    Results are bit-identical for any number of threads (torch.get_num_threads). With stop="settled" each sample leaves
    its free phase on its own, once no bit of its state changes.
    """

    name = "cpu"
    device = "cpu"
    computes = True
    models = (Layered, Convolutional)
    costs = (SquaredError,)
    estimators = (EP, BPTT)
    starts = ("zero", "persistent", "initialised", "carried")

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Dynamics, CpuGradients | None] = WeakKeyDictionary()

    def refuses_more(self, task: Task) -> str | None:
        model = task.model
        assert isinstance(model, Layered | Convolutional), "refused otherwise"
        alternates = task.estimator is not None and task.estimator.schedule == "alternating"
        if alternates and not model.bipartite:
            return "an energy-based net cannot alternate."
        return refuses_net(model) or _refuses_machine(unit_of(model), next(model.parameters()).dtype)

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        start = prepare(model, x, state, None)
        if not _serves(model, x, phase):
            return relax(model, x, phase, state)
        end, residual, steps = _relax(model, x, phase, None if state is None else start)
        if phase.checked and first_bad_layer(end) is not None:
            # Rerun on the reference engine, whose error says where it went wrong.
            return relax(model, x, phase, state)
        settled = residual < settled_below(residual.dtype, phase.tolerance)
        return Relaxation(end, int(steps.max()), residual, settled)

    def gradient(self, task: Task, x: Tensor, y: Tensor, state: State) -> tuple[Relaxation, Grads]:
        """In C; by the next engine where that does not serve the call, or its phases end for each sample alone."""
        model, estimator = task.model, task.estimator
        assert estimator is not None
        assert task.cost is not None
        known, networks = self._known.get(model), networks_of(model, x)
        if known is None or networks is None or not known.fits(model, networks):
            served = self.refuses(task) is None and networks is not None
            known = CpuGradients(model, networks or 1) if served else None
            self._known[model] = known
        elif estimator is not known.estimator and self.refuses(task) is not None:
            known = None
        plain = type(task.cost) is SquaredError and estimator.stop == "never" and estimator.T > 0
        if known is None or not plain or known.watch.refusal is not None:
            following = load_engine("xla").automatic(task)
            if following is None or following.refuses(task) is not None:
                return super().gradient(task, x, y, state)
            return following.gradient(task, x, y, state)
        if estimator.checked:
            estimator.check_nudge(model, x.dtype)
        free, grads, fine = known(Problem(model, task.cost, x, y), estimator, state)
        if not fine:
            return super().gradient(task, x, y, state)  # which says where a number was first not finite
        return free, grads

    def runner(self, job: Job) -> Runner:
        reason = self.refuses(job.task)
        if reason is not None:
            raise ValueError(f"The engine 'cpu' cannot serve: {reason} Use engine='auto'.")
        return CpuRunner(job)


def _refuses_machine(unit: str, dtype: torch.dtype) -> str | None:
    try:
        library(unit, dtype)
    except NoLibraryError as error:
        _say_once(str(error))
        return str(error)
    return None


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(f"The fast CPU engine is not available: {reason} Using the reference engine.", stacklevel=2)


def _serves(model: Dynamics, x: Tensor, phase: Phase) -> bool:
    """False for phases left to the reference engine: invalid ones, tolerant stops, mismatched stacks."""
    impossible = phase.schedule in SWEEPS or (phase.schedule == "alternating" and not model.bipartite)
    return networks_of(model, x) is not None and x.numel() > 0 and not impossible and phase.still == 0.0


@torch.no_grad()
def _relax(model: Dynamics, x: Tensor, phase: Phase, start: State | None) -> tuple[State, Tensor, Tensor]:
    """The final state of the free phase, and residual and steps per sample."""
    net = net_of(model, networks_of(model, x) or 1)
    for held in net.held:
        held.fetch()
    lead = x.shape[: model.sample_dims(x)]
    end = net.to_c(model.init_state(x))
    residual, steps = x.new_empty(lead), torch.empty(lead, dtype=torch.int64)
    table = net.table
    table.set(batch=lead[-1], threads=torch.get_num_threads(), T=phase.T)
    table.set(alternating=phase.schedule == "alternating", settled=phase.stop == "settled")
    table.point("images", net.images(x))
    net.describe_state(None if start is None else net.to_c(start), end)
    table.point("residuals", residual)
    table.point("steps", steps)
    if library(net.unit, x.dtype).relax(ctypes.byref(table.struct)):
        raise MemoryError(f"Out of memory relaxing a batch of shape {tuple(x.shape)}. Relax fewer samples at a time.")
    return net.from_c(end), residual, steps
