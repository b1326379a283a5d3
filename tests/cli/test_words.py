"""Words on the way: what is said before a long run, after a run, and about arguments in the wrong place."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from helpers.training_runs import call_main, few_images, write_idx, write_small_toml

from eqprop import EP, ContinualEP, HolomorphicEP
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
def test_a_number_in_place_of_the_schedule_is_explained(kind: type[EP]) -> None:
    with pytest.raises(
        ValueError, match=rf"third argument, which is the schedule.*{kind.__name__}\(30, 10, beta=0.1\)"
    ):
        kind(30, 10, 0.1)  # type: ignore[arg-type]
    assert EP(30, 10, beta=0.1) == EP(T=30, K=10, beta=0.1)
