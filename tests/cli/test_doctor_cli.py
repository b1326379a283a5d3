"""`eqprop doctor` as a user runs it: a function in a file, a run folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.training_runs import SMALL
from typer.testing import CliRunner

from eqprop.cli import load_commands
from eqprop.run import train

MODELS = Path(__file__).resolve().parents[1] / "helpers" / "gdu_models.py"


def ask(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(load_commands(), ["doctor", *words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, " ".join(found.output.split())


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["symmetric"], 0, "No cause found"),
        (["symmetric", "--T", "2", "--estimator", "ep"], 1, "The free phase is too short.* Use --T "),
        (["symmetric", "--beta", "50"], 1, "The nudge is too strong.* Use --beta "),
        (["symmetric", "--lr", "1e-12"], 1, "The learning rate is too small.* Use --lr "),
        (["cycle"], 1, "The state goes back and forth"),
        (["explode"], 1, "The state grows without bound"),
    ],
)
def test_a_model_of_ones_own(words: list[str], code: int, text: str) -> None:
    got, output = ask(f"{MODELS}:{words[0]}", *words[1:])
    assert got == code, output
    assert re.search(text, output), output
    assert "EP(" not in output


def test_a_run_brings_its_own_settings_and_rates(tmp_path: Path) -> None:
    """Rates that no net learns with are the cause; the same net at its own rates is healthy."""
    found = {}
    for name, options in {"slow": {"rates": {"*": 1e-9}}, "healthy": {}}.items():
        train(SMALL.override(epochs=1, T=30, K=10, **options), tmp_path / name, samples=200, engine="eager")
        code, _ = ask(str(tmp_path / name), "--json", str(tmp_path / f"{name}.json"))
        found[name] = (code, json.loads((tmp_path / f"{name}.json").read_text()))
    assert [(code, answer["cause"]) for code, answer in found.values()] == [(1, "rate-small"), (0, None)], found
    answer = found["slow"][1]
    assert (answer["T"], answer["K"], answer["beta"], answer["samples"]) == (30, 10, 0.2, 20)
    assert answer["change"]["lr"] >= 1e-4
