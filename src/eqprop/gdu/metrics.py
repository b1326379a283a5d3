"""Groups of neurons and synapses, the distances between their processes, and the error budget of a mismatch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators import BPTT
from eqprop.estimators.base import Estimator, Step, trainable
from eqprop.gdu.lockstep import Moment
from eqprop.gdu.verdict import Diagnosis
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
    the cost's pull and has the pull's. Synapses have both times what enters them.
    """

    f: float = 0.0
    g: float = 0.0
    entering: float = 1.0

    def of(self, group: Group) -> tuple[float, float]:
        times = 1.0 if group.kind == "neurons" else self.entering
        return self.f * times, self.g * times


def noise(problem: Problem, s: State, beta: float) -> Noise:
    """The noise of processes that begin at the end s of a free phase."""
    size, pull = (max(float(layer.abs().max()) for layer in state) for state in (s, problem.pull(s)))
    entering = max(1.0, size, float(problem.x.abs().max()) if problem.x.is_floating_point() else 1.0)
    unit = ROUNDING * torch.finfo(s[0].dtype).eps
    return Noise(unit * max(1.0, size) / (abs(beta) * problem.model.nudge_scale), unit * pull, entering)


class Distance:
    """Running sums of one group: f, g and, for a budget, the parts of f - g. Steps up to `noise` count as zero."""

    def __init__(self, like: Tensor, parts: tuple[str, ...], noise: tuple[float, float] = (0.0, 0.0)) -> None:
        self.noise = noise
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

    def one_sided(self) -> bool:
        """Whether f is zero throughout and g is not."""
        f, g = self._heard()
        return not bool(f.any()) and bool(g.any())

    def silent(self) -> bool:
        """Whether g is zero throughout."""
        return not bool(self._heard()[1].any())

    def finite(self) -> bool:
        return bool(torch.isfinite(self.ee).all())

    def metrics(self, convention: Convention) -> Metrics:
        scale, dead = self._scale()
        left_out = int(dead.sum())
        cumulative = torch.maximum(self.cum_ff, self.cum_gg)
        lengths = 0.0 if bool(dead.all()) else float(self.ff.sum() * self.gg.sum()) ** 0.5
        return Metrics(
            rmse=self._mean(self.ee, scale, dead, convention),
            rmse_cumulative=self._mean(self.cum_ee, cumulative, dead | (cumulative == 0), convention),
            sign=float(self.agree / self.signed) if float(self.signed) and not bool(dead.all()) else None,
            cosine=float(self.dot) / lengths if lengths else None,
            norm=float(self.gg.mean() / max(self.steps, 1)) ** 0.5,
            left_out=left_out,
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
        f, g = self._heard()
        return torch.maximum(self.ff, self.gg), ~(f | g)

    def _heard(self) -> tuple[Tensor, Tensor]:
        """Which elements of f and of g are more than rounding."""
        steps = max(self.steps, 1)
        f, g = (squares > steps * limit**2 for squares, limit in zip((self.ff, self.gg), self.noise, strict=True))
        return f, g

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
    moments: Iterable[Moment], every: tuple[Group, ...], convention: Convention, noise: Noise
) -> dict[Group, Distance]:
    """Accumulate the distances of all groups over the moments."""
    found: dict[Group, Distance] = {}
    for t, moment in enumerate(moments):
        for group in every:
            f, g = batch_mean(moment.ep, group), batch_mean(moment.bptt, group)
            parts = {name: p for name, p in moment.parts.items() if p.neurons or group.kind != "neurons"}
            if group not in found:
                found[group] = Distance(f, tuple(parts), noise.of(group))
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


PARTS = ("residual", "finite_beta", "output_slope", "asymmetry", "rounding")
HOLDS, ALIGNED, FAR = 0.05, 0.5, 0.75
"""The GDU property holds if no group of synapses has an RMSE above HOLDS. It fails if some group has a cosine below
ALIGNED or an RMSE above FAR (directions may agree, sizes do not), or if asymmetry alone contributes more than HOLDS:
the theorem's condition is then broken, not approximated. In between it holds approximately."""

MEANING = {
    "residual": "which a longer free phase lowers",
    "finite_beta": "which shrinks with beta",
    "output_slope": "the nudge bypassing sigma' at the output, which BPTT sees",
    "asymmetry": "the Jacobian of the transition not being symmetric",
    "rounding": "which a larger beta or float64 lowers",
    "unsettled": "made by samples that have not settled",
}
"""What each part is, in the words of a sentence that goes on."""
BEHIND_SQUASH = "which squash makes between neurons and the synapses do not feel"
"""Asymmetry in the neurons of a net with a primitive."""


@dataclass(frozen=True)
class Parts:
    """The parts of the RMSE of neurons or synapses, as means over groups; their sum is at least the RMSE.

    None: does not apply (`rounding` is separated in float32 only). `unsettled` is the contribution of the samples that
    have not settled; the other parts are those of the settled samples.
    """

    rmse: float | None
    residual: float | None
    finite_beta: float | None
    output_slope: float | None
    asymmetry: float | None
    rounding: float | None
    unsettled: float | None

    def largest(self) -> tuple[str, float] | None:
        there = {n: v for n in (*PARTS, "unsettled") if (v := getattr(self, n)) is not None}
        return max(there.items(), key=lambda item: item[1]) if there else None


@dataclass(frozen=True)
class Budget:
    """The causes that limit the match.

    neurons, synapses   the parts of the RMSE, in the same measure
    asymmetry           of the Jacobian at the state reached, 0 ... 1 (see `eqprop.gdu.lockstep.asymmetry`)
    spectral_radius     of the Jacobian, the largest over the settled samples
    saturated           fraction of neurons with sigma' near zero
    outcome             "holds", "holds approximately", "fails", or "silent" where no synapse carries a signal
    verdict             one sentence
    """

    neurons: Parts
    synapses: Parts
    asymmetry: float
    spectral_radius: float
    saturated: float
    outcome: str
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values. The top-level parts are those of the synapses; `parts` also has the neurons'."""
        return {
            **{name: getattr(self.synapses, name) for name in ("residual", "finite_beta", "output_slope", "unsettled")},
            "asymmetry": self.asymmetry,
            "spectral_radius": self.spectral_radius,
            "saturated": self.saturated,
            "parts": {"neurons": asdict(self.neurons), "synapses": asdict(self.synapses)},
            "outcome": self.outcome,
            "verdict": self.verdict,
        }


def parts_of(
    kind: str,
    whole: Mapping[Group, Distance],
    settled: Mapping[Group, Distance],
    convention: Convention,
    has_primitive: bool,
) -> Parts:
    """The parts for neurons or synapses, as means over the groups of that kind.

    `whole` covers all samples compared, `settled` the settled ones among them (the same if all have settled).
    """
    rmse = _mean([d.metrics(convention).rmse for g, d in whole.items() if g.kind == kind])
    rest = _mean([d.metrics(convention).rmse for g, d in settled.items() if g.kind == kind])
    shares = [d.parts_of_rmse(convention) for g, d in settled.items() if g.kind == kind]
    mean = {name: _mean([s.get(name) for s in shares]) for name in PARTS}
    if kind == "synapses" and has_primitive and rest is not None and mean["output_slope"] is None:
        mean["output_slope"] = 0.0
    unsettled = None if rmse is None or rest is None else rmse - rest
    return Parts(rmse, **mean, unsettled=unsettled)


def outcome_of(whole: Mapping[Group, Distance], settled: Mapping[Group, Distance], convention: Convention) -> str:
    """Whether the synapses have the GDU property, by the thresholds of `HOLDS`.

    A parameter of any kind that EP leaves at 0 and BPTT does not breaks it.
    """
    measured = [d.metrics(convention) for g, d in whole.items() if g.kind == "synapses"]
    live = [m for m in measured if m.rmse is not None]
    heard = any(not d.silent() for g, d in whole.items() if g.kind == "synapses")
    if left_at_zero(whole):
        return "fails"
    if not live or not heard:
        return "silent"
    if all(m.rmse is not None and m.rmse <= HOLDS for m in live):
        return "holds"
    turned = any(m.cosine is None or m.cosine < ALIGNED or (m.rmse or 0.0) > FAR for m in live)
    shares = [d.parts_of_rmse(convention)["asymmetry"] for g, d in settled.items() if g.kind == "synapses"]
    broken = any(share is not None and share > HOLDS for share in shares)
    return "fails" if turned or broken else "holds approximately"


def left_at_zero(whole: Mapping[Group, Distance]) -> list[str]:
    """Parameters that EP gives nothing at all and BPTT something."""
    return [g.name for g, d in whole.items() if g.kind != "neurons" and d.one_sided()]


def sentence(outcome: str, neurons: Parts, synapses: Parts, diagnosis: Diagnosis | None, has_primitive: bool) -> str:
    """The verdict: what limits the match, the remedy if it needs one, and whether learning suffers.

    `diagnosis` is the doctor's, of these phases on these samples; None where the property holds and nobody asked.
    """
    first, second = synapses.largest(), neurons.largest()
    if outcome == "silent":
        cause = "" if diagnosis is None or diagnosis.finding is None else f" {diagnosis.finding.text(diagnosis.voice)}"
        return f"No synapse carries a signal, so there is nothing to compare.{cause}"
    if diagnosis is not None and diagnosis.finding is not None:
        limit = "" if first is None else f" For {_part('synapses', synapses, first, MEANING[first[0]])}."
        return f"The GDU property {outcome}. {diagnosis.finding.text(diagnosis.voice)}{limit}"
    if first is None:  # what is measured is a bias that EP leaves at zero
        return f"The GDU property {outcome}; no synapse carries a signal, so there is no error to explain."
    text = f"The GDU property {outcome}: for {_part('synapses', synapses, first, MEANING[first[0]])}"
    if second is not None and second[0] != first[0]:
        squashed = second[0] == "asymmetry" and has_primitive
        text += f"; for {_part('neurons', neurons, second, BEHIND_SQUASH if squashed else MEANING[second[0]])}"
    if diagnosis is None:
        return f"{text}. Nothing has to change."
    closer = diagnosis.restless if first[0] in ("residual", "unsettled") else None
    remedy = "" if closer is None else f" {closer.remedy(diagnosis.voice)}"
    return f"{text}. {_harmless(diagnosis)}{remedy}"


def _harmless(diagnosis: Diagnosis) -> str:
    """Why a mismatch does no harm."""
    return (
        f"Learning does not suffer from it: {diagnosis.passed['gradient']}, the sums over all K steps that a training "
        f"follows, while the RMSE counts every element and step alike, however small."
    )


def _part(what: str, parts: Parts, largest: tuple[str, float], meaning: str) -> str:
    name, value = largest
    return f"{what} (mean RMSE {parts.rmse:.1e}) the largest part is {name.replace('_', ' ')} ({value:.1e}), {meaning}"


def _mean(values: list[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


@dataclass(frozen=True)
class Match:
    """How far a gradient agrees with a reference: cosine, ratio of norms, |difference| / |reference|."""

    cosine: float
    norm: float
    distance: float


@dataclass(frozen=True)
class Gradients:
    """What `compare_gradients` found: the two estimators, and how far they agree by parameter; "all" is the whole."""

    estimator: Estimator
    reference: Estimator
    parameters: dict[str, Match]

    def __str__(self) -> str:
        width = max(len(name) for name in self.parameters)
        rows = [
            f"{name:>{width}} {m.cosine:8.4f} {m.norm:8.4f} {m.distance:9.1e}" for name, m in self.parameters.items()
        ]
        head = f"{'':>{width}} {'cosine':>8} {'norm':>8} {'distance':>9}"
        return "\n".join([f"{self.estimator}", f"against {self.reference}", head, *rows])


def compare_gradients(
    estimator: Estimator, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, reference: Estimator | None = None
) -> Gradients:
    """How far an estimator's gradient of this batch, your own's too, agrees with a reference's.

    reference   by default BPTT with the estimator's T and K, the gradient EP's steps correspond to; give
                RBP(T=1000, K=1000) for that at rest
    """
    against = reference or BPTT(T=max(estimator.T, estimator.K), K=estimator.K)
    found, exact = ({p: g.double() for p, g in e.gradient(model, cost, x, y)[1].items()} for e in (estimator, against))
    names = {p: name for name, p in (*model.named_parameters(), *cost.named_parameters(prefix="cost"))}
    missing = next((names[p] for p in exact if p not in found), None)
    if missing is not None:
        raise ValueError(f"{type(estimator).__name__} gave no gradient of {missing}; expected one per parameter.")
    pairs = {names[p]: (found[p].flatten(), g.flatten()) for p, g in exact.items()}
    whole = (torch.cat(parts) for parts in zip(*pairs.values(), strict=True))
    return Gradients(estimator, against, {name: _match(*both) for name, both in {**pairs, "all": (*whole,)}.items()})


def _match(found: Tensor, exact: Tensor) -> Match:
    """A gradient of zero has no direction, so its cosine is nan; two of zero agree."""
    size, other, gap = float(found.norm()), float(exact.norm()), float((found - exact).norm())
    if not other:
        return Match(math.nan, math.inf, math.inf) if size else Match(1.0, 1.0, 0.0)
    return Match(float(found @ exact) / (size * other) if size else math.nan, size / other, gap / other)
