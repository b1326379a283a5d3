"""Physical networks: imperfect devices and machines in the loop of training; each kind of network has its module."""

from eqprop.physical.imperfect import Imperfections, Simulated
from eqprop.physical.machine import Abilities, Machine, Reading, Recorded, Replay, Work
from eqprop.physical.settings import MachineSettings

__all__ = [
    "Abilities",
    "Imperfections",
    "Machine",
    "MachineSettings",
    "Reading",
    "Recorded",
    "Replay",
    "Simulated",
    "Work",
]
