"""Which nets the C code of the CPU engine has, and the form it wants each in."""

from __future__ import annotations

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics
from eqprop.engines.cpu_conv import ConvNet
from eqprop.engines.cpu_layered import KINDS, LayeredNet
from eqprop.models import Convolutional, Layered

Net = LayeredNet | ConvNet


def net_of(model: Dynamics, networks: int) -> Net:
    """The model as the C code sees it; `refuses_model` has been asked."""
    if isinstance(model, Convolutional):
        return ConvNet(model, networks)
    assert isinstance(model, Layered), "others are refused"
    return LayeredNet(model, networks)


def unit_of(model: Dynamics) -> str:
    """The C file that has this net."""
    return ConvNet.unit if isinstance(model, Convolutional) else LayeredNet.unit


def networks_of(model: Dynamics, x: Tensor) -> int | None:
    """How many networks are stacked for an input of this shape, 1 if none; None if the two do not go together."""
    first = next(model.parameters())  # weights of the output layer: (n0, n1), or (R, n0, n1)
    lead = x.shape[: model.sample_dims(x)]
    if first.dim() == 2:
        return 1 if len(lead) == 1 else None
    return first.shape[0] if len(lead) == 2 and lead[0] == first.shape[0] else None


def refuses_model(model: Dynamics) -> str | None:
    if not isinstance(model, Layered | Convolutional):
        return f"it has the layered and convolutional nets written out, not {type(model).__name__}."
    if isinstance(model, Convolutional) and not model.flat:
        return "its convolutional nets end in a flat layer, and this one has none."
    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        return f"the model is on {parameter.device}, not on the CPU."
    if parameter.dtype not in (torch.float32, torch.float64):
        return f"the model is {parameter.dtype}; it computes in float32 and float64."
    if model.activation not in KINDS:
        known = ", ".join(kind.name for kind in KINDS)
        return f"it knows the activations {known}; this net has its own, {model.activation.name!r}."
    return None
