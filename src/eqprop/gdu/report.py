"""What a comparison found, and its plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eqprop.gdu.budget import Budget
from eqprop.gdu.metrics import Convention, Metrics
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
    neurons, synapses, biases   `Metrics` by name
    sample      the one whose processes are in `traces`, by kind and name
    """

    T: int
    K: int
    beta: float
    dtype: str
    samples: int
    steps: int
    seconds: float
    convention: Convention
    residual: Residual
    neurons: dict[str, Metrics]
    synapses: dict[str, Metrics]
    biases: dict[str, Metrics]
    budget: Budget
    sample: int
    traces: dict[str, dict[str, Trace]]

    @property
    def verdict(self) -> str:
        return self.budget.verdict

    def to_dict(self) -> dict[str, Any]:
        """Everything but the traces, as plain values."""
        simple = ("T", "K", "beta", "dtype", "samples", "steps", "seconds")
        return {
            **{name: getattr(self, name) for name in simple},
            "convention": asdict(self.convention),
            "residual": asdict(self.residual),
            **{kind: {name: asdict(m) for name, m in getattr(self, kind).items()} for kind in KINDS},
            "budget": self.budget.to_dict(),
        }

    def traces_to_dict(self) -> dict[str, Any]:
        """The processes of one sample, as plain values."""
        traces = {kind: {name: asdict(t) for name, t in named.items()} for kind, named in self.traces.items()}
        return {"K": self.K, "beta": self.beta, "sample": self.sample, **traces}
