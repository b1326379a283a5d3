"""`doctor`: why does this net not learn by EP? The first cause, the number that shows it, and the remedy.

EP's gradient is taken apart link by link (see `eqprop.gdu.examination`): a net whose state is not quite at rest, or
whose Jacobian is not quite symmetric, is not accused of it as long as its gradient does not suffer.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import get_args

from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import EP, Estimator
from eqprop.gdu.examination import Examination, Rates, whole_cosine
from eqprop.gdu.gradient_checks import AFTER, of_estimator
from eqprop.gdu.lockstep import check_problem
from eqprop.gdu.problem_checks import BEFORE, Checks
from eqprop.gdu.rates import check_rates
from eqprop.gdu.rest import settles
from eqprop.gdu.trial import tried
from eqprop.gdu.verdict import Diagnosis, Finding, Voice
from eqprop.messages import unknown
from eqprop.state import State

OF_GRADIENT = (
    *("formulas", "derivatives", "cost", "attracts", "weights", "silence", "depth"),
    *("phi", "symmetric", "rounding", "beta", "nudge", "gradient"),
)
"""Those that ask whether EP computes the gradient, as `eqprop.gdu.compare` does; that the free phase settles is asked
with them."""

OF_NET = (
    *("numbers", "repeatable", "samples", "optimizer", "targets", "formulas", "derivatives", "cost"),
    *("start", "attracts", "input", "saturation", "depth"),
)
"""Those that ask nothing of EP."""


@in_own_precision
def doctor(
    model: Dynamics,
    cost: Cost,
    x: Tensor,
    y: Tensor,
    ep: Estimator,
    *,
    state: State | None = None,
    rates: Rates = None,
    voice: Voice = "python",
) -> Diagnosis:
    """Why EP does not learn on this batch: the first cause found, with its remedy, or none.

        print(eqprop.doctor(model, cost, x, y, EP(T=30, K=10, beta=0.1), rates=optimizer))

    model, cost  what is trained
    x, y        a mini-batch and its targets
    ep          the estimator as it is used; one that Theorem 1 does not speak of, such as AsymEP, is itself compared
                with the exact gradient once the net is found to settle
    state       where its free phase begins, if not at `model.init_state(x)`
    rates       one learning rate, rates by parameter name ("*" for every other), or the optimizer
    voice       "python" or "command line": whose terms remedies are written in

    The model, its `.grad` and the optimizer stay as they are. Stacked networks are examined one at a time.
    """
    if voice not in get_args(Voice):
        raise ValueError(unknown("voice", voice, get_args(Voice)))
    began = time.perf_counter()
    alone = None if ep.follows_theorem else ep
    ep = _one_sign(ep) if alone is None else _same_phases(alone)
    if isinstance(model, PrimitiveDynamics) and model.settles_itself:
        diagnosis: Diagnosis = model.examined(Problem(model, cost, x, y), ep, voice)
        return replace(diagnosis, seconds=time.perf_counter() - began)
    p = Examination(Problem(model, cost, x, y), ep, state, rates, voice)
    diagnosis = examine(p) if alone is None else examine_alone(p, alone)
    return replace(diagnosis, seconds=time.perf_counter() - began)


def _same_phases(estimator: Estimator) -> EP:
    return EP(
        estimator.T, estimator.K, getattr(estimator, "beta", 0.1), schedule=estimator.schedule, stop=estimator.stop
    )


def _one_sign(ep: Estimator) -> EP:
    if not isinstance(ep, EP):
        raise TypeError(
            f"The doctor examines EP; got {type(ep).__name__}. Give it an EP with the same T, K and beta; of any other "
            "estimator, eqprop.gdu.compare_gradients says how far its gradient is off."
        )
    return ep.with_sign(1) if ep.nudging == "random-sign" else ep


def examine(p: Examination, only: Collection[str] | None = None) -> Diagnosis:
    """Check after check, or only those named, up to the first that fails."""
    check_problem(p.problem, p.state)
    check_rates(p)
    voice = p.voice
    passed: dict[str, str] = {}

    def first_cause(checks: Checks, p: Examination) -> Finding | None:
        for name, check in checks.items():
            if only is None or name in only:
                if isinstance(found := check(p), Finding):
                    return tried(p, found)
                passed[name] = found
        return None

    if (cause := first_cause(BEFORE, p)) is not None:
        return Diagnosis(cause, passed, voice=voice)
    if isinstance(rest := settles(p), Finding):
        return Diagnosis(tried(p, rest), passed, voice=voice)
    passed["settles"], p = rest.note, rest.examination
    if (cause := first_cause(AFTER, p)) is not None:
        return Diagnosis(cause, passed, voice=voice)
    value = whole_cosine(p.as_it_is, p.exact) if "gradient" in passed else None
    return Diagnosis(None, passed, p.remarks(), voice=voice, restless=rest.closer, cosine=value)


def examine_alone(p: Examination, estimator: Estimator) -> Diagnosis:
    """What holds of the net whatever trains it, then how far the estimator's gradient is from the exact one."""
    diagnosis = examine(p, OF_NET)
    if not diagnosis.healthy:
        return diagnosis
    found = of_estimator(p, estimator)
    if isinstance(found, Finding):
        return replace(diagnosis, finding=found, remarks=())
    return replace(diagnosis, passed={**diagnosis.passed, "gradient": found}, remarks=())
