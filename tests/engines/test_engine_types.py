"""An engine serves exact types with untouched methods: anything else is another model, which it would train wrongly."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch

from eqprop import EP, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines import Task, choose
from eqprop.engines.base import ENGINES, load_engine
from eqprop.models import Convolutional, Layered
from eqprop.state import State

WRITTEN_OUT = [name for name in ENGINES if load_engine(name).models]
OWN = {Layered: "cuda-deep", Convolutional: "cuda-conv"}
"""An engine for each class that is written out."""
HOOKS = ["squash", "project", "gradient", "contrast", "primitive", "drive", "step", "half_step", "init_state"]


def small(kind: type[Dynamics] = Layered) -> Any:
    if issubclass(kind, Convolutional):
        return kind(seed=0)
    return kind((3, 6, 4), seed=0)  # type: ignore[call-arg]


def refusals(model: Dynamics) -> dict[str, str | None]:
    """What every engine that has models written out says, the device aside."""
    task, out = Task(model, SquaredError(), EP(4, 2)), {}
    for name in WRITTEN_OUT:
        engine = load_engine(name)
        engine.device = ""
        out[name] = engine.refuses(task)
    return out


def untouched(kind: type[Dynamics]) -> Any:
    return small(kind)


def subclass(kind: type[Dynamics], hook: str) -> Any:
    def own(self: Any, *given: Any) -> Any:
        return getattr(kind, hook)(self, *given)

    # A primitive alone is refused at subclassing; with its formulas it is a model of its own.
    hooks = (hook, "gradient", "contrast") if hook == "primitive" else (hook,)
    with pytest.warns(UserWarning, match=f"{kind.__name__} is final"):
        return small(type("Own", (kind,), dict.fromkeys(hooks, own)))


def patched_object(kind: type[Dynamics], hook: str) -> Any:
    model = small(kind)
    setattr(model, hook, MethodType(lambda self, *given: getattr(kind, hook)(self, *given), model))
    return model


@pytest.mark.parametrize("kind", [Layered, Convolutional])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("touch", [subclass, patched_object])
def test_a_model_with_a_hook_of_its_own_is_served_by_no_engine_that_has_models_written_out(
    kind: type[Dynamics], hook: str, touch: Callable[..., Any]
) -> None:
    model = touch(kind, hook)
    for name, reason in refusals(model).items():
        assert reason is not None, f"{name} would run {kind.__name__} in the place of a model with its own {hook}"
    reason = str(refusals(model)[OWN[kind]])
    assert hook in reason or "Own" in reason
    assert not choose("auto", Task(model, SquaredError(), EP(4, 2))).models


@pytest.mark.parametrize("hook", HOOKS)
def test_a_patched_class_is_refused_while_it_is_patched(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    before = refusals(model)["cuda-deep"]
    original = getattr(Layered, hook)
    with monkeypatch.context() as patch:
        patch.setattr(Layered, hook, lambda self, *given: original(self, *given))
        assert hook in str(refusals(model)["cuda-deep"])
    assert refusals(model)["cuda-deep"] == before


def test_a_subclass_with_its_own_squash_is_trained_as_what_it_is() -> None:
    """The weights of the subclass, not those of its base, byte for byte."""

    def squared(self: Layered, s: State) -> State:
        return tuple(torch.sigmoid(layer).square() for layer in s)

    with pytest.warns(UserWarning, match="Layered is final.*Squared runs on the eager engine"):
        own = small(type("Squared", (Layered,), {"squash": squared}))
    base = small()
    x, y = torch.rand(5, 4), torch.rand(5, 3)
    for model in (own, base):
        engine = choose("auto", Task(model, SquaredError(), EP(6, 3)))
        estimator = EP(6, 3)
        free = estimator.backward(model, SquaredError(), x, y)
        assert torch.allclose(engine.relaxation(model, x, estimator.free_phase()).state[0], free.state[0], atol=1e-6)
    assert not torch.allclose(own.W01.grad, base.W01.grad, atol=1e-4)
