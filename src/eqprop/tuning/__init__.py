"""Choosing hyper-parameters: the paper's recipe, and a wider search with Optuna. The test set is never looked at.

The search is in `eqprop.tuning.search`, which needs Optuna.
"""

from eqprop.tuning.effort import Machine
from eqprop.tuning.recipe import Request, Tuned, tune

__all__ = ["Machine", "Request", "Tuned", "tune"]
