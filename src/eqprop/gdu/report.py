"""What a comparison found, and its plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eqprop.gdu.budget import Budget
from eqprop.gdu.metrics import Convention, Metrics
from eqprop.gdu.release import Release
from eqprop.gdu.shares import Shares
from eqprop.gdu.traces import Trace

KINDS = ("neurons", "synapses", "biases")


@dataclass(frozen=True)
class Residual:
    """|F(x, s) - s| at the end of the free phase over ALL samples, and how many of them had not settled."""

    max: float
    median: float
    unsettled: int
    dropped: int


@dataclass(frozen=True)
class Report:
    """What `compare` found. `to_dict` is what the command line writes as JSON.

    samples     how many were compared
    steps       the free steps run: T, or fewer if nothing moved any more
    schedule    of the free phase
    cpu_seconds of this process, all threads together: on a busy machine the better measure
    neurons, synapses, biases   `Metrics` by name
    settled     the same by kind and name of the settled samples alone, where others were compared with them; else None
    release     what becomes of the samples when the nudge lets them go
    shares      how much of the updates few samples make; None without a primitive, or without updates
    sample      the one whose processes are in `traces`, by kind and name
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
    shares: Shares | None
    sample: int
    traces: dict[str, dict[str, Trace]]

    @property
    def verdict(self) -> str:
        return self.budget.verdict

    def __str__(self) -> str:
        """The figures group by group, the parts of the budget and the verdict, as plain text."""
        r = self.residual
        turns = " alternating" if self.schedule == "alternating" else ""
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
        shares = [str(self.shares)] if self.shares else []
        return "\n".join([*lines, str(self.release), *shares, self.verdict])

    def to_dict(self) -> dict[str, Any]:
        """Everything but the traces, as plain values."""
        simple = ("T", "K", "beta", "dtype", "schedule", "samples", "steps", "seconds", "cpu_seconds")
        return {
            **{name: getattr(self, name) for name in simple},
            "convention": asdict(self.convention),
            "residual": asdict(self.residual),
            **{kind: _plain(getattr(self, kind)) for kind in KINDS},
            "settled": None if self.settled is None else {kind: _plain(m) for kind, m in self.settled.items()},
            "budget": self.budget.to_dict(),
            "release": asdict(self.release),
            "shares": None if self.shares is None else asdict(self.shares),
        }

    def traces_to_dict(self) -> dict[str, Any]:
        """The processes of one sample, as plain values."""
        traces = {kind: {name: asdict(t) for name, t in named.items()} for kind, named in self.traces.items()}
        return {"K": self.K, "beta": self.beta, "sample": self.sample, **traces}


def _plain(metrics: dict[str, Metrics]) -> dict[str, dict[str, Any]]:
    return {name: asdict(m) for name, m in metrics.items()}


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
