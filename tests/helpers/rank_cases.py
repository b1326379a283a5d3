"""What several ranks compute, beside one process: run as a script, which forks them, and read from its JSON.

python -m helpers.rank_cases FOLDER
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import eqprop
from eqprop import papers
from eqprop.cost import Cost
from eqprop.data import Augmentation, Images
from eqprop.dynamics import Dynamics
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.run import distributed
from eqprop.run.checkpoint import checkpoint_file, read_checkpoint
from eqprop.run.log import WALL_TIME, read_metrics
from eqprop.run.session import build_model, make_estimator
from eqprop.run.spec import Spec
from helpers import ranks
from helpers.training_runs import few_images, whole_mnist, write_idx, write_small_toml

BATCH = 20
EPOCHS, SAMPLES = 2, 200  # 20 iterations


def energy(x: Tensor, s: tuple[Tensor, ...], theta: dict[str, Tensor]) -> Tensor:
    r0, r1 = torch.tanh(s[0]), torch.tanh(s[1])
    leak = 0.5 * (s[0] ** 2).sum(-1) + 0.5 * (s[1] ** 2).sum(-1)
    return leak - (r0 * (r1 @ theta["W"].T)).sum(-1) - (r1 * (x @ theta["V"].T)).sum(-1)


def own_net(seed: int = 0) -> Dynamics:
    draw = torch.Generator().manual_seed(seed)
    if distributed.rank() > 0:  # as a network that draws without a seed: the ranks must take over that of rank 0
        draw.manual_seed(os.getpid())
    weights = {"W": 0.3 * torch.randn(10, 16, generator=draw), "V": 0.02 * torch.randn(16, 784, generator=draw)}
    return eqprop.from_energy(energy, weights, layers=(10, 16), eps=0.5)


P_1H = papers.find("P-1h", "paper").override(epochs=EPOCHS, batch=BATCH, model=LayeredNet((10, 64, 784)))
CONV = Spec.of(
    optimizer="SGD",
    estimator="ep",
    name="conv",
    model=ConvolutionalNet(channels=(4, 2), flat=(10,)),
    T=5,
    K=2,
    beta=0.4,
    epochs=EPOCHS,
    batch=BATCH,
    rates={"*": 0.02},
)
OWN = Spec.of(
    optimizer="SGD",
    estimator="ep",
    name="own",
    model=LayeredNet((10, 16, 784)),
    T=6,
    K=3,
    beta=0.2,
    epochs=EPOCHS,
    batch=BATCH,
    rates={"*": 0.01},
)
CASES: dict[str, tuple[Spec, Callable[[int], Dynamics] | None, torch.dtype]] = {
    "P-1h": (P_1H, None, torch.float32),
    "conv": (CONV, None, torch.float64),
    "own": (OWN, own_net, torch.float64),
}


def images(dtype: torch.dtype, train: int = SAMPLES, test: int = 250) -> Images:
    few = few_images(train, test)
    return replace(few, train_x=few.train_x.to(dtype), test_x=few.test_x.to(dtype))


def gradients(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The mean gradient of one mini-batch, by this rank and all others."""
    experiment, own, _ = CASES[name]
    data, group = images(dtype, BATCH, 1), distributed.join()
    model = (build_model(experiment, 0, dtype) if own is None else own(0)).to(dtype)
    group.from_first([p.detach() for p in model.parameters()])
    x = data.train_x if model.input_shape is None else data.train_x.view(-1, *model.input_shape)
    y = eqprop.data.one_hot(data.train_y, 10, dtype)
    cost: Cost = eqprop.SquaredError()
    estimator = make_estimator(experiment, "ep", model)
    estimator.backward(model, cost, group.share(x), group.share(y), engine="eager")
    distributed.average_gradients(model)
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def gradients_and_trainings(folder: Path, rank: int) -> None:
    found = {f"{name} {dtype}": gradients(name, dtype) for name in CASES for dtype in (torch.float64, torch.float32)}
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    for name, (experiment, own, dtype) in CASES.items():
        eqprop.train(experiment, folder / name, data=images(dtype), model=own, engine="eager")


def differences(one: Path, several: Path, legs: tuple[str, ...] = ("ep",)) -> dict[str, Any]:
    """How a run differs from that of one process: largest weight and start, and running errors in samples."""
    found: dict[str, Any] = {"weights": 0.0, "start": 0.0}
    for leg in legs:
        a, b = read_checkpoint(one / leg), read_checkpoint(several / leg)
        for kind in ("weights", "start"):
            mine, other = getattr(a, kind), getattr(b, kind)
            assert mine.keys() == other.keys()
            gaps = [float((mine[k] - other[k]).abs().max()) for k in mine]
            found[kind] = max([found[kind], *gaps])
    lines = [read_metrics(folder) for folder in (one, several)]
    for name in ("train_error", "test_error"):
        gaps = [abs(p[name] - q[name]) for p, q in zip(*lines, strict=True)]
        found[name] = max(gaps)
    without = [[{k: v for k, v in line.items() if k != WALL_TIME} for line in part] for part in lines]
    found["same_lines"] = without[0] == without[1]
    return found


def compare(folder: Path) -> dict[str, Any]:
    """Gradients and trainings of two ranks beside those of one."""
    found: dict[str, Any] = {"gradients": {}, "training": {}}
    sizes = (1, 2)
    for size in sizes:
        place = folder / f"size-{size}"
        ranks.check(ranks.run(size, partial(gradients_and_trainings, place), place / "log"))
    alone = torch.load(folder / "size-1" / "gradients.pt", weights_only=True)
    for size in sizes[1:]:
        together = torch.load(folder / f"size-{size}" / "gradients.pt", weights_only=True)
        for name, grads in alone.items():
            gaps = [float((g - together[name][n]).abs().max() / g.abs().max()) for n, g in grads.items()]
            found["gradients"][f"{name}, {size} ranks"] = max(gaps)
        for name in CASES:
            gap = differences(folder / "size-1" / name, folder / f"size-{size}" / name)
            found["training"][f"{name}, {size} ranks"] = gap
    return found


def starts(folder: Path) -> dict[str, Any]:
    """Starts belong to samples: stacked trials of P-1h's kind in float64, by 1 and 2 ranks."""
    kinds = ("persistent", "carried", "initialised")
    for size in (1, 2):

        def work(rank: int, size: int = size) -> None:
            given = {"trials": 2, "stacked": True, "engine": "eager"}
            for kind in kinds:
                data = images(torch.float64, 100, 40)
                eqprop.train(OWN, folder / f"{kind}-{size}", data=data, start=kind, **given)

        ranks.check(ranks.run(size, work, folder / f"log-{size}"))
    return {kind: differences(folder / f"{kind}-1", folder / f"{kind}-2") for kind in kinds}


def prepared(folder: Path) -> dict[str, Any]:
    """What is drawn belongs to samples: augmentation, random signs; with momentum, clipping and averaged weights."""
    given = {"estimator": "ep-random-sign", "clip_norm": 0.5, "average": 0.9, "optimizer_options": {"momentum": 0.9}}
    given |= {"augmentation": Augmentation(crop=2, cutout=4), "start": "carried", "engine": "eager", "keep_best": True}
    for size in (1, 2):

        def work(rank: int, size: int = size) -> None:
            eqprop.train(CONV, folder / f"run-{size}", data=images(torch.float64, 100, 40), **given)

        ranks.check(ranks.run(size, work, folder / f"log-{size}"))
    return differences(folder / "run-1", folder / "run-2", ("ep-random-sign",))


class Numbers(Dataset[tuple[Tensor, int]]):
    """Sample n is full of n, and says in a file that it was read."""

    def __init__(self, samples: int, log: Path | None = None) -> None:
        self.samples, self.log = samples, log

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, n: int) -> tuple[Tensor, int]:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{n}\n")
        return torch.full((1, 4, 4), n / self.samples), n % 10


def shards(folder: Path) -> dict[str, Any]:
    """Each of two ranks reads its own part of a streamed set, and nothing else."""

    def work(rank: int) -> None:
        group, order = distributed.join(), torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(4, 10)
        log = folder / f"read-{rank}"
        data = eqprop.data.streamed(DataLoader(Numbers(40, log)), DataLoader(Numbers(10)), classes=10)
        log.write_text("")
        seen = [read[2] for read in data.batches(group.share(order, -1), seed=0, epoch=0)]
        whole = group.whole(torch.stack(seen), -1)
        assert torch.equal(whole, order)

    ranks.check(ranks.run(2, work, folder / "log"))
    found: dict[str, Any] = {"read": [_numbers(folder / f"read-{rank}") for rank in (0, 1)]}
    for size in (1, 2):

        def train(rank: int, size: int = size) -> None:
            log = folder / f"tested-{size}-{rank}"
            data = eqprop.data.streamed(DataLoader(Numbers(40)), DataLoader(Numbers(11, log)), classes=10)
            small = OWN.override(model=LayeredNet((10, 8, 16)), batch=10)
            eqprop.train(small, folder / f"run-{size}", data=data, engine="eager")

        ranks.check(ranks.run(size, train, folder / f"log-{size}"))
    found["training"] = differences(folder / "run-1", folder / "run-2")
    found["tested"] = [_numbers(folder / f"tested-2-{rank}") for rank in (0, 1)]
    return found


def _numbers(log: Path) -> list[int]:
    return sorted(map(int, log.read_text().split()))


def rejoined(folder: Path) -> dict[str, Any]:
    """Ranks that torchrun starts again find the addresses of the dead in its store, and must not use them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}

    def die(rank: int) -> None:
        distributed.join()
        os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int) -> None:
        # Machines count restarts differently; and rank 0 is late, so that its old address is read first.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(1 - rank)
        time.sleep(0.3 * (1 - rank))
        group = distributed.join()
        assert group.total(torch.ones(1)).item() == 2.0

    died = ranks.start(2, die, folder / "first", given).wait(30.0)
    ended = ranks.start(2, work, folder / "second", given).wait(30.0)
    return {"first": [e.code for e in died], "second": [(e.code, e.stderr) for e in ended]}


def networks(folder: Path) -> dict[str, Any]:
    """Estimators and trials one after the other, each mini-batch divided: those of one process."""
    legs = tuple(f"{name}-{trial}" for name in ("ep", "bptt") for trial in range(2))
    for size in (1, 2):

        def work(rank: int, size: int = size) -> None:
            out = folder / f"networks-{size}"
            given = {"estimators": ("ep", "bptt"), "trials": 2, "stacked": False, "engine": "eager"}
            result = eqprop.train(OWN, out, data=images(torch.float64, 100, 40), **given)
            assert result.summary["estimators"]["bptt"]["trials"][1]["test_error"]

        ranks.check(ranks.run(size, work, folder / f"log-networks-{size}"))
    files = [sorted(p.name for p in (folder / f"networks-{size}").iterdir()) for size in (1, 2)]
    return {**differences(folder / "networks-1", folder / "networks-2", legs), "same_files": files[0] == files[1]}


def faults(folder: Path) -> dict[str, Any]:
    """What every rank says and how it exits, when one of two does something else or ends."""
    data = write_idx(folder / "data", few_images(400, 100))
    toml = write_small_toml(folder / "small.toml", epochs=400)
    words = ["train", toml, "--data", data, "--quiet", "--out"]
    found: dict[str, Any] = {}

    def begun(name: str, work: Callable[[int], object], limit: float = 8.0) -> ranks.Job:
        return ranks.start(2, work, folder / name, {distributed.TIMEOUT: str(limit)})

    def ended(name: str, job: ranks.Job) -> None:
        begin = time.monotonic()
        left = job.wait()
        found[name] = {"codes": [e.code for e in left], "said": [e.stderr for e in left]}
        found[name]["seconds"] = time.monotonic() - begin

    def apart(first: list[object], second: list[object]) -> Callable[[int], None]:
        return lambda rank: ranks.command(*(first if rank == 0 else second))(rank)

    def full(rank: int) -> None:
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        ranks.command(*words, folder / "full-run")(rank)

    def other_version(rank: int) -> None:
        if rank == 1:
            torch.__version__ = "1.0"
        ranks.command(*words, folder / "other")(rank)

    hanging = begun("hangs", ranks.command(*words, folder / "hanging"), HANGS)
    _wait_until(lambda: _epoch(folder / "hanging") >= 1)
    hanging.kill(1, signal.SIGSTOP)
    stopped = time.monotonic()
    less = write_idx(folder / "less", few_images(380, 100))
    refused: dict[str, Callable[[int], object]] = {
        "does-not-divide": ranks.command(*words, folder / "odd", "--batch", "25"),
        "no-folder": ranks.command(*words[:-1]),
        "other-settings": apart([*words, folder / "o", "--T", "5"], [*words, folder / "o", "--T", "6"]),
        "other-version": other_version,
        "other-data": apart([*words, folder / "x"], [*words[:3], less, *words[4:], folder / "x"]),
        "full-disk": full,
    }
    for name, job in {name: begun(name, work) for name, work in refused.items()}.items():
        ended(name, job)
    time.sleep(max(stopped + HANGS + 1.0 - time.monotonic(), 0.0))
    hanging.kill(1, signal.SIGCONT)  # so that it ends as well
    ended("hangs", hanging)
    out = folder / "run"
    train, resume = ranks.command(*words, out), ranks.command("resume", out, "--data", data, "--quiet")
    job = begun("killed", train)
    _wait_until(lambda: _epoch(out) >= 2)
    job.kill(1)
    ended("killed", job)
    ended("taken", begun("taken", train))
    for name, rank, number in (("killed-first", 0, signal.SIGKILL), ("term", 1, signal.SIGTERM)):
        before = _epoch(out)
        job = begun(name, resume)
        _wait_until(lambda before=before: _epoch(out) > before)  # type: ignore[misc]
        job.kill(rank, number)
        ended(name, job)
    found["files"] = sorted(p.name for p in folder.iterdir() if p.name in ("odd", "o", "other", "x"))
    return found


def _epoch(run: Path) -> int:
    """The epoch of a run's last checkpoint, -1 before the first."""
    return read_checkpoint(run / "ep").position.epoch if checkpoint_file(run / "ep").exists() else -1


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + ranks.LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


HANGS = 3.0
"""Seconds after which a rank that hangs counts as lost."""


def again(folder: Path) -> dict[str, Any]:
    """A run begun by 2 ranks, stopped, and finished by 1 or 2; or restarted by torchrun."""
    found: dict[str, Any] = {}
    experiment, _, _ = CASES["conv"]

    class StopAt(eqprop.Watch):
        def epoch(self, lines: Any, progress: Any) -> None:
            if lines[0]["epoch"] == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def begin(rank: int, out: Path, stopped: bool) -> None:
        watch = StopAt() if stopped else eqprop.Watch()
        given = {"data": images(torch.float64, 200, 40), "watch": watch, "start": "persistent"}
        try:
            eqprop.train(experiment, out, **given)
        except eqprop.run.Stopped as left:
            raise SystemExit(left.exit_code) from left

    def finish(rank: int, out: Path) -> None:
        eqprop.resume(out, data=images(torch.float64, 200, 40))

    ranks.check(ranks.run(2, partial(begin, out=folder / "whole", stopped=False), folder / "log-whole"))
    stopped = ranks.run(2, partial(begin, out=folder / "stopped", stopped=True), folder / "log-stopped")
    assert [e.code for e in stopped] == [143, 143], stopped
    for size in (1, 2):
        out = shutil.copytree(folder / "stopped", folder / f"by-{size}")
        ranks.check(ranks.run(size, partial(finish, out=out), folder / f"log-{size}"))
        found[f"by {size}"] = differences(folder / "whole", out)
    out = folder / "stopped"
    job = ranks.start(2, partial(begin, out=out, stopped=False), folder / "log-restarted", RESTARTED)
    ranks.check(job.wait())
    found["restarted"] = differences(folder / "whole", out)
    return found


RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}
PARTS = {
    "compare": compare,
    "starts": starts,
    "prepared": prepared,
    "shards": shards,
    "rejoined": rejoined,
    "networks": networks,
    "faults": faults,
    "again": again,
}


def run_all(folder: Path) -> dict[str, Any]:
    ranks.prepare()
    whole_mnist()  # once, for all ranks
    found = {}
    for name, part in PARTS.items():
        (folder / name).mkdir(parents=True)
        begun = time.monotonic()
        found[name] = part(folder / name)
        found[name]["took"] = time.monotonic() - begun
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1])
    (where / "found.json").write_text(json.dumps(run_all(where), indent=1))
