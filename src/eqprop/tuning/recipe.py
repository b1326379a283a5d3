"""The paper's recipe for choosing hyper-parameters, step by step, without using the test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from eqprop import papers
from eqprop.cost import Cost
from eqprop.data import Images
from eqprop.dynamics import Dynamics
from eqprop.provenance import provenance
from eqprop.run.dataset import describe
from eqprop.run.session import Session, bind
from eqprop.run.spec import EVERY_OTHER, Spec
from eqprop.tuning.effort import (
    Clock,
    Effort,
    Outcome,
    Trainings,
    as_experiment,
    check_budget,
    held_out,
    short_training,
)
from eqprop.tuning.probe import (
    Batches,
    BetaAgreement,
    Measurements,
    Residuals,
    Scales,
    Sizes,
    agreement,
    exact_gradients,
    residuals,
    scales,
    weight_names,
)

T_RANGE, K_RANGE, BETA_RANGE = (10, 1000), (2, 100), (0.01, 1.0)
"""Typical ranges according to the paper."""

BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LARGEST_IMPLICIT = 0.5
"""An implicit nudge that is also taken away from the target has no solution at beta = 1."""

STILL_MOVING = 1e-3
"""Residual below which a sample counts as settled: a hundredth of a usual nudge."""

DIED_OUT = 0.1
"""A process has died out once it stays below this share of its maximum."""

AS_GOOD = 0.01
"""Sign agreements within this distance of the best count as equally good."""

LARGEST_RATE = 0.1
"""First value tried for the largest rate: the upper end of the paper's range."""

SHRINK = 0.7
"""Factor on T or K from one training to the next."""

NOISE = 2.0
"""Standard deviations of a count by which a training error must exceed the previous one to count as risen."""


@dataclass(frozen=True)
class Decision:
    """A value chosen for one setting, and why."""

    name: str
    value: Any
    reason: str


def free_steps(curves: Sequence[Residuals]) -> Decision:
    """T: the first step after which nine tenths of the samples stay nearly still, at all sets of weights."""
    least, largest = T_RANGE
    found = [_stays_below(c.most, STILL_MOVING) for c in curves]
    if any(t is None for t in found):
        end = max(c.most[-1] for c in curves)
        halves = [_stays_below(c.median, STILL_MOVING) for c in curves]
        settling = [t for t in halves if t is not None]
        if len(settling) == len(curves):
            T = min(max(two_digits(max(settling)), least), largest)
            return Decision("T", T, f"half of the samples move less than {STILL_MOVING:g} per step; a tenth never do")
        return Decision(
            "T", largest, f"the residual is still {end:.1e} after {largest} steps; a longer T was not tried"
        )
    T = min(max(two_digits(max(t for t in found if t is not None)), least), largest)
    return Decision("T", T, f"after this, nine tenths of the samples move less than {STILL_MOVING:g} per step")


def second_steps(curves: Sequence[Sizes], T: int) -> Decision:
    """K: the first step after which the gradients of every weight stay below a tenth of their maximum."""
    least, largest = K_RANGE
    ends = []
    for curve in curves:
        for norms in curve.norms.values():
            peak = max(norms)
            ends.append(_stays_below(norms, DIED_OUT * peak) if peak > 0.0 else 0)
    share = f"{100 * DIED_OUT:.0f} %"
    if any(t is None for t in ends):
        K = min(largest, T)
        return Decision("K", K, f"the gradients have not died out to {share} of their maximum after {K} steps")
    longest = max(t for t in ends if t is not None)
    K = min(max(longest, least), largest, T)
    short = f" (capped at T; they take {longest} steps)" if longest > K else ""
    return Decision("K", K, f"after this, the gradients of every weight stay below {share} of their maximum{short}")


def nudge(curves: Sequence[BetaAgreement]) -> Decision:
    """beta: the largest at which the sign agreement of EP's gradient is about as good as at the best beta."""
    columns = [c.mean_sign() for c in curves]
    mean = [sum(values) / len(values) for values in zip(*columns, strict=True)]
    best = max(mean)
    chosen = max(n for n, value in enumerate(mean) if value >= best - AS_GOOD)
    betas = curves[0].betas
    top = betas[mean.index(best)]
    reason = f"{100 * mean[chosen]:.1f} % of the synapses have the sign of the exact gradient"
    if betas[chosen] != top:
        reason += f"; the best is {100 * best:.1f} % at {top:g}, but a larger beta is less sensitive to rounding"
    return Decision("beta", betas[chosen], reason)


def relative_rates(scales: Scales, names: Sequence[str], optimizer: str) -> tuple[dict[str, float], str]:
    """Learning rates of the weights relative to the largest, which is 1, and the reason for them."""
    if optimizer != "SGD":
        return dict.fromkeys(names, 1.0), f"the same for all: {optimizer} normalises gradients itself"
    wanted = {name: _wish(scales.value[name], scales.gradient.get(name, 0.0)) for name in names}
    known = [w for w in wanted.values() if w is not None]
    if not known:
        raise ValueError("No weight has a gradient, so no learning rate can be chosen. Use other initial weights.")
    largest = max(known)
    rates = {name: (largest if w is None else w) / largest for name, w in wanted.items()}
    return rates, "proportional to |W| / |gradient|, so that every weight takes the same relative step"


def _wish(value: float, gradient: float) -> float | None:
    if not gradient > 0.0 or not math.isfinite(gradient):
        return None
    return (value or 1.0) / gradient


def climb(
    error: Callable[[float], float],
    start: float,
    factor: float = 2.0,
    most: int = 6,
    in_time: Callable[[], bool] = lambda: True,
) -> tuple[float, dict[float, float]]:
    """Minimise the error over start * factor^n, first upwards, then downwards, while it falls or is infinite.

    Returns the best value and all errors tried: no more than `most`, and none after the first once time is up.
    """
    tried = {start: error(start)}
    for step in (factor, 1.0 / factor):
        here = min(tried, key=lambda c: (tried[c], c))
        while len(tried) < most and in_time():
            there = here * step
            if there in tried:
                break
            tried[there] = error(there)
            if not tried[there] < tried[here] and (step > 1.0 or tried[here] < math.inf):
                break
            here = there
    return min(tried, key=lambda c: (tried[c], c)), tried


def count_noise(percent: float, samples: int) -> float:
    """Standard deviation, in percent, of an error rate counted over `samples` samples."""
    share = min(max(percent / 100.0, 1.0 / samples), 1.0)
    return 100.0 * math.sqrt(share * (1.0 - share) / samples)


def has_risen(now: float, before: float, samples: int) -> bool:
    """Whether an error rate exceeds another by more than counting noise over `samples` samples."""
    return not now <= before + NOISE * count_noise(before, samples)


def two_digits(value: float) -> int:
    """Round up to two significant digits."""
    if value < 100:
        return math.ceil(value)
    unit = 10 ** (len(str(int(value))) - 2)
    return math.ceil(value / unit) * unit


def rounded_rates(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    """Multiply the rates by a factor and round to two significant digits."""
    return {name: float(f"{rate * factor:.1e}") for name, rate in rates.items()}


def _stays_below(values: Sequence[float], limit: float) -> int | None:
    """The first index from which all values are below the limit; None if the last is not."""
    above = [t for t, value in enumerate(values) if not value < limit]
    first = above[-1] + 1 if above else 0
    return first if first < len(values) else None


FORMAT = 1
MINI_BATCHES = 5
"""Number of mini-batches to probe."""

TIME_IS_UP = "the budget ended before more was tried"
TRAININGS, RATES = "trainings", "rates"


def largest_beta(spec: Spec) -> float:
    """The end of the range of beta that its nudge allows."""
    return LARGEST_IMPLICIT if spec.model.nudge_site == "implicit" else BETA_RANGE[1]


@dataclass(frozen=True)
class TuningResult:
    """The tuned spec, and a document with all measurements behind it."""

    spec: Spec
    document: dict[str, Any]


@dataclass
class Recipe:
    """State of the recipe: decisions so far, in order, and the measurements behind them."""

    session: Session
    spec: Spec
    tell: Callable[[str], None]
    looks: list[Measurements] = field(default_factory=list)
    decisions: dict[str, Decision] = field(default_factory=dict)
    trainings: Trainings | None = None

    def decide(self, decision: Decision) -> None:
        self.decisions[decision.name] = decision
        if decision.name != RATES:
            self.spec = self.spec.override(**{decision.name: decision.value})

    def batches(self, model: Dynamics) -> Batches:
        """Draw the same training samples every time, never held-out ones."""
        n, images = self.spec.optimizer.batch, self.session.images
        assert isinstance(images, Images), "tuning takes no stream"
        x, labels = images.sample(min(MINI_BATCHES * n, images.train_samples // n * n), self.spec.run.seed)
        y = images.targets(labels, self.session.dtype)
        return Batches(self.session.inputs(x, model).split(n), y.split(n))

    def look(self, model: Dynamics, cost: Cost, weights: str) -> None:
        """Measure at these weights, then decide T, K and beta from all measurements so far."""
        batches, tell = self.batches(model), self.tell
        tell(f"residuals at the {weights}")
        settling = residuals(model, batches.all_x(), self.spec.phases.schedule, T_RANGE[1])
        self.decide(free_steps([*(look.residuals for look in self.looks), settling]))
        tell(f"processes at the {weights}")
        longest = min(4 * self.spec.phases.T, T_RANGE[1])
        schedule = self.spec.phases.schedule
        exact = exact_gradients(model, cost, batches, longest, min(K_RANGE[1], longest), schedule)
        self.decide(second_steps([*(look.sizes for look in self.looks), exact.sizes], self.spec.phases.T))
        tell(f"sign agreement at the {weights}")
        most = largest_beta(self.spec)
        signs = agreement(model, cost, batches, exact, self.spec, [beta for beta in BETAS if beta <= most])
        self.decide(nudge([*(look.agreement for look in self.looks), signs]))
        sizes = scales(model, cost, batches, self.spec)
        self.looks.append(Measurements(weights, settling, exact.sizes, signs, sizes))


def tune(
    session: Session,
    out: Path,
    budget: float = 600.0,
    tell: Callable[[str], None] = lambda text: None,
    validation: int | None = None,
    limit: float | None = None,
) -> TuningResult:
    """Run the recipe.

    T follows from the residuals, K from where the gradients die out, beta from sign agreement, the rates from gradient
    sizes. T, K and beta are measured again at trained weights; then T and K shrink until the training error rises.

    session     gives the network, its initial weights, batch, optimizer, epochs, schedule, seed, data and machine; its
                T, K, beta and learning rates are ignored
    budget      seconds for the whole; operation counts convert them into samples of the short trainings
    validation  training samples to hold out; None: a sixth, and at most half of those trained on
    limit       seconds after which no training begins, and what was not tried is named; None: the budget
    """
    check_budget(budget)
    clock = Clock(budget if limit is None else limit)
    part = without_held_out(session, validation)
    recipe = Recipe(part, part.spec, tell)
    recipe.look(part.model, part.cost, "initial weights")
    look_seconds = clock.elapsed
    effort = short_training(replace(part, spec=recipe.spec), budget, validation=validation)
    assert isinstance(session.images, Images), "tuning takes no stream"
    recipe.trainings = trainings = Trainings(
        session.images, effort, out / TRAININGS, clock, session.own, session.spec.run.device, tell
    )
    pilot = _choose_rates(recipe, trainings, weight_names(part.model, part.cost))
    if clock.allows(look_seconds + trainings.longest):
        recipe.look(*trainings.trained(pilot), "trained weights")
        _shrink(recipe, trainings)
    else:
        for name in ("T", "K", "beta"):
            decision = recipe.decisions[name]
            recipe.decide(replace(decision, reason=f"{decision.reason}. At the initial weights; {TIME_IS_UP}"))
    return TuningResult(as_experiment(recipe.spec), _document(recipe, session, budget, effort, clock.elapsed))


def without_held_out(session: Session, validation: int | None) -> Session:
    """The same on the training samples minus the held-out ones, which replace the test set."""
    held = held_out(session.images.train_samples, validation)
    return bind(session.spec.override(validation=held), session.images, model=session.own)


def _choose_rates(recipe: Recipe, trainings: Trainings, names: Sequence[str]) -> Outcome:
    """Set the ratios of the rates from gradient sizes and their common scale by short trainings."""
    wanted, why = relative_rates(recipe.looks[0].scales, names, recipe.spec.optimizer.kind)
    outcomes: dict[float, Outcome] = {}

    def error(height: float) -> float:
        spec = _with_rates(recipe.spec, _rates(recipe, wanted, height))
        outcomes[height] = trainings.run(spec, f"rates-{height:.2g}")
        # On targets, an error may be above that of a training that diverged.
        return math.inf if outcomes[height].diverged else outcomes[height].train

    best, tried = climb(error, LARGEST_RATE, in_time=trainings.in_time)
    if outcomes[best].diverged:
        raise ArithmeticError(
            f"Every short training diverged, with largest rates from {min(tried):g} to {max(tried):g}. Use initial "
            "weights that settle (--init default), or a smaller step eps."
        )
    chosen = _rates(recipe, wanted, best)
    recipe.spec = _with_rates(recipe.spec, chosen)
    listing = ", ".join(f"{_percent(outcomes[c])} at {c:g}" for c in sorted(tried))
    recipe.decide(Decision(RATES, chosen, f"{why}; the largest chosen by training error: {listing}"))
    return outcomes[best]


def _percent(outcome: Outcome) -> str:
    return "diverged" if outcome.diverged else f"{outcome.train:.1f} %"


def _rates(recipe: Recipe, wanted: dict[str, float], height: float) -> dict[str, float]:
    """Learning rates of the weights. A bias gets its weight's rate, any other parameter the smallest."""
    rates = rounded_rates(wanted, height)
    network = recipe.session.model
    named, layers = [name for name, _ in network.named_parameters()], network.layer_parameters
    try:
        _with_rates(recipe.spec, rates).rates([*named, *recipe.spec.readout_names], layers)
    except ValueError:
        return {**rates, EVERY_OTHER: min(rates.values())}
    return rates


def _shrink(recipe: Recipe, trainings: Trainings) -> None:
    """Shrink T and K in turn to seven tenths, each until the training error rises."""
    first = trainings.run(recipe.spec, f"T-{recipe.spec.phases.T}-K-{recipe.spec.phases.K}")
    lowest, samples = first.train, trainings.effort.samples
    stopped: dict[str, str] = {}
    while len(stopped) < 2:
        for name in [n for n in ("T", "K") if n not in stopped]:
            spec = smaller(recipe.spec, name)
            if spec is None:
                # While K equals T, T cannot shrink before K does.
                if name == "K" or "K" in stopped:
                    stopped[name] = f"{getattr(recipe.spec.phases, name)} is the minimum"
                continue
            if not trainings.in_time():
                stopped[name] = TIME_IS_UP
                continue
            tried = trainings.run(spec, f"T-{spec.phases.T}-K-{spec.phases.K}")
            if tried.diverged:
                stopped[name] = f"below that the training diverges, at {getattr(spec.phases, name)}"
                continue
            if has_risen(tried.train, lowest, samples):
                here = f"{tried.train:.2f} % at {getattr(spec.phases, name)} against {lowest:.2f} %"
                stopped[name] = f"below that the training error rises: {here}"
                continue
            recipe.spec, lowest = spec, min(lowest, tried.train)
    for name in ("T", "K"):
        before, now = recipe.decisions[name], getattr(recipe.spec.phases, name)
        began = f"initially {before.value}: {before.reason}" if now < before.value else before.reason
        recipe.decide(Decision(name, now, f"{began}. Then {stopped[name]}"))


def smaller(spec: Spec, name: str) -> Spec | None:
    """The spec with seven tenths of T or K; None at the minimum, which is 1 for K and K for T."""
    now = getattr(spec.phases, name)
    below = max(int(now * SHRINK), spec.phases.K if name == "T" else 1)
    return spec.override(**{name: below}) if below < now else None


def _with_rates(spec: Spec, rates: Mapping[str, float]) -> Spec:
    """The spec with these learning rates and no others."""
    return msgspec.structs.replace(spec, optimizer=msgspec.structs.replace(spec.optimizer, rates=dict(rates)))


def _document(recipe: Recipe, session: Session, budget: float, effort: Effort, seconds: float) -> dict[str, Any]:
    assert recipe.trainings is not None, "set before any training"
    spec, printed = session.spec, papers.printed(session.spec)
    return {
        "format": FORMAT,
        "name": spec.name,
        "seed": spec.run.seed,
        "budget": budget,
        "seconds": round(seconds, 1),
        "effort": asdict(effort),
        "data": describe(session.images),
        "decisions": [{"name": d.name, "value": d.value, "reason": d.reason} for d in recipe.decisions.values()],
        "paper": None if printed is None else _beside(printed),
        "experiment": as_experiment(recipe.spec).to_dict(),
        "looks": [asdict(look) for look in recipe.looks],
        "trainings": [asdict(outcome) for outcome in recipe.trainings.done],
        "provenance": provenance(torch.device(spec.run.device)),
    }


def _beside(printed: Spec) -> dict[str, Any]:
    phases = printed.phases
    return {"T": phases.T, "K": phases.K, "beta": phases.beta, RATES: dict(printed.optimizer.rates)}
