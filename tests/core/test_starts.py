"""The starts' contract, on every start and kind of net, and on starts that break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.nets import convolutional, energy_based, prototypical
from helpers.start_contract import (
    CHECKS,
    Make,
    a_sample_that_is_not_finite_leaves_it_finite,
    free_phases_end_closer_to_rest,
    stacked_networks_are_each_their_own,
)

from eqprop import Dynamics
from eqprop.starts import Carried, Initialised, Persistent
from eqprop.state import State

STARTS: dict[str, Make] = {
    "persistent": Persistent,
    "initialised": Initialised,
    "carried": lambda model, x: Carried(model, x, batch=3),
}
NETS: dict[str, Callable[[int], Dynamics]] = {
    "energy-based": lambda seed: energy_based(2, seed=seed),
    "prototypical": lambda seed: prototypical(3, seed=seed),
    "convolutional": lambda seed: convolutional(seed=seed),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("start", STARTS)
def test_a_start_keeps_its_promises(start: str, net: str, check: Any) -> None:
    check(STARTS[start], NETS[net])


class Forgetful(Carried):  # type: ignore[misc]
    def end(self, x: torch.Tensor, rows: torch.Tensor, begun: State, reached: State) -> None: ...


class Trusting(Carried):  # type: ignore[misc]
    def end(self, x: torch.Tensor, rows: torch.Tensor, begun: State, reached: State) -> None:
        for layer, new in zip(self.layers, reached, strict=True):
            layer.copy_(new)


class Mixing(Carried):  # type: ignore[misc]
    def begin(self, x: torch.Tensor, rows: torch.Tensor) -> State:
        return tuple(layer.flip(0) for layer in super().begin(x, rows))


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Forgetful, free_phases_end_closer_to_rest),
        (Trusting, a_sample_that_is_not_finite_leaves_it_finite),
        (Mixing, stacked_networks_are_each_their_own),
    ],
)
def test_a_wrong_start_is_noticed(wrong: Any, check: Any) -> None:
    with pytest.raises(AssertionError):
        check(lambda model, x: wrong(model, x, 3), NETS["energy-based"])
