"""Compile the C part of the CPU engine at first use with the system's compiler, cache it and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eqprop.cache import code_folder, store_code, stored_code

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
