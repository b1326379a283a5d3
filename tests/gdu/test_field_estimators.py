"""The doctor on estimators that Theorem 1 does not speak of, and on nets that only sweeps bring to rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.commands import Call
from helpers.nets import F64, batch, random_like
from torch.testing import assert_close

from eqprop import EP, SquaredError
from eqprop.cost import Problem
from eqprop.estimators import Backprop, Estimator
from eqprop.estimators.asymmetric import AsymEP, VectorField
from eqprop.estimators.coupled import CoupledLearning
from eqprop.estimators.dyadic import Dyadic
from eqprop.gdu.doctor import doctor
from eqprop.gdu.examination import Examination, sweeps
from eqprop.gdu.nudging import compare_nudging
from eqprop.models import Dense, Layered, Network
from eqprop.models.predictive import PredictiveCoding

COST = SquaredError()


def untied() -> Network:
    links = [Dense("x", "h"), Dense("h", "out", untied=True)]
    return Network(8, {"out": 3, "h": 12}, links, "tanh", init="glorot", seed=0, dtype=F64)


def predictive(gain: float = 1.5) -> PredictiveCoding:
    """Its Jacobian has a spectral radius above 1, so synchronous steps do not settle."""
    links = [Dense("x", "h2"), Dense("h2", "h1", gain=gain), Dense("h1", "out", gain=gain)]
    sigmas = {"out": "identity", "*": "tanh"}
    return PredictiveCoding(4, {"out": 3, "h1": 6, "h2": 6}, links, sigmas, init="glorot", seed=0, dtype=F64)


@pytest.mark.parametrize("estimator", [AsymEP(100, 50), Dyadic(100, 50)])
def test_an_estimator_that_needs_no_symmetry_is_not_accused_of_it(estimator: Estimator) -> None:
    net = untied()
    x, y = batch(net, samples=5)
    found = doctor(net, COST, x, y, estimator)
    assert found.healthy, str(found)
    assert f"{type(estimator).__name__}'s gradient has a cosine of 1.000" in found.passed["gradient"]
    assert doctor(net, COST, x, y, EP(100, 50)).cause == "asymmetric"


def test_the_vector_field_is_accused() -> None:
    net = untied()
    found = doctor(net, COST, *batch(net, samples=5), VectorField(100, 50))
    assert found.cause == "asymmetric"
    assert "Use AsymEP or Dyadic" in found.verdict


def test_a_loop_that_stops_settling_is_named_whatever_trains_it() -> None:
    net = untied()
    with torch.no_grad():
        net.get_parameter("W_out_h").mul_(6.0)
        net.get_parameter("B_out_h").mul_(6.0)
    found = doctor(net, COST, *batch(net, samples=2), Dyadic(40, 30))
    assert found.cause in ("oscillates", "never-settles", "two-cycle", "T"), found.verdict


def test_coupled_learning_is_measured_itself() -> None:
    net = Layered((3, 6, 5), "energy-based", "tanh", eps=0.5, seed=0, dtype=F64)
    found = doctor(net, COST, *batch(net), CoupledLearning(200, 100))
    assert "CoupledLearning's gradient" in found.passed["gradient"]


def test_a_net_that_only_sweeps_settle_is_healthy() -> None:
    net = predictive()
    x, y = batch(net, samples=5)
    ep = EP(1, 30, beta=0.01, nudging="symmetric", schedule="sweeps")
    assert doctor(net, COST, x, y, ep).healthy
    p = Examination(Problem(net, COST, x, y), ep)
    with torch.no_grad():
        values = torch.linalg.eigvals(p.jacobian[0])  # type: ignore[index]
    assert float(values.abs().max()) > 1.0
    by = dict(net.named_parameters())
    exact = Backprop().gradient(net, COST, x, y)[1]
    assert_close(p.exact, {name: exact[by[name]] for name in p.exact}, rtol=1e-6, atol=1e-8)
    # The same without sweeps: synchronous steps lead away from the forward pass.
    assert not doctor(net, COST, x, y, EP(1, 30, beta=0.01, nudging="symmetric")).healthy


def test_sweeps_solve_the_linear_system() -> None:
    a = 0.4 * random_like((5, 5), 1)
    move = (random_like((2, 2), 2), random_like((2, 3), 3))

    def product(d: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return torch.split(torch.cat(d, 1) @ a.T, (2, 3), 1)

    found = sweeps(product, move, ((0,), (1,)), 3)
    wanted = torch.linalg.solve(torch.eye(5, dtype=F64) - a, torch.cat(move, 1).T).T
    assert not found.grows
    assert_close(found.complete, wanted, rtol=1e-6, atol=1e-6)
    first = move[0]
    second = product((first, torch.zeros_like(move[1])))[1] + move[1]
    third = product((first, second))[0] + move[0]
    assert_close(found.short, torch.cat([third, second], 1))


def test_the_nudging_rules_in_sweeps() -> None:
    net = predictive(1.0)
    table = compare_nudging(net, COST, *batch(net), steps=60, rules=["positive", "centered"], schedule="sweeps")
    assert [row.order for row in table.rows] == [pytest.approx(1, abs=0.2), pytest.approx(2, abs=0.2)]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(monkeypatch, capsys)


def test_gdu_prints_the_table_of_nudging_rules(call: Call, tmp_path: Path) -> None:
    code, out, err = call("gdu", "toy", "--nudging", "positive,centered", "--json", tmp_path / "rules.json")
    assert (code, err) == (0, "")
    assert "centered" in out
    assert "beta 0.001" in out
    assert (tmp_path / "rules.json").read_text().count('"order"') == 2
    code, _, err = call("gdu", "toy", "--nudging", "centred")
    assert code == 2
    assert "Did you mean 'centered'" in err
