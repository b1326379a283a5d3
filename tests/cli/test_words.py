"""Words on the way: what is said before a long run, after a run, and about arguments in the wrong place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.training_runs import call_main, few_images, write_idx, write_small_toml
from typer.testing import CliRunner

from eqprop.cli import load_commands


def _few(place: Path) -> Path:
    return write_idx(place / "data", few_images(40, 20))


def test_the_help_of_train_stands_in_groups_and_cuts_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    said = help_at_80("train")
    titles = re.findall(r"╭─ ([\w ]+?) ─", said)
    assert titles == ["Arguments", "Options", "Model", "Phases and estimator", "Optimizer", "Data", "Run"]
    command: Any = typer.main.get_command(load_commands(["train"]))
    for option in command.commands["train"].params if hasattr(command, "commands") else command.params:
        for flag in option.opts if not option.hidden else ():
            assert flag in said
    phases = said.partition("─ Phases and estimator ─")[2].partition("╰")[0]
    assert "--beta" in phases
    assert "--lr" not in phases
    assert "[default: runs/NAME-DATE-TIME]" in re.sub(r"[│\s]+", " ", said), "not taken for markup"
    assert "…" not in said


def help_at_80(command: str) -> str:
    words = [*([command] if command else []), "--help"]
    found = CliRunner().invoke(load_commands(), words, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert found.exit_code == 0, found.output
    return found.output


def test_train_ends_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_small_toml(tmp_path / "small.toml", 1)
    assert call_main(monkeypatch, "train", toml, "--data", _few(tmp_path), "--out", tmp_path / "run") == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"Next, write its page: eqprop report {tmp_path / 'run'}"
    assert call_main(monkeypatch, *last.partition("eqprop ")[2].split()) == 0


def test_every_command_ends_its_help_with_two_examples_that_exist() -> None:
    app: Any = typer.main.get_command(load_commands())
    every = {name: c for name, c in app.commands.items() if not hasattr(c, "commands")}
    every |= {f"reproduce {name}": c for name, c in app.commands["reproduce"].commands.items()}
    assert len(every) >= 15
    for name, one in every.items():
        first, *examples = one.epilog.split("\n\n")
        assert (first, len(examples)) == ("Examples:", 2), name
        known = {o for p in one.params for o in (*p.opts, *p.secondary_opts)}
        for example in examples:
            words = example.split(";")[0].split()
            assert " ".join(words).startswith(f"eqprop {name}"), example
            assert {w for w in words if w.startswith("--")} <= known, example


def test_train_shows_the_dozen_options_people_use_and_the_list_fits_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app: Any = typer.main.get_command(load_commands())
    params = app.commands["train"].params
    settings = [p for p in params if not p.hidden and p.name not in ("experiment", "help_all")]
    assert len(settings) <= 18
    assert sum(p.hidden for p in params) > 30, "the rest by --help-all"
    assert call_main(monkeypatch, "list") == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24
