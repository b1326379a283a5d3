"""The mathematics of nets made of layers and connections: Phi, its derivatives, and sweeps over the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.dynamics import Drive, NudgeSite, PrimitiveDynamics, check_eps, set_nudge_site
from eqprop.models.activations import Activation
from eqprop.models.connections import Connection, Dense, Ends, Init, Shape, Theta, Weight, add_parameters, fed
from eqprop.models.departure import GraphDeparture
from eqprop.models.drawing import Drawing, drawing, table
from eqprop.state import LayerParameters, State, add, is_number, subtract, zero_state

Setting = Literal["energy-based", "prototypical"]
Result = TypeVar("Result")
Way = Literal["forward", "feedback", "both"]

INPUT = "x"
"""The name of the input among the layers."""


@dataclass(frozen=True)
class Wiring:
    """What a `Graph` is made of.

    layers              shapes by name, the output first
    activations         of the layers; `input_activation` that of the input, None to take x as it is
    eps                 the step of the energy-based setting; None in the prototypical one
    clip, output_slope  as of `Layered`
    groups              of layers that a sweep updates together; None: a colouring
    bias_gain           factor of the initial range of biases
    """

    input_shape: Shape
    layers: Mapping[str, Shape]
    connections: tuple[Connection, ...]
    activations: tuple[Activation, ...]
    groups: tuple[tuple[str, ...], ...] | None = None
    input_activation: Activation | None = None
    eps: float | None = None
    clip: bool = False
    output_slope: bool = True
    bias: bool = True
    bias_gain: float = 1.0
    nudge_site: NudgeSite = "outside"


class Link(NamedTuple):
    """A connection in its place: the numbers of its layers, the input after the last, and its parameters' names.

    back    the names of the parameters of its feedback, the same unless it is untied
    own     the name of the weights that only the feedback has; None unless it is untied
    """

    connection: Connection
    post: int
    pre: int
    names: dict[str, str]
    back: dict[str, str]
    own: str | None


Apply = Callable[..., Any]
"""(link, "forward", pre), (link, "feedback", post, pre) or (link, "both", post, pre) -> what arrives."""


class Graph(PrimitiveDynamics):
    """Layers joined by connections: Phi = sum over connections <post, A(pre)> + sum over layers b . s.

    Prototypical: s_{t+1} = sigma(dPhi/ds), sigma of each layer's own.
    Energy-based, with r = sigma(s) in the place of s in Phi, the input entering as sigma(x):
        s_{t+1} = dPhi'/ds,   Phi' = (1 - eps)/2 |s|^2 + eps Phi

    The base of all nets here, which only say what they are made of. Each input of a layer is added to the sum of those
    before it, constant ones first, in the order of the connections.

    With a connection whose way back is not the derivative of its way there (other gains, or weights of its own), F is
    the gradient of no Phi and the net is not `conservative`: EP's update is then one-sided (see `contrast`).
    """

    input_shape: Shape

    def __init__(self, wiring: Wiring, init: Init, seed: int | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.input_shape, self.layers = wiring.input_shape, dict(wiring.layers)
        self.connections = wiring.connections
        self.groups = wiring.groups or colouring(self.names, self.connections)
        self.activations, self.input_activation = wiring.activations, wiring.input_activation
        self.energy_based, self.clip, self.output_slope = wiring.eps is not None, wiring.clip, wiring.output_slope
        self.eps = self.nudge_scale = 1.0 if wiring.eps is None else wiring.eps
        self.bias, self.bias_gain = wiring.bias, _check_gain("bias_gain", wiring.bias_gain)
        self._biases = tuple(self.bias_name(layer) for layer in self.layers)
        self._links = self._linked()
        self._inner = tuple(link for link in self._links if link.connection.pre != INPUT)
        self.bipartite = not self.energy_based and all(_joins_parities(link) for link in self._inner)
        self.in_turns = self.bipartite and all(type(link.connection) is Dense for link in self._inner)
        self.first_moved = self._first_moved()
        self.conservative = all(link.connection.conservative for link in self._inner)
        self.update_scales = self._update_scales()
        self._check_activations(wiring.nudge_site)
        set_nudge_site(self, wiring.nudge_site)
        wanted = self._wanted()
        self._order = tuple(wanted)
        add_parameters(self, wanted, init, seed, dtype)
        self._turn_feedback()

    def _first_moved(self) -> int | None:
        """The parity of the layers that see the input, where nothing else moves a zero state."""
        seeing = {link.post % 2 for link in self._links if link.connection.pre == INPUT}
        biased = any(self._biases) or any("b" in link.names for link in self._links)
        if not self.in_turns or biased or len(seeing) != 1:
            return None
        return seeing.pop() if all(not bool(sigma(torch.zeros(2)).any()) for sigma in self.activations) else None

    @torch.no_grad()
    def _turn_feedback(self) -> None:
        """Begin untied ways back at their angle from the way there."""
        for link in self._links:
            angle = math.radians(link.connection.feedback_angle)
            if link.own is not None and link.connection.feedback_angle != 90.0:
                back, weight = self.get_parameter(link.own), self.get_parameter(link.names["W"])
                back.mul_(math.sin(angle)).add_(math.cos(angle) * weight)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.layers)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self.layers)

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        found = []
        for n in range(len(self.layers)):
            fed = [name for link in self._links if link.post == n for name in link.names.items()]
            fed += [("B", link.own) for link in self._links if link.post == n and link.own is not None]
            inside = next((name for short, name in fed if short == "b"), None)
            weights = tuple(name for short, name in fed if short != "b")
            found.append(LayerParameters(weights, self._biases[n] or inside))
        return tuple(found)

    def weight_name(self, c: Connection, short: str) -> str:
        """The full name of a connection's parameter."""
        if c.name is not None:
            return c.name if short == "W" else f"{short}_{c.name}"
        post, pre = _number(c.post), _number(c.pre)
        return f"{short}_{c.post}_{c.pre}" if post is None or pre is None else f"{short}{post}{pre}"

    def bias_name(self, layer: str) -> str | None:
        """The name of a layer's bias; None if it has none."""
        number = _number(layer)
        return None if not self.bias else f"b_{layer}" if number is None else f"b{number}"

    @property
    def squashes(self) -> bool:
        return not self.energy_based

    @property
    def output_bounds(self) -> tuple[float, float] | None:
        return super().output_bounds if self.energy_based else self.activations[0].bounds

    def sweep(self, layers: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.names.index(name) for name in group) for group in self.groups)

    def shape(self, layer: str) -> Shape:
        return self.input_shape if layer == INPUT else self.layers[layer]

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, tuple(self.layers.values()), x.shape[: -len(self.input_shape)])

    def activity(self, s: State) -> State:
        """What the other layers see: sigma(s) in the energy-based setting, s in the prototypical one."""
        return self._activated(s) if self.energy_based else s

    def input_activity(self, x: Tensor) -> Tensor:
        return x if self.input_activation is None else self.input_activation(x)

    def _activated(self, s: State) -> State:
        return tuple([sigma(layer) for sigma, layer in zip(self.activations, s, strict=True)])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        if not self.conservative:
            raise ValueError(
                f"{self.title} has no Phi: {self._lopsided()} does not go back as it came. Give its connections equal "
                "gains and tied weights, or do without Phi."
            )
        seen = (*self.activity(s), self.input_activity(x))
        lead = self.sample_dims(x)
        phi = x.new_zeros(x.shape[:lead])
        for link in self._links:
            forward = _times(self.along(link, "forward", seen[link.pre]), link.connection.forward_gain)
            phi = phi + (seen[link.post] * forward.reshape_as(seen[link.post])).flatten(lead).sum(-1)
        for n in range(len(s)):
            offset = self._offset(n)
            phi = phi if offset is None else phi + (seen[n] * offset).flatten(lead).sum(-1)
        if not self.energy_based:
            return phi
        squares = torch.stack([(layer * layer).flatten(lead).sum(-1) for layer in s]).sum(0)
        return 0.5 * (1.0 - self.eps) * squares + self.eps * phi

    def _offset(self, n: int) -> Tensor | None:
        """The bias of a layer, shaped to be added to it; None without one."""
        name = self._biases[n]
        if name is None:
            return None
        value: Tensor = getattr(self, name).unsqueeze(-2)
        places = len([*self.layers.values()][n]) - 1
        return value[(..., *[None] * places)] if places else value

    def drive(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """What each layer gets that does not change during a phase: its bias and the input."""
        constant = [self._offset(n) for n in range(len(self.layers))]
        visible, samples = self.input_activity(x), x.shape[: self.sample_dims(x)]
        for link in self._links:
            if link.connection.pre == INPUT:
                forward = _times(self.along(link, "forward", visible), link.connection.forward_gain)
                forward = forward.reshape(*samples, *self.layers[link.connection.post])
                known = constant[link.post]
                constant[link.post] = forward if known is None else forward + known
        return tuple(constant)

    def gradient(self, drive: Sequence[Tensor | None], s: State) -> State:
        return self.group_gradient(drive, s, range(len(s)))

    def group_gradient(self, drive: Sequence[Tensor | None], s: State, layers: Collection[int]) -> State:
        """dPhi/ds of these layers; the others are returned unchanged."""
        total = self.gathered(drive, self.activity(s), layers, self.along)
        if not self.energy_based:
            return tuple([fed(total[n]) if n in layers else v for n, v in enumerate(s)])
        return tuple([self._leaked(fed(total[n]), v, n) if n in layers else v for n, v in enumerate(s)])

    def gathered(
        self, drive: Sequence[Tensor | None], r: State, layers: Collection[int], apply: Apply
    ) -> list[Tensor | None]:
        """What each of these layers gets: its part of the drive, and what `apply` says its connections bring it."""
        total = list(drive)
        for link in self._inner:
            c, post, pre = link[:3]
            if post not in layers:
                if pre in layers:
                    _gather(total, r, pre, _times(apply(link, "feedback", r[post], r[pre]), c.feedback_gain))
            elif pre in layers:
                forward, back = apply(link, "both", r[post], r[pre])
                _gather(total, r, post, _times(forward, c.forward_gain))
                _gather(total, r, pre, _times(back, c.feedback_gain))
            else:
                _gather(total, r, post, _times(apply(link, "forward", r[pre]), c.forward_gain))
        return total

    def departure(self, drive: Drive, s: State) -> GraphDeparture | None:
        return GraphDeparture(self, drive, s) if _as_written(type(self)) else None

    @in_own_precision
    def feedforward(self, x: Tensor) -> State:
        """s_n = sigma(sum of A(pre) + b), layer by layer from the input to the output: the connections, one way."""
        order = self._forward_order()
        if self.energy_based or order is None:
            return super().feedforward(x)
        layers, total = list(self.init_state(x)), list(self.drive(x))
        for n in order:
            for link in self._inner:
                if link.post == n:
                    part = self.along(link, "forward", layers[link.pre])
                    _gather(total, tuple(layers), n, _times(part, link.connection.forward_gain))
            layers[n] = self.activations[n](fed(total[n])).expand_as(layers[n])
        return tuple(layers)

    def _forward_order(self) -> list[int] | None:
        """The layers, each after those that feed it; None if the connections make a loop."""
        left, order = set(range(len(self.layers))), list[int]()
        while left:
            fed = {link.post for link in self._inner if link.pre in left}
            ready = sorted(left - fed, reverse=True)
            if not ready:
                return None
            order += ready
            left -= set(ready)
        return order

    def _leaked(self, total: Tensor, s: Tensor, n: int) -> Tensor:
        """(1 - eps) s + eps sigma'(s) times the total input of layer n."""
        force = total if n == 0 and not self.output_slope else self.activations[n].slope(s) * total
        return (1.0 - self.eps) * s + self.eps * force

    def squash(self, s: State) -> State:
        return s if self.energy_based else self._activated(s)

    def project(self, s: State) -> State:
        return tuple([layer.clamp(0.0, 1.0) for layer in s]) if self.clip else s

    def half_step(self, drive: Sequence[Tensor | None], s: State, parity: int) -> State:
        wanted = range(parity, len(s), 2)
        inputs = self.group_gradient(drive, s, wanted)
        return tuple([self.activations[n](v) if n in wanted else v for n, v in enumerate(inputs)])

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """(1/B) of each connection's contrast and of what moved, times eps if energy-based  [delta-fc-canon, delta-fc].

        Differences come first, dr r+^T + r- dr^T: the sums over samples are far larger than what they differ in.

        Where there is no Phi it is one-sided, dr_post (r-_pre)^T for W and r-_post dr_pre^T for those of an untied
        way back, divided by the gains that a layer's share of the nudge has passed (`update_scales`).
        """
        plus, minus = self.activity(s_plus), self.activity(s_minus)
        return self._contrast(x, plus, minus, None)

    def difference_contrast(self, x: Tensor, s: State, plus: State, minus: State | None = None) -> dict[str, Tensor]:
        if not _as_written(type(self)):
            return super().difference_contrast(x, s, plus, minus)
        if self.energy_based:
            moves = [sigma.around(layer) for sigma, layer in zip(self.activations, s, strict=True)]
            plus = tuple([move(d) for move, d in zip(moves, plus, strict=True)])
            minus = minus and tuple([move(d) for move, d in zip(moves, minus, strict=True)])
        r = self.activity(s)
        if minus is None:
            return self._contrast(x, add(r, plus), r, plus)
        if not self.conservative:  # the move alone counts, seen from s
            return self._contrast(x, add(r, plus), r, subtract(plus, minus))
        return self._contrast(x, add(r, plus), add(r, minus), subtract(plus, minus))

    def _contrast(self, x: Tensor, plus: State, minus: State, change: State | None) -> dict[str, Tensor]:
        """Of activities, and their difference where it is known better than by subtraction."""
        visible, lead = self.input_activity(x), self.sample_dims(x)
        seen_plus, seen_minus = (*plus, visible), (*minus, visible)
        moved = subtract(plus, minus) if change is None else change
        out: dict[str, Tensor] = {}
        for link in self._links:
            ends = [Ends(seen[link.post], seen[link.pre]) for seen in (seen_plus, seen_minus)]
            if not self.conservative:
                out |= self._one_sided(link, ends[1], Ends(moved[link.post], (*moved, visible)[link.pre]))
                continue
            if change is None:
                found = self._call(link, link.connection.contrast, *ends)
            else:
                found = self._contrast_of(link, ends[0], ends[1], Ends(change[link.post], (*change, visible)[link.pre]))
            out |= {link.names[short]: _times(g, link.connection.forward_gain) for short, g in found.items()}
        for n, name in enumerate(self._biases):
            if name is not None:
                total = moved[n].sum(lead - 1)
                total = total if total.dim() == lead else total.flatten(lead).sum(-1)
                out[name] = _times(total, 1.0 if self.conservative else 1.0 / self.update_scales[n])
        return {name: self._mean(out[name], x.shape[lead - 1]) for name in self._order}

    def _contrast_of(self, link: Link, plus: Ends, minus: Ends, change: Ends) -> dict[str, Tensor]:
        def contrast(plus: Ends, minus: Ends, change: Ends, theta: Theta) -> dict[str, Tensor]:
            return link.connection.contrast(plus, minus, theta, change)

        return self._call(link, contrast, plus, minus, change)

    def _one_sided(self, link: Link, at: Ends, moved: Ends) -> dict[str, Tensor]:
        """The update of a connection of a net without Phi: of each way by how far its end moved."""
        c, scales = link.connection, self.update_scales
        found = self._call(link, c.weight_gradient, moved.post, at.pre)
        out = {link.names[short]: _times(g, c.forward_gain / scales[link.post]) for short, g in found.items()}
        if link.own is not None:
            back = self._call(link, c.back_gradient, at.post, at.pre, moved.pre, names=link.back)
            out[link.own] = _times(back, c.feedback_gain / scales[link.pre])
        return out

    def _update_scales(self) -> tuple[float, ...]:
        """How much of the output's error arrives at each layer: the largest product of feedback gains on a way back.

        Gains of the ways forward are part of the error itself.
        """
        found = [1.0, *[0.0] * (len(self.layers) - 1)]
        for _ in found:
            for link in self._inner:
                if link.pre != link.post:
                    found[link.pre] = max(found[link.pre], abs(link.connection.feedback_gain) * found[link.post])
        return tuple(v or 1.0 for v in found)

    def outside_phi(self, x: Tensor) -> list[str]:
        return super().outside_phi(x) if self.conservative else []

    def _lopsided(self) -> str:
        return next(f"{type(c).__name__} {c}" for c, *_ in self._inner if not c.conservative)

    def _check_activations(self, site: NudgeSite) -> None:
        for name, sigma in zip(self.names, self.activations, strict=True):
            if not sigma.elementwise and (self.energy_based or site == "implicit" or len(self.layers[name]) > 1):
                raise ValueError(
                    f"The layer {name} has the activation {sigma.name}, which mixes neurons; expected a flat layer of "
                    "a prototypical net, without the implicit nudge. Use an elementwise activation."
                )

    def _mean(self, total: Tensor, samples: int) -> Tensor:
        return (self.eps / samples) * total

    def along(self, link: Link, name: Way, *ends: Tensor) -> Any:
        """A connection's `forward`, `feedback` or `both`."""
        c = link.connection
        if c.untied and name == "both":
            return self.along(link, "forward", ends[1]), self.along(link, "feedback", *ends)
        return self._call(link, getattr(c, name), *ends, names=link.back if name == "feedback" else link.names)

    def _call(
        self, link: Link, formula: Callable[..., Result], *ends: Tensor | Ends, names: dict[str, str] | None = None
    ) -> Result:
        """formula(*ends, theta); network by network where the networks are stacked and it serves only one."""
        theta = self.theta_of(link.names if names is None else names)
        if self.networks is None or link.connection.stacks:
            return formula(*ends, theta)
        each = [
            formula(*(_of_one(v, r) for v in ends), {short: value[r] for short, value in theta.items()})
            for r in range(self.networks)
        ]
        return _stacked(each)

    def theta_of(self, names: dict[str, str]) -> dict[str, Tensor]:
        """Parameters by their short names."""
        return {short: getattr(self, name) for short, name in names.items()}

    @torch.no_grad()
    def parts_apart(self, x: Tensor, s: State) -> dict[str, float]:
        """The feedback and the weight gradient of each connection, against those of its forward map."""
        if self.networks is not None:
            return {}
        seen, found = (*self.activity(s), self.input_activity(x)), {}
        for link in self._links:
            c, ends = link.connection, (seen[link.post], seen[link.pre], self.theta_of(link.names))
            kind = f"{type(c).__name__} {c}"
            found[f"the feedback of {kind}"] = _apart(c.feedback(*ends), c.autodiff_feedback(*ends))
            ours, theirs = c.weight_gradient(*ends), c.autodiff_weight_gradient(*ends)
            for short, g in theirs.items():
                found[f"the gradient of {short} of {kind}"] = _apart(ours[short], g)
        return found

    def _linked(self) -> tuple[Link, ...]:
        places = {name: n for n, name in enumerate((*self.layers, INPUT))}
        taken = set(self._biases)
        found = []
        for c in self.connections:
            _check_gain(f"The gain of {c}", c.gain)
            for what in ("forward_gain", "feedback_gain", "feedback_angle"):
                _check_gain(f"The {what} of {c}", getattr(c, what))
            shorts = c.weights(self.shape(c.pre), self.shape(c.post))
            names = {short: self.weight_name(c, short) for short in shorts}
            own = self._back_name(c) if c.untied else None
            back = names if own is None else c.returning(names, own)
            for name in dict.fromkeys((*names.values(), *back.values())):
                if not name.isidentifier() or hasattr(self, name):
                    raise ValueError(f"The connection {c} names its weight {name!r}; expected a word such as 'W12'.")
                if name in taken:
                    raise ValueError(f"Two parameters are named {name!r}, one of {c}: give the connection a name=.")
            taken |= {*names.values(), *back.values()}
            found.append(Link(c, places[c.post], places[c.pre], names, back, own))
        return tuple(found)

    def _back_name(self, c: Connection) -> str:
        """The name of the weight of an untied way back: B01 beside W01, B_h1_x, B_name."""
        unties = c.linear if c.unties is None else c.unties
        if not unties or "W" not in c.weights(self.shape(c.pre), self.shape(c.post)) or INPUT in (c.pre, c.post):
            raise ValueError(
                f"{type(c).__name__} {c} is untied; expected that of a linear connection or of a Conv, with weights, "
                "between two layers of the net. Leave out untied=True."
            )
        if c.name is None:
            return self.weight_name(replace(c, name=None), "B")
        return f"B{c.name[1:]}" if c.name.startswith("W") else f"B_{c.name}"

    def _wanted(self) -> dict[str, Weight]:
        """From the output on, each layer's weights and then its bias, which has the fans of the first of them."""
        wanted: dict[str, Weight] = {}
        for n, shape in enumerate(self.layers.values()):
            fans = None
            for c, post, _, names, _back, own in self._links:
                for short, weight in c.weights(self.shape(c.pre), shape).items() if post == n else ():
                    gain = self.bias_gain if short == "b" else c.gain
                    for name in (names[short], own) if short == "W" and own is not None else (names[short],):
                        wanted[name] = weight._replace(gain=gain * weight.gain)
                    fans = fans or weight[1:3]
            if (bias := self._biases[n]) is not None:
                wanted[bias] = Weight(shape[:1], *(fans or (1, 1)), self.bias_gain)
        return wanted

    def weights_of(self) -> list[tuple[Connection, dict[str, Tensor]]]:
        """Each connection with its parameters, by their short names."""
        return [(link.connection, self.theta_of(link.names)) for link in self._links]

    def operations(self) -> int:
        """Multiplications and additions of a full step of one sample: every connection once forward and once back.

        Connections from the input are left out: they are computed once per phase.
        """
        return sum(2 * c.operations(self.shape(c.pre), self.shape(c.post)) for c, *_ in self._inner)

    def __str__(self) -> str:
        """A table of the layers and the connections."""
        return table(self)

    __repr__ = __str__

    def draw(self) -> Drawing:
        """The graph as a picture, the input on the left, layers coloured by group. Shown in notebooks."""
        return drawing(self)


def _check_gain(what: str, gain: float) -> float:
    if not is_number(gain) or not math.isfinite(gain):
        raise ValueError(f"{what} is {gain!r}; expected a finite number, such as 1.")
    return float(gain)


def _times(v: Tensor, factor: float) -> Tensor:
    return v if factor == 1.0 else factor * v


_FORMULAS = (
    *("gradient", "group_gradient", "gathered", "activity", "drive", "squash", "project", "step", "group_step"),
    *("implicit_step", "contrast", "_leaked", "_moved"),
)


def _as_written(kind: type[Graph]) -> bool:
    """Whether a net's step is the one its formulas here are of."""
    return all(getattr(kind, name) is getattr(Graph, name) for name in _FORMULAS)


def _joins_parities(link: Link) -> bool:
    """Whether a connection joins an even to an odd layer, and its ends see no more."""
    return (link.pre + link.post) % 2 == 1 and link.connection.piecewise_linear


def _gather(total: list[Tensor | None], s: State, n: int, part: Tensor) -> None:
    """Add to the input of layer n."""
    part = part if part.dim() == s[n].dim() else part.view_as(s[n])
    known = total[n]
    total[n] = part if known is None else known + part


def _of_one(v: Tensor | Ends, r: int) -> Tensor | Ends:
    """The part of network r."""
    return v[r] if isinstance(v, Tensor) else Ends(v.post[r], v.pre[r])


def _stacked(each: Sequence[Result]) -> Result:
    """Stack tensors, or what tuples and dictionaries of them hold."""
    first = each[0]
    if isinstance(first, Tensor):
        return torch.stack(each)  # type: ignore[arg-type, return-value]
    if isinstance(first, dict):
        return {name: _stacked([e[name] for e in each]) for name in first}  # type: ignore[index, return-value]
    return tuple(_stacked(list(parts)) for parts in zip(*each, strict=True))  # type: ignore[return-value]


def _apart(a: Tensor, b: Tensor) -> float:
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size else 0.0


def _number(layer: str) -> str | None:
    """The number of a layer s0, s1, ..., or x."""
    if layer == INPUT:
        return INPUT
    return layer[1:] if layer[0] == "s" and layer[1:].isdigit() else None


def energy_step(setting: Setting, eps: float | None, clip: bool = False, output_slope: bool = True) -> float | None:
    """The step of an energy-based net, checked; None for a prototypical one, which has none."""
    if setting == "energy-based":
        if eps is None:
            raise ValueError("Got no eps for the energy-based setting; expected a number in (0, 1], such as eps=0.2.")
        return check_eps(eps)
    if setting != "prototypical":
        raise ValueError(f"setting is {setting!r}; expected 'energy-based' or 'prototypical'.")
    if eps is not None or clip or not output_slope:
        raise ValueError(
            "eps, clip and output_slope apply to the energy-based setting only. Omit them, or choose "
            "setting='energy-based'."
        )
    return None


def colouring(names: Sequence[str], connections: Sequence[Connection]) -> tuple[tuple[str, ...], ...]:
    """Groups without neighbours, the output's last: two where the graph is bipartite, else as few as greed finds.

    The next layer to be coloured is always the one with the most colours around it, then the one with the most
    neighbours; on a bipartite graph that needs two colours (Brelaz).
    """
    beside: dict[str, set[str]] = {name: set() for name in names}
    for c in connections:
        if c.pre not in (INPUT, c.post):
            beside[c.pre].add(c.post)
            beside[c.post].add(c.pre)
    colour: dict[str, int] = {}
    while len(colour) < len(names):
        around = {name: {colour[b] for b in beside[name] if b in colour} for name in names if name not in colour}
        name = max(around, key=lambda n: (len(around[n]), len(beside[n])))
        colour[name] = next(k for k in range(len(names)) if k not in around[name])
    kinds = sorted(set(colour.values()), key=lambda k: (k == colour[names[0]], k))
    return tuple(tuple(name for name in names if colour[name] == k) for k in kinds)
