"""Resistive nets as netlists for ngspice: the circuit itself, and a check of our solution against its own."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Cost, Nudge, SquaredError
from eqprop.physical.machine import Abilities, Machine, Reading
from eqprop.physical.resistive import Resistive
from eqprop.relax import Phase, relax
from eqprop.state import State

Diodes = Literal["ideal", "real"]
MODELS: dict[Diodes, str] = {
    "ideal": ".model limit d(is=1e-12 n=1e-7)",
    "real": ".model limit d(is=2.52e-9 rs=0.568 n=1.752)",
}
"""ngspice's own diodes: one with a forward voltage of a tenth of a microvolt, and the common 1N4148. With an emission
coefficient n a few times smaller ngspice no longer converges."""
OPTIONS = ".options gmin=1e-15 abstol=1e-14 vntol=1e-9 reltol=1e-7 itl1=2000"
UNIT = 1e-3
"""What a conductance of 1 is in the circuit, in siemens: a resistor of 1000 ohms. Voltages do not depend on it."""
LEAST = 1e-9
"""Conductances below this are left out."""
SECONDS = 120.0
"""How long one run of ngspice may take by default."""


class SpiceError(OSError):
    """ngspice is missing, failed, or took too long."""


def netlist(
    model: Resistive, x: Tensor, nudge: Nudge | None = None, diodes: Diodes = "ideal", title: str = "resistive net"
) -> str:
    """The circuit of one sample x (inputs,), as text that ngspice takes: its operating point is the state at rest.

    x       one sample, (inputs,)
    diodes  how limits are modelled
    title   the first line of the text
    model   its conductances are resistors, its biases current sources, its limits diodes to ground
    nudge   None, or a resistor of 1/beta from each output to a source at its target; negative where beta is

    Nodes are named by layer and number, n0_3 the fourth output; inputs x0, x1, ... and, reversed, r0, r1, ...
    """
    _check_conductances(model)
    if x.dim() != 1 or len(x) != model.sizes[-1]:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected one sample, ({model.sizes[-1]},).")
    if diodes not in MODELS:
        raise ValueError(f"diodes is {diodes!r}; expected 'ideal' or 'real'.")
    return "\n".join([f"* {title}", *_sources(model, x), *_elements(model, diodes), *_nudges(model, nudge), ".end\n"])


def _check_conductances(model: Resistive) -> None:
    for n in range(model.depth):
        least = float(model.weight(n).detach().min())
        if not least >= 0.0:
            raise ValueError(
                f"W{n}{n + 1} holds a conductance of {least:g}; expected 0 or more, as resistors have. Call "
                "model.constrain() after each step of the optimizer."
            )


def _inputs(model: Resistive) -> list[str]:
    inputs = range(model.sizes[-1])
    return [*(f"x{j}" for j in inputs), *(f"r{j}" for j in inputs)]


@torch.no_grad()
def _sources(model: Resistive, x: Tensor, lumped: bool = False) -> Iterator[str]:
    volts = model.voltages(x.detach().double())
    if lumped:
        for i, current in enumerate(_lumped(model, volts).tolist()):
            yield f"Ix{i} 0 n{model.depth - 1}_{i} {current!r}"
        return
    for name, v in zip(_inputs(model), volts.tolist(), strict=True):
        yield f"V{name} {name} 0 {v!r}"


def _lumped(model: Resistive, volts: Tensor) -> Tensor:
    """The currents by which the inputs feed the layer next to them, by Norton's theorem."""
    return UNIT * (volts @ model.weight(model.depth - 1).detach().double().mT)


def _elements(model: Resistive, diodes: Diodes, lumped: bool = False) -> Iterator[str]:
    if lumped:
        for i, g in enumerate(model.weight(model.depth - 1).detach().double().sum(1).tolist()):
            yield f"Rx{i} n{model.depth - 1}_{i} 0 {1.0 / (UNIT * max(g, LEAST))!r}"
    for n in range(model.depth):
        pres = _inputs(model) if n == model.depth - 1 else [f"n{n + 1}_{j}" for j in range(model.sizes[n + 1])]
        apart = [] if lumped and n == model.depth - 1 else model.weight(n).detach().double().tolist()
        for i, row in enumerate(apart):
            for j, g in enumerate(row):
                if g > LEAST:
                    yield f"R{n}_{i}_{j} n{n}_{i} {pres[j]} {1.0 / (UNIT * g)!r}"
        b = model.bias(n)
        for i, current in enumerate([] if b is None else b.detach().double().tolist()):
            yield f"I{n}_{i} 0 n{n}_{i} {UNIT * current!r}"
        for i in range(model.sizes[n] if n else 0):
            upper = i < (model.sizes[n] + 1) // 2
            anode, cathode = ("0", f"n{n}_{i}") if upper else (f"n{n}_{i}", "0")
            yield f"D{n}_{i} {anode} {cathode} limit"
    yield from (MODELS[diodes], OPTIONS)


def _nudges(model: Resistive, nudge: Nudge | None) -> Iterator[str]:
    if nudge is None:
        return
    target, beta = nudge.cost.implicit_target(nudge.y).flatten().double().tolist(), float(nudge.beta)  # type: ignore[arg-type]
    for i, y in enumerate(target):
        yield f"Vy{i} y{i} 0 {y!r}"
        yield f"Ry{i} n0_{i} y{i} {1.0 / (UNIT * beta)!r}"


def program() -> str:
    """Where ngspice is; raises SpiceError where it is not."""
    found = shutil.which("ngspice")
    if found is None:
        raise SpiceError("There is no program ngspice here; install it (Debian and Ubuntu: apt install ngspice).")
    return found


def check_netlist(text: str) -> None:
    """Raise ValueError for a circuit without ground, which has no voltages."""
    lines = [line.split() for line in text.splitlines()[1:] if line and line[0].isalpha()]
    if not any(node.lower() in ("0", "gnd") for words in lines for node in words[1:5]):
        raise ValueError(
            "The netlist has no ground; expected at least one element at node 0, to measure voltages from."
        )


def run(
    text: str, nodes: Sequence[str], changes: Iterable[Mapping[str, float]] = ({},), seconds: float = SECONDS
) -> list[dict[str, float]]:
    """The voltages of these nodes at the operating point of a netlist, once per table of changed sources.

    changes     for each operating point, the new values of sources by name; they stay for those that follow
    seconds     what all of it may take
    """
    check_netlist(text)
    body = re.sub(r"\n\.end\s*$", "\n", text, flags=re.IGNORECASE)
    commands = ["set numdgt=15", "set width=512"]
    points = 0
    for points, change in enumerate(changes, start=1):
        commands += [f"alter {name} = {value!r}" for name, value in change.items()]
        commands += ["op", f"echo point {points}", *(f"print v({node})" for node in nodes)]
    deck = "\n".join([body.rstrip("\n"), ".control", *commands, "quit", ".endc", ".end\n"])
    return _parsed(_output(deck, seconds), nodes, points)


def _output(deck: str, seconds: float) -> str:
    ngspice = program()
    with tempfile.TemporaryDirectory(prefix="eqprop-spice-") as folder:
        path = Path(folder) / "circuit.cir"
        path.write_text(deck, encoding="ascii")
        try:
            done = subprocess.run(
                [ngspice, "-b", "-n", str(path)],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                cwd=folder,
            )
        except subprocess.TimeoutExpired as error:
            raise SpiceError(
                f"ngspice did not end within {seconds:g} s and was stopped; nothing was changed. Give it more seconds, "
                "or a smaller net."
            ) from error
    if done.returncode:
        how = f"by signal {-done.returncode}" if done.returncode < 0 else f"with exit code {done.returncode}"
        raise SpiceError(
            f"ngspice ended {how}; nothing was changed. It said: {_last_words(done.stderr or done.stdout)}."
        )
    return done.stdout + "\n" + done.stderr


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "singular" in line.lower()]
    return (errors or lines or ["nothing"])[-1].rstrip(".")


def _parsed(text: str, nodes: Sequence[str], points: int) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for line in text.splitlines():
        if line.startswith("point "):
            found.append({})
        elif found and (match := re.match(r"v\((\S+)\) = (\S+)", line)):
            found[-1][match[1]] = float(match[2])
    if len(found) != points or any(len(point) != len(set(nodes)) for point in found):
        raise SpiceError(
            f"ngspice found the voltages of {sum(len(p) == len(set(nodes)) for p in found)} of {points} operating "
            f"points; nothing was changed. It said: {_last_words(text)}."
        )
    return found


class Spice(Machine):
    """A resistive net with ngspice as the network: every phase is the operating point of its circuit.

    model       its parameters are trained
    diodes      "ideal" (next to nothing forward) or "real" (a 1N4148)
    seconds     what a phase of a mini-batch may take
    lumped      whether the inputs' sources and resistors are one current source and one resistor per node that they
                feed, which is the same circuit by Norton's theorem and much faster where inputs are many
    """

    abilities = Abilities(signs=(1, -1), continues=False)

    def __init__(
        self, model: Resistive, diodes: Diodes = "ideal", seconds: float = SECONDS, lumped: bool = False
    ) -> None:
        if not isinstance(model, Resistive):
            raise TypeError(f"Spice got a {type(model).__name__}; expected an eqprop.physical.resistive.Resistive.")
        program()
        super().__init__(model)
        self.net, self.diodes, self.seconds, self.lumped = (model,), diodes, float(seconds), lumped
        self._circuit: list[str] = []

    def write(self, theta: Mapping[str, Tensor]) -> None:
        _check_conductances(self.net[0])
        self._circuit = list(_elements(self.net[0], self.diodes, self.lumped))

    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        model = self.net[0]
        nodes = [f"n{n}_{i}" for n in range(model.depth) for i in range(model.sizes[n])]
        first = None if nudge is None else Nudge(nudge.cost, nudge.y[0], nudge.beta)
        text = "\n".join(
            ["* resistive net", *_sources(model, x[0], self.lumped), *self._circuit, *_nudges(model, first), ".end\n"]
        )
        points = run(text, nodes, list(self._changes(x, nudge)), self.seconds)
        rows = torch.tensor([[point[node] for node in nodes] for point in points], dtype=torch.float64)
        return Reading(rows.to(x.dtype).split(model.sizes[:-1], dim=1))

    def _changes(self, x: Tensor, nudge: Nudge | None) -> Iterator[dict[str, float]]:
        """What differs from one sample to the next."""
        model = self.net[0]
        volts = model.voltages(x.detach().double())
        names = [f"V{name}" for name in _inputs(model)]
        if self.lumped:
            volts = _lumped(model, volts)
            names = [f"Ix{i}" for i in range(volts.shape[1])]
        if nudge is not None:
            target = nudge.cost.implicit_target(nudge.y).double()
            names += [f"Vy{i}" for i in range(target.shape[1])]
            volts = torch.cat([volts, target], 1)
        before = volts[0]
        for row in volts:
            moved = torch.nonzero(row != before).flatten().tolist()
            yield {names[k]: float(row[k]) for k in moved}
            before = row


class Deviation(NamedTuple):
    """How far ngspice's voltages are from ours, the worst node.

    own     as a share of the node's own voltage, or of a thousandth of the largest in its layer where that is more
    layer   as a share of the largest voltage in its layer
    volts   as it is
    """

    own: float
    layer: float
    volts: float

    def __str__(self) -> str:
        return f"{self.own:.1e} of its own voltage, {self.layer:.1e} of its layer's largest, {self.volts:.1e} V"


class CircuitCheck(NamedTuple):
    """Our states at rest beside ngspice's, free and nudged."""

    free: Deviation
    nudged: Deviation
    nodes: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes; the worst is off by\n  free    {self.free}\n  nudged  {self.nudged}"


def check(
    model: Resistive, x: Tensor, y: Tensor, beta: float, diodes: Diodes = "ideal", cost: Cost | None = None
) -> CircuitCheck:
    """Relax the net here and in ngspice, free and nudged, and compare node by node, in float64.

    model   the network of resistors
    x, y    a few samples and their targets
    beta    strength of the nudge
    diodes  how limits are modelled
    cost    what nudges
    """
    model = copy.deepcopy(model).double()
    machine, x, y = Spice(model, diodes), x.double(), y.double()
    found = []
    for nudge in (None, Nudge(cost or SquaredError(), y, beta)):
        ours = relax(model, x, Phase(100_000, "sweeps", stop="settled", still=1e-13), nudge=nudge).state
        theirs = relax(machine, x, 1, nudge=nudge).state
        apart = [_deviation(a, b) for a, b in zip(ours, theirs, strict=True)]
        found.append(Deviation(*map(max, zip(*apart, strict=True))))
    return CircuitCheck(found[0], found[1], nodes=sum(model.sizes[:-1]) * len(x))


def _deviation(ours: Tensor, theirs: Tensor) -> Deviation:
    off, most = (theirs - ours).abs(), ours.abs().max()
    return Deviation(
        float((off / ours.abs().clamp(min=1e-3 * most)).max()), float((off / most).max()), float(off.max())
    )
