"""The paper's models (toy, fully connected layered, convolutional) and a softmax readout."""

from eqprop.models.activations import Activation
from eqprop.models.convolutional import Convolutional
from eqprop.models.layered import Layered
from eqprop.models.readout import CrossEntropy, stack_readouts, unstack_readout
from eqprop.models.stacking import stack, unstack
from eqprop.models.toy import Toy

__all__ = [
    "Activation",
    "Convolutional",
    "CrossEntropy",
    "Layered",
    "Toy",
    "stack",
    "stack_readouts",
    "unstack",
    "unstack_readout",
]
