"""Check the GDU property: does EP compute the gradient of this model, and if not, why?  [thm:main]

GDU ("gradient-descending updates"): EP's updates equal minus BPTT's gradients, step by step.
`compare(model, cost, x, y, T=, K=, beta=)` runs EP and BPTT side by side and returns a `Report`;
`compare_gradients(estimator, model, cost, x, y)` takes any estimator, your own too;
`compare_nudging(model, cost, x, y)` sets the nudging rules side by side.
"""

from eqprop.gdu.comparison import Options, Report, compare
from eqprop.gdu.gradients import Gradients, compare_gradients
from eqprop.gdu.metrics import AUTHORS, PAPER, Convention, Metrics
from eqprop.gdu.nudging import NudgingTable, compare_nudging
from eqprop.gdu.settling import NeverSettlesError

__all__ = [
    "AUTHORS",
    "PAPER",
    "Convention",
    "Gradients",
    "Metrics",
    "NeverSettlesError",
    "NudgingTable",
    "Options",
    "Report",
    "compare",
    "compare_gradients",
    "compare_nudging",
]
