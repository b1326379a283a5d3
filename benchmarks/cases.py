"""A benchmark case: experiment, estimator and engine, as a job and as a recipe for the naive twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.naive import ConvNet, EnergyNet, Method, Net, PrototypicalNet, Recipe
from eqprop.cost import SquaredError
from eqprop.data import Images, one_hot
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import Engine, Job, Task, choose
from eqprop.messages import unknown
from eqprop.models import stack
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.relax import Schedule, Stop
from eqprop.run.session import build_model, make_estimator
from eqprop.run.spec import Spec

METHODS = ("ep", "bptt")
Theta = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One way to train an experiment: estimator (`method`), requested engine, number of stacked networks."""

    experiment: Spec
    method: str
    engine: str = "auto"
    trials: int = 1

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(unknown("method", self.method, METHODS))
        if self.trials < 1:
            raise ValueError(f"trials is {self.trials}; expected the number of networks to stack, 1 or more.")

    @property
    def steps(self) -> int:
        """Dependent steps of an iteration: T + K for EP; for BPTT T forward and K backward."""
        return self.experiment.phases.T + self.experiment.phases.K

    @property
    def network_count(self) -> int | None:
        """`networks` of a job: None for one network."""
        return self.trials if self.trials > 1 else None

    def build(self, device: torch.device, first_trial: int = 0) -> Dynamics:
        """Build the networks with their initial weights, stacked if there are several."""
        models = [build_model(self.experiment, first_trial + r) for r in range(self.trials)]
        if self.trials == 1:
            return models[0].to(device)
        return stack([cast(PrimitiveDynamics, model) for model in models]).to(device)

    def choose(self, model: Dynamics) -> Engine:
        """The requested engine; ValueError with its reason if it refuses."""
        return choose(self.engine, Task(model, SquaredError(), self.estimator(), self.optimizer(model)))

    def estimator(self) -> Any:
        return make_estimator(self.experiment, self.method)

    def optimizer(self, model: Dynamics) -> torch.optim.Optimizer:
        parameters = dict(model.named_parameters())
        rates = self.experiment.rates(parameters, model.layer_parameters)
        return torch.optim.SGD([{"params": [p], "lr": rates[name]} for name, p in parameters.items()], lr=0.0)

    def job(self, model: Dynamics, images: Images) -> Job:
        assert model.input_shape is not None, "the experiments' networks say what they take"
        return Job(
            model,
            SquaredError(),
            self.estimator(),
            self.optimizer(model),
            images.train_x.view(-1, *model.input_shape),
            one_hot(images.train_y, images.classes, images.train_x.dtype),
            images.train_y,
            self.network_count,
        )

    def recipe(self) -> Recipe:
        """The same training for the naive twin."""
        model = build_model(self.experiment, 0)
        rates = self.experiment.rates((name for name, _ in model.named_parameters()), model.layer_parameters)
        experiment = self.experiment
        return Recipe(
            naive_net(experiment),
            cast(Method, self.method),
            experiment.phases.T,
            experiment.phases.K,
            experiment.phases.beta,
            rates,
            experiment.phases.schedule == "alternating",
        )

    def with_schedule(self, schedule: Schedule, stop: Stop) -> Case:
        return replace(self, experiment=self.experiment.override(schedule=schedule, stop=stop))


def naive_net(experiment: Spec) -> Net:
    """The naive twin's form of an experiment's network."""
    net = experiment.model
    if isinstance(net, ConvolutionalNet):
        return ConvNet(net.activation, net.pool, net.padding)
    if isinstance(net, LayeredNet) and net.setting == "energy-based":
        assert net.eps is not None, "checked when the model was built"
        return EnergyNet(net.eps, net.activation, net.clip, net.output_slope)
    if isinstance(net, LayeredNet):
        return PrototypicalNet(net.activation)
    raise ValueError(f"{experiment.name} has a custom network, for which there is no naive twin to compare with.")


def weights(model: Dynamics, dtype: torch.dtype, r: int | None = None) -> Theta:
    """Copy the parameters, those of network r if several are stacked."""
    return {
        name: (p.detach() if r is None else p.detach()[r]).to(dtype, copy=True) for name, p in model.named_parameters()
    }


def batch_order(case: Case, iterations: int, samples: int, seed: int, distinct: int | None = None) -> Tensor:
    """Draw sample indices (n, B), or (n, R, B) for R networks with their own samples, on the CPU.

    `distinct` limits the number of different samples per mini-batch.
    """
    source = torch.Generator().manual_seed(seed)
    batch = case.experiment.optimizer.batch
    rows = []
    for _ in range(iterations * case.trials):
        chosen = torch.randint(samples, (distinct or batch,), generator=source)
        places = torch.randint(len(chosen), (batch,), generator=source) if distinct else torch.arange(batch)
        rows.append(chosen[places])
    order = torch.stack(rows).view(iterations, case.trials, batch)
    return order if case.trials > 1 else order[:, 0]


def network_order(order: Tensor, r: int) -> Tensor:
    """The mini-batches of network r, (n, B)."""
    return order[:, r] if order.dim() == 3 else order


def combinations(
    experiments: Sequence[Spec],
    methods: Sequence[str],
    engines: Sequence[str],
    schedules: Sequence[Schedule],
    stops: Sequence[Stop],
    trials: int,
) -> list[Case]:
    """All requested cases, experiment by experiment."""
    return [
        Case(experiment, method, engine, trials).with_schedule(schedule, stop)
        for experiment in experiments
        for method in methods
        for engine in engines
        for schedule in schedules
        for stop in stops
    ]
