"""Run folders and files written by version 0.1.0 still load, resume and report.

The folders beside this file were made by 0.1.0 itself from own.toml, on the first 200 and 100 images of MNIST:
`finished` by EP (symmetric, nudge inside) and BPTT, two trials; `stopped` by EP with random signs, interrupted in its
second epoch; whole.safetensors are the weights of the same run left to finish.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from helpers.training_runs import few_images, finish, weights, write_idx
from safetensors.torch import load_file
from torch.testing import assert_close

from eqprop.experiments.io import find_experiment
from eqprop.report.page import write_report
from eqprop.run import evaluate, load, resume, train

OLD = Path(__file__).parent / "version-0.1.0"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Copies that may be written to."""
    return Path(shutil.copytree(OLD, tmp_path / "old"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_idx(tmp_path / "data", few_images(200, 100))


def test_a_file_of_0_1_0_is_the_same_experiment() -> None:
    found = find_experiment(OLD / "own.toml")
    assert (found.estimator, found.nudge_site, found.T, found.beta) == ("ep-symmetric", "inside", 8, 0.2)


def test_a_finished_run_is_evaluated_to_the_errors_it_recorded(runs: Path, data: Path) -> None:
    found = evaluate(runs / "finished", data=str(data))
    lines = [json.loads(line) for line in (runs / "finished" / "metrics.jsonl").read_text().splitlines()]
    assert list(found) == ["ep-symmetric", "bptt"]
    for name, method in (("ep-symmetric", "ep"), ("bptt", "bptt")):
        last = [x["test_error"] for x in lines if x["method"] == method and x["epoch"] == 2]
        assert [trial["test_error"] for trial in found[name]] == pytest.approx(last, abs=1.01)
    trained = load(runs / "finished", "bptt", trial=1)
    assert (trained.epoch, trained.experiment.nudge_site) == (2, "inside")


def test_a_stopped_run_resumes_to_the_weights_of_an_undisturbed_one(runs: Path, data: Path) -> None:
    before = weights(runs / "stopped", "ep")
    resume(runs / "stopped", data=str(data))
    after, whole = weights(runs / "stopped", "ep"), load_file(OLD / "whole.safetensors")
    assert after.keys() == whole.keys()
    for name in whole:
        # The bits depend on the processor; training moves every weight far more than that.
        assert_close(after[name], whole[name], rtol=1e-4, atol=1e-6)
    assert float((before["0.W01"] - whole["0.W01"]).abs().max()) > 1e-3


def test_a_report_shows_them_under_their_present_names(runs: Path, tmp_path: Path) -> None:
    found = list(csv.DictReader(io.StringIO(write_report(runs, tmp_path / "page").csv.read_text())))
    assert {(r["name"], r["estimator"]) for r in found} == {
        ("own", "ep-symmetric"),
        ("own", "bptt"),
        ("own", "ep-random-sign"),
    }


def test_the_options_of_0_1_0_mean_what_they_meant(tmp_path: Path, data: Path) -> None:
    words = ("train", OLD / "own.toml", "--data", data, "--epochs", 1, "--threads", 1, "--json", "-")
    done = finish(*words, "--method", "ep,bptt", "--estimator", "holomorphic", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["estimators"]) == ["ep-holomorphic", "bptt"]
    result = train(OLD / "own.toml", tmp_path / "library", data=str(data), epochs=1, methods="bptt")
    assert list(result.summary["estimators"]) == ["bptt"]
