"""The laboratory on graphs and in sweeps: small versions of the field's nets, and a wrong feedback."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.nets import F64, batch, energy_based, prototypical
from torch import Tensor

import eqprop
from eqprop import EP, SquaredError, gdu
from eqprop.gdu.comparison import Options
from eqprop.models import Connection, Dense, Network
from eqprop.models.connections import Theta

COST = SquaredError()
spec = importlib.util.spec_from_file_location(
    "field_nets", Path(__file__).resolve().parents[2] / "examples" / "field_nets.py"
)
assert spec is not None
assert spec.loader is not None
FIELD = importlib.util.module_from_spec(spec)
spec.loader.exec_module(FIELD)

SMALL: dict[str, Any] = {"seed": 0, "dtype": F64}
NETS = {
    "A": lambda: FIELD.laborieux((4, 4, 6, 8), 32, **SMALL),
    "B": lambda: FIELD.dchn((4, 4, 6, 8), 16, nudge_site="implicit", **SMALL),
    "E": lambda: FIELD.resnet13(4, 16, nudge_site="inside", **SMALL),
}


def compared(net: Any, schedule: Any, T: int = 600, K: int = 12, beta: float = 1e-5) -> Any:
    x, y = batch(net, 2)
    return gdu.compare(net, COST, x, y, T, K, beta, Options(schedule=schedule, shown=0))


def worst(report: Any) -> float:
    return max(m.rmse for m in report.synapses.values())


@pytest.mark.parametrize("which", NETS)
@pytest.mark.parametrize("schedule", ["synchronous", "sweeps"])
def test_the_nets_of_the_field_match(which: str, schedule: str) -> None:
    report = compared(NETS[which](), schedule)
    assert report.residual.unsettled == 0
    assert worst(report) < 5e-5
    assert report.budget.outcome == "holds"


@pytest.mark.parametrize("build", [lambda: energy_based(3), lambda: prototypical(3, nudge_site="inside")])
def test_in_sweeps_the_parts_explain_the_difference(build: Any) -> None:
    net = build()
    exact = compared(net, "sweeps", beta=1e-6)
    rough = compared(net, "sweeps", beta=1e-2)
    assert worst(exact) < 1e-4 < worst(rough)


def test_in_the_same_order_totals_are_compared() -> None:
    net = FIELD.dchn((4, 4, 6, 8), 16, nudge_site="implicit", **SMALL)
    report = compared(net, "sweeps-same", K=80)
    assert worst(report) < 5e-5
    assert "T = 600 (300 sweeps), K = 80 (40 sweeps) in the same order, of which totals are compared" in str(report)
    assert report.to_dict()["groups"] == 2


@dataclass(frozen=True)
class Untied(Connection):
    """A feedback that is not the transpose."""

    def weights(self, pre: Any, post: Any) -> Any:
        return Dense(self.pre, self.post).weights(pre, post)

    def forward(self, pre: Tensor, theta: Theta) -> Tensor:
        return pre @ theta["W"].mT

    def feedback(self, post: Tensor, pre: Tensor, theta: Theta) -> Tensor:
        return post @ theta["W"].flip(0)


def test_a_wrong_feedback_shows_as_asymmetry() -> None:
    links = [Dense("x", "h"), Untied("h", "out")]
    net = Network(4, {"out": 3, "h": 5}, links, "tanh", nudge_site="inside", **SMALL)
    right = Network(4, {"out": 3, "h": 5}, [Dense("x", "h"), Dense("h", "out")], "tanh", nudge_site="inside", **SMALL)
    wrong, fine = compared(net, "synchronous"), compared(right, "synchronous")
    assert worst(fine) < 1e-4
    assert worst(wrong) > 1e3 * worst(fine)
    assert (fine.budget.outcome, wrong.budget.outcome == "holds") == ("holds", False)
    x, y = batch(net)
    found = eqprop.doctor(net, COST, x, y, EP(60, 8))
    assert found.cause == "formula"
    assert "the feedback of Untied h -> out is off by" in str(found)


@pytest.mark.parametrize("which", ["B", "E"])
def test_the_doctor_finds_nothing_wrong_in_sweeps(which: str) -> None:
    net = NETS[which]()
    x, y = batch(net, 4)
    found = eqprop.doctor(net, COST, x, y, EP(200, 40, schedule="sweeps", beta=0.01))
    assert found.cause is None, str(found)
