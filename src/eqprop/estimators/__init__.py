"""Interchangeable gradient estimators for convergent RNNs: EP and its variants, BPTT and RBP."""

from eqprop.estimators.base import Estimator, Processes, Step
from eqprop.estimators.bptt import BPTT
from eqprop.estimators.continual import ContinualEP
from eqprop.estimators.ep import EP, Nudging, Signs, random_sign
from eqprop.estimators.holomorphic import HolomorphicEP
from eqprop.estimators.limit import limit_steps
from eqprop.estimators.rbp import RBP, GrowingAdjointError

__all__ = [
    "BPTT",
    "EP",
    "RBP",
    "ContinualEP",
    "Estimator",
    "GrowingAdjointError",
    "HolomorphicEP",
    "Nudging",
    "Processes",
    "Signs",
    "Step",
    "limit_steps",
    "random_sign",
]
