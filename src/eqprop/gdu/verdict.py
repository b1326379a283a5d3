"""What keeps a net from learning: the cause, the number that shows it, and the remedy in the caller's terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Voice = Literal["python", "command line"]
"""Who asks: remedies are Python arguments, or options of the command line."""

CAUSES = {
    "bad-numbers": "A number is not finite",
    "random": "The transition is not a function of x and s alone",
    "mixing": "The samples of a mini-batch act on each other",
    "optimizer": "The optimizer does not hold the model's parameters",
    "targets": "The targets are out of the outputs' reach",
    "formula": "A hand-written formula is not the derivative of Phi",
    "cut": "A derivative is cut off",
    "start": "The free phase begins in the wrong place",
    "unbounded": "The energy is unbounded below",
    "diverges": "The state grows without bound",
    "eps": "The step is too large",
    "two-cycle": "The state goes back and forth",
    "drift": "The state still drifts while it is nudged",
    "T": "The free phase is too short",
    "slow": "The state moves too slowly",
    "oscillates": "The state oscillates at any step",
    "never-settles": "The free phase does not settle",
    "no-pull": "The cost does not pull on any neuron",
    "inputs": "The input makes no difference",
    "zero-weights": "Weights of zero pass no signal",
    "silent": "Saturated or clipped neurons pass no signal",
    "fades": "The signal fades with depth",
    "outside-phi": "Phi does not read a parameter",
    "asymmetric": "The Jacobian is not symmetric",
    "nudge-site": "The nudge bypasses the activation",
    "rounding": "The updates are lost in rounding",
    "beta": "The nudge is too strong",
    "K": "The second phase is too short",
    "gradient": "The gradient is not the exact one",
    "machine-rest": "The machine reads states that are not at rest",
    "machine-weights": "The machine cuts its weights in silence",
    "machine-nudge": "The machine's nudge is not what it was asked for",
    "machine-other": "The machine runs another network",
    "rate-large": "The learning rate is too large",
    "rate-small": "The learning rate is too small",
    "epsilon": "The optimizer's epsilon drowns an update",
}
"""Every cause by its key, in a few words."""

OF_EP = ("T", "K", "beta", "schedule", "nudging", "form")
OPTIONS = {
    "T": "--T",
    "K": "--K",
    "beta": "--beta",
    "schedule": "--schedule",
    "nudge_site": "--nudge-site",
    "form": "--form",
}
IN_PYTHON = {
    "eps": "eps={} in the model",
    "lr": "lr={}",
    "lr_factor": "every learning rate times {}",
    "dtype": "model.double(), with x and y in float64",
}
IN_SHELL = {
    "eps": "eps {} in the model",
    "lr": "--lr {}",
    "lr_factor": "every learning rate times {}",
    "dtype": "--dtype float64",
}


@dataclass(frozen=True)
class Finding:
    """One cause.

    cause       a key of `CAUSES`
    shown_by    the number that shows it
    change      settings to use, by name: T, K, beta, schedule, eps, nudge_site, lr, lr_factor, dtype
    advice      what else to do, in words that hold for every caller
    tried       what the change did when it was applied to a copy of this model, on this batch; "" if it was not
    verified    whether that cures it
    """

    cause: str
    shown_by: str
    change: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    tried: str = ""
    verified: bool = False

    def remedy(self, voice: Voice = "python") -> str:
        """What to do, as a sentence or two."""
        parts = []
        if self.change:
            tried = f" (tried on this batch: {self.tried})" if self.tried else ""
            parts.append(f"Use {settings(self.change, voice)}{tried}.")
        return " ".join([*parts, *([self.advice] if self.advice else [])])

    def text(self, voice: Voice = "python") -> str:
        return f"{CAUSES[self.cause]}: {self.shown_by}. {self.remedy(voice)}".strip()


def settings(change: Mapping[str, Any], voice: Voice) -> str:
    """Values of settings, as who asks writes them."""
    if voice == "command line":
        words = [IN_SHELL[n].format(v) if n in IN_SHELL else f"{OPTIONS[n]} {v}" for n, v in change.items()]
        return " ".join(words)
    of_ep = ", ".join(f"{name}={value!r}" for name, value in change.items() if name in OF_EP)
    others = [IN_PYTHON[n].format(v) if n in IN_PYTHON else f"{n}={v!r}" for n, v in change.items() if n not in OF_EP]
    return " and ".join([*([f"EP({of_ep}, ...)"] if of_ep else []), *others])


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    finding     the first cause, or None for a net that has none of those looked for
    passed      the checks before it and what each measured
    remarks     what is not as the theorem has it, yet does no harm; what would be had for less
    restless    what would bring the free phase closer to its rest, where its gradient does not suffer
    seconds     wall time
    cosine      of EP's whole gradient to the exact one, where that was the last question and no cause was found
    """

    finding: Finding | None
    passed: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0
    voice: Voice = "python"
    restless: Finding | None = None
    cosine: float | None = None

    @property
    def healthy(self) -> bool:
        return self.finding is None

    @property
    def cause(self) -> str | None:
        """A key of `CAUSES`, or None."""
        return None if self.finding is None else self.finding.cause

    @property
    def verdict(self) -> str:
        if self.finding is not None:
            return self.finding.text(self.voice)
        return "No cause found: " + "; ".join(self.passed[name] for name in SUMMARY if name in self.passed) + "."

    def __str__(self) -> str:
        lines = [f"{name:>12}  {what}" for name, what in self.passed.items()]
        return "\n".join([*lines, *self.remarks, self.verdict])

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        found = self.finding
        return {
            "healthy": self.healthy,
            "cause": self.cause,
            "verdict": self.verdict,
            "shown_by": found.shown_by if found else None,
            "remedy": found.remedy(self.voice) if found else None,
            "change": dict(found.change) if found else {},
            "tried": found.tried if found else None,
            "verified": found.verified if found else None,
            "passed": dict(self.passed),
            "remarks": list(self.remarks),
            "seconds": self.seconds,
        }


SUMMARY = ("settles", "gradient", "rates", "machine-rest", "machine-weights", "machine-nudge")
"""The checks that are named where every one has passed."""


def nice(value: float, up: bool = True) -> float:
    """The next of 1, 2, 3, 5 times a power of ten, above or below; 0 and what is not finite stay as they are."""
    if value == 0.0 or not math.isfinite(value):
        return value
    near = math.floor(math.log10(value))
    steps = [float(f"{m}e{e}") for e in range(near - 1, near + 2) for m in (1, 2, 3, 5)]
    if up:
        return next(s for s in steps if s >= value * (1 - 1e-9))
    return next(s for s in reversed(steps) if s <= value * (1 + 1e-9))


def percent(gap: float) -> str:
    return f"{gap:.0%}" if math.isfinite(gap) else "an infinity"
