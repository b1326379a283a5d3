"""Your own FILE.py:FUNCTION in `gdu`, `train`, `tune`, `resume` and `evaluate`: one contract. Models by function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_runs import assert_same_bits, call_main
from torch import Tensor

import eqprop
from eqprop.run import evaluate, load, resume, train
from eqprop.run.own import OwnFunction, load_own

FILE = """
import torch
import eqprop

def energy(x, s, theta):
    s0, s1 = s
    r0, r1 = s0.clamp(0, 1), s1.clamp(0, 1)
    squares = (s0**2).sum(-1) / 2 + (s1**2).sum(-1) / 2
    return squares - ((r1 @ theta["W"] + theta["b"]) * r0).sum(-1) - ((x @ theta["V"]) * r1).sum(-1)

def model(seed):
    source = torch.Generator().manual_seed(seed)
    theta = {n: torch.rand(*k, generator=source) - 0.3 for n, k in {"W": (6, 3), "V": (8, 6), "b": (3,)}.items()}
    return eqprop.from_energy(energy, theta, layers=(3, 6), eps=0.5, project=lambda v: v.clamp(0, 1))

def quartic(s, y):
    return ((s[0] - y) ** 4).sum(-1) / 4 + ((s[0] - y) ** 2).sum(-1) / 2

def samples(n, seed):
    source = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=source)
    x = torch.rand(n, 8, generator=source)
    x[torch.arange(n), y] += 1
    return x, y

def alone(seed):
    return model(seed)

def seedless():
    theta = {n: torch.rand(*k) - 0.3 for n, k in {"W": (6, 3), "V": (8, 6), "b": (3,)}.items()}
    return eqprop.from_energy(energy, theta, layers=(3, 6), eps=0.5, project=lambda v: v.clamp(0, 1))

def with_cost(seed=0):
    return model(seed), quartic

def with_samples():
    return (model(0), eqprop.SquaredError(), *samples(40, 0))

def build(seed):
    return model(seed), quartic, (*samples(60, 0), *samples(30, 1))

def wrong():
    return 3

def two(a, b):
    return model(0)

def breaks(seed):
    raise KeyError("W")

def summed(x, s, theta):
    return energy(x, s, theta).sum()

def bad_energy(seed):
    made = model(seed)
    return eqprop.from_energy(summed, dict(made.named_parameters()), layers=(3, 6), eps=0.5)
"""
QUICK = ("--epochs", 2, "--T", 10, "--K", 5, "--lr", 0.02, "--batch", 10, "--quiet")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    x, y = np.random.default_rng(0).random((30, 8)), np.arange(30) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y, x_test=x, y_test=y)
    return tmp_path


FUNCTIONS = ("alone", "seedless", "with_cost", "with_samples", "build")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_function_serves_gdu_and_train(
    name: str, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, gives_data = f"{mine}/mine.py:{name}", name in ("with_samples", "build")
    data = () if gives_data else ("--data", mine / "mine.npz")
    checked = call_main(
        monkeypatch, "gdu", target, *data, "--T", 60, "--K", 5, "--batch", 6, "--json", mine / "gdu.json"
    )
    assert checked == 0, capsys.readouterr().err
    assert json.loads((mine / "gdu.json").read_text())["samples"] == 6
    code = call_main(monkeypatch, "train", target, *data, "--out", mine / "run", *QUICK)
    assert code == 0, capsys.readouterr().err
    held = json.loads((mine / "run" / "experiment.json").read_text())["experiment"]
    assert held["cost"]["kind"] == ("own" if name in ("with_cost", "build") else "squared-error")
    again = call_main(monkeypatch, "evaluate", mine / "run", "--model", target, *data)
    assert again == 0, capsys.readouterr().err


def test_a_run_of_your_own_network_is_examined_with_its_function(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run points to the doctor, and the command it gives is the one that works."""
    target = f"{mine}/mine.py:build"
    words = ("--epochs", 2, "--T", 1, "--K", 5, "--lr", 0.02, "--batch", 10)  # one step, so far from rest
    assert call_main(monkeypatch, "train", target, "--out", mine / "run", *words) == 0
    printed = capsys.readouterr()
    assert "paper" not in printed.out, "there is no paper's result to stand beside"
    command = printed.err.partition("Find out why: eqprop ")[2].splitlines()[0].split()
    assert command[:2] == ["doctor", str(mine / "run")]
    assert call_main(monkeypatch, *command) == 1, capsys.readouterr().err
    assert "The free phase is too short" in capsys.readouterr().out
    given = ("--model", target, "--T", 60, "--json", mine / "gdu.json")
    assert call_main(monkeypatch, "gdu", mine / "run", *given) == 0, capsys.readouterr().err
    assert json.loads((mine / "gdu.json").read_text())["trained"]["epochs"] == 2
    assert call_main(monkeypatch, "gdu", mine / "run") == 2
    assert f"--model {target}" in capsys.readouterr().err


def test_the_own_cost_is_what_is_trained(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eqprop.run.own import load_own

    own = load_own(f"{mine}/mine.py:build")
    options: dict[str, Any] = {"epochs": 1, "T": 10, "K": 5, "rates": {"*": 0.02}, "batch": 60}
    train(own, mine / "own", **options, optimizer="SGD")
    built, theta = own.build(0), load(mine / "own", model=own).model
    x, y = built.data[0], torch.eye(3)[built.data[1]]
    eqprop.EP(10, 5, beta=0.1, nudging="symmetric").backward(built.model, built.cost or eqprop.SquaredError(), x, y)
    for (name, before), after in zip(built.model.named_parameters(), theta.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(after, before - 0.02 * before.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_run_of_your_own_resumes_with_the_function_alone(mine: Path) -> None:
    target = f"{mine}/mine.py:build"
    options: dict[str, Any] = {"epochs": 2, "T": 8, "K": 4, "batch": 10, "estimators": "ep,bptt"}
    train(target, mine / "whole", **options)
    train(target, mine / "part", **options, only=("ep",))
    with pytest.raises(ValueError, match=r"own network .*mine.py:build|trained on arrays"):
        resume(mine / "part")
    resume(mine / "part", model=OwnFunction(_function(mine, "build"), target))
    assert_same_bits(mine / "whole", mine / "part", ("ep", "bptt"))
    assert evaluate(mine / "part", model=_function(mine, "build"))["bptt"][0]["epoch"] == 2


def _function(mine: Path, name: str) -> Any:
    from eqprop.run.own import load_function

    return load_function(f"{mine}/mine.py:{name}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong", "wrong returned int as model; expected an eqprop.Dynamics"),
        ("two", "two needs a, b; expected a function of a seed, or of nothing"),
        ("breaks", r"mine.py, line \d+: KeyError: 'W'"),
        ("bad_energy", "The energy summed returned shape"),
    ],
)
@pytest.mark.parametrize("command", ["gdu", "train"])
def test_errors_name_your_function(
    command: str,
    name: str,
    words: str,
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    code = call_main(monkeypatch, command, f"{mine}/mine.py:{name}", "--data", mine / "mine.npz", "--out", mine / "o")
    said = capsys.readouterr().err
    assert code == 2
    assert re.search(words, said), said
    assert "_Primitive" not in said


@pytest.mark.slow
def test_tune_takes_the_same_function(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{mine}/mine.py:build"
    code = call_main(monkeypatch, "tune", target, "--out", mine / "tuned", "--budget", 2)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"eqprop train {mine}/tuned/tuned.toml --model {target}" in said.out.replace("\n", "")


def linear(x: Tensor, s: eqprop.State, theta: Mapping[str, Tensor]) -> Tensor:
    return (s[0] * (x @ theta["W"])).sum(-1)


THETA = {"W": torch.tensor([[2.0, -2.0]])}


def test_models_from_functions_have_a_name_a_start_and_a_projection() -> None:
    def up(v: Tensor) -> Tensor:
        return v.clamp(0, 1)

    x = torch.tensor([[1.0]])
    for made in (
        eqprop.from_primitive(linear, THETA, (2,), project=up, start=lambda x: x.expand(-1, 2)),
        eqprop.from_energy(
            lambda x, s, t: s[0].square().sum(-1) / 2 - linear(x, s, t), THETA, (2,), 1.0, project=up,
            start=lambda x: (x.expand(-1, 2),), name="linear",
        ),
        eqprop.from_transition(
            lambda x, s, t: (x @ t["W"],), THETA, (2,), project=up, start=lambda x: (x.expand(-1, 2),), name="linear"
        ),
    ):  # fmt: skip
        assert made.title == "linear"
        assert torch.equal(made.init_state(x)[0], torch.ones(1, 2))
        assert torch.equal(eqprop.relax(made, x, 3).state[0], torch.tensor([[1.0, 0.0]]))
        nudge = eqprop.Nudge(eqprop.SquaredError(), torch.tensor([[5.0, 5.0]]), 0.5)
        nudged = eqprop.relax(made, x, 3, nudge=nudge).state[0]
        assert float(nudged.max()) <= 1.0, "the nudge is projected as well"
        assert torch.equal(made(x), torch.tensor([[1.0, 0.0]]))


def test_a_model_is_called_for_its_output_and_a_cost_without_theta() -> None:
    model = eqprop.models.Layered((2, 5, 3), seed=0)
    x, y = torch.rand(4, 3), torch.rand(4, 2)
    settled = eqprop.relax(model, x, 1000)
    torch.testing.assert_close(model(x), settled.state[0], rtol=0, atol=1e-6)
    cost = eqprop.SquaredError()
    assert torch.equal(cost(settled.state, y), cost(settled.state, y, {}))
    parametric = eqprop.FunctionCost(lambda s, y, theta: theta["W01"].sum() + s[0].sum(-1), parametric=True)
    with pytest.raises(ValueError, match=r"expected cost\(s, y, theta\)"):
        parametric(settled.state, y)


def test_a_model_that_is_no_text_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"The model is \[\]; expected FILE\.py:FUNCTION"):
        load_own([])  # type: ignore[arg-type]
