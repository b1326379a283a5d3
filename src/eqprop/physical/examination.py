"""What the doctor asks of a machine: does it read a state of rest of the network it is said to be, and is it nudged
the right way?"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eqprop.cost import Nudge, Problem
from eqprop.dynamics import PrimitiveDynamics
from eqprop.estimators import EP
from eqprop.gdu.verdict import Diagnosis, Finding, Voice
from eqprop.relax import Phase, Schedule, relax
from eqprop.state import State, distance

if TYPE_CHECKING:
    from eqprop.physical.machine import Machine

FACTORS = (2.0, 4.0)
"""The weights are written so many times their size, to see whether a limit cuts them."""
CLOSE = 1e-3
"""A reading is that of the network where it is off by less than this share of its largest number, noise apart."""
NOISES = 6.0
"""And what so many standard deviations of the machine's own noise explain is none of its faults."""
EXPLAINS = 0.2
"""Another network explains a reading if it is at most this share as far from its rest."""
MOST = 4_000
"""Steps of the model in search of its rest."""


@dataclass
class Bench:
    """A machine, and what it read of one mini-batch with its weights as they are."""

    machine: Machine
    problem: Problem
    ep: EP

    @cached_property
    def twice(self) -> tuple[State, State]:
        return self.read(), self.read()

    @property
    def free(self) -> State:
        return self.twice[0]

    @cached_property
    def noise(self) -> float:
        """The standard deviation of a reading, from two of the same question."""
        apart = torch.cat([(a - b).flatten() for a, b in zip(*self.twice, strict=True)])
        return float(apart.square().mean().sqrt()) / 2**0.5

    def read(self, nudge: Nudge | None = None, state: State | None = None) -> State:
        return relax(self.machine, self.problem.x, Phase(self.ep.T), state, nudge).state

    def allowed(self, s: State) -> float:
        """How far from rest a reading may be."""
        return max(CLOSE * max(float(v.abs().max()) for v in s), NOISES * self.noise, 1e-6)


def examine_machine(machine: Machine, problem: Problem, ep: EP, voice: Voice) -> Diagnosis:
    """The first fault of a machine, or none. Other weights are written on the way, and its own again at the end."""
    bench, passed = Bench(machine, problem, ep), dict[str, str]()
    before = {name: p.detach().clone() for name, p in machine.named_parameters()}
    try:
        with torch.no_grad():
            passed["noise"] = f"two readings of the same question differ by {bench.noise:.1e}"
            for name, check in (("machine-rest", _rest), ("machine-weights", _weights), ("machine-nudge", _nudge)):
                found = check(bench)
                if isinstance(found, Finding):
                    return Diagnosis(found, passed, voice=voice)
                passed[name] = found
                _restore(machine, before)
    finally:
        _restore(machine, before)
    passed["work"] = f"the examination took {machine.work}"
    return Diagnosis(None, passed, voice=voice)


@torch.no_grad()
def _restore(machine: Machine, before: dict[str, Tensor]) -> None:
    for name, value in before.items():
        machine.get_parameter(name).copy_(value)


def model_rest(model: PrimitiveDynamics, x: Tensor, s: State, nudge: Nudge | None = None) -> tuple[State, bool]:
    """Where the model comes to rest from s, and whether it does."""
    schedule: Schedule = "sweeps" if model.bipartite else "synchronous"
    found = relax(model, x, Phase(MOST, schedule, "settled", still=1e-9, checked=False), s, nudge)
    moved = float(found.residual.max())
    return found.state, moved < 1e-4 * max(1.0, *(float(v.abs().max()) for v in found.state))


def _apart(a: State, b: State) -> float:
    return float(distance(a, b, 1).max())


def _rest(bench: Bench) -> Finding | str:
    """Whether what is read is at rest."""
    machine, x, read = bench.machine, bench.problem.x, bench.free
    allowed = bench.allowed(read)
    rest, found = model_rest(machine.model, x, read)
    if not found:
        return "the model does not come to rest from the readings, so they have nothing to be compared with"
    off = _apart(read, rest)
    if off <= allowed:
        return f"readings are {off:.1e} from rest"
    if machine.abilities.continues:
        again = read
        for _ in range(3):
            again = bench.read(state=again)
        moved = _apart(again, read)
        if moved > allowed and _apart(again, rest) < 0.9 * off:
            return Finding(
                "machine-rest",
                f"settling again from a reading moves it by {moved:.1e}, towards the rest that is {off:.1e} away",
                advice="Let it settle longer before it is read.",
            )
    steps, near = _nearest_step(machine.model, x, read)
    if near <= max(0.05 * off, 2.0 * bench.noise, allowed if allowed < 0.05 * off else 0.0):
        return Finding(
            "machine-rest",
            f"readings are {off:.1e} from rest, and what the model passes after {steps} steps",
            advice="Let it settle longer before it is read.",
        )
    return _other(bench, off, 1.0)


def _nearest_step(model: PrimitiveDynamics, x: Tensor, read: State) -> tuple[int, float]:
    """The step of the model's free phase that is nearest to a reading, and how near."""
    drive, s = model.drive(x), model.init_state(x)
    best = (0, _apart(s, read))
    for t in range(1, 200):
        s = model.step(drive, s)
        if (near := _apart(s, read)) < best[1]:
            best = t, near
    return best


def _weights(bench: Bench) -> Finding | str:
    """Whether larger weights still are what the machine runs with."""
    machine, x = bench.machine, bench.problem.x
    seen = []
    own = {name: p.clone() for name, p in machine.named_parameters() if p.dim() > 1}
    for factor in FACTORS:
        for name, value in own.items():
            machine.get_parameter(name).copy_(factor * value)
        # Large weights may go back and forth, or have several rests: then the model is no measure.
        alone = relax(machine.model, x, Phase(MOST, stop="settled", still=1e-9, checked=False))
        if not bool((alone.residual < 1e-4).all()):
            continue
        read = bench.read()
        rest, found = model_rest(machine.model, x, read)
        if not found:
            continue
        off = _apart(read, rest)
        if off > bench.allowed(read):
            return _other(bench, off, factor)
        seen.append(f"{factor:g}")
    return f"weights {' and '.join(seen)} times as large act as written" if seen else "larger weights do not settle"


def _other(bench: Bench, off: float, factor: float) -> Finding:
    """The machine runs another network than the one that was written: with weights cut at a limit, or else unknown."""
    machine, read = bench.machine, bench.read()
    largest = max(float(p.detach().abs().max()) for p in machine.parameters() if p.dim() > 1)
    trials = {share: _off_when_cut(machine.model, bench.problem.x, read, share * largest) for share in _shares()}
    share = min(trials, key=lambda s: trials[s])
    for width in (0.04, 0.01, 0.003):
        near = {
            s: _off_when_cut(machine.model, bench.problem.x, read, s * largest) for s in (share - width, share + width)
        }
        trials |= near
        share = min(trials, key=lambda s: trials[s])
    if trials[share] < EXPLAINS * off and share < 0.99:
        limit = share * largest
        cut = sum(int((p.detach().abs() > limit).sum()) for p in machine.parameters() if p.dim() > 1)
        at = "" if factor == 1.0 else f", with weights {factor:g} times as large"
        return Finding(
            "machine-weights",
            f"readings are those of weights cut at about {limit:.3g}, which cuts {cut} of them{at}",
            advice="Declare the limit: return clamped weights in the model's constrained(), or scale what is written.",
        )
    return Finding(
        "machine-other",
        f"readings are {off:.1e} from the rest of the model, {off / max(bench.noise, 1e-12):.1g} times their noise",
        advice="Look at what write() sends, at the order of layers in the reading, and at units and offsets.",
    )


def _shares() -> list[float]:
    return [k / 12 for k in range(1, 13)]


def _off_when_cut(model: PrimitiveDynamics, x: Tensor, read: State, limit: float) -> float:
    """How far a reading is from the rest of the model with its weights cut at a limit."""
    cut = copy.deepcopy(model)
    for p in cut.parameters():
        if p.dim() > 1:
            p.clamp_(-limit, limit)
    rest, found = model_rest(cut, x, read)
    return _apart(rest, read) if found else float("inf")


def _nudge(bench: Bench) -> Finding | str:
    """Whether a nudge moves the outputs towards the target, and one of the other sign away from it."""
    machine, problem, free = bench.machine, bench.problem, bench.free
    seen = []
    for sign in machine.abilities.signs:
        nudge = Nudge(problem.cost, problem.y, sign * abs(float(bench.ep.beta)))
        read = bench.read(nudge, free)
        moved = read[0] - free[0]
        rest = model_rest(machine.model, problem.x, free)[0]
        wanted = model_rest(machine.model, problem.x, rest, nudge)[0][0] - rest[0]
        size = float(wanted.norm())
        if float(moved.norm()) <= 3.0 * bench.noise * moved.numel() ** 0.5 and bench.noise > 0.0:
            return Finding(
                "machine-nudge",
                f"a nudge of {nudge.beta:+g} moves the outputs by no more than their noise of {bench.noise:.1e}",
                advice="Use a larger beta, or read more than once.",
            )
        along = float((moved * wanted).sum()) / size**2 if size else 0.0
        if along < 0.0:
            costs = [float(problem.cost(s, problem.y, problem.theta).mean()) for s in (read, free)]
            return Finding(
                "machine-nudge",
                f"a nudge of {nudge.beta:+g} moves the outputs the wrong way, {along:.2f} of what it should; the cost "
                f"changes by {costs[0] - costs[1]:+.1e}",
                advice="Reverse the sign of the nudge in settle(): positive beta pulls towards y.",
            )
        if not 0.5 < along < 2.0:
            return Finding(
                "machine-nudge",
                f"a nudge of {nudge.beta:+g} moves the outputs {along:.2f} times as far as it should",
                advice="Calibrate the strength of the nudge, or give EP the beta that the machine really applies.",
            )
        seen.append(f"{nudge.beta:+g}: {along:.2f}")
    return f"nudges move the outputs as they should ({', '.join(seen)} of the model's)"
