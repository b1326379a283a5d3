"""Your own data in `train`, `resume` and `evaluate`: arrays, tensors, dictionaries, datasets, loaders, .npz files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_runs import assert_same_bits, call_main
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eqprop import data, predict, train
from eqprop.models.layered import LayeredNet
from eqprop.report.page import write_report
from eqprop.run import evaluate, resume
from eqprop.run.spec import Spec

RATES = {"W12": 0.1, "W01": 0.05}
TINY = Spec.of(
    "tiny", model=LayeredNet((3, 6, 8)), optimizer="SGD", estimator="ep", T=6, K=3, epochs=2, rates=RATES, batch=5
)


def arrays(seed: int = 0) -> tuple[Any, ...]:
    """Three classes of 2 x 2 x 2 samples, told apart by the number that is large."""
    source = np.random.default_rng(seed)
    y, y_test = source.integers(0, 3, 40), source.integers(0, 3, 12)
    x, x_test = source.random((40, 2, 2, 2)), source.random((12, 2, 2, 2))
    for samples, labels in ((x, y), (x_test, y_test)):
        samples.reshape(len(samples), -1)[np.arange(len(labels)), labels] += 1.0
    return x, y, x_test, y_test


class Pairs(Dataset[Any]):
    """A data set of numpy samples and whole numbers, as a user writes it."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, n: int) -> tuple[Any, int]:
        return self.x[n], int(self.y[n])


def tensor_sets(x: Any, y: Any) -> TensorDataset:
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def forms() -> dict[str, Any]:
    x, y, x_test, y_test = arrays()
    tensors = tuple(torch.from_numpy(part) for part in arrays())
    return {
        "numpy": (x, y, x_test, y_test),
        "tensors": tensors,
        "lists": [part.tolist() for part in arrays()],
        "dictionary": {"x": x, "y": y, "x_test": x_test, "y_test": y_test},
        "other names": {"x_train": x, "y_train": y, "test_x": x_test, "test_y": y_test},
        "pairs": ((x, y), (x_test, y_test)),
        "tensor data sets": (tensor_sets(x, y), tensor_sets(x_test, y_test)),
        "data sets": (Pairs(x, y), Pairs(x_test, y_test)),
        "loaders": tuple(DataLoader(Pairs(a, b), batch_size=7, shuffle=True) for a, b in ((x, y), (x_test, y_test))),
        "one-hot": (x, np.eye(3)[y], x_test, np.eye(3)[y_test]),
    }


@pytest.mark.parametrize("form", list(forms()))
def test_every_form_of_the_same_data_trains_to_the_same_bits(form: str, tmp_path: Path) -> None:
    train(TINY, tmp_path / "arrays", data=data.from_arrays(*arrays()))
    result = train(TINY, tmp_path / "form", data=forms()[form])
    assert_same_bits(tmp_path / "arrays", tmp_path / "form")
    again = evaluate(tmp_path / "form", data=forms()[form])
    assert again["ep"][0]["test_error"] == result.test_error("ep")


def test_shape_classes_and_checksum_are_computed() -> None:
    x, y, x_test, y_test = arrays()
    made = data.from_arrays(x, y, x_test, y_test)
    assert (made.shape, made.classes, made.train_x.shape, made.train_x.dtype) == (
        (2, 2, 2),
        3,
        (40, 8),
        torch.float32,
    )
    assert made.sha256 == data.from_arrays(*(torch.from_numpy(part) for part in arrays())).sha256
    x[3, 0, 0, 0] += 0.5
    assert made.sha256 != data.from_arrays(x, y, x_test, y_test).sha256
    bytes_ = data.from_arrays(np.full((4, 2), 51, np.uint8), [0, 1, 2, 0], np.zeros((1, 2), np.uint8), [1])
    torch.testing.assert_close(bytes_.train_x, torch.full((4, 2), 0.2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"y": [1] * 39}, "equally many"),
        ({"y": [-1] * 40}, "run from -1"),
        ({"x_test": np.zeros((12, 7))}, "one shape"),
        ({"x": np.full((40, 2, 2, 2), np.nan)}, "NaN or infinity, first in sample 0"),
        ({"x": ["a"] * 40}, "holds no numbers"),
        ({"z": [1]}, "no others"),
        ({"y": np.full(40, 1j)}, "y is torch.complex128; expected real numbers"),
    ],
)
def test_data_that_does_not_fit_is_refused_in_words(changed: dict[str, Any], words: str) -> None:
    given = dict(zip(("x", "y", "x_test", "y_test"), arrays(), strict=True)) | changed
    with pytest.raises(ValueError, match=words):
        data.as_images(given)


def test_a_damaged_npz_file_is_refused_in_words(tmp_path: Path) -> None:
    parts = dict(zip(("x", "y", "x_test", "y_test"), arrays(), strict=True))
    np.savez(tmp_path / "whole.npz", **parts)
    np.savez_compressed(tmp_path / "small.npz", **parts)
    whole, small = (bytearray((tmp_path / name).read_bytes()) for name in ("whole.npz", "small.npz"))
    flipped, wrong = bytearray(whole), bytearray(small)
    flipped[300] ^= 255
    wrong[300:500] = bytes(200)
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, parts["x"])
    for name, content in (("cut", whole[:900]), ("empty", b""), ("flipped", flipped), ("wrong", wrong)):
        (tmp_path / f"{name}.npz").write_bytes(content)
    for name in ("cut", "empty", "flipped", "wrong", "array"):
        with pytest.raises(ValueError, match=r"cannot be read .*expected a file of numpy\.savez"):
            data.open_set(tmp_path / f"{name}.npz")


def stopped_run(folder: Path, given: Any) -> None:
    train(TINY, folder, data=given, estimators="ep,bptt", only=("ep",))


@pytest.mark.parametrize("digest", ["", "mine"])
def test_a_run_is_not_resumed_with_other_data_whatever_its_checksum(digest: str, tmp_path: Path) -> None:
    here, other = (replace(data.from_arrays(*arrays(seed)), sha256=digest) for seed in (0, 1))
    stopped_run(tmp_path / "run", here)
    with pytest.raises(ValueError, match="trained on other data"):
        resume(tmp_path / "run", data=other)
    assert resume(tmp_path / "run", data=here).test_error("bptt") is not None


def regression(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, torch.stack([x[:, :4].mean(1), x[:, 4:].mean(1)], 1)


def test_targets_are_trained_and_measured_by_the_variance_they_leave(tmp_path: Path) -> None:
    given = (*regression(200, 0), *regression(50, 1))
    made = data.from_arrays(*given)
    assert not made.labelled
    assert made.classes == 2
    net = LayeredNet((2, 20, 8), activation="hard-sigmoid")
    rates = {"W12": 0.2, "W01": 0.2}
    experiment = TINY.override(model=net, epochs=15, T=15, K=8, beta=0.3, rates=rates, batch=4)
    result = train(experiment, tmp_path / "run", data=given)
    errors = result.summary["estimators"]["ep"]["trials"][0]["test_error"]
    assert errors[-1] < 40.0 < errors[0]
    # The definition, from the outputs.
    from eqprop import load, relax

    found = load(tmp_path / "run")
    state = relax(found.model, made.test_x, experiment.phases.T).state
    y = made.test_y
    left = 100.0 * (state[0] - y).square().sum() / (y - y.mean(0)).square().sum()
    assert errors[-1] == pytest.approx(float(left), rel=1e-4)
    # Numbers, not classes; a bare model and a run of classes give them when asked.
    assert_close(predict(tmp_path / "run", made.test_x), state[0])
    assert_close(predict(found.model, made.test_x, experiment.phases.T, outputs=True), state[0])
    assert torch.equal(predict(found, made.test_x, outputs=False), state[0].argmax(-1))
    assert "variance that is not explained" in write_report(tmp_path / "run", with_curves=False).page.read_text()
    assert repr(found) == "Trained(tiny, 8-20-2, trained by ep for 15 epochs)"


def test_an_npz_file_and_fewer_test_samples_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y, x_test, y_test = arrays()
    np.savez(tmp_path / "mine.npz", x=x, y=y, x_test=x_test, y_test=y_test)
    toml = tmp_path / "tiny.toml"
    toml.write_text("T = 4\nK = 2\nepochs = 1\nbatch = 5\n[model]\nsizes = [3, 6, 8]\n[optimizer.rates]\n'*' = 0.1")
    words = ("train", toml, "--data", tmp_path / "mine.npz", "--out", tmp_path / "run", "--test-samples", 5, "--quiet")
    assert call_main(monkeypatch, *words) == 0, capsys.readouterr().err
    assert call_main(monkeypatch, "evaluate", tmp_path / "run") == 0
    few = train(TINY, tmp_path / "few", data=arrays(), test_samples=5)
    assert few.test_error("ep") in {20.0 * n for n in range(6)}
    with pytest.raises(ValueError, match="12 test samples"):
        train(TINY, tmp_path / "many", data=arrays(), test_samples=13)
