"""Fully connected nets: layered ones of any depth  [sec:depth], and the toy model  [exp:toymodel]."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, final

import msgspec
import torch
from torch import Tensor, nn

from eqprop.dynamics import NudgeSite
from eqprop.models.activations import Activation, activation
from eqprop.models.connections import Dense, Init, Weight
from eqprop.models.graph import INPUT, Graph, Setting, Wiring, energy_step
from eqprop.models.settings import ModelSettings, from_input
from eqprop.settings import Finite, Positive, about


@final
class Layered(Graph):
    """Layers s0 (output), s1, ..., and the static input, each connected to the next by tied weights.

    Energy-based  [exp:def-fc-eb], with r = sigma(s), the input entering as sigma(x):
        Phi = (1 - eps)/2 |s|^2 + eps (sum_n r^n . W_{n,n+1} . r^{n+1} + b^n . r^n),   s_{t+1} = dPhi/ds
    Prototypical  [exp:def-fc-p], the input entering as x:
        Phi = sum_n s^n . W_{n,n+1} . s^{n+1} + b^n . s^n,   s_{t+1} = sigma(dPhi/ds)

    setting         "prototypical" or "energy-based"
    activation      sigma, by name or as a function
    bias            whether there are biases
    dtype           of the weights; None: torch's default
    sizes           from the output to the input, such as (10, 512, 784)
    eps             the step of the energy-based setting, in (0, 1]
    clip            energy-based: keep s in [0, 1] after every step, nudge included, as the paper does in training
    output_slope    energy-based: False omits sigma'(s0) from the output's step, as the authors' code does. The
                    Jacobian is then no longer symmetric.
    nudge_site      prototypical: "outside" is sigma(dPhi/ds) + push, the paper's; "inside" is sigma(dPhi/ds + push)
    untied          whether layers have weights of their own on the way back, B01 (n0, n1), ...; there is no Phi then
    feedback_angle  degrees from W01, ... at which those begin; 90: independent of them
    init, seed      "glorot", "default" (PyTorch's) or a function; drawn on the CPU in float64, then rounded

    Parameters W01 (n0, n1), W12, ... and b0, b1, ...; stacked networks carry them with a leading dimension.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        setting: Setting = "prototypical",
        activation: str | Activation | Callable[[Tensor], Tensor] = "sigmoid",
        *,
        eps: float | None = None,
        clip: bool = False,
        output_slope: bool = True,
        bias: bool = True,
        nudge_site: NudgeSite = "outside",
        untied: bool = False,
        feedback_angle: float = 90.0,
        init: Init = "glorot",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = _check_sizes(sizes)
        depth, sigma = len(sizes) - 1, _activation(activation)
        step = energy_step(setting, eps, clip, output_slope)
        names = [*(f"s{n}" for n in range(depth)), INPUT]
        links = [
            Dense(
                names[n + 1],
                names[n],
                name=f"W{n}{n + 1}",
                untied=untied and n + 1 < depth,
                feedback_angle=feedback_angle,
            )
            for n in reversed(range(depth))
        ]
        net = Wiring(
            (sizes[-1],),
            {f"s{n}": (sizes[n],) for n in range(depth)},
            tuple(links),
            (sigma,) * depth,
            input_activation=None if step is None else sigma,
            eps=step,
            clip=clip,
            output_slope=output_slope,
            bias=bias,
            nudge_site=nudge_site,
        )
        super().__init__(net, init, seed, dtype)
        self.sizes, self.depth, self.activation = sizes, depth, sigma

    def weight(self, n: int) -> Tensor:
        """W_{n,n+1}, shape (n_n, n_{n+1}), or (R, n_n, n_{n+1}) when stacked."""
        return getattr(self, f"W{n}{n + 1}")


@final
class Toy(Graph):
    """Output, hidden and input layers all connected, without lateral connections.

    Phi = (1 - eps)/2 |s|^2 + eps (r0.W01.r1 + r0.W0x.rx + r1.W1x.rx + b.r), r = sigma(s), rx = sigma(x).

    Parameters W01, W0x, W1x and b0, b1.

    sizes       (outputs, hidden, inputs), (5, 50, 10) in the paper
    activation  sigma, by name or as a function
    eps         length of a step
    bias        whether there are biases b0, b1
    init        how weights W01, W0x, W1x are drawn
    seed        of the weights; None: torch's own stream
    dtype       of the weights; None: torch's default
    """

    W01: nn.Parameter
    W0x: nn.Parameter
    W1x: nn.Parameter
    b0: nn.Parameter
    b1: nn.Parameter

    def __init__(
        self,
        sizes: tuple[int, int, int] = (5, 50, 10),
        activation: str | Activation | Callable[[Tensor], Tensor] = "tanh",
        *,
        eps: float = 0.08,
        bias: bool = True,
        init: Init = "default",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if len(sizes) != 3 or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(f"sizes is {tuple(sizes)}; expected (outputs, hidden, inputs), such as (5, 50, 10).")
        outputs, hidden, visible = sizes
        sigma = _activation(activation)
        net = Wiring(
            (visible,),
            {"s0": (outputs,), "s1": (hidden,)},
            (Dense("s1", "s0"), Dense(INPUT, "s0"), Dense(INPUT, "s1")),
            (sigma, sigma),
            input_activation=sigma,
            eps=energy_step("energy-based", eps),
            bias=bias,
        )
        super().__init__(net, init, seed, dtype)
        self.sizes, self.activation = tuple(sizes), sigma

    def _wanted(self) -> dict[str, Weight]:
        """Biases after the weights."""
        return dict(sorted(super()._wanted().items(), key=lambda item: item[0].startswith("b")))


# The constructor's argument of the same name shadows the function.
_activation = activation


@final
class LayeredNet(ModelSettings, frozen=True):
    """`Layered` as data; sizes go from the output to the input."""

    sizes: Annotated[tuple[Positive, ...], about("Neurons per layer, from the output to the input.")] = (10, 512, 784)
    setting: Annotated[Setting, about("energy-based or prototypical.")] = "prototypical"
    activation: Annotated[str, about("Activation of every layer, or a table by layer.")] = "sigmoid"
    eps: Annotated[Finite, about("Step of energy-based nets.")] | None = None
    clip: Annotated[bool, about("Keep the states of energy-based nets in [0, 1].")] = False
    output_slope: Annotated[bool, about("Whether sigma' acts on the outputs of energy-based nets.")] = True
    bias: Annotated[bool, about("Whether layers have biases.")] = True
    untied: Annotated[bool, about("Whether the way back has weights of its own, B01, ...")] = False
    feedback_angle: Annotated[Finite, about("Degrees from W01 at which B01 begins; 90: independent.")] = 90.0
    kind: Literal["layered"] = "layered"

    network = Layered

    def without_output(self) -> LayeredNet:
        if len(self.sizes) < 3:
            raise ValueError(f"A net of sizes {self.sizes} has no hidden layer to read; expected at least three sizes.")
        return msgspec.structs.replace(self, sizes=self.sizes[1:])

    def __str__(self) -> str:
        return from_input(self.sizes)


@final
class ToyNet(ModelSettings, frozen=True):
    """`Toy` as data: sizes of outputs, hidden layer and inputs."""

    sizes: Annotated[tuple[Positive, Positive, Positive], about("Outputs, hidden neurons and inputs.")] = (5, 50, 10)
    activation: Annotated[str, about("Activation of every layer.")] = "tanh"
    eps: Annotated[Finite, about("Step of energy-based nets.")] = 0.08
    bias: Annotated[bool, about("Whether layers have biases.")] = True
    kind: Literal["toy"] = "toy"

    network = Toy

    def samples(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Random inputs and one-hot targets: the paper's dummy data  [table-hyp-th]."""
        outputs, _, inputs = self.sizes
        source = torch.Generator().manual_seed(seed)
        x = torch.rand(n, inputs, generator=source, dtype=torch.float64)
        return x, torch.nn.functional.one_hot(torch.randint(outputs, (n,), generator=source), outputs)

    def __str__(self) -> str:
        return f"toy {from_input(self.sizes)}"


def _check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if len(sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            f"sizes is {tuple(sizes)}; expected at least two positive integers from the output to the input, "
            "such as (10, 512, 784)."
        )
    if len(sizes) > 2 and sizes[-1] < sizes[0]:
        warnings.warn(
            f"Layered got sizes {tuple(sizes)}: sizes run from output to input, so this net has {sizes[0]} outputs and "
            f"{sizes[-1]} inputs. For the net the other way round give {tuple(sizes)[::-1]}.",
            stacklevel=4,
        )
    return tuple(sizes)
