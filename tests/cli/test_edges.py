"""The edges of the command line: where --json goes, files of one's own that fail, values beyond the limits."""

from __future__ import annotations

import gzip
import importlib
import json
import struct
import sys
from pathlib import Path

import pytest
from helpers.commands import Call
from helpers.training_runs import few_images, write_idx, write_small_toml

from eqprop import papers
from eqprop.data import open_set, read_idx
from eqprop.data.images import MNIST_DIRECTORY
from eqprop.run.own import load_function


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


def test_a_file_called_random_leaves_the_standard_librarys_alone(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("def net(seed): return seed\n")
    (tmp_path / "neighbour.py").write_text("value = 5\n")
    (tmp_path / "statistics.py").write_text("raise RuntimeError('not the library')\n")
    (tmp_path / "own.py").write_text("import neighbour\ndef net(seed): return neighbour.value\n")
    assert load_function(f"{tmp_path}/random.py:net")(3) == 3
    assert load_function(f"{tmp_path}/own.py:net")(3) == 5
    for name in ("random", "statistics"):
        kept = sys.modules.pop(name, None)
        try:
            found = importlib.import_module(name).__file__
        finally:
            if kept is not None:
                sys.modules[name] = kept
        assert found is not None
        assert not found.startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["../../x", "/tmp/eqprop-absolute", "..", ".hidden", "a/b"])
def test_tune_stays_in_its_folder(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    asked = []
    monkeypatch.setattr("eqprop.cli.tune.run_recipe", lambda wanted: asked.append(wanted.folder))
    Path("named.toml").write_text(f'base = "P-1h"\nname = {json.dumps(name)}\n')
    assert call("tune", "named.toml")[0] == 0
    assert asked[0].resolve().parent == inside / "tuned"


BAD_FILES = {
    "rates.toml": ('base = "P-1h"\nrates = 5', "optimizer.rates is 5"),
    "name.toml": ('base = "P-1h"\nname = 5', "name is 5"),
    "unknown.toml": ('base = "P-9h"', "P-9h"),
    "sizes.toml": ('base = "P-1h"\n[model]\nsizes = "784"', "model.sizes is '784'"),
    "large.toml": ('base = "P-1h"\n[model]\nsizes = [10, 1000000000, 784]', "at most 500000000"),
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


BAD_OPTIONS = {
    ("--output-bias", "1e308"): "output_bias is 1e+308",
    ("--device", "meta"): "Cannot use device 'meta'",
    ("--T", "18446744073709551646"): "T is 18446744073709551646; expected a whole number from 1 to 1000000",
    ("--seed", str(2**64)): "seed is",
    ("--optimizer-option", "lr=5"): "optimizer.options sets lr",
    ("--optimizer-option", "fused=true", "--optimizer-option", "foreach=true"): "does not take the options",
    ("--optimizer-option", "momentum=[]"): "does not take the options",
    ("--lr", "0", "--epochs", "2000000"): "epochs is 2000000; expected a whole number from 1 to 100000",
    ("--trials", "100000"): "trials is 100000; expected a whole number from 1 to 1000",
    ("--threads", "100000000"): "threads is 100000000",
}


@pytest.mark.parametrize("words", BAD_OPTIONS, ids=" ".join)
def test_values_beyond_the_limits_are_refused_in_a_sentence(
    call: Call, place: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, _, err = call("train", place / "small.toml", "--data", place / "data", "--out", tmp_path / "run", *words)
    assert code == 2
    assert BAD_OPTIONS[words] in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("tune", "P-1h", "--threads", "0"), "threads is 0; expected a whole number from 1"),
        (("gdu", "P-1h", "--data", "no-such-set"), "There is no data set and no directory 'no-such-set'"),
        (("train", "P-1h", "--estimator", ""), "estimators is ''; expected names"),
    ],
)
def test_options_that_cannot_apply_are_refused(call: Call, words: tuple[str, ...], complaint: str) -> None:
    code, _, err = call(*words)
    assert (code, complaint in err) == (2, True), err


def test_a_small_gzip_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(struct.pack(">BBBBIII", 0, 0, 8, 3, 1 << 20, 64, 64) + bytes(1 << 22))
    with pytest.raises(ValueError, match="too large.*at most 1073741824"):
        read_idx(path)


def test_mnist_is_not_taken_for_kmnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQPROP_CACHE", str(tmp_path))
    cache = tmp_path / "eqprop" / "data" / "kmnist"
    cache.mkdir(parents=True)
    for path in MNIST_DIRECTORY.glob("*.gz"):
        (cache / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    with pytest.raises(ValueError, match="belongs to MNIST"):
        open_set("kmnist")
