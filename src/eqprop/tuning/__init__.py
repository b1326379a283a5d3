"""Choose hyper-parameters: the paper's recipe, or a wider search with Optuna. Neither uses the test set.

The search lives in `eqprop.tuning.search` and needs Optuna.
"""

from eqprop.tuning.recipe import TuningResult, tune

__all__ = ["TuningResult", "tune"]
