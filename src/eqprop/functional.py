"""Models from functions: `from_transition`, `from_primitive`, `from_energy`.

Each takes the function, the parameters by name and the layers' sizes, and returns a model like any other. The
function receives the parameters as a dictionary `theta`:

    def phi(x, s, theta):
        s0, s1 = s
        return ((s1 @ theta["W"].T) * s0).sum(-1) + (x * s1).sum(-1)

    model = from_primitive(phi, {"W": torch.zeros(2, 3)}, layers=(2, 3), squash=torch.tanh)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from eqprop.dynamics import Dynamics, NudgeSite, PrimitiveDynamics, check_eps, set_nudge_site
from eqprop.state import State, zero_state

Theta = Mapping[str, Tensor]
LayerShape = int | tuple[int, ...]


def from_transition(
    function: Callable[[Tensor, State, Theta], State], parameters: Theta, layers: Sequence[LayerShape]
) -> Dynamics:
    """s_{t+1} = F(x, s_t, theta) for a given function F  [eq:1st-phase]."""
    return _Transition(function, parameters, layers)


def from_primitive(
    function: Callable[[Tensor, State, Theta], Tensor],
    parameters: Theta,
    layers: Sequence[LayerShape],
    squash: Callable[[Tensor], Tensor] | None = None,
    nudge_site: NudgeSite = "outside",
) -> PrimitiveDynamics:
    """s_{t+1} = squash(dPhi/ds(x, s_t, theta)); without squash, the setting of the theorem  [thm:main].

    nudge_site="inside" puts the nudge of the second phase in squash's argument.
    """
    model = _Primitive(function, parameters, layers, squash)
    set_nudge_site(model, nudge_site)
    return model


def from_energy(
    function: Callable[[Tensor, State, Theta], Tensor],
    parameters: Theta,
    layers: Sequence[LayerShape],
    eps: float,
) -> PrimitiveDynamics:
    """s_{t+1} = s_t - eps dE/ds: Phi = 1/2 |s|^2 - eps E, with the nudge scaled by eps  [sec:primitive-energy]."""

    def primitive(x: Tensor, s: State, theta: Theta) -> Tensor:
        energy = function(x, s, theta)
        if energy.shape != x.shape[:1]:
            raise ValueError(
                f"The energy returned shape {tuple(energy.shape)}; expected one value per sample, shape "
                f"{tuple(x.shape[:1])}. Sum over the neurons, not over the samples."
            )
        squares = torch.stack([layer.square().flatten(1).sum(-1) for layer in s]).sum(0)
        return 0.5 * squares - eps * energy

    model = _Primitive(primitive, parameters, layers, squash=None)
    model.nudge_scale = check_eps(eps)
    return model


def layer_shapes(layers: Sequence[LayerShape]) -> tuple[tuple[int, ...], ...]:
    shapes = tuple((n,) if isinstance(n, int) else tuple(n) for n in layers)
    if not shapes or any(not shape or any(n < 1 for n in shape) for shape in shapes):
        raise ValueError(
            f"The layers are {tuple(layers)}; expected at least one layer, sizes of at least 1, output first."
        )
    return shapes


class _ByFunction:
    """Base of the models made from functions: named parameters and layers of given shapes."""

    def __init__(self, parameters: Theta, layers: Sequence[LayerShape]) -> None:
        super().__init__()
        if not parameters:
            raise ValueError("Got no parameters; expected a dictionary of named tensors, the theta to learn.")
        self.shapes = layer_shapes(layers)
        self.names = tuple(parameters)
        for name, value in parameters.items():
            if not name.isidentifier() or name in ("function", "sigma") or hasattr(self, name):
                raise ValueError(
                    f"A parameter is named {name!r}, which clashes with an attribute of the model; expected an unused "
                    "name, such as 'W01'. Rename it."
                )
            setattr(self, name, nn.Parameter(value.detach().clone()))

    def theta(self) -> Theta:
        return {name: getattr(self, name) for name in self.names}

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, self.shapes, x.shape[:1])


class _Transition(_ByFunction, Dynamics):
    def __init__(
        self,
        function: Callable[[Tensor, State, Theta], State],
        parameters: Theta,
        layers: Sequence[LayerShape],
    ) -> None:
        super().__init__(parameters, layers)
        self.function = function

    def transition(self, x: Tensor, s: State) -> State:
        return tuple(self.function(x, s, self.theta()))


class _Primitive(_ByFunction, PrimitiveDynamics):
    def __init__(
        self,
        function: Callable[[Tensor, State, Theta], Tensor],
        parameters: Theta,
        layers: Sequence[LayerShape],
        squash: Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__(parameters, layers)
        self.function, self.sigma = function, squash

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return self.function(x, s, self.theta())

    @property
    def squashes(self) -> bool:
        return self.sigma is not None

    def squash(self, s: State) -> State:
        return s if self.sigma is None else tuple(self.sigma(layer) for layer in s)
