"""Any net against its naive twin: autodiff of Phi at every step, as the public codes do it, TF32 allowed on a GPU.

    python -m benchmarks A B P-conv@128 mlp my_model.py:build --engine eager,compiled --precision float32

A and B are the convolutional nets of Laborieux et al. 2021 and Scellier et al. 2023 on images of CIFAR-10's size, mlp
is a user's Phi (3072-1024-1024-10, tanh, one skip); NAME-small has an eighth of the channels or neurons. NAME@BATCH
sets the mini-batch. Data is random: it does not change how long an iteration takes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import product_rate
from benchmarks.run import Effort
from benchmarks.timing import Contestant, take_turns
from eqprop import papers
from eqprop.cost import Cost, Problem, SquaredError
from eqprop.data import one_hot
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import Job, Task, choose
from eqprop.engines.base import Precision, full_precision
from eqprop.engines.eager import Agreement, agreements, update_in
from eqprop.estimators import EP
from eqprop.functional import from_primitive
from eqprop.messages import unknown
from eqprop.models import Conv, Dense, Network
from eqprop.provenance import provenance
from eqprop.relax import SWEEPS
from eqprop.run.own import is_own, load_own
from eqprop.run.session import build_model, make_estimator
from eqprop.state import State

LOWEST = {"float32": 0.999, "tf32": 0.95, "float16": 0.95, "bfloat16": 0.95}
"""Cosine of a whole update with the twin's in float64 below which an engine gets no ratio, unless the twin's own
float32 is as far off: a near-tie in a pooling arg-max may take another branch."""


class NaiveTwin(PrimitiveDynamics):
    """The same net, with every step and update by autodiff of its Phi."""

    def __init__(self, model: PrimitiveDynamics) -> None:
        super().__init__()
        self.model = model
        self.nudge_scale, self.nudge_site = model.nudge_scale, model.nudge_site
        self.input_shape, self.bipartite = model.input_shape, model.bipartite

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return self.model.primitive(x, s)

    def init_state(self, x: Tensor) -> State:
        return self.model.init_state(x)

    def sweep(self, layers: int) -> tuple[tuple[int, ...], ...]:
        return self.model.sweep(layers)

    @property
    def squashes(self) -> bool:
        return self.model.squashes

    @property
    def output_bounds(self) -> tuple[float, float] | None:
        return self.model.output_bounds

    def squash(self, s: State) -> State:
        return self.model.squash(s)

    def project(self, s: State) -> State:
        return self.model.project(s)


@dataclass(frozen=True)
class Subject:
    """A net to time: how to build it, how it is trained, and its mini-batch."""

    name: str
    build: Callable[[], PrimitiveDynamics]
    estimator: EP
    batch: int = 128
    cost: Cost = field(default_factory=SquaredError)

    def problem(self, device: torch.device) -> Problem:
        model = self.build().float().to(device)
        assert model.input_shape is not None, "every subject says what it takes"
        source = torch.Generator().manual_seed(0)
        # As bright as images that are normalised to a third of their deviation.
        x = torch.randn(self.batch, *model.input_shape, generator=source) / 3.0
        classes = model.init_state(x[:1])[0].shape[-1]
        y = one_hot(torch.randint(classes, (self.batch,), generator=source), classes)
        return Problem(model, copy.deepcopy(self.cost).float().to(device), x.to(device), y.to(device))


def _half_clamp(v: Tensor) -> Tensor:
    return (0.5 * v).clamp(0.0, 1.0)


def _images(divisor: int, paddings: Sequence[int], gains: Sequence[float], **options: Any) -> Network:
    """Convolutions 128-256-512-512 with max-pooling on (3, 32, 32), and a dense output; a gain per connection."""
    maps, side, layers, joints = [128, 256, 512, 512], 32, {}, []
    for k, (channels, padding) in enumerate(zip(maps, paddings, strict=True), start=1):
        side = (side + 2 * padding - 2) // 2
        layers[f"h{k}"] = (channels // divisor, side, side)
        joints.append(
            Conv("x" if k == 1 else f"h{k - 1}", f"h{k}", kernel=3, padding=padding, pool=2, gain=gains[k - 1])
        )
    order: dict[str, Any] = {"out": 10, **dict(reversed(layers.items()))}
    return Network((3, 32, 32), order, [*joints, Dense("h4", "out", gain=gains[4])], init="default", seed=0, **options)


def net_a(divisor: int) -> Network:
    return _images(divisor, (1, 1, 1, 0), (1.0,) * 5, activation=_half_clamp, nudge_site="inside")


def net_b(divisor: int) -> Network:
    activation = {"out": "identity", "*": "hard-sigmoid"}
    gains = (0.4, 0.7, 0.6, 0.3, 0.4)
    return _images(divisor, (1, 1, 1, 1), gains, activation=activation, nudge_site="implicit", bias_gain=0.5)


def _mlp_phi(x: Tensor, s: State, theta: Any) -> Tensor:
    """Ten lines of a user: three layers, and one skip from the second to the output."""
    seen = (s[0] * (s[1] @ theta["W01"].T + s[2] @ theta["W02"].T)).sum(-1)
    seen = seen + (s[1] * (s[2] @ theta["W12"].T)).sum(-1)
    return seen + (s[2] * (x @ theta["W2x"].T)).sum(-1)


def mlp(divisor: int) -> PrimitiveDynamics:
    torch.manual_seed(0)
    h, inputs = 1024 // divisor, 3072 // divisor
    shapes = {"W01": (10, h), "W02": (10, h), "W12": (h, h), "W2x": (h, inputs)}
    theta = {name: 0.5 * torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    return from_primitive(_mlp_phi, theta, (10, h, h), squash=torch.tanh, input_shape=(inputs,))


_BUILT_IN: dict[str, tuple[Callable[[int], PrimitiveDynamics], EP]] = {
    "A": (net_a, EP(T=250, K=30, beta=0.5, nudging="symmetric")),
    "A-sweeps": (net_a, EP(T=250, K=30, beta=0.5, nudging="symmetric", schedule="sweeps")),
    "B": (net_b, EP(T=120, K=40, beta=0.1, nudging="symmetric", schedule="sweeps")),
    "mlp": (mlp, EP(T=50, K=20, beta=0.5, nudging="symmetric")),
}
SMALL = 8


def known_names() -> list[str]:
    return [*_BUILT_IN, *(f"{name}-small" for name in _BUILT_IN)]


def is_subject(name: str) -> bool:
    """Whether a name is one of these nets, sets its mini-batch, or is a user's function."""
    bare, at, _ = name.partition("@")
    return bool(at) or bare in known_names() or is_own(bare)


def subject(name: str) -> Subject:
    """The net of that name. Raises ValueError."""
    bare, at, batch = name.partition("@")
    if at and not batch.isdecimal():
        raise ValueError(f"{name!r} has a mini-batch of {batch!r}; expected NAME@NUMBER, such as B@128.")
    found = _named(bare)
    return replace(found, name=name, batch=int(batch)) if at else found


def _named(name: str) -> Subject:
    if name in known_names():
        build, estimator = _BUILT_IN[name.removesuffix("-small")]
        divisor = SMALL if name.endswith("-small") else 1
        return Subject(name, lambda: build(divisor), estimator)
    if name in papers.of_paper():
        experiment = papers.find(name, "paper")
        made = make_estimator(experiment, "ep")
        assert isinstance(made, EP), "the paper's experiments"
        return Subject(name, lambda: _primitive(build_model(experiment, 0), name), made, experiment.optimizer.batch)
    if is_own(name):
        own = load_own(name)
        cost = own.build(0).cost or SquaredError()
        return Subject(name, lambda: _primitive(own.build(0).model, name), _BUILT_IN["mlp"][1], cost=cost)
    raise ValueError(unknown("net", name, [*known_names(), *papers.of_paper()]))


def _primitive(model: Any, name: str) -> PrimitiveDynamics:
    if not isinstance(model, PrimitiveDynamics) or model.input_shape is None:
        raise ValueError(f"{name} has no Phi to differentiate, or no input_shape; expected both. Build it with them.")
    return model


class Timed(Contestant):
    """A contestant that also counts the processor's time, which other work on the machine hardly changes."""

    def __init__(self, run: Callable[[int], None], device: torch.device) -> None:
        super().__init__(self._counted, device)
        self.inner, self.spent, self.counted = run, 0.0, 0

    def _counted(self, n: int) -> None:
        before = time.process_time()
        self.inner(n)
        self.spent += time.process_time() - before
        self.counted += n

    @property
    def cpu_us(self) -> float:
        """Microseconds per iteration, all threads together; on a GPU only the host's part."""
        return 1e6 * self.spent / self.counted


def measure_nets(
    names: Sequence[str],
    engines: Sequence[str],
    precision: Precision,
    where: tuple[torch.device, Effort],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """{"machine", "tolerance", "rows", "skipped"}, ready for JSON: every net by every engine and its twin, in turns."""
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for one in [subject(name) for name in names]:
        found, refused = _measure(one, engines, precision, *where)
        for row in found:
            say(as_line(row))
        rows += found
        skipped += refused
    peak = product_rate(where[0], _PRODUCTS.get(precision, torch.float32), PEAK_SIDE[where[0].type])
    for row in rows:
        done = row["operations"]
        row["share_of_peak"] = None if done is None else 1e6 * done / row["us_per_iteration"] / peak
    found = {"machine": provenance(where[0]), "tolerance": _tolerance(precision), "peak_per_s": peak}
    return {**found, "rows": rows, "skipped": skipped}


_PRODUCTS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PEAK_SIDE = {"cpu": 1024, "cuda": 8192}
"""The side of the matrices whose product sets the peak."""


def operations(one: Subject, model: PrimitiveDynamics) -> int | None:
    """Multiplications and additions of the phases of an iteration; None if the model does not count its own.

    Those of the update, and of the input, which is seen once per phase, are left out.
    """
    if type(model).operations is Dynamics.operations:
        return None
    ep = one.estimator
    layers = len(model.init_state(torch.zeros(1, *(model.input_shape or ()))))
    groups = len(model.sweep(layers)) if ep.schedule in SWEEPS else 1
    updates = ep.T + ep.K * (2 if ep.nudging == "symmetric" else 1)
    return one.batch * model.operations() * updates // groups


def _tolerance(precision: Precision) -> str:
    return (
        f"The cosine of the whole update with the naive twin's in float64 must be {LOWEST[precision]} or more in "
        f"{precision}, or that of the twin in float32."
    )


def _measure(
    one: Subject, engines: Sequence[str], precision: Precision, device: torch.device, effort: Effort
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    exact, naive32 = _twin_updates(one, device)
    entries: list[tuple[dict[str, Any], Timed]] = []
    skipped = []
    for name in engines:
        try:
            entries.append(_contestant(one, name, precision, device, exact))
        except ValueError as error:
            skipped.append({"name": one.name, "method": "ep", "engine": name, "reason": str(error)})
    twin = _twin(one, device)
    twin.prepare(effort.chunk_seconds)
    for _, contestant in entries:
        contestant.prepare(effort.chunk_seconds)
    take_turns([c for _, c in entries], effort.rounds, twin, effort.naive_rounds)
    return [_row(row, contestant, twin, naive32.cosine) for row, contestant in entries], skipped


def _twin_updates(one: Subject, device: torch.device) -> tuple[dict[str, Tensor], Agreement]:
    """The twin's update in float64, and how far its float32 agrees with it."""
    problem = one.problem(device)
    found = {}
    for dtype in (torch.float64, torch.float32):
        twin = NaiveTwin(copy.deepcopy(problem.model).to(dtype))  # type: ignore[arg-type]
        cost = copy.deepcopy(problem.cost).to(dtype)
        grads = update_in(Problem(twin, cost, problem.x.to(dtype), problem.y.to(dtype)), one.estimator, "float32")
        found[dtype] = {name.removeprefix("model."): g for name, g in grads.items()}
    return found[torch.float64], agreements(found[torch.float32], found[torch.float64])[""]


def _contestant(
    one: Subject, name: str, precision: Precision, device: torch.device, exact: dict[str, Tensor]
) -> tuple[dict[str, Any], Timed]:
    problem = one.problem(device)
    model = problem.model
    optimizer = torch.optim.SGD([*model.parameters(), *problem.cost.parameters()], lr=1.0)
    task = Task(model, problem.cost, one.estimator, optimizer, precision=precision)
    engine = choose(name, task)
    job = Job(model, problem.cost, one.estimator, optimizer, problem.x, problem.y, problem.y.argmax(-1))
    runner = engine.runner(job)
    order = torch.arange(one.batch, device=device).view(1, -1)
    # With a rate of 1, an iteration from these weights moves them by minus the update.
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    clock = time.perf_counter()
    runner.run(order)
    if device.type == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - clock
    update = {key: before[key] - p.detach() for key, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    runner.take_rates()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(before[key])
    row = {
        "name": one.name,
        "method": f"ep-{one.estimator.nudging}".removesuffix("-one-sided"),
        "schedule": one.estimator.schedule,
        "precision": precision,
        "trials": 1,
        "batch": one.batch,
        "engine": engine.name,
        "T": one.estimator.T,
        "K": one.estimator.K,
        "cosine": agreements(update, exact)[""].cosine,
        "first_iteration_s": first,
        "operations": operations(one, model),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return row, Timed(lambda n: runner.run(order.expand(n, -1)), device)


def _twin(one: Subject, device: torch.device) -> Timed:
    problem = one.problem(device)
    assert isinstance(problem.model, PrimitiveDynamics)
    model, estimator = NaiveTwin(problem.model), replace(one.estimator, checked=False)
    optimizer = torch.optim.SGD([*model.parameters(), *problem.cost.parameters()], lr=1e-4)

    def run(n: int) -> None:
        with full_precision(tf32=True):
            for _ in range(n):
                optimizer.zero_grad()
                estimator.backward(model, problem.cost, problem.x, problem.y)
                optimizer.step()

    return Timed(run, device)


def _row(row: dict[str, Any], ours: Timed, twin: Timed, naive_cosine: float) -> dict[str, Any]:
    lowest = min(LOWEST[row["precision"]], naive_cosine)
    refused = None if row["cosine"] >= lowest else f"its update has a cosine of {row['cosine']:.4f} with float64's"
    return {
        **row,
        "us_per_iteration": ours.us,
        "naive_us_per_iteration": twin.us,
        "speedup": twin.us / ours.us if refused is None else None,
        "naive_cosine": naive_cosine,
        "refused": refused,
        "cpu_us_per_iteration": ours.cpu_us,
        "naive_cpu_us_per_iteration": twin.cpu_us,
        "spread_us": ours.spread_us,
        "naive_spread_us": twin.spread_us,
        "rounds": len(ours.times),
        "threads": torch.get_num_threads(),
    }


def as_line(row: dict[str, Any]) -> str:
    """A row as one line of text."""
    ratio = f"no ratio: {row['refused']}" if row["speedup"] is None else f"{row['speedup']:.2f} x naive"
    what = f"{row['name']} {row['method']} {row['engine']} {row['precision']}, batch {row['batch']}"
    return f"{what}: {row['us_per_iteration']:.0f} us/iteration, {ratio} (twin {row['naive_us_per_iteration']:.0f} us)"


def cells(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The rows of a measurement as a table, with its headings; what was refused has no ratio."""
    headings = ["net", "engine", "precision", "batch", "T, K", "ms per iteration", "naive twin", "ratio"]
    lines = []
    for row in document["rows"]:
        ratio = "–" if row["speedup"] is None else f"{row['speedup']:.2f}"
        kinds = [f"{whose}{unit}_per_iteration" for unit in ("us", "cpu_us") for whose in ("", "naive_")]
        ms = [f"{1e-3 * row[kind]:,.0f}" for kind in kinds]
        cpu_ratio = f"{row['naive_cpu_us_per_iteration'] / row['cpu_us_per_iteration']:.2f}"
        settings = (row["precision"], str(row["batch"]), f"{row['T']}, {row['K']}")
        peak = row.get("share_of_peak")
        share = "–" if peak is None else f"{100 * peak:.0f} %"
        measured = (*ms[:2], ratio, *ms[2:], cpu_ratio, share, f"{row['cosine']:.6f}")
        lines.append([row["name"], f"`{row['engine']}`", *settings, *measured])
    return [*headings, "CPU ms", "naive twin", "ratio", "of peak", "cosine"], lines
