"""The paper's models: toy, fully connected layered, convolutional."""

from eqprop.models.activations import Activation
from eqprop.models.convolutional import Convolutional
from eqprop.models.layered import Layered
from eqprop.models.stacking import stack, unstack
from eqprop.models.toy import Toy

__all__ = ["Activation", "Convolutional", "Layered", "Toy", "stack", "unstack"]
