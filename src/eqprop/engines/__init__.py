"""Fast time loops behind one interface: `choose` picks the fastest engine that supports a task, or a named one."""

from eqprop.engines.backend import use
from eqprop.engines.base import (
    ENGINES,
    EXCHANGE,
    STEERED,
    STREAMED,
    Batch,
    Engine,
    Job,
    Runner,
    Tally,
    Task,
    choose,
    engine_names,
    load_engine,
)
from eqprop.relax import threads_for, using_threads

__all__ = [
    "ENGINES",
    "EXCHANGE",
    "STEERED",
    "STREAMED",
    "Batch",
    "Engine",
    "Job",
    "Runner",
    "Tally",
    "Task",
    "choose",
    "engine_names",
    "load_engine",
    "threads_for",
    "use",
    "using_threads",
]
