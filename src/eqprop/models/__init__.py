"""Nets as graphs, the paper's among them (toy, layered, convolutional), and a softmax readout."""

from eqprop.models.activations import Activation
from eqprop.models.connections import Connection, Dense, Lateral, Skip, register
from eqprop.models.convolutional import Conv, Convolutional, Transposed
from eqprop.models.layered import Layered, Toy
from eqprop.models.network import Network
from eqprop.models.readout import CrossEntropy, stack_readouts, unstack_readout
from eqprop.models.stacking import stack, unstack

__all__ = [
    "Activation",
    "Connection",
    "Conv",
    "Convolutional",
    "CrossEntropy",
    "Dense",
    "Lateral",
    "Layered",
    "Network",
    "Skip",
    "Toy",
    "Transposed",
    "register",
    "stack",
    "stack_readouts",
    "unstack",
    "unstack_readout",
]
