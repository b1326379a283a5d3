"""Cost functions l(s, y) or l(s, y, theta), one value per sample, and the nudge they exert."""

from __future__ import annotations

import cmath
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from eqprop.autodiff import check_recordable, derivative, in_own_precision, leaf
from eqprop.dynamics import Dynamics
from eqprop.state import LayerParameters, State, detach, is_number, per_sample


class Cost(nn.Module):
    """l(s, y, theta), one value per sample, shape (B,).

    Subclasses define `forward`: one value per sample or, where the output has several dimensions, one for each of its
    first, (B, C) of outputs (B, C, n), of which l is the sum. theta holds the model's parameters by name; a cost that
    reads them sets `parametric = True`, and the estimators then add the term dl/dtheta at the end of the free phase:
    the missing t = 0 term of the appendix  [sec:index-shift]. The cost's own parameters (a readout) always get that
    term.
    """

    parametric: bool = False

    pulls: int | None = None
    """The only layer whose state the cost reads; None if it may read any. A subclass says so itself."""

    @property
    def title(self) -> str:
        """What messages call the cost."""
        return type(self).__name__

    @in_own_precision
    def __call__(self, s: State, y: Tensor, theta: Mapping[str, Tensor] | None = None, sample_dims: int = 1) -> Tensor:
        """l(s, y), one value per sample.

        s, y            the state of a mini-batch and its targets
        theta           the model's parameters by name, which a parametric cost needs
        sample_dims     how many leading dimensions number samples: 2 for stacked networks, (R, B, ...)
        """
        if theta is None and self.parametric:
            raise ValueError(
                f"The cost {self.title} reads the model's parameters; expected cost(s, y, theta). Give them as "
                "dict(model.named_parameters())."
            )
        return self.values(s, y, {} if theta is None else theta, sample_dims)

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError(f"{self.title} must define forward(s, y, theta), one value per sample.")

    def values(self, s: State, y: Tensor, theta: Mapping[str, Tensor], sample_dims: int = 1) -> Tensor:
        """l, summed over all but the samples, which must all be there: a mean would shrink every gradient."""
        # Not through nn.Module: a FLOP counter hooks into modules there and cannot follow autograd.grad.
        value, s0 = self.forward(s, y, theta), s[0]
        if not sample_dims <= value.dim() < s0.dim() or value.shape != s0.shape[: value.dim()]:
            samples = tuple(s0.shape[:sample_dims])
            raise ValueError(
                f"The cost {self.title} returned shape {tuple(value.shape)}; expected one value per sample, shape "
                f"{samples}: s0 has shape {tuple(s0.shape)}. Sum over the neurons, not over the samples."
            )
        return value if value.dim() == sample_dims else value.flatten(sample_dims).sum(-1)

    def pull(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        """dl/ds per sample and layer; None for layers the cost does not depend on.

        Computed by automatic differentiation; differentiable again when gradients are being recorded.
        """
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = tuple(map(leaf, s))
            loss = self.values(inputs, y, theta)
            if not loss.requires_grad:
                check_recordable()
                raise ValueError(
                    f"The cost {self.title} does not depend on the state; expected a differentiable function "
                    "of s. Look for a detach(), an argmax or a no_grad() in it."
                )
            return derivative(loss.sum(), inputs, create_graph=recording)

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        """The names of the cost's own parameters per layer, as in `Dynamics.layer_parameters`."""
        return ()

    def check(self, s: State, y: Tensor) -> None:
        """Raise ValueError if y does not fit the state."""
        if y.device != s[0].device:
            raise ValueError(
                f"The target y is on {y.device}; expected {s[0].device}, like the model. Convert it with .to(...)."
            )

    def for_classes(self, classes: int) -> Cost:
        """The cost for data of so many classes: itself, unless it lays them out on the outputs."""
        return self

    def scores(self, s: State) -> Tensor:
        """Class scores, (B, classes); the largest is the prediction. By default the output layer."""
        return s[0]

    def implicit_target(self, y: Tensor) -> Tensor:
        """The y of l = 1/2 |s0 - y|^2, towards which an implicit nudge solves; other costs have none."""
        raise TypeError(
            f"{type(self).__name__} has no implicit nudge: only for the squared error does its step have a known "
            "solution. Use nudge_site='inside', or SquaredError."
        )

    def direct_gradient(
        self, s: State, y: Tensor, theta: Mapping[str, Tensor], sample_dims: int = 1
    ) -> dict[nn.Parameter, Tensor]:
        """The batch mean of dl/dtheta at fixed s, for the parameters of the model and of the cost  [eq:aux2]."""
        seen = (*theta.values(), *self.parameters()) if self.parametric else tuple(self.parameters())
        parameters = [p for p in dict.fromkeys(seen) if isinstance(p, nn.Parameter) and p.requires_grad]
        if not parameters:
            return {}
        with torch.enable_grad():
            loss = self.values(detach(s), y, theta, sample_dims)
            if not loss.requires_grad:
                return {}
            grads = torch.autograd.grad(loss.sum() / loss.shape[-1], parameters, allow_unused=True)
        return {p: g for p, g in zip(parameters, grads, strict=True) if g is not None}


class SquaredError(Cost):
    """l = 1/2 |s0 - y|^2 over all of a sample's outputs, with y shaped like s0 (one-hot for classification)."""

    pulls = 0

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (s[0] - y).square().sum(-1)

    def pull(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        return (s[0] - y, *(None for _ in s[1:]))

    def implicit_target(self, y: Tensor) -> Tensor:
        return y

    def check(self, s: State, y: Tensor) -> None:
        s0 = s[0]
        if y.shape != s0.shape:
            raise ValueError(
                f"The target y has shape {tuple(y.shape)}; expected {tuple(s0.shape)}, like the output s0. "
                "Convert labels to one-hot rows with eqprop.data.one_hot."
            )
        check_kind("target y", y, s0)


class FunctionCost(Cost):
    """A cost from a function l(s, y), or l(s, y, theta) with `parametric=True`.

    function    l, one value per sample, (B,)
    parametric  whether it reads the model's parameters, as a third argument
    """

    def __init__(self, function: Callable[..., Tensor], parametric: bool = False) -> None:
        super().__init__()
        self.function, self.parametric = function, parametric

    @property
    def title(self) -> str:
        name = str(getattr(self.function, "__name__", type(self).__name__))
        return type(self).__name__ if name == "<lambda>" else name

    def forward(self, s: State, y: Tensor, theta: Mapping[str, Tensor]) -> Tensor:
        return self.function(s, y, theta) if self.parametric else self.function(s, y)


AnyProblem = TypeVar("AnyProblem", bound="Problem")


@dataclass(frozen=True)
class Problem:
    """A model and a cost on a mini-batch, x (B, ...) with targets y: the input of every estimator."""

    model: Dynamics
    cost: Cost
    x: Tensor
    y: Tensor

    @property
    def theta(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        return dict(self.model.named_parameters())

    def pull(self, s: State) -> State:
        """dl/ds per sample, zero for layers the cost does not depend on."""
        pull = self.cost.pull(s, self.y, self.theta)
        return tuple(torch.zeros_like(v) if g is None else g for v, g in zip(s, pull, strict=True))

    def direct_gradient(self, s: State) -> dict[nn.Parameter, Tensor]:
        theta = dict(self.model.named_parameters())
        return self.cost.direct_gradient(s, self.y, theta, self.model.sample_dims(self.x))

    def double(self: AnyProblem) -> AnyProblem:
        """A copy in float64. Raises ValueError if model or cost do not follow."""
        model, cost = copy.deepcopy(self.model).double(), copy.deepcopy(self.cost).double()
        y = self.y.double() if self.y.is_floating_point() else self.y
        made = replace(self, model=model, cost=cost, x=self.x.double(), y=y)
        try:
            with torch.no_grad():
                made.pull(model.step(model.drive(made.x), model.init_state(made.x)))
        except RuntimeError as error:
            raise ValueError(
                f"{model.title} with {cost.title} cannot be computed in float64, to see what rounding does "
                f"({str(error).strip().splitlines()[0].rstrip('.')}): it reads tensors beside its parameters and "
                "buffers. Hold them by register_buffer, or give everything in float64."
            ) from error
        return made


@dataclass(frozen=True)
class Nudge:
    """The force of the second phase: -beta dl/ds towards y  [eq:2nd-phase]. beta may be negative but not 0.

    cost        l
    y           the targets, (B, ...)
    beta        a number, or a tensor with one value per sample, (B,) or (R, B), or per network, (R, 1); complex if
                the state is
    checked     False skips the check that reads beta, for a nudge that is traced
    at          a state that holds the force at what it is there
    """

    cost: Cost
    y: Tensor
    beta: float | complex | Tensor
    checked: bool = True
    at: State | None = None

    def push(self, s: State, theta: Mapping[str, Tensor], factor: float) -> tuple[Tensor | None, ...]:
        """-beta * factor * dl/ds, where factor is the model's `nudge_scale`."""
        s, strength = s if self.at is None else self.at, -self.beta * factor
        pull = self.cost.pull(s, self.y, theta)
        if isinstance(strength, Tensor):
            return tuple([None if g is None else _over_samples(strength, g) * g for g in pull])
        return tuple([None if g is None else strength * g for g in pull])

    def implicit(self, output: Tensor, factor: float, curvature: float = 1.0) -> tuple[Tensor, float | Tensor]:
        """The target and the strength beta * factor of an implicit nudge of this output.

        curvature   of what the nudge is added to (see `PrimitiveDynamics.least_curvature`)
        """
        target, strength = self.cost.implicit_target(self.y), self.beta * factor
        if isinstance(strength, complex) or output.is_complex():
            raise TypeError("The implicit nudge is not analytic, so beta must be real. Use nudge_site='inside'.")
        # A tensor on a GPU is not looked at: that would wait for the device.
        seen = self.checked and not (isinstance(strength, Tensor) and strength.is_cuda)
        least = float(strength.min()) if seen and isinstance(strength, Tensor) else strength if seen else 0.0
        assert not isinstance(least, Tensor), "read above"
        if least <= -curvature:
            raise ValueError(
                f"The implicit nudge has no unique solution at beta = {least / factor:g}: 1 + beta must be positive. "
                "Use a smaller beta (with symmetric nudging it is also taken negative), or nudge_site='inside'."
            )
        shaped = _over_samples(strength, output)
        assert not isinstance(shaped, complex), "refused above"
        return target, shaped


def _over_samples(strength: float | complex | Tensor, like: Tensor) -> float | complex | Tensor:
    """A strength per sample, shaped to multiply a layer."""
    if not isinstance(strength, Tensor):
        return strength
    return per_sample(strength.to(like.dtype), like)


def check_beta(beta: float | complex) -> None:
    if not (is_number(beta) or isinstance(beta, complex)):
        raise ValueError(f"The nudge has beta={beta!r}; expected a finite, non-zero number, such as 0.1.")
    if beta == 0.0 or not cmath.isfinite(beta):
        raise ValueError(
            f"The nudge has beta={beta}, which makes the two phases the same. Expected a finite, non-zero number, such "
            "as 0.1; it may be negative."
        )


def check_kind(what: str, got: Tensor, expected: Tensor) -> None:
    """Raise ValueError if a tensor has not the type and the device of the state."""
    if got.dtype != expected.dtype or got.device != expected.device:
        raise ValueError(
            f"The {what} is {got.dtype} on {got.device}; expected {expected.dtype} on {expected.device}, like the "
            "model. Convert it with .to(...)."
        )
