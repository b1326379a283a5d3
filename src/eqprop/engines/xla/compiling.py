"""How programs are compiled and run: in 64 bits where asked for, on the CPU, with compiled code kept on disk.

The user's own jax is left as it is: every setting is for the time of a call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import jax
import torch
from jax.experimental.compilation_cache import compilation_cache

from eqprop.cache import CacheError, code_folder


@contextmanager
def running(first: bool) -> Iterator[None]:
    """Run a program; `first` if it will have to be compiled, which the cache on disk may spare."""
    with ExitStack() as stack:
        stack.enter_context(_on_cpu())
        stack.enter_context(jax.enable_x64(True))
        if first:
            stack.enter_context(_code_kept())
        yield


def _on_cpu() -> AbstractContextManager[Any]:
    device = _cpu()
    return nullcontext() if device is None else jax.default_device(device)


@functools.cache
def _cpu() -> Any | None:
    """The CPU where it is not jax's default; None where it is.

    Starts jax, if nobody has: its threads are counted then, once, so it is told how many torch has.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = before or str(torch.get_num_threads())
    try:
        return None if jax.default_backend() == "cpu" else jax.devices("cpu")[0]
    finally:
        if before is None:
            del os.environ[_THREADS]


_THREADS = "PJRT_NPROC"

_SETTINGS: dict[str, Any] = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextmanager
def _code_kept() -> Iterator[None]:
    """Let jax keep compiled programs in the package's cache folder, unless the user chose a folder."""
    folder = _folder()
    if getattr(jax.config, "jax_compilation_cache_dir") is not None or folder is None:  # noqa: B009
        yield
        return
    wanted = {**_SETTINGS, "jax_compilation_cache_dir": folder}
    before = {name: getattr(jax.config, name) for name in wanted}
    compilation_cache.reset_cache()  # it remembers the folder it first saw
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def _folder() -> str | None:
    try:
        return str(code_folder() / "xla")
    except CacheError:
        return None
