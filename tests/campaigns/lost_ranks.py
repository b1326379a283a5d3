"""Kill one of two ranks, again and again: a resume must end as if nothing had happened.

Every case follows from the seed and its number. Two ranks train a small convolutional net in float64; one of them dies
by SIGKILL at a random moment, in the middle of training, of a checkpoint or of an evaluation, one to three times in a
row. The other must end within seconds, with one sentence. Then the run is resumed:

  by 2 ranks        the weights must be those of two ranks left alone, bit for bit
  by 1 or 4 ranks   to 1e-4

    python tests/campaigns/lost_ranks.py --cases 20 --out results/lost-ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from campaigns.stops import Outcome
from helpers import ranks
from helpers.forked import Child, Ended
from helpers.training_runs import few_images, whole_mnist

import eqprop
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.provenance import provenance
from eqprop.run.checkpoint import read_checkpoint
from eqprop.run.evaluate import Measure
from eqprop.run.folder import is_run
from eqprop.run.spec import Spec
from eqprop.run.trainer import Trainer

NET = Spec.of(
    optimizer="SGD",
    estimator="ep",
    name="conv",
    model=ConvolutionalNet(channels=(4, 2), flat=(10,)),
    T=6,
    K=3,
    beta=0.4,
    epochs=8,
    batch=20,
    rates={"*": 0.02},
    start="persistent",
)
CLOSE = 1e-4
SOON = 10.0
"""Seconds in which the other rank must have ended."""
PLACES = ("moment", "training", "checkpoint", "evaluation")


def _images() -> Any:
    few = few_images(400, 100)
    return replace(few, train_x=few.train_x.double(), test_x=few.test_x.double())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_call(owner: Any, name: str, at: int) -> None:
    """Die at call number `at` of a function, counted from 1."""
    function, calls = getattr(owner, name), Counter[str]()

    def counted(*given: Any, **named: Any) -> Any:
        calls[name] += 1
        if calls[name] == at:
            _die()
        return function(*given, **named)

    setattr(owner, name, counted)


@dataclass(frozen=True)
class Kill:
    """Where a rank dies: at a moment in seconds, or at a call of a function of training."""

    rank: int
    place: str
    seconds: float
    call: int

    def install(self, rank: int) -> None:
        if rank != self.rank:
            return
        if self.place == "training":
            _at_call(Trainer, "advance", self.call)
        elif self.place == "evaluation":
            _at_call(Measure, "_batch", 1 + self.call // 4)
        elif self.place == "checkpoint" and rank == 0:
            _at_call(os, "replace", self.call)
        elif self.place == "checkpoint":
            _at_call(Trainer, "checkpoint", self.call)


def draw_kill(draw: random.Random, seconds: float) -> Kill:
    return Kill(draw.randrange(2), draw.choice(PLACES), draw.uniform(0.2, 0.8) * seconds, draw.randint(1, 12))


def work(rank: int, out: Path, kill: Kill | None = None) -> None:
    if kill is not None:
        kill.install(rank)
    try:
        if is_run(out):
            eqprop.resume(out, data=_images())
        else:
            eqprop.train(NET, out, data=_images(), checkpoint_every=0.05)
    except OSError as error:
        print(f"eqprop: {error}", file=sys.stderr)
        raise SystemExit(2) from error


@dataclass
class Losses(Outcome):
    """The counts of a campaign."""

    slowest: float = 0.0
    largest: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "slowest_end_of_the_other_seconds": round(self.slowest, 2),
            "largest_difference_with_another_number_of_ranks": self.largest,
        }


def lose_one(out: Path, kill: Kill, logs: Path, outcome: Losses) -> str | None:
    """Train until one rank dies; what is wrong with how the other ends, None if nothing is."""
    job = ranks.start(2, partial(work, out=out, kill=kill), logs)
    if kill.place == "moment":
        time.sleep(kill.seconds)
        job.kill(kill.rank)
    ended = job.ranks[kill.rank].wait(ranks.LIMIT)
    begun = time.monotonic()
    other = _after_a_loss(job.ranks[1 - kill.rank])
    took = time.monotonic() - begun
    if ended.code == 0 and other.code == 0:
        outcome.counts["finished before the kill"] += 1
        return None
    outcome.slowest = max(outcome.slowest, took)
    outcome.counts[f"rank {kill.rank} killed, {kill.place}"] += 1
    if ended.code != -signal.SIGKILL:
        return f"rank {kill.rank} ended with {ended.code}: {ended.stderr[-500:]}"
    if other.code == 0:  # it had nothing left to do
        return None
    if other.code == -signal.SIGTERM:
        outcome.counts["the other was still waiting for it, and ended by SIGTERM"] += 1
        return None
    if other.code != 2 or "another rank has ended" not in other.stderr or other.stderr.count("\n") != 1:
        return f"the other rank ended with {other.code}: {other.stderr[-500:]}"
    return f"the other rank took {took:.1f} s to end" if took > SOON else None


def _after_a_loss(rank: Child) -> Ended:
    """How the other rank ends. torchrun sends it SIGTERM; here only if it has not noticed the loss by itself.

    It cannot notice a rank that died before it joined.
    """
    for _ in range(300):
        if rank.has_ended:
            break
        time.sleep(0.01)
    else:
        rank.kill(signal.SIGTERM)
    return rank.wait(ranks.LIMIT)


def gap(one: Path, other: Path) -> float:
    """The largest difference of any weight or state."""
    a, b = read_checkpoint(one / "ep"), read_checkpoint(other / "ep")
    if a.position != b.position or a.weights.keys() != b.weights.keys():
        return float("inf")
    pairs = [(a.weights[n], b.weights[n]) for n in a.weights]
    return max(float((p - q).abs().max()) for p, q in pairs)


def case(folder: Path, n: int, draw: random.Random, seconds: float, outcome: Losses) -> str | None:
    out = folder / f"case-{n}"
    for turn in range(draw.randint(1, 3)):
        wrong = lose_one(out, draw_kill(draw, seconds), folder / f"log-{n}-{turn}", outcome)
        if wrong is not None:
            return wrong
    size = (2, 2, 1, 2, 4)[n % 5]
    ended = ranks.run(size, partial(work, out=out), folder / f"log-{n}")
    if any(one.code for one in ended):
        return f"resume by {size} ranks ended with {[one.code for one in ended]}: {ended[0].stderr[-500:]}"
    found = gap(folder / "whole", out)
    outcome.counts[f"resumed by {size} ranks"] += 1
    if size != 2:
        outcome.largest = max(outcome.largest, found)
    left = [p.name for p in out.rglob("*.part")]
    if left:
        return f"left behind: {left}"
    return f"the weights of {size} ranks differ by {found:.3g}" if found > (0.0 if size == 2 else CLOSE) else None


def campaign(cases: int, seed: int, show: Callable[[str], None] = lambda text: None) -> Losses:
    ranks.prepare()
    whole_mnist()
    outcome = Losses()
    with tempfile.TemporaryDirectory(prefix="eqprop-ranks-") as scratch:
        folder = Path(scratch)
        begun = time.monotonic()
        ranks.check(ranks.run(2, partial(work, out=folder / "whole"), folder / "log-whole"))
        seconds = time.monotonic() - begun
        for n in range(cases):
            wrong = case(folder, n, random.Random(f"lost ranks {seed} {n}"), seconds, outcome)
            if wrong is not None:
                outcome.wrong.append(f"case {n}: {wrong}")
                show(outcome.wrong[-1])
            outcome.cases += 1
            shutil.rmtree(folder / f"case-{n}", ignore_errors=True)
        outcome.seconds = time.monotonic() - begun
    return outcome


def command_line() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    given = parser.parse_args()
    found = campaign(given.cases, given.seed, lambda text: print(text, flush=True))
    print(json.dumps(found.to_dict(), indent=1))
    if given.out is not None:
        made = {**provenance(), "command": f"lost_ranks.py --cases {given.cases} --seed {given.seed}"}
        document = {"campaign": "lost ranks", "seed": given.seed, "root": os.getuid() == 0, **found.to_dict()}
        given.out.write_text(json.dumps({**document, "provenance": made}, indent=1) + "\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(command_line())
