"""Adapters from models to the structs of the CPU engine's C code."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eqprop.dynamics import Dynamics
from eqprop.models import Convolutional, Layered
from eqprop.models.activations import HARD_SIGMOID, SIGMOID, TANH
from eqprop.state import State

LINE = 64
"""Bytes of a cache line. Parameter rows start on one, which also aligns them for the widest vectors."""


def rounded_up(size: int, dtype: torch.dtype) -> int:
    """Row length for `size` numbers, rounded up to whole cache lines."""
    unit = LINE // dtype.itemsize
    return -(-size // unit) * unit


class AlignedRows:
    """A parameter as (R, rows, padded columns) aligned to cache lines: the parameter itself if it fits, else a copy.

    Call `fetch` before and `give_back` after the C code to keep the two in sync. Padding is zero and stays zero.
    """

    def __init__(self, parameter: nn.Parameter, networks: int) -> None:
        self.parameter, self.networks = parameter, networks
        value = parameter.detach()
        arranged = self.arrange(value)
        self.columns = arranged.shape[-1]
        self.apart = rounded_up(self.columns, value.dtype)
        in_place = arranged.data_ptr() == value.data_ptr() and arranged.is_contiguous()
        self.copied = not in_place or self.apart != self.columns or value.data_ptr() % LINE != 0
        self.rows = self.padded(arranged) if self.copied else arranged
        self.gradient: Tensor | None = None

    def arrange(self, value: Tensor) -> Tensor:
        """(R, rows, columns), a view if possible. A bias is one row."""
        return value.reshape(self.networks, -1, value.shape[-1])

    def restore(self, arranged: Tensor) -> Tensor:
        """The inverse of `arrange`."""
        return arranged.reshape(self.parameter.shape)

    def padded(self, arranged: Tensor) -> Tensor:
        return nn.functional.pad(arranged, (0, self.apart - self.columns)).contiguous()

    def fetch(self) -> None:
        if self.copied:
            self.rows.copy_(self.padded(self.arrange(self.parameter.detach())).view_as(self.rows))

    def give_back(self) -> None:
        if self.copied:
            self.parameter.detach().copy_(self.unpadded(self.rows))

    def unpadded(self, rows: Tensor) -> Tensor:
        """Rows without their padding, in the parameter's shape."""
        return self.restore(rows[..., : self.columns])

    def gradient_rows(self) -> Tensor:
        """The buffer for the gradient from C. Allocating it is cheap: untouched memory is never mapped."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.rows)
        return self.gradient


class Table:
    """Fill the fields of a C struct and keep alive what they point to."""

    def __init__(self, struct: ctypes.Structure) -> None:
        self.struct = struct
        self.kept: dict[str, Any] = {}

    def set(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self.struct, name, value)

    def point(self, name: str, tensor: Tensor | None) -> None:
        """Point a field at a tensor's data."""
        assert tensor is None or tensor.is_contiguous()
        self.kept[name] = tensor
        setattr(self.struct, name, None if tensor is None else tensor.data_ptr())

    def point_each(self, name: str, tensors: Iterable[Tensor] | None) -> None:
        """Point a field at an array of pointers, one per tensor."""
        if tensors is None:
            setattr(self.struct, name, None)
            return
        each = list(tensors)
        assert all(t.is_contiguous() for t in each)
        array = (ctypes.c_void_p * len(each))(*(t.data_ptr() for t in each))
        self._keep(name, array, each)

    def list_numbers(self, name: str, numbers: Sequence[int] | Sequence[float], kind: Any = ctypes.c_int64) -> None:
        """Point a field at an array of numbers."""
        self._keep(name, (kind * len(numbers))(*numbers), None)

    def _keep(self, name: str, array: Any, also: Any) -> None:
        self.kept[name] = (array, also)
        setattr(self.struct, name, ctypes.cast(array, ctypes.c_void_p))


TASK = (
    (ctypes.c_int64, "networks batch activation T K alternating settled bptt inside symmetric"),
    (ctypes.c_int64, "threads iterations first gradients_only"),
    (ctypes.c_double, "tolerance"),
    (ctypes.c_void_p, "beta images targets labels order tally residuals steps"),
)
"""The fields of struct Task in csrc/task.h, which begin the struct of every net."""


def struct_of(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """Define a C struct: each pair is an eight-byte type and the names of its fields, in order."""
    listed = [(field, kind) for kind, names in (*TASK, *fields) for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": listed})


KINDS = (TANH, SIGMOID, HARD_SIGMOID)
"""Activations in the order of the C code."""

LayeredStruct = struct_of(
    "LayeredStruct",
    (ctypes.c_int64, "depth energy_based clip output_slope"),
    (ctypes.c_double, "eps"),
    (ctypes.c_void_p, "sizes apart weights biases weight_gradients bias_gradients weight_rates bias_rates start state"),
)


class LayeredNet:
    """A layered model in the form the C code expects."""

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
        """Set the gradient buffers and the learning rate of each of `held`; NaN if not trained."""
        table, depth = self.table, self.model.depth
        table.point_each("weight_gradients", [w.gradient_rows() for w in self.weights])
        table.list_numbers("weight_rates", rates[:depth], ctypes.c_double)
        if self.biases:
            table.point_each("bias_gradients", [b.gradient_rows() for b in self.biases])
            table.list_numbers("bias_rates", rates[depth:], ctypes.c_double)

    def describe_state(self, start: State | None, state: State) -> None:
        """Set the initial state of a relaxation and the buffer for its final state."""
        self.table.point_each("start", start)
        self.table.point_each("state", state)

    def images(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def to_c(self, s: State) -> State:
        return tuple(layer.contiguous() for layer in s)

    def from_c(self, s: State) -> State:
        return s


ConvStruct = struct_of(
    "ConvStruct",
    (ctypes.c_int64, "flats maps kernel padding pool biased"),
    (ctypes.c_void_p, "flat_sizes shapes values gradients rows apart rates start state"),
)


class OverMaps(AlignedRows):
    """Weights from a flat layer to the first map, with columns in the map's order: channels last."""

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
    """Filters (channels, below, k, k) as rows (k, run). A run is one row of the window, (k, below), padded."""

    def arrange(self, value: Tensor) -> Tensor:
        """(R, channels k, run), with padding after every run."""
        kernel = value.reshape(self.networks, -1, *value.shape[-3:])
        return kernel.permute(0, 1, 3, 4, 2).flatten(3).flatten(1, 2)

    def restore(self, arranged: Tensor) -> Tensor:
        below, k = self.parameter.shape[-3], self.parameter.shape[-1]
        runs = arranged.unflatten(1, (-1, k)).unflatten(-1, (k, below))
        return runs.permute(0, 1, 4, 2, 3).reshape(self.parameter.shape)


class ConvNet:
    """A convolutional model in the form the C code expects."""

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
        # To the C code a filter is one row: its k runs are contiguous.
        runs = [model.kernel if held in self.filters else 1 for held in self.held]
        table.list_numbers("rows", [held.rows.shape[1] // k for held, k in zip(self.held, runs, strict=True)])
        table.list_numbers("apart", [held.apart * k for held, k in zip(self.held, runs, strict=True)])

    def describe_gradients(self, rates: list[float]) -> None:
        """Set the gradient buffers and the learning rate of each of `held`; NaN if not trained."""
        self.table.point_each("gradients", [held.gradient_rows() for held in self.held])
        self.table.list_numbers("rates", rates, ctypes.c_double)

    def describe_state(self, start: State | None, state: State) -> None:
        """Set the initial state of a relaxation and the buffer for its final state, channels last."""
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


Net = LayeredNet | ConvNet


def net_of(model: Dynamics, networks: int) -> Net:
    """Wrap a model that the engine has not refused."""
    if isinstance(model, Convolutional):
        return ConvNet(model, networks)
    assert isinstance(model, Layered), "others are refused"
    return LayeredNet(model, networks)


def unit_of(model: Dynamics) -> str:
    """The C unit that implements this net."""
    return ConvNet.unit if isinstance(model, Convolutional) else LayeredNet.unit


def networks_of(model: Dynamics, x: Tensor) -> int | None:
    """Number of stacked networks for an input of this shape, 1 if not stacked; None if model and input do not match."""
    first = next(model.parameters())  # weights of the output layer: (n0, n1), or (R, n0, n1)
    lead = x.shape[: model.sample_dims(x)]
    if first.dim() == 2:
        return 1 if len(lead) == 1 else None
    return first.shape[0] if len(lead) == 2 and lead[0] == first.shape[0] else None


def refuses_net(model: Layered | Convolutional) -> str | None:
    if isinstance(model, Convolutional) and not model.flat:
        return "it needs a convolutional net with a flat layer, and this one has none."
    parameter = next(model.parameters())
    if parameter.dtype not in (torch.float32, torch.float64):
        return f"the model is {parameter.dtype}; it computes in float32 and float64."
    if model.activation not in KINDS:
        known = ", ".join(kind.name for kind in KINDS)
        return f"it supports the activations {known}, and this net has {model.activation.name!r}."
    return None
