"""Interchangeable gradient estimators for convergent RNNs: EP and its variants, BPTT and RBP."""

from eqprop.estimators.base import Estimator, Grads, Processes, Step
from eqprop.estimators.bptt import BPTT, Backprop
from eqprop.estimators.continual import ContinualEP
from eqprop.estimators.ep import EP, Nudging, Signs, limit_steps, random_sign
from eqprop.estimators.holomorphic import HolomorphicEP
from eqprop.estimators.rbp import RBP, GrowingAdjointError

__all__ = [
    "BPTT",
    "EP",
    "RBP",
    "Backprop",
    "ContinualEP",
    "Estimator",
    "Grads",
    "GrowingAdjointError",
    "HolomorphicEP",
    "Nudging",
    "Processes",
    "Signs",
    "Step",
    "limit_steps",
    "random_sign",
]
