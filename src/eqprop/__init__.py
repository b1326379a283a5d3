"""eqprop: equilibrium propagation, backprop through time and recurrent backprop for convergent RNNs."""

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # Threads of torch that wait for each other soon sleep. Spinning, two of them take many times as long as one where
    # another program shares their cores. OpenMP reads it when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from eqprop import data, engines, gdu, models, papers, physical, report, starts, zoo
    from eqprop.classifier import EqPropClassifier
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
    from eqprop.gdu.beta import best_beta
    from eqprop.gdu.control import keep_at_rest
    from eqprop.gdu.doctor import doctor
    from eqprop.gdu.stability import stability
    from eqprop.models import CrossEntropy
    from eqprop.optimizers import Lion
    from eqprop.plugins import register
    from eqprop.provenance import __version__
    from eqprop.relax import NotFiniteError, Phase, Relaxation, relax
    from eqprop.run import EarlyStopping, Session, Spec, Watch, bind, resume, train
    from eqprop.run import distributed as distributed
    from eqprop.run.evaluate import evaluate, load, predict
    from eqprop.run.sweep import sweep
    from eqprop.state import State

_MODULES = {
    "distributed": "eqprop.run.distributed",
    "spice": "eqprop.physical.spice",
} | {
    name: f"eqprop.{name}"
    for name in ("data", "engines", "gdu", "models", "papers", "physical", "report", "starts", "zoo")
}
_NAMES = {
    "classifier": ("EqPropClassifier",),
    "cost": ("Cost", "FunctionCost", "Nudge", "SquaredError"),
    "dynamics": ("Dynamics", "PrimitiveDynamics"),
    "estimators": (
        *("BPTT", "EP", "RBP", "ContinualEP", "Estimator", "GrowingAdjointError", "HolomorphicEP", "Processes"),
        *("limit_steps", "random_sign"),
    ),
    "functional": ("from_energy", "from_primitive", "from_transition"),
    "gdu.beta": ("best_beta",),
    "gdu.control": ("keep_at_rest",),
    "gdu.doctor": ("doctor",),
    "gdu.stability": ("stability",),
    "models": ("CrossEntropy",),
    "optimizers": ("Lion",),
    "plugins": ("register",),
    "provenance": ("__version__",),
    "relax": ("NotFiniteError", "Phase", "Relaxation", "relax"),
    "run": ("EarlyStopping", "Session", "Spec", "Watch", "bind", "evaluate", "load", "predict", "resume", "train"),
    "run.sweep": ("sweep",),
    "state": ("State",),
}
_HOMES = {name: f"eqprop.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and torch with it, so that `eqprop --help` waits for neither."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'eqprop' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        """Keep the function `relax` where importing its module, of the same name, would replace it."""
        super().__setattr__(name, value.relax if name == "relax" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package


__all__ = [
    "BPTT",
    "EP",
    "RBP",
    "ContinualEP",
    "Cost",
    "CrossEntropy",
    "Dynamics",
    "EarlyStopping",
    "EqPropClassifier",
    "Estimator",
    "FunctionCost",
    "GrowingAdjointError",
    "HolomorphicEP",
    "Lion",
    "NotFiniteError",
    "Nudge",
    "Phase",
    "PrimitiveDynamics",
    "Processes",
    "Relaxation",
    "Session",
    "Spec",
    "SquaredError",
    "State",
    "Watch",
    "__version__",
    "best_beta",
    "bind",
    "data",
    "distributed",
    "doctor",
    "engines",
    "evaluate",
    "from_energy",
    "from_primitive",
    "from_transition",
    "gdu",
    "keep_at_rest",
    "limit_steps",
    "load",
    "models",
    "papers",
    "predict",
    "random_sign",
    "register",
    "relax",
    "report",
    "resume",
    "stability",
    "starts",
    "sweep",
    "train",
    "zoo",
]
