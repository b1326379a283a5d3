"""A runner that takes changed rates goes on as a new one would, on every GPU engine."""

from __future__ import annotations

import pytest
import torch
from helpers.training_runs import SMALL, few_images
from torch import Tensor

from eqprop import SquaredError
from eqprop.data import Images, one_hot
from eqprop.engines import Job, Task, choose
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.run.extras import make_optimizer
from eqprop.run.session import build_model, make_estimator
from eqprop.run.spec import Spec

FALLING = SMALL.override(decay="cosine", epochs=4)


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


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
