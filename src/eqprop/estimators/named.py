"""Estimators by name, with the settings that each declares, for files and the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from eqprop.estimators.base import Estimator
from eqprop.estimators.bptt import BPTT, Backprop
from eqprop.estimators.continual import ContinualEP
from eqprop.estimators.ep import EP, Nudging
from eqprop.estimators.holomorphic import HolomorphicEP
from eqprop.estimators.rbp import RBP
from eqprop.estimators.settings import EstimatorSettings
from eqprop.plugins import Table, part

BACKPROP = "backprop"
"""The estimator of a net's feed-forward twin: free phases are one forward pass."""
CONTINUAL = "ep-continual"


@dataclass(frozen=True)
class Form:
    """An estimator by name: what makes it, and what the name itself fixes."""

    make: Callable[..., Estimator]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> type[EstimatorSettings]:
        """What it declares for files and the command line."""
        found: type[EstimatorSettings] = getattr(self.make, "settings", EstimatorSettings)
        return found

    @property
    def takes(self) -> tuple[str, ...] | None:
        """The settings its class takes; None for a function, which takes the spec."""
        if not (isinstance(self.make, type) and issubclass(self.make, Estimator)):
            return None
        return tuple(f.name for f in fields(self.make) if f.init)


_BUILT_IN = {
    "ep": Form(EP),
    "ep-symmetric": Form(EP, {"nudging": "symmetric"}),
    "ep-random-sign": Form(EP, {"nudging": "random-sign"}),
    "ep-holomorphic": Form(HolomorphicEP),
    CONTINUAL: Form(ContinualEP),
    "vector-field": Form(part("estimators.asymmetric:VectorField")),
    "asym-ep": Form(part("estimators.asymmetric:AsymEP")),
    "dyadic": Form(part("estimators.dyadic:Dyadic")),
    "coupled-learning": Form(part("estimators.coupled:CoupledLearning")),
    "bptt": Form(BPTT),
    "rbp": Form(RBP),
    BACKPROP: Form(Backprop, fixed={"T": 1, "K": 1, "schedule": "synchronous", "stop": "never"}),
}

ESTIMATORS: Table[Form] = Table("estimator", _BUILT_IN, lambda name, own: Form(own))
"""The estimators a spec can be trained with, by the name used on the command line and in files."""


def label(estimator: str) -> str:
    """EP, EP symmetric, ..., BPTT, RBP; any other as it is: backprop, dyadic."""
    family, _, form = estimator.partition("-")
    known = estimator in ESTIMATORS.built_in and family in ("ep", "bptt", "rbp")
    return f"{family.upper()} {form}".strip() if known else estimator


def nudging_of(estimator: str) -> Nudging:
    """How EP of this name nudges; one-sided for any other estimator."""
    form = ESTIMATORS.built_in.get(estimator)
    nudging: Nudging = form.fixed.get("nudging", "one-sided") if form else "one-sided"
    return nudging
