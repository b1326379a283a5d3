"""Engines replace the time loop and nothing else.

An engine has three entry points. `relaxation` runs a free phase, for evaluation. `gradient` runs both phases and
returns the update, for `Estimator.backward`. A `Runner` runs whole training iterations (mini-batch, both phases,
gradient, optimizer step) and reads nothing back until asked. Where its iterations are faster than `relaxation`, it also
evaluates (`Engine.evaluates`). The eager engine is the oracle of the others.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from eqprop.cost import Cost, Problem, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.estimators import EP, Estimator, Grads, Nudging, Signs
from eqprop.messages import unknown
from eqprop.models import Convolutional, Layered
from eqprop.plugins import Table
from eqprop.relax import SWEEPS, Phase, Relaxation
from eqprop.starts import Start, StartName
from eqprop.state import State

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
"""Of the products in a step: matrix products and convolutions. Sums, states, gradients and weights stay float32."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@contextmanager
def full_precision(tf32: bool = False) -> Iterator[None]:
    """Disable TF32 in matrix products and convolutions, unless asked for; restore the caller's settings afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def fixed_algorithms(asked: bool) -> Iterator[None]:
    """If asked for, let torch use the same algorithms every time; restore the caller's settings afterwards.

    On a CPU it does so anyway. Operations without such an algorithm warn, except unpooling: it could write a place
    twice only if pools overlapped, and those of the nets here do not.
    """
    if not asked:
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tuning = cudnn.benchmark, cudnn.deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"max_unpooling\dd_forward_out does not have a deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic = tuning


class Batch(NamedTuple):
    """A mini-batch: the model's inputs, targets, class numbers, and the samples' rows in the training set.

    (B, ...), or (R, B, ...) for R stacked networks.
    """

    x: Tensor
    y: Tensor
    labels: Tensor
    rows: Tensor


Prepare = Callable[[Tensor, Tensor], Tensor]
"""Stored samples and their rows in the training set -> the model's inputs: augmentation, normalisation."""

STREAMED = "streamed samples"
"""The extra of a job whose mini-batches are read while it runs."""

Exchange = Callable[[list[Tensor], Tensor], Tensor]
"""Averages gradients over processes in place. Takes the losses of this process's samples too, (R, B), and returns them,
not finite where those of another process are not."""


STEERED = "control of its phases while it trains"
"""The extra of a task whose estimator may change between iterations."""

EXCHANGE = "exchange between processes"
"""The extra of a task whose gradients are averaged over processes."""


@dataclass(frozen=True)
class Task:
    """What an engine should run; parts that are None are not checked.

    start       where the free phases of training begin (see `eqprop.starts`)
    extras      what an iteration does besides mini-batch, gradient and optimizer step (see `Job.extras`)
    precision   of the products in a step
    work        multiplications and additions of an epoch's phases; 0 if unknown
    """

    model: Dynamics
    cost: Cost | None = None
    estimator: Estimator | None = None
    optimizer: torch.optim.Optimizer | None = None
    start: StartName = "zero"
    extras: tuple[str, ...] = ()
    precision: Precision = "float32"
    work: float = 0.0

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters(), torch.empty(0)).device


@dataclass(frozen=True)
class Job:
    """What to train, on which data, and how.

    model       one network, or several stacked (see `eqprop.models.stack`); its parameters are updated in place
    images      (N, ...) all training samples, on the model's device: its inputs, in its dtype, unless `prepare` makes
                them of these
    targets     (N, classes) one-hot rows, or whatever the cost takes
    labels      (N,) class numbers, for the running error
    optimizer   any torch.optim optimizer over the model's (and the cost's) parameters
    networks    how many networks are stacked; None for a single one
    start       where free phases begin; None for the model's zero state
    signs       of beta per iteration, for random-sign nudging; None for seeds 0, 1, ...
    prepare     makes inputs of stored samples; None: they are inputs already
    stream      reads the mini-batches of these rows, ready, instead of taking them from images, which are then none
    clip        largest norm of a network's gradient; None: any
    exchange    averages gradients over processes before the update; None: there is one process
    after       called after each optimizer step, for instance to average weights; what it does must be capturable
    """

    model: Dynamics
    cost: Cost
    estimator: Estimator
    optimizer: torch.optim.Optimizer
    images: Tensor
    targets: Tensor
    labels: Tensor
    networks: int | None = None
    start: Start | None = None
    signs: Signs | None = None
    prepare: Prepare | None = None
    stream: Callable[[Tensor], Iterator[Batch]] | None = None
    clip: float | None = None
    exchange: Exchange | None = None
    after: Callable[[], None] | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        """What an iteration does besides mini-batch, gradient and optimizer step, in the words of a refusal."""
        asked = {
            "preparation of samples": self.prepare,
            STREAMED: self.stream,
            "gradient clipping": self.clip,
            EXCHANGE: self.exchange,
            "weight averaging": self.after,
        }
        return tuple(name for name, part in asked.items() if part is not None)

    @property
    def task(self) -> Task:
        start = "zero" if self.start is None else self.start.kind
        return Task(self.model, self.cost, self.estimator, self.optimizer, start, self.extras)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the model has another type or device than its data: addresses would be wrong.

        Targets that are class numbers say nothing about the type.
        """
        number = self.targets.is_floating_point()
        for name, p in self.model.named_parameters():
            expected = (self.targets.dtype if number else p.dtype, self.images.device)
            if (p.dtype, p.device) != expected:
                raise RuntimeError(
                    f"The parameter {name} is {p.dtype} on {p.device}; it was {expected[0]} on {expected[1]} when the "
                    "runner was made. Make a new runner after moving or converting a model."
                )


def checked_rows(order: Tensor, networks: int | None, samples: int) -> Tensor:
    """An order of samples, (n, B) or (n, R, B), on the CPU, for programs that do not check bounds themselves."""
    dims = 2 if networks is None else 3
    if order.dim() != dims or (dims == 3 and order.shape[1] != networks) or order.is_floating_point():
        expected = "(n, B)" if dims == 2 else f"(n, {networks}, B)"
        raise ValueError(
            f"The order has shape {tuple(order.shape)} and dtype {order.dtype}; expected {expected} of integers."
        )
    rows = order.to("cpu", torch.int64).contiguous()
    if rows.numel():
        low, high = (int(v) for v in rows.aminmax())
        if low < 0 or high >= samples:
            raise IndexError(f"The order names samples {low} to {high}; expected 0 to {samples - 1}, as in the data.")
    return rows


@dataclass
class Tally:
    """A runner's counts, one value per network, kept on the device: only reading them synchronises.

    samples     seen                    errors      whose largest output was not the label, at the free state
    loss        summed over samples     residual    of the free phase, summed over samples
    worst       largest residual        unsettled   samples whose residual is not below the tolerance
    bad         the number of the first iteration (counted from the runner's start) that was not finite; -1: none.
                From it on the network is frozen: its parameters stay as they were before that iteration.
    """

    samples: Tensor
    errors: Tensor
    loss: Tensor
    residual: Tensor
    worst: Tensor
    unsettled: Tensor
    bad: Tensor

    @classmethod
    def zeros(cls, networks: int, device: torch.device) -> Tally:
        counts = {name: torch.zeros(networks, dtype=torch.float64, device=device) for name in cls.names()}
        return cls(**{**counts, "bad": torch.full((networks,), -1.0, dtype=torch.float64, device=device)})

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    def read(self) -> dict[str, list[float]]:
        """All counts as lists over networks. Synchronises with the device."""
        table = torch.stack([getattr(self, name) for name in self.names()]).cpu()
        return dict(zip(self.names(), table.tolist(), strict=True))


class Runner(ABC):
    """Training iterations of one job. `tally` accumulates until `reset`."""

    tally: Tally
    keeps_states = False
    """Whether `free_states` will be needed; set it before the first run. Training does not need it."""

    @abstractmethod
    def run(self, order: Tensor) -> None:
        """Run one iteration per row of `order`: (n, B) sample indices, or (n, R, B) for R stacked networks.

        The model's parameters are up to date on return (on a GPU: in stream order).
        """

    def free_states(self) -> State | None:
        """The free states of the last iteration, (R, B, ...) per layer; see `keeps_states`.

        None if the runner keeps none because its free phase is the engine's `relaxation`.
        """
        return None

    def take_estimator(self, estimator: Estimator) -> None:
        """Go on with this one: the same but for its T and beta."""
        raise NotImplementedError(f"{type(self).__name__} cannot change its phases.")

    def take_rates(self) -> None:
        """Pick up changed learning rates from the optimizer. Call it before the next run."""

    def reset(self) -> None:
        """Reset the counts; a frozen network stays frozen and keeps its `bad` iteration."""
        bad = self.tally.bad
        self.tally = Tally.zeros(bad.numel(), bad.device)
        self.tally.bad.copy_(bad)


def _silent(_: str) -> None:
    """Discard the notice."""


class Engine(ABC):
    """A way to run the time loop.

    A subclass declares what it supports; an empty field is no restriction. Models and costs must match by exact type,
    with unpatched methods: an engine that hard-codes a class would train a subclass or a patched object wrongly.
    """

    name: str

    notice: Callable[[str], None] = staticmethod(_silent)
    """Called with a sentence before something that takes seconds, such as compiling."""

    remark: str = ""
    """Why "auto" took this engine although another would be faster, as a sentence; set by `choose`."""

    precision: Precision = "float32"
    """Of the products in a step; set by `choose`."""

    precisions: tuple[Precision, ...] = ("float32",)
    """Supported precisions."""

    missed: bool = False
    """Whether "auto" should say so where it would take this engine and the engine refuses."""

    device: str = ""
    """Type of device it runs on."""

    models: tuple[type[Dynamics], ...] = ()
    costs: tuple[type[Cost], ...] = ()
    estimators: tuple[type[Estimator], ...] = ()

    nudgings: tuple[Nudging, ...] = ()
    """Supported kinds of nudging for EP."""

    updates: bool = False
    """Whether it updates parameters itself, by SGD without options such as momentum."""

    reference: bool = False
    """Whether it runs the reference iteration, and so every schedule, nudge site and extra of a task."""

    steers: bool = False
    """Whether T and beta may change between iterations."""

    computes: bool = False
    """Whether it has a `gradient` of its own, so that "auto" may take it for a call of `backward`."""

    starts: tuple[StartName, ...] = ("zero",)
    """Supported starting points of free phases in training (see `eqprop.starts`)."""

    differences: bool = False
    """Whether it computes nudged phases in the difference form, and nets without a Phi."""

    evaluated_from: int | None = None
    """Samples per iteration, over all networks, from which iterations evaluate a set faster than `relaxation`."""

    def evaluates(self, samples: int) -> bool:
        return self.evaluated_from is not None and samples >= self.evaluated_from

    def automatic(self, task: Task) -> Engine | None:
        """This engine as "auto" runs the task; None where it was not measured to be faster than those behind it."""
        return self

    def refuses(self, task: Task) -> str | None:
        """Why this engine cannot run the task, as a sentence; None if it can."""
        return self._refuses_declared(task) or self.refuses_more(task)

    def refuses_more(self, task: Task) -> str | None:
        """Checks of a subclass beyond what it declares."""
        return None

    def _refuses_declared(self, task: Task) -> str | None:
        if self.device and task.device.type != self.device:
            where = "a CUDA device" if self.device == "cuda" else "the CPU"
            return f"it runs on {where}, and the model is on {task.device}."
        if task.model.settles_itself and self.name != "eager":
            return f"it takes steps, and {task.model.title} settles by itself."
        if task.precision not in self.precisions:
            return f"it computes in {' or '.join(self.precisions)}, and the precision is {task.precision}."
        if task.start not in self.starts:
            return f"its free phases begin at {' or '.join(self.starts)}, and the task's start is {task.start}."
        if STEERED in task.extras and not self.steers:
            return f"it has no {STEERED}."
        if not self.reference and task.extras:
            return f"it has no {task.extras[0]}."
        estimator = task.estimator
        if not self.reference and estimator is not None and estimator.schedule in SWEEPS:
            return f"it has no sweeps, and the schedule is {estimator.schedule}."
        if not self.reference and getattr(task.model, "nudge_site", "outside") == "implicit":
            return "it has no implicit nudge."
        if not (self.reference or self.differences) and (reason := _differs(task)):
            return reason
        if self.estimators and estimator is not None and type(estimator) not in self.estimators:
            return f"it computes {_listed(self.estimators)}, and the estimator is {type(estimator).__name__}."
        if self.nudgings and isinstance(estimator, EP) and estimator.nudging not in self.nudgings:
            return f"its nudging is {' or '.join(self.nudgings)}, and the estimator's is {estimator.nudging}."
        return (
            _refuses_part("model", task.model, self.models)
            or _refuses_part("cost", task.cost, self.costs)
            or (_needs_bare_sgd(task.optimizer) if self.updates else None)
        )

    @abstractmethod
    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        """Run the free phase."""

    def gradient(self, task: Task, x: Tensor, y: Tensor, state: State) -> tuple[Relaxation, Grads]:
        """Both phases from this state and the batch mean of dL/dtheta by parameter, `.grad` untouched.

        The arguments are as `Estimator.begin` checks them and `Estimator.for_call` makes them. By default the reference
        computes it.
        """
        assert task.cost is not None
        assert task.estimator is not None
        return task.estimator.computed(Problem(task.model, task.cost, x, y), state)

    @abstractmethod
    def runner(self, job: Job) -> Runner:
        """A runner for a job that this engine does not refuse."""


def _differs(task: Task) -> str | None:
    """Why an engine that knows only the plain form of EP on a Phi cannot serve; None if it can."""
    estimator = task.estimator
    if getattr(estimator, "form", "plain") == "difference":
        return "it has no difference form of the nudged phase."
    if getattr(estimator, "held", False):
        return "its nudge follows the output, and the estimator holds it."
    if not getattr(task.model, "conservative", True):
        return "it takes weights to act alike both ways, and the model has a gain or weights of its own on a way back."
    return None


def _listed(kinds: tuple[type, ...]) -> str:
    return " and ".join(kind.__name__ for kind in kinds)


def _refuses_part(what: str, part: object | None, kinds: tuple[type, ...]) -> str | None:
    """Why a model or cost is not one of these kinds, unpatched; None if it is."""
    if part is None or not kinds:
        return None
    if type(part) not in kinds:
        return f"it supports only {_listed(kinds)}, and the {what} is {getattr(part, 'title', type(part).__name__)}."
    changed = touched(part)
    if changed is not None:
        return f"it supports only unmodified {_listed(kinds)}, and {changed} of this {what} was replaced."
    return None


@functools.cache
def _as_defined(kind: type) -> dict[str, object]:
    """The attributes of a class and its bases below nn.Module, as of the first call."""
    own = [c for c in kind.__mro__ if c.__module__.startswith("eqprop.")]
    return {name: vars(c)[name] for c in reversed(own) for name in vars(c) if not name.startswith("__")}


def touched(part: Any) -> str | None:
    """The name of a method that was replaced on the object or its class; None if there is none."""
    kind: type = type(part)
    defined = _as_defined(kind)
    for name, value in defined.items():
        if inspect.getattr_static(kind, name) is not value or (callable(value) and name in vars(part)):
            return name
    return None


def _needs_bare_sgd(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Why an engine's own update cannot replace this optimizer; None for SGD without options."""
    if optimizer is None:
        return None
    if type(optimizer) is not torch.optim.SGD:
        return f"it has its own SGD update, and the optimizer is {type(optimizer).__name__}."
    for group in optimizer.param_groups:
        options = ("momentum", "weight_decay", "decoupled_decay", "dampening", "nesterov", "maximize")
        extras = [name for name in options if group.get(name)]
        if extras:
            return f"its own SGD update has no options, and the optimizer has {', '.join(extras)}."
    return None


def has_bare_sgd(job: Job) -> bool:
    return _needs_bare_sgd(job.optimizer) is None


def learning_rates(job: Job) -> dict[str, float]:
    """Learning rate by parameter name, from the optimizer's groups; 0 if not optimised."""
    rates = {id(p): float(group["lr"]) for group in job.optimizer.param_groups for p in group["params"]}
    return {name: rates.get(id(p), 0.0) for name, p in job.model.named_parameters()}


_BUILT_IN = {
    "cuda-one-hidden": "eqprop.engines.cuda.one_hidden:OneHidden",
    "cuda-deep": "eqprop.engines.cuda.deep:Deep",
    "cuda-conv": "eqprop.engines.cuda.conv:ConvEngine",
    "xla": "eqprop.engines.xla:Xla",
    "compiled": "eqprop.engines.compiled:Compiled",
    "cuda-graph": "eqprop.engines.cuda.graph:CapturedEngine",
    "eager": "eqprop.engines.eager:Eager",
}
ENGINES: Table[Any] = Table("engine", _BUILT_IN, lambda name, part: part)
"""Every engine by name, the fastest first: where its class is, imported when it is asked for; or from outside, a class.

The last built-in one serves everything.
"""


def load_engine(name: str) -> Engine:
    """The engine of that name."""
    if name not in ENGINES:
        raise ValueError(unknown("engine", name, engine_names()))
    found = ENGINES[name]
    if isinstance(found, str):
        module, _, kind = found.partition(":")
        found = getattr(importlib.import_module(module), kind)
    engine: Engine = found()
    return engine


def engine_names() -> tuple[str, ...]:
    return ("auto", *ENGINES)


def choose(name: str, task: Task, gradient: bool = False) -> Engine:
    """The engine of that name, or with "auto" the first that does not refuse.

    gradient    whether it is to compute gradients for `backward`: "auto" then takes none that only trains
    """
    if name == "auto":
        on_cpu = task.device.type == "cpu"
        names = (n for n in ENGINES.built_in if not (on_cpu and n.startswith("cuda")))
        remark = ""
        for engine in filter(None, (engine.automatic(task) for engine in map(load_engine, names))):
            if gradient and not engine.computes:
                continue
            reason = engine.refuses(task)
            if reason is None:
                engine.remark = remark and f"The engine {engine.name} is used, which is slower here. {remark}"
                return _set(engine, task)
            remark = remark or (f"{engine.name.capitalize()} would serve, but {reason}" if engine.missed else "")
        raise AssertionError("the last engine serves everything")
    engine = load_engine(name)
    if (reason := engine.refuses(task)) is not None:
        raise ValueError(f"The engine {name!r} cannot serve: {reason} Use engine='auto'.")
    return _set(engine, task)


def _set(engine: Engine, task: Task) -> Engine:
    engine.precision = task.precision
    return engine


# Recorded at import, before anyone can patch a class.
for _written_out in (Layered, Convolutional, SquaredError):
    _as_defined(_written_out)
