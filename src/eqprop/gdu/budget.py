"""The error budget of a mismatch: its parts, what they make of the GDU property, and the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eqprop.gdu.metrics import Convention, Distance, Group
from eqprop.gdu.verdict import Diagnosis

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
"""What each part is, worded to continue a sentence."""
BEHIND_SQUASH = "which squash makes between neurons and the synapses do not feel"
"""Asymmetry in the neurons of a net with a primitive."""


@dataclass(frozen=True)
class ErrorParts:
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

    neurons: ErrorParts
    synapses: ErrorParts
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
) -> ErrorParts:
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
    return ErrorParts(rmse, **mean, unsettled=unsettled)


def outcome_of(whole: Mapping[Group, Distance], settled: Mapping[Group, Distance], convention: Convention) -> str:
    """Whether the synapses have the GDU property, by the thresholds of `HOLDS`.

    A parameter of any kind that EP leaves at 0 and BPTT does not breaks it.
    """
    measured = [d.metrics(convention) for g, d in whole.items() if g.kind == "synapses"]
    live = [m for m in measured if m.rmse is not None]
    heard = any(bool(d.signals()[1].any()) for g, d in whole.items() if g.kind == "synapses")
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
    heard = {g.name: [bool(mask.any()) for mask in d.signals()] for g, d in whole.items() if g.kind != "neurons"}
    return [name for name, found in heard.items() if found == [False, True]]


def sentence(
    outcome: str, neurons: ErrorParts, synapses: ErrorParts, diagnosis: Diagnosis | None, has_primitive: bool
) -> str:
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
    """Why a mismatch does no harm, or how much of the way down is left."""
    far = diagnosis.cosine is not None and diagnosis.cosine < HALF_WAY
    meaning = "A step still leads down, far from the steepest way" if far else "Learning does not suffer from it"
    return (
        f"{meaning}: {diagnosis.passed['gradient']}, the sums over all K steps that a training follows, while the RMSE "
        "counts every element and step alike, however small."
    )


HALF_WAY = 0.5
"""Below this cosine of EP's gradient to the exact one, more than learning's detail is at stake."""


def _part(what: str, parts: ErrorParts, largest: tuple[str, float], meaning: str) -> str:
    name, value = largest
    return f"{what} (mean RMSE {parts.rmse:.1e}) the largest part is {name.replace('_', ' ')} ({value:.1e}), {meaning}"


def _mean(values: list[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None
