"""Physical networks: circuits, oscillators and spins, imperfect devices, and machines in the loop of training."""

from eqprop.physical.imperfect import Imperfections, Simulated
from eqprop.physical.machine import Abilities, Machine, Reading, Recorded, Replay, Work
from eqprop.physical.oscillators import Oscillators
from eqprop.physical.resistive import Resistive
from eqprop.physical.spice import Spice, SpiceError

__all__ = [
    "Abilities",
    "Imperfections",
    "Machine",
    "Oscillators",
    "Reading",
    "Recorded",
    "Replay",
    "Resistive",
    "Simulated",
    "Spice",
    "SpiceError",
    "Work",
]
