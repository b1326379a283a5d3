"""Augmentation against definitions in Python, and its draws against what random numbers must be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eqprop.data import Augmentation, Normalisation
from eqprop.data.augment import draws, philox, whole_number
from eqprop.run.extras import Preparation

EVERYTHING = Augmentation(flip=True, crop=4, padding="reflect", cutout=8, fill=120)
SETTINGS = {
    "flip": Augmentation(flip=True),
    "crop, zero": Augmentation(crop=4, padding="zero"),
    "crop, edge": Augmentation(flip=True, crop=4),
    "crop, reflect": Augmentation(flip=True, crop=4, padding="reflect"),
    "cutout": Augmentation(cutout=16),
    "everything": EVERYTHING,
}


def pictures(n: int, channels: int = 3, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """Smooth shapes with noise: edges, flat parts and every grey level."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 5, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    noise = 0.05 * torch.randn(n, channels, height, width, generator=generator)
    return ((smooth + noise) * 255).round().clamp(0, 255).to(torch.uint8)


def test_philox_gives_the_published_answers() -> None:
    """The vectors of Random123, kat_vectors."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, answer in (
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert philox(counter, key) == answer
        tensors = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
        assert tuple(int(word) for word in tensors) == answer


def test_draws_are_philox_of_seed_epoch_sample_and_use() -> None:
    samples = torch.tensor([0, 7, 2**33 + 5])
    seed, epoch = 2**40 + 3, 9
    words = draws(samples, seed, epoch, 5)
    for n, sample in enumerate(samples.tolist()):
        for use in range(5):
            expected = philox((sample % 2**32, epoch, use, sample >> 32), (3, 2**8))
            assert tuple(int(word[n, use]) for word in words) == expected
    tensors = draws(samples, torch.tensor(seed), torch.tensor(epoch), 5)
    assert all(torch.equal(a, b) for a, b in zip(words, tensors, strict=True))


def chi_square(counts: Tensor) -> float:
    """In standard deviations from its mean, for equally likely counts."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("word", range(4))
@pytest.mark.parametrize("n", [2, 9, 14, 32])
def test_draws_are_uniform_and_independent_between_uses(word: int, n: int) -> None:
    found = whole_number(draws(torch.arange(20_000), 3, 5, 4)[word], n)
    assert int(found.min()) == 0
    assert int(found.max()) == n - 1
    for use in range(4):
        assert abs(chi_square(torch.bincount(found[:, use], minlength=n).double())) < 5
        for other in range(use):
            pairs = torch.bincount(found[:, use] * n + found[:, other], minlength=n * n).double()
            assert abs(chi_square(pairs)) < 5
    # The same statistic notices draws that depend on each other.
    assert chi_square(torch.bincount(found[:, 0] * (n + 1), minlength=n * n).double()) > 100


def test_draws_are_independent_between_epochs_seeds_and_neighbours() -> None:
    here = whole_number(draws(torch.arange(20_000), 3, 5, 1)[0][:, 0], 16)
    others = [draws(torch.arange(20_000), *key, 1)[0][:, 0] for key in ((3, 6), (4, 5))]
    for other in (*(whole_number(word, 16) for word in others), here.roll(1)):
        assert abs(chi_square(torch.bincount(here * 16 + other, minlength=256).double())) < 5


def flipped_and_cropped(image: np.ndarray, flip: bool, dy: int, dx: int, setting: Augmentation) -> np.ndarray:
    """The definition, by numpy's own padding."""
    image = image[..., ::-1] if flip else image
    p, mode = setting.crop, {"zero": "constant", "edge": "edge", "reflect": "reflect"}[setting.padding]
    wide = np.pad(image, ((0, 0), (p, p), (p, p)), mode=mode)  # type: ignore[call-overload]
    return wide[:, dy : dy + image.shape[1], dx : dx + image.shape[2]]


@pytest.mark.parametrize("padding", ["zero", "edge", "reflect"])
@pytest.mark.parametrize("size", [(3, 32, 32), (1, 7, 12)])
def test_flip_and_crop_are_numpys(padding: str, size: tuple[int, ...]) -> None:
    setting = Augmentation(flip=True, crop=5, padding=padding)
    images, samples = pictures(40, *size), torch.arange(100, 140)
    words = draws(samples, 1, 2, 3)
    found = setting(images, samples, 1, 2)
    flips = words[0][:, 0] >= 2**31
    assert 5 < int(flips.sum()) < 35
    shifts = [whole_number(words[n][:, 1], 11) for n in (0, 1)]
    assert {*shifts[0].tolist()} | {*shifts[1].tolist()} == set(range(11))
    for n in range(40):
        expected = flipped_and_cropped(images[n].numpy(), bool(flips[n]), *(int(s[n]) for s in shifts), setting)
        assert np.array_equal(found[n].numpy(), expected)


def test_cutout_fills_a_square_that_is_cut_off_at_the_border() -> None:
    images, samples = torch.full((200, 2, 20, 30), 255, dtype=torch.uint8), torch.arange(200)
    found = Augmentation(cutout=7, fill=3)(images, samples, 0, 0)
    words = draws(samples, 0, 0, 3)
    rows, columns = whole_number(words[0][:, 2], 20), whole_number(words[1][:, 2], 30)
    for n in range(200):
        expected = images[n].clone()
        top, left = int(rows[n]) - 3, int(columns[n]) - 3
        expected[:, max(top, 0) : top + 7, max(left, 0) : left + 7] = 3
        assert torch.equal(found[n], expected)
    areas = (found[:, 0] == 3).sum((1, 2))
    assert int(areas.max()) == 49
    assert int(areas.min()) < 30


@pytest.mark.parametrize("name", list(SETTINGS))
def test_an_image_does_not_depend_on_its_batch(name: str) -> None:
    setting, images, samples = SETTINGS[name], pictures(24), torch.arange(1000, 1024)
    whole = setting(images, samples, 1, 2)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(setting(images[order], samples[order], 1, 2), whole[order])
    assert torch.equal(setting(images[3:5], samples[3:5], 1, 2), whole[3:5])
    for other in (setting(images, samples, 2, 2), setting(images, samples, 1, 3), setting(images, samples + 1, 1, 2)):
        assert not torch.equal(other, whole)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_stacked_runs_device_tensors_and_floats_draw_the_same(name: str) -> None:
    setting, images = SETTINGS[name], pictures(24).view(2, 12, 3, 32, 32)
    samples, seeds = torch.arange(24).view(2, 12), torch.tensor([4, 9])
    stacked = setting(images, samples, seeds, torch.tensor(3))
    for run in range(2):
        assert torch.equal(stacked[run], setting(images[run], samples[run], int(seeds[run]), 3))
    floats = setting(images.float() / 255, samples, seeds, 3)
    assert floats.dtype == torch.float32
    torch.testing.assert_close(floats, stacked.float() / 255)
    before = torch.get_rng_state()
    setting(images, samples, seeds, 3)
    assert torch.equal(torch.get_rng_state(), before), "torch's generator stays untouched"


def test_nothing_asked_for_changes_nothing() -> None:
    images = pictures(3)
    assert Augmentation()(images, torch.arange(3), 0, 0) is images
    assert not Augmentation().active
    assert all(setting.active for setting in SETTINGS.values())


def test_normalisation_is_its_formula() -> None:
    norm = Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 3.0)
    images = pictures(4)
    mean, std = (torch.tensor(part, dtype=torch.float64).view(3, 1, 1) for part in (norm.mean, norm.std))
    exact = (images.double() / 255 - mean) / (3 * std)
    torch.testing.assert_close(norm(images, torch.float64), exact, rtol=1e-14, atol=1e-14)
    for given in (images, images.float() / 255):
        found = norm(given, torch.float32)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
        # Lower types are rounded once, at the end.
        assert torch.equal(norm(given, torch.bfloat16), found.bfloat16())
    torch.testing.assert_close(Normalisation()(images), images / 255)
    with pytest.raises(ValueError, match="mean has 3 numbers; the images have 1 channels"):
        norm(images[:, :1], torch.float32)
    for wrong in ({"std": (0.0,)}, {"scale": -1.0}, {"mean": ("a",)}, {"mean": (math.inf,)}):
        with pytest.raises(ValueError, match="expected"):
            Normalisation(**wrong)


def test_preparation_is_augmentation_then_the_inputs_of_the_model() -> None:
    norm = Normalisation((0.5, 0.4, 0.3), (0.2, 0.3, 0.1), 3.0)
    stored, rows = pictures(12).flatten(1), torch.arange(12).flip(0)

    def inputs(x: torch.Tensor) -> torch.Tensor:
        return norm(x.reshape(*x.shape[:-1], 3, 32, 32), torch.float64).flatten(-3)

    images, cpu = pictures(12), torch.device("cpu")
    prepare = Preparation(EVERYTHING, inputs, (3, 32, 32), (5,), cpu)
    prepare.epoch.fill_(7)
    expected = norm(EVERYTHING(images, rows, 5, 7), torch.float64).flatten(1)
    assert torch.equal(prepare(stored, rows), expected)
    prepare.epoch.fill_(8)
    assert not torch.equal(prepare(stored, rows), expected)
    stacked = Preparation(EVERYTHING, inputs, (3, 32, 32), (5, 6), cpu)
    stacked.epoch.fill_(7)
    both = stacked(torch.stack([stored, stored]), torch.stack([rows, rows]))
    assert torch.equal(both[0], expected)
    assert torch.equal(both[1], norm(EVERYTHING(images, rows, 6, 7), torch.float64).flatten(1))
    assert torch.equal(Preparation(None, inputs, (3, 32, 32), (5,), cpu)(stored, rows), inputs(stored))


def compiled_call(setting: Augmentation) -> Any:
    return torch.compile(lambda *given: setting(*given), fullgraph=True, dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SETTINGS))
def test_compiled_code_gives_the_same_bits(name: str) -> None:
    images, samples = pictures(16), torch.arange(16)
    given = images, samples, torch.tensor(2**40 + 7), torch.tensor(3)
    assert torch.equal(compiled_call(SETTINGS[name])(*given), SETTINGS[name](*given))


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(SETTINGS))
def test_cuda_eager_compiled_and_captured_give_the_bits_of_the_cpu(name: str) -> None:
    setting, images, samples = SETTINGS[name], pictures(64), torch.arange(64)
    seed, epoch = torch.tensor(2**40 + 7), torch.tensor(3)
    expected = setting(images, samples, seed, epoch)
    there = tuple(part.cuda() for part in (images, samples, seed, epoch))
    assert torch.equal(setting(*there).cpu(), expected)
    assert torch.equal(compiled_call(setting)(*there).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = setting(*there)
    there[3].fill_(8)
    graph.replay()
    assert torch.equal(found.cpu(), setting(images, samples, seed, 8))
    norm = Normalisation((0.5, 0.4, 0.3), (0.2, 0.3, 0.1), 3.0)
    assert torch.equal(norm(there[0], torch.float32).cpu(), norm(images, torch.float32))
