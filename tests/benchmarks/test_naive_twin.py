"""The naive twin, the yardstick of every engine, is the library: states and updated weights, in float64."""

from __future__ import annotations

import msgspec
import pytest
import torch
from helpers.bench_experiments import EXPERIMENTS, brief, shrunk
from torch import Tensor

from benchmarks.cases import Case, weights
from benchmarks.naive import free_phase, train_step
from eqprop import SquaredError, papers
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.relax import Phase, relax
from eqprop.run.session import build_model
from eqprop.run.spec import Spec


def against_library(experiment: Spec, method: str, iterations: int, x: Tensor, y: Tensor) -> None:
    """States and weights after a few iterations of the twin and of the library, in float64."""
    case = Case(experiment, method)
    model = build_model(experiment, 0, torch.float64)
    theta = weights(model, torch.float64)
    recipe, optimizer = case.recipe(), case.optimizer(model)
    x = x.view(-1, *(model.input_shape or ()))
    for rows in torch.arange(len(x)).view(iterations, -1):
        phase = Phase(experiment.phases.T, experiment.phases.schedule)
        ours = relax(model, x[rows], phase).state
        for twin, layer in zip(free_phase(recipe, theta, x[rows], experiment.phases.T), ours, strict=True):
            torch.testing.assert_close(twin, layer, rtol=1e-9, atol=1e-11)
        before = weights(model, torch.float64)
        optimizer.zero_grad()
        case.estimator().backward(model, SquaredError(), x[rows], y[rows])
        optimizer.step()
        train_step(recipe, theta, x[rows], y[rows])
        for name, p in model.named_parameters():
            scale = float((p.detach() - before[name]).norm())
            assert float((theta[name] - p.detach()).norm()) <= 1e-8 * scale + 1e-14, name
            assert scale > 0.0, f"{name} did not move: the comparison says nothing"


def inputs(samples: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.rand(samples, 784, generator=source, dtype=torch.float64)
    y = torch.eye(10, dtype=torch.float64)[torch.randint(10, (samples,), generator=source)]
    return x * (x > 0.7), y


@pytest.mark.parametrize("method", ["ep", "bptt"])
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda r: r.name)
def test_the_twin_is_the_library_with_every_step_of_the_experiment(experiment: Spec, method: str) -> None:
    small = shrunk(experiment, init="default") if experiment.name == "P-conv" else shrunk(experiment)
    against_library(small, method, 2, *inputs(6))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda r: r.name)
def test_the_twin_is_the_library_at_full_size(experiment: Spec) -> None:
    against_library(experiment.override(T=8, K=5, init="default"), "ep", 1, *inputs(3))
    against_library(experiment.override(T=8, K=5, init="default"), "bptt", 1, *inputs(3))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ep", "bptt"])
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda r: r.name)
def test_the_twin_is_the_library_at_full_size_and_length(experiment: Spec, method: str) -> None:
    own = experiment.override(init="default") if experiment.name == "P-conv" else experiment
    against_library(own, method, 1, *inputs(20))


@pytest.mark.parametrize("method", ["ep", "bptt"])
@pytest.mark.parametrize("name", ["P-1h", "P-2h", "P-3h", "P-conv"])
@pytest.mark.parametrize("T", [7, 8])
def test_the_alternating_twin_is_the_alternating_library(name: str, method: str, T: int) -> None:
    experiment = shrunk(papers.find(name), T=T, K=4, schedule="alternating", init="default")
    against_library(experiment, method, 2, *inputs(6))


def test_alternating_is_another_trajectory() -> None:
    """Otherwise the comparison of the two alternating forms would say nothing about the schedule."""
    experiment = brief(papers.find("P-2h"))
    x, _ = inputs(4)
    theta = weights(build_model(experiment, 0, torch.float64), torch.float64)
    together = free_phase(Case(experiment, "ep").recipe(), theta, x, 7)
    in_turn = free_phase(Case(experiment.override(schedule="alternating"), "ep").recipe(), theta, x, 7)
    torch.testing.assert_close(in_turn[0], together[0])
    assert float((in_turn[1] - together[1]).abs().max()) > 1e-3


def test_two_flat_layers_padding_and_no_bias() -> None:
    net = ConvolutionalNet(channels=(3, 2), flat=(10, 7), kernel=3, padding=1, bias=False)
    rates = {"*": 0.05}
    experiment = Spec.of(
        "own", model=net, optimizer="SGD", estimator="ep", T=8, K=6, epochs=1, rates=rates, init="default", beta=0.2
    )
    for method in ("ep", "bptt"):
        against_library(experiment, method, 2, *inputs(4))
    flat = experiment.override(model=LayeredNet((10, 8, 784), bias=False, activation="tanh"), init="glorot")
    against_library(flat, "ep", 2, *inputs(4))


def test_the_authors_output_without_slope() -> None:
    experiment = brief(papers.find("EB-2h"))
    assert isinstance(experiment.model, LayeredNet)
    authors = experiment.override(model=msgspec.structs.replace(experiment.model, output_slope=False))
    for method in ("ep", "bptt"):
        against_library(authors, method, 2, *inputs(6))
