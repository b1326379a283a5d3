"""python -m benchmarks: check every engine against the naive twin, then time it.

    python -m benchmarks P-1h --device cuda --trials 5 --json out.json
    python -m benchmarks A B P-conv@128 my_model.py:build --engine eager,compiled    (see benchmarks.nets)
    python -m benchmarks peers    ours beside loops by hand in torch, JAX and numpy (see benchmarks.peers)

An engine less accurate than float32 gets no ratio, and the command exits with code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.nets import is_subject, measure_nets
from benchmarks.run import Effort, Plan, default_device, experiments_named, measure
from benchmarks.scaling import ConvCurves, Curves, measure_scaling
from eqprop.engines.base import PRECISIONS, fixed_algorithms
from eqprop.files import write_json
from eqprop.relax import Schedule, Stop


@dataclass(frozen=True)
class Request:
    """Parsed command line; lists are comma-separated."""

    names: tuple[str, ...] = ()
    method: str = "ep,bptt"
    engine: str = "auto"
    schedule: str = "synchronous"
    stop: str = "never"
    trials: int = 1
    device: str | None = None
    preset: str = "paper"
    table1: bool = False
    effort: Effort = field(default_factory=Effort)

    def plan(self) -> Plan:
        if self.trials < 1:
            raise ValueError(f"--trials is {self.trials}; expected the number of networks to stack, 1 or more.")
        return Plan(
            experiments_named(self.names, self.preset),
            words(self.method),
            words(self.engine),
            cast("tuple[Schedule, ...]", words(self.schedule)),
            cast("tuple[Stop, ...]", words(self.stop)),
            self.trials,
            device_named(self.device),
            self.table1,
            self.effort,
        )


def words(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ValueError(f"Got {text!r}; expected one word, or several separated by commas.")
    return found


def device_named(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device got {name!r}; expected cpu, cuda or cuda:N.") from error


def exit_code(result: dict[str, Any]) -> int:
    """130 after an interruption, 1 if an engine failed or was refused, else 0."""
    failed = any(s["reason"].startswith("failed") for s in result["skipped"])
    wrong = failed or any(row["refused"] for row in result.get("rows", ()))
    return 130 if result.get("interrupted") else int(wrong)


def check_target(where: str | None) -> None:
    """Fail early if --json is not writable."""
    if where in (None, "-"):
        return
    path = Path(str(where))
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ValueError(f"--json got {where!r}; expected a file in a folder that exists, or - for standard output.")


def parser() -> argparse.ArgumentParser:
    effort, request = Effort(), Request()
    p = argparse.ArgumentParser(prog="python -m benchmarks", description="Time every engine against the naive twin.")
    p.add_argument("names", nargs="*", help="experiments (default: all six), or nets of benchmarks.nets")
    p.add_argument("--precision", default="float32", choices=PRECISIONS, help="of nets of benchmarks.nets")
    p.add_argument("--deterministic", action="store_true", help="nets of benchmarks.nets by fixed algorithms")
    for name in ("method", "engine", "schedule", "stop", "preset"):
        p.add_argument(f"--{name}", default=getattr(request, name))
    p.add_argument("--trials", type=int, default=request.trials)
    p.add_argument("--device")
    p.add_argument("--threads", type=int)
    p.add_argument("--table1", action="store_true")
    p.add_argument("--scaling", nargs="?", const="layered", choices=("layered", "conv"), help="curves over sizes")
    p.add_argument("--json", metavar="FILE|-")
    p.add_argument("--rounds", type=int, default=effort.rounds)
    p.add_argument("--naive-rounds", type=int, default=effort.naive_rounds)
    p.add_argument("--chunk-seconds", type=float, default=effort.chunk_seconds)
    p.add_argument("--check-iterations", type=int, default=effort.check_iterations)
    p.add_argument("--trained", type=int, default=effort.trained)
    return p


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["peers"]:
        # In a process of its own, which reads these when it loads numpy, torch and jax.
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PJRT_NPROC"), "1")
        alone = {**os.environ, **one, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        sys.exit(subprocess.run([sys.executable, "-m", "benchmarks.peers", *words[1:]], env=alone).returncode)
    given = parser().parse_args(arguments)
    try:
        check_target(given.json)
        result = run(given)
    except (ValueError, OSError) as error:
        print(f"eqprop: {error}", file=sys.stderr)
        sys.exit(2)
    if given.json == "-":
        print(json.dumps(result, indent=2))
    elif given.json is not None:
        write_json(Path(given.json), result)
    for line in remarks(result):
        say(line)
    sys.exit(exit_code(result))


def remarks(result: dict[str, Any]) -> list[str]:
    """Closing lines: whether it was interrupted, skipped cases, the tolerance, the projection of Table 1."""
    lines = ["Interrupted: only finished rows are shown."] if result.get("interrupted") else []
    # Several schedules and stops may share a reason.
    if "rows" in result:
        lines += dict.fromkeys(f"{s['name']} {s['method']}, {s['engine']}: {s['reason']}" for s in result["skipped"])
        lines.append(result["tolerance"])
    if "table1" in result:
        for title, key in (("all steps", "all_steps"), ("all exact means", "all_exact_means")):
            lines.append(f"Table 1, {title}: {projection(result['table1'][key])}")
    return lines


def projection(total: dict[str, Any]) -> str:
    if total["seconds"] is None:
        return f"open, without {', '.join(total['missing'])}"
    seconds = total["seconds"]
    return f"{seconds / 60:.1f} minutes" if seconds < 36_000 else f"{seconds / 3600:.1f} hours"


def run(given: argparse.Namespace) -> dict[str, Any]:
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    effort = Effort(given.rounds, given.naive_rounds, given.chunk_seconds, given.check_iterations, given.trained)
    others = [name for name in given.names if is_subject(name)]
    if others:
        if len(others) < len(given.names):
            alone = next(name for name in given.names if name not in others)
            raise ValueError(f"{alone} has a naive twin of its own, without autodiff. Give it alone, or as {alone}@20.")
        with fixed_algorithms(given.deterministic):
            return measure_nets(
                given.names, words(given.engine), given.precision, (device_named(given.device), effort), say
            )
    if given.scaling:
        kind = ConvCurves if given.scaling == "conv" else Curves
        return measure_scaling(kind(words(given.engine), device_named(given.device), effort=effort), say)
    chosen = {name: getattr(given, name) for name in ("method", "engine", "schedule", "stop", "trials", "preset")}
    request = Request(tuple(given.names), **chosen, device=given.device, table1=given.table1, effort=effort)
    return measure(request.plan(), say)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
