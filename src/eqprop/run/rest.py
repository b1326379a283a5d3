"""Keeping free phases at rest during training: what is checked every few iterations, and what is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from eqprop.cost import Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators import EP, Estimator
from eqprop.gdu.beta import best_beta
from eqprop.gdu.control import Settle, capped
from eqprop.relax import Phase, relax
from eqprop.run.spec import AtRest, Phases

LOOKED_AT, MEASURED = 4, 64
"""Samples on which the radius is measured, and beta."""
LONGER, SHORTER = 1.25, 0.9
"""What T is multiplied by while free phases end away from rest, and once they end far closer."""
CLOSER = 0.25
"""Closer than this share of the residual allowed, T falls and rates rise again."""
SLOWER, FASTER, SLOWEST = 0.5, 1.1, 1e-3
"""What rates are multiplied by, and the least share of them that is left."""


class Guard:
    """What a training changes to stay at rest: T, beta, a factor of all rates, and the weights themselves.

    T, beta     as they are now
    factor      of all rates
    seen        samples and the sum of their residuals in this epoch at the last look
    radius      the largest |l| found in this epoch; 0 where none was looked for
    period      T changes by whole multiples of it, so that sweeps and alternating phases end as they did
    """

    def __init__(self, phases: Phases, estimator: Estimator, period: int) -> None:
        self.settings = phases.keep_at_rest or AtRest(every=10**9)
        self.first, self.period, self.led = estimator, period, phases.beta_led
        self.T, self.beta, self.factor = estimator.T, float(phases.beta), 1.0
        self.seen, self.radius = (0.0, 0.0), 0.0

    @property
    def estimator(self) -> Estimator:
        """The one given, with T and beta as they are now."""
        return _changed(self.first, self.T, self.beta if self.led else None)

    def until_look(self, done: int) -> int:
        """Iterations to the next look, after so many of the whole training."""
        return self.settings.every - done % self.settings.every

    def look(
        self,
        model: Dynamics,
        x: Tensor,
        counts: Mapping[str, list[float]],
        settle: Settle = relax,
    ) -> None:
        """After `every` iterations, with the counts of the epoch so far and some inputs; `settle` runs free phases."""
        samples, total = counts["samples"][0], counts["residual"][0]
        mean = (total - self.seen[1]) / max(samples - self.seen[0], 1.0)
        self.seen = samples, total
        of = self.settings
        phase = Phase(self.T, self.first.schedule, stop="settled", checked=False)
        found = capped(model, x[:LOOKED_AT], phase, of.radius, settle)
        self.radius = max(self.radius, found)
        moving, resting = not mean <= of.residual, mean <= CLOSER * of.residual
        if of.longest is not None and moving:
            self.T = min(max(of.longest, self.first.T), self._stepped(self.T * LONGER))
        elif of.longest is not None and resting:
            self.T = max(self.first.T, self._stepped(self.T * SHORTER))
        if of.slower and moving:
            self.factor = max(SLOWEST, self.factor * SLOWER)
        elif of.slower and resting:
            self.factor = min(1.0, self.factor * FASTER)

    def choose_beta(self, problem: Problem) -> None:
        """By the samples given, where beta is led and the estimator is EP."""
        base = self.estimator.plain
        if self.led and isinstance(base, EP):
            one = Problem(problem.model, problem.cost, problem.x[:MEASURED], problem.y[:MEASURED])
            self.beta = best_beta(one, base).beta

    def end_epoch(self) -> None:
        """Counts begin anew."""
        self.seen, self.radius = (0.0, 0.0), 0.0

    def _stepped(self, T: float) -> int:
        """The nearest T that is whole periods away from the first, at least one from where it was if it moved."""
        return self.first.T + round((T - self.first.T) / self.period + (0.5 if self.T < T else -0.5)) * self.period

    def to_dict(self) -> dict[str, float]:
        """What a resumed run needs to continue with the same bits."""
        return {
            "T": self.T,
            "beta": self.beta,
            "factor": self.factor,
            "samples": self.seen[0],
            "residual": self.seen[1],
            "radius": self.radius,
        }

    def restore(self, saved: Mapping[str, float]) -> None:
        """From `to_dict`."""
        self.T, self.beta, self.factor = int(saved["T"]), saved["beta"], saved["factor"]
        self.seen, self.radius = (saved["samples"], saved["residual"]), saved["radius"]

    def measured(self) -> dict[str, float]:
        """For the lines of an epoch: what was found and what was changed."""
        found: dict[str, float] = {"T": float(self.T)} if self.settings.longest is not None else {}
        found |= {"beta": self.beta} if self.led else {}
        found |= {"rate_factor": self.factor} if self.settings.slower else {}
        return found | ({"radius": round(self.radius, 4)} if self.settings.every < 10**9 else {})


def _changed(estimator: Estimator, T: int, beta: float | None) -> Estimator:
    plain = estimator.plain
    changes: dict[str, Any] = {"T": T} if beta is None or not isinstance(plain, EP) else {"T": T, "beta": beta}
    return estimator.with_plain(replace(plain, **changes))
