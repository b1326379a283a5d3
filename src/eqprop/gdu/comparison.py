"""`compare`: run EP and BPTT on a model, measure the mismatch, explain it, and return all of it as a `Report`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Nudge, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import BPTT, EP
from eqprop.estimators.base import trainable
from eqprop.gdu.doctor import OF_GRADIENT, examine
from eqprop.gdu.lockstep import (
    Comparison,
    Linearised,
    Moment,
    asymmetry,
    dissect,
    flat,
    flat_product,
    pair,
    saturated,
    spectral_radius,
)
from eqprop.gdu.metrics import (
    PAPER,
    Budget,
    Convention,
    Distance,
    Group,
    Metrics,
    Noise,
    batch_mean,
    groups,
    measure,
    noise,
    outcome_of,
    parts_of,
    sentence,
)
from eqprop.gdu.patient import Patient, Symptoms
from eqprop.gdu.settling import FreePhase, NeverSettlesError, Release, check_settling, release, settle, settles
from eqprop.gdu.trial import tried
from eqprop.gdu.verdict import Finding, Voice
from eqprop.relax import SWEEPS, NotFiniteError, Schedule, in_sweeps, relax

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


@in_own_precision
def compare(
    model: Dynamics, cost: Cost, x: Tensor, y: Tensor, T: int, K: int, beta: float, options: Options | None = None
) -> Report:
    """Compare Delta_EP(beta, t) with -nabla_BPTT(t), t = 0, ..., K-1, per layer; explain the gap  [eq:thm-main]."""
    options = options or Options()
    began, worked = time.perf_counter(), time.process_time()
    _check(model, x, T, K, beta)
    progress = _Progress(options.progress, T, K)
    ep = EP(T, K, beta, schedule=options.schedule)
    patient = Patient(model, cost, x, y, ep, Symptoms(voice=options.voice))
    with _explained(patient):
        free = settle(model, x, T, K, options.tolerance, progress.free, options.schedule)
        cost.check(free.end.state, y)
        check_settling(free, T, options.tolerance)
    batch = _Batch(model, cost, x, y, free, K, beta, options.schedule)
    chosen = _chosen(free, options.drop_unsettled)
    every = groups(model, free.end.state)
    heard = noise(batch, free.end.state, beta)
    whole, settled = _measure(batch, chosen, every, options.convention, progress, heard)
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
        groups=len(model.sweep(len(free.end.state))) if options.schedule in SWEEPS else None,
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
            raise type(error)(f"{error} {tried(patient, found).text(patient.symptoms.voice)}") from error
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
    batch: _Batch,
    chosen: Tensor,
    every: tuple[Group, ...],
    convention: Convention,
    progress: _Progress,
    heard: Noise,
) -> tuple[dict[Group, Distance], dict[Group, Distance]]:
    """The distances of the chosen samples, and those of the settled ones among them with the budget's parts."""
    settled = batch.free.end.settled
    if bool((chosen & ~settled).any()) and bool(settled.any()):
        whole = measure(pair(batch.case(chosen)), every, convention, heard)
        return whole, measure(progress.through(dissect(batch.steady())), every, convention, heard)
    both = measure(progress.through(dissect(batch.steady())), every, convention, heard)
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


CANDIDATES = 40
"""Elements traced for each one shown, since elements without a signal are not shown."""


@dataclass(frozen=True)
class Trace:
    """Some elements of a group over t = 0, ..., K-1, and the root mean square over the whole group at each t.

    elements    their positions in the layer or the parameter
    ep, bptt    (elements, K) EP's updates and minus BPTT's gradients
    rms_ep, rms_bptt    (K,)
    """

    elements: list[tuple[int, ...]]
    ep: list[list[float]]
    bptt: list[list[float]]
    rms_ep: list[float]
    rms_bptt: list[float]


def follow(moments: Iterable[Moment], every: tuple[Group, ...], shown: int, seed: int) -> dict[Group, Trace]:
    """Trace randomly drawn elements of a single sample, omitting those without a signal."""
    source = torch.Generator().manual_seed(seed)
    chosen: dict[Group, Tensor] = {}
    kept: dict[Group, tuple[list[Tensor], list[Tensor]]] = {group: ([], []) for group in every}
    sizes: dict[Group, tuple[int, ...]] = {}
    for moment in moments:
        for group in every:
            values = [batch_mean(step, group) for step in (moment.ep, moment.bptt)]
            if group not in chosen:
                count = values[0].numel()
                sizes[group] = tuple(values[0].shape)
                chosen[group] = torch.randperm(count, generator=source)[: shown * CANDIDATES].to(values[0].device)
            for rows, value in zip(kept[group], values, strict=True):
                flat = value.flatten()
                rows.append(torch.cat([flat[chosen[group]], flat.square().mean().sqrt().view(1)]).double().cpu())
    return {
        group: _trace(chosen[group].cpu(), sizes[group], torch.stack(ep), torch.stack(bptt), shown)
        for group, (ep, bptt) in kept.items()
    }


def _trace(chosen: Tensor, size: tuple[int, ...], ep: Tensor, bptt: Tensor, shown: int) -> Trace:
    """ep, bptt: (K, candidates + 1), with the root mean square last."""
    alive = ((ep != 0) | (bptt != 0)).any(0)[:-1]
    order = torch.cat([alive.nonzero().flatten(), (~alive).nonzero().flatten()])[:shown]
    positions = [tuple(int(i) for i in torch.unravel_index(chosen[k], size)) for k in order]
    return Trace(
        positions, ep[:, order].T.tolist(), bptt[:, order].T.tolist(), ep[:, -1].tolist(), bptt[:, -1].tolist()
    )


FEW = 0.01
"""The fraction of samples counted as few; at least one sample."""


@dataclass(frozen=True)
class Concentration:
    """Fractions of EP's squared updates, summed over samples and parameters.

    unsettled   from samples that have not settled
    few         from the samples with the largest updates, one in a hundred and at least one
    counted     the number of those few samples
    """

    unsettled: float
    few: float
    counted: int

    def __str__(self) -> str:
        last = f"{self.counted} samples contribute" if self.counted > 1 else "sample contributes"
        few = f"the largest {last} {100 * self.few:.0f} %"
        if self.unsettled == 0.0:
            return f"Of the squared updates, {few}."
        return f"Of the squared updates, unsettled samples contribute {100 * self.unsettled:.0f} % and {few}."


def concentration(case: Comparison) -> Concentration | None:
    """None if nothing is updated, or without a primitive, since the updates then do not telescope  [eq:ep-grad]."""
    if not isinstance(case.model, PrimitiveDynamics):
        return None
    squares = squared_updates(case.model, case)
    if not bool(squares.any()):
        return None
    parts, counted = squares / squares.sum(), math.ceil(FEW * len(squares))
    return Concentration(float(parts[~case.free.settled].sum()), float(parts.topk(counted).values.sum()), counted)


def squared_updates(model: PrimitiveDynamics, case: Comparison) -> Tensor:
    """|dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_*)|^2 per sample, over all that are trained, (B,)."""
    x, start = case.x, case.free.state
    phase = EP(0, case.K, case.beta, schedule=case.schedule).nudged_phase()
    end = relax(model, x, phase, start, Nudge(case.cost, case.y, case.beta)).state
    learned, found = trainable(model), []
    for n in range(len(x)):
        one = slice(n, n + 1)
        late, early = (tuple(layer[one] for layer in s) for s in (end, start))
        moved = [g for name, g in model.contrast(x[one], late, early).items() if name in learned]
        found.append(torch.stack([g.detach().double().square().sum() for g in moved]).sum())
    return torch.stack(found)


KINDS = ("neurons", "synapses", "biases")


@dataclass(frozen=True)
class Residual:
    """|F(x, s) - s| at the end of the free phase over ALL samples, and how many had not settled."""

    max: float
    median: float
    unsettled: int
    dropped: int


def phases(T: int, K: int, schedule: str, groups: int | None) -> str:
    """`T = 60 (30 sweeps), K = 20 (10 sweeps)`."""
    turns = " alternating" if schedule == "alternating" else in_sweeps(T, groups)
    compared = " in the same order, of which totals are compared" if schedule == "sweeps-same" else ""
    return f"T = {T}{turns}, K = {K}{in_sweeps(K, groups)}{compared}"


@dataclass(frozen=True)
class Report:
    """The result of `compare`. The command line writes `to_dict` as JSON.

    samples     the number compared
    steps       the free steps run: T, or fewer if nothing moved any more
    schedule    of the free phase
    groups      how many updates make a sweep; None where all layers move at once
    cpu_seconds of this process over all threads: more reliable than wall time on a busy machine
    neurons, synapses, biases   `Metrics` by name
    settled     the same for the settled samples only, by kind and name; None unless only some had settled
    release     whether the samples return after the nudge
    concentration   how concentrated the updates are across samples; None without a primitive or without updates
    sample      the sample whose processes are in `traces`, by kind and name
    """

    T: int
    K: int
    beta: float
    dtype: str
    samples: int
    steps: int
    schedule: str
    groups: int | None
    seconds: float
    cpu_seconds: float
    convention: Convention
    residual: Residual
    neurons: dict[str, Metrics]
    synapses: dict[str, Metrics]
    biases: dict[str, Metrics]
    settled: dict[str, dict[str, Metrics]] | None
    budget: Budget
    release: Release
    concentration: Concentration | None
    sample: int
    traces: dict[str, dict[str, Trace]]

    @property
    def verdict(self) -> str:
        return self.budget.verdict

    def __str__(self) -> str:
        """The metrics per group, the parts of the budget and the verdict, as text."""
        r = self.residual
        steps = phases(self.T, self.K, self.schedule, self.groups)
        lines = [
            f"{steps}, beta = {self.beta:g}, {self.samples} samples, {self.dtype}",
            f"residual: max {r.max:.1e}, median {r.median:.1e}, {r.unsettled} not settled, {r.dropped} left out",
            f"{'group':>10} {'RMSE':>8} {'cumul.':>8} {'sign':>6} {'cosine':>7} {'norm':>8} {'left out':>9}",
        ]
        for kind in KINDS:
            for name, m in getattr(self, kind).items():
                errors = f"{_text(m.rmse, '.1e'):>8} {_text(m.rmse_cumulative, '.1e'):>8}"
                angles = f"{_text(m.sign, '.3f'):>6} {_text(m.cosine, '.3f'):>7}"
                lines.append(f"{name:>10} {errors} {angles} {m.norm:8.1e} {m.left_out:9d}")
        for kind in ("neurons", "synapses"):
            parts = asdict(getattr(self.budget, kind))
            lines.append(f"{kind}: " + ", ".join(f"{name} {_text(value, '.1e')}" for name, value in parts.items()))
        lines_of = [str(self.concentration)] if self.concentration else []
        return "\n".join([*lines, str(self.release), *lines_of, self.verdict])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Everything except the traces, ready for JSON."""
        simple = ("T", "K", "beta", "dtype", "schedule", "samples", "steps", "seconds", "cpu_seconds")
        return {
            **{name: getattr(self, name) for name in simple},
            **({"groups": self.groups} if self.groups else {}),
            "convention": asdict(self.convention),
            "residual": asdict(self.residual),
            **{kind: _as_dict(getattr(self, kind)) for kind in KINDS},
            "settled": None if self.settled is None else {kind: _as_dict(m) for kind, m in self.settled.items()},
            "budget": self.budget.to_dict(),
            "release": asdict(self.release),
            "concentration": None if self.concentration is None else asdict(self.concentration),
        }

    def traces_to_dict(self) -> dict[str, Any]:
        """The processes of one sample, ready for JSON."""
        traces = {kind: {name: asdict(t) for name, t in named.items()} for kind, named in self.traces.items()}
        return {"K": self.K, "beta": self.beta, "sample": self.sample, **traces}


def _as_dict(metrics: dict[str, Metrics]) -> dict[str, dict[str, Any]]:
    return {name: asdict(m) for name, m in metrics.items()}


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
