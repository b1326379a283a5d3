"""Convolutional nets in the CPU engine: what csrc/conv.h is told about one. Channels come last there."""

from __future__ import annotations

import ctypes

from torch import Tensor, nn

from eqprop.engines.cpu_layered import KINDS
from eqprop.engines.cpu_tables import AlignedRows, Table, struct_of
from eqprop.models import Convolutional
from eqprop.state import State

ConvStruct = struct_of(
    "ConvStruct",
    (ctypes.c_int64, "flats maps kernel padding pool biased"),
    (ctypes.c_void_p, "flat_sizes shapes values gradients rows apart rates start state"),
)


class OverMaps(AlignedRows):
    """Weights from a flat layer to the first map, whose columns follow the map: channels last."""

    def __init__(self, parameter: nn.Parameter, networks: int, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        super().__init__(parameter, networks)

    def arrange(self, value: Tensor) -> Tensor:
        return value.reshape(self.networks, -1, *self.shape).permute(0, 1, 3, 4, 2).flatten(2)

    def restore(self, arranged: Tensor) -> Tensor:
        channels, height, width = self.shape
        by_place = arranged.unflatten(-1, (height, width, channels))
        return by_place.permute(0, 1, 4, 2, 3).reshape(self.parameter.shape)


class FilterRows(AlignedRows):
    """Filters (channels, below, k, k) as rows (k, run): a run is one row of the window, (k, below), padded."""

    def arrange(self, value: Tensor) -> Tensor:
        """(R, channels k, run): the padding goes behind every run."""
        kernel = value.reshape(self.networks, -1, *value.shape[-3:])
        return kernel.permute(0, 1, 3, 4, 2).flatten(3).flatten(1, 2)

    def restore(self, arranged: Tensor) -> Tensor:
        below, k = self.parameter.shape[-3], self.parameter.shape[-1]
        runs = arranged.unflatten(1, (-1, k)).unflatten(-1, (k, below))
        return runs.permute(0, 1, 4, 2, 3).reshape(self.parameter.shape)


class ConvNet:
    """A convolutional model as the C code sees it."""

    unit = "conv"

    def __init__(self, model: Convolutional, networks: int) -> None:
        self.model = model
        flats, maps = len(model.flat), len(model.channels)
        last = f"Wfc{flats - 1}{flats}"
        weights = [AlignedRows(model.get_parameter(f"Wfc{n}{n + 1}"), networks) for n in range(flats - 1)]
        weights.append(OverMaps(model.get_parameter(last), networks, model.maps[0]))
        self.filters = [FilterRows(model.get_parameter(f"Wconv{n}{n + 1}"), networks) for n in range(maps)]
        offsets = [*(f"bfc{n}" for n in range(flats)), *(f"bconv{n}" for n in range(maps))] if model.bias else []
        self.held = [*weights, *self.filters, *(AlignedRows(model.get_parameter(b), networks) for b in offsets)]
        self.table = Table(ConvStruct())
        self._describe(networks)

    def _describe(self, networks: int) -> None:
        model, table = self.model, self.table
        table.set(networks=networks, flats=len(model.flat), maps=len(model.channels), biased=model.bias)
        table.set(kernel=model.kernel, padding=model.padding, pool=model.pool)
        table.set(activation=KINDS.index(model.activation))
        table.list_numbers("flat_sizes", model.flat)
        table.list_numbers("shapes", [n for shape in (*model.maps, model.image) for n in shape])
        table.point_each("values", [held.rows for held in self.held])
        # A filter is one row to the C code: its k runs follow each other.
        runs = [model.kernel if held in self.filters else 1 for held in self.held]
        table.list_numbers("rows", [held.rows.shape[1] // k for held, k in zip(self.held, runs, strict=True)])
        table.list_numbers("apart", [held.apart * k for held, k in zip(self.held, runs, strict=True)])

    def describe_gradients(self, rates: list[float]) -> None:
        """Where gradients go and the learning rate of each of `held`; NaN for one that is not trained."""
        self.table.point_each("gradients", [held.gradient_rows() for held in self.held])
        self.table.list_numbers("rates", rates, ctypes.c_double)

    def describe_state(self, start: State | None, state: State) -> None:
        """Where a relaxation starts and where it leaves its end, channels last."""
        self.table.point_each("start", start)
        self.table.point_each("state", state)

    def images(self, x: Tensor) -> Tensor:
        return channels_last(x)

    def to_c(self, s: State) -> State:
        return tuple(channels_last(v) if n >= len(self.model.flat) else v.contiguous() for n, v in enumerate(s))

    def from_c(self, s: State) -> State:
        return tuple(v.movedim(-1, -3).contiguous() if n >= len(self.model.flat) else v for n, v in enumerate(s))


def channels_last(h: Tensor) -> Tensor:
    """(..., C, H, W) -> (..., H, W, C)."""
    return h.movedim(-3, -1).contiguous()
