"""Network architectures as data; each builds its network from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from eqprop.dynamics import Dynamics
from eqprop.models import Convolutional, Layered
from eqprop.models.convolutional import convolutional_parameters
from eqprop.models.layered import layered_parameters
from eqprop.state import LayerParameters

InitName = Literal["glorot", "default"]
Factory = Callable[[int], Dynamics]
"""Builds a custom network from a seed."""


@dataclass(frozen=True)
class LayeredNet:
    """A fully connected layered net (see `eqprop.models.Layered`); sizes go from the output to the input."""

    sizes: tuple[int, ...] = (10, 512, 784)
    setting: Literal["energy-based", "prototypical"] = "prototypical"
    activation: str = "sigmoid"
    eps: float | None = None
    clip: bool = False
    output_slope: bool = True
    bias: bool = True
    kind: Literal["layered"] = "layered"

    @property
    def layers(self) -> tuple[LayerParameters, ...]:
        """The names of each layer's parameters, output first."""
        return layered_parameters(len(self.sizes) - 1, self.bias)

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        return Layered(
            self.sizes,
            self.setting,
            self.activation,
            eps=self.eps,
            clip=self.clip,
            output_slope=self.output_slope,
            bias=self.bias,
            init=init,
            seed=seed,
            dtype=dtype,
        )

    def without_output(self) -> LayeredNet:
        """The same net without the output layer, which a readout replaces."""
        if len(self.sizes) < 3:
            raise ValueError(f"A net of sizes {self.sizes} has no hidden layer to read; expected at least three sizes.")
        return replace(self, sizes=self.sizes[1:])

    def __str__(self) -> str:
        return "-".join(str(n) for n in reversed(self.sizes))


@dataclass(frozen=True)
class ConvolutionalNet:
    """Convolution and pooling, then fully connected layers (see `eqprop.models.Convolutional`)."""

    input_shape: tuple[int, int, int] = (1, 28, 28)
    channels: tuple[int, ...] = (64, 32)
    flat: tuple[int, ...] = (10,)
    activation: str = "hard-sigmoid"
    kernel: int = 5
    padding: int = 0
    pool: int = 2
    bias: bool = True
    kind: Literal["convolutional"] = "convolutional"

    @property
    def layers(self) -> tuple[LayerParameters, ...]:
        return convolutional_parameters(len(self.flat), len(self.channels), self.bias)

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        return Convolutional(
            self.input_shape,
            self.channels,
            self.flat,
            self.activation,
            kernel=self.kernel,
            padding=self.padding,
            pool=self.pool,
            bias=self.bias,
            init=init,
            seed=seed,
            dtype=dtype,
        )

    def without_output(self) -> ConvolutionalNet:
        return replace(self, flat=self.flat[1:])

    def __str__(self) -> str:
        maps = "-".join(str(n) for n in reversed(self.channels))
        return f"{maps} maps of {self.kernel} x {self.kernel}, pool {self.pool}, {'-'.join(map(str, self.flat[::-1]))}"


@dataclass(frozen=True)
class OwnNet:
    """A custom network. Only its name is data; the function that builds it is passed alongside the experiment.

    A run folder therefore never names code to execute: whoever opens it must pass the function again.
    """

    source: str = "own"
    kind: Literal["own"] = "own"

    layers: ClassVar[tuple[LayerParameters, ...]] = ()

    def build(self, init: InitName, seed: int, dtype: torch.dtype) -> Dynamics:
        raise ValueError(
            f"The experiment uses a custom network ({self.source}), but got no function that builds it. Pass "
            "model=function in Python, or --model FILE.py:FUNCTION on the command line."
        )

    def without_output(self) -> OwnNet:
        """The network itself: the readout reads its output layer."""
        return self

    def __str__(self) -> str:
        return f"own model {self.source}"


Architecture = LayeredNet | ConvolutionalNet | OwnNet
KINDS: dict[str, type[Any]] = {
    "layered": LayeredNet,
    "convolutional": ConvolutionalNet,
    "own": OwnNet,
}
