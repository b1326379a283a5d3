"""The run's own clock: training and evaluation, without compiling, summed over pieces."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.training_runs import SMALL, few_images
from torch import Tensor

from eqprop.engines.eager import EagerRunner
from eqprop.run import resume, train
from eqprop.run.evaluate import Measure
from eqprop.run.log import read_metrics
from eqprop.run.loop import Stopped
from eqprop.run.watch import Progress, Watch

ITERATION, BATCH, COMPILING = 1.0, 10.0, 1000.0


class Clock:
    """Stands still but for what is done: an iteration, a batch of an evaluation, and compiling at chosen calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: int = 1, answers: int = 1) -> None:
        self.now, self.slow, self.calls = 0.0, {"run": run, "answers": answers}, {"run": 0, "answers": 0}
        original_run, original_answers = EagerRunner.run, Measure._answers

        def slower_run(runner: EagerRunner, order: Tensor) -> None:
            self.spend("run", ITERATION * len(order))
            original_run(runner, order)

        def slower_answers(measure: Measure, *given: Any) -> Tensor:
            self.spend("answers", BATCH)
            return original_answers(measure, *given)

        monkeypatch.setattr(EagerRunner, "run", slower_run)
        monkeypatch.setattr(Measure, "_answers", slower_answers)
        monkeypatch.setattr("eqprop.run.trainer.time", self)

    def spend(self, what: str, seconds: float) -> None:
        self.calls[what] += 1
        self.now += seconds + COMPILING * (self.calls[what] == self.slow[what])

    def perf_counter(self) -> float:
        return self.now


class StopsIn(Watch):
    """Stops as on Ctrl-C at a chunk."""

    def __init__(self, chunk: int) -> None:
        self.left = chunk

    def progress(self, progress: Progress) -> None:
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGINT)


OPTIONS: dict[str, Any] = {"engine": "eager", "epochs": 2, "threads": 1}
WHOLE = 10 * ITERATION + 3 * BATCH
"""An epoch of 200 samples, tested on 2,500."""


@pytest.mark.parametrize(
    ("run", "answers", "counted"),
    [(1, 1, 0), (1, 3, 0), (2, 1, 1), (1, 2, 1), (3, 4, 2)],
    ids=["first", "smaller last batch", "second chunk", "batch in between", "second evaluation"],
)
def test_compiling_is_not_counted_and_all_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int, answers: int, counted: int
) -> None:
    Clock(monkeypatch, run, answers)
    result = train(SMALL, tmp_path / "run", data=few_images(200, 2500), **OPTIONS)
    # After the last epoch the training set is measured too, in one batch.
    expected = 2 * WHOLE + BATCH + counted * COMPILING
    assert sum(line["seconds"] for line in read_metrics(tmp_path / "run")) == pytest.approx(expected)
    assert result.summary["seconds"] == pytest.approx(expected)


@pytest.mark.parametrize("chunk", [2, 3])
def test_pieces_add_up_and_each_leaves_its_own_compiling_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    images = few_images(200, 2500)
    with monkeypatch.context() as patch:
        Clock(patch)
        with pytest.raises(Stopped):
            train(SMALL, tmp_path / "run", data=images, watch=StopsIn(chunk), **OPTIONS)
    Clock(monkeypatch)
    resume(tmp_path / "run", data=images)
    first, second = [line["seconds"] for line in read_metrics(tmp_path / "run")]
    assert first == pytest.approx(WHOLE)
    assert second == pytest.approx(WHOLE + BATCH)


def test_a_piece_of_one_chunk_counts_all_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    images = few_images(20, 500)
    result = train(SMALL, tmp_path / "run", data=images, **OPTIONS)
    assert result.summary["seconds"] > 2 * COMPILING, "with nothing to compare with"
