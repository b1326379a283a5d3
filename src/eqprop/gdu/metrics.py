"""Groups of neurons and synapses, and the distances between their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators import EP
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
    left_out            number of elements whose two processes are both zero, or no more than rounding leaves of it
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


ROUNDING = 64.0
"""An element this many roundings of its group's largest or smaller is what cancelled sums leave."""


@dataclass(frozen=True)
class Noise:
    """What rounding alone leaves of a step of f and of g: a process no larger is zero.

    f is a difference of states divided by beta, so it has the state's rounding divided by beta; g is carried back from
    the cost's pull and has the pull's, as has f in the difference form. Synapses have both times what enters them.
    """

    f: float = 0.0
    g: float = 0.0
    entering: float = 1.0

    @classmethod
    def of(cls, problem: Problem, ep: EP, s: State) -> Noise:
        """That of processes which begin at the end s of a free phase."""
        size, pull = (max([float(layer.detach().abs().max()) for layer in state]) for state in (s, problem.pull(s)))
        entering = max(1.0, size, float(problem.x.abs().max()) if problem.x.is_floating_point() else 1.0)
        unit = ROUNDING * torch.finfo(s[0].dtype).eps
        lost = pull if ep.form == "difference" else max(1.0, size) / (abs(float(ep.beta)) * problem.model.nudge_scale)
        return cls(unit * lost, unit * pull, entering)


class Distance:
    """Running sums of one group: f, g and, for a budget, the parts of f - g.

    `noise` is what of a step of f and of g counts as zero.
    """

    def __init__(self, like: Tensor, parts: tuple[str, ...], noise: tuple[float, float] = (0.0, 0.0)) -> None:
        self.noise = noise
        self.heard: tuple[Tensor, Tensor] | None = None
        zeros = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        self.ff, self.gg, self.ee = zeros.clone(), zeros.clone(), zeros.clone()
        self.sum_f, self.sum_g = zeros.clone(), zeros.clone()
        self.cum_ff, self.cum_gg, self.cum_ee = zeros.clone(), zeros.clone(), zeros.clone()
        self.parts = {name: zeros.clone() for name in parts}
        self.eps = torch.finfo(like.dtype).eps
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

    def hear(self, *of_samples: Tensor) -> None:
        """Note which neurons of each sample have a process so far, by EP and by BPTT, (B, ...) each."""
        f, g = (v.abs() > limit for v, limit in zip(of_samples, self.noise, strict=True))
        self.heard = (f, g) if self.heard is None else (self.heard[0] | f, self.heard[1] | g)

    def signals(self) -> tuple[Tensor, Tensor]:
        """Which elements of f and of g are more than rounding."""
        steps = max(self.steps, 1)
        f, g = (squares > steps * limit**2 for squares, limit in zip((self.ff, self.gg), self.noise, strict=True))
        return f, g

    def metrics(self, convention: Convention) -> Metrics:
        scale, dead = self._scale()
        cumulative = torch.maximum(self.cum_ff, self.cum_gg)
        lengths = 0.0 if bool(dead.all()) else float(self.ff.sum() * self.gg.sum()) ** 0.5
        return Metrics(
            rmse=self._mean(self.ee, scale, dead, convention),
            rmse_cumulative=self._mean(self.cum_ee, cumulative, dead | (cumulative == 0), convention),
            sign=float(self.agree / self.signed) if float(self.signed) and not bool(dead.all()) else None,
            cosine=float(self.dot) / lengths if lengths else None,
            norm=float(self.gg.mean() / max(self.steps, 1)) ** 0.5,
            left_out=int(dead.sum()),
            elements=dead.numel(),
        )

    def parts_of_rmse(self, convention: Convention) -> dict[str, float | None]:
        """Each part of f - g in the measure of the RMSE, so that their sum is at least the RMSE.

        Elements that are rounding are left out: parts that cancel there are beyond all measure.
        """
        scale, silent = self._scale()
        largest = scale.max() if scale.numel() else 0.0
        dead = silent | (scale <= (ROUNDING * self.eps) ** 2 * largest)
        return {name: self._mean(total, scale, dead, convention) for name, total in self.parts.items()}

    def _scale(self) -> tuple[Tensor, Tensor]:
        f, g = self.signals()
        return torch.maximum(self.ff, self.gg), ~(f | g)

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


def measure(
    moments: Iterable[Moment],
    every: tuple[Group, ...],
    convention: Convention,
    noise: Noise,
    tell: Callable[[int], None] | None = None,
) -> dict[Group, Distance]:
    """Accumulate the distances of all groups over the moments; `tell` is told how many have passed."""
    found: dict[Group, Distance] = {}
    for t, moment in enumerate(moments):
        for group in every:
            f, g = batch_mean(moment.ep, group), batch_mean(moment.bptt, group)
            parts = {name: p for name, p in moment.parts.items() if p.neurons or group.kind != "neurons"}
            if group not in found:
                times = 1.0 if group.kind == "neurons" else noise.entering
                found[group] = Distance(f, tuple(parts), (noise.f * times, noise.g * times))
            if group.kind == "neurons":
                found[group].hear(moment.ep.neurons[group.depth], moment.bptt.neurons[group.depth])
            if convention.blank_early and group.kind == "neurons" and t < group.depth:
                found[group].skip()
                continue
            found[group].add(f, g, {name: batch_mean(part, group) for name, part in parts.items()})
        if tell is not None:
            tell(t + 1)
    for group, distance in found.items():
        if not bool(torch.isfinite(distance.ee).all()):
            raise NotFiniteError(
                f"The processes of {group.name} are not finite over the {distance.steps} steps of the second phase. "
                "If the nudge is too strong, lower beta; if the gradients grow without bound, lower K or the weights."
            )
    return found


@dataclass(frozen=True)
class Silence:
    """The neurons of a layer, counted over samples, that hear BPTT's signal and not EP's.

    neurons             all of them
    saturated           those that cannot carry a signal: sigma' below `eqprop.gdu.lockstep.SATURATED`
    unheard             those whose EP process is zero and BPTT's is not
    unheard_saturated   how many of these are saturated
    """

    neurons: int
    saturated: int
    unheard: int
    unheard_saturated: int

    @classmethod
    def of(cls, distance: Distance, saturated: Tensor) -> Silence:
        assert distance.heard is not None, "measured for neurons"
        ep, bptt = distance.heard
        unheard = ~ep & bptt
        counts = (saturated, unheard, unheard & saturated)
        return cls(saturated.numel(), *(int(mask.sum()) for mask in counts))

    def __str__(self) -> str:
        among = f" ({self.unheard_saturated} of the {self.saturated} saturated ones)" if self.saturated else ""
        return f"in {self.unheard} of {self.neurons} neurons{among} EP's process is zero and BPTT's is not"
