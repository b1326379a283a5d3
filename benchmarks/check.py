"""Correctness check before timing: an engine's states and weight updates against the naive twin's in float64.

The reference error is that of torch's own float32: an engine may be at most twice as far from float64. Torch runs in
two ways, the naive twin one network at a time, and the eager engine on stacked networks, whose batched products round
differently; the larger error counts. Errors are quantiles over networks and starts: in float32 an unsettled sample or
a near-tie in a pooling arg-max may take another branch and differ by far more than rounding, in torch as well.
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
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.relax import Phase
from eqprop.run.session import build_model
from eqprop.state import State

FACTOR = 2.0
"""Largest allowed error, as a multiple of torch's own float32 error."""
UPDATE_FLOOR = 1e-5
"""Relative error of a weight update that always passes: rounding of the weights themselves, in small parameters."""
STATE_FLOOR = 2e-6
"""Error of the state that always passes: a few roundings of numbers up to 1."""
VALUES = 5
"""Smallest number of networks times starts to compare."""
QUANTILE, CONV_QUANTILE = 0.5, 0.25
"""Quantile of the errors that is judged. About one sample in twenty-five flips an arg-max in an iteration and spoils
its whole mini-batch; the lower quartile shows the arithmetic where that did not happen."""
WORST_FACTOR = 8.0
"""Largest allowed worst error of a fully connected net, as a multiple of torch's: no network may be wrong."""

TOLERANCE = (
    f"Errors are measured against the naive twin in float64: for weight updates ||dW - dW64|| / ||dW64|| per "
    f"parameter, for the free state the largest neuron error per sample. They may be {FACTOR:g} times those of torch's "
    f"own float32 (for a bias: or its weight's), or {UPDATE_FLOOR:g} (update) and {STATE_FLOOR:g} (state). Torch's "
    f"error is, per network, the larger of the naive twin's and the eager engine's on stacked networks. Medians over "
    f"networks and starts (lower quartile for updates of the convolutional net); the worst update of a fully connected "
    f"net may be {WORST_FACTOR:g} times torch's worst."
)


@dataclass(frozen=True)
class Verdict:
    """Distance of an engine from float64, and of torch's own float32 (`naive_...`).

    `reason` says why no ratio is reported; None if the engine passed.
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
        """The largest update error over the parameters."""
        return max(self.update_error.values(), key=lambda e: math.inf if math.isnan(e) else e)

    @property
    def naive_max_error(self) -> float:
        return max(self.naive_update_error.values())


@dataclass(frozen=True)
class Errors:
    """Distance of one network and start from float64: update per parameter, free state per sample."""

    update: dict[str, float]
    state: Tensor  # (B,)

    def or_larger(self, other: Errors) -> Errors:
        """The elementwise maximum."""
        update = {name: max(error, other.update[name]) for name, error in self.update.items()}
        return Errors(update, torch.maximum(self.state, other.state))


@dataclass(frozen=True)
class Twin:
    """The naive twin's float64 result for one network and start, and the errors of torch's own float32."""

    update: Theta
    state: list[Tensor]
    float32: Errors


@dataclass
class Checker:
    """Check cases on one set of images. Twins are cached: engines and stops of an experiment share them."""

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
        layers = build_model(case.experiment, 0).layer_parameters
        weights = {layer.bias: layer.weights[0] for layer in layers if layer.bias is not None}
        return judge(Found(errors, twins, case.trials, is_convolutional(case), weights))

    def _order(self, case: Case, start: int) -> Tensor:
        # With two samples per mini-batch instead of twenty, arg-max flips spoil a tenth of them instead of half.
        distinct = 2 if is_convolutional(case) else None
        order = batch_order(case, self.iterations, len(self.images.train_x), self.seed + start, distinct)
        return order.to(self.images.train_x.device)

    def _twins(self, case: Case, start: int) -> list[Twin]:
        experiment = case.experiment
        key = (
            experiment.name,
            experiment.preset,
            case.method,
            experiment.phases.schedule,
            case.trials,
            experiment.model,
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
        """Run the naive twin in float64, and in float32 for its errors."""
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
        shape = build_model(case.experiment, 0).input_shape
        assert shape is not None, "the experiments' networks say what they take"
        return self.images.train_x[rows].view(*rows.shape, *shape)

    def _errors(self, case: Case, engine: Engine, twins: Sequence[Twin], start: int) -> list[Errors]:
        """Errors of the engine's networks against their twins."""
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
        assert state is not None, "free_states was not None above"
        return [
            Errors(
                relative_errors(_difference(after[r], before[r]), twin.update),
                sample_errors([layer[r] for layer in state], twin.state),
            )
            for r, twin in enumerate(twins)
        ]

    def _relaxed(self, case: Case, engine: Engine, model: Dynamics, rows: Tensor) -> State:
        """Final state of the first phase, (R, B, ...) per layer; for BPTT the last K steps are synchronous."""
        experiment, x = case.experiment, self._inputs(case, rows)
        last = experiment.phases.K if case.method == "bptt" else 0
        free = engine.relaxation(
            model,
            x,
            Phase(experiment.phases.T - last, experiment.phases.schedule, experiment.phases.stop, checked=False),
        )
        if last:
            free = engine.relaxation(model, x, Phase(last, stop=experiment.phases.stop, checked=False), free.state)
        return free.state if case.trials > 1 else tuple(layer[None] for layer in free.state)


@dataclass(frozen=True)
class Found:
    """Errors of an engine and of torch's own float32 per network and start; `weights` maps a bias to its weight."""

    errors: Sequence[Errors]
    twins: Sequence[Twin]
    trials: int
    convolutional: bool
    weights: Mapping[str, str] = field(default_factory=dict)

    def typical(self, errors: Sequence[Errors]) -> dict[str, float]:
        """The judged quantile of each parameter's error; NaN if any error is NaN."""
        share = CONV_QUANTILE if self.convolutional else QUANTILE
        table = {name: torch.tensor([e.update[name] for e in errors], dtype=torch.float64) for name in errors[0].update}
        return {name: float(values.quantile(share, interpolation="lower")) for name, values in table.items()}

    def of_networks(self, errors: Sequence[Errors]) -> float:
        """Median state error over samples and starts, for the network where it is largest."""
        states = torch.stack([e.state for e in errors])
        by_network = states.view(-1, self.trials, states.shape[-1]).transpose(0, 1).flatten(1)
        return float(by_network.quantile(0.5, 1).amax())


def judge(found: Found) -> Verdict:
    """Judge update errors by their quantile over all networks and starts, states per network."""
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
            return f"the check is void: the exact update of {name} is zero in every network."
        bound = max(FACTOR * _yardstick(verdict.naive_update_error, name, found.weights), UPDATE_FLOOR)
        if not error <= bound:
            return f"the update of {name} is off by a relative {error:.1e}; float32 accuracy allows {bound:.1e}."
    bound = max(FACTOR * verdict.naive_state_error, STATE_FLOOR)
    if not verdict.state_error <= bound:
        return f"the free state is off by {verdict.state_error:.1e}; float32 accuracy allows {bound:.1e}."
    bound = max(WORST_FACTOR * verdict.naive_worst_update_error, UPDATE_FLOOR)
    if not found.convolutional and not verdict.worst_update_error <= bound:
        return f"the update of one network is off by a relative {verdict.worst_update_error:.1e}."
    return None


def _yardstick(naive: dict[str, float], name: str, weights: Mapping[str, str]) -> float:
    """The error of torch's float32; for a bias, whose few numbers make it noisy, at least its weight's."""
    return max(naive[name], naive[weights.get(name, name)])


def well_conditioned(case: Case) -> Case:
    """The case with weights that make the check meaningful.

    Glorot weights saturate every output of the convolutional net, and BPTT's update is then zero.
    """
    if is_convolutional(case):
        return replace(case, experiment=case.experiment.override(init="default"))
    return case


def is_convolutional(case: Case) -> bool:
    return isinstance(case.experiment.model, ConvolutionalNet)


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
    """Indices of the stacked networks; [None] for a single network."""
    return [None] if case.trials == 1 else list(range(case.trials))
