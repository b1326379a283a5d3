"""What tutorial 7 shows as stored is what the stored metrics say, with the commit and the machine that made it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helpers.pages import ROOT

from docs.site.stored import COMMANDS, TARGET
from docs.site.zoo import page
from eqprop import papers
from eqprop.run.spec import Spec

STORED: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
ROWS = ("small", "small-twin")
RUNS: list[dict[str, Any]] = [
    json.loads((ROOT / f"results/cifar10/{row}.json").read_text(encoding="utf-8")) for row in ROWS
]
LINE = re.compile(r"epoch (\d+)/5: test ([\d.]+) %, train ([\d.]+) %")
NAMES = {"ep-symmetric": "small", "backprop": "twin"}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: next(iter(run["estimators"])))
def test_every_line_of_a_stored_training_is_a_stored_metric(run: dict[str, Any]) -> None:
    """The tutorial's trainings are those of seed 0, made again with the same bits."""
    ((estimator, own),) = run["estimators"].items()
    trial, session, spec = own["trials"][0], run["provenance"][0]["provenance"], Spec(**run["experiment"])
    output = STORED["outputs"][COMMANDS[NAMES[estimator]]]
    metrics = zip(trial["test_error"], trial["train_error"], strict=True)
    expected = [(str(n), f"{test:.2f}", f"{train:.2f}") for n, (test, train) in enumerate(metrics, start=1)]
    assert LINE.findall(output) == expected
    assert len(expected) == spec.optimizer.epochs
    assert trial["seed"] == spec.run.seed == 0
    assert session["processor"] in STORED["machine"]


def test_the_error_measured_again_is_that_of_the_training() -> None:
    last = next(run for run in RUNS if "ep-symmetric" in run["estimators"])["estimators"]["ep-symmetric"]["trials"][0]
    assert f"{last['test_error'][-1]:.2f} %" in STORED["outputs"][COMMANDS["evaluate"]]


def test_the_stored_runs_are_of_the_experiment_as_it_is_now() -> None:
    now = papers.find("cifar10-small")
    assert {next(iter(run["estimators"])) for run in RUNS} == set(NAMES)
    for run in RUNS:
        assert not Spec(**run["experiment"]).changes(now)
        assert run["data"]["set"] == "cifar10", "the published files, by checksum"


def test_the_zoo_has_every_experiment_and_the_stored_result() -> None:
    text = page()
    for run in RUNS:
        ((estimator, own),) = run["estimators"].items()
        shown = f"{own['test_error_mean']:.2f} ± {own['test_error_std']:.2f}"
        assert re.search(rf"\| `tuned` \| \S.*\| {shown} \| 3 \|", text), estimator
    for name in ("cifar10-laborieux-2021", "cifar10-scellier-2023"):
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert "| – | – | – | – |" in section, "not trained here: dashes"
