"""Shared set-up: property tests draw the same examples every time and are not timed one by one; long tests say so."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["helpers.long_tests"]

settings.register_profile(
    "eqprop", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("eqprop")

# The nets here are tiny: a second thread costs far more in waiting than it gives, above all on a busy machine.
torch.set_num_threads(1)
