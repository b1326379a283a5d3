"""Which engine runs: by name, or the fastest that supports the model on this machine."""

from __future__ import annotations

import torch

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine
from eqprop.engines.cpu import Cpu
from eqprop.engines.cuda_conv import Conv
from eqprop.engines.cuda_deep import Deep
from eqprop.engines.cuda_graph import Graph
from eqprop.engines.cuda_one_hidden import OneHidden
from eqprop.engines.eager import Eager
from eqprop.estimators import Estimator
from eqprop.starts import StartName


def _engines() -> list[Engine]:
    """Every engine, the fastest first; the last serves everything."""
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
