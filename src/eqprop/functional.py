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
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eqprop.dynamics import Drive, Dynamics, NudgeSite, PrimitiveDynamics, check_eps, set_nudge_site
from eqprop.state import State, add, zero_state

Theta = Mapping[str, Tensor]
LayerShape = int | tuple[int, ...]


@dataclass(frozen=True)
class Extras:
    """What every model from a function may be given.

    name        what messages call it; by default the function's name
    start       the state at t = 0 as a function of x; None: zeros
    project     applied to each layer after every step, nudge included, such as lambda v: v.clamp(0, 1)
    input_shape the shape of one sample, which data is reshaped to and x is checked against; None: not checked
    """

    name: str | None = None
    start: Callable[[Tensor], State | Tensor] | None = None
    project: Callable[[Tensor], Tensor] | None = None
    input_shape: tuple[int, ...] | None = None


def from_transition(
    function: Callable[[Tensor, State, Theta], State], parameters: Theta, layers: Sequence[LayerShape], **extras: Any
) -> Dynamics:
    """s_{t+1} = project(F(x, s_t, theta)) for a given function F  [eq:1st-phase].

    function    F(x, s, theta): the next state, a tuple with a tensor per layer
    parameters  initial theta by name; each becomes an `nn.Parameter`
    layers      size or shape of every layer, output first
    extras      name, start, project, input_shape and the like: the fields of `Extras`
    """
    return _Transition(function, parameters, layers, _extras(function, extras))


def from_primitive(
    function: Callable[[Tensor, State, Theta], Tensor],
    parameters: Theta,
    layers: Sequence[LayerShape],
    squash: Callable[[Tensor], Tensor] | None = None,
    nudge_site: NudgeSite = "outside",
    **extras: Any,
) -> PrimitiveDynamics:
    """s_{t+1} = project(squash(dPhi/ds(x, s_t, theta))); without both, the setting of the theorem  [thm:main].

    function    Phi(x, s, theta): one value per sample, (B,)
    parameters  initial theta by name; each becomes an `nn.Parameter`
    layers      size or shape of every layer, output first
    squash      applied before the nudge, such as torch.tanh
    nudge_site  "outside"; "inside" puts the nudge of the second phase in squash's argument
    extras      name, start, project, input_shape and the like: the fields of `Extras`
    """
    model = _Primitive(function, parameters, layers, squash, _extras(function, extras))
    set_nudge_site(model, nudge_site)
    return model


def from_energy(
    function: Callable[[Tensor, State, Theta], Tensor],
    parameters: Theta,
    layers: Sequence[LayerShape],
    eps: float,
    **extras: Any,
) -> PrimitiveDynamics:
    """s_{t+1} = s_t - eps dE/ds: Phi = 1/2 |s|^2 - eps E, with the nudge scaled by eps  [sec:primitive-energy].

    function    E(x, s, theta): one value per sample, (B,)
    parameters  initial theta by name; each becomes an `nn.Parameter`
    layers      size or shape of every layer, output first
    eps         length of a step down the energy
    extras      name, start, project, input_shape and the like: the fields of `Extras`
    """
    return _Energy(function, parameters, layers, check_eps(eps), _extras(function, extras))


def _extras(function: Callable[..., Any], given: Mapping[str, Any]) -> Extras:
    known = [f.name for f in fields(Extras)]
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise TypeError(f"Got an unexpected argument {strange}; expected one of {', '.join(known)}.")
    made = Extras(**given)
    own = str(getattr(function, "__name__", type(function).__name__))
    return replace(made, name=made.name or ("own model" if own == "<lambda>" else own))


def layer_shapes(layers: Sequence[LayerShape]) -> tuple[tuple[int, ...], ...]:
    shapes = tuple(tuple(n) if isinstance(n, tuple | list) else (n,) for n in layers)
    if not shapes or any(not shape or any(not isinstance(n, int) or n < 1 for n in shape) for shape in shapes):
        raise ValueError(
            f"The layers are {tuple(layers)}; expected at least one layer, sizes of at least 1, output first."
        )
    return shapes


class _ByFunction:
    """Base of the models made from functions: named parameters and layers of given shapes."""

    def __init__(self, parameters: Theta, layers: Sequence[LayerShape], extras: Extras) -> None:
        super().__init__()
        self.extras, self.input_shape = extras, extras.input_shape
        if not parameters:
            raise ValueError("Got no parameters; expected a dictionary of named tensors, the theta to learn.")
        self.shapes = layer_shapes(layers)
        self.names = tuple(parameters)
        for name, value in parameters.items():
            if not name.isidentifier() or name in ("function", "sigma", "extras") or hasattr(self, name):
                raise ValueError(
                    f"A parameter is named {name!r}, which clashes with an attribute of the model; expected an unused "
                    "name, such as 'W01'. Rename it."
                )
            setattr(self, name, nn.Parameter(value.detach().clone()))

    def theta(self) -> Theta:
        return {name: getattr(self, name) for name in self.names}

    @property
    def title(self) -> str:
        return str(self.extras.name)

    def __repr__(self) -> str:
        layers = ", ".join(f"s{n} {shape}" for n, shape in enumerate(self.shapes))
        theta = ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.theta().items())
        return f"{self.title}: layers {layers}; parameters {theta}"

    def init_state(self, x: Tensor) -> State:
        if self.extras.start is None:
            return zero_state(x, self.shapes, x.shape[:1])
        found = self.extras.start(x)
        state = (found,) if isinstance(found, Tensor) else tuple(found)
        expected = [(*x.shape[:1], *shape) for shape in self.shapes]
        if [tuple(layer.shape) for layer in state] != expected:
            raise ValueError(
                f"The start of {self.title} has layers of shape {[tuple(layer.shape) for layer in state]}; expected "
                f"{expected}, one per layer with the samples first."
            )
        return state

    def project(self, s: State) -> State:
        return s if self.extras.project is None else tuple(self.extras.project(layer) for layer in s)


class _Transition(_ByFunction, Dynamics):
    def __init__(
        self,
        function: Callable[[Tensor, State, Theta], State],
        parameters: Theta,
        layers: Sequence[LayerShape],
        extras: Extras,
    ) -> None:
        super().__init__(parameters, layers, extras)
        self.function = function

    def transition(self, x: Tensor, s: State) -> State:
        return self.project(tuple(self.function(x, s, self.theta())))

    def step(self, drive: Drive, s: State, push: Sequence[Tensor | None] | None = None) -> State:
        new = tuple(self.function(drive, s, self.theta()))
        return self.project(new if push is None else add(new, push))


class _Fixed(NamedTuple):
    """What a model reads during a phase, beside its state."""

    x: Tensor
    theta: Theta


class _Primitive(_ByFunction, PrimitiveDynamics):
    def __init__(
        self,
        function: Callable[[Tensor, State, Theta], Tensor],
        parameters: Theta,
        layers: Sequence[LayerShape],
        squash: Callable[[Tensor], Tensor] | None,
        extras: Extras,
    ) -> None:
        super().__init__(parameters, layers, extras)
        self.function, self.sigma = function, squash

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return self.function(x, s, self.theta())

    def drive(self, x: Tensor) -> _Fixed:
        """x and the parameters, looked up once per phase; without a graph where none is recorded."""
        theta = self.theta()
        return _Fixed(x, theta if torch.is_grad_enabled() else {name: p.detach() for name, p in theta.items()})

    def gradient(self, drive: Drive, s: State) -> State:
        x, theta = drive if isinstance(drive, _Fixed) else self.drive(drive)
        return self._slope(lambda inputs: self._checked(self.function(x, inputs, theta), inputs, x), s)

    @property
    def by_hand(self) -> bool:
        return False

    @property
    def squashes(self) -> bool:
        return self.sigma is not None

    def squash(self, s: State) -> State:
        return s if self.sigma is None else tuple(self.sigma(layer) for layer in s)


class _Energy(_Primitive):
    """Phi = 1/2 |s|^2 - eps E. Its slope is written s - eps dE/ds, which spares every step the squares."""

    def __init__(
        self,
        function: Callable[[Tensor, State, Theta], Tensor],
        parameters: Theta,
        layers: Sequence[LayerShape],
        eps: float,
        extras: Extras,
    ) -> None:
        super().__init__(function, parameters, layers, None, extras)
        self.nudge_scale = eps

    def energy(self, x: Tensor, s: State, theta: Theta) -> Tensor:
        value = self.function(x, s, theta)
        if value.shape != x.shape[:1]:
            raise ValueError(
                f"The energy {self.title} returned shape {tuple(value.shape)}; expected one value per sample, shape "
                f"{tuple(x.shape[:1])}. Sum over the neurons, not over the samples."
            )
        return value

    def primitive(self, x: Tensor, s: State) -> Tensor:
        squares = torch.stack([layer.square().flatten(1).sum(-1) for layer in s]).sum(0)
        return 0.5 * squares - self.nudge_scale * self.energy(x, s, self.theta())

    def gradient(self, drive: Drive, s: State) -> State:
        x, theta = drive if isinstance(drive, _Fixed) else self.drive(drive)
        slope = self._slope(lambda inputs: self.energy(x, inputs, theta), s)
        return tuple([torch.sub(v, g, alpha=self.nudge_scale) for v, g in zip(s, slope, strict=True)])
