"""Image folders: read as Pillow reads each file, in an order that no file system changes; a bad file is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training_runs import call_main
from PIL import Image

from eqprop import data

CLASSES = ("ant", "bee", "cat")


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> Image.Image:
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], *channels), np.uint8)
    return Image.fromarray(values)


def write(root: Path, mode: str = "RGB", train: int = 8, test: int = 2, halves: bool = True) -> Path:
    """Class CLASSES[c] has `train` images in train/ and `test` in test/, or all of them in one folder."""
    for c, name in enumerate(CLASSES):
        for half, count in (("train", train), ("test", test)):
            place = root / half / name if halves else root / name
            place.mkdir(parents=True, exist_ok=True)
            for n in range(count if halves or half == "train" else 0):
                picture(1000 * c + n + (500 if half == "test" else 0), mode).save(place / f"{n}.png")
    return root


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_every_image_is_there_with_its_class(tmp_path: Path, mode: str) -> None:
    images = data.open_set(write(tmp_path / "insects", mode))
    assert (images.name, images.classes, images.class_names) == ("insects", 3, CLASSES)
    assert images.shape == ((5, 6) if mode == "L" else (3, 5, 6))
    assert (images.train_x.dtype, len(images.train_x), len(images.test_x)) == (torch.uint8, 24, 6)
    for x, y, first, count in (
        (images.train_x, images.train_y, 0, 8),
        (images.test_x, images.test_y, 500, 2),
    ):
        held = [(tuple(row.tolist()), int(label)) for row, label in zip(x, y, strict=True)]
        expected = [
            (tuple(np.moveaxis(np.atleast_3d(picture(1000 * c + first + n, mode)), 2, 0).ravel().tolist()), c)
            for c in range(3)
            for n in range(count)
        ]
        assert sorted(held) == sorted(expected)


def test_the_order_does_not_depend_on_the_file_system_and_mixes_classes(tmp_path: Path) -> None:
    one = data.image_folder(write(tmp_path / "one", train=30))
    (tmp_path / "two").mkdir()
    for path in sorted((tmp_path / "one").rglob("*.png"), reverse=True):  # made in another order
        there = tmp_path / "two" / path.relative_to(tmp_path / "one")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(path.read_bytes())
    two = data.image_folder(tmp_path / "two")
    assert torch.equal(one.train_x, two.train_x)
    assert one.sha256 == two.sha256
    assert set(data.split_validation(one, 15).test_y.tolist()) == {0, 1, 2}


def test_one_level_has_no_test_set_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "insects", "L", train=10, halves=False)
    images = data.open_set(folder)
    assert (len(images.train_x), len(images.test_x), images.shape) == (30, 0, (5, 6))
    toml = tmp_path / "tiny.toml"
    toml.write_text("T = 2\nK = 1\nepochs = 1\nbatch = 5\n[model]\nsizes = [3, 4, 30]\n[optimizer.rates]\n'*' = 0.1")
    words = ("train", toml, "--data", folder, "--out", tmp_path / "run", "--quiet")
    assert call_main(monkeypatch, *words) == 2
    assert "insects has no test images. Hold out training images: --validation N" in capsys.readouterr().err
    assert call_main(monkeypatch, *words, "--validation", 10) == 0
    assert call_main(monkeypatch, "evaluate", tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:60]), "bee/3.png cannot be read as an image"),
        (lambda p: p.write_bytes(b""), "bee/3.png cannot be read as an image"),
        (lambda p: p.write_bytes(b"no image at all"), "bee/3.png cannot be read as an image"),
        (
            lambda p: picture(1, "RGB", (7, 5)).save(p),
            "bee/3.png has 7 x 5 pixels, .*ant/0.png 6 x 5; expected one",
        ),
        (lambda p: picture(1, "RGBA").save(p), "bee/3.png has transparent parts"),
        (lambda p: Image.fromarray(np.full((5, 6), 999, np.uint16)).save(p), "bee/3.png has the mode I;16"),
        (lambda p: p.with_name("notes.txt").write_text("hello"), "notes.txt is not an image; expected .bmp"),
        (lambda p: (p.parent.parent / "dog").mkdir(), "has nothing in dog"),
    ],
)
def test_a_bad_file_is_named_in_one_sentence(tmp_path: Path, spoil: object, words: str) -> None:
    folder = write(tmp_path / "insects")
    spoil(folder / "train" / "bee" / "3.png")  # type: ignore[operator]
    with pytest.raises(ValueError, match=words) as caught:
        data.open_set(folder)
    assert "\n" not in str(caught.value)


def test_classes_of_the_test_set_are_those_of_training(tmp_path: Path) -> None:
    folder = write(tmp_path / "insects")
    (folder / "test" / "ant").rename(folder / "test" / "emu")
    with pytest.raises(ValueError, match="has a class 'emu', which .*train has not"):
        data.open_set(folder)
    (folder / "test").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="test has 0 folders; expected a folder with images for each"):
        data.open_set(folder)
