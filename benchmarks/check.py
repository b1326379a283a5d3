"""Is the engine right? Its states and weight updates against the naive twin's in float64, before any time is told.

The yardstick is torch's own float32: an engine may be at most twice as far from float64. Torch has two ways, the naive
twin, one network after the other, and the eager engine on the stacked networks, whose batched products round
otherwise; the larger error of the two counts. Errors are quantiles over networks and starts: in float32 a sample that
has not settled, or a pooling arg-max that is nearly a tie, may go another way, and then differ by far more than
rounding, in torch as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.cases import Case, Theta, batch_order, network_order, weights
from benchmarks.naive import train_step
from eqprop.data import Images, one_hot
from eqprop.dynamics import Dynamics
from eqprop.engines import Engine
from eqprop.engines.eager import Eager
from eqprop.experiments.architecture import ConvolutionalNet
from eqprop.relax import Phase
from eqprop.state import State

FACTOR = 2.0
"""How many times the error of torch's own float32 an engine may have."""
UPDATE_FLOOR = 1e-5
"""A relative error of the weight update that always passes: rounding of the weights themselves, of few numbers."""
STATE_FLOOR = 2e-6
"""An error of the state that always passes: a few roundings of numbers up to 1."""
VALUES = 5
"""At least so many networks times starts are compared."""
QUANTILE, CONV_QUANTILE = 0.5, 0.25
"""Which of the errors is judged. An arg-max goes another way for one sample in twenty-five or so in an iteration, and
spoils its whole mini-batch: the lower quartile shows what the arithmetic does where that did not happen."""
WORST_FACTOR = 8.0
"""How many times the worst error of torch's float32 a fully connected net's worst may be: no network may be wrong."""

TOLERANCE = (
    f"Errors are against the naive twin in float64: of the weight update ||dW - dW64|| / ||dW64|| for each parameter, "
    f"of the free state the largest neuron of each sample. They may be {FACTOR:g} times those of torch's own float32 "
    f"(a bias: or of its weight), or {UPDATE_FLOOR:g} (update) and {STATE_FLOOR:g} (state). Torch's own are, network "
    f"by network, the larger of the naive twin's and of the eager engine's on the stacked networks. Medians over "
    f"networks and starts (the convolutional net: lower quartile of the updates); the worst update of a fully "
    f"connected net may be {WORST_FACTOR:g} times torch's worst."
)


@dataclass(frozen=True)
class Verdict:
    """How far an engine is from float64 and how far torch's own float32 is (`naive_...`).

    `reason` says why no ratio is told.
    """

    update_error: dict[str, float]
    naive_update_error: dict[str, float]
    worst_update_error: float
    naive_worst_update_error: float
    state_error: float
    naive_state_error: float
    reason: str | None = None

    @property
    def max_error(self) -> float:
        """The largest of the parameters' update errors."""
        return max(self.update_error.values(), key=lambda e: math.inf if math.isnan(e) else e)

    @property
    def naive_max_error(self) -> float:
        return max(self.naive_update_error.values())


@dataclass(frozen=True)
class Errors:
    """How far one network of one start is from float64: each parameter's update, each sample's free state."""

    update: dict[str, float]
    state: Tensor  # (B,)

    def or_larger(self, other: Errors) -> Errors:
        """Number by number the larger."""
        update = {name: max(error, other.update[name]) for name, error in self.update.items()}
        return Errors(update, torch.maximum(self.state, other.state))


@dataclass(frozen=True)
class Twin:
    """What the naive twin found for one network of one start in float64, and the errors of torch's own float32."""

    update: Theta
    state: list[Tensor]
    float32: Errors


@dataclass
class Checker:
    """Checks cases on one set of images. Twins are kept: engines and stops of one experiment share them."""

    images: Images
    iterations: int = 2
    seed: int = 1
    known: dict[tuple[object, ...], list[Twin]] = field(default_factory=dict)

    def check(self, case: Case, engine: Engine) -> Verdict:
        case = well_conditioned(case)
        twins: list[Twin] = []
        errors: list[Errors] = []
        for start in range(math.ceil(VALUES / case.trials)):
            here = self._twins(case, start)
            errors += self._errors(case, engine, here, start)
            twins += here
        layers = case.experiment.build(0).layer_parameters
        weights = {layer.bias: layer.weights[0] for layer in layers if layer.bias is not None}
        return judge(Found(errors, twins, case.trials, is_convolutional(case), weights))

    def _order(self, case: Case, start: int) -> Tensor:
        # With two samples in a mini-batch instead of twenty, an arg-max spoils one in ten instead of half of them.
        distinct = 2 if is_convolutional(case) else None
        order = batch_order(case, self.iterations, len(self.images.train_x), self.seed + start, distinct)
        return order.to(self.images.train_x.device)

    def _twins(self, case: Case, start: int) -> list[Twin]:
        experiment = case.experiment
        key = (
            experiment.name,
            experiment.preset,
            case.method,
            experiment.schedule,
            case.trials,
            experiment.architecture,
            start,
        )
        if key not in self.known:
            model = case.build(self.images.train_x.device, start * case.trials)
            order = self._order(case, start)
            alone = [
                self._twin(case, weights(model, torch.float32, r), network_order(order, r or 0)) for r in _numbers(case)
            ]
            stacked = self._errors(case, Eager(), alone, start)
            self.known[key] = [
                replace(twin, float32=twin.float32.or_larger(errors))
                for twin, errors in zip(alone, stacked, strict=True)
            ]
        return self.known[key]

    def _twin(self, case: Case, theta: Theta, order: Tensor) -> Twin:
        """With the errors of the naive twin's own float32."""
        updates, states = {}, {}
        recipe = case.recipe()
        for dtype in (torch.float64, torch.float32):
            own = {name: value.to(dtype, copy=True) for name, value in theta.items()}
            start = {name: value.to(torch.float64, copy=True) for name, value in theta.items()}
            free = []
            for rows in order:
                y = one_hot(self.images.train_y[rows], self.images.classes, dtype)
                free.append(train_step(recipe, own, self._inputs(case, rows).to(dtype), y))
            updates[dtype], states[dtype] = _difference(own, start), free[0]
        exact, state = updates[torch.float64], states[torch.float64]
        naive = Errors(relative_errors(updates[torch.float32], exact), sample_errors(states[torch.float32], state))
        return Twin(exact, state, naive)

    def _inputs(self, case: Case, rows: Tensor) -> Tensor:
        shape = case.experiment.build(0).input_shape
        assert shape is not None, "the experiments' networks say what they take"
        return self.images.train_x[rows].view(*rows.shape, *shape)

    def _errors(self, case: Case, engine: Engine, twins: Sequence[Twin], start: int) -> list[Errors]:
        """Of the engine's networks, each beside its twin."""
        model = case.build(self.images.train_x.device, start * case.trials)
        order = self._order(case, start)
        runner = engine.runner(case.job(model, self.images))
        runner.keeps_states = True
        first = [p.detach().clone() for p in model.parameters()]
        before = [weights(model, torch.float64, r) for r in _numbers(case)]
        runner.run(order)
        after = [weights(model, torch.float64, r) for r in _numbers(case)]
        with torch.no_grad():
            for p, value in zip(model.parameters(), first, strict=True):
                p.copy_(value)
        if runner.free_states() is None:
            state: State | None = self._relaxed(case, engine, model, order[0])
        else:
            runner.run(order[:1])
            state = runner.free_states()
        assert state is not None, "the runner kept its states a moment ago"
        return [
            Errors(
                relative_errors(_difference(after[r], before[r]), twin.update),
                sample_errors([layer[r] for layer in state], twin.state),
            )
            for r, twin in enumerate(twins)
        ]

    def _relaxed(self, case: Case, engine: Engine, model: Dynamics, rows: Tensor) -> State:
        """The end of the first phase as the method has it, (R, B, ...) a layer: BPTT's last K steps are synchronous."""
        experiment, x = case.experiment, self._inputs(case, rows)
        last = experiment.K if case.method == "bptt" else 0
        free = engine.relaxation(
            model, x, Phase(experiment.T - last, experiment.schedule, experiment.stop, checked=False)
        )
        if last:
            free = engine.relaxation(model, x, Phase(last, stop=experiment.stop, checked=False), free.state)
        return free.state if case.trials > 1 else tuple(layer[None] for layer in free.state)


@dataclass(frozen=True)
class Found:
    """The errors of an engine beside those of torch's own float32, per network and start; the weight of each bias."""

    errors: Sequence[Errors]
    twins: Sequence[Twin]
    trials: int
    convolutional: bool
    weights: Mapping[str, str] = field(default_factory=dict)

    def typical(self, errors: Sequence[Errors]) -> dict[str, float]:
        """The judged quantile of each parameter's error; NaN if there is one."""
        share = CONV_QUANTILE if self.convolutional else QUANTILE
        table = {name: torch.tensor([e.update[name] for e in errors], dtype=torch.float64) for name in errors[0].update}
        return {name: float(values.quantile(share, interpolation="lower")) for name, values in table.items()}

    def of_networks(self, errors: Sequence[Errors]) -> float:
        """The median of the states over samples and starts, of the network where it is largest."""
        states = torch.stack([e.state for e in errors])
        by_network = states.view(-1, self.trials, states.shape[-1]).transpose(0, 1).flatten(1)
        return float(by_network.quantile(0.5, 1).amax())


def judge(found: Found) -> Verdict:
    """Update errors by their quantile over everything, states network by network."""
    naive = [twin.float32 for twin in found.twins]
    verdict = Verdict(
        found.typical(found.errors),
        found.typical(naive),
        max(max(e.update.values()) for e in found.errors),
        max(max(e.update.values()) for e in naive),
        found.of_networks(found.errors),
        found.of_networks(naive),
    )
    return replace(verdict, reason=_against(verdict, found))


def _against(verdict: Verdict, found: Found) -> str | None:
    for name, error in verdict.update_error.items():
        if all(float(twin.update[name].norm()) == 0.0 for twin in found.twins):
            return f"the check says nothing: the exact update of {name} is zero in every network."
        bound = max(FACTOR * _yardstick(verdict.naive_update_error, name, found.weights), UPDATE_FLOOR)
        if not error <= bound:
            return f"the update of {name} is off by {error:.1e} of its size; at most {bound:.1e} is as good as float32."
    bound = max(FACTOR * verdict.naive_state_error, STATE_FLOOR)
    if not verdict.state_error <= bound:
        return f"the free state is off by {verdict.state_error:.1e}; at most {bound:.1e} is as good as float32."
    bound = max(WORST_FACTOR * verdict.naive_worst_update_error, UPDATE_FLOOR)
    if not found.convolutional and not verdict.worst_update_error <= bound:
        return f"the update of one network is off by {verdict.worst_update_error:.1e} of its size."
    return None


def _yardstick(naive: dict[str, float], name: str, weights: Mapping[str, str]) -> float:
    """The error of torch's float32; for a bias, a few numbers with an error of much chance, at least its weight's."""
    return max(naive[name], naive[weights.get(name, name)])


def well_conditioned(case: Case) -> Case:
    """The case with weights that tell something.

    Glorot weights saturate every output of the convolutional net, and BPTT's update is then zero.
    """
    if is_convolutional(case):
        return replace(case, experiment=replace(case.experiment, init="default"))
    return case


def is_convolutional(case: Case) -> bool:
    return isinstance(case.experiment.architecture, ConvolutionalNet)


def relative_errors(update: Theta, exact: Theta) -> dict[str, float]:
    return {name: _relative(update[name].double(), exact[name]) for name in exact}


def _relative(update: Tensor, exact: Tensor) -> float:
    off, size = float((update - exact).norm()), float(exact.norm())
    return off / size if size else (0.0 if off == 0.0 else math.inf)


def sample_errors(s: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """max |s - exact| over the neurons of each sample, (B,)."""
    return torch.stack([(a.double() - b).abs().flatten(1).amax(1) for a, b in zip(s, exact, strict=True)]).amax(0)


def _difference(after: Theta, before: Theta) -> Theta:
    return {name: after[name].double() - before[name] for name in before}


def _numbers(case: Case) -> list[int | None]:
    """The networks by number; None alone for one network."""
    return [None] if case.trials == 1 else list(range(case.trials))
