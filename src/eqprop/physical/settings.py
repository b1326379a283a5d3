"""A machine as data: what runs the network of a spec, and the imperfections of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.messages import unknown
from eqprop.physical.imperfect import Imperfections, Simulated
from eqprop.physical.machine import Machine
from eqprop.plugins import Table, part
from eqprop.settings import Section, about

NONE, SIMULATED = "none", "simulated"
OWN: dict[str, Callable[..., Machine]] = {}
"""Classes of your own that were given by FILE.py:CLASS, by that text."""
MACHINES: Table[Callable[..., Machine]] = Table(
    "machine",
    {
        SIMULATED: Simulated,
        "spice": part("physical.spice:Spice"),
        "ising": part("physical.ising:Ising"),
    },
    lambda name, own: own,
)
"""What takes a network and returns the machine that runs it, by name."""


class MachineSettings(Section, frozen=True, kw_only=True):
    """What runs the network: its own steps, or a machine in the loop (see `eqprop.physical.Machine`).

    kind            "simulated" runs the network itself as a machine, "spice" a resistive net in ngspice, "ising" a spin
                    net by annealing. A run folder never names code to execute: FILE.py:CLASS is given again on resume
    imperfections   of the machine, or of the network where no machine is named; trial r draws from their seed + r
    options         arguments of the machine's class beside the network
    """

    kind: Annotated[
        str,
        about("Machine: none, simulated, spice, ising, or FILE.py:CLASS.", flat="machine", common=True),
    ] = NONE
    imperfections: (
        Annotated[
            Imperfections,
            about("Imperfection: read_noise=0.01, weight_bits=8, ... (repeatable).", flag="--imperfect"),
        ]
        | None
    ) = None
    options: Annotated[
        Mapping[str, Any],
        about("Option of the machine: reads=10 (repeatable).", flat="machine_options", flag="--machine-option"),
    ] = msgspec.field(default_factory=dict)

    @property
    def in_loop(self) -> bool:
        return self.kind != NONE or self.imperfections is not None

    def around(self, model: Dynamics, trial: int = 0) -> Dynamics:
        """The machine that runs this network; the network itself where there is none."""
        if not self.in_loop:
            if self.options:
                raise ValueError(f"machine.options sets {next(iter(self.options))}, and there is no machine. Name one.")
            return model
        if not isinstance(model, PrimitiveDynamics):
            raise ValueError(f"machine is {self.kind!r}, and {model.title} has no Phi, of which updates follow.")
        device = self.imperfections
        if device is not None:
            device = msgspec.structs.replace(device, seed=device.seed + trial)
        made = model if self.kind in (NONE, SIMULATED) else self._made(model)
        return made if device is None and self.kind not in (NONE, SIMULATED) else Simulated(made, device)

    def _made(self, model: PrimitiveDynamics) -> Machine:
        if self.kind not in OWN and self.kind not in MACHINES:
            if ".py" in self.kind:
                raise ValueError(f"The machine {self.kind} is your own code; give it again: --machine {self.kind}.")
            raise ValueError(unknown("machine", self.kind, (NONE, *MACHINES)))
        try:
            made = (OWN.get(self.kind) or MACHINES[self.kind])(model, **self.options)
        except TypeError as error:
            raise ValueError(f"{self.kind} cannot be made: {error}") from error
        if not isinstance(made, Machine):
            raise ValueError(f"{self.kind} returned a {type(made).__name__}; expected an eqprop.physical.Machine.")
        return made
