"""What a run folder survives: lost, forged and linked files, folders that vanish, trials that diverge."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import (
    SMALL,
    Asking,
    assert_same_bits,
    call_main,
    explosive_network,
    few_images,
    metrics,
    weights,
    write_idx,
    write_small_toml,
)
from safetensors.torch import load_file, save_file

from eqprop.cache import CacheError, code_folder
from eqprop.data import Images
from eqprop.experiments.experiment import BACKPROP, ESTIMATORS
from eqprop.files import write_text
from eqprop.relax import relax
from eqprop.run import Stopped, Watch, evaluate, resume, train
from eqprop.run.checkpoint import digest, read_checkpoint
from eqprop.run.metrics import Line
from eqprop.run.plan import Settings, make_plan, read_description, read_images
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


def weights_file(run: Path) -> Path:
    (found,) = (run / "ep").glob("weights-*")
    return found


def change(run: Path, then: Callable[[dict[str, Any]], object], sign: bool) -> None:
    """Change checkpoint.json, with or without a digest that fits."""
    path = run / "ep" / "checkpoint.json"
    content = json.loads(path.read_text())
    written = content.pop("digest", None)
    then(content)
    path.write_text(json.dumps({**content, "digest": digest(content) if sign else written}))


def refused(run: Path, images: Images, words: str, kind: type[Exception] = ValueError) -> str:
    """Resume is refused with these words, and changes nothing."""
    before = contents(run)
    with pytest.raises(kind, match=words) as error:
        resume(run, data=images)
    assert contents(run) == before
    return str(error.value)


def test_a_lost_checkpoint_is_refused_and_what_survived_is_kept(run: Path, made: Path, images: Images) -> None:
    survived = weights_file(run)
    (run / "ep" / "checkpoint.json").unlink()
    message = refused(run, images, "checkpoint.json is missing, but ep was trained")
    assert f"eqprop resume {run} --restart" in message
    kept = survived.read_bytes()
    watch = At()
    resume(run, data=images, restart=True, watch=watch)
    assert_same_bits(made / "whole", run)
    assert (run / "ep.old" / survived.name).read_bytes() == kept
    assert any("again from the beginning" in text for text in watch.warnings)


def test_a_lost_folder_of_an_estimator_is_refused_while_its_metrics_are_there(
    run: Path, made: Path, images: Images
) -> None:
    shutil.rmtree(run / "ep")
    refused(run, images, "checkpoint.json is missing, but ep was trained: 4 lines of metrics of it remain")
    resume(run, data=images, restart=True)
    assert_same_bits(made / "whole", run)


def test_restart_leaves_what_is_intact(run: Path, made: Path, images: Images) -> None:
    resume(run, data=images, restart=True)
    assert_same_bits(made / "whole", run)
    assert not (run / "ep.old").exists()


def test_a_run_killed_before_its_first_checkpoint_was_complete_begins(
    made: Path, tmp_path: Path, images: Images
) -> None:
    with pytest.raises(Enough):
        train(SMALL, tmp_path / "run", data=images, watch=At(1, give_up), **OPTIONS)
    place = tmp_path / "run" / "ep"
    weights_file(tmp_path / "run").rename(place / "weights-0000-000000-01234567.safetensors")
    (place / "checkpoint.json").unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    resume(tmp_path / "run", data=images)
    assert_same_bits(made / "whole", tmp_path / "run")


LINKED = (".lock", "experiment.json", "metrics.jsonl", "environment.json", "ep", "ep/checkpoint.json", "ep/weights")


@pytest.mark.parametrize("name", LINKED)
def test_no_link_out_of_the_folder_is_followed(run: Path, tmp_path: Path, images: Images, name: str) -> None:
    path = weights_file(run) if name == "ep/weights" else run / name
    outside = tmp_path / "outside"
    outside.mkdir()
    mine = outside / path.name
    path.rename(mine)
    path.symlink_to(mine)
    if mine.is_dir():
        (mine / "weights-mine").write_text("mine")
    else:
        mine.chmod(0o600)
    before = {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}
    with pytest.raises(OSError, match="is a symbolic link to .*Links are not followed"):
        resume(run, data=images)
    assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before


def test_a_link_to_nowhere_creates_nothing_there(tmp_path: Path, images: Images) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a symbolic link"):
        train(SMALL, tmp_path / "run", data=images, **OPTIONS)
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_that_is_another_name_of_a_file_leaves_it_as_it_is(run: Path, tmp_path: Path, images: Images) -> None:
    mine = tmp_path / "mine"
    mine.write_text("my thesis")
    (run / ".lock").unlink()
    os.link(mine, run / ".lock")
    resume(run, data=images)
    assert mine.read_text() == "my thesis"


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["experiment.json", "metrics.jsonl", "ep/checkpoint.json"])
def test_a_pipe_in_the_place_of_a_file_does_not_wait(run: Path, images: Images, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with no_longer_than(20), pytest.raises(OSError, match="is not a regular file"):
        resume(run, data=images)


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != BACKPROP])
def test_a_diverging_trial_ends_no_run(tmp_path: Path, images: Images, estimator: str) -> None:
    options: dict[str, Any] = {"T": 40, "learning_rates": {"*": 50.0}, "estimators": estimator, "trials": 2}
    watch = At()
    result = train(SMALL, tmp_path / "run", data=images, model=explosive_network, watch=watch, **options)
    assert [trial["diverged"] for trial in result.summary["estimators"][estimator]["trials"]] == [True, True]
    assert sum(f"{estimator}, trial" in text for text in watch.warnings) == 2
    again = resume(tmp_path / "run", data=images, model=explosive_network)
    assert again.summary["estimators"] == result.summary["estimators"]


def test_a_net_without_a_forward_pass_is_refused_before_its_folder_is_made(tmp_path: Path, images: Images) -> None:
    options: dict[str, Any] = {"learning_rates": {"*": 0.1}, "estimators": BACKPROP}
    with pytest.raises(ValueError, match="has no forward pass"):
        train(SMALL, tmp_path / "run", data=images, model=explosive_network, **options)
    assert not (tmp_path / "run").exists()


def test_holomorphic_ep_that_diverges_ends_no_run(tmp_path: Path, images: Images) -> None:
    """Far from rest the derivatives overflow; that is a divergence, not a model that is not analytic."""
    options: dict[str, Any] = {"learning_rates": {"*": 100.0}, "estimators": "ep-holomorphic,ep", "epochs": 1}
    watch = At()
    result = train(SMALL, tmp_path / "run", data=images, watch=watch, trials=2, stacked=True, **options)
    found = result.summary["estimators"]
    assert [trial["diverged"] for trial in found["ep-holomorphic"]["trials"]] == [True, True]
    assert [trial["diverged"] for trial in found["ep"]["trials"]] == [False, False], "the next estimator has its turn"
    stopped = [text for text in watch.warnings if "was stopped at" in text]
    assert len(stopped) == 2
    assert not any("not analytic" in text for text in stopped)
    assert resume(tmp_path / "run", data=images).summary["estimators"] == found


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


def test_all_trials_diverged_is_in_the_metrics_even_if_the_run_was_stopped_just_then(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"T": 400, "learning_rates": {"*": 50.0}}

    class WhenDiverged(Watch):
        asked = False

        def warn(self, message: str) -> None:
            self.asked = self.asked or "was stopped at" in message

    watch = WhenDiverged()
    with monkeypatch.context() as patch:
        Asking(patch, 0)
        patch.setattr("eqprop.run.loop.Interruption.requested", property(lambda _: watch.asked))
        with pytest.raises(Stopped):
            train(SMALL, tmp_path / "run", data=images, model=explosive_network, watch=watch, **options)
    result = resume(tmp_path / "run", data=images, model=explosive_network)
    assert result.summary["estimators"]["ep"]["trials"][0]["diverged"]


def test_a_folder_deleted_during_the_run_stops_it(tmp_path: Path, images: Images) -> None:
    out = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="was deleted, moved or replaced during the run"):
        train(SMALL, out, data=images, watch=At(1, lambda: shutil.rmtree(out)), **OPTIONS)
    assert not out.exists()


def test_a_folder_moved_during_the_run_goes_on_from_its_new_place(tmp_path: Path, made: Path, images: Images) -> None:
    out, new = tmp_path / "run", tmp_path / "new"
    with pytest.raises(FileNotFoundError, match="eqprop resume NEW_FOLDER"):
        train(SMALL, out, data=images, watch=At(1, lambda: out.rename(new)), **OPTIONS)
    assert not out.exists()
    resume(new, data=images)
    assert_same_bits(made / "whole", new)


def test_a_folder_replaced_during_the_run_is_left_alone(tmp_path: Path, run: Path, images: Images) -> None:
    out = tmp_path / "mine"
    before = contents(run)

    def replace() -> None:
        shutil.rmtree(out)
        run.rename(out)

    with pytest.raises(FileNotFoundError, match="was deleted, moved or replaced"):
        train(SMALL, out, data=images, watch=At(1, replace), **OPTIONS)
    assert contents(out) == before


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "position": lambda c: c["position"].update(epoch=1),
    "iteration": lambda c: c["position"].update(iteration=3),
    "finished": lambda c: c.update(finished=True),
    "diverged": lambda c: c["diverged"].update({"0": {"epoch": 1, "iteration": 0, "reason": "no"}}),
    "seconds": lambda c: c.update(seconds=1.0),
    "tally": lambda c: c["tally"]["errors"].__setitem__(0, 7.0),
    "rate": lambda c: c["optimizer"]["rest"].update({"dict": []}),
    "engine": lambda c: c.update(engine="eager"),
    "new field": lambda c: c.update(note="mine"),
    "lines": lambda c: c["lines"].pop() if "lines" in c else c.update(lines=[]),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_changed_checkpoint_does_not_match_its_digest(run: Path, images: Images, what: str) -> None:
    change(run, FORGED[what], sign=False)
    message = refused(run, images, "does not match its own digest")
    assert str(run / "ep" / "checkpoint.json") in message
    assert "--restart" in message


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "position": lambda c: c.update(position={"epoch": "2", "iteration": 0}),
    "negative": lambda c: c["position"].update(epoch=-1),
    "too far": lambda c: c["position"].update(epoch=9),
    "tally": lambda c: c["tally"].update(errors=[1.0]),
    "tally kind": lambda c: c.update(tally=[1, 2]),
    "diverged": lambda c: c.update(diverged={"first": None}),
    "seconds": lambda c: c.update(seconds="long"),
    "weights": lambda c: c.update(weights="weights"),
    "optimizer": lambda c: c["optimizer"].update(rest={"tensor": "nowhere"}),
    "groups": lambda c: c["optimizer"].update(rest={"dict": [["state", {"dict": []}], ["param_groups", {"list": []}]]}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_checkpoint_is_refused_even_with_a_digest_that_fits(run: Path, images: Images, what: str) -> None:
    change(run, MALFORMED[what], sign=True)
    assert "--restart" in refused(run, images, str(run))


def test_a_damaged_checkpoint_restarts_on_request(run: Path, made: Path, images: Images) -> None:
    change(run, FORGED["seconds"], sign=False)
    resume(run, data=images, restart=True)
    assert_same_bits(made / "whole", run)
    assert (run / "ep.old" / "checkpoint.json").exists()


WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda w: w[:1].clone(),
    "dtype": lambda w: w.double(),
    "nan": lambda w: w.clone().fill_(float("nan")),
    "infinity": lambda w: w.clone().fill_(float("inf")),
}


def forge_weights(run: Path, make: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Other weights, with a SHA-256 and a digest that fit."""
    path = weights_file(run)
    save_file(make(load_file(path)), path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    change(run, lambda c: c["weights"].update(sha256=sha256), sign=True)


@pytest.mark.parametrize("what", WEIGHTS)
def test_forged_weights_are_refused_and_restart_on_request(run: Path, made: Path, images: Images, what: str) -> None:
    forge_weights(run, lambda w: {**w, "1.W01": WEIGHTS[what](w["1.W01"])})
    assert "--restart" in refused_but_for_environment(run, images, r"1\.W01")
    resume(run, data=images, restart=True)
    assert_same_bits(made / "whole", run)


def refused_but_for_environment(run: Path, images: Images, words: str) -> str:
    before = weights_file(run).read_bytes()
    with pytest.raises(ValueError, match=words) as error:
        resume(run, data=images)
    assert weights_file(run).read_bytes() == before
    return str(error.value)


def test_weights_that_lack_a_parameter_or_have_another_are_refused(run: Path, images: Images) -> None:
    forge_weights(run, lambda w: {name: v for name, v in w.items() if name != "0.b0"})
    refused_but_for_environment(run, images, r"nothing for the weights 0\.b0")
    forge_weights(run, lambda w: {**w, "0.b0": w["1.b0"].clone(), "0.b9": w["1.b0"].clone()})
    refused_but_for_environment(run, images, r"weights 0\.b9, which this network lacks")


def as_before(run: Path) -> None:
    """What earlier versions wrote: no digest, no lines."""
    path = run / "ep" / "checkpoint.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: v for name, v in content.items() if name not in ("digest", "lines")}))


def test_a_checkpoint_of_an_earlier_version_without_digest_still_loads(run: Path, made: Path, images: Images) -> None:
    as_before(run)
    resume(run, data=images)
    assert_same_bits(made / "whole", run)
    assert "digest" in json.loads((run / "ep" / "checkpoint.json").read_text())


def edit_metrics(run: Path, then: Callable[[list[str]], list[str]]) -> None:
    path = run / "metrics.jsonl"
    path.write_text("".join(text + "\n" for text in then(path.read_text().splitlines())))


METRICS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "emptied": (lambda lines: [], "4 missing"),
    "one lost": (lambda lines: lines[1:], "1 missing"),
    "duplicated": (lambda lines: [lines[0], *lines], "1 duplicated"),
    "forged": (lambda lines: [lines[0].replace('"test_error": ', '"test_error": 1'), *lines[1:]], "1 changed"),
}


@pytest.mark.parametrize("what", METRICS)
def test_metrics_that_do_not_match_are_repaired_from_the_checkpoint(
    run: Path, made: Path, images: Images, what: str
) -> None:
    then, words = METRICS[what]
    edit_metrics(run, then)
    watch = At()
    resume(run, data=images, watch=watch)
    assert_same_bits(made / "whole", run)
    assert [words in text for text in watch.warnings if "was repaired" in text] == [True]


@pytest.mark.parametrize("what", ["emptied", "one lost"])
def test_lost_metrics_of_an_earlier_version_are_refused(run: Path, images: Images, what: str) -> None:
    as_before(run)
    then, words = METRICS[what]
    edit_metrics(run, then)
    refused(run, images, words)


def test_duplicated_metrics_of_an_earlier_version_are_repaired(run: Path, made: Path, images: Images) -> None:
    as_before(run)
    edit_metrics(run, METRICS["duplicated"][0])
    resume(run, data=images)
    assert_same_bits(made / "whole", run)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"estimator": "ep"}', "[" * 100_000])
def test_a_line_of_metrics_that_is_none_is_refused(run: Path, images: Images, text: str) -> None:
    edit_metrics(run, lambda lines: [*lines, text])
    refused(run, images, "line 5, is damaged")


@pytest.mark.parametrize(
    ("name", "value"), [("engine", 0.5), ("device", None), ("states", []), ("checkpoint_every", "x")]
)
def test_settings_of_another_type_are_refused_in_a_sentence(
    run: Path, images: Images, name: str, value: object
) -> None:
    path = run / "experiment.json"
    content = json.loads(path.read_text())
    content["settings"][name] = value
    path.write_text(json.dumps(content))
    refused(run, images, f"{name} is .*; expected a")


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


def test_a_file_system_without_locks_is_refused_in_a_sentence(
    run: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    refused(run, images, "Cannot lock .*No locks available.*Choose a folder on a local disk", OSError)


def test_a_forked_process_is_refused_rather_than_left_waiting(tmp_path: Path, images: Images) -> None:
    child = os.fork()
    if child == 0:
        try:
            train(SMALL, tmp_path / "run", data=images, engine="eager", epochs=1, threads=2)
        except ValueError as error:
            os._exit(7 if "This process was forked" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_wrapped_model_is_refused_in_a_sentence(images: Images) -> None:
    wrapped = torch.nn.DataParallel(SMALL.build(0))
    with pytest.raises(TypeError, match="is a DataParallel; expected an eqprop.Dynamics.*use its .module"):
        relax(wrapped, images.train_x[:2], 3)  # type: ignore[arg-type]


def test_without_a_temporary_folder_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setenv("EQPROP_CACHE", str(tmp_path))
    assert tmp_path in code_folder().parents
    monkeypatch.setenv("EQPROP_CACHE", "/proc/nowhere")
    with pytest.raises(CacheError, match=r"set \$TMPDIR"):
        code_folder()


def test_evaluate_follows_no_link_either(run: Path, tmp_path: Path, images: Images) -> None:
    (run / "ep").rename(tmp_path / "elsewhere")
    (run / "ep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a symbolic link"):
        evaluate(run, data=images)


def test_the_checkpoint_keeps_the_lines_of_its_metrics(made: Path) -> None:
    lines = read_checkpoint(made / "whole" / "ep").lines
    assert lines is not None
    assert list(lines) == (made / "whole" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics(made / "whole")) == 6
    assert weights(made / "whole").keys() == weights(made / "begun").keys()


def test_a_finished_run_resumed_elsewhere_keeps_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained, so what the record says of its device and threads stays."""
    train(SMALL, tmp_path / "run", data=few_images(), epochs=1, threads=1)
    before = (tmp_path / "run" / "result.json").read_bytes()
    # Another name of the same device: there is no other one on most machines.
    resume(tmp_path / "run", data=few_images(), device="cpu:0", threads=2)
    assert json.loads(before)["device"] == "cpu"
    assert (tmp_path / "run" / "result.json").read_bytes() == before


@pytest.mark.parametrize(("field", "value"), [("set", 1.5), ("name", []), ("sha256", True), ("test_samples", "ten")])
def test_data_of_another_type_in_a_description_is_named(tmp_path: Path, field: str, value: Any) -> None:
    train(SMALL, tmp_path / "run", data=few_images(), epochs=1)
    path = tmp_path / "run" / "experiment.json"
    content = json.loads(path.read_text())
    content["data"][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"experiment.json is damaged: {field} of its data is .*Restore it"):
        resume(tmp_path / "run", data=few_images())


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("keep_best", "no", "True or False"),
        ("deterministic", 1, "True or False"),
        ("stacked", "false", "True or False"),
        ("checkpoint_every", True, "a number of seconds above 0"),
        ("estimators", 5, "names from ep, .*bptt"),
        ("estimators", ["ep", 5], "names from ep, .*bptt"),
        ("estimators", [[]], "names from ep, .*bptt"),
    ],
)
def test_settings_of_another_type_are_refused_and_the_file_is_named(
    tmp_path: Path, field: str, value: Any, expected: str
) -> None:
    sentence = f"{field} is {re.escape(repr(value))}; expected {expected}"
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Settings(**{field: value})
    path = tmp_path / "experiment.json"
    content = make_plan(SMALL, Settings(), few_images()).to_dict()
    content["settings"][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {sentence}"):
        read_description(tmp_path)


@pytest.mark.parametrize("name", ["mine", "{mine}", "{}"])
def test_more_samples_than_there_are_is_a_sentence_whatever_the_name(name: str) -> None:
    images = replace(few_images(), name=name)
    for setting, kind, there in (("samples", "training", images.train_samples), ("test_samples", "test", 100)):
        with pytest.raises(ValueError, match=f"^{setting} is 999; {re.escape(name)} has {there} {kind} samples"):
            read_images(images, Settings(**{setting: 999}))


def test_estimators_may_be_one_text_or_a_list() -> None:
    assert Settings("ep, BPTT") == Settings(["ep", "bptt"]) == Settings(("ep", "bptt"))  # type: ignore[arg-type]
    assert hash(Settings(["ep"])) == hash(Settings(("ep",)))  # type: ignore[arg-type]


def test_a_name_in_other_bytes_than_the_locale_knows_is_written_as_it_is(tmp_path: Path) -> None:
    """Where file names are taken for ASCII, Python keeps their other bytes as lone surrogates."""
    write_text(tmp_path / "page", "caf\udcc3\udca9")
    assert (tmp_path / "page").read_text(encoding="utf-8") == "café"
