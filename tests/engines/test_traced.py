"""Tracing refuses what a list of operations cannot follow, and the watch sees what changes beside tensors."""

from __future__ import annotations

import functools
import os
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from eqprop import from_energy
from eqprop.engines import traced
from eqprop.engines.traced import CannotTrace, Checks, Fingerprint, Restless, trace, watched

HELD = torch.tensor([1.0, 2.0, 3.0])
COUNT = torch.tensor(2)
GAIN = 0.5


def check_traced(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The graph computes what the function does, at other values than it was traced with."""
    graph = trace(lambda v: [function(v)], [torch.zeros_like(x)])
    assert torch.equal(graph(x)[0], function(x))


READINGS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "numpy": lambda x: x.numpy(),
    "address": lambda x: x.data_ptr(),
    "held number": lambda x: int(COUNT),
    "held index": lambda x: list(range(5))[COUNT],
    "equality": lambda x: torch.equal(HELD, HELD),
    "is_nonzero": lambda x: torch.is_nonzero(COUNT),
    "unique": lambda x: torch.unique(x),
    "mask": lambda x: x[x > 0].sum(),
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("name", READINGS)
def test_reading_values_is_refused(name: str) -> None:
    def function(x: Tensor) -> list[Tensor]:
        READINGS[name](x)
        return [2 * x]

    with pytest.raises(CannotTrace, match="reads the values of a tensor|shape depends on values"):
        trace(function, [torch.ones(3)])


def test_held_tensors_are_read_anew() -> None:
    held = torch.ones(3)
    graph = trace(lambda x: [x * held], [torch.ones(3)])
    held.mul_(3.0)
    assert torch.equal(graph(torch.ones(3))[0], torch.full((3,), 3.0))


def test_changes_in_place_of_own_tensors_are_written_without() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            v = x.view_as(x).requires_grad_()
            own = torch.zeros(3, 3)
            own[:, 0] = v.clone().mul_(2.0).clamp_(-1.0, 1.0)
            own += torch.diag_embed(v)
            return torch.autograd.grad((own * own).sum(), v)[0]

    check_traced(function, torch.randn(3))


@pytest.mark.parametrize("what", ["input", "held"])
def test_changes_in_place_that_outlive_the_step_are_refused(what: str) -> None:
    held = torch.ones(3)

    def function(x: Tensor) -> list[Tensor]:
        (x if what == "input" else held).add_(1.0)
        return [2 * x]

    with pytest.raises(CannotTrace, match="changes a tensor in place that outlives the step"):
        trace(function, [torch.ones(3)])


def test_random_numbers_are_refused() -> None:
    with pytest.raises(CannotTrace, match="draws random numbers"):
        trace(lambda x: [x + torch.rand(3)], [torch.ones(3)])


def test_autocast_does_not_reach_a_trace() -> None:
    with torch.autocast("cpu"):
        graph = trace(lambda x: [x @ x], [torch.ones(3, 3)])
    assert graph(torch.ones(3, 3))[0].dtype == torch.float32


class Owner:
    """Something with attributes, that can be called."""

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.gain * x

    def method(self, x: Tensor) -> Tensor:
        return self.gain * x


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2))
        self.gain, self.nested, self.table = 1.0, [[1.0], {"deep": [2.0]}], np.ones(3)
        self.owner, self.slotted, self.free = Owner(), Slotted(), torch.ones(2)
        self.space, self.queue, self.named = SimpleNamespace(gain=1.0), deque([[1.0]]), UserDict(gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return GAIN * self.gain * x


def freeze(net: Net) -> None:
    net.inner.weight.requires_grad_(False)


def set_in(name: str, value: object, *path: str) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        setattr(functools.reduce(getattr, path, net), name, value)

    return change


def item_of(container: Callable[[Net], Any], key: Any, value: object) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        container(net)[key] = value

    return change


CHANGES: dict[str, Callable[[Net], Any]] = {
    "attribute": set_in("gain", 2.0),
    "attribute of a part": set_in("gain", 2.0, "owner"),
    "slot": set_in("gain", 2.0, "slotted"),
    "list": item_of(lambda net: net.nested[0], 0, 3.0),
    "deep list": item_of(lambda net: net.nested[1]["deep"], 0, 3.0),
    "list grown": lambda net: net.nested.append(1),
    "attribute of a namespace": set_in("gain", 2.0, "space"),
    "item of a dictionary of one's own": item_of(lambda net: net.named, "gain", 2.0),
    "deque grown": lambda net: net.queue.append([2.0]),
    "list in a deque": item_of(lambda net: net.queue[0], 0, 2.0),
    "array": item_of(lambda net: net.table, 1, 5.0),
    "frozen": freeze,
    "parameter replaced": lambda net: setattr(net.inner, "weight", nn.Parameter(torch.ones(2, 2))),
    "type": lambda net: net.double(),
    "buffer replaced": lambda net: setattr(net, "mask", torch.ones(2)),
    "tensor replaced": lambda net: setattr(net, "free", torch.ones(2)),
    "mode": lambda net: net.eval(),
    "method patched": lambda net: setattr(net, "forward", lambda x: x),
    "class swapped": lambda net: setattr(net.owner, "__class__", Slotless),
    "part removed": lambda net: delattr(net, "inner"),
    "hook": lambda net: net.inner.register_forward_hook(lambda *_: None),
    "hook of a parameter": lambda net: net.inner.weight.register_hook(lambda g: g),
}


class Slotless(Owner):
    """The same by another name."""


@pytest.mark.parametrize("name", CHANGES)
def test_the_watch_sees(name: str) -> None:
    net = Net()
    watch = Fingerprint(net)
    assert watch.refusal is None
    assert not watch.changed()
    CHANGES[name](net)
    assert watch.changed()


def test_the_watch_sees_a_class_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Fingerprint(Net())
    monkeypatch.setattr(Net, "scale", 3.0)
    assert watch.changed()


def test_the_watch_sees_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Fingerprint(Net())
    monkeypatch.setitem(globals(), "GAIN", 0.75)
    assert watch.changed()


def test_the_watch_sees_names_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Fingerprint(lambda x: traced.ARRAY * x)
    monkeypatch.setattr(traced, "ARRAY", 3)
    assert watch.changed()


def test_the_watch_sees_closures_defaults_and_partials() -> None:
    gain, owner, settings = 1.0, Owner(), {"gain": 1.0}

    def function(x: Tensor, by: float = 2.0) -> Tensor:
        return gain * by * owner(x) * settings["gain"]

    def change_gain() -> None:
        nonlocal gain
        gain = 2.0

    def change_default() -> None:
        function.__defaults__ = (3.0,)

    for roots in ((function,), (functools.partial(function, by=1.0),), ({"deep": [function]},)):
        for change in (change_gain, change_default, lambda: setattr(owner, "gain", owner.gain + 1)):
            gain, function.__defaults__ = 1.0, (2.0,)
            watch = Fingerprint(*roots)
            change()
            assert watch.changed()
    watch = Fingerprint(owner.method)
    owner.gain += 1
    assert watch.changed()


def test_the_watch_does_not_mind_values() -> None:
    """Values of parameters, buffers and held tensors are inputs of what is traced."""
    net = Net()
    watch = Fingerprint(net)
    with torch.no_grad():
        net.inner.weight.add_(1.0)
        net.inner.bias.data = torch.zeros(2)
        net.mask.mul_(2.0)
        net.free.mul_(2.0)
    net.inner.weight.grad = torch.ones(2, 2)
    net.gain = float("1.0")
    assert not watch.changed()


class Leaf:
    """Where a number is held: what holds it, and a way to set it."""

    def __init__(self, value: float) -> None:
        self.inside: list[Any] = [value]

    def set(self, value: float) -> None:
        self.inside[0] = value


LAYERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda held: [0, held],
    "tuple": lambda held: (held, "word"),
    "dict": lambda held: {"a": held, 3: None},
    "deque": lambda held: deque([held]),
    "object": lambda held: SimpleNamespace(part=held),
    "long list": lambda held: [*range(300), held],
    "partial": lambda held: functools.partial(print, held),
    "closure": lambda held: lambda x: (x, held),
    "method": lambda held: SimpleNamespace(part=held).__repr__,
    "default": lambda held: functools.wraps(print)(lambda x, part=held: (x, part)),
    "module": lambda held: with_attribute(nn.Identity(), held),
    "slot": lambda held: with_attribute(Slotted(), held),
}


def with_attribute(owner: Any, held: object) -> Any:
    owner.gain = held
    return owner


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(LAYERS)), max_size=6), st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_the_watch_sees_a_number_however_deep_it_is_held(layers: list[str], before: float, after: float) -> None:
    leaf = Leaf(before)
    held: Any = leaf
    for name in layers:
        held = LAYERS[name](held)
    watch = Fingerprint(lambda x: (x, held))
    assert watch.refusal is None
    assert not watch.changed()
    leaf.set(after)
    assert watch.changed() == (before != after)
    leaf.set(before)
    assert not watch.changed()


def test_the_watch_refuses_what_it_cannot_watch() -> None:
    net = Net()
    net.table = np.ones(traced.ARRAY)
    assert "holds an array" in str(Fingerprint(net).refusal)
    net = Net()
    net.nested = [[n] for n in range(traced.MOST)]
    assert "too many to watch" in str(Fingerprint(net).refusal)
    net = Net()
    net.register_forward_pre_hook(lambda *_: None)
    assert "hooks" in str(Fingerprint(net).refusal)


def test_what_reads_files_or_the_environment_is_refused() -> None:
    assert "environment" in str(Fingerprint(lambda x: x * float(os.environ["GAIN"])).refusal)
    assert Fingerprint(lambda x: x * os.sep.count("/")).refusal is None


def test_what_is_made_when_first_used_is_made_of_numbers() -> None:
    """A mask that a model makes at its first step, and keeps, has values; one that changes at each step is told."""
    held: dict[str, Any] = {}

    def step() -> object:
        return held.setdefault("mask", torch.ones(2))

    watch = watched(step, held)
    assert not watch.changed()
    assert type(held["mask"]) is Tensor
    with pytest.raises(Restless, match="changes at every call"):
        watched(lambda: held.update(mask=torch.ones(2)), held)


def test_the_watch_lets_a_model_go() -> None:
    import gc

    model = from_energy(lambda x, s, th: (s[0] * th["W"]).sum(-1), {"W": torch.ones(2)}, (2,), eps=0.1)
    watch, gone = Fingerprint(model), weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert watch.changed()


def test_checks_come_at_powers_of_two_and_when_asked() -> None:
    checks = Checks()
    assert [n for n in range(1, 20) if checks.due()] == [1, 2, 4, 8, 16]
    checks.ask()
    assert checks.due()
    assert not checks.due()
