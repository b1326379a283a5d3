"""When a training run points to the doctor, and when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import few_images

from eqprop import train
from eqprop.models.layered import LayeredNet
from eqprop.run.spec import Spec
from eqprop.run.watch import Course, Watch


def line(epoch: int, loss: float, error: float, **other: Any) -> dict[str, Any]:
    return {
        "estimator": "ep",
        "epoch": epoch,
        "loss": loss,
        "train_error": error,
        "residual_mean": 1e-4,
        "unsettled": 0.1,
        **other,
    }


def course(*lines: dict[str, Any], iterations: int = 1000, moved: float | None = 0.01) -> Course:
    return Course(lines, iterations, 90.0, moved)


HEALTHY = {
    "falling": course(line(1, 0.3, 30.0), line(2, 0.2, 20.0), line(3, 0.1, 10.0)),
    "good from the start": course(line(1, 0.01, 1.0), line(2, 0.01, 1.0), line(3, 0.01, 1.0)),
    "first epoch away from rest": course(line(1, 0.3, 30.0, residual_mean=0.01)),
    "BPTT does not mind": course(line(1, 0.3, 30.0), line(2, 0.2, 20.0, estimator="bptt", residual_mean=0.01)),
    "few iterations": course(line(1, 0.5, 89.0), iterations=20),
}
AILING = {
    "away from rest": (course(line(1, 0.3, 30.0), line(2, 0.2, 20.0, residual_mean=0.01)), "away from rest"),
    "not falling": (course(line(1, 0.3, 30.0), line(2, 0.3, 30.0), line(3, 0.31, 30.0)), "has not fallen"),
    "by chance": (course(line(1, 0.5, 90.2)), "as by chance"),
    "standing still": (course(line(1, 0.5, 60.0), moved=1e-9), "moved the weights by only 1.0e-09"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_course_raises_no_concern(name: str) -> None:
    assert HEALTHY[name].concern() is None


@pytest.mark.parametrize("name", AILING)
def test_a_course_that_goes_wrong_is_noticed(name: str) -> None:
    found, words = AILING[name]
    assert words in (found.concern() or "")


class Warnings(Watch):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, message: str) -> None:
        self.texts.append(message)


def test_the_demo_warns_of_nothing(tmp_path: Path) -> None:
    """P-1h by EP and BPTT at the paper's settings, as `eqprop demo` trains it, on fewer images."""
    watch = Warnings()
    train("P-1h", tmp_path / "run", data=few_images(600, 50), estimators="ep,bptt", epochs=3, watch=watch)
    assert watch.texts == []


def test_rates_that_move_nothing_point_to_the_doctor(tmp_path: Path) -> None:
    watch = Warnings()
    options = {"rates": {"*": 1e-9}, "estimators": "ep", "batch": 2, "epochs": 2}
    train("P-1h", tmp_path / "run", data=few_images(200, 50), watch=watch, **options)
    (text,) = watch.texts
    assert "moved the weights by only" in text
    assert "eqprop doctor" in text


def test_targets_are_not_called_wrong_answers(tmp_path: Path) -> None:
    """One output: by chance the variance that is left is all of it, not none of it."""
    x = torch.rand(600, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].mean(1, keepdim=True)
    net = LayeredNet((1, 20, 8), activation="hard-sigmoid")
    experiment = Spec.of(
        "tiny", model=net, optimizer="SGD", estimator="ep", T=15, K=8, beta=0.3, epochs=5, rates={"*": 0.2}, batch=4
    )
    watch = Warnings()
    result = train(experiment, tmp_path / "run", data=(x[:500], y[:500], x[500:], y[500:]), watch=watch)
    assert result.test_error("ep") < 50.0
    assert watch.texts == []


def test_targets_that_are_not_learnt_are_named_by_their_variance() -> None:
    found = Course([line(1, 0.5, 99.0)], 1000, 100.0, 0.01, labelled=False).concern()
    assert found == "after 1000 iterations 99 % of the variance of the targets is left, as by their mean"
