"""Which engine computes the gradient of a call of `Estimator.backward`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

from eqprop.cost import Problem
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine, Task, choose, engine_names
from eqprop.estimators import Estimator, Grads
from eqprop.messages import unknown
from eqprop.relax import Relaxation
from eqprop.state import State

_NAME: ContextVar[str] = ContextVar("engine", default="auto")


@contextmanager
def use(name: str) -> Iterator[None]:
    """Let `backward` compute by the engine of this name within the block: `with eqprop.engines.use("eager"): ...`.

    name    one of `engine_names()`; "auto" is the fastest that serves, as without this
    """
    if name not in engine_names():
        raise ValueError(unknown("engine", name, engine_names()))
    token = _NAME.set(name)
    try:
        yield
    finally:
        _NAME.reset(token)


class Engines:
    """Chooses once per model and kind of estimator, and remembers it as long as the model lives.

    What makes an engine serve a model no more, or again (it is cast, edited, patched, hooked), it sees itself at each
    call; the choice depends on the device alone.
    """

    def __init__(self) -> None:
        self._chosen: WeakKeyDictionary[Dynamics, dict[object, Engine]] = WeakKeyDictionary()

    def gradient(
        self, estimator: Estimator, problem: Problem, state: State | None, engine: str | None
    ) -> tuple[Relaxation, Grads]:
        """As `Estimator.gradient`."""
        model, x, y = problem.model, problem.x, problem.y
        if type(estimator).gradient is not Estimator.gradient:  # from outside, with a gradient of its own
            return estimator.gradient(model, problem.cost, x, y, state)
        start = estimator.begin(problem, state)
        task = Task(model, problem.cost, estimator.for_call(model))
        return self._engine(engine or _NAME.get(), task, x.device.type).gradient(task, x, y, start)

    def _engine(self, name: str, task: Task, device: str) -> Engine:
        chosen = self._chosen.get(task.model)
        if chosen is None:
            chosen = self._chosen[task.model] = {}
        estimator = task.estimator
        key = name, device, type(estimator), *(getattr(estimator, part, None) for part in ("form", "held"))
        if key not in chosen:
            chosen[key] = choose(name, task, gradient=True)
        return chosen[key]


BACKEND = Engines()
"""What `Estimator.backward` asks."""
