"""`resume` with more epochs: as if they had been asked for at first, or refused; folder and page name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, call_main, few_images, metrics, weights, write_idx

from eqprop.data import Images
from eqprop.report.page import write_report
from eqprop.run import Watch, resume, train
from eqprop.run.checkpoint import read_checkpoint
from eqprop.run.description import read_description
from eqprop.run.loop import Interruption, Stopped
from eqprop.run.spec import Spec

EVERYTHING = SMALL.override(
    optimizer_options={"momentum": 0.9},
    warmup=2.5,
    decay="cosine",
    decay_epochs=3,
    weight_decay=1e-3,
    average=0.9,
    start="persistent",
)


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


class Said(Watch):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def without_measured(folder: Path) -> list[dict[str, Any]]:
    """The metrics without the train error measured after what was the last epoch, which a longer run does not measure.

    Sorted, as a run that is lengthened trains its estimators in turn twice.
    """
    lines = [{k: v for k, v in line.items() if k != "train_error_measured"} for line in metrics(folder)]
    return sorted(lines, key=lambda line: (str(line["estimator"]), str(line["trial"]), int(str(line["epoch"]))))


def assert_as_if_asked_at_first(longer: Path, whole: Path) -> None:
    assert without_measured(longer) == without_measured(whole)
    legs = [path.parent.name for path in whole.glob("*/checkpoint.safetensors")]
    assert legs
    for leg in legs:
        for name, value in weights(whole, leg).items():
            assert torch.equal(weights(longer, leg)[name], value), f"{leg} {name}"
        one, other = read_checkpoint(longer / leg), read_checkpoint(whole / leg)
        assert (one.position, one.finished) == (other.position, True)
        assert all(torch.equal(one.average[name], other.average[name]) for name in other.average)


@pytest.mark.parametrize(
    ("experiment", "options"),
    [
        (SMALL, {"estimators": "ep,bptt", "trials": 2}),
        (SMALL, {"estimators": "ep-random-sign", "engine": "eager"}),
        (EVERYTHING, {"trials": 2, "stacked": False}),
    ],
    ids=["constant", "random-sign", "everything"],
)
def test_it_ends_as_if_the_epochs_had_been_asked_for_at_first(
    tmp_path: Path, images: Images, experiment: Spec, options: dict[str, Any]
) -> None:
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    train(experiment.override(epochs=5), whole, data=images, **options)
    train(experiment.override(epochs=2), longer, data=images, **options)
    for epochs in (3, 3, 5):
        result = resume(longer, data=images, epochs=epochs)
    assert_as_if_asked_at_first(longer, whole)
    for summary in result.summary["estimators"].values():
        assert all(len(trial["test_error"]) == 5 for trial in summary["trials"])
    assert resume(longer, data=images).summary == result.summary


def test_a_run_stopped_on_its_way_is_lengthened_too(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(SMALL.override(epochs=4), tmp_path / "whole", data=images)

    class Asking(Watch):
        def progress(self, progress: Any) -> None:
            monkeypatch.setattr(Interruption, "requested", property(lambda self: True))

    with pytest.raises(Stopped):
        train(SMALL.override(epochs=2), tmp_path / "cut", data=images, watch=Asking())
    with pytest.raises(Stopped):
        resume(tmp_path / "cut", data=images, epochs=4, watch=Asking())
    monkeypatch.undo()
    # The next resume need not repeat the number.
    resume(tmp_path / "cut", data=images)
    assert_as_if_asked_at_first(tmp_path / "cut", tmp_path / "whole")


def test_folder_and_page_name_the_earlier_numbers(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = write_idx(tmp_path / "data", images), tmp_path / "run"
    train("P-1h", run, data=str(data), epochs=1)
    assert call_main(monkeypatch, "resume", run, "--epochs", "2", "--quiet") == 0
    described = read_description(run)
    assert (described.spec.optimizer.epochs, described.earlier_epochs) == (2, (1,))
    assert any(change.startswith("epochs 2 ") for change in described.changes)
    assert "epochs raised on resume from 1" in write_report(run, tmp_path / "page").page.read_text()


def test_rates_that_fall_over_all_epochs_are_refused(tmp_path: Path, images: Images) -> None:
    run = tmp_path / "run"
    train(SMALL.override(decay="cosine", epochs=1), run, data=images)
    before = (run / "experiment.json").read_bytes()
    with pytest.raises(ValueError, match=r"rates fall \(cosine\) over the 1 epochs .* --decay-epochs"):
        resume(run, data=images, epochs=2)
    with pytest.raises(ValueError, match="epochs is 0"):
        resume(run, data=images, epochs=0)
    assert (run / "experiment.json").read_bytes() == before
    train(SMALL, tmp_path / "three", data=images)
    with pytest.raises(ValueError, match="epochs is 2; the run is to have 3, and they can only be raised"):
        resume(tmp_path / "three", data=images, epochs=2)


@pytest.mark.parametrize("epochs", [2, 6])
def test_what_ended_early_stays_ended(tmp_path: Path, images: Images, epochs: int) -> None:
    """Rates of almost nothing: the error does not fall after the first epoch, also where the second was the last."""
    still = SMALL.override(rates={"*": 1e-12}, epochs=epochs)
    train(still, tmp_path / "run", data=images, patience=1)
    said = Said()
    resume(tmp_path / "run", data=images, epochs=9, watch=said)
    assert read_checkpoint(tmp_path / "run" / "ep").position.epoch == 2
    assert said.notes[0] == "ep ended early after epoch 2, as it would have in a longer run."
