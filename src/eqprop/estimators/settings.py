"""The settings of an estimator as data; what a class declares of its own stands beside it."""

from __future__ import annotations

from typing import Annotated

from eqprop.settings import Section, about


class EstimatorSettings(Section, frozen=True, kw_only=True):
    """The estimator of a spec, by name; T, K and beta stand in its phases."""

    kind: Annotated[str, about("The estimator, or several: ep,bptt.", common=True, flat="estimator")] = "ep-symmetric"
