"""Learning rates that fall over the epochs: as torch's scheduler has them, on every engine, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, assert_same_bits, few_images, metrics, weights
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from eqprop import SquaredError
from eqprop.data import Images, one_hot
from eqprop.data.images import stacked_order
from eqprop.engines import Job, Task, choose
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.run import Watch, resume, train
from eqprop.run.extras import make_optimizer
from eqprop.run.loop import Interruption, Stopped
from eqprop.run.session import build_model, make_estimator
from eqprop.run.spec import Spec

FALLING = SMALL.override(decay="cosine", epochs=4)


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def by_torch(experiment: Spec, images: Images) -> dict[str, Tensor]:
    """The weights of trial 0 after a loop of one's own, with torch's optimizer and scheduler."""
    model, estimator = build_model(experiment, 0), make_estimator(experiment, "ep")
    optimizer = make_optimizer(experiment, model)
    scheduler = CosineAnnealingLR(optimizer, T_max=experiment.optimizer.epochs)
    y = one_hot(images.train_y, 10)
    for epoch in range(experiment.optimizer.epochs):
        for (rows,) in stacked_order((experiment.run.seed,), epoch, len(y), experiment.optimizer.batch):
            _, gradient = estimator.gradient(model, SquaredError(), images.train_x[rows], y[rows])
            for p, value in gradient.items():
                p.grad = value
            optimizer.step()
        scheduler.step()
    return {f"0.{name}": p.detach() for name, p in model.named_parameters()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], experiment: Spec, within: float) -> None:
    """As shares of how far the weights have come."""
    start = dict(build_model(experiment, 0).named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        way = (value - start[name.removeprefix("0.")].detach()).norm()
        assert (found[name] - value).norm() < within * way, name


@pytest.mark.parametrize("engine", ["eager", "xla"])
def test_the_rates_are_those_of_torchs_scheduler(tmp_path: Path, images: Images, engine: str) -> None:
    train(FALLING, tmp_path / "run", data=images, engine=engine)
    expected = by_torch(FALLING, images)
    assert_near(weights(tmp_path / "run", "ep"), expected, FALLING, 1e-4)
    train(FALLING.override(decay="none"), tmp_path / "constant", data=images, engine=engine)
    with pytest.raises(AssertionError):
        assert_near(weights(tmp_path / "constant", "ep"), expected, FALLING, 1e-1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experiment", "engine"),
    [
        (FALLING, "cuda-one-hidden"),
        (FALLING, "cuda-graph"),
        (FALLING.override(model=LayeredNet((10, 24, 32, 784)), init="default"), "cuda-deep"),
        (FALLING.override(model=ConvolutionalNet(), init="default"), "cuda-conv"),
    ],
    ids=["one hidden", "graph", "deep", "convolutional"],
)
def test_a_runner_that_takes_rates_goes_on_as_a_new_one_would(images: Images, experiment: Spec, engine: str) -> None:
    experiment = experiment.override(rates={"*": 0.01})
    x, labels = images.train_x.cuda(), images.train_y.cuda()
    order = torch.arange(len(x), device="cuda").view(-1, experiment.optimizer.batch)

    def trained(how: str) -> list[Tensor]:
        model, cost, estimator = build_model(experiment, 0).cuda(), SquaredError(), make_estimator(experiment, "ep")
        optimizer = make_optimizer(experiment, model)
        inputs = x if model.input_shape is None else x.view(len(x), *model.input_shape)
        job = Job(model, cost, estimator, optimizer, inputs, one_hot(labels, 10), labels)
        runner = choose(engine, Task(model, cost, estimator, optimizer)).runner(job)
        runner.run(order[:10])
        for group in optimizer.param_groups:
            group["lr"] *= 0.25
        if how == "new":
            runner = choose(engine, Task(model, cost, estimator, optimizer)).runner(job)
        elif how == "taken":
            runner.take_rates()
        runner.run(order[10:])
        return [p.detach().clone() for p in model.parameters()]

    new, taken, kept = (trained(how) for how in ("new", "taken", "kept"))
    assert all(torch.equal(a, b) for a, b in zip(taken, new, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(kept, new, strict=True))


@pytest.mark.parametrize("when", [(1, 10), (2, 0)], ids=["in an epoch", "between two"])
def test_stopped_it_resumes_to_the_same_bits(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, when: tuple[int, int]
) -> None:
    train(FALLING, tmp_path / "whole", data=images, trials=2)

    class Asking(Watch):
        asked = False

        def progress(self, progress: Any) -> None:
            self.asked = (progress.epoch, progress.iteration) >= when

    watch = Asking()
    with monkeypatch.context() as patch:
        patch.setattr(Interruption, "requested", property(lambda _: watch.asked))
        with pytest.raises(Stopped):
            train(FALLING, tmp_path / "run", data=images, trials=2, watch=watch)
    assert 0 < len(metrics(tmp_path / "run")) < 8
    resume(tmp_path / "run", data=images)
    assert_same_bits(tmp_path / "whole", tmp_path / "run", ("ep",))


def test_a_factor_stands_for_every_epoch() -> None:
    assert [SMALL.optimizer.rate_factor(epoch) for epoch in range(3)] == [1.0, 1.0, 1.0]
    assert [FALLING.optimizer.rate_factor(epoch) for epoch in range(4)] == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447], abs=1e-6
    )


def test_a_decay_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown optimizer.decay 'cosin'; expected one of none, cosine"):
        SMALL.override(decay="cosin")
    with pytest.raises(
        ValueError, match="decay is cosine, but continual EP moves the parameters itself at constant rates"
    ):
        FALLING.override(estimator="ep-continual")
