"""The report of a comparison: metrics, traces, how concentrated EP's updates are across samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.dynamics import PrimitiveDynamics
from eqprop.gdu.free import Release
from eqprop.gdu.lockstep import Comparison, Moment
from eqprop.gdu.metrics import Budget, Convention, Group, Metrics, batch_mean
from eqprop.relax import relax

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
    """|dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_*)|^2 per sample, over all parameters, (B,)."""
    x, start = case.x, case.free.state
    end = relax(model, x, case.K, start, Nudge(case.cost, case.y, case.beta)).state
    found = []
    for n in range(len(x)):
        one = slice(n, n + 1)
        late, early = (tuple(layer[one] for layer in s) for s in (end, start))
        moved = model.contrast(x[one], late, early).values()
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


SCHEDULES = {
    "alternating": " alternating",
    "sweeps": " in sweeps",
    "sweeps-same": " in sweeps of one order in both phases, of which totals are compared",
}


@dataclass(frozen=True)
class Report:
    """The result of `compare`. The command line writes `to_dict` as JSON.

    samples     the number compared
    steps       the free steps run: T, or fewer if nothing moved any more
    schedule    of the free phase
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
        turns = SCHEDULES.get(self.schedule, "")
        lines = [
            f"T = {self.T}{turns}, K = {self.K}, beta = {self.beta:g}, {self.samples} samples, {self.dtype}",
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

    def to_dict(self) -> dict[str, Any]:
        """Everything except the traces, ready for JSON."""
        simple = ("T", "K", "beta", "dtype", "schedule", "samples", "steps", "seconds", "cpu_seconds")
        return {
            **{name: getattr(self, name) for name in simple},
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
