"""The C part of the CPU engine: from the wheel or compiled at first use, and the structs that hand it models."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eqprop.cache import code_folder, store_code, stored_code
from eqprop.dynamics import Dynamics
from eqprop.models import Convolutional, Layered
from eqprop.models.activations import HARD_SIGMOID, SIGMOID, TANH
from eqprop.state import State

SOURCES = Path(__file__).with_name("csrc")
NO_COMPILER = "EQPROP_NO_COMPILER"
"""If set to anything but 0, the engine behaves as if there were no compiler."""

# setup.py reads the constants from here on as literals: building a wheel must not import torch.
UNITS = ("layered", "conv")
PRECISIONS: dict[str, tuple[str, ...]] = {"float32": (), "float64": ("-DREAL_DOUBLE",)}

COMMON = ("-std=gnu11", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

LEVELS = {
    "x86-64-v4": ("-O2", "-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86-64-v3": ("-O2", "-march=x86-64-v3"),
}
"""Of the libraries in a wheel, the fastest first: AVX-512 and AVX2."""

NEEDS = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"),
    "x86-64-v3": ("avx2", "fma", "bmi2"),
}
"""What a processor must have for a level, as /proc/cpuinfo names it."""

PREBUILT = "prebuilt"
"""The folder of a wheel's libraries, beside csrc."""

TUNINGS = (
    ("-O2", "-march=native", "-mprefer-vector-width=512"),
    ("-O2", "-march=native"),
    ("-O2", "-mcpu=native"),
    ("-O2",),
)
"""Tried in turn until the compiler accepts one. The first is for x86, the third for compilers without -march=native."""


COMPILE_SECONDS = 120.0
"""A compiler that takes longer counts as hanging; compiling takes a few seconds."""


class NoLibraryError(RuntimeError):
    """The C part is not available on this machine; the message says why."""


class Library(NamedTuple):
    """The two functions of a unit. Each takes the address of its struct and returns 0, or 1 if out of memory."""

    train: Callable[[Any], int]
    relax: Callable[[Any], int]


@functools.cache
def library(unit: str, dtype: torch.dtype) -> Library:
    """Load a unit ("layered" or "conv") in float32 or float64. From the wheel if it is there.

    Otherwise the first call per machine and version compiles it.
    """
    path = _prebuilt(unit, dtype) or _compiled(unit, dtype)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"the compiled kernels {path} could not be loaded ({error}).") from error
    functions = [getattr(loaded, f"{unit}_{name}") for name in Library._fields]
    for function in functions:
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p]
    return Library(*functions)


def _prebuilt(unit: str, dtype: torch.dtype) -> Path | None:
    """The fastest library of this unit that came with the package and that the processor can run."""
    precision = str(dtype).removeprefix("torch.")
    for level, needed in NEEDS.items():
        path = SOURCES.with_name(PREBUILT) / f"{unit}-{precision}-{level}.so"
        if path.is_file() and _features().issuperset(needed):
            return path
    return None


def _features() -> frozenset[str]:
    return frozenset(word for line in _processor().splitlines() if line.startswith("flags") for word in line.split())


def _compiled(unit: str, dtype: torch.dtype) -> Path:
    """The library of this unit in the cache, compiled if it is not there or damaged."""
    command = find_compiler()
    arguments = (*COMMON, *PRECISIONS[str(dtype).removeprefix("torch.")], str(SOURCES / f"{unit}.c"))
    try:
        target = code_folder() / f"{unit}-{_fingerprint(command, arguments)}.so"
        if stored_code(target) is None:
            store_code(target, _compile(command, arguments, target.parent))
    except OSError as error:
        raise NoLibraryError(f"compiled kernels cannot be kept: {error}") from error
    return target


def find_compiler() -> tuple[str, ...]:
    """The C compiler command: $CC, or the first of cc, gcc, clang that is found."""
    if os.environ.get(NO_COMPILER, "0") not in ("", "0"):
        raise NoLibraryError(f"${NO_COMPILER} is set, so no C compiler is used.")
    given = os.environ.get("CC", "").split()
    found = shutil.which(given[0]) if given else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        looked = f"$CC is {' '.join(given)!r}, which was not found" if given else "there is no cc, gcc or clang"
        raise NoLibraryError(f"no C compiler was found ({looked}). Install one, or name it in $CC.")
    return (found, *given[1:])


def _fingerprint(command: tuple[str, ...], arguments: tuple[str, ...]) -> str:
    """Hash everything the compiled code depends on: sources, flags, compiler and processor."""
    parts = [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    parts.append(repr((command, arguments, TUNINGS, platform.machine())).encode())
    parts.append(_output([*command, "--version"]).encode())
    parts.append(_processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """The processor's model and features: with -march=native the machine code depends on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(command: tuple[str, ...], arguments: tuple[str, ...], folder: Path) -> bytes:
    """The compiled library, made in a temporary file of this folder."""
    handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(handle)
    complaint = ""
    try:
        for tuning in TUNINGS:
            complaint = _output([*command, *tuning, *arguments, "-o", name, "-lm"], wanted=False)
            if not complaint:
                return Path(name).read_bytes()
    finally:
        Path(name).unlink(missing_ok=True)
    raise NoLibraryError(f"the C compiler {' '.join(command)} failed: {complaint.strip().splitlines()[0]}")


def _output(command: list[str], wanted: bool = True) -> str:
    """Run a command and return its output; without `wanted`, only its error message, empty on success."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        if wanted:
            raise NoLibraryError(f"the C compiler {command[0]} cannot be run ({error}).") from error
        return str(error)
    if wanted:
        return done.stdout + done.stderr
    return "" if done.returncode == 0 else (done.stderr or f"exit status {done.returncode}")


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
            self.rows[..., : self.columns].copy_(self.arrange(self.parameter.detach()))

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

    def given_gradient(self) -> Tensor:
        """The gradient from C in the parameter's shape, without a copy: ask `renewed` before C writes the next."""
        return self.unpadded(self.gradient_rows())

    def renewed(self) -> bool:
        """Whether a new buffer takes the place of one that is held by others; fresh memory is slow to write."""
        if self.gradient is not None and _holders(self.gradient) <= ALONE:
            return False
        self.gradient = torch.zeros_like(self.rows)
        return True


def _holders(v: Tensor) -> int:
    return int(torch._C._storage_Use_Count(v.untyped_storage()._cdata))


ALONE = _holders(torch.empty(1))
"""What `_holders` says where only one tensor has the memory."""


class KernelTable:
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


class LayeredUnit:
    """A layered model in the form the C code expects."""

    unit = "layered"

    def __init__(self, model: Layered, networks: int) -> None:
        self.model = model
        self.weights = [AlignedRows(model.get_parameter(f"W{n}{n + 1}"), networks) for n in range(model.depth)]
        offsets = [f"b{n}" for n in range(model.depth)] if model.bias else []
        self.biases = [AlignedRows(model.get_parameter(name), networks) for name in offsets]
        self.table = KernelTable(LayeredStruct())
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


class ConvUnit:
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
        self.table = KernelTable(ConvStruct())
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


Net = LayeredUnit | ConvUnit


def net_of(model: Dynamics, networks: int) -> Net:
    """Wrap a model that the engine has not refused."""
    if isinstance(model, Convolutional):
        return ConvUnit(model, networks)
    assert isinstance(model, Layered), "others are refused"
    return LayeredUnit(model, networks)


def unit_of(model: Dynamics) -> str:
    """The C unit that implements this net."""
    return ConvUnit.unit if isinstance(model, Convolutional) else LayeredUnit.unit


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
