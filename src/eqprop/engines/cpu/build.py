"""The C part of the CPU engine: compiled at first use with the system's compiler, kept in the user's cache, loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eqprop.cache import cache_folder

SOURCES = Path(__file__).with_name("csrc")
NO_COMPILER = "EQPROP_NO_COMPILER"
"""Set to anything but 0, this variable makes the engine behave as on a machine without a compiler."""

COMMON = ("-std=gnu11", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
TUNINGS = (
    ("-O2", "-march=native", "-mprefer-vector-width=512"),
    ("-O2", "-march=native"),
    ("-O2", "-mcpu=native"),
    ("-O2",),
)
"""Tried in turn until the compiler takes one: the first is for x86, the third for those that know no -march here."""


class NoLibraryError(RuntimeError):
    """The C part cannot be had on this machine; the message says why."""


class Library(NamedTuple):
    """The two functions of a unit; each takes the address of its struct and returns 0, or 1 without memory."""

    train: Callable[[Any], int]
    relax: Callable[[Any], int]


@functools.cache
def library(unit: str, dtype: torch.dtype) -> Library:
    """A unit ("layered" or "conv") in float32 or float64. Compiling takes seconds, once per machine and version."""
    command = find_compiler()
    defines = ("-DREAL_DOUBLE",) if dtype == torch.float64 else ()
    arguments = (*COMMON, *defines, str(SOURCES / f"{unit}.c"))
    target = library_folder() / f"{unit}-{_fingerprint(command, arguments)}.so"
    if not target.exists():
        _compile(command, arguments, target)
    try:
        loaded = ctypes.CDLL(str(target))
    except OSError as error:
        raise NoLibraryError(f"the compiled kernels {target} could not be loaded ({error}).") from error
    functions = [getattr(loaded, f"{unit}_{name}") for name in Library._fields]
    for function in functions:
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p]
    return Library(*functions)


def find_compiler() -> tuple[str, ...]:
    """The command of the C compiler: $CC, or the first of cc, gcc, clang that is there."""
    if os.environ.get(NO_COMPILER, "0") not in ("", "0"):
        raise NoLibraryError(f"${NO_COMPILER} is set, so no C compiler is used.")
    given = os.environ.get("CC", "").split()
    found = shutil.which(given[0]) if given else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        looked = f"$CC is {' '.join(given)!r}, which is not there" if given else "there is no cc, gcc or clang"
        raise NoLibraryError(f"no C compiler was found ({looked}). Install one, or name it in $CC.")
    return (found, *given[1:])


def library_folder() -> Path:
    """Where compiled code is kept: the cache folder, or a new one if that is not this user's alone."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        # Code is loaded from here: nobody else may be able to put a file into it.
        private = not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and facts.st_uid == os.getuid()
        if private and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="eqprop-"))


def _fingerprint(command: tuple[str, ...], arguments: tuple[str, ...]) -> str:
    """Whatever the compiled code depends on: sources, flags, compiler and processor."""
    parts = [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    parts.append(repr((command, arguments, TUNINGS, platform.machine())).encode())
    parts.append(_output([*command, "--version"]).encode())
    parts.append(_processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """The processor's model and abilities: -march=native means another machine code on another model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(command: tuple[str, ...], arguments: tuple[str, ...], target: Path) -> None:
    """Compile into a file of its own and rename it, so that a reader sees all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    complaint = ""
    try:
        for tuning in TUNINGS:
            complaint = _output([*command, *tuning, *arguments, "-o", name, "-lm"], wanted=False)
            if not complaint:
                os.replace(name, target)
                return
    finally:
        Path(name).unlink(missing_ok=True)
    raise NoLibraryError(f"the C compiler {' '.join(command)} failed: {complaint.strip().splitlines()[0]}")


def _output(command: list[str], wanted: bool = True) -> str:
    """What a command prints; with `wanted` unset, only what it says when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        if wanted:
            raise NoLibraryError(f"the C compiler {command[0]} cannot be run ({error}).") from error
        return str(error)
    if wanted:
        return done.stdout + done.stderr
    return "" if done.returncode == 0 else (done.stderr or f"exit status {done.returncode}")
