"""Engines that leave the products to torch switch TF32 off while they run, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eqprop.engines.cuda.conv import ConvEngine
from eqprop.engines.cuda.graph import CapturedEngine
from eqprop.engines.eager import Eager, EagerRunner
from eqprop.models import Layered
from eqprop.relax import Phase


def allowed() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(autouse=True)
def as_torch_begins() -> Any:
    before = allowed()
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


with pytest.warns(UserWarning, match="Layered is final"):

    class Looks(Layered):
        """Notes what torch may do whenever it is asked for a drive."""

        def drive(self, x: torch.Tensor) -> Any:
            self.seen.add(allowed())
            return super().drive(x)


@pytest.mark.parametrize("engine", [Eager(), CapturedEngine(), ConvEngine()])
def test_relaxation_is_in_float32(engine: Any) -> None:
    model = Looks((3, 5, 4))
    model.seen = set()
    engine.relaxation(model, torch.rand(2, 4), Phase(3))
    assert model.seen == {(False, False)}
    assert torch.backends.cudnn.allow_tf32


def test_iterations_are_in_float32_also_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def broken(self: EagerRunner, batch: object, signs: torch.Tensor | None = None) -> None:
        seen.append(allowed())
        raise RuntimeError("no iteration today.")

    monkeypatch.setattr(EagerRunner, "iterate", broken)
    runner = EagerRunner.__new__(EagerRunner)
    runner.next_signs = lambda n: None  # type: ignore[method-assign]
    runner.job = SimpleNamespace(stream=lambda order: iter(order))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="today"):
        runner.run(torch.zeros(1, 2, dtype=torch.int64))
    assert seen == [(False, False)]
    assert torch.backends.cudnn.allow_tf32
