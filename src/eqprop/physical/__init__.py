"""Physical networks: circuits, oscillators and spins, imperfect devices, and machines in the loop of training."""

from eqprop.physical.imperfect import Imperfections, Simulated
from eqprop.physical.ising import Ising
from eqprop.physical.machine import Abilities, Machine, Reading, Recorded, Replay, Work
from eqprop.physical.oscillators import Oscillators
from eqprop.physical.resistive import Resistive
from eqprop.physical.settings import MachineSettings
from eqprop.physical.spice import Spice, SpiceError
from eqprop.physical.spins import Spins

__all__ = [
    "Abilities",
    "Imperfections",
    "Ising",
    "Machine",
    "MachineSettings",
    "Oscillators",
    "Reading",
    "Recorded",
    "Replay",
    "Resistive",
    "Simulated",
    "Spice",
    "SpiceError",
    "Spins",
    "Work",
]
