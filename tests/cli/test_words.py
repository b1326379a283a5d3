"""Words on the way: what is said before a long run, after a run, and about arguments in the wrong place."""

from __future__ import annotations

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


def test_the_whole_table_on_a_cpu_says_how_long_it_takes_and_waits_for_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call_main(monkeypatch, "reproduce", "table1", "--out", tmp_path / "table", "--rows", "P-1h,P-2h", "--quiet")
    said = capsys.readouterr().err
    assert code == 2
    assert "hours on a CPU" in said
    assert "--yes" in said
    assert not (tmp_path / "table" / "paper").exists()


def test_a_small_part_of_the_table_begins_without_asking(
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
