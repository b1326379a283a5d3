"""Interchangeable gradients of a convergent RNN: EP, BPTT and RBP."""

from eqprop.estimators.base import Estimator, Processes, Step
from eqprop.estimators.bptt import BPTT
from eqprop.estimators.ep import EP, limit_steps
from eqprop.estimators.rbp import RBP, GrowingAdjointError

__all__ = ["BPTT", "EP", "RBP", "Estimator", "GrowingAdjointError", "Processes", "Step", "limit_steps"]
