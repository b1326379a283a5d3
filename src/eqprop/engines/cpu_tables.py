"""What passes between Python and the C part of the CPU engine: parameters in aligned rows, and tables of pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LINE = 64
"""Bytes of a cache line: rows of parameters start on one, which is also where the widest vectors want them."""


def rounded_up(size: int, dtype: torch.dtype) -> int:
    """The length of a row of `size` numbers that ends with a cache line."""
    unit = LINE // dtype.itemsize
    return -(-size // unit) * unit


class AlignedRows:
    """A parameter as (R, rows, padded columns) on cache lines: itself where it is so already, else a copy.

    `fetch` before the C code runs and `give_back` after it keep the two alike. Padding is zero and stays so.
    """

    def __init__(self, parameter: nn.Parameter, networks: int) -> None:
        self.parameter, self.networks = parameter, networks
        value = parameter.detach()
        shape = self.shape(value)
        self.apart = rounded_up(shape[-1], value.dtype)
        self.copied = self.apart != shape[-1] or not value.is_contiguous() or value.data_ptr() % LINE != 0
        self.rows = value.new_zeros(*shape[:2], self.apart) if self.copied else value.view(shape)
        self.gradient: Tensor | None = None

    def shape(self, value: Tensor) -> tuple[int, int, int]:
        """(R, rows, columns). A bias is one row."""
        one = value.numel() // self.networks
        columns = value.shape[-1]
        return self.networks, one // columns, columns

    def fetch(self) -> None:
        if self.copied:
            value = self.parameter.detach()
            shape = self.shape(value)
            self.rows[..., : shape[-1]] = value.reshape(shape)

    def give_back(self) -> None:
        if self.copied:
            self.parameter.detach().copy_(self.plain(self.rows))

    def plain(self, rows: Tensor) -> Tensor:
        """Rows without their padding, in the parameter's shape."""
        return rows[..., : self.parameter.shape[-1]].reshape(self.parameter.shape)

    def gradient_rows(self) -> Tensor:
        """Where the C code writes the gradient; memory that is not written to costs nothing."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.rows)
        return self.gradient


class Table:
    """Fills the fields of a C struct and keeps alive whatever they point to."""

    def __init__(self, struct: ctypes.Structure) -> None:
        self.struct = struct
        self.kept: dict[str, Any] = {}

    def set(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self.struct, name, value)

    def point(self, name: str, tensor: Tensor | None) -> None:
        """A field that points to a tensor's numbers."""
        assert tensor is None or tensor.is_contiguous()
        self.kept[name] = tensor
        setattr(self.struct, name, None if tensor is None else tensor.data_ptr())

    def point_each(self, name: str, tensors: Iterable[Tensor] | None) -> None:
        """A field that points to a list of pointers."""
        if tensors is None:
            setattr(self.struct, name, None)
            return
        each = list(tensors)
        assert all(t.is_contiguous() for t in each)
        array = (ctypes.c_void_p * len(each))(*(t.data_ptr() for t in each))
        self._keep(name, array, each)

    def list_numbers(self, name: str, numbers: Sequence[int] | Sequence[float], kind: Any = ctypes.c_int64) -> None:
        """A field that points to a list of numbers."""
        self._keep(name, (kind * len(numbers))(*numbers), None)

    def _keep(self, name: str, array: Any, also: Any) -> None:
        self.kept[name] = (array, also)
        setattr(self.struct, name, ctypes.cast(array, ctypes.c_void_p))


def struct_of(name: str, integers: str, numbers: str, pointers: str) -> type[ctypes.Structure]:
    """A C struct of 64-bit integers, then doubles, then pointers, each a list of field names."""
    fields: list[tuple[str, Any]] = [(field, ctypes.c_int64) for field in integers.split()]
    fields += [(field, ctypes.c_double) for field in numbers.split()]
    fields += [(field, ctypes.c_void_p) for field in pointers.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
