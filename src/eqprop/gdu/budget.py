"""The error budget: what the mismatch between EP and BPTT is made of, and which part is the largest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eqprop.gdu.metrics import Convention, Distance, Group

PARTS = ("residual", "finite_beta", "output_slope", "asymmetry", "rounding")
HOLDS, ALIGNED, FAR = 0.05, 0.5, 0.75
"""The GDU property is said to hold if no group of synapses has an RMSE above the first. It is said to fail if in some
group the cosine is below the second or the RMSE above the third (the directions may agree, the sizes do not), or if
asymmetry alone is worth more than the first: the theorem's condition is then not approximated but broken. Between, it
holds approximately."""

MEANING = {
    "residual": "the free phase has not come to rest: raise T",
    "finite_beta": "beta is not small: lower it",
    "output_slope": "the nudge bypasses sigma' at the output, which BPTT sees",
    "asymmetry": "the Jacobian of the transition is not symmetric, so no primitive function stands behind it",
    "rounding": "updates of this size are lost in rounding: raise beta, or use float64",
    "unsettled": "samples that have not settled: leave them out (--drop-unsettled), or let the layers of a "
    "prototypical net take turns (--schedule alternating)",
}


@dataclass(frozen=True)
class Parts:
    """The parts of the RMSE in neurons and in synapses, means over groups; together no less than the RMSE.

    None: does not apply (`rounding` is told apart in float32 only). `unsettled` is what the samples that have not
    settled add to the RMSE; the others are those of the settled samples.
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
    """What limits the match.

    neurons, synapses   the parts of the RMSE, all in its measure
    asymmetry           of the Jacobian at the state reached, 0 ... 1 (see `eqprop.gdu.linearised.asymmetry`)
    spectral_radius     of the Jacobian, the largest over the settled samples
    saturated           fraction of neurons with sigma' near zero
    outcome             "holds", "holds approximately" or "fails"
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
        """Plain values. The parts at the top are those of the synapses; `parts` has them for neurons too."""
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
    """The parts for neurons or synapses: means over the groups of that kind.

    `whole` has all the samples compared, `settled` those of them that have settled (the same if all have).
    """
    rmse = _mean([d.metrics(convention).rmse for g, d in whole.items() if g.kind == kind])
    rest = _mean([d.metrics(convention).rmse for g, d in settled.items() if g.kind == kind])
    shares = [d.parts_of_rmse(convention) for g, d in settled.items() if g.kind == kind]
    mean = {name: _mean([s.get(name) for s in shares]) for name in PARTS}
    if kind == "synapses" and has_primitive and mean["output_slope"] is None:
        mean["output_slope"] = 0.0
    unsettled = None if rmse is None or rest is None else rmse - rest
    return Parts(rmse, **mean, unsettled=unsettled)


def outcome_of(whole: Mapping[Group, Distance], settled: Mapping[Group, Distance], convention: Convention) -> str:
    """Whether the synapses have the GDU property, in the words of `HOLDS`."""
    measured = [d.metrics(convention) for g, d in whole.items() if g.kind == "synapses"]
    live = [m for m in measured if m.rmse is not None]
    if all(m.rmse is not None and m.rmse <= HOLDS for m in live):
        return "holds"
    turned = any(m.cosine is None or m.cosine < ALIGNED or (m.rmse or 0.0) > FAR for m in live)
    shares = [d.parts_of_rmse(convention)["asymmetry"] for g, d in settled.items() if g.kind == "synapses"]
    broken = any(share is not None and share > HOLDS for share in shares)
    return "fails" if turned or broken else "holds approximately"


def sentence(outcome: str, neurons: Parts, synapses: Parts) -> str:
    """One sentence: what limits the match of the synapses, and of the neurons where it is something else."""
    first, second = synapses.largest(), neurons.largest()
    if first is None:
        return f"The GDU property {outcome}; no synapse carries a signal, so there is nothing to limit."
    text = f"The GDU property {outcome}: {_part('synapses', synapses, first)}"
    if second is not None and second[0] != first[0]:
        text += f"; {_part('neurons', neurons, second)}"
    return text + "."


def _part(what: str, parts: Parts, largest: tuple[str, float]) -> str:
    name, value = largest
    return f"for {what} (mean RMSE {parts.rmse:.1e}) the largest part is {name} ({value:.1e}), {MEANING[name]}"


def _mean(values: list[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None
