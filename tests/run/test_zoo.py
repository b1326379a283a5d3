"""Nets that come trained are what their numbers say; others are trained once, by one call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.training_runs import few_images

import eqprop
from eqprop import zoo


@pytest.mark.slow
def test_a_shipped_net_has_the_error_it_states() -> None:
    stated = zoo.numbers("P-1h")["estimators"]["ep"]["test_error_mean"]
    images = eqprop.data.mnist()
    wrong = eqprop.predict(zoo.load("P-1h"), images.test_x) != images.test_y
    assert 100 * float(wrong.float().mean()) == pytest.approx(stated, abs=0.02)


def test_a_shipped_net_is_trained_with_its_papers_settings() -> None:
    net, images = zoo.load("P-1h"), eqprop.data.mnist()
    stated = zoo.numbers("P-1h")["estimators"]["ep"]
    assert int((eqprop.predict(net, images.test_x[:200]) != images.test_y[:200]).sum()) < 10
    assert net.epoch == len(stated["trials"][0]["test_error"]) == net.spec.optimizer.epochs
    assert net.spec.changes(eqprop.papers.find("P-1h")) == []


@pytest.mark.parametrize("place", sorted(p.parent for p in zoo.SHIPPED.glob("*/result.json")), ids=lambda p: p.name)
def test_a_shipped_net_names_its_machine_and_a_clean_commit_and_no_path(place: Path) -> None:
    (session,) = json.loads((place / "environment.json").read_text())["sessions"]
    made = session["provenance"]
    assert len(made["commit"]) == 40, "not dirty"
    assert made["processor"]
    assert made["torch"]
    assert made["command"].startswith(f"eqprop train {place.name}")
    assert not any("/" in value for value in made.values() if isinstance(value, str))


def test_another_net_is_named_and_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQPROP_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no weights of EB-1h yet; it has P-1h.*zoo.build\('EB-1h'\)"):
        zoo.load("EB-1h")
    with pytest.raises(ValueError, match="Did you mean 'P-1h'"):
        zoo.load("P1h")
    small = {"T": 2, "K": 1, "epochs": 1, "threads": 1}
    built = zoo.build("EB-1h", data=few_images(40, 20), **small)
    assert zoo.names() == ["EB-1h", "P-1h"]
    assert zoo.load("EB-1h").spec.preset == "tuned"
    assert zoo.build("EB-1h", data=few_images(40, 20)).summary == built.summary, "it is not trained twice"


def test_results_become_a_frame(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    result = eqprop.train("P-1h", tmp_path / "run", data=few_images(40, 20), epochs=2, trials=2, T=2, K=1, threads=1)
    frame = result.to_frame()
    assert frame.groupby("epoch").size().to_dict() == {1: 2, 2: 2}
    last = frame[frame.epoch == 2].test_error.mean()
    assert last == pytest.approx(result.test_error("ep"))


def test_help_waits_for_neither_torch_nor_figures() -> None:
    code = (
        "import sys\nfrom eqprop.cli import main\nsys.argv = ['eqprop', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'numpy', 'jax', 'matplotlib') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip().endswith("[]")
