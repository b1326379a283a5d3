"""Check every engine against the naive twin, then time them in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from benchmarks.cases import METHODS, Case, batch_order, combinations, weights
from benchmarks.check import TOLERANCE, Checker, Verdict
from benchmarks.naive import train_step
from benchmarks.table1 import project, with_evaluation
from benchmarks.timing import Contestant, take_turns
from eqprop import papers
from eqprop.data import Images, mnist, one_hot
from eqprop.engines import Engine, engine_names
from eqprop.engines.base import full_precision
from eqprop.messages import unknown
from eqprop.provenance import provenance
from eqprop.relax import SCHEDULES, Schedule, Stop
from eqprop.run.spec import Spec

STOPS: tuple[Stop, ...] = ("never", "settled")
EPOCH = 3000
"""Iterations per epoch of the paper: 60,000 samples in mini-batches of 20."""
EARLY = 20
"""Longest chunk on initial weights with stop="settled", since timing also trains the weights."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much time to spend on a measurement.

    rounds          timed chunks per contestant          naive_rounds      timed chunks of the naive twin
    chunk_seconds   approximate time per chunk           check_iterations  iterations per start of the check
    trained         iterations before a settled stop is timed on trained weights, limited by trained_seconds
    """

    rounds: int = 7
    naive_rounds: int = 5
    chunk_seconds: float = 0.3
    check_iterations: int = 2
    trained: int = 3000
    trained_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("rounds", "naive_rounds", "check_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more.")
        if not 0.0 < self.chunk_seconds < float("inf"):
            raise ValueError(f"chunk_seconds is {self.chunk_seconds}; expected a number of seconds above 0.")
        if self.naive_rounds > self.rounds:
            raise ValueError(f"The naive twin cannot be timed {self.naive_rounds} times in {self.rounds} rounds.")
        if self.trained < 0:
            raise ValueError(f"trained is {self.trained}; expected a number of iterations, or 0 to skip it.")


@dataclass(frozen=True)
class Plan:
    """What to measure. All settings are validated here, before anything is timed."""

    experiments: tuple[Spec, ...]
    methods: tuple[str, ...] = METHODS
    engines: tuple[str, ...] = ("auto",)
    schedules: tuple[Schedule, ...] = ("synchronous",)
    stops: tuple[Stop, ...] = ("never",)
    trials: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    table1: bool = False
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        for what, given, known in (
            ("method", self.methods, METHODS),
            ("engine", self.engines, engine_names()),
            ("schedule", self.schedules, SCHEDULES),
            ("stop", self.stops, STOPS),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(unknown(what, name, known))
        check_device(self.device)

    def cases(self, experiment: Spec, method: str) -> list[Case]:
        return combinations([experiment], [method], self.engines, self.schedules, self.stops, self.trials)


def experiments_named(names: Sequence[str], preset: str = "paper") -> tuple[Spec, ...]:
    """The experiments with these names; without names, the paper's six."""
    experiments = tuple(papers.find(name, preset) for name in (names or tuple(papers.of_paper())))
    for experiment in experiments:
        if experiment.phases.start != "zero" or experiment.estimator.kind != "ep":
            raise ValueError(
                f"{experiment.name} begins its free phases {experiment.phases.start} and nudges "
                f"{experiment.estimator.kind}; "
                "the naive twin begins at zero and nudges one-sided. "
                f"Choose among {', '.join(papers.of_paper())}."
            )
    return experiments


def check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; expected 'cpu' or 'cuda'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"There is no CUDA device: torch {torch.__version__} finds none. Use --device cpu, or a machine with one."
        )


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Skipped:
    """A requested case that was not measured, and why."""

    case: Case
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {**describe(self.case), "engine": self.case.engine, "reason": self.reason}


@dataclass
class Entry:
    """A case being measured."""

    case: Case
    engine: Engine
    verdict: Verdict
    contestant: Contestant
    trained: bool
    iterations_before: int = 0


def describe(case: Case) -> dict[str, Any]:
    return {
        "name": case.experiment.name,
        "preset": case.experiment.preset,
        "method": case.method,
        "schedule": case.experiment.phases.schedule,
        "stop": case.experiment.phases.stop,
        "trials": case.trials,
    }


def measure(plan: Plan, say: Say = lambda line: None) -> dict[str, Any]:
    """Time every case of the plan; {"machine", "tolerance", "rows", "skipped"} and perhaps "table1", ready for JSON."""
    served, skipped = choose_engines(plan)
    if not served:
        raise ValueError(skipped[0].reason)
    images = mnist(plan.device)
    checker = Checker(images, plan.effort.check_iterations)
    rows: list[dict[str, Any]] = []
    interrupted = False
    with full_precision():
        try:
            for experiment, method in product(plan.experiments, plan.methods):
                group = [(c, e) for c, e in served if c.experiment == bare(c, experiment) and c.method == method]
                found, failed = Bout(plan, images, checker, say).run(group)
                rows += found
                skipped += failed
            if plan.table1:
                say("Evaluating the test set")
                with_evaluation(rows, images, {engine.name: engine for _, engine in served})
        except KeyboardInterrupt:
            # Finished rows took minutes: return them, marked as interrupted.
            interrupted = True
    return {
        "machine": provenance(plan.device),
        "tolerance": TOLERANCE,
        "interrupted": interrupted,
        "rows": rows,
        "skipped": [s.to_dict() for s in skipped],
        **({"table1": project(rows)} if plan.table1 else {}),
    }


def bare(case: Case, experiment: Spec) -> Spec:
    """The experiment as the case runs it."""
    return experiment.override(schedule=case.experiment.phases.schedule, stop=case.experiment.phases.stop)


def choose_engines(plan: Plan) -> tuple[list[tuple[Case, Engine]], list[Skipped]]:
    """The engine of every case, without duplicates, and the cases that no engine supports."""
    served: list[tuple[Case, Engine]] = []
    skipped: list[Skipped] = []
    for experiment in plan.experiments:
        for method in plan.methods:
            seen = set()
            for case in plan.cases(experiment, method):
                try:
                    engine = _chosen(case, plan.device)
                except ValueError as error:
                    skipped.append(Skipped(case, str(error)))
                    continue
                key = (engine.name, case.experiment.phases.schedule, case.experiment.phases.stop)
                if key not in seen:
                    seen.add(key)
                    served.append((case, engine))
    return served, skipped


def _chosen(case: Case, device: torch.device) -> Engine:
    model = case.build(device)
    if case.experiment.phases.schedule == "alternating" and not model.bipartite:
        raise ValueError(
            f"{case.experiment.name} cannot alternate: its layers do not split into two groups that are connected only "
            "to each other. Use the synchronous schedule."
        )
    return case.choose(model)


@dataclass
class Bout:
    """One experiment and estimator: check its engines, then time them and the naive twin in turns."""

    plan: Plan
    images: Images
    checker: Checker
    say: Say

    def run(self, group: Sequence[tuple[Case, Engine]]) -> tuple[list[dict[str, Any]], list[Skipped]]:
        """The rows of the group's cases, and the cases that failed."""
        entries: list[Entry] = []
        failed: list[Skipped] = []
        for case, engine in group:
            try:
                entries += self._enter(case, engine)
            except RuntimeError as error:
                self.say(f"{case.experiment.name} {case.method}, {engine.name}: failed: {error}")
                failed.append(Skipped(replace(case, engine=engine.name), f"failed: {error}"))
        if not entries:
            return [], failed
        effort = self.plan.effort
        naive = self._naive(entries[0].case)
        naive.prepare(effort.chunk_seconds)
        for entry in entries:
            entry.iterations_before = entry.contestant.done
        take_turns([e.contestant for e in entries], effort.rounds, naive, effort.naive_rounds)
        rows = [row(entry, naive) for entry in entries]
        for one in rows:
            self.say(line(one))
        return rows, failed

    def _enter(self, case: Case, engine: Engine) -> list[Entry]:
        """Check a case and warm it up; with a settled stop, also on trained weights."""
        self.say(
            f"{case.experiment.name} {case.method}: checking {engine.name} "
            f"({case.experiment.phases.schedule}) on {case.trials}"
        )
        verdict = self.checker.check(case, engine)
        settled = case.experiment.phases.stop == "settled"
        entries = [Entry(case, engine, verdict, self._contestant(case, engine, EARLY if settled else EPOCH), False)]
        if settled and self.plan.effort.trained:
            late = Entry(case, engine, verdict, self._contestant(case, engine, EPOCH), True)
            self._train(late.contestant, case)
            entries.append(late)
        return entries

    def _contestant(self, case: Case, engine: Engine, longest: int) -> Contestant:
        start = time.perf_counter()
        runner = engine.runner(case.job(case.build(self.plan.device), self.images))
        built = time.perf_counter() - start
        order = batch_order(case, EPOCH, len(self.images.train_x), seed=2).to(self.plan.device)
        contestant = Contestant(lambda n: runner.run(order[:n]), self.plan.device, longest)
        contestant.prepare(self.plan.effort.chunk_seconds)
        contestant.setup += built
        return contestant

    def _train(self, contestant: Contestant, case: Case) -> None:
        """Train until `trained` iterations are done, or as many as `trained_seconds` allows."""
        effort = self.plan.effort
        per_iteration = contestant.seconds(contestant.chunk) / contestant.chunk
        more = min(effort.trained - contestant.done, int(effort.trained_seconds / per_iteration))
        self.say(f"{case.experiment.name} {case.method}: training {max(0, more)} iterations for the settled stop")
        while more > 0:
            contestant.seconds(min(EPOCH, more))
            more -= EPOCH

    def _naive(self, case: Case) -> Contestant:
        """The naive twin: one network, synchronous, every step."""
        alone = replace(case, trials=1).with_schedule("synchronous", "never")
        theta = weights(alone.build(self.plan.device), torch.float32)
        shape = alone.build(self.plan.device).input_shape
        assert shape is not None, "the experiments' networks say what they take"
        order = batch_order(alone, EPOCH, len(self.images.train_x), seed=2).to(self.plan.device)
        targets = one_hot(self.images.train_y, self.images.classes)
        recipe = alone.recipe()

        def run(n: int) -> None:
            for rows in order[:n]:
                x = self.images.train_x[rows].view(len(rows), *shape)
                train_step(recipe, theta, x, targets[rows])

        return Contestant(run, self.plan.device)


def row(entry: Entry, naive: Contestant) -> dict[str, Any]:
    """A row of the result. `speedup` is trials x naive / ours, None for an engine that failed the check."""
    case, verdict, ours = entry.case, entry.verdict, entry.contestant
    right = verdict.reason is None
    return {
        **describe(case),
        "engine": entry.engine.name,
        "us_per_iteration": ours.us,
        "us_per_step": ours.us / case.steps,
        "naive_us_per_iteration": naive.us,
        "speedup": case.trials * naive.us / ours.us if right else None,
        "max_error": finite(verdict.max_error),
        "naive_max_error": finite(verdict.naive_max_error),
        "worst_error": finite(verdict.worst_update_error),
        "naive_worst_error": finite(verdict.naive_worst_update_error),
        "state_error": finite(verdict.state_error),
        "naive_state_error": finite(verdict.naive_state_error),
        "refused": verdict.reason,
        "spread_us": ours.spread_us,
        "naive_spread_us": naive.spread_us,
        "weights": "trained" if entry.trained else "initial",
        "iterations_before": entry.iterations_before,
        "chunk": ours.chunk,
        "rounds": len(ours.times),
        "setup_s": ours.setup,
        "T": case.experiment.phases.T,
        "K": case.experiment.phases.K,
        "batch": case.experiment.optimizer.batch,
    }


def finite(value: float) -> float | None:
    """None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def line(one: dict[str, Any]) -> str:
    """A row as one line of text."""
    where = f"{one['name']} {one['method']} {one['engine']} {one['schedule']} {one['stop']} ({one['weights']})"
    took = f"{one['us_per_iteration']:.1f} us/iteration, {one['us_per_step']:.2f} us/step"
    if one["speedup"] is None:
        return f"{where}: {took}; no ratio: {one['refused']}"
    return f"{where}: {took}, {one['speedup']:.1f} x naive ({one['naive_us_per_iteration']:.0f} us)"
