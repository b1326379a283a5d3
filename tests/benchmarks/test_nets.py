"""Benchmarks of any net against the autodiff of its Phi: the same updates, rows with their names, errors in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.nets import LOWEST, NaiveTwin, cells, measure_nets, operations, subject
from benchmarks.precision import FORMS, in_form
from benchmarks.run import Effort
from eqprop.cost import Problem
from eqprop.engines.eager import agreements, update_in

QUICK = Effort(rounds=1, naive_rounds=1, chunk_seconds=0.01)
CPU = torch.device("cpu")

OWN = """
import torch, eqprop

def build(seed=0):
    def phi(x, s, theta):
        return (s[0] * (x @ theta["W"].T)).sum(-1) + 0.1 * (s[0] * (s[1] @ theta["V"].T)).sum(-1)
    weights = {"W": 0.3 * torch.randn(10, 6), "V": 0.3 * torch.randn(10, 4)}
    return eqprop.from_primitive(phi, weights, layers=(10, 4), squash=torch.tanh, input_shape=(6,))
"""


@pytest.mark.parametrize("name", ["A-small@2", "A-sweeps-small@2", "B-small@2", "mlp-small@3"])
def test_the_twin_has_the_nets_own_update(name: str) -> None:
    one = subject(name)
    short = type(one.estimator)(T=6, K=3, beta=0.5, nudging="symmetric", schedule=one.estimator.schedule)
    problem = one.problem(CPU)
    model = problem.model.double()
    given = Problem(model, problem.cost, problem.x.double(), problem.y.double())
    ours = update_in(given, short, "float32")
    twin = update_in(Problem(NaiveTwin(model), given.cost, given.x, given.y), short, "float32")  # type: ignore[arg-type]
    found = agreements({name.removeprefix("model."): g for name, g in twin.items()}, ours)
    assert min(one.cosine for one in found.values()) > 1.0 - 1e-9
    assert abs(found[""].norm - 1.0) < 1e-9


@pytest.mark.parametrize(("name", "steps"), [("A", 250 + 2 * 30), ("A-sweeps", 155), ("B", (120 + 2 * 40) // 2)])
def test_an_iteration_has_as_many_operations_as_its_full_steps(name: str, steps: int) -> None:
    one = subject(name)
    model = one.build()
    assert operations(one, model) == 128 * steps * model.operations()


@pytest.fixture
def known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products take seconds to time."""
    monkeypatch.setattr("benchmarks.nets.product_rate", lambda *where: 1e10)


@pytest.mark.usefixtures("known_peak")
def test_the_share_of_the_peak_is_that_of_the_operations() -> None:
    result = measure_nets(["A-small@2", "mlp-small@2"], ["eager"], "float32", (CPU, QUICK), lambda line: None)
    conv, own = result["rows"]
    assert conv["share_of_peak"] * result["peak_per_s"] * conv["us_per_iteration"] * 1e-6 == pytest.approx(
        conv["operations"]
    )
    assert own["operations"] is own["share_of_peak"] is None
    table = cells(result)[1]
    assert table[0][-2].endswith("%")
    assert table[1][-2] == "–"


@pytest.mark.usefixtures("known_peak")
def test_rows_say_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    lines: list[str] = []
    names = [f"{file}:build@5"]
    result = measure_nets(names, ["eager", "xla"], "float16", (CPU, QUICK), lines.append)
    (row,) = result["rows"]
    assert (row["name"], row["engine"], row["precision"], row["trials"]) == (names[0], "eager", "float16", 1)
    assert (row["method"], row["batch"]) == ("ep-symmetric", 5)
    assert row["us_per_iteration"] > 0
    assert row["speedup"] == pytest.approx(row["naive_us_per_iteration"] / row["us_per_iteration"])
    assert LOWEST["float16"] < row["cosine"] < 1.0
    assert "x naive" in lines[0]
    (refused,) = result["skipped"]
    assert "precision is float16" in refused["reason"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_half_precision_is_near_and_not_equal(form: str) -> None:
    one = subject("mlp-small@4")
    problem = one.problem(CPU)
    agreed = agreements(in_form(problem, one.estimator, form, "float16"), update_in(problem, one.estimator, "float32"))[
        ""
    ]
    assert "contrast" not in vars(problem.model)
    assert 0.999 < agreed.cosine < 1.0 - 1e-12
