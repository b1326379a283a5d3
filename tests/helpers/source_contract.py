"""What every data source promises, one's own too: a list of checks to run on any that `data=` takes.

    for check in CHECKS:
        check(make)

`make()` opens the source anew each time, as `Images` or `Streamed`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eqprop.data import Images, Streamed
from eqprop.run.dataset import describe, read_images
from eqprop.run.spec import DataSettings

Make = Callable[[], Images | Streamed]


def training(source: Images | Streamed) -> tuple[Tensor, Tensor]:
    return source.first(source.train_samples)


def tested(source: Images | Streamed) -> tuple[Tensor, Tensor]:
    if isinstance(source, Images):
        return source.test_x, source.test_y
    read = list(source.in_order("test", 7))
    return torch.cat([batch.x for batch in read]), torch.cat([batch.y for batch in read])


def it_has_what_it_says(make: Make) -> None:
    source = make()
    for (x, y), count in ((training(source), source.train_samples), (tested(source), source.test_samples)):
        assert x.shape == (count, torch.Size(source.shape).numel())
        assert len(y) == count > 0
        assert bool(torch.isfinite(source.floats(x)).all())
        if source.labelled:
            assert y.dtype == torch.int64
            assert 0 <= int(y.min()) <= int(y.max()) < source.classes


def targets_are_what_outputs_are_compared_with(make: Make) -> None:
    source = make()
    y = training(source)[1]
    targets = source.targets(y, torch.float64)
    assert (targets.shape, targets.dtype) == ((source.train_samples, source.classes), torch.float64)
    assert not source.labelled or torch.equal(targets.argmax(1), y)


def opened_twice_it_is_the_same(make: Make) -> None:
    one, other = make(), make()
    assert describe(one) == describe(other)
    assert all(torch.equal(a, b) for a, b in zip(training(one), training(other), strict=True))


def what_is_held_out_is_the_end_of_the_training_samples(make: Make) -> None:
    whole = make()
    n = whole.train_samples // 3
    split = read_images(whole, DataSettings(validation=n))
    for a, b, known in zip(training(split), tested(split), training(whole), strict=True):
        assert torch.equal(torch.cat([a, b]), known)
    assert describe(split)["sha256"] == describe(whole)["sha256"]
    with pytest.raises(ValueError, match=f"Choose n from 1 to {whole.train_samples - 1}"):
        read_images(whole, DataSettings(validation=whole.train_samples))


def the_first_samples_are_kept(make: Make) -> None:
    whole = make()
    cut = read_images(whole, DataSettings(samples=5, test_samples=2))
    for kept, known in (
        *zip(training(cut), training(whole), strict=True),
        *zip(tested(cut), tested(whole), strict=True),
    ):
        assert torch.equal(kept, known[: len(kept)])
    assert (cut.train_samples, cut.test_samples) == (5, 2)
    with pytest.raises(ValueError, match=f"{whole.train_samples} training samples"):
        read_images(whole, DataSettings(samples=whole.train_samples + 1))


def a_seed_draws_the_same_distinct_samples(make: Make) -> None:
    source = make()
    n = source.train_samples
    before = torch.get_rng_state()
    (x, y), again, other = (source.sample(n - 1, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, again[0])
    assert not torch.equal(x, other[0])
    known = [row.tobytes() for row in source.floats(training(source)[0]).numpy()]
    places = [known.index(row.tobytes()) for row in x.numpy()]
    assert len(set(places)) == n - 1
    assert torch.equal(y, training(source)[1][places])
    with pytest.raises(ValueError, match=f"Choose n from 1 to {n}"):
        source.sample(n + 1, 0)


CHECKS = [
    it_has_what_it_says,
    targets_are_what_outputs_are_compared_with,
    opened_twice_it_is_the_same,
    what_is_held_out_is_the_end_of_the_training_samples,
    the_first_samples_are_kept,
    a_seed_draws_the_same_distinct_samples,
]
