"""Nudging rules by name: how the second phase is made to differ from the first, and what that is biased by.

With F(beta) = min over s of E + beta l, the free energy of a net with the energy E, dF/dbeta at 0 is the loss at rest
and its derivative along theta the gradient. F is concave in beta, which gives the bounds below.
"""

from __future__ import annotations

from collections.abc import Callable

from eqprop.estimators.base import Estimator
from eqprop.estimators.coupled import CoupledLearning
from eqprop.estimators.ep import EP
from eqprop.estimators.holomorphic import HolomorphicEP

Rule = Callable[[int, int, float], Estimator]
"""T, K, beta -> an estimator."""


def positive(T: int, K: int, beta: float) -> Estimator:
    """Towards the target: exactly the gradient of (F(beta) - F(0)) / beta, a lower bound of the loss.

    Biased by order beta. It may reach the bound without lowering the loss, as the nudged state does part of the work.
    """
    return EP(T, K, beta=beta)


def negative(T: int, K: int, beta: float) -> Estimator:
    """Away from the target: exactly the gradient of (F(0) - F(-beta)) / beta, an upper bound of the loss.

    Biased by order beta. To lower an upper bound lowers the loss; from some beta on the phase no longer settles.
    """
    return EP(T, K, beta=-beta)


def centered(T: int, K: int, beta: float) -> Estimator:
    """Both: exactly the gradient of (F(beta) - F(-beta)) / (2 beta), between the two bounds.

    Biased by order beta^2, and what an unsettled state would have done anyway cancels; two second phases.
    """
    return EP(T, K, beta=beta, nudging="symmetric")


def random_sign(T: int, K: int, beta: float) -> Estimator:
    """Positive or negative by a coin: one draw is biased by order beta, their mean is the centered one.

    One second phase, at the price of noise of order beta between draws.
    """
    return EP(T, K, beta=beta, nudging="random-sign")


def holomorphic(T: int, K: int, beta: float) -> Estimator:
    """At four points on a circle in the complex plane: biased by order beta^4; the model must be analytic."""
    return HolomorphicEP(T, K, beta=beta, points=4)


def clamped(T: int, K: int, beta: float) -> Estimator:
    """The output held at (1 - beta) s0* + beta y: coupled learning, which at no beta is the gradient of the loss.

    As beta -> 0 it is the gradient of another loss, 1/2 (y - s0)^T H (y - s0) with H fixed: see `CoupledLearning`.
    """
    return CoupledLearning(T, K, beta=beta)


def contrastive(T: int, K: int, beta: float) -> Estimator:
    """The output held at y: contrastive learning, coupled learning at beta = 1, whatever beta is given."""
    return CoupledLearning(T, K, beta=1.0)


RULES: dict[str, Rule] = {
    "positive": positive,
    "negative": negative,
    "centered": centered,
    "random-sign": random_sign,
    "holomorphic": holomorphic,
    "clamped": clamped,
    "contrastive": contrastive,
}
