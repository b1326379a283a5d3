"""Where a search looks: ranges around a record's own values, and the way from values to a record and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from eqprop.experiments.record import Record
from eqprop.tuning.decide import BETA_RANGE

if TYPE_CHECKING:
    from optuna.trial import Trial

STEPS_FACTOR, RATES_FACTOR = 4, 10
"""T and K from a quarter to four times the record's, rates from a tenth to ten times."""


@dataclass(frozen=True)
class Space:
    """Ranges of T, K, beta and each weight's rate, ends included; all searched on a logarithmic scale."""

    T: tuple[int, int]
    K: tuple[int, int]
    beta: tuple[float, float]
    rates: dict[str, tuple[float, float]]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def space_around(record: Record, weights: Sequence[str]) -> Space:
    """Ranges that hold the record's own values, and for beta the range the paper names."""
    rates = {name: rate for name, rate in record.rates(weights).items() if rate > 0.0}
    return Space(
        T=_steps(record.T),
        K=_steps(record.K),
        beta=(min(BETA_RANGE[0], abs(record.beta)), max(BETA_RANGE[1], abs(record.beta))),
        rates={name: (rate / RATES_FACTOR, rate * RATES_FACTOR) for name, rate in rates.items()},
    )


def _steps(value: int) -> tuple[int, int]:
    return max(value // STEPS_FACTOR, 1), value * STEPS_FACTOR


def suggest(trial: Trial, space: Space) -> dict[str, Any]:
    """Values from the sampler, by the names the study keeps."""
    values: dict[str, Any] = {
        "T": trial.suggest_int("T", *space.T, log=True),
        "K": trial.suggest_int("K", *space.K, log=True),
        "beta": trial.suggest_float("beta", *space.beta, log=True),
    }
    return values | {key: trial.suggest_float(key, *ends, log=True) for key, ends in _keyed(space.rates).items()}


def own_values(record: Record, space: Space) -> dict[str, Any]:
    """The record's own place in the space, where a search begins."""
    rates = record.rates(space.rates)
    return {"T": record.T, "K": record.K, "beta": abs(record.beta), **_keyed(rates)}


def to_record(record: Record, values: Mapping[str, Any]) -> Record:
    """The record with these values; K is no more than T, as BPTT needs it."""
    rates = {key.removeprefix("lr "): float(f"{v:.3g}") for key, v in values.items() if key.startswith("lr ")}
    return replace(
        record,
        T=values["T"],
        K=min(values["K"], values["T"]),
        beta=float(f"{values['beta']:.3g}"),
        learning_rates={**record.learning_rates, **rates},
    )


def _keyed(rates: Mapping[str, Any]) -> dict[str, Any]:
    return {f"lr {name}": value for name, value in rates.items()}
