"""`bind`: what a spec says, built once; errors name the field that cannot be met."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import Asking, few_images

import eqprop
from eqprop.cost import SquaredError
from eqprop.engines.eager import Eager
from eqprop.models import Layered
from eqprop.run import Stopped, resume, train
from eqprop.run.session import Session, make_estimator

FEW: dict[str, Any] = {"samples": 60, "test_samples": 20, "sizes": [10, 8, 784], "T": 4, "K": 2, "threads": 1}


def own(seed: int = 0) -> Any:
    """An energy with four outputs, and three samples that show two of the classes."""
    W = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model = eqprop.from_energy(
        lambda x, s, th: (s[0] ** 2 / 2 - s[0] * (x @ th["W"].T)).sum(-1), {"W": W}, (4,), eps=0.5
    )
    return model, eqprop.SquaredError(), torch.rand(3, 6), torch.tensor([0, 1, 0])


def test_parts_are_built_once_and_handed_over() -> None:
    session = eqprop.bind("P-1h", engine="eager", **FEW)
    first = session.model, session.cost, session.estimator, session.optimizer, session.engine
    again = session.model, session.cost, session.estimator, session.optimizer, session.engine
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert {p for group in session.optimizer.param_groups for p in group["params"]} == set(session.model.parameters())
    assert eqprop.bind(session) is session
    taken = session.take(session.legs()[0])
    assert taken.model is first[0]
    assert session.model is not taken.model, "training changes what it took"
    assert all(torch.equal(a, b) for a, b in zip(session.model.parameters(), taken.model.parameters(), strict=True))


def test_a_problem_is_what_training_would_see() -> None:
    session = eqprop.bind("P-1h", engine="eager", **FEW)
    problem = session.problem()
    assert problem.model is session.model
    assert problem.cost is session.cost
    x, y = session.images.sample(20, seed=0)
    assert torch.equal(problem.x, x)
    assert torch.equal(problem.y.argmax(-1), y)
    assert len(session.problem(5).x) == 5


def test_your_own_samples_are_the_problem_in_their_order() -> None:
    session = eqprop.bind(own, seed=3, trains=False, dtype=torch.float64)
    problem, x = session.problem(), torch.empty(0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        x = own(3)[2]
    assert torch.equal(problem.x, x.double())
    assert problem.y.shape == (3, 4), "one column per output, though two classes are shown"
    assert next(problem.model.parameters()).dtype == torch.float64
    assert session.identity == "", "it is not to be trained"


def test_the_toy_brings_its_dummy_data() -> None:
    problem = eqprop.bind("toy", trains=False).problem()
    assert (problem.x.shape, problem.y.shape) == ((1, 10), (1, 5))
    assert not torch.equal(eqprop.bind("toy", trains=False, seed=1).problem().x, problem.x)


BAD = {
    "phases.T is -1": {"T": -1},
    "model: Unknown activation 'foo'": {"activation": "foo"},
    "optimizer: .*Unknown parameter 'W99'": {"rates": {"W99": 1.0}},
    "optimizer: The optimizer SGD does not take": {"optimizer_options": {"mom": 1}},
    "batch of 61 is too large": {"batch": 61},
    "'cuda-deep' cannot serve": {"engine": "cuda-deep"},
    "output_bias is 1.0": {"output_bias": 1.0, "cost": "cross-entropy"},
}


@pytest.mark.parametrize(("message", "options"), list(BAD.items()), ids=list(BAD))
def test_an_error_names_the_field(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        eqprop.bind("P-1h", **(FEW | options))


def test_a_bound_session_takes_no_more_options() -> None:
    session: Session = eqprop.bind("toy", trains=False)
    with pytest.raises(ValueError, match="already bound"):
        eqprop.bind(session, T=3)


PARTS: dict[str, type] = {"model": Layered, "cost": SquaredError, "optimizer": torch.optim.SGD}


@pytest.fixture
def constructions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each part was made, whoever made it."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return call

    for name, kind in PARTS.items():
        monkeypatch.setattr(kind, "__init__", counted(name, kind.__init__))
    # A runner takes an unchecked copy of its estimator, which is not made from the spec.
    monkeypatch.setattr("eqprop.run.session.make_estimator", counted("estimator", make_estimator))
    monkeypatch.setattr("eqprop.run.session.choose", lambda *given: counts.update(["engine"]) or Eager())
    return counts


ONCE = dict.fromkeys((*PARTS, "estimator", "engine"), 1)
OPTIONS: dict[str, Any] = {"sizes": [10, 8, 784], "T": 4, "K": 2, "threads": 1, "epochs": 2, "engine": "eager"}


def test_train_builds_every_part_once_per_leg(constructions: Counter[str], tmp_path: Path) -> None:
    train("P-1h", tmp_path / "one", data=few_images(60, 20), **OPTIONS)
    assert constructions == ONCE
    constructions.clear()
    train("P-1h", tmp_path / "two", data=few_images(60, 20), trials=2, stacked=False, **OPTIONS)
    assert constructions == dict.fromkeys(ONCE, 2)


def test_resume_builds_every_part_once(
    constructions: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        train("P-1h", tmp_path / "run", data=few_images(60, 20), watch=Asking(patch, 2), **OPTIONS)
    constructions.clear()
    resume(tmp_path / "run", data=few_images(60, 20))
    assert constructions == ONCE
    constructions.clear()
    resume(tmp_path / "run", data=few_images(60, 20))
    assert not constructions, "a finished run builds nothing"


def test_doctor_examines_what_train_would_build(constructions: Counter[str]) -> None:
    session = eqprop.bind("P-1h", few_images(60, 20), **OPTIONS)
    problem = session.problem()
    assert constructions == ONCE
    eqprop.doctor(problem.model, problem.cost, problem.x, problem.y, session.estimator, rates=session.optimizer)
    assert constructions["optimizer"] == constructions["cost"] == 1
