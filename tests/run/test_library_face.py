"""The library's face: resume, evaluate, report and predict beside train; watches that measure, stop and keep."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_runs import SMALL, assert_same_bits, few_images
from PIL import Image

import eqprop
from eqprop.run.checkpoint import read_checkpoint
from eqprop.run.log import read_metrics
from eqprop.run.watch import Several


def _norm(network: eqprop.Dynamics) -> float:
    return float(network.W01.detach().norm())


class Norms(eqprop.Watch):
    """Measures the size of a weight, and ends at an epoch."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.said, self.seen = last, [], 0

    def measure(self, network: eqprop.Dynamics, cost: eqprop.Cost, line: Mapping[str, Any]) -> Mapping[str, float]:
        self.seen += 1
        return {"norm": _norm(network)}

    def stop(self, lines: Any) -> str | None:
        return "enough" if self.last is not None and lines[-1]["epoch"] >= self.last else None

    def warn(self, message: str) -> None:
        self.said.append(message)


def test_the_names_beside_train(tmp_path: Path) -> None:
    run = tmp_path / "run"
    eqprop.train(SMALL, run, data=few_images(), epochs=1, estimators="ep,bptt", only=("ep",))
    result = eqprop.resume(run, data=few_images())
    assert eqprop.evaluate(run, data=few_images())["bptt"][0]["test_error"] == result.test_error("bptt")
    written = eqprop.report(run)
    assert written.page.is_file()
    assert eqprop.report(str(run), tmp_path / "page").page == tmp_path / "page" / "report.html"


@pytest.mark.parametrize("trials", [1, 2])
def test_a_watch_is_handed_the_network_and_its_metrics_are_kept(trials: int, tmp_path: Path) -> None:
    watch = Norms()
    eqprop.train(SMALL, tmp_path / "run", data=few_images(), epochs=2, trials=trials, watch=watch)
    lines = read_metrics(tmp_path / "run")
    assert watch.seen == len(lines) == 2 * trials
    for trial in range(trials):
        last = [line for line in lines if line["trial"] == trial][-1]
        assert last["norm"] == pytest.approx(_norm(eqprop.load(tmp_path / "run", trial=trial).model))


def test_a_run_ended_early_is_finished(tmp_path: Path) -> None:
    watch = Norms(last=2)
    eqprop.train(SMALL, tmp_path / "run", data=few_images(), epochs=5, watch=watch)
    assert [line["epoch"] for line in read_metrics(tmp_path / "run")] == [1, 2]
    assert any("ends early after epoch 2: enough" in said for said in watch.said)
    eqprop.resume(tmp_path / "run", data=few_images())
    assert len(read_metrics(tmp_path / "run")) == 2
    eqprop.train(SMALL, tmp_path / "short", data=few_images(), epochs=2)
    one, other = (eqprop.load(tmp_path / name).model.W01 for name in ("run", "short"))
    assert torch.equal(one, other)


def line(epoch: int, error: float | None, trial: int = 0) -> dict[str, Any]:
    return {"epoch": epoch, "trial": trial, "test_error": error}


def test_early_stopping_waits_for_its_patience() -> None:
    falling = [line(n, 10.0 - n) for n in range(1, 6)]
    assert eqprop.EarlyStopping(2).stop(falling) is None
    stuck = [*falling, line(6, 5.5), line(7, 5.0)]
    assert "since epoch 5" in str(eqprop.EarlyStopping(2).stop(stuck))
    assert eqprop.EarlyStopping(3).stop(stuck) is None
    assert eqprop.EarlyStopping(1).stop([line(1, None)]) is None


def test_patience_best_and_every_are_settings(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # A rate of zero: the first epoch is the best, and nothing falls after it.
    eqprop.train(
        SMALL, run, data=few_images(), epochs=6, rates={"*": 0.0}, optimizer="Adam", patience=2,
        keep_best=True, keep_every=2,
    )  # fmt: skip
    assert [entry["epoch"] for entry in read_metrics(run)] == [1, 2, 3]
    assert eqprop.load(run, at="best").epoch <= 3
    assert eqprop.load(run, at=2).epoch == 2
    with pytest.raises(FileNotFoundError, match="it holds best, epoch-0002"):
        eqprop.load(run, at=4)


def test_keeping_more_changes_no_bit(tmp_path: Path) -> None:
    eqprop.train(SMALL, tmp_path / "bare", data=few_images(), epochs=2)
    eqprop.train(SMALL, tmp_path / "kept", data=few_images(), epochs=2, keep_best=True, keep_every=1)
    assert_same_bits(tmp_path / "bare", tmp_path / "kept")
    last = eqprop.load(tmp_path / "kept", at=2).model.W01
    assert torch.equal(last, eqprop.load(tmp_path / "kept").model.W01)


class Torn(eqprop.Watch):
    """Writes to a pipe that nobody reads any more."""

    def epoch(self, lines: Any, progress: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_closed_pipe_ends_neither_the_run_nor_what_others_measure_and_stop(tmp_path: Path) -> None:
    heard: list[int] = []

    class Heard(Norms):
        def epoch(self, lines: Any, progress: Any) -> None:
            heard.append(lines[0]["epoch"])

    eqprop.train(SMALL, tmp_path / "run", data=few_images(), epochs=5, watch=Several(Torn(), Heard(3)))
    lines = read_metrics(tmp_path / "run")
    assert [entry["epoch"] for entry in lines] == heard == [1, 2, 3]
    assert all("norm" in entry for entry in lines)


def test_predict_takes_a_folder_one_sample_bytes_and_a_picture(tmp_path: Path) -> None:
    images = few_images()
    eqprop.train(SMALL, tmp_path / "run", data=images, epochs=3)
    x = images.test_x[:4]
    classes = eqprop.predict(tmp_path / "run", x)
    assert classes.shape == (4,)
    as_bytes = (x * 255).round().to(torch.uint8).view(-1, 28, 28).numpy()
    assert torch.equal(eqprop.predict(str(tmp_path / "run"), as_bytes), classes)
    assert torch.equal(eqprop.predict(tmp_path / "run", as_bytes[0]), classes[:1])
    for name, pixels in (("light.png", as_bytes[0]), ("dark.png", 255 - as_bytes[0])):
        Image.fromarray(np.asarray(pixels)).save(tmp_path / name)
        assert torch.equal(eqprop.predict(tmp_path / "run", tmp_path / name), classes[:1])
    (tmp_path / "no.png").write_text("no picture")
    with pytest.raises(ValueError, match="is not a picture"):
        eqprop.predict(tmp_path / "run", tmp_path / "no.png")
    with pytest.raises(ValueError, match="784 numbers per sample"):
        eqprop.predict(tmp_path / "run", np.zeros((3, 3)))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["name"] == "small"


def test_only_names_estimators_of_the_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": few_images(), "epochs": 1, "estimators": "ep,ep-symmetric"}
    with pytest.raises(ValueError, match="Unknown estimator 'bptt'; expected one of ep, ep-symmetric"):
        eqprop.train(SMALL, tmp_path / "none", only=("bptt",), **options)
    assert not (tmp_path / "none").exists()
    eqprop.train(SMALL, tmp_path / "run", only="ep-symmetric", **options)
    assert {entry["estimator"] for entry in read_metrics(tmp_path / "run")} == {"ep-symmetric"}
    with pytest.raises(ValueError, match="Unknown estimator 'epp'"):
        eqprop.resume(tmp_path / "run", data=few_images(), only=["epp"])


def test_evaluate_on_other_data_takes_its_whole_test_set(tmp_path: Path) -> None:
    images, other = few_images(), replace(few_images(80, 60), name="other")
    result = eqprop.train(SMALL, tmp_path / "run", data=images, epochs=1, validation=100, samples=300)
    error = eqprop.evaluate(tmp_path / "run", data=images)["ep"][0]["test_error"]
    assert error == result.test_error("ep"), "on its own data: the samples that were held out"
    wrong = eqprop.predict(tmp_path / "run", other.test_x) != other.test_y
    found = eqprop.evaluate(tmp_path / "run", data=other)["ep"][0]["test_error"]
    assert found == pytest.approx(100.0 * float(wrong.double().mean()))


@pytest.mark.parametrize("name", ["precision", "test_error_top5", "loss"])
def test_a_metric_of_ones_own_does_not_take_the_name_of_another(name: str, tmp_path: Path) -> None:
    class Own(eqprop.Watch):
        def measure(self, network: Any, cost: Any, line: Any) -> Mapping[str, float]:
            return {name: 0.5}

    with pytest.raises(ValueError, match=f"The watch measures '{name}'.* Rename it"):
        eqprop.train(SMALL, tmp_path / "run", data=few_images(100, 50), epochs=2, watch=Own())
    assert eqprop.resume(tmp_path / "run", data=few_images(100, 50)).test_error("ep") is not None


def test_a_watch_measures_the_averaged_weights_that_are_evaluated_and_loaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": few_images(), "epochs": 2, "average": 0.99}
    eqprop.train(SMALL, tmp_path / "run", watch=Norms(), **options)
    expected = _norm(eqprop.load(tmp_path / "run").model)
    assert read_metrics(tmp_path / "run")[-1]["norm"] == pytest.approx(expected, rel=1e-12)
    eqprop.train(SMALL, tmp_path / "bare", **options)
    saved = [read_checkpoint(tmp_path / run / "ep").weights for run in ("run", "bare")]
    assert all(torch.equal(saved[0][name], weight) for name, weight in saved[1].items())
