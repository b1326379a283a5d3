"""Choosing hyper-parameters: the paper's recipe, and a wider search with Optuna. The test set is never looked at.

The search is in `eqprop.tuning.search`, which needs Optuna.
"""

from eqprop.tuning.recipe import Request, Tuned, tune
from eqprop.tuning.trainings import Machine

__all__ = ["Machine", "Request", "Tuned", "tune"]
