"""What every net of a spec has: its initial weights, where the nudge enters, where its outputs begin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics, NudgeSite
from eqprop.settings import Finite, Section, about
from eqprop.state import LayerParameters

InitName = Literal["glorot", "default"]


class ModelSettings(Section, frozen=True, kw_only=True):
    """A net as data: `kind` names it in files, and the other fields of its own are arguments of its `network`.

    output_bias     BPTT gives no gradient to an output that a clip or a hard sigmoid holds at 0 from the start (see
                    docs/table1.md)
    """

    network: ClassVar[Callable[..., Dynamics]]
    """The class that is built."""

    if TYPE_CHECKING:
        kind: str = ""  # declared by each kind, after the fields of its own that may be given by position
    init: Annotated[InitName, about("Initial weights: glorot or default (PyTorch's).")] = "glorot"
    nudge_site: Annotated[NudgeSite, about("Nudge outside sigma, as in the paper, inside, or implicit.")] = "outside"
    output_bias: Annotated[Finite, about("Initial biases of the outputs; by default drawn.")] | None = None
    output_scale: Annotated[Finite, about("Factor on the outputs' initial weights.")] = 1.0

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        """The names of each layer's parameters, output first; none where the network does not declare them."""
        return self.build(0, torch.float32).layer_parameters

    def arguments(self) -> dict[str, Any]:
        """What the network is built with beside its seed; where the nudge enters is set afterwards."""
        taken = [n for n in inspect.signature(self.network).parameters if n != "nudge_site"]
        return {name: getattr(self, name) for name in self.__struct_fields__ if name in taken}

    def build(self, seed: int, dtype: torch.dtype) -> Any:
        """The network, with the weights that `init` draws from the seed."""
        return self.network(**self.arguments(), seed=seed, dtype=dtype)

    def samples(self, n: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """Inputs and labels that come with the net where no data are given; None: MNIST."""
        return None

    def without_output(self) -> ModelSettings:
        """The same net without the output layer, which a readout replaces."""
        return self


def from_input(sizes: Sequence[int]) -> str:
    """784-512-10, of sizes from the output to the input."""
    return "-".join(str(n) for n in reversed(sizes))
