"""The estimators' contract: `gradient` of every estimator, schedule and kind of model is a loop written out by hand."""

from __future__ import annotations

import pytest
from helpers.nets import named, random_like
from helpers.tolerances import NOT_EQUAL, SAME_FORMULA
from helpers.written_nets import INPUTS, NETS, SIZES
from helpers.written_out import ESTIMATORS, Task
from torch import Tensor
from torch.testing import assert_close

from eqprop import SquaredError
from eqprop.relax import SCHEDULES, Schedule

COST = SquaredError()


def task(name: str) -> Task:
    return Task(NETS[name](), random_like((5, INPUTS), 11), random_like((5, SIZES[0]), 12))


def found(name: str, estimator: str, schedule: Schedule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By eqprop, and by the loop."""
    given, (make, loop) = task(name), ESTIMATORS[estimator]
    chosen = make(schedule=schedule)
    _, grads = chosen.gradient(given.net.model, COST, given.x, given.y)
    return named(given.net.model, grads), loop(given, chosen)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", NETS)
def test_the_gradient_is_the_loop_written_out(name: str, estimator: str, schedule: Schedule) -> None:
    if schedule == "alternating" and not NETS[name]().model.bipartite:
        with pytest.raises(ValueError, match="cannot alternate"):
            found(name, estimator, schedule)
        return
    ours, theirs = found(name, estimator, schedule)
    assert ours.keys() == theirs.keys()
    assert_close(ours, theirs, rtol=SAME_FORMULA, atol=SAME_FORMULA)


@pytest.mark.parametrize("estimator", ["EP", "BPTT"])
def test_the_order_of_updates_matters(estimator: str) -> None:
    """The loops tell schedules apart: otherwise they would agree whatever a schedule does."""
    synchronous, sweeps = (ESTIMATORS[estimator][0](schedule=schedule) for schedule in ("synchronous", "sweeps"))
    given, loop = task("energy"), ESTIMATORS[estimator][1]
    one, other = loop(given, synchronous), loop(given, sweeps)
    assert max(float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one) > NOT_EQUAL
