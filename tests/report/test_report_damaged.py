"""A report of many runs, some of them damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.training_runs import SMALL, call_main, few_images

from eqprop.report.page import write_report
from eqprop.run import train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    train(SMALL, folder / "run", data=few_images(40, 20), trials=2, epochs=2, T=2, K=1, threads=1)
    return folder / "run"


def _cut_metrics(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[2:]))


def _without_architecture(run: Path) -> None:
    path = run / "experiment.json"
    content = json.loads(path.read_text())
    content["experiment"]["architecture"] = None
    path.write_text(json.dumps(content))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "metrics lost": _cut_metrics,
    "metrics damaged": lambda run: (run / "metrics.jsonl").write_text("{}\n"),
    "experiment damaged": lambda run: (run / "experiment.json").write_text("{"),
    "no architecture": _without_architecture,
    "environment damaged": lambda run: (run / "environment.json").write_text('{"sessions": [1]}'),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_one_damaged_run_is_left_out_with_a_sentence(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    runs = tmp_path / "runs"
    good, bad = (Path(shutil.copytree(made, runs / name)) for name in ("good", "bad"))
    DAMAGE[what](bad)
    assert call_main(monkeypatch, "report", runs) == 0
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert str(bad) in sentence
    assert str(good) not in sentence
    page = (runs / "report.html").read_text()
    assert "1 run." in page
    assert "Left out, as they are damaged" in page


def test_a_page_is_not_written_from_half_of_the_metrics(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run"))
    _cut_metrics(run)
    with pytest.raises(ValueError, match="continues with epoch 2 where 1 is expected.*Restore it"):
        write_report(run)


def test_a_run_shared_without_its_weights_is_reported(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run"))
    shutil.rmtree(run / "ep")
    assert write_report(run).left_out == ()
