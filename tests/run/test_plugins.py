"""Parts from outside: registered by a call, or by an installed package, and used wherever a built-in one is."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, call_main, few_images, write_idx, write_small_toml
from torch import Tensor

import eqprop
from eqprop import plugins
from eqprop.estimators.named import label
from eqprop.models import Layered
from eqprop.run import Watch, evaluate, resume, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "eqprop-vector-field"


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {kind: {} for kind in plugins.KINDS})


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example package, installed by pip into a folder on sys.path."""
    place, copy = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    words = ("pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-t", place, copy)
    done = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(place))
    importlib.invalidate_caches()
    yield place
    sys.path.remove(str(place))


def test_an_installed_package_adds_its_parts_everywhere(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main(monkeypatch, "list", "--parts", "--json", tmp_path / "parts.json") == 0
    parts = json.loads((tmp_path / "parts.json").read_text())
    assert parts["estimator"]["toy-vector-field"] == "eqprop-vector-field 0.1.0"
    assert parts["engine"]["toy-unrolled"] == "eqprop-vector-field 0.1.0"
    assert parts["estimator"]["ep"] == parts["data"]["mnist"] == "eqprop"
    images = write_idx(tmp_path / "data", few_images())
    toml = write_small_toml(tmp_path / "small.toml", 1)
    toml.write_text(toml.read_text().replace('"ep"', '"toy-vector-field"'))
    words = ("train", toml, "--data", images, "--engine", "toy-unrolled", "--out", tmp_path / "run", "--quiet")
    assert call_main(monkeypatch, *words) == 0, capsys.readouterr().err
    assert call_main(monkeypatch, "resume", tmp_path / "run", "--quiet") == 0
    assert call_main(monkeypatch, "gdu", tmp_path / "run", "--T", 100, "--K", 3, "--batch", 4) == 0
    assert call_main(monkeypatch, "report", tmp_path / "run") == 0
    held = json.loads((tmp_path / "run" / "result.json").read_text())
    assert held["engine"] == "toy-unrolled"
    assert list(held["estimators"]) == ["toy-vector-field"]
    assert "toy-vector-field" in (tmp_path / "run" / "report.html").read_text()


def test_the_vector_field_is_the_gradient_for_small_beta(installed: Path) -> None:
    kind = importlib.import_module("eqprop_vector_field.estimator").VectorField
    # Energy-based: dF/ds is symmetric, and the estimator exact as beta -> 0.
    model = Layered((3, 8, 6), "energy-based", "tanh", eps=0.5, seed=0, dtype=torch.float64)
    source = torch.Generator().manual_seed(0)
    x, y = (torch.rand(5, n, generator=source, dtype=torch.float64) for n in (6, 3))
    cost = eqprop.SquaredError()
    _, exact = eqprop.BPTT(400, 200).gradient(model, cost, x, y)
    gaps = []
    for beta in (1e-2, 1e-3):
        _, found = kind(400, 200, beta=beta).gradient(model, cost, x, y)
        gaps.append(max(float((found[p] - g).abs().max()) for p, g in exact.items()))
    assert gaps[1] < 0.2 * gaps[0]
    assert gaps[1] < 1e-2 * max(float(g.abs().max()) for g in exact.values())
    summed = kind(400, 200, beta=1e-3)
    free = eqprop.relax(model, x, 400)
    total = {n: sum(s.synapses[n] for s in summed.steps(model, cost, x, y, free)) for n in ("W01", "W12")}
    for name, value in total.items():
        torch.testing.assert_close(value, found[getattr(model, name)], rtol=1e-6, atol=1e-9)


def test_the_toy_engine_ends_at_the_same_bits(installed: Path, tmp_path: Path) -> None:
    one = train(SMALL, tmp_path / "one", data=few_images(), engine="eager", epochs=1)
    other = train(SMALL, tmp_path / "other", data=few_images(), engine="toy-unrolled", epochs=1)
    assert one.test_error("ep") == other.test_error("ep")


class Ear(Watch):
    heard: list[int]

    def epoch(self, lines: Any, progress: Any) -> None:
        type(self).heard.append(lines[0]["epoch"])


def cubic(s: eqprop.State, y: Tensor) -> Tensor:
    return (s[0] - y).abs().pow(3).sum(-1)


def soft(v: Tensor) -> Tensor:
    return torch.sigmoid(2 * v - 1)


def few() -> Any:
    return few_images()


def own(seed: int) -> Any:
    return Layered((10, 12, 784), seed=seed)


def register_all() -> None:
    Ear.heard = []
    eqprop.register("cost", "cubic", cubic)
    eqprop.register("activation", "soft", soft)
    eqprop.register("data", "few", few)
    eqprop.register("model", "mine", own)
    eqprop.register("logger", "ear", Ear)
    eqprop.register("estimator", "slow-ep", lambda e: eqprop.EP(2 * e.phases.T, e.phases.K, beta=e.phases.beta))


def test_every_kind_is_registered_by_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_all()
    toml = tmp_path / "own.toml"
    toml.write_text(
        'T = 4\nK = 2\nepochs = 1\ncost = "cubic"\nestimator = "slow-ep"\n'
        '[model]\nsizes = [10, 12, 784]\nactivation = "soft"\n[optimizer.rates]\n"*" = 0.1\n'
    )
    words = ("train", toml, "--data", "few", "--out", tmp_path / "run", "--quiet", "--logger", "ear")
    assert call_main(monkeypatch, *words) == 0
    assert Ear.heard == [1]
    held = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert (held["experiment"]["cost"]["kind"], held["data"]["set"]) == ("cubic", "few")
    assert evaluate(tmp_path / "run")["slow-ep"][0]["test_error"] is not None
    assert call_main(monkeypatch, "report", tmp_path / "run") == 0
    train("mine", tmp_path / "mine", data="few", epochs=1, T=4, K=2, estimators="ep,bptt", only=("ep",))
    assert resume(tmp_path / "mine").test_error("bptt") is not None
    assert label("slow-ep") == "slow-ep"


def test_a_package_that_breaks_is_named_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[eqprop.engine]\nbroken = no_such_module:Engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugins.origins("engine")["broken"] == "broken 1.0"
    with pytest.raises(ImportError, match="The engine 'broken' of the package broken"):
        train(SMALL, tmp_path / "run", data=few_images(), engine="broken")
