"""Several processes, ranks, work on one run: torchrun starts them, torch.distributed carries what they exchange.

In a loop of your own, three lines:

    ranks = eqprop.distributed.join()                   # reads torchrun's environment; one process makes no group
    x, y = ranks.share(x), ranks.share(y)               # this rank's part of a mini-batch
    eqprop.distributed.average_gradients(model)         # between backward() and optimizer.step()

Small messages between ranks travel through gloo on the CPU; gradients through NCCL where every rank has a GPU of its
own, else through gloo. A rank that dies or hangs raises `LostRankError` on the others.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eqprop.engines import Tally
from eqprop.messages import EXPECTED_ERRORS, shown
from eqprop.starts import Carried, Initialised, Start, finite_samples
from eqprop.state import State, per_sample

TIMEOUT = "EQPROP_TIMEOUT"
"""Environment variable: seconds after which a rank that does not answer counts as lost."""
SECONDS = 300.0
"""Its default: longer than any rank computes between two exchanges, short enough to notice."""
TEXT = 2000
"""Bytes of a sentence that ranks exchange."""

SUMS = ("samples", "errors", "loss", "residual", "unsettled")
"""Counts of a tally that add up over ranks."""


class LostRankError(ConnectionError):
    """Another rank ended or does not answer."""


class RankError(ValueError):
    """Another rank raised; this is its sentence."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that work together, and which of them this is. One alone exchanges nothing.

    rank        number of this process, from 0          size        how many there are
    local       its number on its machine               neighbours  how many are on its machine
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    neighbours: int = 1

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and reports."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """The device of this rank: "cuda" becomes "cuda:N" with N the rank on its machine, modulo its GPUs."""
        if not self.several or torch.device(asked).type != "cuda" or not torch.cuda.is_available():
            return asked
        return f"cuda:{self.local % torch.cuda.device_count()}"

    def share(self, rows: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a mini-batch: contiguous, in the order of the ranks, of equal size."""
        if not self.several:
            return rows
        check_divides(rows.shape[dim], self.size)
        part = rows.shape[dim] // self.size
        return rows.narrow(dim, self.rank * part, part)

    def bounds(self, begin: int, end: int) -> tuple[int, int, int]:
        """This rank's part of the samples from `begin` to `end`, and the size of the largest part."""
        largest = -(-(end - begin) // self.size)
        first = min(begin + self.rank * largest, end)
        return first, min(first + largest, end), largest

    def total(self, counts: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return self._reduced(counts, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        if not self.several:
            return list(values)
        found: list[float] = self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
        return found

    def _reduced(self, values: Tensor, op: Any) -> Tensor:
        if self.several:
            with _heard(self):
                _through(values, lambda v: dist.all_reduce(v, op, async_op=True))
        return values

    def whole(self, part: Tensor, dim: int = 0) -> Tensor:
        """The parts of all ranks, joined in their order."""
        if not self.several:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        staged = [p.cpu() if _staged(p) else p for p in parts]
        own = part.detach().contiguous().to(staged[0].device)
        with _heard(self):
            _finish(dist.all_gather(staged, own, async_op=True))
        return torch.cat([p.to(part.device) for p in staged], dim)

    def counts(self, tally: Tally) -> dict[str, list[float]]:
        """A tally over all ranks: sums, the worst of `worst`, and `bad`, which is the same on every rank."""
        if not self.several:
            return tally.read()
        sums = self.total(torch.stack([getattr(tally, name) for name in SUMS]).cpu())
        worst = self._reduced(torch.stack([tally.worst, tally.bad]).cpu(), dist.ReduceOp.MAX)
        found = dict(zip((*SUMS, "worst", "bad"), [*sums.tolist(), *worst.tolist()], strict=True))
        return {name: found[name] for name in Tally.names()}

    def from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite these tensors with those of rank 0."""
        for tensor in tensors if self.several else ():
            with _heard(self):
                _through(tensor, lambda v: dist.broadcast(v, 0, async_op=True))

    def text_of_first(self, text: str) -> str:
        """What rank 0 gives, on every rank."""
        if not self.several:
            return text
        content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        length = int(self.largest([float(len(content)) if self.leads else 0.0])[0])
        content = content if self.leads else torch.empty(length, dtype=torch.uint8)
        self.from_first([content])
        return bytes(content.tolist()).decode()

    def texts(self, text: str) -> list[str]:
        """What each rank gives, cut to TEXT bytes."""
        line = text.encode()[:TEXT]
        found = self.whole(torch.tensor([[*line, *[0] * (TEXT - len(line))]], dtype=torch.uint8))
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in found.tolist()]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run the block on every rank, and wait for all. Where it fails on one rank, every rank raises."""
        if not self.several:
            yield
            return
        problem: BaseException | None = None
        try:
            yield
        except LostRankError:
            raise
        except EXPECTED_ERRORS as error:
            problem = error
        sentences = self.texts("" if problem is None else str(problem) or type(problem).__name__)
        if problem is not None:
            raise problem
        first = next((n for n, sentence in enumerate(sentences) if sentence), None)
        if first is not None:
            raise RankError(f"rank {self.rank} of {self.size} stops, because rank {first} did: {sentences[first]}")

    def average(self, gradients: list[Tensor], loss: Tensor) -> Tensor:
        """An `eqprop.engines.Exchange`: the mean gradient in place, in one all-reduce that also carries bad losses."""
        bad = (~torch.isfinite(loss)).any(1)  # (R,)
        counted = self._flat_mean(gradients, bad.to(gradients[0].dtype) if gradients else bad.float())
        return torch.where((counted > 0).unsqueeze(1), torch.full_like(loss, torch.nan), loss)

    @torch.no_grad()
    def _flat_mean(self, tensors: Sequence[Tensor], counts: Tensor) -> Tensor:
        """The mean of each tensor over ranks, in place; returns the sums of `counts`, which travel with them."""
        flat = torch.cat([*(_real(t).reshape(-1) for t in tensors), counts])
        self.total(flat)
        parts = flat.split([*(_real(t).numel() for t in tensors), counts.numel()])
        for tensor, part in zip(tensors, parts, strict=False):
            real = _real(tensor)
            real.copy_((part / self.size).view_as(real))
        return parts[-1]


ALONE = Ranks()
_joined: Ranks | None = None
_by_itself: ContextVar[bool] = ContextVar("by_itself", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, `train` and `resume` use this process only, whatever started it."""
    token = _by_itself.set(True)
    try:
        yield
    finally:
        _by_itself.reset(token)


def rank() -> int:
    """The number of this process, 0 if it is alone. Makes no group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else _number("RANK", 0)


def world_size() -> int:
    """How many processes were started together. Makes no group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else _number("WORLD_SIZE", 1)


def in_torchrun() -> Ranks:
    """The ranks as torchrun numbers them. Makes no group: for processes that share a storage and nothing else."""
    local, neighbours = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    return Ranks(rank(), world_size(), local, neighbours)


def to_join() -> Ranks:
    """The ranks that `join` would find. Makes no group."""
    return ALONE if _by_itself.get() else in_torchrun()


def restarts() -> int:
    """How many times torchrun has restarted this job."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def join() -> Ranks:
    """The ranks of this job: from torchrun's environment, or of a process group that exists. One alone makes no group.

    A rank that does not come within EQPROP_TIMEOUT seconds raises LostRankError on the others.
    """
    global _joined
    if _by_itself.get() or world_size() == 1:
        return ALONE
    if _joined is None:
        _joined = _begin()
        atexit.register(_leave)
    return _joined


def _begin() -> Ranks:
    if not dist.is_available():
        raise ValueError(f"WORLD_SIZE is {world_size()}, but this torch was built without torch.distributed. Unset it.")
    from torch.distributed.rendezvous import rendezvous

    ranks = in_torchrun()
    if dist.is_initialized():
        if "cpu:" not in (backend := str(dist.get_backend_config())):
            raise ValueError(
                f"The process group has the backend {backend}, and none for the CPU, where ranks exchange small "
                "messages. Make it with init_process_group('cpu:gloo,cuda:nccl'), or leave that to join()."
            )
        return ranks
    if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        raise ValueError(
            f"WORLD_SIZE is {ranks.size}, but MASTER_ADDR or MASTER_PORT is not set. Start the processes with "
            "torchrun, or unset WORLD_SIZE to use one."
        )
    own_gpu = torch.cuda.is_available() and ranks.neighbours <= torch.cuda.device_count() and dist.is_nccl_available()
    limit = timedelta(seconds=timeout())
    with _heard(ranks):
        store, number, size = next(iter(rendezvous("env://", ranks.rank, ranks.size, timeout=limit)))
        store.set_timeout(limit)
        store = _fresh(store, number, size)
        backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=limit)
    joined = replace(ranks, rank=number, size=size)
    joined.total(torch.zeros(1))  # rank 0 may hold the store, and must not leave before all have joined
    return joined


def _part(store: Any, name: str) -> Any:
    from torch._C._distributed_c10d import PrefixStore  # not there in a torch without torch.distributed

    return PrefixStore(f"eqprop/{name}", store)


def _fresh(store: Any, number: int, size: int) -> Any:
    """A part of torchrun's store that only these processes use.

    The store outlives a restart, and the addresses of dead processes stay in it. The count of restarts does not tell
    the attempts apart, because the machines of a job count differently. So rank 0 offers a new name, and the others
    take it once it answers with what they sent, which a name of an earlier attempt cannot.
    """
    own, others, end = uuid.uuid4().hex, range(1, size), time.monotonic() + timeout()
    if number == 0:
        store.set("eqprop/offer", own)
        sent = [store.get(f"eqprop/{own}/{other}").decode() for other in others]
        store.set(f"eqprop/{own}/answer", " ".join(sent))
        return _part(store, own)
    while time.monotonic() < end:
        name = store.get("eqprop/offer").decode()
        store.set(f"eqprop/{name}/{number}", own)
        answer = f"eqprop/{name}/answer"
        if store.check([answer]) and own in store.get(answer).decode().split():
            return _part(store, name)
        time.sleep(0.02)
    raise RuntimeError(f"rank 0 or another has not come within {timeout():g} s")


_kept: deque[object] = deque(maxlen=4)
"""The last exchanges. One that only a thread of gloo still holds is freed there, which needs Python."""


def _finish(exchange: Any) -> None:
    _kept.append(exchange)
    exchange.wait()


def _leave() -> None:
    """End the process group, unless a rank was lost: then its end could wait for ever."""
    for exchange in _kept:
        # Never freed: if gloo's thread were the last to hold it, and Python has ended, the process would abort.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(exchange))
    if dist.is_initialized() and not _lost:
        dist.destroy_process_group()


def timeout() -> float:
    given = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(given or SECONDS)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 1e7:
        raise ValueError(f"{TIMEOUT} is {shown(given)}; expected a number of seconds from 1 to 10000000.")
    return seconds


def _number(name: str, default: int) -> int:
    given = os.environ.get(name, "")
    if given and not given.isdecimal():
        raise ValueError(
            f"The environment variable {name} is {shown(given)}; expected a whole number, as torchrun sets it."
        )
    return int(given) if given else default


_lost = False


@contextmanager
def _heard(ranks: Ranks) -> Iterator[None]:
    """Explain what torch.distributed raises when a rank has ended, hangs or never came."""
    global _lost
    try:
        yield
    except RuntimeError as error:
        _lost = True
        raise LostRankError(
            f"rank {ranks.rank} of {ranks.size} stops: another rank has ended or does not answer "
            f"({_first_sentence(error)}). What was saved is intact; continue with eqprop resume FOLDER, in any number "
            "of processes."
        ) from error


def _first_sentence(error: RuntimeError) -> str:
    """What torch.distributed says first, without the place in its source."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    said = line.rpartition("] ")[2].partition(". ")[0] if line.startswith("[") else line
    return said.strip(" .")[:120]


def _staged(tensor: Tensor) -> bool:
    """Whether a tensor must pass through the CPU: gloo's collectives do not all take a GPU's."""
    return tensor.is_cuda and "nccl" not in str(dist.get_backend_config())


def _through(tensor: Tensor, collective: Callable[[Tensor], Any]) -> None:
    """Run a collective on a tensor in place."""
    same = not _staged(tensor) and tensor.is_contiguous()
    given = tensor.detach() if same else tensor.detach().contiguous()
    given = given.cpu() if _staged(tensor) else given
    _finish(collective(given))
    if not same:
        tensor.detach().copy_(given)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_divides(batch: int, size: int) -> None:
    """Raise unless a mini-batch splits into equal parts."""
    if batch % size:
        lower, higher = batch // size * size, -(-batch // size) * size
        near = f"{lower} or {higher}" if lower else str(higher)
        raise ValueError(
            f"A mini-batch of {batch} samples does not divide among {size} ranks. Use a batch of {near}, or another "
            "number of processes."
        )


@torch.no_grad()
def average_gradients(*modules: nn.Module) -> None:
    """p.grad <- its mean over all ranks, for every parameter p, in one all-reduce. Alone, do nothing.

    Call it on every rank between backward() and optimizer.step(). With shares of equal size, the mean gradient of the
    parts is that of the mini-batch. A parameter without a gradient counts as zero where another rank has one.

    modules     models and costs whose parameters are trained
    """
    ranks = join()
    if not ranks.several:
        return
    parameters = list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())
    if not parameters:
        raise ValueError(
            "average_gradients got modules without parameters; expected the model, and a cost with weights."
        )
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    found = ranks._flat_mean(gradients, present)
    for p, gradient, count in zip(parameters, gradients, found.tolist(), strict=True):
        if count:
            p.grad = gradient


def check_same(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Raise on every rank unless all have the settings of rank 0."""
    text = json.dumps(settings, sort_keys=True, default=str)
    first, mine = (dict(_flat(json.loads(one))) for one in (ranks.text_of_first(text), text))
    with ranks.in_step():
        for name in dict.fromkeys([*first, *mine]):
            its, own = first.get(name), mine.get(name)
            if its != own:
                raise ValueError(
                    f"{name} is {shown(own)} on rank {ranks.rank} and {shown(its)} on rank 0. Start every rank with "
                    "the same command, versions and data."
                )


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as one, by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


class SharedStart(Start):
    """A start whose samples are spread over ranks: each keeps the states of all, so that any may have a sample next.

    Begins for this rank's samples; ends with those of every rank, and so learns what one process would. States carried
    by place in the mini-batch stay with the rank that has the place; `complete` exchanges them where all are needed.
    """

    def __init__(self, start: Start, ranks: Ranks, dim: int) -> None:
        self.start, self.ranks, self.dim = start, ranks, dim
        self.kind = start.kind  # type: ignore[misc]

    def begin(self, x: Tensor, rows: Tensor) -> State:
        if isinstance(self.start, Carried):
            return tuple(self.ranks.share(layer, self.dim).clone() for layer in self.start.layers)
        return self.start.begin(x, rows)

    @torch.no_grad()
    def end(self, x: Tensor, rows: Tensor, begun: State, reached: State) -> None:
        if not isinstance(self.start, Carried):
            self._end_of_all(x, rows, begun, reached)
            return
        good = finite_samples(reached, rows.dim())
        for layer, old, new in zip(self.start.layers, begun, reached, strict=True):
            self.ranks.share(layer, self.dim).copy_(torch.where(per_sample(good, new), new, old))

    def _end_of_all(self, x: Tensor, rows: Tensor, begun: State, reached: State) -> None:
        every = self.ranks.whole(rows, -1)
        if isinstance(self.start, Initialised):
            before = tuple(self.ranks.whole(layer, self.dim) for layer in begun)
            after = tuple(self.ranks.whole(layer, self.dim) for layer in reached)
            self.start.end(self.ranks.whole(x, self.dim), every, before, after)
            return
        good = finite_samples(reached, rows.dim())
        kept = (torch.where(per_sample(good, new), new, old) for old, new in zip(begun, reached, strict=True))
        states = tuple(self.ranks.whole(layer, self.dim) for layer in kept)
        self.start.end(x, every, states, states)

    @torch.no_grad()
    def complete(self) -> None:
        """Make what every rank keeps that of all ranks."""
        for layer in self.start.layers if isinstance(self.start, Carried) else ():
            layer.copy_(self.ranks.whole(self.ranks.share(layer, self.dim), self.dim))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.start.tensors


def shared_start(start: Start | None, ranks: Ranks, networks: int | None) -> Start | None:
    """The start of a mini-batch's share; `networks` as in `Job`."""
    if start is None or not ranks.several:
        return start
    return SharedStart(start, ranks, 0 if networks is None else 1)
