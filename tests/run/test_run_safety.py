"""What a run folder survives: lost, forged and linked files, folders that vanish, trials that diverge."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import (
    SMALL,
    assert_same_bits,
    call_main,
    explosive_network,
    few_images,
    metrics,
    write_idx,
    write_small_toml,
)
from safetensors.torch import load_file, save_file

from eqprop.data import Images
from eqprop.estimators.named import BACKPROP, ESTIMATORS
from eqprop.files import write_text
from eqprop.run import Watch, log, resume, train
from eqprop.run.checkpoint import _digest, _metadata
from eqprop.run.log import Line, read_metrics
from eqprop.run.watch import Progress

OPTIONS: dict[str, Any] = {"trials": 2, "stacked": True, "epochs": 3, "T": 4, "K": 2, "threads": 1}


class Enough(Exception):
    pass


class At(Watch):
    """Calls a function after an epoch, and keeps warnings."""

    def __init__(self, epoch: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.at, self.then = epoch, then
        self.warnings: list[str] = []

    def epoch(self, lines: Sequence[Line], progress: Progress) -> None:
        if lines[0]["epoch"] == self.at:
            self.then()

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def give_up() -> None:
    raise Enough


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images(200, 50)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, images: Images) -> Path:
    """`whole`, a finished run, and `begun`, the same after two of three epochs."""
    folder = tmp_path_factory.mktemp("safety")
    train(SMALL, folder / "whole", data=images, **OPTIONS)
    with pytest.raises(Enough):
        train(SMALL, folder / "begun", data=images, watch=At(2, give_up), **OPTIONS)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "begun", tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def checkpoint(run: Path) -> Path:
    return run / "ep" / "checkpoint.safetensors"


Tensors = dict[str, torch.Tensor]


def change(
    run: Path, then: Callable[[dict[str, Any]], object], sign: bool, tensors: Callable[[Tensors], Tensors] = dict
) -> None:
    """Change a checkpoint, with or without a digest that fits."""
    path = checkpoint(run)
    metadata, made = _metadata(path.read_bytes()), tensors(load_file(path))
    content = json.loads(metadata["eqprop"])
    then(content)
    text = json.dumps(content)
    save_file(made, path, {"eqprop": text, "digest": _digest(text, made) if sign else metadata["digest"]})


def refused(run: Path, images: Images, words: str, kind: type[Exception] = ValueError) -> str:
    """Resume is refused with these words, and changes nothing."""
    before = contents(run)
    with pytest.raises(kind, match=words) as error:
        resume(run, data=images)
    assert contents(run) == before
    return str(error.value)


def test_a_lost_checkpoint_is_refused_and_its_folder_deleted_trains_again(
    run: Path, made: Path, images: Images
) -> None:
    checkpoint(run).unlink()
    message = refused(run, images, "checkpoint.safetensors is missing, but ep was trained: 4 lines of metrics remain")
    assert f"delete {run / 'ep'} to train that estimator again" in message
    shutil.rmtree(run / "ep")
    resume(run, data=images)
    assert_same_bits(made / "whole", run)


def test_a_run_killed_before_its_first_checkpoint_was_complete_begins(
    made: Path, tmp_path: Path, images: Images
) -> None:
    with pytest.raises(Enough):
        train(SMALL, tmp_path / "run", data=images, watch=At(1, give_up), **OPTIONS)
    checkpoint(tmp_path / "run").unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    resume(tmp_path / "run", data=images)
    assert_same_bits(made / "whole", tmp_path / "run")


@pytest.mark.parametrize("name", ["ep", "metrics.jsonl", "ep/checkpoint.safetensors", "."])
def test_what_lies_on_another_disk_may_be_linked(
    run: Path, made: Path, tmp_path: Path, images: Images, name: str
) -> None:
    """Clusters keep large folders elsewhere; files that are written again replace a link."""
    there = tmp_path / "other-disk"
    (run / name).rename(there)
    (run / name).symlink_to(there)
    resume(run, data=images)
    assert_same_bits(made / "whole", run)


def test_a_lock_is_not_written_through_a_link(run: Path, tmp_path: Path, images: Images) -> None:
    """What it points to could be anything: here another file of the user."""
    others = tmp_path / "others"
    others.write_text("mine\n")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(others)
    with pytest.raises(OSError, match=r"\.lock is a link.*Remove the link\.$"):
        resume(run, data=images)
    assert others.read_text() == "mine\n"


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != BACKPROP])
def test_a_diverging_trial_ends_no_run(tmp_path: Path, images: Images, estimator: str) -> None:
    options: dict[str, Any] = {"T": 40, "rates": {"*": 50.0}, "estimators": estimator, "trials": 2}
    watch = At()
    result = train(SMALL, tmp_path / "run", data=images, model=explosive_network, watch=watch, **options)
    assert [trial["diverged"] for trial in result.summary["estimators"][estimator]["trials"]] == [True, True]
    assert sum(f"{estimator}, trial" in text for text in watch.warnings) == 2
    again = resume(tmp_path / "run", data=images, model=explosive_network)
    assert again.summary["estimators"] == result.summary["estimators"]


@pytest.mark.parametrize(("rate", "code"), [("50", 1), ("0", 0)])
def test_a_run_whose_trials_all_diverged_exits_with_an_error(
    tmp_path: Path,
    images: Images,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rate: str,
    code: int,
) -> None:
    data = write_idx(tmp_path / "data", images)
    experiment = write_small_toml(tmp_path / "small.toml", epochs=1)
    words = ("train", experiment, "--data", data, "--model", "helpers.training_runs:explosive_network", "--T", 40)
    out = ("--lr", rate, "--out", tmp_path / "run", "--json", tmp_path / "out.json")
    assert call_main(monkeypatch, *words, *out) == code
    assert (tmp_path / "out.json").exists(), "the result is written all the same"
    assert ("every trial of ep diverged" in capsys.readouterr().err) == (code == 1)


def test_a_folder_deleted_during_the_run_stops_it(tmp_path: Path, images: Images) -> None:
    out = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="Could not save to"):
        train(SMALL, out, data=images, watch=At(1, lambda: shutil.rmtree(out)), **OPTIONS)
    assert not out.exists()


def test_a_folder_moved_during_the_run_goes_on_from_its_new_place(tmp_path: Path, made: Path, images: Images) -> None:
    out, new = tmp_path / "run", tmp_path / "new"
    with pytest.raises(FileNotFoundError, match="Could not save to"):
        train(SMALL, out, data=images, watch=At(1, lambda: out.rename(new)), **OPTIONS)
    assert not out.exists()
    resume(new, data=images)
    assert_same_bits(made / "whole", new)


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "position": lambda c: c["head"]["position"].update(epoch=1),
    "seconds": lambda c: c["head"].update(seconds=1.0),
    "new field": lambda c: c.update(note="mine"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_changed_checkpoint_does_not_match_its_digest(run: Path, images: Images, what: str) -> None:
    change(run, FORGED[what], sign=False)
    message = refused(run, images, "does not match its own digest")
    assert str(checkpoint(run)) in message
    assert f"delete {run / 'ep'} to train that estimator again" in message


def nothing(content: dict[str, Any]) -> None:
    """Leave the JSON as it is."""


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_half_a_checkpoint_is_refused(run: Path, images: Images, share: float) -> None:
    content = checkpoint(run).read_bytes()
    checkpoint(run).write_bytes(content[: int(share * len(content))])
    refused(run, images, "checkpoint.safetensors is damaged")


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "format": lambda c: c.update(format=2),
    "negative": lambda c: c["head"]["position"].update(epoch=-1),
    "too far": lambda c: c["head"]["position"].update(epoch=9),
    "tally": lambda c: c["head"]["tally"].update(errors=[1.0]),
    "groups": lambda c: c.update(optimizer={"dict": [["state", {"dict": []}], ["param_groups", {"list": []}]]}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_checkpoint_is_refused_even_with_a_digest_that_fits(run: Path, images: Images, what: str) -> None:
    change(run, MALFORMED[what], sign=True)
    assert "to train that estimator again" in refused(run, images, str(run))


WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda w: w[:1].clone(),
    "dtype": lambda w: w.double(),
    "nan": lambda w: w.clone().fill_(float("nan")),
    "infinity": lambda w: w.clone().fill_(float("inf")),
}


@pytest.mark.parametrize("what", WEIGHTS)
def test_forged_weights_are_refused(run: Path, images: Images, what: str) -> None:
    name = "weights/1.W01"
    change(run, nothing, sign=True, tensors=lambda t: {**t, name: WEIGHTS[what](t[name])})
    assert "to train that estimator again" in refused(run, images, r"1\.W01")


def edit_metrics(run: Path, then: Callable[[list[str]], list[str]]) -> None:
    path = run / "metrics.jsonl"
    path.write_text("".join(text + "\n" for text in then(path.read_text().splitlines())))


METRICS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "emptied": (lambda lines: [], "trial 0 has 0 lines, expected 2"),
    "first lost": (lambda lines: lines[1:], "ep, trial 0 continues with epoch 2 where 1 is expected"),
    "last lost": (lambda lines: lines[:-1], "trial 1 has 1 lines, expected 2"),
    "duplicated": (lambda lines: [lines[0], *lines], "ep, trial 0 continues with epoch 1 where 2 is expected"),
}


@pytest.mark.parametrize("what", METRICS)
def test_metrics_that_do_not_match_are_refused(run: Path, images: Images, what: str) -> None:
    then, words = METRICS[what]
    edit_metrics(run, then)
    refused(run, images, words)


def test_lines_after_the_checkpoint_are_cut_and_written_again(run: Path, made: Path, images: Images) -> None:
    """A kill between the line and the checkpoint, the next line cut in the middle."""
    path = run / "metrics.jsonl"
    lines = (made / "whole" / "metrics.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:40])
    assert len(read_metrics(run)) == 5
    resume(run, data=images)
    assert_same_bits(made / "whole", run)


def test_an_epoch_adds_its_lines_and_rewrites_none(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []
    append = log.append_text

    def counted(path: Path, content: str) -> None:
        added.append(len(content.splitlines()))
        append(path, content)

    def never(*given: Any, **options: Any) -> None:
        raise AssertionError("metrics.jsonl was written anew")

    monkeypatch.setattr(log, "append_text", counted)
    monkeypatch.setattr(log, "write_text", never)
    train(SMALL, tmp_path / "run", data=images, **OPTIONS)
    assert added == [2, 2, 2]
    assert len(metrics(tmp_path / "run")) == 6


@pytest.mark.parametrize("name", ["experiment.json", "metrics.jsonl", "ep/checkpoint.safetensors", "augmented.png"])
def test_the_next_start_clears_what_a_kill_left(run: Path, images: Images, name: str) -> None:
    left = (run / name).with_name(f".{(run / name).name}.abcd1234.part")
    left.write_text("half")
    resume(run, data=images)
    assert not left.exists()
    # A finished run too: it writes nothing there any more.
    left.write_text("half")
    resume(run, data=images)
    assert not left.exists()


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"estimator": "ep"}', "[" * 100_000])
def test_a_line_of_metrics_that_is_none_is_refused(run: Path, images: Images, text: str) -> None:
    edit_metrics(run, lambda lines: [*lines, text])
    refused(run, images, "line 5, is damaged")


def test_a_file_and_its_folder_are_flushed_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(a: str, b: str) -> None:
        done.append("rename")
        replace(a, b)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    write_text(tmp_path / "file", "text")
    assert done == ["file", "rename", "folder"]
