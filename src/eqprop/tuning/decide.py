"""From curves to decisions: each a value and the reason for it. Nothing here runs a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eqprop.tuning.curves import Agreement, Residuals, Scales, Sizes

T_RANGE, K_RANGE, BETA_RANGE = (10, 1000), (2, 100), (0.01, 1.0)
"""The ranges the paper names as typical."""

BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

STILL_MOVING = 1e-3
"""Nine tenths of the samples move less than this in a step: a hundredth of a usual nudge."""

DIED_OUT = 0.1
"""A process counts as died out where it stays below this share of its largest value."""

AS_GOOD = 0.01
"""Signs that agree within a hundredth of the best count as equally good."""

LARGEST_RATE = 0.1
"""The largest rate tried first: the upper end of the range the paper names."""

SHRINK = 0.7
"""What T or K is multiplied with from one training to the next."""

NOISE = 2.0
"""A training error has risen if it is so many standard deviations of a count above the one before."""


@dataclass(frozen=True)
class Decision:
    """What was decided, in one field of the record, and why."""

    name: str
    value: Any
    reason: str


def free_steps(curves: Sequence[Residuals]) -> Decision:
    """T: the first step after which nine tenths of the samples stay nearly still, at every set of weights."""
    least, largest = T_RANGE
    found = [_stays_below(c.most, STILL_MOVING) for c in curves]
    if any(t is None for t in found):
        end = max(c.most[-1] for c in curves)
        halves = [_stays_below(c.median, STILL_MOVING) for c in curves]
        settling = [t for t in halves if t is not None]
        if len(settling) == len(curves):
            T = min(max(two_digits(max(settling)), least), largest)
            return Decision("T", T, f"half of the samples move less than {STILL_MOVING:g} in a step; a tenth never do")
        return Decision(
            "T", largest, f"the residual is still {end:.1e} after {largest} steps; a longer T was not tried"
        )
    T = min(max(two_digits(max(t for t in found if t is not None)), least), largest)
    return Decision("T", T, f"from there on nine tenths of the samples move less than {STILL_MOVING:g} in a step")


def second_steps(curves: Sequence[Sizes], T: int) -> Decision:
    """K: from there on the gradients of every weight stay below a tenth of their largest."""
    least, largest = K_RANGE
    ends = []
    for curve in curves:
        for norms in curve.norms.values():
            peak = max(norms)
            ends.append(_stays_below(norms, DIED_OUT * peak) if peak > 0.0 else 0)
    share = f"{100 * DIED_OUT:.0f} %"
    if any(t is None for t in ends):
        K = min(largest, T)
        return Decision("K", K, f"the gradients have not died out to {share} of their largest after {K} steps")
    longest = max(t for t in ends if t is not None)
    K = min(max(longest, least), largest, T)
    short = f" (no more than T; they take {longest})" if longest > K else ""
    return Decision("K", K, f"from there on the gradients of every weight stay below {share} of their largest{short}")


def nudge(curves: Sequence[Agreement]) -> Decision:
    """beta: the largest at which the signs of EP's gradient agree about as well as at the best."""
    columns = [c.mean_sign() for c in curves]
    mean = [sum(values) / len(values) for values in zip(*columns, strict=True)]
    best = max(mean)
    chosen = max(n for n, value in enumerate(mean) if value >= best - AS_GOOD)
    betas = curves[0].betas
    top = betas[mean.index(best)]
    reason = f"{100 * mean[chosen]:.1f} % of the synapses have the sign of the exact gradient"
    if betas[chosen] != top:
        reason += f"; at best {100 * best:.1f} %, at {top:g}, and a larger beta stands above rounding and unrest"
    return Decision("beta", betas[chosen], reason)


def relative_rates(scales: Scales, names: Sequence[str], optimizer: str) -> tuple[dict[str, float], str]:
    """Rates of the weights up to a common factor, the largest being 1, and the reason for them."""
    if optimizer != "SGD":
        return dict.fromkeys(names, 1.0), f"the same for all: {optimizer} weighs the sizes of gradients itself"
    wanted = {name: _wish(scales.value[name], scales.gradient.get(name, 0.0)) for name in names}
    known = [w for w in wanted.values() if w is not None]
    if not known:
        raise ValueError("No weight has a gradient, so no learning rate can be chosen from their sizes.")
    largest = max(known)
    rates = {name: (largest if w is None else w) / largest for name, w in wanted.items()}
    return rates, "as |W| / |gradient|, so that every weight takes the same relative step"


def _wish(value: float, gradient: float) -> float | None:
    if not gradient > 0.0 or not math.isfinite(gradient):
        return None
    return (value or 1.0) / gradient


def climb(
    error: Callable[[float], float], start: float, factor: float = 2.0, most: int = 6
) -> tuple[float, dict[float, float]]:
    """The lowest error over start * factor^n, n going up and then down as long as it falls; and all that was tried."""
    tried = {start: error(start)}
    for step in (factor, 1.0 / factor):
        here = min(tried, key=lambda c: (tried[c], c))
        while len(tried) < most:
            there = here * step
            if there in tried:
                break
            tried[there] = error(there)
            if not tried[there] < tried[here]:
                break
            here = there
    return min(tried, key=lambda c: (tried[c], c)), tried


def count_noise(percent: float, samples: int) -> float:
    """The standard deviation, in percent, of an error rate counted over so many samples."""
    share = min(max(percent / 100.0, 1.0 / samples), 1.0)
    return 100.0 * math.sqrt(share * (1.0 - share) / samples)


def has_risen(now: float, before: float, samples: int) -> bool:
    """Whether an error rate is above another by more than counting over so many samples explains."""
    return not now <= before + NOISE * count_noise(before, samples)


def two_digits(value: float) -> int:
    """Rounded up to two significant digits."""
    if value < 100:
        return math.ceil(value)
    unit = 10 ** (len(str(int(value))) - 2)
    return math.ceil(value / unit) * unit


def rounded_rates(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    """The rates times a factor, to two significant digits."""
    return {name: float(f"{rate * factor:.1e}") for name, rate in rates.items()}


def _stays_below(values: Sequence[float], limit: float) -> int | None:
    """The first index from which on every value is below the limit; None if the last is not."""
    above = [t for t, value in enumerate(values) if not value < limit]
    first = above[-1] + 1 if above else 0
    return first if first < len(values) else None
