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
        arranged = self.arrange(value)
        self.columns = arranged.shape[-1]
        self.apart = rounded_up(self.columns, value.dtype)
        in_place = arranged.data_ptr() == value.data_ptr() and arranged.is_contiguous()
        self.copied = not in_place or self.apart != self.columns or value.data_ptr() % LINE != 0
        self.rows = self.padded(arranged) if self.copied else arranged
        self.gradient: Tensor | None = None

    def arrange(self, value: Tensor) -> Tensor:
        """(R, rows, columns), a view where that can be. A bias is one row."""
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
            self.parameter.detach().copy_(self.plain(self.rows))

    def plain(self, rows: Tensor) -> Tensor:
        """Rows without their padding, in the parameter's shape."""
        return self.restore(rows[..., : self.columns])

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


TASK = (
    (ctypes.c_int64, "networks batch activation T K alternating settled bptt inside"),
    (ctypes.c_int64, "threads iterations first gradients_only"),
    (ctypes.c_double, "tolerance"),
    (ctypes.c_void_p, "beta images targets labels order tally residuals steps"),
)
"""The fields of struct Task in csrc/task.h, with which the struct of every net begins."""


def struct_of(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """A C struct: each pair gives a type of eight bytes and the names of the fields that have it, in order."""
    listed = [(field, kind) for kind, names in (*TASK, *fields) for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": listed})
