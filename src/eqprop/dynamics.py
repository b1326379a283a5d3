"""Convergent RNNs with static input, given by a transition F, a primitive Phi or an energy E."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from eqprop.autodiff import check_recordable, derivative, doubled, in_own_precision, leaf, wide, with_values
from eqprop.state import LayerParameters, State, add, is_number

Drive = Any
"""The part of a step that depends on x and the parameters but not on s; returned by `Dynamics.drive`."""


NudgeSite = Literal["outside", "inside", "implicit"]
"""Where the nudge enters F = squash(dPhi/ds): after squash, in its argument, or there but at the new state."""

NUDGE_SITES: tuple[NudgeSite, ...] = get_args(NudgeSite)

UNBOUNDED = (-math.inf, math.inf)
"""The bounds of an activation that is the identity."""


class Departure(Protocol):
    """d -> F(x, s* + d; nudged) - F(x, s*) for a fixed s*, without cancellation."""

    def __call__(self, d: State, push: Sequence[Tensor | None], layers: Collection[int] | None = None) -> State:
        """The next d, of some layers or of all, with a push outside or inside sigma as the model has it."""

    def implicit(
        self, d: State, target: Tensor, strength: float | Tensor, layers: Collection[int] | None = None
    ) -> State:
        """The same with an implicit nudge."""


class Dynamics(nn.Module):
    """A convergent RNN with static input: s_{t+1} = F(x, s_t)  [eq:1st-phase].

    A subclass defines `init_state` and `transition`. Parameters are ordinary `nn.Parameter`s. A model never
    stores its state: states go in, states come out.

    The time loop calls `drive(x)` once per phase and `step(drive, s, push)` at every step. Override both together
    if part of F does not depend on s.
    """

    nudge_scale: float = 1.0
    """Multiplies beta in the nudge and in the updates: eps for an energy [delta-fc-canon], else 1."""

    differentiable: bool = True
    """Whether F has a derivative, of which an exact gradient could follow; that of spins has none."""

    bipartite: bool = False
    """Whether even layers depend only on odd layers and vice versa, so that the two can be updated in turn."""

    in_turns: bool = False
    """Whether moreover a step of even layers is a function of odd ones alone, and vice versa, to the bit."""

    first_moved: int | None = None
    """0 or 1: where `in_turns` holds and a zero state moves in layers of this parity only. None: in others too."""

    input_shape: tuple[int, ...] | None = None
    """The shape of one input sample; checked unless None."""

    networks: int | None = None
    """The number R of stacked networks, with x and states (R, B, ...); None for a single network, (B, ...)."""

    @property
    def title(self) -> str:
        """What messages call the model."""
        return type(self).__name__

    @in_own_precision
    @torch.no_grad()
    def forward(self, x: Tensor, T: int = 1000) -> Tensor:
        """The output s0 at the steady state: at most T free steps, fewer once nothing changes any more.

        `eqprop.relax` returns the whole state and says whether it settled.
        """
        if not isinstance(T, int):
            raise TypeError(
                f"{self.title}(x, T) got a {type(T).__name__} for T; expected a number of steps. For one step from a "
                "state s: model.transition(x, s)."
            )
        drive, s = self.drive(x), self.init_state(x)
        for _ in range(T):
            before, s = s, self.step(drive, s)
            if all(torch.equal(a, b) for a, b in zip(before, s, strict=True)):
                break
        return s[0]

    def init_state(self, x: Tensor) -> State:
        """The state at t = 0, usually zeros."""
        raise NotImplementedError(f"{self.title} must define init_state(x), a tuple of tensors (B, ...).")

    def transition(self, x: Tensor, s: State) -> State:
        """F(x, s): one tensor per layer, with the shapes of s."""
        raise NotImplementedError(f"{self.title} must define transition(x, s), the next state.")

    def drive(self, x: Tensor) -> Drive:
        """Precompute, once per phase, what a step needs from x. By default x itself."""
        return x

    def step(self, drive: Drive, s: State, push: Sequence[Tensor | None] | None = None) -> State:
        """F(x, s) + push, where push = -beta dl/ds is the nudge of the second phase  [eq:2nd-phase]."""
        new = self.transition(drive, s)
        return new if push is None else add(new, push)

    def departure(self, drive: Drive, s: State) -> Departure | None:
        """The difference form of a step around s, where it has formulas; None: a phase in float64 takes its place."""
        return None

    def half_step(self, drive: Drive, s: State, parity: int) -> State:
        """F(x, s) for the layers of one parity (0: even); the other layers are unchanged."""
        raise TypeError(
            f"{self.title} has no alternating schedule: its layers are not known to form two groups that "
            "depend only on each other. Use schedule='synchronous'."
        )

    def sweep(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """The groups of layers, by number, that a sweep updates in turn, in the order of the free phase.

        By default odd and even layers where they depend only on each other, else layer by layer; the output is in the
        last group. `layers` is how many there are.
        """
        if not self.bipartite:
            return tuple((n,) for n in reversed(range(layers)))
        return tuple(group for group in (tuple(range(1, layers, 2)), tuple(range(0, layers, 2))) if group)

    def group_step(
        self, drive: Drive, s: State, layers: Collection[int], push: Sequence[Tensor | None] | None = None
    ) -> State:
        """F(x, s) + push for some layers; the others are unchanged. By default they are taken from a whole step."""
        new = self.step(drive, s, push)
        return tuple(new[n] if n in layers else layer for n, layer in enumerate(s))

    @property
    def layer_names(self) -> tuple[str, ...] | None:
        """The paper's names of the layers; None means s0, s1, ..."""
        return None

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        """The parameters feeding each layer, by name, output first; empty if the model does not declare them."""
        return ()

    def operations(self) -> int:
        """Multiplications and additions of a step of one sample; by default as if every parameter were used once."""
        return 2 * sum(p.numel() for p in self.parameters())

    def constrained(self) -> dict[str, Tensor]:
        """The parameters that a constraint would change, by name, as they should be: `{"g": self.g.clamp(min=0)}`.

        By default none. Training asks after each step of the optimizer; in a loop of your own, call `constrain`.
        """
        return {}

    @torch.no_grad()
    def constrain(self) -> None:
        """Give the parameters the values of `constrained`."""
        for name, value in self.constrained().items():
            self.get_parameter(name).copy_(value)

    def feedforward(self, x: Tensor) -> State:
        """The layers of the feed-forward net with the same weights: each seen once, from the input to the output."""
        raise ValueError(
            f"{self.title} has no forward pass; backprop serves prototypical nets whose connections make no loop, such "
            "as Layered, Convolutional or Network. Train it by BPTT."
        )

    def relaxation(self, x: Tensor, phase: Any, state: State | None, nudge: Any, keep: int = 0) -> Any:
        """The `Relaxation` of a whole phase, from a system that settles by itself; None for one that takes steps."""
        return None

    @property
    def settles_itself(self) -> bool:
        """Whether phases are the system's own, so that there are no steps to replace."""
        return type(self).relaxation is not Dynamics.relaxation

    def examined(self, problem: Any, ep: Any, voice: Any) -> Any:
        """The `Diagnosis` of a system that settles by itself (see `eqprop.doctor`)."""
        raise NotImplementedError(f"{self.title} settles by itself, and must say how it is examined.")

    def check_nudge(self, beta: float) -> None:
        """Raise ValueError if the nudged phase of strength beta, or of -beta, has no rest. By default all have."""

    def notices(self) -> tuple[str, ...]:
        """Sentences about this network that whoever trains it should read before."""
        return ()

    def sample_dims(self, x: Tensor) -> int:
        """The number of leading dimensions of x that index samples: 1, or 2 for stacked networks."""
        return 1 if self.input_shape is None else x.dim() - len(self.input_shape)


class PrimitiveDynamics(Dynamics):
    """F = project(squash(dPhi/ds)). Theorem 1 is exact when squash and project are the identity  [thm:main].

    A subclass defines `init_state` and `primitive`; dPhi/ds and dPhi/dtheta follow by automatic differentiation.
    Models with hand-written formulas override `gradient` and `contrast`, which are tested against the oracles
    `autodiff_gradient` and `autodiff_contrast`.

    `squash` acts before the nudge (the sigma of the prototypical nets), `project` after it (the clip of the
    energy-based nets). With `nudge_site` "inside" the nudge enters squash's argument instead: F = squash(dPhi/ds +
    push), which is squash of the gradient of Phi - beta l. Without `project`, EP's synapses then match BPTT's exactly
    as beta -> 0 for any squash with a symmetric derivative: an elementwise one, or softmax. With `project` after it
    that holds only if the derivative of the two together is symmetric, as it is if both are elementwise; softmax
    followed by a clip is not.

    "implicit" is the nudge inside with the cost taken at the new output: o = squash(dPhi/do + beta (y - o)), solved at
    each step. Both have the same fixed points.

    Parameters must act through Phi: one that only squash or project reads (a trainable gain) gets no gradient by EP.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn about a subclass of a final class; refuse a primitive under formulas written by hand for another."""
        super().__init_subclass__(**options)
        final = next((base for base in cls.__mro__[1:] if vars(base).get("__final__")), None)
        if final is not None:
            warnings.warn(
                f"{final.__name__} is final: fast engines serve it exactly as it is, so {cls.__name__} runs on the "
                "eager engine. Write it as an eqprop.models.Network or an eqprop.PrimitiveDynamics instead.",
                stacklevel=2,
            )
        if "primitive" not in vars(cls):
            return
        by_hand = [
            name
            for name in ("gradient", "contrast")
            if getattr(cls, name) is not getattr(PrimitiveDynamics, name) and name not in vars(cls)
        ]
        if by_hand:
            raise TypeError(
                f"{cls.__name__} overrides primitive, but {' and '.join(by_hand)} still follow another primitive by "
                "hand-written formulas. Derive it from eqprop.PrimitiveDynamics, or override those too."
            )

    conservative: bool = True
    """Whether F follows from a Phi, and EP's update is its derivative."""

    least_curvature: float = 1.0
    """What an implicit nudge adds to; at minus this beta its solution is not unique. inf: the model itself looks."""

    nudge_site: NudgeSite = "outside"
    """Set by `set_nudge_site`, or as a class attribute of a custom model."""

    def primitive(self, x: Tensor, s: State) -> Tensor:
        """Phi(x, s), one value per sample, shape (B,)."""
        raise NotImplementedError(f"{self.title} must define primitive(x, s), one value per sample.")

    @property
    def by_hand(self) -> bool:
        """Whether dPhi/ds or dPhi/dtheta has a formula of its own, beside automatic differentiation."""
        names = ("gradient", "contrast")
        return any(getattr(type(self), name) is not getattr(PrimitiveDynamics, name) for name in names)

    @property
    def squashes(self) -> bool:
        """Whether squash is not the identity; if it is, the nudge is neither inside nor outside."""
        return type(self).squash is not PrimitiveDynamics.squash

    def squash(self, s: State) -> State:
        return s

    def project(self, s: State) -> State:
        return s

    def gradient(self, drive: Drive, s: State) -> State:
        """dPhi/ds at s, given the result of `drive`."""
        return self.autodiff_gradient(drive, s)

    def group_gradient(self, drive: Drive, s: State, layers: Collection[int]) -> State:
        """dPhi/ds for some layers; what it returns for the others is not used. By default all of dPhi/ds."""
        return self.gradient(drive, s)

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """The batch mean of dPhi/dtheta(x, s_plus) - dPhi/dtheta(x, s_minus), by parameter name  [eq:delta-ep]."""
        return self.autodiff_contrast(x, s_plus, s_minus)

    def difference_contrast(self, x: Tensor, s: State, plus: State, minus: State | None = None) -> dict[str, Tensor]:
        """The contrast of the states s + plus and s + minus (None: s itself), from how far they are from s.

        By default that of the two states in float64; `plus` and `minus` may be in float64 already.
        """
        start = tuple(map(wide, s))
        ends = [start if d is None else add(start, d) for d in (plus, minus)]
        if x.dtype == torch.float64:
            return self.contrast(x, *ends)
        found = with_values((self,), (doubled(self),), lambda: self.contrast(wide(x), *ends))
        return {name: g.detach().to(x.dtype) for name, g in found.items()}

    def autodiff_gradient(self, x: Tensor, s: State) -> State:
        """dPhi/ds by automatic differentiation: the oracle. Differentiable again when gradients are being recorded."""
        return self._slope(lambda inputs: self._primitive_checked(x, inputs), s)

    def _slope(self, function: Callable[[State], Tensor], s: State) -> State:
        """df/ds of a function of s with one value per sample."""
        recording = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = tuple([leaf(v) for v in s])
            values = function(inputs)
            if not values.requires_grad:
                check_recordable()
                raise ValueError(
                    f"The primitive of {self.title} does not depend on the state; expected a differentiable "
                    "function of s. Look for a detach() or a no_grad() in it."
                )
            grads = derivative(values, inputs, create_graph=recording)
        return tuple([torch.zeros_like(v) if g is None else g for v, g in zip(s, grads, strict=True)])

    def autodiff_contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """The parameter contrast by automatic differentiation of Phi: the oracle. Frozen parameters are omitted.

        It subtracts two sums over the batch, which cancel in float32 when the states are close. Only a hand-written
        `contrast` can take differences first, du v+ + u- dv for a product u v; of any Phi no such form is known.
        """
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            phi = self._primitive_checked(x, s_plus) - self._primitive_checked(x, s_minus)
            if not phi.requires_grad:  # Phi depends on none of them
                return {name: torch.zeros_like(p) for name, p in parameters.items()}
            grads = derivative(phi.sum() / phi.shape[-1], tuple(parameters.values()))
        found = zip(parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in found}

    def outside_phi(self, x: Tensor) -> list[str]:
        """The trainable parameters that a step reads and Phi does not: EP gives them the gradient 0."""
        learned = {name: p for name, p in self.named_parameters() if p.requires_grad}
        if type(self).primitive is PrimitiveDynamics.primitive:  # formulas alone
            return []
        with torch.enable_grad():
            s = self.init_state(x)
            phi, step = self._primitive_checked(x, s), self.step(self.drive(x), s)
            # One sum, since layers may share a part of their graph.
            total = torch.stack([layer.sum() for layer in step]).sum()
            by_phi, by_step = (_reads(f, tuple(learned.values())) for f in (phi, total))
        return [name for name, inner, outer in zip(learned, by_phi, by_step, strict=True) if outer and not inner]

    def parts_apart(self, x: Tensor, s: State) -> dict[str, float]:
        """How far hand-written parts of `gradient` and `contrast` are from autodiff, relatively, by what they are.

        For models made of parts; none by default.
        """
        return {}

    def _primitive_checked(self, x: Tensor, s: State) -> Tensor:
        return self._checked(self.primitive(x, s), s, x)

    def _checked(self, phi: Tensor, s: State, x: Tensor) -> Tensor:
        expected = s[0].shape[: self.sample_dims(x)]
        if phi.shape != expected:
            raise ValueError(
                f"The primitive of {self.title} returned shape {tuple(phi.shape)}; expected one value per "
                f"sample, shape {tuple(expected)}. Sum over the neurons, not over the samples."
            )
        return phi

    def transition(self, x: Tensor, s: State) -> State:
        return self.step(self.drive(x), s)

    def step(self, drive: Drive, s: State, push: Sequence[Tensor | None] | None = None) -> State:
        """project(squash(dPhi/ds) + push), or project(squash(dPhi/ds + push)) with the nudge inside."""
        return self._moved(self.gradient(drive, s), push)

    def group_step(
        self, drive: Drive, s: State, layers: Collection[int], push: Sequence[Tensor | None] | None = None
    ) -> State:
        if type(self).step is not PrimitiveDynamics.step:
            return super().group_step(drive, s, layers, push)
        new = self._moved(self.group_gradient(drive, s, layers), push)
        return tuple(new[n] if n in layers else layer for n, layer in enumerate(s))

    def _moved(self, inputs: State, push: Sequence[Tensor | None] | None) -> State:
        if push is None:
            return self.project(self.squash(inputs))
        if self.nudge_site == "outside":
            return self.project(add(self.squash(inputs), push))
        return self.project(self.squash(add(inputs, push)))

    @property
    def output_bounds(self) -> tuple[float, float] | None:
        """The numbers between which squash clamps the output, infinite for the identity; None if it does not clamp."""
        return None if self.squashes else UNBOUNDED

    def implicit_step(
        self, drive: Drive, s: State, target: Tensor, strength: float | Tensor, layers: Collection[int] | None = None
    ) -> State:
        """A step in which the output solves o = squash(dPhi/do + strength (target - o)), before projection."""
        chosen = range(len(s)) if layers is None else layers
        inputs = self.group_gradient(drive, s, chosen)
        new = self.squash(inputs)
        if 0 in chosen:

            def sigma(v: Tensor) -> Tensor:
                return self.squash((v, *inputs[1:]))[0]

            new = (solve_implicit(sigma, inputs[0], target, strength, self.output_bounds), *new[1:])
        new = self.project(new)
        return tuple(new[n] if n in chosen else layer for n, layer in enumerate(s))


NEWTON = 60
"""Steps of the safeguarded Newton iteration; a smooth sigma needs about six, a kink a few more."""


def solve_implicit(
    sigma: Callable[[Tensor], Tensor],
    inputs: Tensor,
    target: Tensor,
    strength: float | Tensor,
    bounds: tuple[float | Tensor, float | Tensor] | None = None,
    size: Tensor | None = None,
) -> Tensor:
    """The o with o = sigma(inputs + strength (target - o)), element by element.

    It is unique where 1 + strength sigma' > 0: `strength` is checked to be above -1, and slopes are taken to be 1 at
    most. Where sigma clamps between bounds it is the clamp of (inputs + strength target)/(1 + strength); otherwise it
    is found by Newton's iteration, kept inside a bracket. `size` is that of the numbers that are added; 1 and more
    where none is given.
    """
    if bounds is not None:
        free = (inputs + strength * target) / (1.0 + strength)
        return free if not isinstance(bounds[0], Tensor) and bounds == UNBOUNDED else free.clamp(*bounds)  # type: ignore[arg-type]
    o = sigma(inputs)
    least = torch.as_tensor(1.0 + strength).clamp(max=1.0).to(o)
    reach = (o - sigma(inputs + strength * (target - o))).abs() / least
    low, high = o - reach, o + reach
    rounding = (
        8.0
        * torch.finfo(o.dtype).eps
        * (1.0 + torch.as_tensor(strength).abs().to(o))
        * (1.0 + inputs.abs() + target.abs() if size is None else size)
    )
    for _ in range(NEWTON):
        value, slope = _with_slope(sigma, inputs + strength * (target - o))
        error, steepness = o - value, 1.0 + strength * slope
        low, high = torch.where(error <= 0.0, o, low), torch.where(error >= 0.0, o, high)
        guess = o - error / steepness
        # Where Newton's step does not halve the error, the middle of the bracket is next.
        left = (guess - sigma(inputs + strength * (target - guess))).abs()
        new = torch.where(left <= 0.5 * error.abs(), guess, 0.5 * (low + high))
        found = error.abs() <= rounding
        o = torch.where(found, o, new)
        if not o.is_cuda:  # on a GPU to look would be to wait for the device
            _check_unique(steepness)
            if bool(found.all()):
                break
    return o


def _check_unique(steepness: Tensor) -> None:
    if not bool((steepness > 0.0).all()):
        raise ArithmeticError(
            "The implicit nudge has no unique solution here: 1 + beta sigma' is not positive. It needs an elementwise "
            "sigma that grows, with slopes up to 1. Use nudge_site='inside', or a smaller beta."
        )


def _with_slope(sigma: Callable[[Tensor], Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        inputs = v.detach().requires_grad_()
        value = sigma(inputs)
        (slope,) = derivative(value.sum(), (inputs,))
    return value.detach(), torch.zeros_like(v) if slope is None else slope


def _reads(f: Tensor, parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Whether f depends on each parameter."""
    if not f.requires_grad or not parameters:
        return [False] * len(parameters)
    return [g is not None for g in derivative(f.sum(), parameters)]


def set_nudge_site(model: Dynamics, where: NudgeSite) -> None:
    """Set where the nudge of the second phase enters this model's step."""
    if where not in NUDGE_SITES:
        raise ValueError(f"nudge_site is {where!r}; expected 'outside' (the paper's) or 'inside' sigma, or 'implicit'.")
    name = model.title
    if not isinstance(model, PrimitiveDynamics):
        if where != "outside":
            raise TypeError(
                f"{name} is defined by its transition only, so there is no sigma to put the nudge inside. Define it by "
                "a primitive and a squash (eqprop.from_primitive), or use nudge_site='outside'."
            )
        return
    if where == "inside" and not model.squashes:
        raise ValueError(
            f"{name} has no sigma around dPhi/ds, so a nudge inside equals one outside and the theorem already holds. "
            "Use nudge_site='outside'; 'inside' is for prototypical nets."
        )
    if where != model.nudge_site and type(model).step is not PrimitiveDynamics.step:
        raise TypeError(f"{name} overrides step, which decides where the nudge enters. Change it there.")
    model.nudge_site = where


def check_eps(eps: float) -> float:
    if not is_number(eps) or not 0.0 < eps <= 1.0:
        raise ValueError(f"The step eps is {eps!r}; expected a number in (0, 1]. Typical values are 0.2 and 0.08.")
    return float(eps)
