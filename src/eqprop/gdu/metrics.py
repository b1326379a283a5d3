"""Groups of neurons and synapses, and the distances between their processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics
from eqprop.estimators.base import Step, trainable
from eqprop.gdu.lockstep import Moment
from eqprop.relax import NotFiniteError
from eqprop.state import State, layer_name


@dataclass(frozen=True)
class Convention:
    """Conventions of the distances.

    zeros_count     an element whose two processes are both zero counts as error 0 instead of being excluded
    blank_early     neurons of layer n count as zero at t < n, before any signal can reach them
    synapses_shown  the number that represents the synapses: "rmse" or "rmse_cumulative"
    """

    name: str
    zeros_count: bool
    blank_early: bool
    synapses_shown: str


PAPER = Convention("paper", zeros_count=False, blank_early=False, synapses_shown="rmse")
AUTHORS = Convention("authors", zeros_count=True, blank_early=True, synapses_shown="rmse_cumulative")


@dataclass(frozen=True)
class Metrics:
    """How EP's process f and minus BPTT's gradient g agree in one group of neurons or synapses.

    rmse                mean over elements of |f - g| / max(|f|, |g|), norms over time  [exp:rmse]
    rmse_cumulative     the same for the sums over time up to t
    sign                the fraction of (element, t) pairs with g not zero where f has the same sign
    cosine              of the angle between f and g, all elements and steps as one vector
    norm                root mean square of g over elements and steps
    left_out            number of elements whose two processes are both zero
    elements            number of all elements

    None if every element is left out.
    """

    rmse: float | None
    rmse_cumulative: float | None
    sign: float | None
    cosine: float | None
    norm: float
    left_out: int
    elements: int


class Distance:
    """Running sums of one group: f, g and, for a budget, the parts of f - g."""

    def __init__(self, like: Tensor, parts: tuple[str, ...]) -> None:
        zeros = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        self.ff, self.gg, self.ee = zeros.clone(), zeros.clone(), zeros.clone()
        self.sum_f, self.sum_g = zeros.clone(), zeros.clone()
        self.cum_ff, self.cum_gg, self.cum_ee = zeros.clone(), zeros.clone(), zeros.clone()
        self.parts = {name: zeros.clone() for name in parts}
        self.dot = torch.zeros((), dtype=torch.float64, device=like.device)
        self.agree, self.signed = torch.zeros_like(self.dot), torch.zeros_like(self.dot)
        self.steps = 0

    def add(self, f: Tensor, g: Tensor, parts: Mapping[str, Tensor]) -> None:
        f, g = f.double(), g.double()
        product = f * g
        self.dot += product.sum()
        self.agree += (product > 0).sum()
        self.signed += (g != 0).sum()
        self.ff.addcmul_(f, f)
        self.gg.addcmul_(g, g)
        e = f - g
        self.ee.addcmul_(e, e)
        self.sum_f += f
        self.sum_g += g
        self.cum_ff.addcmul_(self.sum_f, self.sum_f)
        self.cum_gg.addcmul_(self.sum_g, self.sum_g)
        torch.sub(self.sum_f, self.sum_g, out=e)
        self.cum_ee.addcmul_(e, e)
        for name, total in self.parts.items():
            part = parts[name].double()
            total.addcmul_(part, part)
        self.steps += 1

    def skip(self) -> None:
        """Count a step at which both are zero."""
        self.cum_ff.addcmul_(self.sum_f, self.sum_f)
        self.cum_gg.addcmul_(self.sum_g, self.sum_g)
        e = self.sum_f - self.sum_g
        self.cum_ee.addcmul_(e, e)
        self.steps += 1

    def one_sided(self) -> bool:
        """Whether f is zero throughout and g is not."""
        return not bool(self.ff.any()) and bool(self.gg.any())

    def finite(self) -> bool:
        return bool(torch.isfinite(self.ee).all())

    def metrics(self, convention: Convention) -> Metrics:
        scale, dead = self._scale()
        left_out = int(dead.sum())
        cumulative = torch.maximum(self.cum_ff, self.cum_gg)
        lengths = float(self.ff.sum() * self.gg.sum()) ** 0.5
        return Metrics(
            rmse=self._mean(self.ee, scale, dead, convention),
            rmse_cumulative=self._mean(self.cum_ee, cumulative, cumulative == 0, convention),
            sign=float(self.agree / self.signed) if float(self.signed) else None,
            cosine=float(self.dot) / lengths if lengths else None,
            norm=float(self.gg.mean() / max(self.steps, 1)) ** 0.5,
            left_out=left_out,
            elements=dead.numel(),
        )

    def parts_of_rmse(self, convention: Convention) -> dict[str, float | None]:
        """Each part of f - g in the measure of the RMSE, so that their sum is at least the RMSE."""
        scale, dead = self._scale()
        return {name: self._mean(total, scale, dead, convention) for name, total in self.parts.items()}

    def _scale(self) -> tuple[Tensor, Tensor]:
        scale = torch.maximum(self.ff, self.gg)
        return scale, scale == 0

    def _mean(self, squares: Tensor, scale: Tensor, dead: Tensor, convention: Convention) -> float | None:
        counted = dead.numel() - (0 if convention.zeros_count else int(dead.sum()))
        if counted == 0 or bool(dead.all()):
            return None
        errors = torch.where(dead, torch.zeros_like(scale), (squares / scale.masked_fill(dead, 1.0)).sqrt())
        return float(errors.sum() / counted)


class Group(NamedTuple):
    """kind is "neurons", "synapses" or "biases"; depth is the layer's index for neurons, else 0."""

    kind: str
    name: str
    depth: int = 0


def groups(model: Dynamics, s: State) -> tuple[Group, ...]:
    """One group per layer and per parameter. One-dimensional parameters are biases, unless there are no others."""
    parameters = trainable(model)
    synapses = [name for name, p in parameters.items() if p.dim() > 1] or list(parameters)
    layers = [Group("neurons", layer_name(model.layer_names, n), n) for n in range(len(s))]
    kinds = [Group("synapses" if name in synapses else "biases", name) for name in parameters]
    return (*layers, *kinds)


def batch_mean(step: Step, group: Group) -> Tensor:
    """The process of a group at one step, averaged over the samples before measuring  [exp:rmse]."""
    return step.neurons[group.depth].mean(0) if group.kind == "neurons" else step.synapses[group.name]


def measure(moments: Iterable[Moment], every: tuple[Group, ...], convention: Convention) -> dict[Group, Distance]:
    """Accumulate the distances of all groups over the moments."""
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
                "If the nudge is too strong, lower beta; if the gradients grow without bound, lower K or the weights."
            )
    return found
