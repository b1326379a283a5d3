"""Convergent RNNs with static input, given by a transition F, a primitive Phi or an energy E."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eqprop.autodiff import derivative
from eqprop.state import LayerParameters, State, add

Drive = Any
"""What `Dynamics.drive` returns: everything of a step that depends on x and the parameters but not on s."""


NudgeSite = Literal["outside", "inside"]
"""Where the nudge enters F = squash(dPhi/ds): behind squash, or in its argument."""


class Dynamics(nn.Module):
    """A convergent RNN with static input: s_{t+1} = F(x, s_t)  [eq:1st-phase].

    A subclass gives `init_state` and `transition`. Parameters are ordinary `nn.Parameter`s. A model never
    stores its state: states go in, states come out.

    `drive` and `step` are what the time loop calls: `drive(x)` once per phase, `step(drive, s, push)` at every
    step. Override both, together, when a part of F does not depend on s.
    """

    nudge_scale: float = 1.0
    """The factor of beta in the nudge and in the updates: eps for an energy [delta-fc-canon], else 1."""

    bipartite: bool = False
    """Whether even layers depend on odd layers alone and vice versa, so that they may be updated in turn."""

    input_shape: tuple[int, ...] | None = None
    """The shape of one input sample, checked where it is given."""

    networks: int | None = None
    """How many networks are stacked, x and the states being (R, B, ...); None for one, (B, ...)."""

    def init_state(self, x: Tensor) -> State:
        """The state at t = 0, usually zeros."""
        raise NotImplementedError(f"{type(self).__name__} must define init_state(x), a tuple of tensors (B, ...).")

    def transition(self, x: Tensor, s: State) -> State:
        """F(x, s), one tensor a layer, of the shapes of s."""
        raise NotImplementedError(f"{type(self).__name__} must define transition(x, s), the next state.")

    def drive(self, x: Tensor) -> Drive:
        """What a step needs of x, computed once per phase. By default x itself."""
        return x

    def step(self, drive: Drive, s: State, push: Sequence[Tensor | None] | None = None) -> State:
        """F(x, s) + push, where push = -beta dl/ds is the nudge of the second phase  [eq:2nd-phase]."""
        new = self.transition(drive, s)
        return new if push is None else add(new, push)

    def half_step(self, drive: Drive, s: State, parity: int) -> State:
        """F(x, s) for the layers of one parity (0: even), the others as they are."""
        raise TypeError(
            f"{type(self).__name__} has no alternating schedule: its layers are not known to fall into two classes "
            "that only see each other. Use schedule='synchronous'."
        )

    @property
    def layer_names(self) -> tuple[str, ...] | None:
        """The paper's names of the layers; None stands for s0, s1, ..."""
        return None

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        """What feeds each layer, by name, output first; empty where a model does not say."""
        return ()

    def sample_dims(self, x: Tensor) -> int:
        """How many leading dimensions of x number samples: 1, or 2 when networks are stacked."""
        return 1 if self.input_shape is None else x.dim() - len(self.input_shape)


class PrimitiveDynamics(Dynamics):
    """F = project(squash(dPhi/ds)). Theorem 1 is exact when squash and project are the identity  [thm:main].

    A subclass gives `init_state` and `primitive`; dPhi/ds and dPhi/dtheta follow by automatic differentiation.
    Models with hand-written formulas override `gradient` and `contrast`; `autodiff_gradient` and
    `autodiff_contrast` stay as the oracles those are tested against.

    `squash` acts before the nudge (the sigma of the prototypical nets), `project` after it (the clip of the
    energy-based nets). With `nudge_site` "inside" the nudge enters squash's argument instead: F = squash(dPhi/ds +
    push), which is squash of the gradient of Phi - beta l. EP's synapses then follow BPTT's exactly as beta -> 0
    whatever squash is, as long as its derivative is symmetric, as that of a function of each neuron alone is.
    """

    nudge_site: NudgeSite = "outside"
    """Set by `set_nudge_site`, or as a class attribute of one's own model."""

    def primitive(self, x: Tensor, s: State) -> Tensor:
        """Phi(x, s), one value per sample, shape (B,)."""
        raise NotImplementedError(f"{type(self).__name__} must define primitive(x, s), one value per sample.")

    @property
    def squashes(self) -> bool:
        """Whether squash does anything; where it does not, the nudge is neither inside nor outside."""
        return type(self).squash is not PrimitiveDynamics.squash

    def squash(self, s: State) -> State:
        return s

    def project(self, s: State) -> State:
        return s

    def gradient(self, drive: Drive, s: State) -> State:
        """dPhi/ds at s, from what `drive` prepared."""
        return self.autodiff_gradient(drive, s)

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """The batch mean of dPhi/dtheta(x, s_plus) - dPhi/dtheta(x, s_minus), by parameter name  [eq:delta-ep]."""
        return self.autodiff_contrast(x, s_plus, s_minus)

    def autodiff_gradient(self, x: Tensor, s: State) -> State:
        """dPhi/ds by automatic differentiation: the oracle. Differentiable again where gradients are recorded."""
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            # A state that is part of a graph stays in it; any other becomes a leaf, through a view and not a
            # detached copy, so that a forward-mode tangent passes.
            inputs = tuple(v if v.requires_grad else v.view_as(v).requires_grad_() for v in s)
            phi = self._primitive_checked(x, inputs)
            if not phi.requires_grad:
                raise ValueError(
                    f"The primitive of {type(self).__name__} does not depend on the state; expected a differentiable "
                    "function of s. Look for a detach() or a no_grad() in it."
                )
            grads = derivative(phi.sum(), inputs, create_graph=recording)
        return tuple(torch.zeros_like(v) if g is None else g for v, g in zip(s, grads, strict=True))

    def autodiff_contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """The parameter contrast by automatic differentiation of Phi: the oracle. Frozen parameters are left out."""
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            phi = self._primitive_checked(x, s_plus) - self._primitive_checked(x, s_minus)
            if not phi.requires_grad:  # Phi reads none of them
                return {name: torch.zeros_like(p) for name, p in parameters.items()}
            grads = derivative(phi.sum() / phi.shape[-1], tuple(parameters.values()))
        found = zip(parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in found}

    def _primitive_checked(self, x: Tensor, s: State) -> Tensor:
        phi = self.primitive(x, s)
        expected = s[0].shape[: self.sample_dims(x)]
        if phi.shape != expected:
            raise ValueError(
                f"The primitive of {type(self).__name__} returned shape {tuple(phi.shape)}; expected one value per "
                f"sample, shape {tuple(expected)}. Sum over the neurons, not over the samples."
            )
        return phi

    def transition(self, x: Tensor, s: State) -> State:
        return self.step(self.drive(x), s)

    def step(self, drive: Drive, s: State, push: Sequence[Tensor | None] | None = None) -> State:
        """project(squash(dPhi/ds) + push), or project(squash(dPhi/ds + push)) with the nudge inside."""
        inputs = self.gradient(drive, s)
        if push is None:
            return self.project(self.squash(inputs))
        if self.nudge_site == "inside":
            return self.project(self.squash(add(inputs, push)))
        return self.project(add(self.squash(inputs), push))


def set_nudge_site(model: Dynamics, where: NudgeSite) -> None:
    """Set where the nudge of the second phase enters this model's step."""
    if where not in ("outside", "inside"):
        raise ValueError(f"nudge_site is {where!r}; expected 'outside' (the paper's) or 'inside' of sigma.")
    name = type(model).__name__
    if not isinstance(model, PrimitiveDynamics):
        if where == "inside":
            raise TypeError(
                f"{name} is given by its transition alone, so there is no sigma to put the nudge inside of. Give it by "
                "a primitive and a squash (eqprop.from_primitive), or use nudge_site='outside'."
            )
        return
    if where == "inside" and not model.squashes:
        raise ValueError(
            f"{name} has no sigma around dPhi/ds, so a nudge inside is the same as one outside and the theorem "
            "holds as it is. Use nudge_site='outside'; 'inside' belongs to prototypical nets."
        )
    if where != model.nudge_site and type(model).step is not PrimitiveDynamics.step:
        raise TypeError(f"{name} has a step of its own, which says itself where the nudge enters. Change it there.")
    model.nudge_site = where
