"""Estimators by name, with the settings that each declares, for files and the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from eqprop.estimators.asymmetric import AsymEP, Dyadic, VectorField
from eqprop.estimators.base import Estimator
from eqprop.estimators.bptt import BPTT, Backprop
from eqprop.estimators.continual import ContinualEP
from eqprop.estimators.coupled import CoupledLearning
from eqprop.estimators.ep import EP, Nudging
from eqprop.estimators.holomorphic import HolomorphicEP
from eqprop.estimators.rbp import RBP
from eqprop.plugins import Table
from eqprop.relax import PhaseForm
from eqprop.settings import Section, about

BACKPROP = "backprop"
"""The estimator of a net's feed-forward twin: free phases are one forward pass."""
CONTINUAL = "ep-continual"


class EstimatorSettings(Section, frozen=True, kw_only=True):
    """The estimator of a spec, by name; T, K and beta stand in its phases."""

    kind: Annotated[str, about("The estimator, or several: ep,bptt.", common=True, flat="estimator")] = "ep-symmetric"


class EPSettings(EstimatorSettings, frozen=True, kw_only=True):
    """Of `EP`."""

    form: Annotated[PhaseForm, about("Compute the nudged phase on the state (plain) or on its difference from the free one.", common=True)] = "plain"
    held: Annotated[bool, about("Whether the nudge keeps the force it begins with.")] = False


class HolomorphicSettings(EstimatorSettings, frozen=True, kw_only=True):
    """Of `HolomorphicEP`."""

    points: Annotated[int, about("Points on the circle of ep-holomorphic.", ge=2, le=10_000)] = 4


class AsymmetricSettings(EstimatorSettings, frozen=True, kw_only=True):
    """Of `VectorField` and `AsymEP`."""

    centered: Annotated[bool, about("Whether to take the mean over beta and -beta.")] = True


@dataclass(frozen=True)
class Form:
    """An estimator by name: what makes it, the settings it declares, what the name itself fixes."""

    make: Callable[..., Estimator]
    settings: type[EstimatorSettings] = EstimatorSettings
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes(self) -> tuple[str, ...] | None:
        """The settings its class takes; None for a function, which takes the spec."""
        if not (isinstance(self.make, type) and issubclass(self.make, Estimator)):
            return None
        return tuple(f.name for f in fields(self.make) if f.init)


_BUILT_IN = {
    "ep": Form(EP, EPSettings),
    "ep-symmetric": Form(EP, EPSettings, {"nudging": "symmetric"}),
    "ep-random-sign": Form(EP, EPSettings, {"nudging": "random-sign"}),
    "ep-holomorphic": Form(HolomorphicEP, HolomorphicSettings),
    CONTINUAL: Form(ContinualEP),
    "vector-field": Form(VectorField, AsymmetricSettings),
    "asym-ep": Form(AsymEP, AsymmetricSettings),
    "dyadic": Form(Dyadic),
    "coupled-learning": Form(CoupledLearning),
    "bptt": Form(BPTT),
    "rbp": Form(RBP),
    BACKPROP: Form(Backprop, fixed={"T": 1, "K": 1, "schedule": "synchronous", "stop": "never"}),
}

ESTIMATORS: Table[Form] = Table("estimator", _BUILT_IN, lambda name, part: Form(part))
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
