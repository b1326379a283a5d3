"""CUDA kernels on the CPU, for machines without a GPU: the same source, compiled by g++, a fibre per thread.

Kernels with barriers and shuffles within a block can be run; clusters, tensor cores and asynchronous copies cannot.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eqprop.engines.cuda import nvrtc
from eqprop.engines.cuda.job import CapturedRunner

HERE = Path(__file__).parent / "cuda"
REPLACED = (
    (r"extern __shared__ (?:__align__\(16\) )?([\w ]+?) (\w+)\[\];", r"\1 *\2 = (\1 *)block::dynamic_memory();"),
    (r"__shared__", "static"),
    (r'asm volatile\("griddepcontrol[^;]*;" ::: "memory"\);', ""),
    (r'asm\("ex2\.approx[^;]*; *" : "=f"\((\w+)\) : "f"\((\w+)\)\);', r"\1 = exp2f(\2);"),
    (r'asm\("rcp\.approx[^;]*; *" : "=f"\((\w+)\) : "f"\((\w+)\)\);', r"\1 = 1.0f / \2;"),
    (r"__launch_bounds__\([^{]*?\)(?= void)", ""),
    (r"__(?:device|global|forceinline)__", ""),
    (r'#include "(\w+\.cuh)"', r'#include "\1.h"'),
    (r"#pragma unroll.*", ""),
    (r'extern "C"', "static"),  # the C library has an `advance` too
)
"""What g++ does not know, by what it does."""


def translated(text: str) -> str:
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    return text


class OnCpu:
    """Stands in for `nvrtc.Module`: the kernels of a source file for the CPU."""

    folder: Path

    def __init__(self, source: str, definitions: Mapping[str, int]) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no g++ on this machine")
        name = f"{Path(source).stem}-" + "-".join(f"{k}{v}" for k, v in definitions.items())
        library = self.folder / f"{name}.so"
        if not library.exists():
            _build(compiler, self.folder / name, nvrtc.SOURCES / source, definitions, library)
        self.library = ctypes.CDLL(str(library))

    def kernel(self, name: str, shared: int = 0, cluster: int = 1) -> _Kernel:
        assert cluster == 1, "a cluster's blocks run together"
        return _Kernel(getattr(self.library, f"run_{name}"), name, shared)


KERNEL = re.compile(r'extern "C" __global__[^{;]*? void (\w+)\((.*?)\)')
ADVANCE = ("advance", "Counters *counters, int by")  # of job.cuh


def _build(compiler: str, place: Path, source: Path, definitions: Mapping[str, int], library: Path) -> None:
    place.mkdir(exist_ok=True)
    for path in source.parent.glob("*.cuh"):
        (place / f"{path.name}.h").write_text(translated(path.read_text()))
    text = source.read_text()
    entries = "\n".join(_entry(*kernel) for kernel in [*KERNEL.findall(text), ADVANCE])
    (place / "kernels.cpp").write_text(f'#include "{HERE / "block.h"}"\n{translated(text)}\n{entries}')
    flags = [f"-D{k}={v}" for k, v in definitions.items()]
    words = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *flags, "kernels.cpp", "-o", str(library)]
    subprocess.run(words, cwd=place, check=True)


def _entry(kernel: str, parameters: str) -> str:
    """A function that runs all blocks of a kernel, with pointers to its arguments, as a launch has them."""
    kinds = [re.sub(r"\w+$", "", p.strip()) for p in parameters.split(",")]
    values = ", ".join(f"*({kind} *)arguments[{n}]" for n, kind in enumerate(kinds))
    return (
        f'extern "C" int run_{kernel}(int blocks, int threads, long shared, void **arguments) {{\n'
        f"  for (int n = 0; n < blocks; n++)\n"
        f"    if (!block::run(n, threads, shared, [&] {{ {kernel}({values}); }})) return 1;\n"
        "  return 0;\n}\n"
    )


class _Kernel:
    def __init__(self, function: Any, name: str, shared: int) -> None:
        self.function, self.name, self.shared = function, name, shared

    def launch(self, blocks: int, threads: int, arguments: Sequence[Any], early: bool = False) -> None:
        """Into the graph that is being captured."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        kept = list(arguments)

        def run() -> None:
            assert kept, "the arguments live as long as the graph"
            ended = self.function(blocks, threads, ctypes.c_long(self.shared), pointers)
            assert ended == 0, f"the threads of {self.name} wait for each other"

        CAPTURED[-1].append(run)


CAPTURED: list[list[Callable[[], None]]] = []


class Graph:
    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    CAPTURED.append(graph.launches)
    try:
        yield
    finally:
        CAPTURED.pop()


def run_kernels_on_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the runners of CUDA kernels run on the CPU, three iterations per graph."""
    OnCpu.folder = folder
    monkeypatch.setattr(nvrtc, "Module", OnCpu)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for kind in CapturedRunner.__subclasses__():
        for runner in kind.__subclasses__():
            monkeypatch.setattr(runner, "iterations_per_graph", 3)
