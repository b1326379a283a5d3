"""Fast time loops behind one interface: `choose` takes the fastest that serves a task, or the one asked for."""

from eqprop.engines.base import Engine, Job, Runner, Tally, Task, choose, engine_names

__all__ = ["Engine", "Job", "Runner", "Tally", "Task", "choose", "engine_names"]
