"""Words on the way: what is said before a long run, after a run, and about arguments in the wrong place."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.training_runs import call_main, few_images, write_idx, write_small_toml
from typer.testing import CliRunner

from eqprop import EP, ContinualEP, HolomorphicEP
from eqprop.cli import COMMANDS, load_commands
from eqprop.models import Layered


def test_a_small_part_of_the_table_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("reproduce", "table1", "--out", tmp_path / "table", "--rows", "P-1h", "--trials", 1, "--epochs", 1)
    code = call_main(monkeypatch, *words, "--samples", 40, "--estimator", "ep", "--data", _few(tmp_path), "--quiet")
    assert code == 0, capsys.readouterr().err


def _few(place: Path) -> Path:
    return write_idx(place / "data", few_images(40, 20))


def test_training_a_cell_that_does_not_come_out_as_printed_names_the_preset_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = ("--epochs", 1, "--samples", 40, "--data", _few(tmp_path))
    assert call_main(monkeypatch, "train", "eb-1h", "--estimator", "ep", *brief, "--out", tmp_path / "a") == 0
    said = capsys.readouterr().err
    assert "EB-1h by ep does not reproduce as printed: the paper reports 2.06 %" in said
    assert "--preset tuned" in said
    for number, words in enumerate((("P-1h",), ("EB-1h", "--preset", "tuned"))):
        assert call_main(monkeypatch, "train", *words, *brief, "--out", tmp_path / str(number)) == 0
        assert "reproduce" not in capsys.readouterr().err


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


TYPERS_OWN = r"--help |--install-completion |--show-completion "


TABLE_2 = {
    "toy": (5000, 80, 0.01, 0.08),
    "EB-1h": (800, 80, 0.001, 0.08),
    "EB-2h": (5000, 150, 0.01, 0.08),
    "EB-3h": (30000, 200, 0.02, 0.08),
    "P-1h": (150, 10, 0.01, None),
    "P-2h": (1500, 40, 0.01, None),
    "P-3h": (5000, 40, 0.015, None),
    "P-conv": (5000, 10, 0.02, None),
}
"""T, K, beta and eps as printed."""


def test_the_experiments_of_table_2_can_be_looked_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main(monkeypatch, "list", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)["compared"]
    assert list(found) == list(TABLE_2)
    for name, spec in found.items():
        phases = spec["phases"]
        assert (phases["T"], phases["K"], phases["beta"], spec["model"].get("eps")) == TABLE_2[name]
    assert call_main(monkeypatch, "show", "toy") == 0
    said = capsys.readouterr().out
    assert [line for line in ("T = 5000  # gdu", "batch = 1  # gdu", "bias = true  # gdu") if line not in said] == []
    assert call_main(monkeypatch, "show", "P-3h", "--preset", "paper") == 0
    said = capsys.readouterr().out
    assert [line for line in ("T = 180  # paper", "bias = true  # paper") if line not in said] == []
    said = help_at_80("gdu")
    assert re.search(", *".join(TABLE_2), " ".join(said.split()))
    assert "default: 50" not in said, "training's T, which a comparison does not have"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_switch_takes_no_value_in_the_help(command: str) -> None:
    own = [line for line in help_at_80(command).splitlines() if not re.search(TYPERS_OWN, line)]
    assert not any("<bool>" in line for line in own)


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


def test_sizes_in_the_wrong_order_are_heard() -> None:
    with pytest.warns(UserWarning, match=r"sizes run from output to input.*\(10, 512, 784\)"):
        Layered((784, 512, 10), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Layered((10, 512, 784), seed=0)


@pytest.mark.parametrize("kind", [EP, ContinualEP, HolomorphicEP])
def test_the_third_number_is_beta(kind: type[EP]) -> None:
    assert kind(30, 10, 0.2) == kind(T=30, K=10, beta=0.2)
    with pytest.raises(ValueError, match=rf"expected a number.*{kind.__name__}\(30, 10, schedule='alternating'\)"):
        kind(30, 10, "alternating")  # type: ignore[arg-type]


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
