"""What several ranks gain: a model of one iteration on N GPUs, and what gloo shows on this machine.

    python -m benchmarks.ranks                                  # the model's predictions, as a table
    python -m benchmarks.ranks --measure 1,2,4 --json FILE      # iterations and exchanges with gloo, here
    python -m benchmarks.ranks --overhead --json FILE           # what the code for ranks costs one; added to FILE

One iteration of N ranks that divide a mini-batch takes

    t(N) = compute(B / N) + exchange(bytes, N) - overlapped

EP has its gradient only when the second phase ends, so nothing of the exchange is overlapped with compute: the model
leaves that term out, and is pessimistic for an engine that would start the exchange of deep layers early.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.cases import Case
from eqprop import papers
from eqprop.data import mnist
from eqprop.files import write_json
from eqprop.models.layered import LayeredNet
from eqprop.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Link:
    """How ranks are joined: bytes per second in each direction, and seconds per message."""

    bandwidth: float
    latency: float


NVLINK = Link(300e9, 4e-6)
"""Assumed, not measured: two thirds of the 450 GB/s of NVLink 4 in one direction, as NCCL's rings reach on large
messages, and a few microseconds per message."""
NETWORK = Link(40e9, 8e-6)
"""Assumed, not measured: 400 Gbit/s InfiniBand per GPU at four fifths of its rate."""


@dataclass(frozen=True)
class Cluster:
    """GPUs in machines: rings inside each machine, then rings between machines."""

    per_machine: int = 8
    inside: Link = NVLINK
    between: Link = NETWORK

    def exchange(self, size: float, ranks: int) -> float:
        """Seconds to average `size` bytes over the ranks: reduce-scatter inside, ring between, all-gather inside."""
        inside = min(ranks, self.per_machine)
        machines = -(-ranks // self.per_machine)
        return ring(size, inside, self.inside) + ring(size / inside, machines, self.between)


def ring(size: float, ranks: int, link: Link) -> float:
    """2 (N - 1) messages of size / N bytes, one after the other: a ring all-reduce."""
    return 2 * (ranks - 1) * (size / ranks / link.bandwidth + link.latency)


@dataclass(frozen=True)
class Iteration:
    """One training iteration on one GPU.

    seconds     at `batch` samples                      parameters  exchanged in float32
    floor       share of `seconds` that does not shrink with the batch: launches, small products
    source      where the time is from
    """

    name: str
    seconds: float
    batch: int
    parameters: int
    floor: float
    source: str

    def compute(self, samples: float) -> float:
        """Seconds for so many samples: a floor, then in proportion."""
        return self.seconds * (self.floor + (1.0 - self.floor) * samples / self.batch)

    def weak(self, ranks: int, cluster: Cluster) -> float:
        """Efficiency when every rank has `batch` samples: time alone / time together."""
        return self.seconds / (self.seconds + cluster.exchange(4.0 * self.parameters, ranks))

    def strong(self, ranks: int, cluster: Cluster) -> float:
        """Efficiency when the ranks divide `batch` samples: speed-up / ranks."""
        together = self.compute(self.batch / ranks) + cluster.exchange(4.0 * self.parameters, ranks)
        return self.seconds / together / ranks


FLOOR = 0.1
"""Assumed, not measured: a tenth of an iteration of nets A and B at batch 128 would remain at any batch."""
SMALL_FLOOR = 0.9
"""Assumed: the kernels of Table 1's nets wait for each other, not for arithmetic, at batch 20 already."""
FIELD = "milliseconds per iteration at batch 128 on one H200, measured with a float16 graph through torch.compile"
NETS = (
    Iteration("A, float16", 0.089, 128, 3_843_850, FLOOR, FIELD),
    Iteration("A, float32", 0.905, 128, 3_843_850, FLOOR, "the same, with this package's CUDA graph in float32"),
    Iteration("B, float16", 0.031, 128, 3_859_210, FLOOR, FIELD),
)
"""Laborieux et al. 2021 (T 250, K 30 twice) and Scellier et al. 2023 (60 sweeps, 20 twice) on CIFAR-10."""


def table1_iterations(results: Path = ROOT / "results" / "bench" / "h200.json") -> list[Iteration]:
    """EP's iterations of Table 1, from our own measurements: five stacked trials, batch 20, on one H200."""
    found = []
    for row in json.loads(results.read_text())["rows"]:
        net = papers.find(row["name"], "paper").model
        if row["method"] == "ep" and isinstance(net, LayeredNet):
            weights = sum(a * b + a for a, b in zip(net.sizes, net.sizes[1:], strict=False))
            seconds, source = row["us_per_iteration"] * 1e-6, f"{results.name}, {row['engine']}"
            found.append(Iteration(row["name"], seconds, row["batch"], 5 * weights, SMALL_FLOOR, source))
    return found


def packed(seconds: Sequence[float], ranks: int) -> float:
    """Seconds until the last of these networks is trained, each by the first rank that is free, the longest first."""
    free = [0.0] * ranks
    for one in sorted(seconds, reverse=True):
        first = min(range(ranks), key=free.__getitem__)
        free[first] += one
    return max(free)


def apart(seconds: Sequence[float], ranks: int) -> float:
    """Efficiency of networks divided among ranks."""
    return sum(seconds) / (ranks * packed(seconds, ranks))


def table1_legs(results: Path = ROOT / "results" / "bench" / "h200.json") -> list[float]:
    """Seconds of Table 1's twelve trainings, five trials side by side, on one H200."""
    return [row["seconds"] for row in json.loads(results.read_text())["table1"]["all_steps"]["rows"]]


def predictions(cluster: Cluster | None = None) -> list[dict[str, Any]]:
    """Efficiencies on 8 and 64 GPUs."""
    cluster = cluster or Cluster()
    found: list[dict[str, Any]] = []
    for one in (*NETS, *table1_iterations()):
        for ranks in (8, 64):
            exchange = cluster.exchange(4.0 * one.parameters, ranks)
            weak, strong = one.weak(ranks, cluster), one.strong(ranks, cluster)
            numbers = {"exchange_us": exchange * 1e6, "weak": weak, "strong": strong}
            found.append({"name": one.name, "ranks": ranks, "ms": one.seconds * 1e3, **numbers})
    legs = table1_legs()
    for ranks in (8, 64):
        single = [seconds for seconds in legs for _ in range(5)]
        found.append({"name": "Table 1, 12 trainings of 5 stacked trials", "ranks": ranks, "apart": apart(legs, ranks)})
        found.append({"name": "Table 1, 60 trainings", "ranks": ranks, "apart": apart(single, ranks)})
    return found


def show(found: Sequence[Mapping[str, Any]]) -> str:
    """The predictions as a Markdown table, a line per net: efficiencies on 8, 64 GPUs."""
    lines = ["| what | ms alone | exchange, µs | a batch per GPU | one batch divided | networks apart |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name in dict.fromkeys(row["name"] for row in found):
        rows = [row for row in found if row["name"] == name]
        cells = [f"{rows[0]['ms']:.3g}" if "ms" in rows[0] else ""]
        for key, form in (("exchange_us", "{:.0f}"), ("weak", "{:.0%}"), ("strong", "{:.0%}"), ("apart", "{:.0%}")):
            cells.append(", ".join(form.format(row[key]).replace("%", " %") for row in rows if key in row))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure_here(rounds: int, iterations: int) -> dict[str, Any]:
    """Run in every rank of a torchrun job: seconds per iteration of P-1h, and of the exchange of its gradient alone."""
    from eqprop.run import distributed

    torch.set_num_threads(1)
    ranks, images = distributed.join(), mnist()
    batch = 128
    experiment = papers.find("P-1h", "paper").override(batch=batch)
    case = Case(experiment, "ep", "eager", 1)
    model = case.build(torch.device("cpu"))
    job = case.job(model, images)
    if ranks.several:
        from dataclasses import replace

        job = replace(job, exchange=ranks.average)
    runner = case.choose(model).runner(job)
    order = torch.arange(iterations * batch).view(iterations, batch)
    gradient = [torch.zeros_like(p) for p in model.parameters()]
    loss = torch.zeros(1, batch // ranks.size)
    times: dict[str, list[float]] = {"iteration": [], "exchange": []}
    for n in range(rounds + 1):
        ranks.total(torch.zeros(1))  # begin together
        start = time.perf_counter()
        runner.run(ranks.share(order, -1))
        middle = time.perf_counter()
        for _ in range(iterations if ranks.several else 0):
            ranks.average(gradient, loss)
        end = time.perf_counter()
        if n:  # the first round warms up
            times["iteration"].append((middle - start) / iterations)
            times["exchange"].append((end - middle) / iterations)
    return {
        "ranks": ranks.size,
        "batch": batch,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ms_per_iteration": 1e3 * median(times["iteration"]),
        "ms_per_exchange": 1e3 * median(times["exchange"]),
        "rounds": rounds,
        "iterations": iterations,
    }


def measure(sizes: Sequence[int], rounds: int, iterations: int) -> dict[str, Any]:
    """Measure each number of ranks in a torchrun job of its own."""
    found = [in_torchrun(size, rounds, iterations) for size in sizes]
    return {"machine": provenance(), "backend": "gloo", "name": "P-1h", "engine": "eager", "ranks": found}


def in_torchrun(size: int, *numbers: int) -> dict[str, Any]:
    """What rank 0 of a torchrun job of this module prints."""
    words = ["--standalone", "--nproc-per-node", str(size), "-m", "benchmarks.ranks", "--here"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


CHUNKS = {"xla": 512, "eager": 64}
"""Iterations between two looks at the clock, as `eqprop train` chooses them here: about half a second."""


def measure_one_here(rounds: int) -> dict[str, Any]:
    """Run in a torchrun job of one rank: processor time of P-1h's iterations as one of several ranks would train them,
    over that of the engine's loop alone, in rounds that alternate between the two.

    An upper bound of what the code for ranks costs: the looks for divergence between chunks are in it as well.
    """
    from eqprop.run import bind, distributed
    from eqprop.run.trainer import Position, Trainer

    torch.set_num_threads(1)
    found, images, ranks = {}, mnist(), distributed.join()
    for engine, n in CHUNKS.items():
        session = bind("P-1h", images, ranks, engine=engine, threads=1)
        trainer = Trainer(session, session.legs()[0])
        order = trainer._batches(0)[:n]

        def bare(trainer: Trainer = trainer, order: Any = order) -> None:
            trainer.runner.run(order)

        def ranked(trainer: Trainer = trainer, n: int = n) -> None:
            trainer.position = Position()
            trainer.advance(n)

        found[engine] = {"iterations": n, **_ratios(bare, ranked, rounds)}
    return {"machine": provenance(), "name": "P-1h", "batch": 20, "engines": found}


def _ratios(first: Callable[[], None], second: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Processor seconds of both, and quartiles of second / first over the rounds."""
    times: list[tuple[float, float]] = []
    for n in range(rounds + 1):
        seconds = {}
        for work in (first, second) if n % 2 else (second, first):
            begin = time.process_time()
            work()
            seconds[work] = time.process_time() - begin
        times.append((seconds[first], seconds[second]))
    times = times[1:]  # the first round warms up
    return {
        "rounds": rounds,
        "ms_alone": 1e3 * median(a for a, _ in times),
        "ms_as_one_rank": 1e3 * median(b for _, b in times),
        "ratio_quartiles": quantiles((b / a for a, b in times), n=4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", metavar="1,2,4", help="numbers of processes to time here")
    parser.add_argument("--overhead", action="store_true", help="time one rank against the engine's loop alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", nargs="+", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        found = measure_here(*given.here) if len(given.here) > 1 else measure_one_here(*given.here)
        from eqprop.run import distributed

        if distributed.rank() == 0:
            print(json.dumps(found))
        return
    if given.measure:
        document = measure([int(n) for n in given.measure.split(",")], given.rounds, given.iterations)
        print(json.dumps(document["ranks"], indent=1))
    elif given.overhead:
        one = in_torchrun(1, given.rounds)
        one["machine"]["command"] = f"ranks.py --overhead --rounds {given.rounds}"
        print(json.dumps(one["engines"], indent=1))
        there = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
        document = {**there, "one_rank": one}
    else:
        rows = predictions()
        document = {"machine": provenance(), "cluster": repr(Cluster()), "predictions": rows}
        print(show(rows))
    if given.json:
        write_json(given.json, document)


if __name__ == "__main__":
    main()
