"""Epochs that change nothing: seen, not trained again, and told; only where nothing but weights decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, assert_same_bits, few_images, metrics, weights

from eqprop.data import Images
from eqprop.experiments.architecture import LayeredNet
from eqprop.run import Watch, resume, train
from eqprop.run.extras import make_optimizer
from eqprop.run.loop import Interruption, Stopped
from eqprop.run.plan import Settings, make_plan
from eqprop.run.trainer import Trainer

SILENT = replace(
    SMALL,
    architecture=LayeredNet((10, 24, 784), "energy-based", "sigmoid", eps=0.2, clip=True),
    output_bias=-5.0,
    epochs=6,
)
"""Outputs far below 0, where the clip holds them: no gradient by BPTT, and none by EP with this nudge."""


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


class Counting(Watch):
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.warnings: list[str] = []

    def epoch(self, lines: Any, progress: Any) -> None:
        self.epochs.append(lines[0]["epoch"])

    def warn(self, message: str) -> None:
        if "changed no weight" in message:
            self.warnings.append(message)


def trained(folder: Path, images: Images, experiment: Any = SILENT, **options: Any) -> Counting:
    watch = Counting()
    train(experiment, folder, data=images, watch=watch, **{"estimators": "bptt", **options})
    return watch


def without_rates(*given: Any) -> torch.optim.Optimizer:
    optimizer = make_optimizer(*given)
    # A resumed run has its rates from the checkpoint.
    optimizer.register_load_state_dict_post_hook(lambda o: [group.update(lr=0.0) for group in o.param_groups])
    return optimizer


def test_the_epochs_between_are_those_that_training_would_have_given(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = trained(tmp_path / "short", images, trials=2)
    assert watch.epochs == [1, 6]
    assert len(watch.warnings) == 1
    assert "bptt epoch 1 changed no weight" in watch.warnings[0]
    assert "up to 5 would do the same" in watch.warnings[0]
    monkeypatch.setattr(Trainer, "_only_weights_decide", property(lambda _: False))
    assert trained(tmp_path / "long", images, trials=2).epochs == [1, 2, 3, 4, 5, 6]
    short, long = metrics(tmp_path / "short"), metrics(tmp_path / "long")
    assert len(short) == 12
    for one, other in zip(short, long, strict=True):
        # The samples come in another order, and sums of floats with them.
        for name in ("loss", "residual_mean"):
            assert one.pop(name) == pytest.approx(other.pop(name), rel=1e-5), name
        assert (one.pop("repeated"), other.pop("repeated")) == (1 < one["epoch"] < 6, False)
        assert one == other
    assert [line["train_error_measured"] is not None for line in short] == [False] * 10 + [True] * 2
    for name, value in weights(tmp_path / "long", "bptt").items():
        assert value.equal(weights(tmp_path / "short", "bptt")[name])


def test_a_training_that_moves_is_trained_to_the_end(tmp_path: Path, images: Images) -> None:
    watch = trained(tmp_path / "alive", images, replace(SILENT, output_bias=0.1), epochs=4)
    assert watch.epochs == [1, 2, 3, 4]
    assert not watch.warnings


def test_one_trial_that_moves_keeps_all_of_them_going(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = type(SILENT).build

    def only_the_first_is_silent(experiment: Any, trial: int, *rest: Any) -> Any:
        return build(experiment if trial == 0 else replace(experiment, output_bias=0.1), trial, *rest)

    monkeypatch.setattr(type(SILENT), "build", only_the_first_is_silent)
    watch = trained(tmp_path / "run", images, trials=2, epochs=4)
    assert watch.epochs == [1, 2, 3, 4]
    lines = [line for line in metrics(tmp_path / "run") if line["trial"] == 0]
    assert len({line["test_error"] for line in lines}) == 1


@pytest.mark.parametrize(
    ("changes", "estimator"),
    [
        ({"optimizer_options": {"momentum": 0.9}}, "bptt"),
        ({"optimizer": "Adam"}, "bptt"),
        ({"start": "persistent"}, "bptt"),
        ({}, "ep-random-sign"),
        ({"batch": 150}, "bptt"),
        ({"decay": "cosine"}, "bptt"),
    ],
    ids=["momentum", "Adam", "persistent", "random-sign", "a part of the samples", "falling rates"],
)
def test_where_more_than_weights_decides_every_epoch_is_trained(
    tmp_path: Path, images: Images, changes: dict[str, Any], estimator: str
) -> None:
    experiment = replace(SILENT, epochs=4, **changes)
    assert trained(tmp_path / "run", images, experiment, estimators=estimator).epochs == [1, 2, 3, 4]


def test_train_errors_stand_where_they_are_due(tmp_path: Path, images: Images) -> None:
    watch = trained(tmp_path / "run", images, train_error_every=2)
    assert watch.epochs == [1, 2, 6]
    due = [line["train_error_measured"] is not None for line in metrics(tmp_path / "run")]
    assert due == [False, True, False, True, False, True]


@pytest.mark.parametrize(("epoch", "said"), [(5, "5 epochs"), (0, "0 epochs")], ids=["the last", "the first"])
def test_stopped_in_an_epoch_it_resumes_to_the_same_bits(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, epoch: int, said: str
) -> None:
    trained(tmp_path / "whole", images)

    class Asking(Counting):
        asked = False

        def progress(self, progress: Any) -> None:
            self.asked = progress.epoch == epoch

    watch = Asking()
    with monkeypatch.context() as patch:
        patch.setattr(Interruption, "requested", property(lambda _: watch.asked))
        with pytest.raises(Stopped, match=said):
            train(SILENT, tmp_path / "run", data=images, estimators="bptt", watch=watch)
    assert len(metrics(tmp_path / "run")) == epoch
    resume(tmp_path / "run", data=images)
    assert_same_bits(tmp_path / "whole", tmp_path / "run", ("bptt",))


def test_what_moved_before_a_stop_is_not_forgotten(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of 0 after the stop, so that only the iterations before it have moved a weight."""
    watch = Counting()
    asked = False

    class Asking(Counting):
        def progress(self, progress: Any) -> None:
            nonlocal asked
            asked = True

    with monkeypatch.context() as patch:
        patch.setattr(Interruption, "requested", property(lambda _: asked))
        with pytest.raises(Stopped, match="0 epochs"):
            train(replace(SILENT, output_bias=0.1), tmp_path / "run", data=images, estimators="bptt", watch=Asking())
    with monkeypatch.context() as patch:
        patch.setattr("eqprop.run.trainer.make_optimizer", without_rates)
        resume(tmp_path / "run", data=images, watch=watch)
    assert watch.epochs == [1, 2, 6]


def test_a_net_spoilt_after_skipped_epochs_is_said_to_diverge_in_the_last(images: Images) -> None:
    plan = make_plan(SILENT, Settings(("bptt",), engine="eager"), images)
    trainer = Trainer(plan, plan.legs()[0])
    trainer.advance(plan.iterations)
    assert [line["epoch"] for line in trainer.end_epoch(lambda: None)] == [1, 2, 3, 4, 5]
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    trainer.advance(plan.iterations)
    (line,) = trainer.end_epoch(lambda: None)
    assert line["epoch"] == line["diverged"]["epoch"] == 6
    assert line["diverged"]["iteration"] == 0
