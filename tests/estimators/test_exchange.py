"""What the blocks of a cluster tell each other, modelled: warps as coroutines, stores that take any time.

The deep kernels (kernels/deep.cu, tile.cuh, outputs.cuh) have no lock: whoever tells a state anew relies on others
having answered the last one. Here every order of events may happen; each read must find the round it is for, each
barrier be made ready once a phase, and all must come to an end.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from eqprop.engines.cuda.deep import HELPERS, WARPS, Layout, _tiles, layout

Steps = Iterator[bool]
"""A coroutine: yields whether it waits."""


@dataclass
class Barrier:
    """An mbarrier for one arrival and the bytes it announces."""

    ready: bool = False
    missing: int = 0
    phase: int = 0

    def expect(self, count: int) -> None:
        assert not self.ready, "made ready twice in one phase"
        self.ready = True
        self.come(-count)

    def come(self, count: int) -> None:
        self.missing -= count
        if self.ready and not self.missing:
            self.phase, self.ready = self.phase + 1, False

    def passed(self, phase: int) -> bool:
        """As the kernels ask: by parity."""
        if self.phase % 2 == phase % 2:
            return False
        assert self.phase == phase + 1, "two phases ahead"
        return True


@dataclass
class Course:
    """What all warps do: T + K steps, and the way back with `bptt`."""

    T: int
    K: int
    energy: bool
    bptt: bool
    alternating: bool

    @property
    def plain(self) -> int:
        return self.T - self.K if self.bptt else self.T

    @property
    def end(self) -> int:
        return self.plain + self.K


@dataclass
class Cluster:
    """Shared memory of all blocks, the stores on their way, the meetings of teams."""

    plan: Layout
    course: Course
    barriers: dict[Any, Barrier] = field(default_factory=lambda: defaultdict(Barrier))
    told: dict[Any, int] = field(default_factory=dict)
    stores: list[tuple[Any, int, Any]] = field(default_factory=list)
    meetings: dict[Any, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def tiles(self, n: int) -> int:
        return _tiles(self.plan.sizes[n]) if n else 1

    def hearing(self, n: int) -> list[int]:
        return [rank for rank in range(len(self.plan.blocks)) if n in self.plan.heard(rank)]

    def tell(self, ranks: list[int], n: int, tile: int, round: int, errors: bool) -> None:
        for rank in ranks:
            place, barrier = (rank, round % 2, n, tile), (rank, n, round % 2)
            self.stores.append((place, round, barrier))
            if errors:
                self.stores.append(((*place, "exponents"), round, (*barrier, "exponents")))

    def deliver(self, which: int) -> None:
        place, round, barrier = self.stores.pop(which)
        self.told[place] = round
        self.barriers[barrier].come(1)

    def wait(self, barrier: Any, phase: int) -> Steps:
        while not self.barriers[barrier].passed(phase):
            yield True

    def meet(self, key: Any, size: int) -> Steps:
        meeting = self.meetings[key]
        generation = meeting[1]
        meeting[0] += 1
        if meeting[0] == size:
            meeting[:] = [0, generation + 1]
        while meeting[1] == generation:
            yield True


class Team:
    """`run` of deep.cu: what a warp does, whether it holds weights or helps."""

    n: int
    owns: bool

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.calls = self.errors_from = 0

    def tell(self, round: int, errors: bool = False) -> None:
        raise NotImplementedError

    def hear(self, round: int, fresh: bool, errors: bool) -> Steps:
        raise NotImplementedError

    def barrier(self, n: int, round: int) -> tuple[Any, ...]:
        return (self.rank, n, round % 2)

    def wait(self, n: int, round: int, errors: bool) -> Steps:
        barrier = self.barrier(n, round)
        yield from self.cluster.wait(barrier, round // 2)
        if errors:
            yield from self.cluster.wait((*barrier, "exponents"), (round - self.errors_from) // 2)

    def read(self, n: int, tile: int, round: int, errors: bool) -> None:
        place = (self.rank, round % 2, n, tile)
        if tile < self.cluster.tiles(n):
            assert self.cluster.told.get(place) == round, "read too early or too late"
            assert not errors or self.cluster.told.get((*place, "exponents")) == round, "exponents of another round"

    def run(self) -> Steps:
        course = self.cluster.course
        mine = theirs = int(course.energy)
        heard = 0
        if course.energy and self.owns:
            self.tell(0)
        for t in range(course.end + course.bptt):
            together = t >= course.plain or not course.alternating
            turn = together or (course.plain - 1 - t) % 2 == self.n % 2
            tells = t < course.end if course.bptt else t + 1 < course.end
            if turn:
                fresh = heard < theirs
                round = heard if fresh else heard - 1
                if round >= 0:
                    yield from self.hear(round, fresh, False)
                yield False
                if tells and self.owns:
                    self.tell(mine)
                heard, mine = heard + fresh, mine + tells
            theirs += (together or not turn) and tells
        self.errors_from = heard
        for t in reversed(range(course.K if course.bptt else 0)):
            if t and self.owns:
                self.tell(mine, errors=True)
            mine += 1
            if t:
                yield from self.hear(heard, True, True)
                heard += 1


class Part(Team):
    """`Part` of tile.cuh: a warp that holds weights of two tiles."""

    def __init__(self, cluster: Cluster, rank: int, warp: int, row: list[int]) -> None:
        super().__init__(cluster, rank)
        self.n, self.pair, self.part, self.arms = row
        depth = len(cluster.plan.sizes)
        self.team = 4 if 2 <= self.n < depth - 1 else 2
        self.owns = self.part < 2
        self.source = self.n - 1 if self.part >= 2 or self.n == depth - 1 else self.n + 1
        self.group = (rank, warp // self.team * self.team)

    def arm(self, which: int, round: int, errors: bool) -> None:
        if self.arms & which:
            n = self.source if which == 1 else 0
            barrier = (*self.barrier(n, round), "exponents") if errors else self.barrier(n, round)
            self.cluster.barriers[barrier].expect(self.cluster.tiles(n))

    def make_ready(self) -> None:
        for round in (0, 1):
            for which in (1, 2):
                self.arm(which, round, False)
                if self.cluster.course.bptt:
                    self.arm(which, round, True)

    def tell(self, round: int, errors: bool = False) -> None:
        self.cluster.tell(self.cluster.hearing(self.n), self.n, 2 * self.pair + self.part, round, errors)

    def hear(self, round: int, fresh: bool, errors: bool) -> Steps:
        cluster, chunks = self.cluster, self.cluster.plan.chunks
        yield from self.wait(self.source, round, errors)
        for tile in range(2 * chunks):
            yield False
            self.read(self.source, 2 * chunks * (self.part % 2) + tile, round, errors)
        if fresh:
            self.arm(1, round, False)
        if errors:
            self.arm(1, round, True)
        turn, call = self.calls % 2, self.calls
        self.calls += 1
        for m in (0, 1):
            if m != self.part:
                cluster.told[self.group, turn, m, self.part] = call
        yield from cluster.meet((self.group, turn), self.team)
        if not self.owns:
            return
        for part in range(self.team):
            yield False
            if part != self.part:
                assert cluster.told[self.group, turn, self.part, part] == call, "a partial sum of another step"
        if self.n == 1:
            yield from self.wait(0, round, errors)
            self.read(0, 0, round, errors)
            if fresh:
                self.arm(2, round, False)
            if errors:
                self.arm(2, round, True)


class Helper(Team):
    """`Outputs` of outputs.cuh: a share of their sums, and in blocks that hear them the outputs themselves."""

    n = 0
    buffers = 2

    def __init__(self, cluster: Cluster, rank: int, helper: int, row: list[int]) -> None:
        super().__init__(cluster, rank)
        self.number = row[0]
        self.owners = cluster.hearing(0)
        self.owns = helper == 0 and rank in self.owners

    def arm(self, buffer: int) -> None:
        self.cluster.barriers["shares", self.rank, buffer].expect(len(self.cluster.plan.shares))

    def make_ready(self) -> None:
        if self.owns:
            for buffer in range(self.buffers):
                self.arm(buffer)

    def tell(self, round: int, errors: bool = False) -> None:
        self.cluster.tell([self.rank], 0, 0, round, errors)

    def hear(self, round: int, fresh: bool, errors: bool) -> Steps:
        plan, call = self.cluster.plan, self.calls
        buffer = call % self.buffers
        self.calls += 1
        if self.number >= 0:
            yield from self.wait(1, round, errors)
            for k in range(self.number, -(-plan.sizes[1] // 32), len(plan.shares)):
                for tile in (2 * k, 2 * k + 1):
                    yield False
                    self.read(1, tile, round, errors)
            for rank in self.owners:
                place = ("share", rank, buffer, self.number)
                self.cluster.stores.append((place, call, ("shares", rank, buffer)))
        if self.owns:
            yield from self.cluster.wait(("shares", self.rank, buffer), call // self.buffers)
            for number in range(len(plan.shares)):
                yield False
                assert self.cluster.told[("share", self.rank, buffer, number)] == call, "a share of another step"
            self.arm(buffer)


def simulate(plan: Layout, course: Course, seed: int) -> None:
    """One order of events: any warp may be next, some are slow, any store may come next."""
    rng = random.Random(seed)
    cluster = Cluster(plan, course)
    teams: list[Part | Helper] = []
    for i, row in enumerate(plan.table()):
        rank, warp = divmod(i, WARPS + HELPERS)
        if warp < WARPS and row[0] >= 0:
            teams.append(Part(cluster, rank, warp, row))
        if warp >= WARPS:
            helper = Helper(cluster, rank, warp - WARPS, row)
            teams += [helper] if helper.owns or helper.number >= 0 else []
    for team in teams:
        team.make_ready()
    running = [team.run() for team in teams]
    slow = rng.sample(running, max(1, len(running) // 6))
    idle = 0
    while running:
        if cluster.stores and rng.random() < 0.5:
            cluster.deliver(rng.randrange(len(cluster.stores)))
            idle = 0
        one = rng.choice(running)
        if one in slow and rng.random() < 0.9:
            continue
        for _ in range(rng.choice((1, 1, 2, 8, 40))):
            waits = next(one, None)
            if waits is None:
                running.remove(one)
            if waits is not False:
                break
        idle = idle + 1 if waits and not cluster.stores else 0
        assert idle < 2000 * len(teams), "all wait"


NETS = [(7, 100, 52), (10, 40, 72), (7, 100, 20, 68), (10, 36, 20, 68, 36), (10, 64, 48, 80, 36), (10, 256, 256)]
COURSES = [
    Course(14, 3, energy, bptt, alternating)
    for energy, alternating in ((False, False), (False, True), (True, False))
    for bptt in (False, True)
]


@pytest.mark.parametrize("sizes", NETS)
@pytest.mark.parametrize("course", COURSES, ids=str)
def test_every_read_finds_its_round(sizes: tuple[int, ...], course: Course) -> None:
    plan = layout(sizes, bptt=course.bptt)
    assert plan is not None
    for seed in range(4):
        simulate(plan, course, seed)


class Deaf(Part):
    """Does not wait."""

    def wait(self, n: int, round: int, errors: bool) -> Steps:
        return iter(())


class Hasty(Part):
    """Makes its source's barriers ready twice."""

    def arm(self, which: int, round: int, errors: bool) -> None:
        super().arm(which, round, errors)
        super().arm(which, round, errors)


class Silent(Part):
    """Makes nothing ready."""

    def arm(self, which: int, round: int, errors: bool) -> None:
        pass


class Cramped(Helper):
    """Has one place for a share in place of two."""

    buffers = 1


class Lonely(Part):
    """Meets nobody before it takes the partial sums."""

    def __init__(self, cluster: Cluster, rank: int, warp: int, row: list[int]) -> None:
        super().__init__(cluster, rank, warp, row)
        self.group = (rank, warp)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Deaf, "read too early"),
        (Hasty, "ready twice"),
        (Silent, "all wait"),
        (Cramped, "a share of another step"),
        (Lonely, "all wait"),
    ],
)
def test_the_model_finds_faults(fault: type[Team], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.{fault.__mro__[1].__name__}", fault)
    plan = layout((7, 100, 52))
    assert plan is not None
    with pytest.raises(AssertionError, match=message):
        simulate(plan, COURSES[0], 0)
