"""Interchangeable gradient estimators for convergent RNNs: EP and its variants, BPTT and RBP."""

from eqprop.estimators.asymmetric import AsymEP, Dyadic, VectorField
from eqprop.estimators.base import Estimator, Grads, Processes, Step
from eqprop.estimators.bptt import BPTT, Backprop
from eqprop.estimators.continual import ContinualEP
from eqprop.estimators.coupled import CoupledLearning
from eqprop.estimators.ep import EP, Nudging, Signs, limit_steps, random_sign
from eqprop.estimators.holomorphic import HolomorphicEP
from eqprop.estimators.rbp import RBP, GrowingAdjointError

__all__ = [
    "BPTT",
    "EP",
    "RBP",
    "AsymEP",
    "Backprop",
    "ContinualEP",
    "CoupledLearning",
    "Dyadic",
    "Estimator",
    "Grads",
    "GrowingAdjointError",
    "HolomorphicEP",
    "Nudging",
    "Processes",
    "Signs",
    "Step",
    "VectorField",
    "limit_steps",
    "random_sign",
]
