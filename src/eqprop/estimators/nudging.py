"""Nudging rules by name: how the second phase is made to differ from the first, and what that is biased by.

With F(beta) = min over s of E + beta l, the free energy of a net with the energy E, dF/dbeta at 0 is the loss at rest
and its derivative along theta the gradient. F is concave in beta, which gives the bounds that the rules name.
"""

from __future__ import annotations

from eqprop.estimators.base import Rule
from eqprop.estimators.named import ESTIMATORS

RULES: dict[str, Rule] = {}
for _form in ESTIMATORS.built_in.values():
    RULES |= getattr(_form.make, "rules", {})
