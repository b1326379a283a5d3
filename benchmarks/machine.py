"""Peak figures of a machine: its multiplication rate, and the latency of a dependent step.

python -m benchmarks.machine --device cuda --json results/bench/machine-h200.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import check_device
from benchmarks.timing import wait
from eqprop.engines.base import full_precision
from eqprop.engines.cuda import nvrtc
from eqprop.files import write_json
from eqprop.provenance import provenance

REPEATS = 7
STEPS = 100_000


def best(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs, in seconds: a lower bound needs an undisturbed machine."""
    times = []
    for _ in range(REPEATS):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def product_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Operations per second of torch's n x n matrix product, best of a few runs."""
    a, b = (torch.rand(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * n**3 / best(lambda: torch.mm(a, b, out=out), device)


def gpu_step_us(device: torch.device, kernel: str, blocks: int) -> float | None:
    """Microseconds per step of a kernel in latency.cu; None if it cannot be compiled or launched."""
    out = torch.empty(blocks * 512, device=device)
    try:
        compiled = nvrtc.Module(Path(__file__).with_name("latency.cu"), {}).kernel(kernel)
        steps = ctypes.c_int(STEPS)
        arguments = (ctypes.c_void_p(out.data_ptr()), steps)
        run = best(lambda: compiled.launch(blocks, 512, arguments), device)
    except (nvrtc.CudaError, OSError) as error:
        print(f"{kernel}: {error}", file=sys.stderr)
        return None
    if not bool(torch.isfinite(out).all()):
        raise ArithmeticError(f"The kernel {kernel} wrote values that are not finite, so its time is void.")
    return 1e6 * run / STEPS


def peaks(device: torch.device) -> dict[str, float | None]:
    """Measure float32_flops, half_flops, block_step_us (a dependent step within a block) and exchange_us (a step that
    ends with an exchange between several blocks or cores)."""
    with full_precision():
        if device.type == "cpu":
            return {"float32_flops": product_rate(device, torch.float32, 1536)}
        return {
            "float32_flops": product_rate(device, torch.float32, 8192),
            "half_flops": product_rate(device, torch.float16, 8192),
            "block_step_us": gpu_step_us(device, "block_step", 1),
            "exchange_us": gpu_step_us(device, "exchange_step", 8),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.machine", description="Measure this machine's peak figures.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE|-", default="-")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    try:
        check_device(device)
    except ValueError as error:
        print(f"eqprop: {error}", file=sys.stderr)
        sys.exit(2)
    result: dict[str, Any] = {"machine": provenance(device), "peaks": peaks(device)}
    if given.json == "-":
        print(json.dumps(result, indent=2))
    else:
        write_json(Path(given.json), result)


if __name__ == "__main__":
    main()
