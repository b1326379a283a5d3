"""Sweeps over imperfections of a device: the error after training, and how exact the gradient is, at each."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from eqprop.cost import Problem
from eqprop.estimators import EP
from eqprop.files import write_json
from eqprop.messages import shown
from eqprop.physical.machine import Machine
from eqprop.provenance import provenance
from eqprop.relax import Schedule
from eqprop.run.api import begin_or_resume
from eqprop.run.evaluate import load
from eqprop.run.field import EXAMINED, cosines, exact_gradient
from eqprop.run.folder import is_run, read_json
from eqprop.run.own import own_of
from eqprop.run.session import bind, chosen
from eqprop.run.watch import Watch

POINT, DOCUMENT = "point.json", "sweep.json"
NUMBERS = ("state_noise", "read_noise", "mismatch", "drift", "missing", "asymmetry", "weight_limit")
BITS = ("state_bits", "read_bits", "weight_bits")
MOST_POINTS = 400
Axes = Mapping[str, Sequence[float | int | None]]


def values_of(name: str, text: str) -> list[float | int | None]:
    """The values of an axis: "0:0.1:5", five from 0 to 0.1; or "4,6,8"; "none" is a perfect device."""
    expected = "expected FIRST:LAST:COUNT, such as 0:0.1:5, or values such as 4,6,8"
    whole = name in BITS
    try:
        if ":" in text:
            first, last, count = text.split(":")
            low, high, n = float(first), float(last), int(count)
            if n < 2:
                raise ValueError
            found: list[float | None] = [round(low + (high - low) * k / (n - 1), 12) for k in range(n)]
        else:
            found = [None if part.strip() == "none" else float(part) for part in text.split(",")]
        if whole and any(v is not None and v != int(v) for v in found):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is {shown(text)}; {expected}{' (whole numbers)' if whole else ''}.") from None
    if len(set(found)) < len(found):
        raise ValueError(f"{name} is {shown(text)}, which names a value twice; {expected}.")
    return [None if v is None else int(v) if whole else v for v in found]


def points_of(axes: Axes) -> list[dict[str, Any]]:
    """The settings of every point, the last axis running fastest."""
    if not 1 <= len(axes) <= 2:
        raise ValueError(f"The sweep has {len(axes)} axes; expected one or two, such as --noise 0:0.1:5.")
    count = math.prod(len(values) for values in axes.values())
    if count > MOST_POINTS:
        raise ValueError(f"The sweep has {count} points; expected at most {MOST_POINTS}. Give fewer values.")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def folder_of(point: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={'none' if v is None else format(v, 'g')}" for name, v in point.items())


def sweep(
    experiment: str,
    axes: Axes,
    out: str | Path,
    *,
    jobs: int | None = None,
    watch: Callable[[int, int, Mapping[str, Any]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a net on devices that differ in one or two imperfections, with the same weights and mini-batches each.

        eqprop.sweep("P-1h", {"state_noise": [0, 0.05, 0.1], "weight_bits": [4, 6, 8]}, "sweep", samples=2000)

    Returns what it writes to OUT/sweep.json, with the seconds that this call took: per point the test error of each
    trial in percent, and the cosine of EP's gradient on that device, after training, with the exact one of the perfect
    net with the same weights (recurrent backprop at rest, in float64), whole and per parameter. Resumable: points that
    are there are kept.

    experiment  as `eqprop.train` takes it
    axes        values by the name of an imperfection (see `eqprop.physical.Imperfections`); None: a perfect device
    out         each point is a run folder in it
    jobs        points trained at a time, each in its own process; by default one per core
    watch       called with points done, all points, and the last one's record
    options     any setting of `eqprop.Spec` by its flat name, for every point; imperfections are those that all share
    """
    points, out = points_of(axes), Path(out)
    shared = dict(options.pop("imperfections", None) or {})
    options.setdefault("threads", 1)
    work = [(str(experiment), out / folder_of(point), {**shared, **point}, options) for point in points]
    for one in work:
        _spec_of(*one)  # what cannot be is refused before anything is trained
    jobs, began = min(len(points), jobs or _cores()), time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    for name, record in _trained(work, jobs):
        found[name] = record
        if watch is not None:
            watch(len(found), len(points), record)
    spec, _ = _spec_of(*work[0])
    document = {
        "name": spec.name,
        "axes": {name: list(values) for name, values in axes.items()},
        "points": [{"at": point, **found[folder_of(point)]} for point in points],
        "spec": spec.to_dict(),
        "jobs": jobs,
        "seconds": round(time.monotonic() - began, 1),
        "provenance": provenance(),
    }
    write_json(out / DOCUMENT, document)
    return document


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Work = tuple[str, Path, dict[str, Any], dict[str, Any]]


def _trained(work: Sequence[Work], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The record of each point as it is ready."""
    if jobs == 1:
        for one in work:
            yield one[1].name, train_point(*one)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            left: dict[Future[dict[str, Any]], str] = {pool.submit(train_point, *one): one[1].name for one in work}
            while left:
                for future in wait(left, return_when=FIRST_COMPLETED).done:
                    yield left.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _spec_of(experiment: str, folder: Path, imperfections: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The spec of a point, and your own function if there is one."""
    return chosen(experiment, None, {**options, "imperfections": dict(imperfections)})


def train_point(
    experiment: str, folder: Path, imperfections: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Train one point, or continue it; its errors, its gradient's cosines and the CPU time."""
    path = folder / POINT
    if is_run(folder) and path.is_file():
        return dict(read_json(path, "a point of the sweep"))
    began = time.process_time()
    spec, own = _spec_of(experiment, folder, imperfections, options)
    result = begin_or_resume(spec, folder, model=own, watch=Watch())
    name = spec.estimators[0]
    trials = result.summary["estimators"][name]["trials"]
    session = bind(spec, model=own_of(own, spec.model), trains=False)
    first = session.problem(min(EXAMINED, session.images.train_samples))
    cosines = []
    for trial in range(spec.run.trials):
        trained = load(folder, name, trial, model=own)
        problem = Problem(trained.model, trained.cost, first.x, first.y)
        cosines.append(gradient_cosines(problem, session.estimator))
    record = {
        "errors": [None if t["diverged"] else t["test_error"][-1] for t in trials],
        "cosines": cosines,
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    write_json(path, record)
    return record


def gradient_cosines(problem: Problem, ep: Any) -> dict[str, float]:
    """The cosine of the estimate on a machine with the exact gradient of its net, by parameter and of "all" of them.

    Empty where there is no gradient: of spins, or where the net does not settle.
    """
    machine = problem.model
    if not isinstance(machine, Machine) or not machine.model.differentiable or not isinstance(ep, EP):
        return {}
    got = ep.gradient(machine, problem.cost, problem.x, problem.y)[1]
    found = {name: got[p].detach().double() for name, p in machine.named_parameters() if p in got}
    schedule: Schedule = "sweeps" if getattr(machine.model, "bipartite", False) else "synchronous"
    try:
        wanted = exact_gradient(Problem(machine.model, problem.cost, problem.x, problem.y), schedule)
    except ArithmeticError:
        return {}
    names = [name for name in found if name in wanted]
    whole = [torch.cat([of[name].flatten() for name in names]) for of in (found, wanted)]
    return cosines({**found, "all": whole[0]}, {**wanted, "all": whole[1]})
