"""The edges of the command line: where --json goes, files of one's own that fail, values beyond the limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import Call
from helpers.training_runs import few_images, write_idx, write_small_toml

from eqprop import papers


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    write_idx(folder / "data", few_images(60, 20))
    write_small_toml(folder / "small.toml", 1)
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(monkeypatch, capsys)


def test_a_place_for_json_is_tried_before_the_work(call: Call, place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for target in ("/proc/no-such-folder/x", str(tmp_path), f"{tmp_path}/no/x"):
        code, _, err = call("train", place / "small.toml", "--data", place / "data", "--out", run, "--json", target)
        assert (code, run.exists()) == (2, False)
        assert "--json got" in err
    assert list(tmp_path.iterdir()) == []


BAD_MODELS = {
    "syntax": "def net(seed) return 1",
    "raises": "raise KeyError('no')",
    "imports": "import no_such_module_at_all",
    "no function": "x = 1",
    "module": "import torch\ndef net(seed): return torch.nn.Linear(784, 10)",
    "raises later": "def net(seed): raise LookupError('later')",
    "attribute": "def net(seed): return None.weights",
    "shape": "from eqprop.models import Layered\ndef net(seed): return Layered((10, 5, 7), seed=seed)",
    "own phi": (
        "import eqprop\nclass N(eqprop.PrimitiveDynamics):\n"
        "    def init_state(self, x): return (x.new_zeros(len(x), 10),)\n"
        "    def phi(self, x, s): raise IndexError('inside')\n"
        "def net(seed): return N()"
    ),
}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_file_of_model_is_a_sentence(call: Call, place: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BAD_MODELS[kind])
    words = ("--model", f"{path}:net", "--data", place / "data", "--lr", 0.1, "--epochs", 1, "--out", tmp_path / "run")
    code, _, err = call("train", place / "small.toml", *words)
    assert code == 2
    assert err.startswith("eqprop: ")
    assert "Traceback" not in err


BAD_FILES = {
    "rates.toml": ('base = "P-1h"\nrates = 5', "optimizer.rates is 5"),
    "name.toml": ('base = "P-1h"\nname = 5', "name is 5"),
    "unknown.toml": ('base = "P-9h"', "P-9h"),
    "sizes.toml": ('base = "P-1h"\n[model]\nsizes = "784"', "model.sizes is '784'"),
    "options.toml": ('base = "P-1h"\noptimizer_options = 3', "optimizer.options is 3"),
    "control.toml": ('base = "P-1h"\nname = "\\u001b[2J"', "printable"),
    "long.toml": (f'base = "P-1h"\nname = "{"x" * 1000}"', "1 to 200 characters"),
    "deep.toml": (f"x = {'[' * 100_000}", "deep.toml: it is not a TOML file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_of_an_experiment_is_named(tmp_path: Path, name: str) -> None:
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as caught:
        papers.find(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 1200
