"""eqprop: equilibrium propagation, backprop through time and recurrent backprop for convergent RNNs."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # Threads of torch that wait for each other soon sleep. Spinning, two of them take many times as long as one where
    # another program shares their cores. OpenMP reads it when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from eqprop import data, engines, gdu, models, starts
from eqprop.cost import Cost, FunctionCost, Nudge, SquaredError
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Estimator,
    GrowingAdjointError,
    HolomorphicEP,
    Processes,
    limit_steps,
    random_sign,
)
from eqprop.functional import from_energy, from_primitive, from_transition
from eqprop.models import CrossEntropy
from eqprop.plugins import register
from eqprop.provenance import __version__
from eqprop.relax import NotFiniteError, Phase, Relaxation, relax
from eqprop.state import State

if TYPE_CHECKING:
    from eqprop import report
    from eqprop.gdu.doctor import doctor
    from eqprop.run import EarlyStopping, Watch, evaluate, load, predict, resume, train
    from eqprop.run import distributed as distributed

_OF_TRAINING = ("EarlyStopping", "Watch", "evaluate", "load", "predict", "resume", "train")
_ROOMS = {"report": "eqprop.report", "distributed": "eqprop.run.distributed"}
_LATER = {"doctor": "eqprop.gdu.doctor", **dict.fromkeys(_OF_TRAINING, "eqprop.run")}


def __getattr__(name: str) -> Any:
    """Training and the doctor are imported when first asked for: the mathematics does without."""
    if name in _ROOMS:
        return importlib.import_module(_ROOMS[name])
    if name not in _LATER:
        raise AttributeError(f"module 'eqprop' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


__all__ = [
    "BPTT",
    "EP",
    "RBP",
    "ContinualEP",
    "Cost",
    "CrossEntropy",
    "Dynamics",
    "EarlyStopping",
    "Estimator",
    "FunctionCost",
    "GrowingAdjointError",
    "HolomorphicEP",
    "NotFiniteError",
    "Nudge",
    "Phase",
    "PrimitiveDynamics",
    "Processes",
    "Relaxation",
    "SquaredError",
    "State",
    "Watch",
    "__version__",
    "data",
    "distributed",
    "doctor",
    "evaluate",
    "from_energy",
    "from_primitive",
    "from_transition",
    "gdu",
    "limit_steps",
    "load",
    "models",
    "predict",
    "random_sign",
    "register",
    "relax",
    "report",
    "resume",
    "starts",
    "train",
]
