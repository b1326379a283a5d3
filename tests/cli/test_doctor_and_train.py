"""The doctor checks what `train` runs, with the command it prints, on ten own nets of which five do not learn."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ten_nets
from typer.testing import CliRunner

from eqprop import EP, SquaredError
from eqprop.cli import load_commands
from eqprop.cost import Problem
from eqprop.gdu.examination import Examination, march
from eqprop.gdu.rest import find_rest
from eqprop.run.description import read_description

FILE = Path(ten_nets.__file__)
CAUSES = {1: "K", 3: "eps", 5: "unbounded", 7: "targets", 9: "two-cycle"}
AT_ONCE = (2, 3)
"""A healthy and an ailing net; the others with -m slow."""


def asked(number: int, path: Path) -> tuple[int, dict[str, Any]]:
    words = ["doctor", f"{FILE}:net_{number}", "--lr", "0.02", "--json", str(path)]
    found = CliRunner().invoke(load_commands(["doctor"]), words)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, json.loads(path.read_text())


NETS = [n if n in AT_ONCE else pytest.param(n, marks=pytest.mark.slow) for n in range(ten_nets.NETS)]


@pytest.mark.parametrize("number", NETS)
def test_the_doctor_checks_what_train_runs(number: int, tmp_path: Path) -> None:
    code, found = asked(number, tmp_path / "found.json")
    assert (code, found["cause"]) == (int(number in CAUSES), CAUSES.get(number))
    program, *words = shlex.split(found["command"])
    assert program == "eqprop"
    out = tmp_path / "run"
    done = CliRunner().invoke(load_commands(["train"]), [*words, "--quiet", "--out", str(out)])
    assert done.exit_code in (0, 1), done.output  # 1: every trial diverged
    spec = read_description(out).spec.to_dict()
    assert {**spec, "run": found["spec"]["run"]} == found["spec"]
    (trained,) = json.loads((out / "result.json").read_text())["estimators"].values()
    if number not in CAUSES:
        assert trained["test_error_mean"] < 10.0


@pytest.mark.slow
def test_the_remedy_for_a_slow_state_is_verified(tmp_path: Path) -> None:
    _, found = asked(1, tmp_path / "found.json")
    assert found["change"]["K"] > 100
    assert found["verified"]


@pytest.mark.slow
def test_a_state_that_moves_slowly_is_not_told_to_have_lower_weights() -> None:
    model = ten_nets.net(1, ten_nets.FAULTS["moves too slowly"])
    x, labels = ten_nets.digits(8, 1)
    problem = Problem(model, SquaredError(), x, torch.eye(ten_nets.CLASSES)[labels])
    p = Examination(problem, EP(50, 10, 0.1), None, None, "python")
    found = find_rest(p, 1e-9)
    assert found.cause == "slow"
    assert found.change["eps"] > 3 * model.nudge_scale
    assert march(problem, p.free.state, 2000, 1e-7, found.change["eps"] / model.nudge_scale).rests(1e-7)
