"""Augmentation and normalisation of images on their device, the same in every run that draws the same.

Draws come from Philox4x32-10, a generator without state: its numbers are a function of (seed, epoch, sample, use).
A resumed run, another engine, another batch and another number of processes therefore draw the same. All arithmetic
up to the augmented image is on whole numbers that fit their type, so that CPU, CUDA and compiled code agree bit for
bit. Nothing here waits for the device or depends on values in its control flow: it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from eqprop.settings import LARGEST, Finite, Section, check_fields

Word = int | Tensor
"""An unsigned 32-bit number in a Python int or an int64 tensor."""

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

USES = FLIP, CROP, CUTOUT = range(3)
"""What a draw is used for."""


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 (Salmon et al. 2011): four random words from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def _product(a: Word, b: int) -> tuple[Word, Word]:
    """High and low word of a b, in halves: compilers may assume that int64 does not overflow."""
    low = (a & 0xFFFF) * b
    middle = (a >> 16) * b + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def draws(samples: Tensor, seed: Word, epoch: Word, uses: int) -> tuple[Tensor, ...]:
    """Four random words, each (..., uses), for every sample (...), in this epoch of the run with this seed.

    `seed` and `epoch` are ints or int64 tensors: 0-dimensional, or (R,) for samples (R, B).
    """
    given = samples.to(torch.int64).unsqueeze(-1)
    seed, epoch = _beside(seed), _beside(epoch)
    use = torch.arange(uses, device=samples.device)
    counter = (given & MASK, epoch & MASK, use, (given >> 32) & MASK)
    words = philox(counter, (seed & MASK, (seed >> 32) & MASK))
    return tuple(word.expand(*samples.shape, uses) for word in words if isinstance(word, Tensor))


def _beside(value: Word) -> Word:
    """A value per run, shaped to stand beside (run, sample, use)."""
    return value[:, None, None] if isinstance(value, Tensor) and value.dim() else value


def whole_number(word: Tensor, n: int) -> Tensor:
    """A number from 0 to n - 1 from a random word; uneven by at most n / 2^32."""
    return (word * n) >> 32


PADDINGS = ("zero", "edge", "reflect")
Whole = Annotated[int, Meta(ge=0)]
Above0 = Annotated[float, Meta(gt=0, le=LARGEST)]


class Augmentation(Section, frozen=True):
    """Random changes of training images: flip, crop and cutout, in this order.

    flip        mirror left and right, with probability 1/2
    crop        shift by up to so many pixels each way; `padding` fills what is uncovered
    padding     what fills the shifted border: zero, edge or reflect
    cutout      side of a square of one grey level, centred anywhere in the image
    fill        that grey level, 0 to 255
    """

    flip: bool = False
    crop: Whole = 0
    padding: Literal["zero", "edge", "reflect"] = "edge"
    cutout: Whole = 0
    fill: Annotated[int, Meta(ge=0, le=255)] = 0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def active(self) -> bool:
        """Whether anything is changed."""
        return bool(self.flip or self.crop or self.cutout)

    def __str__(self) -> str:
        parts = {
            "flip": self.flip,
            f"crop {self.crop} with padding {self.padding}": self.crop,
            f"cutout {self.cutout}": self.cutout,
        }
        return ", ".join(text for text, there in parts.items() if there) or "none"

    def check(self, x: Tensor, shape: tuple[int, ...]) -> None:
        """Raise unless samples x (N, pixels) of this shape can be augmented; call it once, before training."""
        if not self.active:
            return
        if len(shape) not in (2, 3):
            raise ValueError(f"Augmentation takes images, (H, W) or (C, H, W); the samples have shape {shape}.")
        self._check_shape((shape[0] if len(shape) == 3 else 1, *shape[-2:]), x.dtype)
        if x.is_floating_point() and x.numel():
            low, high = float(x.min()), float(x.max())
            if not (low >= 0.0 and high <= 1.0):
                raise ValueError(
                    f"Augmentation takes grey levels from 0 to 1; the images hold {low:g} to {high:g}. Give them as "
                    "uint8 or divided by their largest value, and normalise in the experiment."
                )

    def _check_shape(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        _, height, width = shape
        if dtype != torch.uint8 and not dtype.is_floating_point:
            raise ValueError(f"Augmentation takes images of uint8 or of floats from 0 to 1; got {dtype}.")
        if self.padding == "reflect" and self.crop >= min(height, width):
            raise ValueError(
                f"Cannot reflect {self.crop} pixels of images of {height} x {width}; lower crop to at most "
                f"{min(height, width) - 1}."
            )

    def __call__(self, images: Tensor, samples: Tensor, seed: Word, epoch: Word) -> Tensor:
        """Images (B, C, H, W) of uint8, or floats in [0, 1], changed; same shape and type.

        `samples` (B,) are their numbers in the training set. Stacked runs: (R, B, C, H, W), (R, B), seeds (R,).
        """
        if not self.active:
            return images
        self._check_call(images, samples)
        words = draws(samples, seed, epoch, len(USES))
        if self.flip or self.crop:
            images = self._shifted(images, words)
        return self._cut(images, words) if self.cutout else images

    def _check_call(self, images: Tensor, samples: Tensor) -> None:
        if images.dim() < 4 or samples.shape != images.shape[:-3] or samples.device != images.device:
            raise ValueError(
                f"Augmentation got images of shape {tuple(images.shape)} on {images.device} and samples of shape "
                f"{tuple(samples.shape)} on {samples.device}; expected (B, C, H, W) and (B,) on one device."
            )
        self._check_shape(tuple(images.shape[-3:]), images.dtype)

    def _shifted(self, images: Tensor, words: tuple[Tensor, ...]) -> Tensor:
        """out[h, w] = padded(flipped image)[h + dy, w + dx]."""
        height, width = images.shape[-2:]
        down, across = (whole_number(words[n][..., CROP], 2 * self.crop + 1) - self.crop for n in (0, 1))
        row = torch.arange(height, device=images.device) + down.unsqueeze(-1)  # (..., H)
        column = torch.arange(width, device=images.device) + across.unsqueeze(-1)  # (..., W)
        inside = ((row >= 0) & (row < height)).unsqueeze(-1) & ((column >= 0) & (column < width)).unsqueeze(-2)
        row, column = (_padded(place, size, self.padding) for place, size in ((row, height), (column, width)))
        if self.flip:
            mirrored = (words[0][..., FLIP] >> 31).bool().unsqueeze(-1)
            column = torch.where(mirrored, width - 1 - column, column)
        taken = _take(images, row.unsqueeze(-1) * width + column.unsqueeze(-2))
        return torch.where(inside.unsqueeze(-3), taken, 0) if self.crop and self.padding == "zero" else taken

    def _cut(self, images: Tensor, words: tuple[Tensor, ...]) -> Tensor:
        """Fill the square whose centre is drawn; it is cut off at the border."""

        def within(word: Tensor, size: int) -> Tensor:
            first = whole_number(word[..., CUTOUT], size).unsqueeze(-1) - self.cutout // 2
            place = torch.arange(size, device=images.device)
            return (place >= first) & (place < first + self.cutout)

        height, width = images.shape[-2:]
        square = within(words[0], height).unsqueeze(-1) & within(words[1], width).unsqueeze(-2)
        grey = self.fill if images.dtype == torch.uint8 else self.fill / 255
        return torch.where(square.unsqueeze(-3), grey, images)


def _padded(place: Tensor, size: int, padding: str) -> Tensor:
    """The place in 0 .. size - 1 from which padding takes its pixels."""
    if padding == "reflect":
        return (size - 1) - ((size - 1) - place.abs()).abs()
    return place.clamp(0, size - 1)


def _take(images: Tensor, index: Tensor) -> Tensor:
    """The pixels (..., C, H, W) at index (..., H, W), a row-major place in the image."""
    chosen = index.flatten(-2).unsqueeze(-2).expand(*images.shape[:-2], -1)
    return torch.gather(images.flatten(-2), -1, chosen).unflatten(-1, tuple(index.shape[-2:]))


class Normalisation(Section, frozen=True):
    """(x - mean) / (scale std) per channel, for x from 0 to 1. A list of one number stands for all channels.

    mean, std   subtracted, and divided by, per channel
    scale       a further divisor
    """

    mean: Annotated[tuple[Finite, ...], Meta(min_length=1)] = (0.0,)
    std: Annotated[tuple[Above0, ...], Meta(min_length=1)] = (1.0,)
    scale: Above0 = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise unless samples of this shape, (H, W), (C, H, W) or flat, have as many channels."""
        channels = shape[0] if len(shape) == 3 else 1
        for name in ("mean", "std"):
            got = len(getattr(self, name))
            if got not in (1, channels):
                raise ValueError(f"{name} has {got} numbers; the images have {channels} channels. Give one for each.")

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images (..., C, H, W) of uint8, or floats in [0, 1], as floats of `dtype`; computed in at least float32."""
        self.check(tuple(images.shape[-3:]))
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        unit = 255.0 if images.dtype == torch.uint8 else 1.0
        mean = self._column([unit * v for v in self.mean], images, exact)
        deviation = self._column([unit * self.scale * v for v in self.std], images, exact)
        # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently.
        return ((images.to(exact) - mean) / deviation).to(dtype)

    @staticmethod
    def _column(values: list[float], images: Tensor, dtype: torch.dtype) -> Tensor:
        """(C, 1, 1), filled on the device: a copy from the host could not be captured."""
        return torch.cat([images.new_full((1, 1, 1), v, dtype=dtype) for v in values])
