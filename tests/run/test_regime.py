"""How weights are moved: rates over time, decay of weights, clipping, smoothing, averaging; as torch has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.training_runs import SMALL, Asking, assert_same_bits, few_images, weights
from torch import Tensor

import eqprop
from eqprop import SquaredError
from eqprop.data import Images, one_hot
from eqprop.data.images import stacked_order
from eqprop.run import resume, train
from eqprop.run.checkpoint import read_checkpoint
from eqprop.run.evaluate import outside_top5
from eqprop.run.extras import Average
from eqprop.run.log import read_metrics
from eqprop.run.loop import Stopped
from eqprop.run.session import build_model, make_estimator
from eqprop.run.spec import Spec

LONG = SMALL.override(epochs=6, decay="cosine", decay_epochs=4, decay_floor=0.01, warmup=0.5)
EVERYTHING = SMALL.override(
    epochs=3,
    decay="cosine",
    decay_epochs=2,
    decay_floor=0.01,
    warmup=0.5,
    weight_decay=1e-3,
    weight_decay_kind="decoupled",
    weight_decay_biases=False,
    clip_norm=0.05,
    label_smoothing=0.1,
    average=0.9,
    optimizer_options={"momentum": 0.9, "nesterov": True},
)


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def by_hand(experiment: Spec, images: Images, epochs: int, averaged: bool = False) -> dict[str, Tensor]:
    """Weights of trial 0 after a loop written out with torch's own tools."""
    model, estimator = build_model(experiment, 0), make_estimator(experiment, "ep")
    named = dict(model.named_parameters())
    rates = experiment.rates(named, model.layer_parameters)
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": rates[name]} for name, p in named.items()], **experiment.optimizer.options
    )
    share = experiment.optimizer.label_smoothing
    y = one_hot(images.train_y, 10) * (1 - share) + share / 10
    per_epoch, seen = len(y) // experiment.optimizer.batch, []
    for epoch in range(epochs):
        for n, (rows,) in enumerate(stacked_order((experiment.run.seed,), epoch, len(y), experiment.optimizer.batch)):
            warm = (
                min((epoch * per_epoch + n + 1) / (experiment.optimizer.warmup * per_epoch), 1.0)
                if experiment.optimizer.warmup
                else 1.0
            )
            for group, first in zip(optimizer.param_groups, rates.values(), strict=True):
                down = 0.5 * (
                    1 + torch.cos(torch.tensor(min(epoch / experiment.optimizer.decay_epochs, 1.0) * torch.pi)).item()
                )
                group["lr"] = warm * (
                    experiment.optimizer.decay_floor + (first - experiment.optimizer.decay_floor) * down
                )
            _, gradient = estimator.gradient(model, SquaredError(), images.train_x[rows], y[rows])
            for p, value in gradient.items():
                p.grad = value
            if experiment.optimizer.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), experiment.optimizer.clip_norm)
            with torch.no_grad():
                for (name, p), group in zip(named.items(), optimizer.param_groups, strict=True):
                    if not (name.startswith("b") and not experiment.optimizer.weight_decay_biases):
                        p.mul_(1 - group["lr"] * experiment.optimizer.weight_decay)
            optimizer.step()
            seen.append({name: p.detach().clone() for name, p in named.items()})
    if not averaged:
        return {f"0.{name}": value for name, value in seen[-1].items()}
    factors = [experiment.optimizer.average ** (len(seen) - 1 - k) for k in range(len(seen))]
    return {
        f"0.{name}": sum(f * s[name] for f, s in zip(factors, seen, strict=True)) / sum(factors) for name in seen[0]
    }


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-4) -> None:
    start = dict(build_model(SMALL, 0).named_parameters())
    for name, value in expected.items():
        way = (value - start[name.removeprefix("0.")].detach()).norm()
        assert (found[name] - value).norm() < within * way, name


def test_rates_rise_fall_to_a_floor_and_stay(tmp_path: Path, images: Images) -> None:
    assert [LONG.optimizer.rate_in(epoch, 0.1) for epoch in range(6)] == pytest.approx(
        [0.1, 0.0868198, 0.055, 0.0231802, 0.01, 0.01], abs=1e-6
    )
    assert LONG.optimizer.rate_in(5, 0.001) == 0.001, "a rate below the floor stays"
    assert LONG.optimizer.rate_in(0, 0.1, warmth=0.25) == 0.025
    train(LONG, tmp_path / "run", data=images)
    assert_near(weights(tmp_path / "run"), by_hand(LONG, images, 6))
    train(LONG.override(warmup=0.0), tmp_path / "cold", data=images)
    with pytest.raises(AssertionError):
        assert_near(weights(tmp_path / "cold"), by_hand(LONG, images, 6), 1e-2)


def test_everything_together_is_what_torch_computes(tmp_path: Path, images: Images) -> None:
    train(EVERYTHING, tmp_path / "run", data=images)
    assert_near(weights(tmp_path / "run"), by_hand(EVERYTHING, images, 3), 1e-3)
    averaged = read_checkpoint(tmp_path / "run" / "ep").average
    assert_near(averaged, by_hand(EVERYTHING, images, 3, averaged=True), 1e-3)
    for name in ("weight_decay", "clip_norm", "label_smoothing"):
        other = EVERYTHING.override(**{name: 1e6 if name == "clip_norm" else 0.0})
        train(other, tmp_path / name, data=images)
        with pytest.raises(AssertionError):
            assert_near(weights(tmp_path / name), weights(tmp_path / "run"), 1e-3)


@pytest.mark.parametrize("trials", [1, 2])
def test_a_stopped_run_with_everything_resumes_bit_for_bit(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, trials: int
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(EVERYTHING, whole, data=images, trials=trials, engine="eager")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        train(EVERYTHING, stopped, data=images, trials=trials, engine="eager", watch=Asking(patch, 4))
    leg = next(stopped.glob("ep*")).name
    assert read_checkpoint(stopped / leg).position.iteration > 0
    resume(stopped, data=images)
    assert_same_bits(whole, stopped, (leg,))
    one, other = (read_checkpoint(folder / leg).average for folder in (whole, stopped))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_averaged_weights_are_what_is_evaluated_and_loaded(tmp_path: Path, images: Images) -> None:
    run = tmp_path / "run"
    train(EVERYTHING.override(average=0.98), run, data=images)
    saved = read_checkpoint(run / "ep")
    loaded = dict(eqprop.load(run).model.named_parameters())
    assert all(torch.equal(p, saved.average[f"0.{name}"]) for name, p in loaded.items())
    assert not torch.equal(saved.average["0.W01"], saved.weights["0.W01"])
    last = read_metrics(run)[-1]["test_error"]
    wrong = eqprop.predict(run, images.test_x) != images.test_y
    assert last == pytest.approx(100 * wrong.double().mean().item())
    assert eqprop.evaluate(run, data=images)["ep"][0]["test_error"] == last


def test_an_average_forgets_the_initial_weights_and_gives_them_back() -> None:
    p = torch.nn.Parameter(torch.full((3,), 5.0))
    average = Average([p], 0.5)
    for value in (1.0, 4.0):
        with torch.no_grad():
            p.fill_(value)
        average()
    with average.instead():
        assert p.tolist() == [3.0] * 3  # (0.5 * 1 + 4) / 1.5
    assert p.tolist() == [4.0] * 3


def test_top_five() -> None:
    outputs = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]).expand(6, 6)
    assert outside_top5(outputs, torch.arange(6)).tolist() == [False] * 5 + [True]
    silent = torch.zeros(7, 7)
    assert outside_top5(silent, torch.arange(7)).sum() == 2, "of equal outputs five come first"
    assert outside_top5(torch.full((1, 6), torch.nan), torch.tensor([0])).all()
    assert outside_top5(outputs[:1], torch.tensor([9])).all(), "a label without an output"
