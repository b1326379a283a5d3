"""Time per iteration as a function of batch, depth, width and trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch

from benchmarks.cases import Case, batch_order
from benchmarks.run import Effort, Say, check_device
from benchmarks.timing import Contestant
from eqprop.data import Images, mnist
from eqprop.engines.base import full_precision
from eqprop.models.layered import LayeredNet
from eqprop.models.network import GraphNet
from eqprop.provenance import provenance
from eqprop.run.spec import Spec

AXES = ("batch", "depth", "width", "trials")
BASE = {"batch": 20, "depth": 2, "width": 512, "trials": 1}
"""P-2h, one trial: where the four curves meet."""
VALUES: dict[str, tuple[int, ...]] = {
    "batch": (1, 5, 10, 20, 40, 80, 160, 320),
    "depth": (1, 2, 3, 4),
    "width": (64, 128, 256, 512, 1024, 2048),
    "trials": (1, 2, 3, 5, 8, 16),
}


CONV_BASE = {"batch": 32, "depth": 3, "width": 32}
CONV_VALUES: dict[str, tuple[int, ...]] = {
    "batch": (4, 8, 16, 32, 64, 128),
    "depth": (1, 2, 3, 5, 8),
    "width": (8, 16, 32, 64),
}


@dataclass(frozen=True)
class Curves:
    """Which engines to time at which values. One axis varies at a time, the others stay at `base`."""

    net: ClassVar[str] = "layered"

    engines: tuple[str, ...] = ("auto",)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    base: Mapping[str, int] = field(default_factory=lambda: dict(BASE))
    values: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict(VALUES))
    T: int = 100
    K: int = 20
    effort: Effort = field(default_factory=Effort)

    def case(self, axis: str, value: int, engine: str) -> Case:
        """A prototypical net trained with EP."""
        at = {**self.base, axis: value}
        sizes = (10, *[at["width"]] * at["depth"], 784)
        experiment = Spec.of(
            optimizer="SGD",
            estimator="ep",
            name=f"P-{at['depth']}h",
            model=LayeredNet(sizes),
            T=self.T,
            K=self.K,
            beta=0.5,
            epochs=1,
            batch=at["batch"],
            # Small, so that no size diverges; the time does not depend on it.
            rates={"*": 1e-3},
        )
        return Case(experiment, "ep", engine, at["trials"])


@dataclass(frozen=True)
class ConvCurves(Curves):
    """A chain of convolutions that is trained in sweeps: `depth` of them with `width` maps of 14 x 14."""

    net: ClassVar[str] = "conv"

    engines: tuple[str, ...] = ("eager", "xla")
    base: Mapping[str, int] = field(default_factory=lambda: dict(CONV_BASE))
    values: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict(CONV_VALUES))
    T: int = 40

    def case(self, axis: str, value: int, engine: str) -> Case:
        at = {**self.base, axis: value}
        names = [f"h{k}" for k in range(1, at["depth"] + 1)]
        joints: list[dict[str, Any]] = [
            {"kind": "conv", "pre": pre, "post": post, "kernel": 3, "padding": 1, "pool": 2 if pre == "x" else 1}
            for pre, post in pairwise(["x", *names])
        ]
        shapes: list[tuple[str, int | tuple[int, ...]]] = [(name, (at["width"], 14, 14)) for name in reversed(names)]
        net = GraphNet(
            input_shape=(1, 28, 28),
            layers={"out": 10, **dict(shapes)},
            connections=(*joints, {"kind": "dense", "pre": names[-1], "post": "out"}),
        )
        experiment = Spec.of(
            optimizer="SGD",
            estimator="ep",
            name=f"chain of {at['depth']}",
            model=net,
            T=self.T,
            K=self.K,
            beta=0.5,
            schedule="sweeps",
            epochs=1,
            batch=at["batch"],
            rates={"*": 1e-3},
        )
        return Case(experiment, "ep", engine)


def measure_scaling(curves: Curves, say: Say = lambda line: None) -> dict[str, Any]:
    """Time every point, ready for JSON; a point under "scaling" has its axis and the values of all."""
    check_device(curves.device)
    images = mnist(curves.device)
    points, skipped = [], []
    with full_precision():
        for axis, values in curves.values.items():
            for value in values:
                for engine in curves.engines:
                    try:
                        points.append(point(curves, axis, value, engine, images))
                    except (ValueError, RuntimeError) as error:
                        skipped.append({"axis": axis, "value": value, "engine": engine, "reason": str(error)})
                        say(f"{axis} {value}, {engine}: {error}")
                    else:
                        say(f"{axis} {value}, {engine}: {points[-1]['us_per_iteration']:.1f} us/iteration")
    if not points:
        raise ValueError(skipped[0]["reason"])
    return {
        "machine": provenance(curves.device),
        "net": curves.net,
        "T": curves.T,
        "K": curves.K,
        "base": dict(curves.base),
        "scaling": points,
        "skipped": skipped,
    }


def point(curves: Curves, axis: str, value: int, asked: str, images: Images) -> dict[str, Any]:
    case = curves.case(axis, value, asked)
    model = case.build(curves.device)
    engine = case.choose(model)
    runner = engine.runner(case.job(model, images))
    order = batch_order(case, 1000, len(images.train_x), seed=2).to(curves.device)
    contestant = Contestant(lambda n: runner.run(order[:n]), curves.device, longest=1000)
    contestant.prepare(curves.effort.chunk_seconds)
    for _ in range(curves.effort.rounds):
        contestant.time_chunk()
    at = {**curves.base, axis: value}
    return {
        "axis": axis,
        **at,
        "engine": engine.name,
        "us_per_iteration": contestant.us,
        "us_per_step": contestant.us / case.steps,
        "spread_us": contestant.spread_us,
        "chunk": contestant.chunk,
    }
