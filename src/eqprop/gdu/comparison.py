"""`compare`: run EP and BPTT on a model, measure the mismatch and explain it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import BPTT, EP
from eqprop.estimators.base import trainable
from eqprop.gdu.doctor import OF_GRADIENT, examine
from eqprop.gdu.free import FreePhase, NeverSettlesError, check_settling, release, settle
from eqprop.gdu.linearised import Linearised, asymmetry, flat, flat_product, saturated, spectral_radius
from eqprop.gdu.lockstep import Comparison, Moment, dissect, pair
from eqprop.gdu.metrics import (
    PAPER,
    Budget,
    Convention,
    Distance,
    Group,
    Metrics,
    groups,
    measure,
    outcome_of,
    parts_of,
    sentence,
)
from eqprop.gdu.patient import Patient, Symptoms
from eqprop.gdu.report import KINDS, Report, Residual, Trace, concentration, follow
from eqprop.gdu.rest import settles
from eqprop.gdu.verdict import Finding, Voice
from eqprop.relax import NotFiniteError, Schedule

STEP_COST = 25
"""Approximate cost of a process step in free steps, for the progress bar."""


@dataclass(frozen=True)
class Options:
    """Options of a comparison.

    drop_unsettled  exclude the samples that have not settled
    tolerance       the residual below which a sample counts as settled; None: 1e-6 in float64, 1e-4 in float32
    convention      of the distances: `PAPER` or `AUTHORS`
    shown           how many elements per group to trace for the figures, on one sample; 0: none
    seed            of the random probes and of the traced elements
    schedule        of the free phase; "alternating" finds a steady state where synchronous steps oscillate.
                    In "sweeps" both phases are compared update by update; in "sweeps-same" only their totals are.
    progress        called periodically with the fraction done
    voice           whose terms the verdict's remedies use: "python" or "command line"
    """

    drop_unsettled: bool = False
    tolerance: float | None = None
    convention: Convention = PAPER
    shown: int = 5
    seed: int = 0
    schedule: Schedule = "synchronous"
    progress: Callable[[float], None] | None = None
    voice: Voice = "python"


def compare(
    model: Dynamics, cost: Cost, x: Tensor, y: Tensor, T: int, K: int, beta: float, options: Options | None = None
) -> Report:
    """Compare Delta_EP(beta, t) with -nabla_BPTT(t), t = 0, ..., K-1, per layer; explain the gap  [eq:thm-main]."""
    options = options or Options()
    began, worked = time.perf_counter(), time.process_time()
    _check(model, x, T, K, beta)
    progress = _Progress(options.progress, T, K)
    ep = EP(T, K, options.schedule, beta=beta)
    patient = Patient(model, cost, x, y, ep, Symptoms(voice=options.voice))
    with _explained(patient):
        free = settle(model, x, T, K, options.tolerance, progress.free, options.schedule)
        cost.check(free.end.state, y)
        check_settling(free, T, options.tolerance)
    batch = _Batch(model, cost, x, y, free, K, beta, options.schedule)
    chosen = _chosen(free, options.drop_unsettled)
    every = groups(model, free.end.state)
    whole, settled = _measure(batch, chosen, every, options.convention, progress)
    sample = int(free.end.settled.int().argmax())
    residual = free.end.residual
    return Report(
        T=T,
        K=K,
        beta=beta,
        dtype=str(free.end.state[0].dtype).removeprefix("torch."),
        samples=int(chosen.sum()),
        steps=free.end.steps,
        schedule=options.schedule,
        convention=options.convention,
        residual=Residual(
            max=float(residual.max()),
            median=float(residual.median()),
            unsettled=int((~free.end.settled).sum()),
            dropped=int((~chosen).sum()),
        ),
        **_by_kind(whole, options.convention),
        settled=None if whole is settled else _by_kind(settled, options.convention),
        budget=_budget(batch, whole, settled, options, patient.at_end(free.end).only(chosen)),
        release=release(batch.steady(), T, options.tolerance, options.schedule),
        concentration=concentration(batch.whole()),
        sample=sample,
        traces=_traces(batch, sample, every, options),
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - worked,
    )


@contextmanager
def _explained(patient: Patient) -> Iterator[None]:
    """Add what the doctor says of a free phase that has no rest."""
    try:
        yield
    except (NeverSettlesError, NotFiniteError) as error:
        if isinstance(found := settles(patient), Finding):
            raise type(error)(f"{error} {found.text(patient.symptoms.voice)}") from error
        raise


@dataclass(frozen=True)
class _Batch(Problem):
    free: FreePhase
    K: int
    beta: float
    schedule: Schedule = "synchronous"

    def case(self, samples: Tensor) -> Comparison:
        """The comparison on a subset of samples, by mask or index."""
        free = self.free.only(samples).end
        x, y = self.x[samples], self.y[samples]
        return Comparison(self.model, self.cost, x, y, free, self.K, self.beta, self.schedule)

    def whole(self) -> Comparison:
        """All samples, including excluded ones."""
        return self.case(torch.ones_like(self.free.end.settled))

    def steady(self) -> Comparison:
        """The settled samples, or all if none has settled."""
        settled = self.free.end.settled
        return self.case(settled if bool(settled.any()) else torch.ones_like(settled))


class _Progress:
    def __init__(self, tell: Callable[[float], None] | None, T: int, K: int) -> None:
        self.tell, self.T, self.total = tell, T, T + STEP_COST * K
        self.steps = 0

    def free(self, done: int) -> None:
        self._tell(done)

    def through(self, moments: Iterator[Moment]) -> Iterator[Moment]:
        for moment in moments:
            yield moment
            self.steps += 1
            self._tell(self.T + STEP_COST * self.steps)

    def _tell(self, done: int) -> None:
        if self.tell is not None:
            self.tell(min(done / self.total, 1.0))


def _check(model: Dynamics, x: Tensor, T: int, K: int, beta: float) -> None:
    EP(T, K, beta=beta)
    BPTT(T, K)
    if not trainable(model):
        name = type(model).__name__
        raise ValueError(f"{name} has no trainable parameter; expected at least one, to compare its updates.")
    if model.sample_dims(x) != 1:
        raise ValueError(
            f"The input x has shape {tuple(x.shape)}, for stacked networks; expected a single network. Compare one at "
            "a time: eqprop.models.unstack(model, r)."
        )


def _by_kind(found: dict[Group, Distance], convention: Convention) -> dict[str, dict[str, Metrics]]:
    return {kind: {g.name: d.metrics(convention) for g, d in found.items() if g.kind == kind} for kind in KINDS}


def _chosen(free: FreePhase, drop_unsettled: bool) -> Tensor:
    settled = free.end.settled
    if not drop_unsettled:
        return torch.ones_like(settled)
    if not bool(settled.any()):
        raise ValueError(
            f"Dropping unsettled samples leaves none of the {settled.numel()} samples (the smallest residual is "
            f"{float(free.end.residual.min()):.1e}). Raise T, or keep unsettled samples."
        )
    return settled


def _measure(
    batch: _Batch, chosen: Tensor, every: tuple[Group, ...], convention: Convention, progress: _Progress
) -> tuple[dict[Group, Distance], dict[Group, Distance]]:
    """The distances of the chosen samples, and those of the settled ones among them with the budget's parts."""
    settled = batch.free.end.settled
    if bool((chosen & ~settled).any()) and bool(settled.any()):
        whole = measure(pair(batch.case(chosen)), every, convention)
        return whole, measure(progress.through(dissect(batch.steady())), every, convention)
    both = measure(progress.through(dissect(batch.steady())), every, convention)
    return both, both


def _budget(
    batch: _Batch, whole: dict[Group, Distance], settled: dict[Group, Distance], options: Options, patient: Patient
) -> Budget:
    steady = batch.steady()
    around = Linearised(batch.model, steady.x, steady.free.state)
    product, rows = flat_product(around), flat(around.s)
    has_primitive = isinstance(batch.model, PrimitiveDynamics)
    neurons, synapses = (
        parts_of(kind, whole, settled, options.convention, has_primitive) for kind in ("neurons", "synapses")
    )
    outcome = outcome_of(whole, settled, options.convention)
    diagnosis = None if outcome == "holds" else examine(patient, OF_GRADIENT)
    return Budget(
        neurons=neurons,
        synapses=synapses,
        asymmetry=asymmetry(product, rows, options.seed),
        spectral_radius=spectral_radius(product, rows, options.seed),
        saturated=saturated(around, options.seed),
        outcome=outcome,
        verdict=sentence(outcome, neurons, synapses, diagnosis, has_primitive),
    )


def _traces(batch: _Batch, sample: int, every: tuple[Group, ...], options: Options) -> dict[str, dict[str, Trace]]:
    if options.shown == 0:
        return {}
    one = torch.tensor([sample], device=batch.x.device)
    found = follow(pair(batch.case(one)), every, options.shown, options.seed)
    return {kind: {g.name: trace for g, trace in found.items() if g.kind == kind} for kind in KINDS}
