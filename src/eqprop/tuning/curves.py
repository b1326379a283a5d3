"""What is measured before anything is decided: plain curves, as they go to the JSON file and into the figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Residuals:
    """|F(x, s_t) - s_t| over the samples, t = 0, 1, ...: the median, nine tenths of the samples, the worst one."""

    median: tuple[float, ...]
    most: tuple[float, ...]
    worst: tuple[float, ...]


@dataclass(frozen=True)
class Sizes:
    """|nabla_W(t)|, t = 0, 1, ..., of each weight: the root mean square over mini-batches of its Frobenius norm."""

    norms: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Agreement:
    """EP's gradient against the exact one at each beta, weight by weight, means over mini-batches.

    sign        of the synapses whose exact gradient is not zero, the share where EP's has its sign
    cosine      of the angle between the two
    """

    betas: tuple[float, ...]
    sign: dict[str, tuple[float, ...]]
    cosine: dict[str, tuple[float, ...]]

    def mean_sign(self) -> tuple[float, ...]:
        """Over the weights, each counting the same however many synapses it has."""
        return tuple(sum(column) / len(column) for column in zip(*self.sign.values(), strict=True))


@dataclass(frozen=True)
class Scales:
    """Of each parameter: the norm of its value, and the root mean square over mini-batches of its gradient's norm."""

    value: dict[str, float]
    gradient: dict[str, float]


@dataclass(frozen=True)
class Look:
    """Everything measured at one set of weights."""

    weights: str
    residuals: Residuals
    sizes: Sizes
    agreement: Agreement
    scales: Scales

    def plain(self) -> dict[str, Any]:
        return asdict(self)
