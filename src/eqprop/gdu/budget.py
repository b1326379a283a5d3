"""The error budget: the causes of the mismatch between EP and BPTT, and which is the largest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eqprop.gdu.metrics import Convention, Distance, Group

PARTS = ("residual", "finite_beta", "output_slope", "asymmetry", "rounding")
HOLDS, ALIGNED, FAR = 0.05, 0.5, 0.75
"""The GDU property holds if no group of synapses has an RMSE above HOLDS. It fails if some group has a cosine below
ALIGNED or an RMSE above FAR (directions may agree, sizes do not), or if asymmetry alone contributes more than HOLDS:
the theorem's condition is then broken, not approximated. In between it holds approximately."""

MEANING = {
    "residual": "the free phase has not come to rest: raise T",
    "finite_beta": "beta is not small: lower it",
    "output_slope": "the nudge bypasses sigma' at the output, which BPTT sees",
    "asymmetry": "the Jacobian of the transition is not symmetric, so it does not derive from a primitive function",
    "rounding": "updates of this size are lost in rounding: raise beta, or use float64",
    "unsettled": "samples that have not settled: drop them (--drop-unsettled), or update the layers of a prototypical "
    "net alternately (--schedule alternating)",
}


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
    if kind == "synapses" and has_primitive and mean["output_slope"] is None:
        mean["output_slope"] = 0.0
    unsettled = None if rmse is None or rest is None else rmse - rest
    return Parts(rmse, **mean, unsettled=unsettled)


def outcome_of(whole: Mapping[Group, Distance], settled: Mapping[Group, Distance], convention: Convention) -> str:
    """Whether the synapses have the GDU property, by the thresholds of `HOLDS`."""
    measured = [d.metrics(convention) for g, d in whole.items() if g.kind == "synapses"]
    live = [m for m in measured if m.rmse is not None]
    if all(m.rmse is not None and m.rmse <= HOLDS for m in live):
        return "holds"
    turned = any(m.cosine is None or m.cosine < ALIGNED or (m.rmse or 0.0) > FAR for m in live)
    shares = [d.parts_of_rmse(convention)["asymmetry"] for g, d in settled.items() if g.kind == "synapses"]
    broken = any(share is not None and share > HOLDS for share in shares)
    return "fails" if turned or broken else "holds approximately"


def sentence(outcome: str, neurons: Parts, synapses: Parts) -> str:
    """One sentence on what limits the match of the synapses, and of the neurons if that differs."""
    first, second = synapses.largest(), neurons.largest()
    if first is None:
        return f"The GDU property {outcome}; no synapse carries a signal, so there is no error to explain."
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
