"""Compile CUDA C++ at first use with NVRTC, which ships with torch's CUDA builds, and launch it on torch's stream.

NVRTC and the driver are called through ctypes: this needs no further package and gives access to every launch
attribute. Compiled code is cached on disk, keyed by everything that went into it.
"""

from __future__ import annotations

import ctypes
import hashlib
import site
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from eqprop.cache import code_folder, store_code, stored_code

SOURCES = Path(__file__).parent / "kernels"


class CudaError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


class Kernel:
    """One kernel of a loaded module."""

    def __init__(self, handle: ctypes.c_void_p, name: str, shared: int) -> None:
        self.handle, self.name, self.shared = handle, name, shared

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], early: bool = False, cluster: int = 1
    ) -> None:
        """Launch on torch's current stream; arguments are passed by value.

        With `early` it may start before the previous kernel has ended: it must then wait (griddepcontrol.wait) before
        touching what that kernel writes. Blocks of a `cluster` are resident together and can access each other's shared
        memory.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        config = self._config(blocks, threads, cluster, early)
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, pointers, None)
        _check(status, f"The kernel {self.name} could not be launched on {blocks} blocks of {threads} threads")

    def clusters_at_once(self, threads: int, cluster: int) -> int:
        """Number of clusters of this many blocks that the device can hold at once."""
        found = ctypes.c_int()
        config = self._config(cluster, threads, cluster)
        status = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self.handle, ctypes.byref(config))
        _check(status, f"The clusters of {cluster} blocks that fit for the kernel {self.name} could not be counted")
        return found.value

    def _config(self, blocks: int, threads: int, cluster: int, early: bool = False) -> _Config:
        wanted = [_Attribute(id=_CLUSTER_DIMENSION, value=(cluster, 1, 1))] if cluster > 1 else []
        wanted += [_Attribute(id=_PROGRAMMATIC_SERIALIZATION, value=(1,))] if early else []
        config = _Config(blocks, 1, 1, threads, 1, 1, self.shared, torch.cuda.current_stream().cuda_stream)
        config.attributes, config.count = (_Attribute * len(wanted))(*wanted), len(wanted)
        return config


_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED = 8
_NON_PORTABLE_CLUSTER = 14
PORTABLE_CLUSTER = 8
"""Largest cluster that every device with clusters supports; larger ones need an opt-in."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class Module:
    """A source file, named within `kernels/` or by path, compiled for this device with the given definitions."""

    def __init__(self, source: str | Path, definitions: Mapping[str, int]) -> None:
        torch.zeros(1, device="cuda")  # the driver calls below need torch's context to be current
        self.handle = ctypes.c_void_p()
        image = compiled(source, definitions, torch.cuda.get_device_capability())
        _check(_driver().cuModuleLoadData(ctypes.byref(self.handle), image), f"{source} could not be loaded")

    def kernel(self, name: str, shared: int = 0, cluster: int = 1) -> Kernel:
        """A kernel by name, with up to `shared` bytes of dynamic shared memory and clusters of `cluster` blocks."""
        handle = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(handle), self.handle, name.encode()), f"No kernel {name}")
        if shared > 48 * 1024:
            status = _driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared)
            _check(status, f"The kernel {name} needs {shared} bytes of shared memory")
        if cluster > PORTABLE_CLUSTER:
            status = _driver().cuFuncSetAttribute(handle, _NON_PORTABLE_CLUSTER, 1)
            _check(status, f"The kernel {name} needs clusters of {cluster} blocks")
        return Kernel(handle, name, shared)


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, as a sentence; None if they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device."
    if torch.cuda.get_device_capability() < (7, 0):
        return f"{torch.cuda.get_device_name()} is too old (compute capability 7.0 or newer is needed)."
    try:
        _nvrtc()
        _driver()
    except OSError as error:
        return f"a CUDA library is missing ({error})."
    return None


def compiled(source: str | Path, definitions: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """The machine code of a source file for devices of this compute capability, from the cache if it is there."""
    major, minor = capability
    suffix = "a" if major >= 9 else ""
    options = [f"--gpu-architecture=sm_{major}{minor}{suffix}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in definitions.items()]
    headers = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.cuh"))}
    code = (SOURCES / source).read_bytes()
    release = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(*map(ctypes.byref, release))
    key = hashlib.sha256(b"\0".join([code, *headers.values(), *(o.encode() for o in options)]))
    key.update(".".join(str(n.value) for n in release).encode())
    name = f"{Path(source).stem}-{key.hexdigest()[:24]}.cubin"
    with suppress(OSError):  # without a private cache, compile every time
        if (found := stored_code(code_folder() / name)) is not None:
            return found
    image = _compile(Path(source).name, code, headers, options)
    with suppress(OSError):
        store_code(code_folder() / name, image)
    return image


def _compile(source: str, code: bytes, headers: dict[str, bytes], options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, source.encode(), len(headers), contents, names)
    _check(status, f"NVRTC refused {source}")
    flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), flags) != 0:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"{source} did not compile with {' '.join(options)}:\n{log.value.decode(errors='replace')}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


@lru_cache(None)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@lru_cache(None)
def _nvrtc() -> ctypes.CDLL:
    """Load the NVRTC of torch's CUDA version, from torch's libraries or from the system."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [Path(p) / "nvidia" for p in (*site.getsitepackages(), site.getusersitepackages(), *sys.path)]
    found = [str(path) for folder in folders if folder.is_dir() for path in folder.glob(f"**/{name}")]
    for candidate in (*found, name, f"/usr/local/cuda/lib64/{name}"):
        try:
            # NVRTC opens its built-ins by name; once loaded they are found outside the system's folders too.
            for builtins in Path(candidate).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins.resolve()))
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} was not found")


def _check(status: int, what: str) -> None:
    if status != 0:
        raise CudaError(f"{what} (CUDA error {status}).")
