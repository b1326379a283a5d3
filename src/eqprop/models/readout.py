"""Cross-entropy of a softmax readout with trained weights, outside the dynamics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from eqprop.cost import Cost, FunctionCost, check_kind
from eqprop.models.connections import Init, Weight, add_parameters
from eqprop.plugins import Table, later
from eqprop.state import LayerParameters, State

OWN_COST = "own"
"""The cost that your own function returned with its network."""
READOUT_SEED = 1 << 32
"""Added to a trial's seed for the readout's weights, so that they do not repeat the network's random numbers."""


def _made(part: Any) -> Callable[[], Cost]:
    """A function that makes the cost; a function l(s, y) becomes a cost."""
    return part if isinstance(part, type) and issubclass(part, Cost) else lambda: FunctionCost(part)


@final
class CrossEntropy(Cost):
    """l = -sum_c y_c log p_c, p = softmax(Wout s + bout), where s is one layer, flattened.

    The readout reads the layer but acts on it only through the nudge, -beta dl/ds = beta Wout^T (y - p). Wout and
    bout are parameters of the cost. With every estimator their gradient is dl/dWout at the free state: the theorem's
    term for a cost that depends on parameters  [sec:index-shift].

    dtype       of the weights; None: torch's default
    inputs      number of neurons in the layer it reads
    classes     y has one number per class: one-hot rows, or any probabilities
    layer       the layer it reads; 0 is the last of the dynamics
    init, seed  as for the models

    For stacked networks, combine their readouts with `stack_readouts`.
    """

    Wout: nn.Parameter
    bout: nn.Parameter

    def __init__(
        self,
        inputs: int,
        classes: int,
        layer: int = 0,
        *,
        init: Init = "default",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if inputs < 1 or classes < 2 or layer < 0:
            raise ValueError(
                f"CrossEntropy got inputs={inputs}, classes={classes}, layer={layer}; expected at least one input, at "
                "least two classes, and the index of a layer, 0 being the last."
            )
        self.inputs, self.classes, self.layer = inputs, classes, layer
        wanted = {"Wout": Weight((classes, inputs), inputs, classes), "bout": Weight((classes,), inputs, classes)}
        add_parameters(self, wanted, init, seed, dtype)

    @property
    def pulls(self) -> int:  # type: ignore[override]
        return self.layer

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return (LayerParameters(("Wout",), "bout"),)

    def scores(self, s: State) -> Tensor:
        """Wout s + bout, (B, classes) or (R, B, classes)."""
        return self._seen(s) @ self.Wout.mT + self.bout.unsqueeze(-2)

    def _seen(self, s: State) -> Tensor:
        return s[self.layer].flatten(self.Wout.dim() - 1)

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        z = self.scores(s)
        return y.sum(-1) * _log_sum_exp(z) - (y * z).sum(-1)

    def pull(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        """Wout^T (p - y) for the layer it reads."""
        z = self.scores(s)
        p = torch.exp(z - _log_sum_exp(z).unsqueeze(-1))
        force = (y.sum(-1, keepdim=True) * p - y) @ self.Wout
        return tuple(force.view_as(v) if n == self.layer else None for n, v in enumerate(s))

    def check(self, s: State, y: Tensor) -> None:
        super().check(s, y)
        if self.layer >= len(s) or self._seen(s).shape[-1] != self.inputs:
            got = [tuple(v.shape[self.Wout.dim() - 1 :]) for v in s]
            raise ValueError(
                f"The readout expects {self.inputs} neurons in layer {self.layer}; the layers are {got}. Give "
                "CrossEntropy the number of neurons of the layer it reads."
            )
        check_kind("readout", self.Wout, s[self.layer])
        expected = (*s[0].shape[: self.Wout.dim() - 1], self.classes)
        if tuple(y.shape) != expected or not (y.is_floating_point() or y.is_complex()):
            raise ValueError(
                f"The target y is {y.dtype} of shape {tuple(y.shape)}; expected numbers of shape {expected}, one per "
                "class. Convert labels to one-hot rows with eqprop.data.one_hot."
            )


@final
class SoftmaxCrossEntropy(Cost):
    """l = -sum_c y_c log p_c, p = softmax(s0): the outputs are the scores, without a readout; dl/ds0 = p - y."""

    pulls = 0

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        return y.sum(-1) * _log_sum_exp(s[0]) - (y * s[0]).sum(-1)

    def pull(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        p = torch.exp(s[0] - _log_sum_exp(s[0]).unsqueeze(-1))
        return (y.sum(-1, keepdim=True) * p - y, *(None for _ in s[1:]))

    def check(self, s: State, y: Tensor) -> None:
        super().check(s, y)
        if y.shape != s[0].shape:
            raise ValueError(
                f"The target y has shape {tuple(y.shape)}; expected {tuple(s[0].shape)}, like the output s0. Convert "
                "labels to one-hot rows with eqprop.data.one_hot."
            )
        check_kind("target y", y, s[0])


COSTS: Table[Callable[[], Cost] | None] = Table(
    "cost",
    {
        "squared-error": None,
        "cross-entropy": None,
        "softmax": SoftmaxCrossEntropy,
        "phase": later("physical.oscillators:PhaseError"),
        "spins": later("physical.spins:SpinError"),
    },
    lambda name, part: _made(part),
)
"""Costs by name: those from outside, and those without settings, as functions that make one."""


def stack_readouts(costs: Sequence[CrossEntropy]) -> CrossEntropy:
    """Combine the readouts of stacked networks into one, whose parameters have a leading dimension."""
    kinds = {(c.inputs, c.classes, c.layer, c.Wout.requires_grad, c.bout.requires_grad) for c in costs}
    if not kinds:
        raise ValueError("No readouts to stack; expected at least one.")
    if len(kinds) != 1:
        raise ValueError(
            "The readouts differ in what they read or in what is trained; only readouts made alike can be stacked."
        )
    return _with_parameters(costs[0], lambda name: torch.stack([getattr(c, name).detach() for c in costs]))


def unstack_readout(cost: CrossEntropy, r: int) -> CrossEntropy:
    """The readout of network r."""
    return _with_parameters(cost, lambda name: getattr(cost, name).detach()[r].clone())


def _with_parameters(cost: CrossEntropy, value: Callable[[str], Tensor]) -> CrossEntropy:
    """A copy with other values, trained where they were."""
    made = copy.deepcopy(cost)
    for name in ("Wout", "bout"):
        setattr(made, name, nn.Parameter(value(name), requires_grad=getattr(cost, name).requires_grad))
    return made


def _log_sum_exp(z: Tensor) -> Tensor:
    """log sum_c exp z_c, also for complex z: the shift that keeps exp in range is real and cancels."""
    shift = z.real.detach().amax(-1, keepdim=True)
    return torch.log(torch.exp(z - shift).sum(-1)) + shift.squeeze(-1)
