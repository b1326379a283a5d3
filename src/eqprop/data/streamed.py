"""Samples that are read while they are used, by worker processes: data sets that fit neither device nor memory.

The experiment's own order stays: workers are asked for the samples of each mini-batch by number. Random transforms of
a data set draw from torch, numpy and random, which are seeded before each sample by (seed, epoch, sample). What is
drawn therefore does not depend on the number of workers, and a resumed run draws the same.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _remove_worker_pids as remove_worker_pids
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from eqprop.data.arrays import as_sample, check_numbering, content_digest
from eqprop.data.augment import draws
from eqprop.data.images import as_floats, check_destination, one_hot

CPU = torch.device("cpu")

Index = tuple[int, int]
"""The number of a sample, and the seed of what its transforms draw."""


class StreamedBatch(NamedTuple):
    """A mini-batch: samples (B, pixels), labels (B,) or targets (B, outputs), and the samples' numbers (B,).

    For R stacked runs (R, B, ...).
    """

    x: Tensor
    y: Tensor
    rows: Tensor


@dataclass(frozen=True)
class SampleForm:
    """What every sample must be: shape, type as stored, the label's range or the number of targets.

    `unit`: floats must lie in [0, 1].
    """

    shape: tuple[int, ...]
    stored: torch.dtype
    labelled: bool
    classes: int
    unit: bool = False


@dataclass(frozen=True)
class _Complaint:
    """Why a sample cannot be used: passed on as a value, because an exception of a worker brings its traceback."""

    text: str


class _Numbered(Dataset[Any]):
    """The user's data set, asked by number; in a worker process."""

    def __init__(self, dataset: Any, what: str, dtype: torch.dtype) -> None:
        self.dataset, self.what, self.dtype = dataset, what, dtype

    def __getitem__(self, index: Index) -> tuple[int, Tensor, Tensor] | _Complaint:
        n, seed = index
        try:
            with _drawing(seed):
                item = self.dataset[n]
        except Exception as error:
            reason = str(error).strip().splitlines()
            return self._complaint(n, f"raised {type(error).__name__}{': ' + reason[0] if reason else ''}")
        if not isinstance(item, tuple | list) or len(item) != 2:
            return self._complaint(n, f"is {type(item).__name__}; expected a pair (x, y)")
        try:
            x, y = as_sample(item[0]), as_sample(item[1])
        except (TypeError, ValueError, RuntimeError) as error:
            return self._complaint(n, f"holds no numbers ({error}); expected arrays, tensors or images")
        # Whole numbers other than bytes are taken as they are, like those of arrays.
        x = x if x.dtype == torch.uint8 else x.to(self.dtype)
        return n, x, y

    def _complaint(self, n: int, reason: str) -> _Complaint:
        return _Complaint(f"Sample {n} of the {self.what} data {reason}.")


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random inside. Where there is no worker they are the caller's own, and are put back."""
    own = get_worker_info() is None
    before = (torch.get_rng_state(), np.random.get_state(), random.getstate()) if own else None  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        if before is not None:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            random.setstate(before[2])


class _Collate:
    """Check samples and put them together; in a worker process."""

    def __init__(self, form: SampleForm, what: str, dtype: torch.dtype) -> None:
        self.form, self.what, self.dtype = form, what, dtype

    def __call__(self, items: list[tuple[int, Tensor, Tensor] | _Complaint]) -> tuple[Tensor, Tensor] | _Complaint:
        x, y = [], []
        for item in items:
            if isinstance(item, _Complaint):
                return item
            wrong = _wrong(item[1], item[2], self.form)
            if wrong:
                return _Complaint(f"Sample {item[0]} of the {self.what} data {wrong}.")
            x.append(item[1].flatten())
            y.append(item[2].flatten())
        answers = torch.stack(y)
        return torch.stack(x), answers[:, 0].to(torch.int64) if self.form.labelled else answers.to(self.dtype)


def _wrong(x: Tensor, y: Tensor, form: SampleForm) -> str | None:
    """What is wrong with a sample, if anything."""
    if tuple(x.shape) != form.shape:
        return f"has shape {tuple(x.shape)}; expected {form.shape}, that of the first. Resize or pad them"
    if x.dtype != form.stored:
        return f"is {x.dtype}; expected {form.stored}, as the first"
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        return "holds NaN or infinity; expected finite numbers. Remove or replace it"
    if form.unit and x.is_floating_point() and not bool(((x >= 0) & (x <= 1)).all()):
        return f"holds numbers from {float(x.min()):g} to {float(x.max()):g}; augmentation takes 0 to 1, or uint8"
    if not form.labelled:
        if y.numel() != form.classes or not bool(torch.isfinite(y).all()):
            return f"has targets of shape {tuple(y.shape)} or not finite; expected {form.classes} finite numbers"
        return None
    if y.numel() != 1 or y.is_floating_point() or not 0 <= int(y) < form.classes:
        shown = y.item() if y.numel() == 1 else f"of shape {tuple(y.shape)}"
        return f"has the label {shown}; expected a whole number from 0 to {form.classes - 1}"
    return None


class _Order:
    """A batch sampler of the experiment's mini-batches, given as samples and seeds."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[Index]]:
        for samples, seeds in self.batches:
            yield list(zip(samples.flatten().tolist(), seeds.flatten().tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.batches)


OPTIONS = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


@dataclass(frozen=True, eq=False)
class Half:
    """The training or the test samples: a data set from sample `first` to `stop`, and how its loader reads."""

    dataset: Any
    what: str
    first: int
    stop: int
    options: dict[str, Any]

    def __len__(self) -> int:
        return self.stop - self.first

    def read(
        self, batches: Sequence[tuple[Tensor, Tensor]], form: SampleForm, dtype: torch.dtype, pin: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, y) per batch of samples and their seeds, on the CPU; raises a sentence for what cannot be used."""
        # A generator of its own: starting the workers draws from it, and the caller's must stay as it is.
        generator = torch.Generator().manual_seed(0)
        loader: DataLoader[Any] = DataLoader(
            _Numbered(self.dataset, self.what, dtype),
            batch_sampler=_Order(batches),
            collate_fn=_Collate(form, self.what, dtype),
            generator=generator,
            **{**self.options, "pin_memory": pin},
        )
        reader: Any = None
        try:
            with warnings.catch_warnings():
                # JAX warns of its threads, which a forked process lacks: a worker reads samples and calls no JAX. Other
                # ways to start it would run a user's script again, and cannot take a data set made in a notebook.
                warnings.filterwarnings("ignore", r".*fork\(\)")
                reader = iter(loader)
            _raise_only_here(reader)
            for found in reader:
                if isinstance(found, _Complaint):
                    raise ValueError(found.text)
                yield found
        except (RuntimeError, OSError, EOFError, AttributeError, pickle.PicklingError) as error:
            reason = str(error).strip().splitlines()
            raise OSError(
                f"The worker processes that read the {self.what} data stopped: {reason[0] if reason else error!r}. A "
                "run keeps its last checkpoint; try num_workers=0 to see where."
            ) from error
        finally:
            # Even if a traceback keeps the reader.
            getattr(reader, "_shutdown_workers", lambda: None)()


def _raise_only_here(reader: Any) -> None:
    """Let a killed worker be noticed where its samples are waited for, within seconds.

    By default torch raises from a signal handler, wherever the program is: in the middle of an update.
    """
    if getattr(reader, "_worker_pids_set", False):
        remove_worker_pids(id(reader))
        reader._worker_pids_set = False


@dataclass(frozen=True, eq=False)
class Streamed:
    """Training and test samples read while they are used; like `Images`, without their tensors.

    To make one use `streamed`.

    train, test     the two halves, read sample by sample
    form            shape, classes and type of a sample
    name            what pages and messages call the set
    sha256          of the declared identity: name, lengths, classes, and the first and last samples of both halves
    dtype, device   of the batches that are read
    class_names     what the classes are called, if the data says so
    fingerprint     of the tensors, where they were given
    """

    train: Half
    test: Half
    form: SampleForm
    name: str
    sha256: str
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    class_names: tuple[str, ...] = ()
    fingerprint: str = ""

    def __repr__(self) -> str:
        size = " x ".join(str(n) for n in self.shape)
        return (
            f"Streamed({self.name!r}: {self.train_samples} training and {self.test_samples} test samples, {size}, "
            f"{self.classes} {'classes' if self.labelled else 'outputs'}, "
            f"{self.train.options.get('num_workers', 0)} workers)"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.shape or (1,)

    @property
    def classes(self) -> int:
        return self.form.classes

    @property
    def labelled(self) -> bool:
        """Whether y holds class numbers; if not, it holds targets."""
        return self.form.labelled

    @property
    def train_samples(self) -> int:
        return len(self.train)

    @property
    def test_samples(self) -> int:
        return len(self.test)

    def floats(self, x: Tensor) -> Tensor:
        """Samples of this set as the network takes them without normalisation."""
        return as_floats(x, self.dtype)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """What the cost compares outputs with, (B, classes): one-hot rows for labels, targets as they are."""
        return one_hot(y, self.classes, dtype) if self.labelled else y.to(dtype)

    def to(self, device: torch.device | str | None) -> Streamed:
        """The same samples, delivered on another device."""
        return replace(self, device=CPU if device is None else torch.device(device))

    def in_unit_range(self) -> Streamed:
        """The same samples, refused unless their floats lie in [0, 1], as augmentation takes them."""
        return replace(self, form=replace(self.form, unit=True))

    def split_validation(self, n: int) -> Streamed:
        """Hold out the LAST n training samples as the test set; they are read as training samples are."""
        total, first = self.train_samples, self.train.first
        if not 1 <= n < total:
            raise ValueError(
                f"Cannot hold out {n} of the {total} training samples of {self.name}: both parts need at least one. "
                f"Choose n from 1 to {total - 1}."
            )
        kept = first + total - n
        name = f"{self.name} (training samples {first}-{kept - 1}, tested on {kept}-{self.train.stop - 1})"
        return replace(self, train=replace(self.train, stop=kept), test=replace(self.train, first=kept), name=name)

    def cut(self, samples: int | None = None, test_samples: int | None = None) -> Streamed:
        """The first samples of both halves; None keeps all."""

        def begin(half: Half, n: int | None) -> Half:
            if n is not None and not 1 <= n <= len(half):
                raise ValueError(f"{self.name} has {len(half)} {half.what} samples; {n} were asked for.")
            return half if n is None else replace(half, stop=half.first + n)

        return replace(self, train=begin(self.train, samples), test=begin(self.test, test_samples))

    def batches(self, order: Tensor, seed: int | Sequence[int] = 0, epoch: int = 0) -> Iterator[StreamedBatch]:
        """Read the training samples order[n] (B,), or (R, B) with seeds (R,), for each n, on the device.

        Take an epoch's mini-batches from one iterator: starting it starts the workers, and stopping it ends them.
        """
        if order.numel() and not (int(order.min()) >= 0 and int(order.max()) < self.train_samples):
            raise ValueError(f"The order names samples {int(order.min())} to {int(order.max())} of {self!r}.")
        samples = order.cpu()
        return self._delivered(
            self.train, tuple(samples), tuple(_sample_seeds(samples + self.train.first, seed, epoch))
        )

    def first(self, n: int) -> tuple[Tensor, Tensor]:
        """The first n training samples as they are read, (n, pixels), and their answers."""
        read = next(self.batches(torch.arange(min(n, self.train_samples)).unsqueeze(0)))
        return read.x.flatten(1), read.y

    def in_order(self, part: str, batch: int, first: int = 0, last: int | None = None) -> Iterator[StreamedBatch]:
        """Read samples of "train" or "test" in their order, by default all; the last mini-batch is what remains."""
        half: Half = {"train": self.train, "test": self.test}[part]
        samples = torch.arange(len(half))[first:last]
        return self._delivered(half, samples.split(batch), _sample_seeds(samples + half.first, 0, 0).split(batch))

    def sample(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw n distinct training samples (n, pixels), as floats, and labels (n,); the same on every machine."""
        if not 1 <= n <= self.train_samples:
            raise ValueError(
                f"Cannot draw a sample of {n}: {self.name} has {self.train_samples} training samples. Choose n from 1 "
                f"to {self.train_samples}."
            )
        chosen = torch.randperm(self.train_samples, generator=torch.Generator().manual_seed(seed))[:n]
        read = next(self.batches(chosen.unsqueeze(0), seed))
        return self.floats(read.x), read.y

    def _delivered(self, half: Half, order: Sequence[Tensor], seeds: Sequence[Tensor]) -> Iterator[StreamedBatch]:
        asked = [(rows + half.first, drawn) for rows, drawn in zip(order, seeds, strict=True)]
        pin = torch.cuda.is_available() and (half.options.get("pin_memory", False) or self.device.type == "cuda")
        read = half.read(asked, self.form, self.dtype, pin)
        shaped = (_shaped(x, y, rows) for (x, y), rows in zip(read, order, strict=True))
        return shaped if self.device.type == "cpu" else _ahead(shaped, self.device)


def _sample_seeds(samples: Tensor, seed: int | Sequence[int], epoch: int) -> Tensor:
    """The seeds of what samples draw, in the shape of `samples`: 63 bits of words that nothing else draws."""
    words = draws(samples, seed if isinstance(seed, int) else torch.tensor(seed), epoch, 1)
    return ((words[2] << 31) ^ words[3]).squeeze(-1)


def _shaped(x: Tensor, y: Tensor, rows: Tensor) -> StreamedBatch:
    return StreamedBatch(x.view(*rows.shape, *x.shape[1:]), y.view(*rows.shape, *y.shape[1:]), rows)


def _ahead(batches: Iterator[StreamedBatch], device: torch.device) -> Iterator[StreamedBatch]:
    """Copy the next mini-batch from pinned memory while the current one is used."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    waiting: StreamedBatch | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = StreamedBatch(*(part.to(device, non_blocking=True) for part in batch))
        if waiting is not None:
            yield _ready(waiting, stream)
        waiting = moved
    if waiting is not None:
        yield _ready(waiting, stream)


def _ready(batch: StreamedBatch, stream: torch.cuda.Stream | None) -> StreamedBatch:
    """A mini-batch whose copy the current stream waits for, and whose memory is kept while that uses it."""
    if stream is not None:
        current = torch.cuda.current_stream(stream.device)
        current.wait_stream(stream)
        for part in batch:
            part.record_stream(current)
    return batch


def streamed(
    train: Any,
    test: Any,
    *,
    classes: int | None = None,
    name: str = "streamed data",
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Streamed:
    """Samples of two DataLoaders or Datasets, read while they are used.

    A loader's workers, pinning, prefetching, time limit and worker_init_fn are kept; its batches, shuffling and
    collation are not used, because the experiment sets them. Samples are pairs (x, y): x of one shape, uint8 (divided
    by 255 when used) or floats; y a class number, or targets. `classes` is needed for class numbers unless the data
    set names its `classes`.

    train, test     two DataLoaders or Datasets
    classes         the number of classes; None: as the data set says, or targets
    name            what pages and messages call the set
    device, dtype   of the batches that are read
    """
    check_destination(device, dtype)
    halves = _half(train, "training"), _half(test, "test")
    check_numbering(*(half.dataset for half in halves))
    first = _first(halves[0], dtype)
    labelled = first[2].numel() == 1 and not first[2].is_floating_point()
    named = getattr(halves[0].dataset, "classes", None) if labelled and classes is None else None
    names = tuple(map(str, named)) if isinstance(named, list | tuple) else ()
    count = len(names) or classes if labelled else first[2].numel()
    if not isinstance(count, int) or count < 1:
        raise ValueError("The samples have class numbers; give their number: streamed(train, test, classes=10).")
    form = SampleForm(tuple(first[1].shape), first[1].dtype, labelled, count)
    return Streamed(
        *halves,
        form=form,
        name=name,
        sha256=_identity(halves, form, dtype, name),
        dtype=dtype,
        device=CPU if device is None else torch.device(device),
        class_names=names,
    )


def _half(given: Any, what: str) -> Half:
    options: dict[str, Any] = {}
    if isinstance(given, DataLoader):
        options = {option: getattr(given, option) for option in OPTIONS}
        options["pin_memory"] = given.pin_memory
        given = given.dataset
    if isinstance(given, IterableDataset) or not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
        raise ValueError(
            f"The {what} data is {type(given).__name__}, whose samples have no numbers; expected a Dataset with "
            "__getitem__ and __len__, because the experiment sets the order. Write one that reads sample n."
        )
    if len(given) < 1:
        raise ValueError(f"The {what} data is empty; expected at least one sample.")
    return Half(given, what, 0, len(given), options)


def _first(half: Half, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
    found = _Numbered(half.dataset, half.what, dtype)[half.first, 0]
    if isinstance(found, _Complaint):
        raise ValueError(found.text)
    if not found[1].numel():
        raise ValueError(f"Sample 0 of the {half.what} data is empty; expected at least one number.")
    return found


def _identity(halves: tuple[Half, Half], form: SampleForm, dtype: torch.dtype, name: str) -> str:
    digest = hashlib.sha256(f"{name} {form}".encode())
    for half in halves:
        digest.update(f" {half.what} {len(half)} ".encode())
        for n in (half.first, half.stop - 1):
            x, y = next(replace(half, options={}).read([(torch.tensor([n]), torch.tensor([0]))], form, dtype, False))
            digest.update(content_digest(x, y).encode())
    return digest.hexdigest()
