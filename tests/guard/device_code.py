"""What the CUDA engines hand to an H200, seen without one: definitions, launches and machine code of the paper's nets.

    python tests/guard/device_code.py record
    python tests/guard/device_code.py check

The same machine code, launched alike on the same numbers, computes the same bits. `record` writes device-code.json;
`check` compares this checkout with it. Machine code needs NVRTC (pip install nvidia-cuda-nvrtc==13.0.88) and is
compared where its version is that of the record; without NVRTC definitions and launches are still checked.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.cuda_on_cpu import CAPTURED, Graph, capture

from eqprop import papers
from eqprop.cost import SquaredError
from eqprop.data import one_hot
from eqprop.engines import Job, load_engine
from eqprop.engines.cuda import nvrtc
from eqprop.models import stack
from eqprop.run.extras import make_optimizer
from eqprop.run.session import build_model, make_estimator

RECORD = Path(__file__).with_name("device-code.json")
ENGINES = {
    "EB-1h": "cuda-one-hidden",
    "EB-2h": "cuda-deep",
    "P-1h": "cuda-one-hidden",
    "P-2h": "cuda-deep",
    "P-3h": "cuda-deep",
    "P-conv": "cuda-conv",
}
ESTIMATORS = ("ep", "bptt")
NETWORKS = (1, 5)
CUDA = "13.0"
"""The version of NVRTC that is looked for where torch has none of its own."""
CAPABILITY = (9, 0)
CLUSTERS = 8
"""Clusters that the device holds at once: enough for one network of the paper, too few for five."""


class Recorded:
    """Stands in for `nvrtc.Module` and notes what it is given."""

    made: Recorded
    """The latest one."""

    def __init__(self, source: str, definitions: Mapping[str, int]) -> None:
        self.source, self.definitions = source, dict(definitions)
        self.kernels: dict[str, str] = {}
        Recorded.made = self

    def kernel(self, name: str, shared: int = 0, cluster: int = 1) -> _Kernel:
        self.kernels[name] = f"{shared} bytes, cluster {cluster}"
        return _Kernel(name)


class _Kernel:
    def __init__(self, name: str) -> None:
        self.name = name

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], early: bool = False, cluster: int = 1
    ) -> None:
        shape = f"{blocks} x {threads}" + (f" in clusters of {cluster}" if cluster > 1 else "")
        # The iteration's number, a plain int, differs from launch to launch; the rest is the same.
        values = ", ".join(v for a in arguments if isinstance(a, ctypes.Structure) for v in _values(a))
        launch = self.name, shape + (", early" if early else ""), values
        if CAPTURED:
            CAPTURED[-1].append(lambda: _LAUNCHES.append(launch))
        else:
            _LAUNCHES.append(launch)

    def clusters_at_once(self, threads: int, cluster: int) -> int:
        return CLUSTERS


def _values(value: Any, kind: Any = None) -> Iterator[str]:
    """The fields of an argument in order, pointers as what they point to."""
    if isinstance(value, ctypes.Structure):
        for name, of, *_ in value._fields_:
            yield from _values(getattr(value, name), of)
    elif isinstance(value, ctypes.Array):
        for one in value:
            yield from _values(one, value._type_)
    elif kind is ctypes.c_void_p:
        yield "null" if not value else _POINTED[value]
    else:
        yield f"{value:.9g}"


_LAUNCHES: list[tuple[str, str, str]] = []
_POINTED: dict[int, str] = {}
_data_ptr = Tensor.data_ptr


def _noted_data_ptr(tensor: Tensor) -> int:
    _POINTED[_data_ptr(tensor)] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return _data_ptr(tensor)


@contextmanager
def recorded_launches() -> Iterator[list[tuple[str, str, str]]]:
    """Let the runners of CUDA kernels run where there is no GPU: launches are collected and not made."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "CUDAGraph": Graph,
        "graph": capture,
        "current_stream": lambda: stream,
        "Stream": lambda: stream,
        "stream": lambda given: nullcontext(),
    }
    _LAUNCHES.clear()
    _POINTED.clear()
    with ExitStack() as entered:
        for name, fake in fakes.items():
            entered.enter_context(mock.patch.object(torch.cuda, name, fake))
        entered.enter_context(mock.patch.object(nvrtc, "Module", Recorded))
        entered.enter_context(mock.patch.object(Tensor, "data_ptr", _noted_data_ptr))
        yield _LAUNCHES


def make_job(name: str, estimator: str, networks: int) -> Job:
    """An experiment of Table 1 on a few random samples."""
    spec = papers.find(name)
    models = [build_model(spec, trial) for trial in range(networks)]
    model = stack(models) if networks > 1 else models[0]  # type: ignore[type-var]
    source = torch.Generator().manual_seed(0)
    x = torch.rand(spec.optimizer.batch, *(model.input_shape or ()), generator=source)
    labels = torch.randint(10, (spec.optimizer.batch,), generator=source)
    made, optimizer = make_estimator(spec, estimator, model), make_optimizer(spec, model)
    count = networks if networks > 1 else None
    return Job(model, SquaredError(), made, optimizer, x, one_hot(labels, 10), labels, count)


def host(name: str, estimator: str, networks: int) -> dict[str, Any]:
    """What the host side of an engine asks for: source, definitions, memory, launches of the first graph."""
    job = make_job(name, estimator, networks)
    order = torch.arange(len(job.images)).expand(1, networks, -1)
    with recorded_launches() as launches:
        load_engine(ENGINES[name]).runner(job).run(order if networks > 1 else order[:, 0])
    module = Recorded.made
    counts = Counter(launches)
    return {
        "source": module.source,
        "definitions": " ".join(f"{k}={v}" for k, v in module.definitions.items()),
        "memory": module.kernels,
        "launches": [f"{count} of {kernel}, {shape}" for (kernel, shape, _), count in counts.items()],
        "arguments": sorted({values for _, _, values in counts if values}),
    }


def device(source: str, definitions: str) -> dict[str, Any] | None:
    """The machine code for an H200 and what it needs per kernel; None without NVRTC."""
    values = {k: int(v) for k, v in (part.split("=") for part in definitions.split())}
    with mock.patch.object(torch.version, "cuda", torch.version.cuda or CUDA):
        try:
            image = nvrtc.compiled(source, values, CAPABILITY)
        except OSError:
            return None
    found = re.search(rb"V\d+\.\d+\.\d+", image)
    return {"compiler": found[0].decode() if found else "", "kernels": kernels(image)}


REGISTERS, STACK = 0x2F, 0x12
"""Attributes of a kernel in .nv.info: registers per thread, and bytes of its stack, where spilled registers go."""


def kernels(image: bytes) -> dict[str, str]:
    """The kernels of a cubin, an ELF file of 64 bits: registers, stack and the digest of the code."""
    (table,), (size, count, strings) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<3H", image, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", image, table + n * size) for n in range(count)]

    def text(section: int, offset: int) -> str:
        start = heads[section][4] + offset
        return image[start : image.index(b"\0", start)].decode()

    sections = {text(strings, head[0]): head for head in heads}
    content = {name: image[head[4] : head[4] + head[5]] for name, head in sections.items() if head[1] != 8}
    symbols, names = sections[".symtab"], sections[".symtab"][6]
    needs: dict[str, dict[int, int]] = {}
    info, at = content[".nv.info"], 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        if form == 4 and length == 8:
            symbol, value = struct.unpack_from("<II", info, at + 4)
            (name,) = struct.unpack_from("<I", image, symbols[4] + 24 * symbol)
            needs.setdefault(text(names, name), {})[attribute] = value
        at += 4 + (length if form == 4 else 0)
    out = {}
    for name in sorted(name.removeprefix(".text.") for name in content if name.startswith(".text.")):
        of_it = needs.get(name, {})
        code = hashlib.sha256(content[f".text.{name}"]).hexdigest()[:16]
        out[name] = f"{of_it.get(REGISTERS)} registers, {of_it.get(STACK)} bytes of stack, code {code}"
    return out


def recorded(names: Sequence[str] = tuple(ENGINES), compiles: bool = True) -> dict[str, Any]:
    """Everything of this checkout, by experiment and estimator; launches by the number of networks."""
    out: dict[str, Any] = {}
    for name in names:
        for estimator in ESTIMATORS:
            sides = {str(networks): host(name, estimator, networks) for networks in NETWORKS}
            first = next(iter(sides.values()))
            common = {key: first[key] for key in ("source", "definitions", "memory")}
            assert all(side[key] == value for side in sides.values() for key, value in common.items())
            shown = {n: {key: side[key] for key in ("launches", "arguments")} for n, side in sides.items()}
            code = device(first["source"], first["definitions"]) if compiles else None
            out[f"{name} {estimator}"] = {**common, "networks": shown, **({} if code is None else code)}
    return out


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs, a line each; machine code only where both have it from one compiler."""
    out = []
    for name, now in after.items():
        was = before[name]
        not_compared = () if now.get("compiler") == was["compiler"] else ("compiler", "kernels")
        for key in now:
            if key not in not_compared and now[key] != was[key]:
                out.append(f"{name}: {key} was {json.dumps(was[key])}, is {json.dumps(now[key])}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "check"))
    command = parser.parse_args().command
    found = recorded()
    compilers = {entry.get("compiler") for entry in found.values()}
    if command == "record":
        if compilers == {None}:
            sys.exit("NVRTC was not found; the record holds machine code. pip install nvidia-cuda-nvrtc==13.0.88")
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        return
    before = json.loads(RECORD.read_text())
    complaints = differences(before, found)
    theirs = {entry["compiler"] for entry in before.values()}
    what = "definitions, launches and machine code" if compilers == theirs else "definitions and launches"
    print("\n".join(complaints) or f"unchanged: {what} of {len(found)} experiments")
    if compilers != theirs:
        shown = "NVRTC was not found" if compilers == {None} else f"the compiler is {', '.join(map(str, compilers))}"
        print(f"Machine code is not compared: {shown}, and the record's is {', '.join(theirs)}.")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
