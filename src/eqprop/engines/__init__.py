"""Fast time loops behind one interface: `choose` picks the fastest engine that supports a task, or a named one."""

from eqprop.engines.base import (
    ENGINES,
    Engine,
    Job,
    Runner,
    Tally,
    Task,
    choose,
    engine_names,
)
from eqprop.relax import threads_for, using_threads

__all__ = [
    "ENGINES",
    "Engine",
    "Job",
    "Runner",
    "Tally",
    "Task",
    "choose",
    "engine_names",
    "threads_for",
    "using_threads",
]
