"""`eqprop gdu` and `eqprop reproduce figures` as a user runs them, in processes of their own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, few_images, write_idx
from typer.testing import CliRunner

from eqprop import EP, SquaredError, gdu, papers
from eqprop.cli import figures as figures_module
from eqprop.cli import load_commands, main
from eqprop.cost import Problem
from eqprop.data import one_hot
from eqprop.engines.eager import compare_precision
from eqprop.gdu import Options
from eqprop.models.layered import LayeredNet
from eqprop.report.paper import FIGURES
from eqprop.run import load, train
from eqprop.run.dataset import read_images
from eqprop.run.laboratory import BoundProblem, Weights, find_problem, lost_in
from eqprop.run.spec import DataSettings, Spec

MODELS = Path(__file__).resolve().parents[1] / "helpers" / "gdu_models.py"
TABLE_KEYS = {"rmse", "rmse_cumulative", "sign", "cosine", "norm", "left_out"}
BUDGET_KEYS = {
    "residual",
    "finite_beta",
    "asymmetry",
    "spectral_radius",
    "output_slope",
    "saturated",
    "unsettled",
    "verdict",
}


def subject_of(
    target: str,
    estimator: str | None = None,
    trial: int | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> BoundProblem:
    """What `eqprop gdu` examines when it is given these words."""
    return find_problem(target, None, settings, None, Weights(estimator, trial), dtype, trains=False)


BAD: dict[str, tuple[list[str], str]] = {
    "unknown experiment": (["EB-4h"], "Unknown experiment 'EB-4h'.*Did you mean 'EB-"),
    "near miss": (["pconv"], "Did you mean 'P-conv'"),
    "unknown preset": (["toy", "--preset", "papers"], "Unknown preset 'papers'.*Did you mean 'paper'"),
    "unknown dtype": (["toy", "--dtype", "float16"], "Unknown dtype 'float16'"),
    "unknown init": (["toy", "--init", "zeros"], "Unknown model.init 'zeros'; expected one of glorot, default"),
    "missing file": (["nowhere.py:f"], "There is no file nowhere.py"),
    "missing function": ([f"{MODELS}:symetric"], "Unknown function 'symetric'.*Did you mean 'symmetric'"),
    "not a function": ([f"{MODELS}:NUMBER"], "Unknown function 'NUMBER'"),
    "no function named": ([str(MODELS)], "expected FILE.py:FUNCTION"),
    "three values": ([f"{MODELS}:three"], r"data is Tensor; expected a name, .*\(x, y, x_test, y_test\)"),
    "wrong model": ([f"{MODELS}:wrong_model"], "returned str as model; expected an eqprop.Dynamics"),
    "error in the function": ([f"{MODELS}:broken"], r"gdu_models.py, line \d+: KeyError: 'nothing'"),
    "error in the model": ([f"{MODELS}:broken_step"], r"gdu_models.py, line \d+: RuntimeError"),
    "syntax error": (["syntax.py:f"], "syntax.py, line 2: SyntaxError"),
    "never settles": ([f"{MODELS}:cycle"], "None of the 4 samples settles"),
    "nan": ([f"{MODELS}:explode"], "not finite after step"),
    "K larger than T": (["toy", "--T", "5", "--K", "6"], "K=6 steps: the free phase has only T=5. Lower K or raise T"),
    "beta 0": (["toy", "--beta", "0"], "beta=0"),
    "no samples": (["toy", "--batch", "0"], "batch is 0"),
    "init of an own model": ([f"{MODELS}:symmetric", "--init", "default"], "your own function draws its weights"),
    "not a run": (["empty"], "is not a run folder"),
    "no such folder": (["runs/nowhere"], "There is no folder runs/nowhere"),
    "no such device": (["toy", "--device", "cuda:99"], "Cannot use device 'cuda:99'"),
    "json in no folder": (["toy", "--json", "nowhere/a.json"], "--json got 'nowhere/a.json'"),
    "json into a folder": (["toy", "--json", "empty"], "--json got 'empty'"),
}


def prepare(folder: Path) -> list[Path]:
    (folder / "empty").mkdir()
    (folder / "syntax.py").write_text("def f():\n    return (\n")
    return sorted(folder.rglob("*"))


def check(name: str, code: object, stdout: str, stderr: str) -> None:
    said = " ".join(stderr.replace("│", " ").split())
    assert code not in (0, None)
    assert stdout == ""
    assert "Traceback" not in stderr
    assert re.search(BAD[name][1], said), said


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_message_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eqprop", "gdu", *BAD[name][0], "--out", "out"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    check(name, ended.value.code, said.out, said.err)
    assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in str(p)) == before


def test_json_on_standard_output_is_alone_and_out_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    run_here(
        monkeypatch, "gdu", "TOY", "--T", "600", "--K", "5", "--batch", "3", "--seed", "2", "--json", "-", "--out", "o"
    )
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["name"], document["preset"], document["dtype"]) == ("toy", "gdu", "float64")
    assert (document["T"], document["K"], document["beta"], document["batch"], document["seed"]) == (600, 5, 0.01, 3, 2)
    assert document["seconds"] > 0
    assert set(document["residual"]) >= {"max", "median", "unsettled"}
    assert set(document["neurons"]) == {"s0", "s1"}
    assert set(document["synapses"]) == {"W01", "W0x", "W1x"}
    for kind in ("neurons", "synapses"):
        assert all(set(m) >= TABLE_KEYS for m in document[kind].values())
    assert set(document["budget"]) >= BUDGET_KEYS
    assert document["provenance"]["torch"] == torch.__version__
    # What is for people is on standard error, and ends with the verdict and where the figures are.
    assert "error budget of synapses" in said.err
    *_, verdict, figures = said.err.rstrip().splitlines()
    assert verdict == document["budget"]["verdict"]
    assert figures == "Figures as PNG and PDF: o/figures"
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    figures = [f"o/figures/{name}.{end}" for name in ("processes", "rmse") for end in ("pdf", "png")]
    assert found == sorted(["o/gdu.json", "o/traces.json", *figures])
    assert json.loads((tmp_path / "o/gdu.json").read_text()) == document


def run_here(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eqprop", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)


def test_trained_weights_from_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(SMALL.override(epochs=1), tmp_path / "run", samples=200, engine="eager")
    monkeypatch.chdir(tmp_path)
    run_here(monkeypatch, "gdu", "run", "--T", "300", "--json", "-")
    document = json.loads(capsys.readouterr().out)
    assert (document["name"], document["T"], document["K"], document["beta"]) == ("small", 300, 4, 0.2)
    assert set(document["synapses"]) == {"W01", "W12"}
    assert document["batch"] == 20
    # The weights are those that were trained, not those of a new network.
    trained = load(tmp_path / "run").model.double()
    images = read_images(None, DataSettings(samples=200), "cpu", torch.float64)
    rows = images.rows(20, 0)
    x, y = images.train_x[rows], one_hot(images.train_y[rows], 10, torch.float64)
    report = gdu.compare(trained, SquaredError(), x, y, 300, 4, 0.2, Options(shown=0))
    for name, m in report.synapses.items():
        assert document["synapses"][name]["norm"] == pytest.approx(m.norm, rel=1e-9)


def test_a_run_is_compared_with_the_steps_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = SMALL.override(epochs=2, schedule="alternating", preset="tuned")
    train(own, tmp_path / "run", samples=200, engine="eager")
    monkeypatch.chdir(tmp_path)
    run_here(monkeypatch, "gdu", "run", "--json", "one.json")
    assert "small (tuned, trained by ep for 2 epochs, trial 0): " in (said := capsys.readouterr().out)
    assert "T = 8 alternating" in said
    document = json.loads((tmp_path / "one.json").read_text())
    assert (document["schedule"], document["preset"]) == ("alternating", "tuned")
    assert document["convention"]["name"] == "paper"
    run_here(monkeypatch, "gdu", "run", "--schedule", "synchronous", "--json", "two.json")
    assert json.loads((tmp_path / "two.json").read_text())["schedule"] == "synchronous"


def small(folder: Path) -> dict[str, Spec]:
    """The eight experiments, cut so short that all of them take a second, on a few images."""
    cut, few = {}, write_idx(folder / "data", few_images(40, 20))
    for name, spec in papers.specs("gdu").items():
        net = spec.model
        sizes = (10, *(16 for _ in net.sizes[1:-1]), 784) if isinstance(net, LayeredNet) else None
        cut[name] = spec.override(
            T=min(spec.phases.T, 400), K=3, batch=2, sizes=sizes, data=None if name == "toy" else str(few)
        )
    return cut


def of_figures(monkeypatch: pytest.MonkeyPatch, specs: dict[str, Spec]) -> None:
    monkeypatch.setattr(figures_module.papers, "specs", lambda preset: specs)


def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as files, without drawing, which takes most of the time and has tests of its own."""
    for module in ("gdu", "paper"):
        monkeypatch.setattr(f"eqprop.report.{module}.save", lambda figure: {"png": b"png", "pdf": b"pdf"})
    for name in ("processes", "rmse_single"):
        monkeypatch.setattr(f"eqprop.report.gdu.{name}", lambda *found: None)
    undrawn = tuple(figure._replace(draw=lambda found: None) for figure in FIGURES)
    monkeypatch.setattr("eqprop.report.paper.FIGURES", undrawn)


def test_reproduce_figures_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = small(tmp_path)
    of_figures(monkeypatch, cut)
    quick_figures(monkeypatch)
    runner, out = CliRunner(), tmp_path / "figures of the paper"
    made: list[str] = []
    whole = figures_module.compare

    def stop_once(subject: BoundProblem, **rest: Any) -> Any:
        made.append(subject.spec.name)
        if made[-1] == "P-2h" and made.count("P-2h") == 1:
            raise KeyboardInterrupt
        return whole(subject, **rest)

    def again() -> tuple[int, list[str]]:
        """Run it; the exit code and what was computed."""
        made.append("|")
        done = runner.invoke(load_commands(), ["reproduce", "figures", "--out", str(out)])
        begun = len(made) - made[::-1].index("|")
        return done.exit_code, made[begun:]

    monkeypatch.setattr(figures_module, "compare", stop_once)
    code, computed = again()
    assert code != 0
    assert computed == ["EB-1h", "EB-2h", "P-1h", "P-2h"]
    assert not (out / "P-2h").exists()
    assert not (out / "figures").exists()

    assert again() == (0, ["P-2h", "P-3h", "P-conv", "EB-3h", "toy"])
    names = [f"fig-{n:02d}-{figure.name}" for n, figure in enumerate(FIGURES, start=1)]
    assert len(names) == 22
    assert {p.name for p in (out / "figures").iterdir()} == {f"{n}.{end}" for n in names for end in ("png", "pdf")}

    assert again() == (0, [])
    # Other settings are another experiment.
    of_figures(monkeypatch, {**cut, "toy": cut["toy"].override(T=77)})
    assert again() == (0, ["toy"])
    assert json.loads((out / "toy/gdu.json").read_text())["T"] == 77


@pytest.mark.parametrize(("estimator", "nudging"), [("ep-symmetric", "symmetric"), ("bptt", "one-sided")])
def test_lower_precision_is_judged_with_the_nudging_of_the_estimator(
    tmp_path: Path, estimator: str, nudging: Any
) -> None:
    (tmp_path / "own.toml").write_text(
        f'T = 8\nK = 4\nbeta = 0.2\nestimator = "{estimator}"\n[model]\nsizes = [10, 24, 784]\n'
    )
    chosen = subject_of(str(tmp_path / "own.toml"), batch=3)
    found = lost_in(chosen, "float16")
    assert found["nudging"] == nudging
    of = chosen.problem
    single = Problem(of.model.float(), of.cost, of.x.float(), of.y.float())
    wanted, other = (
        compare_precision(single, EP(8, 4, 0.2, nudging=n, checked=False), "float16")[""].to_dict()
        for n in (nudging, "one-sided" if nudging == "symmetric" else "symmetric")
    )
    assert found["with_float32"]["whole"] == wanted != other
