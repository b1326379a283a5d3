"""The commands of training: what they print, what they write, what they say about bad input."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Call
from helpers.training_runs import SMALL, few_images, write_idx, write_small_toml

from eqprop import papers
from eqprop.run import resume, train
from eqprop.run.log import Line, read_metrics
from eqprop.run.session import Leg, bind
from eqprop.run.spec import Spec
from eqprop.run.watch import Events, Progress, Several, Watch, named_watch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_idx(folder / "data", few_images())
    write_small_toml(folder / "small.toml", 2)
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(monkeypatch, capsys)


def test_list_shows_every_record_with_what_the_paper_reports(call: Call) -> None:
    code, out, _ = call("list")
    assert code == 0
    for word in ("EB-1h", "EB-2h", "P-1h", "P-2h", "P-3h", "P-conv", "2.06 ± 0.17 (0.13)", "0.88 ± 0.06 (0.12)"):
        assert word in out
    code, out, _ = call("list", "--all")
    assert "P-2h --preset tuned: init default instead of glorot, schedule alternating instead of synchronous" in out
    code, out, _ = call("list", "--json", "-")
    assert json.loads(out)["trained"]["P-2h"]["phases"]["beta"] == 0.5


def test_train_resume_evaluate_and_report_in_one_folder(call: Call, place: Path, tmp_path: Path) -> None:
    run, small = tmp_path / "run", place / "small.toml"
    code, out, err = call(
        *("train", small, "--data", place / "data", "--estimator", "ep,bptt", "--trials", 2, "--out", run),
        *("--lr", "W01=0.06", "--beta", 0.3, "--T", 5, "--K", 3, "--init", "default", "--batch", 40, "--seed", 7),
        *("--schedule", "alternating", "--train-error-every", 1, "--json", tmp_path / "result.json"),
    )
    assert code == 0, err
    assert "small (own," in out
    assert "Test error on data" in out
    assert str(run) in out.replace("\n", "")
    assert "ep epoch 2/2: test" in err
    summary = json.loads((tmp_path / "result.json").read_text())
    assert summary["estimators"]["bptt"]["trials"][1]["seed"] == 8
    experiment = json.loads((run / "experiment.json").read_text())["experiment"]
    phases, optimizer = experiment["phases"], experiment["optimizer"]
    assert (phases["T"], phases["K"], phases["beta"], phases["schedule"]) == (5, 3, 0.3, "alternating")
    assert (optimizer["batch"], optimizer["rates"]) == (40, {"W12": 0.1, "W01": 0.06})
    assert (experiment["model"]["init"], experiment["run"]["seed"]) == ("default", 7)
    code, out, err = call("resume", run, "--data", place / "data", "--json", "-", "--quiet")
    assert code == 0, err
    assert json.loads(out)["estimators"] == summary["estimators"]
    code, out, _ = call("evaluate", run, "--data", place / "data", "--json", "-")
    measured = json.loads(out)
    for estimator in ("ep", "bptt"):
        expected = [t["test_error"][-1] for t in summary["estimators"][estimator]["trials"]]
        assert [t["test_error"] for t in measured[estimator]] == expected
    code, out, _ = call("evaluate", run)
    assert f"{expected[0]:.2f} %" in out, "the data is found where it was"
    code, out, _ = call("report", run)
    assert code == 0
    assert (run / "report.html").is_file()


def test_json_on_standard_output_stands_alone(call: Call, place: Path, tmp_path: Path) -> None:
    code, out, err = call(
        *("train", place / "small.toml", "--data", place / "data", "--out", tmp_path / "run", "--json", "-")
    )
    assert code == 0, err
    assert json.loads(out)["name"] == "small"
    assert "epoch 1/2" in err, "how it goes is told on standard error"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("train", "P-1"), "Did you mean 'P-1h'"),
        (("train", "missing.toml"), "There is no file missing.toml"),
        (("train", "P-1h", "--preset", "papre"), "Did you mean 'paper'"),
        (("train", "P-1h", "--preset", "tuned"), "has no preset 'tuned'"),
        (("train", "P-1h", "--estimator", "eq"), "Unknown estimator 'eq'"),
        (("train", "P-1h", "--engine", "eagre"), "Did you mean 'eager'"),
        (("train", "P-1h", "--init", "default2"), "Did you mean 'default'"),
        (("train", "P-1h", "--schedule", "sync"), "Did you mean 'synchronous'"),
        (("train", "P-1h", "--optimizer", "SDG"), "Did you mean 'SGD'"),
        (("train", "P-1h", "--lr", "W01:0.1"), "expected NAME=RATE"),
        (("train", "P-1h", "--optimizer-option", "momentum"), "expected NAME=VALUE"),
        (("train", "P-1h", "--model", "net"), "expected FILE.py:FUNCTION"),
        (("train", "P-1h", "--model", "nowhere.py:f"), "There is no file nowhere.py"),
        (("train", "P-1h", "--model", "json:nothing"), "Unknown function 'nothing'"),
        (("train", "P-1h", "--json", "/nowhere/at/all.json"), "expected a file in a folder that exists"),
        (("train", "P-1h", "--data", "/nowhere"), "There is no directory /nowhere"),
        (("train", "P-1h", "--device", "cuda:99"), "cuda:99"),
        (("resume", "/nowhere"), "not a run folder"),
        (("evaluate", "/nowhere"), "not a run folder"),
        (("report", "/nowhere"), "There is no folder /nowhere"),
        (("show", "P-5h"), "Did you mean"),
        (("show", "P-1h", "--preset", "x"), "Unknown preset 'x'"),
        (("reproduce", "table1", "--out", "new", "--rows", "P-1h,P-9h"), "Unknown experiment 'P-9h'"),
        (("reproduce", "table1", "--out", "new", "--preset", "tuend"), "Did you mean 'tuned'"),
    ],
)
def test_bad_input_gets_one_message_and_code_2(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*words)
    assert code == 2
    assert complaint in err
    assert err.startswith("eqprop: ")
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_foreign_or_unwritable_out_folder_is_refused_and_kept(call: Call, place: Path, tmp_path: Path) -> None:
    words = ("train", place / "small.toml", "--data", place / "data", "--out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    code, _, err = call(*words, tmp_path / "mine")
    assert code == 2
    assert "holds something else (thesis.txt)" in err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    code, _, err = call(*words, tmp_path / "mine" / "thesis.txt")
    assert code == 2
    assert "is a file" in err
    code, _, err = call(*words, tmp_path / "mine" / "thesis.txt" / "run")
    assert code == 2
    assert "Cannot write to" in err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    code, _, err = call("reproduce", "table1", "--out", tmp_path / "mine")
    assert code == 2
    assert "holds something else (thesis.txt)" in err


def test_a_finished_run_is_not_overwritten(call: Call, place: Path, tmp_path: Path) -> None:
    words = ("train", place / "small.toml", "--data", place / "data", "--out", tmp_path / "run", "--quiet")
    assert call(*words)[0] == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    code, _, err = call(*words, "--T", 5)
    assert code == 2
    assert f"already holds a run. Continue it with eqprop resume {tmp_path / 'run'}" in err
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def replace(monkeypatch: pytest.MonkeyPatch, spec: Spec) -> None:
    """Put an experiment in the place of the packaged one of its name and preset."""
    whole = papers.of_preset

    def of_preset(name: str, preset: str) -> Spec | None:
        return spec if (name, preset) == (spec.name, spec.preset) else whole(name, preset)

    monkeypatch.setattr(papers, "of_preset", of_preset)


def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 1 with one small row."""
    published = papers.find("P-1h").published
    replace(monkeypatch, SMALL.override(name="P-1h", preset="paper", epochs=30, published=published))
    monkeypatch.setattr(papers, "of_paper", lambda: ("P-1h",))


def test_table1_trains_resumes_and_refuses_other_settings(
    call: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_table(monkeypatch)
    out = tmp_path / "table"
    words = ("reproduce", "table1", "--out", out, "--trials", 2, "--data", place / "data")
    code, text, err = call(*words, "--epochs", 2)
    assert code == 0, err
    assert "P-1h (paper, changed, data)" in text
    assert ",other data," in (out / "table.csv").read_text(), "data of the user's own earn no verdict"
    for file in (
        "report.html",
        "table.csv",
        "table.tex",
        "curves/paper-P-1h.pdf",
        "paper/P-1h.json",
        "paper/P-1h/experiment.json",
    ):
        assert (out / file).is_file(), file
    published = json.loads((out / "paper/P-1h.json").read_text())
    assert list(published["estimators"]) == ["ep", "bptt"]
    assert published["provenance"][0]["provenance"]["torch"]
    assert list(published["seconds_by_estimator"]) == ["ep", "bptt"]
    assert 0 < sum(published["seconds_by_estimator"].values()) <= published["seconds"] + 0.01
    lines = (out / "paper/P-1h/metrics.jsonl").read_bytes()
    told = [line for line in map(json.loads, lines.splitlines()) if line["estimator"] == "bptt" and line["trial"] == 0]
    free = published["free_phases"]["bptt"][0]
    assert free["residual_mean"] == pytest.approx([line["residual_mean"] for line in told], rel=0.01)
    assert free["unsettled"] == pytest.approx([line["unsettled"] for line in told], rel=0.01)
    code, _, err = call(*words, "--epochs", 2)
    assert code == 0, err
    assert (out / "paper/P-1h/metrics.jsonl").read_bytes() == lines, "what is done is not done again"
    code, _, err = call(*words, "--epochs", 2, "--samples", 100)
    assert code == 2
    assert "other settings (samples 100 instead of None)" in err


def test_a_published_trial_is_trained_anew_and_held_against_its_spread(
    call: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_table(monkeypatch)
    out, data = tmp_path / "table", ("--data", place / "data", "--quiet")
    code, _, err = call("reproduce", "table1", "--out", out, "--trials", 3, "--epochs", 1, "--estimator", "ep", *data)
    assert code == 0, err
    code, text, err = call("reproduce", "table1", "--check", out, "--seed", 4, *data)
    assert code == 0, err
    assert "P-1h (paper, synchronous), ep, seed " in text
    again = float(text.split("Yes: ")[1].split(" %")[0])
    assert again == pytest.approx(float(text.split("published ")[1].split(" %")[0]), abs=0.01), "the same trial"
    code, _, err = call("reproduce", "table1", "--check", out, "--estimator", "bptt", *data)
    assert code == 2
    assert "No results for any preset bptt; published: P-1h paper ep." in err
    code, _, err = call("reproduce", "table1", "--check", out, "--preset", "tuned", *data)
    assert code == 2
    assert "No results for tuned ep or bptt" in err
    file = out / "paper" / "P-1h.json"
    better = json.loads(file.read_text())
    for trial in better["estimators"]["ep"]["trials"]:
        trial["test_error"][-1] = 0.0
    file.write_text(json.dumps(better))
    code, text, _ = call("reproduce", "table1", "--check", out, *data)
    assert code == 1
    assert "No: " in text


def test_the_demo_checks_trains_and_shows(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, papers.find("toy", "gdu").override(T=300, K=20))
    words = ("demo", "--out", tmp_path / "demo", "--samples", 200, "--epochs", 1)
    code, out, err = call(*words)
    assert code == 0, err
    assert "GDU property" in out
    assert "P-1h (paper, changed)" in out
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert 'id="gdu"' in page
    assert "BPTT train" in page
    before = (tmp_path / "demo" / "p-1h" / "metrics.jsonl").read_bytes()
    assert call(*words)[0] == 0
    assert (tmp_path / "demo" / "p-1h" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    code, _, err = call("demo", "--out", tmp_path / "mine")
    assert code == 2
    assert "holds something else" in err


def test_python_needs_three_lines(tmp_path: Path) -> None:
    import eqprop

    images = few_images()
    result = eqprop.train("P-1h", tmp_path / "run", data=images, epochs=1, T=6, K=3)
    model = eqprop.load(tmp_path / "run")
    found = eqprop.predict(model, images.test_x.view(-1, 28, 28))
    error = 100 * float((found != images.test_y).double().mean())
    assert result.test_error("ep") == pytest.approx(error)
    with pytest.raises(ValueError, match="784 numbers per sample"):
        eqprop.predict(model, images.test_x[:, :100])
    with pytest.raises(ValueError, match="Unknown estimator 'bptt'"):
        eqprop.load(tmp_path / "run", "bptt")
    with pytest.raises(ValueError, match="trials 0 to 0"):
        eqprop.load(tmp_path / "run", trial=1)


def test_tensorboard_events_go_through_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "run" / "tensorboard" / "ep")
            assert purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    result = train(SMALL, tmp_path / "run", data=few_images(), epochs=2, watch=Events(Writer))
    errors = result.summary["estimators"]["ep"]["trials"][0]["test_error"]
    assert [(v, s) for n, v, s in written if n == "test_error/trial0"] == [(errors[0], 1), (errors[1], 2)]
    assert written[-1][0] == "closed"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert type(Events.if_installed()) is Watch, "without tensorboard nothing is written"
    with pytest.raises(ValueError, match=r"needs the package tensorboard.*eqprop\[tensorboard\]"):
        named_watch("tensorboard")


def test_tensorboards_own_reader_finds_the_curves(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")

    class Measuring(Watch):
        def measure(self, model: Any, cost: Any, line: Any) -> dict[str, float]:
            return {"size": float(sum(p.detach().norm() for p in model.parameters()))}

    run, images = tmp_path / "run", few_images()
    train(SMALL, run, data=images, epochs=1, watch=Several(Measuring(), Events.if_installed()))
    resume(run, data=images, epochs=3, watch=Several(Measuring(), Events.if_installed()))
    found = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard" / "ep")).Reload()
    lines = read_metrics(tmp_path / "run")
    for name in ("test_error", "train_error", "loss", "size"):
        events = found.Scalars(f"{name}/trial0")
        assert [event.step for event in events] == [1, 2, 3]
        assert [event.value for event in events] == pytest.approx([line[name] for line in lines], rel=1e-6)
    assert "seed/trial0" not in found.Tags()["scalars"]


def test_the_live_display_shows_bars_errors_speed_and_time_left(tmp_path: Path) -> None:
    from rich.console import Console

    from eqprop.cli.display import Display

    session = bind(SMALL, few_images(), trials=2)
    console = Console(width=90, record=True, force_terminal=True, file=io.StringIO())
    display = Display(console)
    display.begin(session, tmp_path / "run")
    display.begin_leg(Leg("ep", (0, 1), "ep"), "eager", 0)
    line: Line = {"estimator": "ep", "trial": 1, "epoch": 1, "test_error": 12.34, "train_error": 20.0}
    display.epoch([line], Progress(1, 0, (21.5, 20.0), 80.0, 125.0))
    display.progress(Progress(1, 7, (19.87, 18.76), 81.0, 125.0))
    display.warn("look here")
    console.print(display._render())
    display.end()
    text = console.export_text()
    for word in ("small", "7/20", "1/3", "12.34 %", "19.87 %", "81 iterations/s", "2 min left", "warning: look here"):
        assert word in text, word


@pytest.mark.slow
def test_on_a_terminal_the_display_is_live_and_ctrl_c_leaves_it_clean(place: Path, tmp_path: Path) -> None:
    """The whole command on a pseudo-terminal."""
    import pty
    import signal
    import subprocess

    from helpers.training_runs import command, environment

    primary, secondary = pty.openpty()
    write_small_toml(tmp_path / "long.toml", 2000)
    words = command("train", tmp_path / "long.toml", "--data", place / "data", "--out", tmp_path / "run")
    process = subprocess.Popen(
        words, stdin=secondary, stdout=secondary, stderr=secondary, env={**environment(), "TERM": "xterm"}
    )
    os.close(secondary)
    seen = b""
    while b"iterations/s" not in seen:
        seen += os.read(primary, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while piece := os.read(primary, 4096):
            seen += piece
    except OSError:
        pass  # the other end is closed: the process has ended
    assert process.wait(timeout=60) == 130
    assert b"eqprop resume" in seen
    assert b"Traceback" not in seen


@pytest.mark.slow
def test_p_1h_learns_mnist_as_the_paper_says(tmp_path: Path) -> None:
    """Three epochs end under 3.3 %; a check of the whole chain on the real data and the real experiment."""
    result = train("P-1h", tmp_path / "run", epochs=3)
    error = result.test_error("ep")
    assert error is not None
    assert error < 3.3
