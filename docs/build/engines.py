"""Who serves what: a table of the engines' own answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch

from docs.build.text import table
from eqprop import BPTT, EP, RBP, ContinualEP, HolomorphicEP, SquaredError, from_primitive, from_transition
from eqprop.cost import FunctionCost
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import EXCHANGE, STEERED, STREAMED, Task, load_engine
from eqprop.engines.base import ENGINES
from eqprop.estimators.coupled import CoupledLearning
from eqprop.models import Conv, Convolutional, Dense, Layered, Network, stack

H200 = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
HARDWARE: dict[str, Any] = {
    "eqprop.engines.cuda.nvrtc.unavailable": lambda: None,
    "eqprop.engines.compiled.why_not_compiled": lambda device: None,
    "torch.cuda.get_device_capability": lambda *device: (9, 0),
    "torch.cuda.get_device_properties": lambda *device: H200,
}
"""What is asked of the machine, and the answers of one that has everything: an H200."""


def own() -> Dynamics:
    def phi(x: Any, s: Any, theta: Any) -> Any:
        return (s[0] * (x @ theta["W"].T)).sum(-1)

    return from_primitive(phi, {"W": torch.zeros(3, 4)}, (3,), squash=torch.tanh)


NETS: dict[str, Callable[[], Dynamics]] = {
    "cuda-deep": lambda: Layered((10, 16, 16, 20), seed=0),
    "cuda-conv": lambda: Convolutional(seed=0),
}
"""The net that an engine is asked about, where the question is not of nets; a layer between input and output else."""


def questions(engine: str) -> Iterator[tuple[str, Task]]:
    """What somebody wants to train, as asked of this engine."""
    usual = NETS.get(engine, lambda: Layered((10, 16, 20), seed=0))

    def task(model: Dynamics | None = None, estimator: Any = None, **options: Any) -> Task:
        model = usual() if model is None else model
        optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), 0.1)
        return Task(model, options.pop("cost", SquaredError()), estimator or EP(8, 4, beta=0.5), optimizer, **options)

    def ep(**options: Any) -> EP:
        return EP(8, 4, beta=0.5, **options)

    def step(x: Any, s: Any, theta: Any) -> Any:
        return ((s[0] + x) @ theta["W"].T,)

    maps = Network((1, 8, 8), {"out": 3, "h": (4, 4, 4)}, [Conv("x", "h", padding=1, pool=2), Dense("h", "out")])
    yield "nets with one hidden layer", task(Layered((10, 16, 20), seed=0))
    yield "with two and more", task(Layered((10, 16, 16, 20), seed=0))
    yield "convolutional nets of the paper", task(Convolutional(seed=0))
    yield "graphs", task(maps)
    yield "your Phi or energy", task(own())
    yield "your step, without a Phi", task(from_transition(step, {"W": torch.eye(3)}, (3,)))
    yield "trials stacked", task(stack([cast(PrimitiveDynamics, usual()) for _ in range(2)]))
    yield "other costs", task(cost=FunctionCost(lambda s, y: (s[0] - y).abs().sum(-1)))
    yield "symmetric nudging, random signs", task(estimator=ep(nudging="random-sign"))
    yield "the difference form", task(estimator=ep(form="difference"))
    yield "BPTT", task(estimator=BPTT(8, 4))
    yield "recurrent backprop", task(estimator=RBP(8, 4))
    yield "continual EP", task(estimator=ContinualEP(8, 4, rates=0.1))
    yield "holomorphic EP", task(estimator=HolomorphicEP(8, 4))
    yield "AsymEP, dyadic and coupled learning", task(estimator=CoupledLearning(8, 4))
    yield "alternating", task(estimator=ep(schedule="alternating"))
    yield "sweeps", task(estimator=ep(schedule="sweeps"))
    yield "stopping at rest", task(estimator=ep(stop="settled"))
    yield "momentum", task(optimizer=partial(torch.optim.SGD, momentum=0.9))
    yield "other optimizers", task(optimizer=torch.optim.Adam)
    yield "starts kept, carried or computed", task(start="persistent")
    yield "augmentation", task(extras=("preparation of samples",))
    yield "samples from a stream", task(extras=(STREAMED,))
    yield "gradient clipping", task(extras=("gradient clipping",))
    yield "several processes", task(extras=(EXCHANGE,))
    yield "beta led while it trains", task(extras=(STEERED,))
    yield "float64", task(usual().double())
    yield "half precision", task(precision="float16")


def answers() -> dict[str, dict[str, bool]]:
    """By question and engine: whether it serves on its own device."""
    found: dict[str, dict[str, bool]] = {}
    with ExitStack() as entered, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, answer in HARDWARE.items():
            entered.enter_context(patch(place, answer))
        for name in ENGINES.built_in:
            engine = load_engine(name)
            place = torch.device("cuda" if engine.device == "cuda" or name == "compiled" else "cpu")
            with patch.object(Task, "device", property(lambda task, place=place: place)):
                for what, asked in questions(name):
                    found.setdefault(what, {})[name] = engine.refuses(asked) is None
    return found


def engines_block() -> str:
    """A row per question, a column per engine."""
    found = answers()
    names = list(next(iter(found.values())))
    rows = [[what, *("yes" if row[name] else "–" for name in names)] for what, row in found.items()]
    return table(["", *(f"`{name}`" for name in names)], rows, words=1 + len(names))
