"""Layered nets in the CPU engine: what csrc/layered.h is told about one."""

from __future__ import annotations

import ctypes

from torch import Tensor

from eqprop.engines.cpu_tables import AlignedRows, Table, struct_of
from eqprop.models import Layered
from eqprop.models.activations import ACTIVATIONS
from eqprop.state import State

KINDS = tuple(ACTIVATIONS.values())
"""The activations in the order of the C code's own list: tanh, sigmoid, hard-sigmoid."""

LayeredStruct = struct_of(
    "LayeredStruct",
    (ctypes.c_int64, "depth energy_based clip output_slope"),
    (ctypes.c_double, "eps"),
    (ctypes.c_void_p, "sizes apart weights biases weight_gradients bias_gradients weight_rates bias_rates start state"),
)


class LayeredNet:
    """A layered model as the C code sees it."""

    unit = "layered"

    def __init__(self, model: Layered, networks: int) -> None:
        self.model = model
        self.weights = [AlignedRows(model.get_parameter(f"W{n}{n + 1}"), networks) for n in range(model.depth)]
        offsets = [f"b{n}" for n in range(model.depth)] if model.bias else []
        self.biases = [AlignedRows(model.get_parameter(name), networks) for name in offsets]
        self.table = Table(LayeredStruct())
        self._describe(networks)

    @property
    def held(self) -> list[AlignedRows]:
        return [*self.weights, *self.biases]

    def _describe(self, networks: int) -> None:
        model, table = self.model, self.table
        table.set(depth=model.depth, networks=networks, energy_based=model.energy_based)
        table.set(activation=KINDS.index(model.activation), clip=model.clip, output_slope=model.output_slope)
        table.set(eps=model.eps)
        table.list_numbers("sizes", model.sizes)
        table.list_numbers("apart", [w.apart for w in self.weights])
        table.point_each("weights", [w.rows for w in self.weights])
        table.point_each("biases", [b.rows for b in self.biases] if self.biases else None)

    def describe_gradients(self, rates: list[float]) -> None:
        """Where gradients go and the learning rate of each of `held`; NaN for one that is not trained."""
        table, depth = self.table, self.model.depth
        table.point_each("weight_gradients", [w.gradient_rows() for w in self.weights])
        table.list_numbers("weight_rates", rates[:depth], ctypes.c_double)
        if self.biases:
            table.point_each("bias_gradients", [b.gradient_rows() for b in self.biases])
            table.list_numbers("bias_rates", rates[depth:], ctypes.c_double)

    def describe_state(self, start: State | None, state: State) -> None:
        """Where a relaxation starts and where it leaves its end."""
        self.table.point_each("start", start)
        self.table.point_each("state", state)

    def images(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def to_c(self, s: State) -> State:
        return tuple(layer.contiguous() for layer in s)

    def from_c(self, s: State) -> State:
        return s
