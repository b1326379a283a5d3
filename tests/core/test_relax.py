"""The time loop: what a relaxation returns, when it stops, what alternating means, where a NaN began."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from helpers.nets import F64, asymmetric, batch, convolutional, energy_based, prototypical, random_like, settle, toy
from helpers.tolerances import EXACT_LIMIT, SAME_FORMULA
from torch import Tensor
from torch.testing import assert_close

from eqprop import Dynamics, NotFiniteError, Nudge, Phase, SquaredError, from_transition, relax
from eqprop.models import Layered
from eqprop.relax import Schedule
from eqprop.state import State

ANY_NET: dict[str, Callable[[], Dynamics]] = {
    "toy": toy,
    "EB": lambda: energy_based(3, "sigmoid"),
    "P": lambda: prototypical(3),
    "conv": convolutional,
    "asymmetric": asymmetric,
}


def exactly(actual: object, expected: object) -> None:
    assert_close(actual, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", ANY_NET)
def test_a_relaxation_is_t_transitions(name: str) -> None:
    net = ANY_NET[name]()
    x, _ = batch(net)
    s = net.init_state(x)
    with torch.no_grad():
        for T in range(4):
            exactly(relax(net, x, T).state, s)
            s = net.transition(x, s)


def test_the_nudge_pulls_at_every_step() -> None:
    net = energy_based(2)
    x, y = batch(net)
    s = settle(net, x).state
    with torch.no_grad():
        for T in range(4):
            nudged = relax(net, x, T, settle(net, x).state, Nudge(SquaredError(), y, 0.3))
            assert_close(nudged.state, s, rtol=0.0, atol=SAME_FORMULA)
            free = net.transition(x, s)
            s = (free[0] + 0.3 * net.eps * (y - s[0]), *free[1:])


def test_the_residual_is_the_largest_movement_of_each_sample() -> None:
    net = prototypical(3)
    x, y = batch(net, samples=4)
    for nudge in (None, Nudge(SquaredError(), y, 0.5)):
        end = relax(net, x, 4, nudge=nudge)
        after = relax(net, x, 1, end.state, nudge).state
        moved = [
            torch.cat([(a[n] - b[n]).abs() for a, b in zip(after, end.state, strict=True)]).max() for n in range(4)
        ]
        exactly(end.residual, torch.stack(moved))
        assert end.residual.unique().numel() == 4


def test_a_sample_that_cycles_does_not_unsettle_the_others() -> None:
    """s -> x s turns x = -1 into a 2-cycle and lets x = 1/2 decay."""
    net = from_transition(
        lambda x, s, theta: (x * s[0] * theta["one"],), {"one": torch.ones(1, dtype=F64)}, layers=(2,)
    )
    x = torch.tensor([[0.5, 0.5], [-1.0, 0.5]], dtype=F64)
    end = relax(net, x, 100, (torch.ones(2, 2, dtype=F64),))
    assert end.settled.tolist() == [True, False]
    assert end.residual.tolist() == [pytest.approx(0.0, abs=1e-20), 2.0]


@pytest.mark.parametrize(("dtype", "threshold"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_settled_is_below_the_threshold_of_the_precision(dtype: torch.dtype, threshold: float) -> None:
    """s -> s + x moves by exactly x."""
    net = from_transition(
        lambda x, s, theta: (s[0] + theta["one"] * x,), {"one": torch.ones(1, dtype=dtype)}, layers=(1,)
    )
    x = torch.tensor([[0.9 * threshold], [1.1 * threshold]], dtype=dtype)
    assert relax(net, x, 0).settled.tolist() == [True, False]
    assert relax(net, x, Phase(0, tolerance=2 * threshold)).settled.tolist() == [True, True]
    assert relax(net, x, Phase(0, tolerance=threshold / 2)).settled.tolist() == [False, False]


def coming_to_rest(schedule: Schedule) -> tuple[Layered, Tensor, int]:
    """A float32 net, a batch and the step at which not one bit moves any more.

    Whether the last bit comes to rest depends on how the machine rounds, so the first seed where it does is taken.
    """
    for seed in range(20):
        net = prototypical(3, "sigmoid", seed=seed).float()
        x, _ = (v.float() for v in batch(net))
        steps = relax(net, x, Phase(300, schedule, stop="settled")).steps
        if steps < 300:
            return net, x, steps
    raise AssertionError("none of 20 nets comes to rest")


@pytest.mark.parametrize("schedule", ["synchronous", "alternating"])
@pytest.mark.parametrize("T", [397, 400])
def test_stopping_when_settled_loses_no_bit(schedule: Schedule, T: int) -> None:
    net, x, _ = coming_to_rest(schedule)
    whole = relax(net, x, Phase(T, schedule), keep=6)
    early = relax(net, x, Phase(T, schedule, stop="settled"), keep=6)
    assert early.steps < whole.steps == T
    exactly(early.state, whole.state)
    exactly(early.residual, whole.residual)
    exactly(early.trail, whole.trail)


def test_the_trail_of_an_early_stop_joins_the_states_before_and_the_rest() -> None:
    """A trail that reaches behind the stop holds the states from before it."""
    net, x, steps = coming_to_rest("synchronous")
    for T in (steps, steps + 3, steps + 50):
        whole = relax(net, x, Phase(T), keep=steps)
        early = relax(net, x, Phase(T, stop="settled"), keep=steps)
        assert early.steps == steps
        assert len(early.trail) == steps
        exactly(early.trail, whole.trail)
    first = relax(net, x, Phase(steps + 3, stop="settled"), keep=steps).trail[0]
    assert not torch.equal(first[0], early.state[0])


def test_the_trail_holds_the_last_states() -> None:
    net = energy_based(2)
    x, _ = batch(net)
    end = relax(net, x, 10, keep=3)
    exactly(end.trail, tuple(relax(net, x, T).state for T in (7, 8, 9)))
    assert len(relax(net, x, 2, keep=5).trail) == 2  # no more than there were
    assert relax(net, x, 10).trail == ()


@pytest.mark.parametrize("net", [prototypical(1), prototypical(2), prototypical(3), prototypical(4, "sigmoid")])
@pytest.mark.parametrize("T", [1, 2, 5, 8])
def test_half_updates_run_one_of_the_two_chains(net: Layered, T: int) -> None:
    """After T half-updates the even layers are those of the synchronous dynamics at T, the odd ones those at T - 1."""
    x, _ = batch(net)
    half, now, before = relax(net, x, Phase(T, "alternating")).state, relax(net, x, T).state, relax(net, x, T - 1).state
    exactly(half, tuple(now[n] if n % 2 == 0 else before[n] for n in range(len(half))))


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("sigma", ["tanh", "sigmoid"])
def test_both_schedules_reach_the_same_fixed_point(depth: int, sigma: str) -> None:
    net = prototypical(depth, sigma)
    x, _ = batch(net)
    synchronous, alternating = relax(net, x, 700), relax(net, x, Phase(700, "alternating"))
    assert bool(synchronous.settled.all())
    assert bool(alternating.settled.all())
    assert_close(alternating.state, synchronous.state, rtol=0.0, atol=EXACT_LIMIT)


def two_cycle() -> tuple[Layered, Tensor, State]:
    """Two neurons that each want to be like the other, and a start that sends the two chains to opposite ends."""
    strong = {"W01": torch.tensor([[3.0]]), "W12": torch.tensor([[1.0]])}
    net = Layered((1, 1, 1), activation="tanh", bias=False, init=lambda name, *_: strong[name], dtype=F64)
    start = (torch.full((2, 1), 0.5, dtype=F64), torch.full((2, 1), -0.9, dtype=F64))
    return net, torch.tensor([[1e-3], [0.9]], dtype=F64), start


def test_alternating_settles_where_synchronous_runs_in_a_2_cycle() -> None:
    net, x, start = two_cycle()
    synchronous = relax(net, x, 300, start)
    assert synchronous.settled.tolist() == [False, False]
    assert_close(relax(net, x, 2, synchronous.state).state, synchronous.state, rtol=0.0, atol=SAME_FORMULA)
    alternating = relax(net, x, Phase(300, "alternating"), start)
    assert alternating.settled.tolist() == [True, True]


def growing(rate: float) -> Dynamics:
    """Layer s1 overflows first: s1 -> rate s1 + x, s0 -> s1 / rate."""

    def transition(x: Tensor, s: State, theta: Mapping[str, Tensor]) -> State:
        return s[1] / theta["rate"], theta["rate"] * s[1] + x

    return from_transition(transition, {"rate": torch.tensor([rate], dtype=F64)}, layers=(1, 1))


@pytest.mark.parametrize("T", [20, 60])
def test_a_state_that_overflows_is_reported_with_its_first_step_and_layer(T: int) -> None:
    """1e20^15 is 1e300, 1e20^16 too large: s1 is 1 after step 1 and infinite after step 17."""
    net, x = growing(1e20), torch.ones(1, 1, dtype=F64)
    with pytest.raises(NotFiniteError, match=r"Layer s1 of transition is not finite after step 17\. .*lower the"):
        relax(net, x, T)
    relax(net, x, 16)


def test_a_bad_start_is_told_from_a_bad_step() -> None:
    net = prototypical(2)
    x, _ = batch(net)
    bad = (torch.zeros(3, 3, dtype=F64), torch.full((3, 5), torch.nan, dtype=F64))
    with pytest.raises(NotFiniteError, match="Layer s1 of Layered is not finite after step 0"):
        relax(net, x, 3, bad)
    with pytest.raises(NotFiniteError, match="Layer s1 of Layered is not finite after step 0"):
        relax(net, x, 0, bad)
    x[1, 2] = torch.nan
    with pytest.raises(NotFiniteError, match="Layer s1 of Layered is not finite after step 1.* check x"):
        relax(net, x, 3)


def test_the_input_drive_is_computed_once_a_phase() -> None:
    class Counting(Dynamics):
        input_shape = (2,)
        drives = 0

        def init_state(self, x: Tensor) -> State:
            return (torch.zeros_like(x),)

        def drive(self, x: Tensor) -> Tensor:
            self.drives += 1
            return x.exp()

        def step(self, drive: Tensor, s: State, push: object = None) -> State:
            return (0.5 * s[0] + drive,)

    net, x = Counting(), random_like((3, 2), 0)
    end = relax(net, x, 100)
    assert net.drives == 1
    assert_close(end.state[0], 2 * x.exp(), rtol=0.0, atol=SAME_FORMULA)


def test_a_relaxation_says_which_layer_still_moves() -> None:
    net = prototypical(3).float()
    x = batch(net)[0].float()
    free = relax(net, x, 2)
    new = net.transition(x, free.state)
    assert free.by_layer is not None
    assert free.by_layer.shape == (3, len(x))
    for found, a, b in zip(free.by_layer, new, free.state, strict=True):
        assert torch.equal(found, (a - b).abs().amax(1))
    assert torch.equal(free.by_layer.amax(0), free.residual)
    assert f"in s{int(free.by_layer.amax(1).argmax())}, " in repr(free)
    assert " in s" not in repr(relax(net, x, 500))
