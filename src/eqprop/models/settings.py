"""What every net of a spec has: its initial weights, where the nudge enters, where its outputs begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics, NudgeSite
from eqprop.settings import Finite, Section, about
from eqprop.state import LayerParameters

InitName = Literal["glorot", "default"]
MOST_WEIGHTS = 500_000_000
"""The largest network built, in weights: 2 GB in float32, as much again for each gradient."""


class ModelSettings(Section, frozen=True, kw_only=True):
    """A net as data. It builds its network from a seed; `kind` names it in files.

    output_bias     BPTT gives no gradient to an output that a clip or a hard sigmoid holds at 0 from the start (see
                    docs/table1.md)
    """

    if TYPE_CHECKING:
        kind: str = ""  # declared by each kind, after the fields of its own that may be given by position
    init: Annotated[InitName, about("Initial weights: glorot or default (PyTorch's).")] = "glorot"
    nudge_site: Annotated[NudgeSite, about("Nudge outside sigma, as in the paper, inside, or implicit.")] = "outside"
    output_bias: Annotated[Finite, about("Initial biases of the outputs; by default drawn like all others.")] | None = None
    output_scale: Annotated[Finite, about("Factor on the outputs' initial weights.")] = 1.0

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        """The names of each layer's parameters, output first; none where they are not known before it is built."""
        return ()

    @property
    def weights(self) -> int:
        """How many weights the network will have; 0 if unknown."""
        return 0

    def build(self, seed: int, dtype: torch.dtype) -> Dynamics:
        """The network with the weights that `init` draws from the seed."""
        raise NotImplementedError(f"{type(self).__name__} must define build(seed, dtype).")

    def samples(self, n: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """Inputs and labels that come with the net where no data are given; None: MNIST."""
        return None

    def without_output(self) -> ModelSettings:
        """The same net without the output layer, which a readout replaces."""
        return self

    def drawn(self, seed: int, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of a network's class that say how its weights are drawn."""
        return {"init": self.init, "seed": seed, "dtype": dtype}
