"""What every start of free phases promises, one's own too: a list of checks to run on any `Start` and net.

    for check in CHECKS:
        check(make, build)

`make(model, x)` makes the start for a net and its training inputs (N, ...), `build(seed)` a net in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from eqprop import Dynamics, relax
from eqprop.models import stack
from eqprop.starts import Start
from helpers.nets import batch

Make = Callable[[Dynamics, torch.Tensor], Start]
Build = Callable[[int], Dynamics]
ROWS = torch.tensor([4, 1, 3])
T = 4


def visited(model: Dynamics, start: Start, x: torch.Tensor, rows: torch.Tensor, times: int = 3) -> None:
    """So many mini-batches of these samples, as a training has them."""
    for _ in range(times):
        begun = start.begin(x[rows], rows)
        start.end(x[rows], rows, begun, relax(model, x[rows], T, begun).state)


def it_begins_with_a_state(make: Make, build: Build) -> None:
    model = build(0)
    x, _ = batch(model, samples=6)
    start = make(model, x)
    for _ in range(2):
        begun, like = start.begin(x[ROWS], ROWS), model.init_state(x[ROWS])
        assert [(v.shape, v.dtype) for v in begun] == [(v.shape, v.dtype) for v in like]
        visited(model, start, x, ROWS)


def free_phases_end_closer_to_rest(make: Make, build: Build) -> None:
    model = build(0)
    x, _ = batch(model, samples=6)
    start, zero = make(model, x), relax(model, x[ROWS], T)
    visited(model, start, x, ROWS, 200)
    assert relax(model, x[ROWS], T, start.begin(x[ROWS], ROWS)).residual.max() < 0.5 * zero.residual.max()


def what_is_saved_is_all_it_knows(make: Make, build: Build) -> None:
    model = build(0)
    x, _ = batch(model, samples=6)
    one, other = make(model, x), make(model, x)
    visited(model, one, x, ROWS)
    for name, tensor in other.tensors.items():
        tensor.copy_(one.tensors[name])
    visited(model, one, x, ROWS)
    visited(model, other, x, ROWS)
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def a_sample_that_is_not_finite_leaves_it_finite(make: Make, build: Build) -> None:
    model = build(0)
    x, _ = batch(model, samples=6)
    start = make(model, x)
    begun = start.begin(x[ROWS], ROWS)
    spoilt = tuple(v.clone() for v in relax(model, x[ROWS], T, begun).state)
    spoilt[-1][1].fill_(float("nan"))
    start.end(x[ROWS], ROWS, begun, spoilt)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in start.tensors.values())
    assert any(bool(tensor.any()) for tensor in start.tensors.values()), "the others are learned from"


def stacked_networks_are_each_their_own(make: Make, build: Build) -> None:
    models = [build(seed) for seed in (1, 2)]
    x, _ = batch(models[0], samples=6)
    rows = torch.tensor([[0, 3, 5], [3, 4, 1]])
    together, pair = make(stack(models), x), stack(models)  # type: ignore[arg-type]
    visited(pair, together, x, rows)
    for r, model in enumerate(models):
        alone = make(model, x)
        visited(model, alone, x, rows[r])
        for name, tensor in alone.tensors.items():
            assert torch.allclose(together.tensors[name][r], tensor, rtol=1e-9, atol=1e-12), name


CHECKS = [
    it_begins_with_a_state,
    free_phases_end_closer_to_rest,
    what_is_saved_is_all_it_knows,
    a_sample_that_is_not_finite_leaves_it_finite,
    stacked_networks_are_each_their_own,
]
