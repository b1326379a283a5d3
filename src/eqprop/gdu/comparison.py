"""`compare`: run EP and BPTT on a model, measure the mismatch, explain it, and return all of it as a `Report`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import BPTT, EP
from eqprop.gdu.budget import Budget, outcome_of, parts_of, sentence
from eqprop.gdu.doctor import OF_GRADIENT, examine
from eqprop.gdu.examination import Examination
from eqprop.gdu.lockstep import (
    Linearised,
    Moment,
    asymmetry,
    check_problem,
    dissect,
    pair,
    saturated,
    spectral_radius,
    total,
)
from eqprop.gdu.metrics import PAPER, Convention, Distance, Group, Metrics, Noise, Silence, batch_mean, groups, measure
from eqprop.gdu.rest import settles
from eqprop.gdu.settling import NeverSettlesError, Release, audit, part, release, settle
from eqprop.gdu.trial import tried
from eqprop.gdu.verdict import Finding, Voice
from eqprop.relax import SWEEPS, NotFiniteError, PhaseForm, Relaxation, Schedule, in_sweeps

KINDS = ("neurons", "synapses", "biases")

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
    form            of EP's nudged phase, see `EP`: in the "difference" form nothing drifts into it
    progress        called periodically with the fraction done
    voice           whose terms the verdict's remedies use: "python" or "command line"
    """

    drop_unsettled: bool = False
    tolerance: float | None = None
    convention: Convention = PAPER
    shown: int = 5
    seed: int = 0
    schedule: Schedule = "synchronous"
    form: PhaseForm = "plain"
    progress: Callable[[float], None] | None = None
    voice: Voice = "python"


@in_own_precision
def compare(
    model: Dynamics, cost: Cost, x: Tensor, y: Tensor, T: int, K: int, beta: float, options: Options | None = None
) -> Report:
    """Compare Delta_EP(beta, t) with -nabla_BPTT(t), t = 0, ..., K-1, per layer; explain the gap  [eq:thm-main].

    model, cost     what is trained
    x, y        a mini-batch and its targets; float64 shows what beta does, float32 what rounding does
    T, K, beta  steps of the two phases, and the strength of the nudge
    options     see `Options`
    """
    options = options or Options()
    began, worked = time.perf_counter(), time.process_time()
    problem, ep = Problem(model, cost, x, y), EP(T, K, beta, schedule=options.schedule, form=options.form)
    BPTT(ep.T, ep.K)
    check_problem(problem)
    tell = _teller(options.progress, T + STEP_COST * K)
    try:
        free = settle(problem, ep, options.tolerance, tell)
    except (NeverSettlesError, NotFiniteError) as error:
        raise _explained(error, Examination(problem, ep, voice=options.voice)) from error
    chosen, settled = _chosen(free, options.drop_unsettled)
    steady, here = part(problem, free, settled), part(problem, free, chosen)
    every, noise = groups(model, free.state), Noise.of(problem, ep, free.state)
    together = total if ep.schedule == "sweeps-same" else iter
    rest = measure(together(dissect(*steady, ep)), every, options.convention, noise, lambda t: tell(T + STEP_COST * t))
    whole = (
        rest
        if here is steady or bool((chosen == settled).all())
        else measure(together(pair(*here, ep)), every, options.convention, noise)
    )
    sample = int(free.settled.int().argmax())
    one = part(problem, free, torch.arange(len(x), device=x.device) == sample)
    return Report(
        T=T,
        K=K,
        beta=beta,
        dtype=str(free.state[0].dtype).removeprefix("torch."),
        samples=int(chosen.sum()),
        steps=free.steps,
        schedule=options.schedule,
        groups=len(model.sweep(len(free.state))) if options.schedule in SWEEPS else None,
        convention=options.convention,
        residual=Residual(
            max=float(free.residual.max()),
            median=float(free.residual.median()),
            unsettled=int((~free.settled).sum()),
            dropped=int((~chosen).sum()),
            layers=audit(model, x, free.state, options.tolerance),
        ),
        **_metrics(whole, options.convention),
        settled=None if whole is rest else _metrics(rest, options.convention),
        silenced=_silenced(*here, whole),
        budget=_budget(steady, here, ep, (whole, rest), options),
        release=release(*steady, ep, options.tolerance),
        sample=sample,
        traces=by_kind(follow(together(pair(*one, ep)), every, options.shown, options.seed)) if options.shown else {},
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - worked,
    )


def _teller(progress: Callable[[float], None] | None, whole: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if progress is not None:
            progress(min(done / whole, 1.0))

    return tell


def _explained(error: ArithmeticError, p: Examination) -> ArithmeticError:
    """With what the doctor says of a free phase that has no rest."""
    found = settles(p)
    return type(error)(f"{error} {tried(p, found).text(p.voice)}") if isinstance(found, Finding) else error


def _chosen(free: Relaxation, drop_unsettled: bool) -> tuple[Tensor, Tensor]:
    """Which samples are compared, and which of them the budget is of: those that have settled, all if none has."""
    every, settled = torch.ones_like(free.settled), free.settled
    if not bool(settled.any()):
        if drop_unsettled:
            raise ValueError(
                f"Dropping unsettled samples leaves none of the {settled.numel()} samples (the smallest residual is "
                f"{float(free.residual.min()):.1e}). Raise T, or keep unsettled samples."
            )
        return every, every
    return (settled if drop_unsettled else every), settled


Of = TypeVar("Of")


def by_kind(found: Mapping[Group, Of]) -> dict[str, dict[str, Of]]:
    return {kind: {g.name: value for g, value in found.items() if g.kind == kind} for kind in KINDS}


def _metrics(found: Mapping[Group, Distance], convention: Convention) -> dict[str, dict[str, Metrics]]:
    return by_kind({group: distance.metrics(convention) for group, distance in found.items()})


def _silenced(problem: Problem, free: Relaxation, found: Mapping[Group, Distance]) -> dict[str, Silence]:
    masks = saturated(Linearised(problem.model, problem.x, free.state))
    return {g.name: Silence.of(d, masks[g.depth]) for g, d in found.items() if g.kind == "neurons"}


def _budget(
    steady: tuple[Problem, Relaxation],
    here: tuple[Problem, Relaxation],
    ep: EP,
    found: tuple[Mapping[Group, Distance], Mapping[Group, Distance]],
    options: Options,
) -> Budget:
    problem, free = steady
    around = Linearised(problem.model, problem.x, free.state)
    has_primitive = isinstance(problem.model, PrimitiveDynamics)
    neurons, synapses = (parts_of(kind, *found, options.convention, has_primitive) for kind in ("neurons", "synapses"))
    outcome = outcome_of(*found, options.convention)
    diagnosis = None
    if outcome != "holds":
        p = Examination(here[0], ep, voice=options.voice)
        p.free = here[1]
        diagnosis = examine(p, OF_GRADIENT)
    return Budget(
        neurons=neurons,
        synapses=synapses,
        asymmetry=asymmetry(around, options.seed),
        spectral_radius=spectral_radius(around, options.seed),
        saturated=float(torch.cat([mask.flatten(1) for mask in saturated(around, options.seed)], 1).double().mean()),
        outcome=outcome,
        verdict=sentence(outcome, neurons, synapses, diagnosis, has_primitive),
    )


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


@dataclass(frozen=True)
class Residual:
    """|F(x, s) - s| at the end of the free phase over ALL samples, how many had not settled, and by layer (`audit`)."""

    max: float
    median: float
    unsettled: int
    dropped: int
    layers: Mapping[str, Mapping[str, float]]


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
    cpu_seconds     of this process over all threads: more reliable than wall time on a busy machine
    neurons, synapses, biases   `Metrics` by name
    settled     the same for the settled samples only, by kind and name; None unless only some had settled
    silenced    by layer, the neurons that hear BPTT's signal and not EP's
    release     whether the samples return after the nudge
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
    silenced: dict[str, Silence]
    budget: Budget
    release: Release
    sample: int
    traces: dict[str, dict[str, Trace]]

    @property
    def verdict(self) -> str:
        return self.budget.verdict

    def __str__(self) -> str:
        """The metrics per group, the parts of the budget and the verdict, as text."""
        r = self.residual
        steps = phases(self.T, self.K, self.schedule, self.groups)
        away = [(name, of) for name, of in r.layers.items() if of["unsettled"]]
        lines = [
            f"{steps}, beta = {self.beta:g}, {self.samples} samples, {self.dtype}",
            f"residual: max {r.max:.1e}, median {r.median:.1e}, {r.unsettled} not settled, {r.dropped} left out",
            *[f"  {name}: {of['unsettled']:.0%} not at rest, by up to {of['max']:.1e}" for name, of in away],
            f"{'group':>10} {'RMSE':>8} {'cumul.':>8} {'sign':>6} {'cosine':>7} {'norm':>8} {'left out':>9}",
        ]
        for kind in KINDS:
            for name, m in getattr(self, kind).items():
                errors = f"{_text(m.rmse, '.1e'):>8} {_text(m.rmse_cumulative, '.1e'):>8}"
                angles = f"{_text(m.sign, '.3f'):>6} {_text(m.cosine, '.3f'):>7}"
                lines.append(f"{name:>10} {errors} {angles} {m.norm:8.1e} {m.left_out:9d}")
        for kind in ("neurons", "synapses"):
            parts = asdict(getattr(self.budget, kind))
            lines.append(
                f"error budget of {kind}: "
                + ", ".join(f"{name} {_text(value, '.1e')}" for name, value in parts.items())
            )
        b = self.budget
        lines.append(
            f"Jacobian: asymmetry {b.asymmetry:.1e} (0 symmetric, 1 antisymmetric), spectral radius "
            f"{b.spectral_radius:.4f}, saturated neurons {b.saturated:.1%}"
        )
        lines += [f"{name}: {silence}" for name, silence in self.silenced.items() if silence.unheard]
        return "\n".join([*lines, str(self.release), self.verdict])

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
            "silenced": _as_dict(self.silenced),
            "budget": self.budget.to_dict(),
            "release": asdict(self.release),
        }

    def traces_to_dict(self) -> dict[str, Any]:
        """The processes of one sample, ready for JSON."""
        traces = {kind: _as_dict(named) for kind, named in self.traces.items()}
        return {"K": self.K, "beta": self.beta, "sample": self.sample, **traces}


def _as_dict(found: Mapping[str, Metrics | Silence | Trace]) -> dict[str, dict[str, Any]]:
    return {name: asdict(one) for name, one in found.items()}


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
