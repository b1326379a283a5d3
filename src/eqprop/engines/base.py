"""Which engine runs: by name, or the fastest that supports the model on this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.estimators import EP, Estimator, Signs
from eqprop.relax import Phase, Relaxation
from eqprop.starts import Start, StartName
from eqprop.state import State


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32, in matrix products and convolutions; afterwards as the caller had it."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@dataclass(frozen=True)
class Job:
    """What is trained, on what, and how.

    model       one network, or several stacked (see `eqprop.models.stack`); its parameters are updated in place
    images      (N, ...) every training input, on the model's device and of its dtype
    targets     (N, classes) one-hot rows, or whatever the cost takes
    labels      (N,) class numbers, against which the running error is counted
    optimizer   any torch.optim optimizer over the model's (and the cost's) parameters
    networks    how many networks are stacked; None for one plain network
    start       where free phases begin; None for the model's zero state
    signs       of beta, for random-sign nudging: an iteration takes those of its number; None for seeds 0, 1, ...
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


@dataclass
class Tally:
    """What a runner counted, one value a network, on the device: reading it is the caller's one synchronisation.

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
        """Every count as plain numbers, a list over networks. Waits for the device."""
        table = torch.stack([getattr(self, name) for name in self.names()]).cpu()
        return dict(zip(self.names(), table.tolist(), strict=True))


class Runner(ABC):
    """Training iterations of one job. `tally` accumulates until `reset`."""

    tally: Tally
    keeps_states = False
    """Whether `free_states` will be asked for; to be set before the first run. Training does not need them."""

    @abstractmethod
    def run(self, order: Tensor) -> None:
        """One iteration for each row of `order`: (n, B) sample numbers, or (n, R, B) for R stacked networks.

        The model's parameters are up to date when it returns (on a GPU: in stream order).
        """

    def free_states(self) -> State | None:
        """The free states of the last iteration, (R, B, ...) a layer; see `keeps_states`.

        None from a runner that keeps none, because its free phase is the engine's `relaxation`.
        """
        return None

    def take_rates(self) -> None:
        """The optimizer's learning rates have changed: to be called before the next run, for runners that keep them."""

    def reset(self) -> None:
        """Start counting anew; a network that is frozen stays so, with the iteration it went bad at."""
        bad = self.tally.bad
        self.tally = Tally.zeros(bad.numel(), bad.device)
        self.tally.bad.copy_(bad)


class Engine(ABC):
    """A way to run the time loop."""

    name: str

    starts: tuple[StartName, ...] = ("zero",)
    """Where the free phases of its training iterations can begin (see `eqprop.starts`)."""

    evaluated_from: int | None = None
    """Samples of an iteration, over all networks, from which on iterations evaluate a set faster than `relaxation`."""

    def evaluates(self, samples: int) -> bool:
        return self.evaluated_from is not None and samples >= self.evaluated_from

    @abstractmethod
    def refuses(
        self,
        model: Dynamics,
        cost: Cost | None = None,
        estimator: Estimator | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> str | None:
        """Why this engine cannot serve, in words; None if it can. What is None is not looked at."""

    @abstractmethod
    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        """The free phase."""

    @abstractmethod
    def runner(self, job: Job) -> Runner:
        """Training iterations of a job this engine does not refuse."""


def nudges_otherwise(estimator: Estimator | None) -> str | None:
    """Why an engine with the one-sided nudge written out cannot stand in for this EP; None if it can."""
    if isinstance(estimator, EP) and estimator.nudging != "one-sided":
        return f"its nudging is one-sided, and the estimator's is {estimator.nudging}."
    return None


def needs_plain_sgd(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Why an engine with its own update cannot stand in for this optimizer; None for plain SGD."""
    if optimizer is None:
        return None
    if type(optimizer) is not torch.optim.SGD:
        return f"it updates by plain SGD itself, and the optimizer is {type(optimizer).__name__}."
    for group in optimizer.param_groups:
        extras = [name for name in ("momentum", "weight_decay", "dampening", "nesterov", "maximize") if group.get(name)]
        if extras:
            return f"it updates by plain SGD itself, and the optimizer has {', '.join(extras)}."
    return None


def learning_rates(job: Job) -> dict[str, float]:
    """The rate of each parameter by name, from the optimizer's groups; 0 for one that is not optimised."""
    rates = {id(p): float(group["lr"]) for group in job.optimizer.param_groups for p in group["params"]}
    return {name: rates.get(id(p), 0.0) for name, p in job.model.named_parameters()}


def _engines() -> list[Engine]:
    """Every engine, the fastest first; the last serves everything."""
    from eqprop.engines.cpu.engine import Cpu
    from eqprop.engines.cuda.conv import Conv
    from eqprop.engines.cuda.deep import Deep
    from eqprop.engines.cuda.graph import Graph
    from eqprop.engines.cuda.one_hidden import OneHidden
    from eqprop.engines.eager import Eager

    return [OneHidden(), Deep(), Conv(), Graph(), Cpu(), Eager()]


def engine_names() -> tuple[str, ...]:
    return ("auto", *(engine.name for engine in _engines()))


def choose(
    name: str,
    model: Dynamics,
    cost: Cost | None = None,
    estimator: Estimator | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    start: StartName = "zero",
) -> Engine:
    """The engine of that name, or with "auto" the first that does not refuse.

    start       where the free phases of training begin; a job with such a `start` is only given to an engine that
                was chosen for it
    """

    def refusal(engine: Engine) -> str | None:
        if start not in engine.starts:
            return f"its free phases begin at zero, and they are to begin {start}."
        return engine.refuses(model, cost, estimator, optimizer)

    engines = _engines()
    if name == "auto":
        return next(engine for engine in engines if refusal(engine) is None)
    for engine in engines:
        if engine.name == name:
            reason = refusal(engine)
            if reason is not None:
                raise ValueError(f"The engine {name!r} cannot serve: {reason} Use engine='auto'.")
            return engine
    raise ValueError(f"Unknown engine {name!r}; expected one of {', '.join(engine_names())}.")
