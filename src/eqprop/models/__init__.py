"""The paper's models (toy, fully connected layered, convolutional) and a softmax readout."""

from eqprop.models.activations import Activation
from eqprop.models.connections import Connection, Conv, Dense, Lateral, Skip, Transposed, register
from eqprop.models.convolutional import Convolutional
from eqprop.models.layered import Layered
from eqprop.models.network import Network
from eqprop.models.readout import CrossEntropy, stack_readouts, unstack_readout
from eqprop.models.stacking import stack, unstack
from eqprop.models.toy import Toy

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
