"""Groups of neurons and synapses: their names, their processes as one tensor each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from eqprop.dynamics import Dynamics
from eqprop.estimators.base import Step, trainable
from eqprop.gdu.lockstep import Moment
from eqprop.gdu.metrics import Convention, Distance
from eqprop.relax import NotFiniteError
from eqprop.state import State, layer_name


class Group(NamedTuple):
    """kind is "neurons", "synapses" or "biases"; depth is the layer's number for neurons, else 0."""

    kind: str
    name: str
    depth: int = 0


def groups(model: Dynamics, s: State) -> tuple[Group, ...]:
    """A group a layer and a group a parameter. Parameters of one dimension are biases, unless there are no others."""
    parameters = trainable(model)
    synapses = [name for name, p in parameters.items() if p.dim() > 1] or list(parameters)
    layers = [Group("neurons", layer_name(model.layer_names, n), n) for n in range(len(s))]
    kinds = [Group("synapses" if name in synapses else "biases", name) for name in parameters]
    return (*layers, *kinds)


def batch_mean(step: Step, group: Group) -> Tensor:
    """The process of a group at one step: averaged over the samples before anything is measured  [exp:rmse]."""
    return step.neurons[group.depth].mean(0) if group.kind == "neurons" else step.synapses[group.name]


def measure(moments: Iterable[Moment], every: tuple[Group, ...], convention: Convention) -> dict[Group, Distance]:
    """Run through the moments and return what was accumulated, group by group."""
    found: dict[Group, Distance] = {}
    for t, moment in enumerate(moments):
        for group in every:
            f, g = batch_mean(moment.ep, group), batch_mean(moment.bptt, group)
            parts = {name: p for name, p in moment.parts.items() if p.neurons or group.kind != "neurons"}
            if group not in found:
                found[group] = Distance(f, tuple(parts))
            if convention.blank_early and group.kind == "neurons" and t < group.depth:
                found[group].skip()
                continue
            found[group].add(f, g, {name: batch_mean(part, group) for name, part in parts.items()})
    for group, distance in found.items():
        if not distance.finite():
            raise NotFiniteError(
                f"The processes of {group.name} are not finite over the {distance.steps} steps of the second phase. "
                "The nudge may be too strong: lower beta. Or the gradients grow without bound: lower K or the weights."
            )
    return found
