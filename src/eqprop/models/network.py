"""Nets as graphs: any layers, joined by any connections."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import Tensor

from eqprop.dynamics import NudgeSite, PrimitiveDynamics, check_eps, set_nudge_site
from eqprop.functional import layer_shapes
from eqprop.messages import did_you_mean
from eqprop.models.activations import Activation
from eqprop.models.activations import activation as _activation
from eqprop.models.connections import Connection, Ends, Shape
from eqprop.models.init import Init, Wanted, add_parameters
from eqprop.models.layered import Setting
from eqprop.state import LayerParameters, State, zero_state

AnyActivation = str | Activation | Callable[[Tensor], Tensor]
Groups = Sequence[Sequence[str]]

INPUT = "x"
"""The name of the input among the layers."""

REST = "*"
"""The key of an activation that serves all layers not named."""


@final
class Network(PrimitiveDynamics):
    """Layers joined by connections: Phi = sum over connections <post, A(pre)> + sum over layers b . s.

    Prototypical: s_{t+1} = sigma(dPhi/ds), sigma of each layer's own.
    Energy-based, with r = sigma(s) in the place of s in Phi, the input entering as sigma(x):
        s_{t+1} = dPhi'/ds,   Phi' = (1 - eps)/2 |s|^2 + eps Phi

        net = Network(
            input_shape=(3, 32, 32),
            layers={"out": 10, "h2": (64, 8, 8), "h1": (32, 16, 16)},  # the output first
            connections=[
                Conv("x", "h1", kernel=3, padding=1, pool=2),
                Conv("h1", "h2", kernel=3, padding=1, pool=2),
                Dense("h2", "out"),
            ],
            activation={"out": "identity", "*": "hard-sigmoid"},
        )

    layers          names and shapes, the output first; a number for a flat layer
    connections     see `eqprop.models.connections`; the input is named "x"
    activation      one for all layers, or by layer; "*" stands for those not named, "x" for the input
    eps, clip       of the energy-based setting: its step, and whether states are kept in [0, 1]
    groups          of layers that a sweep updates together, in the order of the free phase; neighbours may share one.
                    None: a colouring, so that they do not, with the output in the last.
    init, seed      as of the other models; a connection's `gain` multiplies its range, `bias_gain` that of biases

    Weights are named after their layers, W_out_h2, and biases b_out; between layers s0, s1, ... and x it is W01, W1x
    and b0. A bias has one number per channel of an image, per neuron of a flat layer.
    """

    input_shape: Shape

    def __init__(
        self,
        input_shape: int | Shape,
        layers: Mapping[str, int | Shape],
        connections: Sequence[Connection],
        activation: AnyActivation | Mapping[str, AnyActivation] = "hard-sigmoid",
        *,
        setting: Setting = "prototypical",
        eps: float | None = None,
        clip: bool = False,
        bias: bool = True,
        nudge_site: NudgeSite = "outside",
        groups: Groups | None = None,
        init: Init = "default",
        bias_gain: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        (self.input_shape,) = layer_shapes([input_shape])
        self.layers = _check_layers(layers)
        self.connections = tuple(connections)
        self._check_connections()
        self.energy_based = _check_setting(setting, eps, clip)
        self.clip, self.bias, self.bias_gain = clip, bias, bias_gain
        self.eps = self.nudge_scale = check_eps(eps) if eps is not None else 1.0
        self.activations, self.input_activation = self._choose_activations(activation)
        self.groups = _groups(self.names, self.connections, groups)
        self._places = {name: n for n, name in enumerate(self.names)}
        self._theta = self._name_parameters()
        self.bipartite = not self.energy_based and all(self._joins_parities(c) for c in self.connections)
        set_nudge_site(self, nudge_site)
        add_parameters(self, self._wanted(), init, seed, dtype)
        self._check_forward_maps()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.layers)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return tuple(
            LayerParameters(
                tuple(n for c, names in self._named_connections() if c.post == layer for n in names.values()),
                _bias_name(layer) if self.bias else None,
            )
            for layer in self.names
        )

    @property
    def squashes(self) -> bool:
        return not self.energy_based

    @property
    def output_bounds(self) -> tuple[float, float] | None:
        return super().output_bounds if self.energy_based else self.activations[0].bounds

    def sweep(self, layers: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self._places[name] for name in group) for group in self.groups)

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
        return tuple(sigma(layer) for sigma, layer in zip(self.activations, s, strict=True))

    def primitive(self, x: Tensor, s: State) -> Tensor:
        seen = self._seen(x, self.activity(s))
        lead = x.dim() - len(self.input_shape)
        phi = x.new_zeros(x.shape[:lead])
        for c, names in self._named_connections():
            forward = self._run(c.stacks, c.forward, seen[c.pre], names=names)
            phi = phi + (seen[c.post] * forward.reshape_as(seen[c.post])).flatten(lead).sum(-1)
        for layer in self.names:
            offset = self.offset(layer)
            phi = phi if offset is None else phi + (seen[layer] * offset).flatten(lead).sum(-1)
        if not self.energy_based:
            return phi
        squares = torch.stack([(layer * layer).flatten(lead).sum(-1) for layer in s]).sum(0)
        return 0.5 * (1.0 - self.eps) * squares + self.eps * phi

    def offset(self, layer: str) -> Tensor | None:
        """The bias of a layer, shaped to be added to it; None without biases."""
        if not self.bias:
            return None
        value: Tensor = getattr(self, _bias_name(layer))
        return value.unsqueeze(-2)[(..., *[None] * (len(self.layers[layer]) - 1))]

    def drive(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """What each layer gets that does not change during a phase: its bias and the input."""
        constant = [self.offset(layer) for layer in self.names]
        visible = self.input_activity(x)
        for c, names in self._named_connections():
            if c.pre == INPUT:
                n = self._places[c.post]
                forward = self._run(c.stacks, c.forward, visible, names=names)
                forward = forward.reshape(*x.shape[: -len(self.input_shape)], *self.layers[c.post])
                offset = constant[n]
                constant[n] = forward if offset is None else forward + offset
        return tuple(constant)

    def gradient(self, drive: Sequence[Tensor | None], s: State) -> State:
        return self.group_gradient(drive, s, range(len(s)))

    def group_gradient(self, drive: Sequence[Tensor | None], s: State, layers: Collection[int]) -> State:
        r = self.activity(s)
        total = list(drive)
        for c, names in self._named_connections():
            if c.pre == INPUT:
                continue
            pre, post = self._places[c.pre], self._places[c.post]
            forward, back = self._through(c, names, Ends(r[pre], r[post]), (post in layers, pre in layers))
            for n, part in ((post, forward), (pre, back)):
                if part is not None:
                    known = total[n]
                    total[n] = part.view_as(s[n]) if known is None else known + part.view_as(s[n])
        return tuple(self._force(total[n], s, n) if n in layers else v for n, v in enumerate(s))

    def _through(
        self, c: Connection, names: Mapping[str, str], ends: Ends, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """A(pre) and the feedback, as far as they are wanted."""
        if all(wanted):
            forward, back = self._run(c.stacks, lambda *both: c.both(Ends(*both[:2]), both[2]), *ends, names=names)
            return forward, back
        if wanted[0]:
            return self._run(c.stacks, c.forward, ends.pre, names=names), None
        if wanted[1]:
            return None, self._run(c.stacks, c.feedback, ends.post, ends.pre, names=names)
        return None, None

    def _force(self, inputs: Tensor | None, s: State, n: int) -> Tensor:
        """dPhi/ds of a layer from its total input."""
        total = torch.zeros_like(s[n]) if inputs is None else inputs.expand_as(s[n])
        if not self.energy_based:
            return total
        return (1.0 - self.eps) * s[n] + self.eps * (self.activations[n].slope(s[n]) * total)

    def squash(self, s: State) -> State:
        return s if self.energy_based else self._activated(s)

    def project(self, s: State) -> State:
        return tuple(layer.clamp(0.0, 1.0) for layer in s) if self.clip else s

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """(1/B) of each connection's contrast and of what moved, times eps if energy-based."""
        visible = self.input_activity(x)
        plus, minus = (self._seen(x, self.activity(s), visible) for s in (s_plus, s_minus))
        lead = x.dim() - len(self.input_shape)
        factor = self.eps / x.shape[lead - 1]
        out: dict[str, Tensor] = {}
        for c, names in self._named_connections():
            found = self._run(c.stacks, _contrast_of(c), *_ends(c, plus), *_ends(c, minus), names=names)
            out |= {names[short]: factor * g for short, g in found.items()}
        for layer in self.names if self.bias else ():
            moved = (plus[layer] - minus[layer]).sum(lead - 1)
            out[_bias_name(layer)] = factor * (moved.flatten(lead).sum(-1) if len(self.layers[layer]) > 1 else moved)
        return {name: out[name] for name, _ in self.named_parameters()}

    def _seen(self, x: Tensor, r: State, visible: Tensor | None = None) -> dict[str, Tensor]:
        """The activity of every layer and the input by name."""
        return dict(zip(self.names, r, strict=True)) | {INPUT: self.input_activity(x) if visible is None else visible}

    def _named_connections(self) -> list[tuple[Connection, dict[str, str]]]:
        """Each connection with the full names of its parameters by their short ones."""
        return list(zip(self.connections, self._theta, strict=True))

    def _run(self, stacks: bool, formula: Callable[..., Result], *ends: Tensor, names: Mapping[str, str]) -> Result:
        """formula(*ends, theta); network by network where the networks are stacked and it serves only one."""
        theta = {short: getattr(self, name) for short, name in names.items()}
        if self.networks is None or stacks:
            return formula(*ends, theta)
        each = [
            formula(*(v[r] for v in ends), {short: value[r] for short, value in theta.items()})
            for r in range(self.networks)
        ]
        return _stacked(each)

    @torch.no_grad()
    def parts_apart(self, x: Tensor, s: State) -> dict[str, float]:
        """The feedback and the weight gradient of each connection, against those of its forward map."""
        if self.networks is not None:
            return {}
        seen, found = self._seen(x, self.activity(s)), {}
        for c, names in self._named_connections():
            theta = {short: getattr(self, name) for short, name in names.items()}
            ends = (seen[c.post], seen[c.pre], theta)
            kind = f"{type(c).__name__} {c}"
            found[f"the feedback of {kind}"] = _apart(c.feedback(*ends), c.autodiff_feedback(*ends))
            ours, theirs = c.weight_gradient(*ends), c.autodiff_weight_gradient(*ends)
            for short, g in theirs.items():
                found[f"the gradient of {short} of {kind}"] = _apart(ours[short], g)
        return found

    def _check_connections(self) -> None:
        for c in self.connections:
            for end in (c.pre, c.post):
                if end not in self.layers and end != INPUT:
                    known = [*self.layers, INPUT]
                    raise ValueError(
                        f"The connection {c} names a layer {end!r}, which is not there; the layers are "
                        f"{', '.join(known)}.{did_you_mean(end, known)}"
                    )
            if c.post == INPUT:
                raise ValueError(f"The connection {c} leads into the input, which stays as it is. Swap its ends.")
            c.check(self.shape(c.pre), self.shape(c.post))
        for layer in self.layers:
            if not any(c.post == layer and c.pre != layer for c in self.connections):
                raise ValueError(f"Nothing feeds the layer {layer!r}: give it a connection from another layer or x.")
        if not any(c.pre == INPUT for c in self.connections):
            raise ValueError("No connection begins at the input 'x': the net would not see it.")

    def _check_forward_maps(self) -> None:
        """Try each A on a sample of zeros: a connection of one's own may not fit."""
        for c, names in self._named_connections():
            theta = {short: getattr(self, name) for short, name in names.items()}
            like = next(iter(theta.values()), torch.zeros((), dtype=next(self.parameters()).dtype))
            with torch.no_grad():
                got = c.forward(like.new_zeros(1, *self.shape(c.pre)), theta)
            if got.shape[0] != 1 or got.numel() != math.prod(self.shape(c.post)):
                raise ValueError(
                    f"{type(c).__name__} {c} makes {tuple(got.shape)} of a sample of {self.shape(c.pre)}; expected (1, "
                    f"{', '.join(map(str, self.shape(c.post)))}), the layer {c.post}. Change its forward map."
                )

    def _choose_activations(
        self, choice: AnyActivation | Mapping[str, AnyActivation]
    ) -> tuple[tuple[Activation, ...], Activation | None]:
        chosen = choice if isinstance(choice, Mapping) else {REST: choice}
        strange = next((name for name in chosen if name not in (*self.layers, INPUT, REST)), None)
        if strange is not None:
            known = [*self.layers, INPUT, REST]
            raise ValueError(
                f"activation names a layer {strange!r}, which is not there; expected some of {', '.join(known)}."
                f"{did_you_mean(strange, known)}"
            )
        missing = [name for name in self.layers if name not in chosen and REST not in chosen]
        if missing:
            raise ValueError(
                f"activation has none for {', '.join(missing)}. Give one by name, or for all others as '*'."
            )
        found = tuple(_activation(chosen[name] if name in chosen else chosen[REST]) for name in self.layers)
        visible = chosen.get(INPUT, chosen.get(REST) if self.energy_based else None)
        return found, None if visible is None else _activation(visible)

    def _name_parameters(self) -> tuple[dict[str, str], ...]:
        """The full names of each connection's parameters by their short ones."""
        taken = {_bias_name(layer) for layer in self.names} if self.bias else set()
        found = []
        for c in self.connections:
            names = {short: _weight_name(c, short) for short in c.weights(self.shape(c.pre), self.shape(c.post))}
            for name in names.values():
                if not name.isidentifier() or hasattr(self, name):
                    raise ValueError(f"The connection {c} names its weight {name!r}; expected a word such as 'W12'.")
                if name in taken:
                    raise ValueError(f"Two parameters are named {name!r}, one of {c}: give the connection a name=.")
            taken |= set(names.values())
            found.append(names)
        return tuple(found)

    def _wanted(self) -> list[Wanted]:
        """From the output on, each layer's weights and then its bias, which has the fans of the first of them."""
        wanted = []
        for layer, shape in self.layers.items():
            fans = None
            for c, names in self._named_connections():
                if c.post != layer:
                    continue
                for short, weight in c.weights(self.shape(c.pre), shape).items():
                    wanted.append(Wanted(names[short], weight.shape, weight.fan_in, weight.fan_out, c.gain))
                    fans = fans or (weight.fan_in, weight.fan_out)
            if self.bias:
                wanted.append(Wanted(_bias_name(layer), shape[:1], *(fans or (1, 1)), self.bias_gain))
        return wanted

    def _joins_parities(self, c: Connection) -> bool:
        """Whether a connection joins an even to an odd layer, or the input to any, and its ends see no more."""
        if c.pre == INPUT:
            return True
        return (self._places[c.pre] + self._places[c.post]) % 2 == 1 and c.piecewise_linear

    def half_step(self, drive: Sequence[Tensor | None], s: State, parity: int) -> State:
        wanted = range(parity, len(s), 2)
        moved = self.squash(self.group_gradient(drive, s, wanted))
        return tuple(v if n in wanted else s[n] for n, v in enumerate(moved))

    def operations(self) -> int:
        """Multiplications and additions of a full step of one sample: every connection once forward and once back.

        Connections from the input are left out: they are computed once per phase.
        """
        return sum(self._cost(c) for c in self.connections)

    def _cost(self, c: Connection) -> int:
        return 0 if c.pre == INPUT else 2 * c.operations(self.shape(c.pre), self.shape(c.post))

    def __str__(self) -> str:
        """A table of the layers and the connections."""
        count = sum(p.numel() for p in self.parameters())
        kind = f"energy-based, eps {self.eps}" if self.energy_based else "prototypical"
        head = f"Network, {kind}: {count:,} parameters, {self.operations() / 1e6:,.1f} M operations per step and sample"
        group_of = {name: k + 1 for k, group in enumerate(self.groups) for name in group}
        layers = [("layer", "shape", "activation", "group")]
        for name, sigma in zip(self.names, self.activations, strict=True):
            layers.append((name, _times(self.layers[name]), sigma.name, str(group_of[name])))
        layers.append((INPUT, _times(self.input_shape), getattr(self.input_activation, "name", ""), ""))
        rows = [("connection", "kind", "weights", "operations")]
        for c, names in self._named_connections():
            size = sum(self.get_parameter(name).numel() for name in names.values())
            once = c.operations(self.shape(c.pre), self.shape(c.post))
            work = f"{once:,} per phase" if c.pre == INPUT else f"{self._cost(c):,}"
            rows.append((str(c), c.describe(), f"{size:,}", work))
        return "\n".join([head, "", *_table(layers), "", *_table(rows)])

    def draw(self) -> Drawing:
        """The graph as a picture, the input on the left, layers coloured by group. Shown in notebooks."""
        return _drawn(self)


Result = TypeVar("Result")


def _contrast_of(c: Connection) -> Callable[..., dict[str, Tensor]]:
    def contrast(*parts: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        *ends, theta = parts
        return c.contrast(Ends(*ends[:2]), Ends(*ends[2:]), theta)  # type: ignore[arg-type]

    return contrast


def _ends(c: Connection, seen: Mapping[str, Tensor]) -> Ends:
    return Ends(seen[c.pre], seen[c.post])


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


def _short(layer: str) -> str | None:
    """The number of a layer s0, s1, ..., or x."""
    if layer == INPUT:
        return INPUT
    return layer[1:] if layer[0] == "s" and layer[1:].isdigit() else None


def _weight_name(c: Connection, short: str) -> str:
    if c.name is not None:
        return c.name if short == "W" else f"{short}_{c.name}"
    post, pre = _short(c.post), _short(c.pre)
    return f"{short}_{c.post}_{c.pre}" if post is None or pre is None else f"{short}{post}{pre}"


def _bias_name(layer: str) -> str:
    number = _short(layer)
    return f"b_{layer}" if number is None else f"b{number}"


def _check_layers(layers: Mapping[str, int | Shape]) -> dict[str, Shape]:
    for name in layers:
        if not isinstance(name, str) or not name.isidentifier() or name == INPUT:
            raise ValueError(f"A layer is named {name!r}; expected a word of letters, numbers and _, and not 'x'.")
    return dict(zip(layers, layer_shapes(list(layers.values())), strict=True))


def _check_setting(setting: str, eps: float | None, clip: bool) -> bool:
    if setting == "energy-based":
        if eps is None:
            raise ValueError("The energy-based setting needs its step: give eps, a number in (0, 1], such as 0.2.")
        return True
    if setting != "prototypical":
        raise ValueError(f"setting is {setting!r}; expected 'energy-based' or 'prototypical'.")
    if eps is not None or clip:
        raise ValueError("eps and clip belong to the energy-based setting. Omit them, or choose it.")
    return False


def neighbours(names: Sequence[str], connections: Sequence[Connection]) -> dict[str, set[str]]:
    """The layers that each layer is joined to, itself among them if it is joined to itself."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for c in connections:
        if c.pre != INPUT:
            found[c.pre].add(c.post)
            found[c.post].add(c.pre)
    return found


def _groups(
    names: Sequence[str], connections: Sequence[Connection], declared: Groups | None
) -> tuple[tuple[str, ...], ...]:
    if declared is None:
        return colouring(names, neighbours(names, connections))
    groups = tuple(tuple(group) for group in declared)
    listed = [name for group in groups for name in group]
    strange = next((name for name in listed if name not in names), None)
    if strange is not None:
        raise ValueError(f"groups names a layer {strange!r}, which is not there.{did_you_mean(strange, names)}")
    wrong = [name for name in names if listed.count(name) != 1]
    if wrong or not all(groups):
        raise ValueError(
            f"groups has {', '.join(wrong) or 'no layer'} in none or several of {groups}; expected every layer once."
        )
    return groups


def colouring(names: Sequence[str], beside: Mapping[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """Groups without neighbours, the output's last: two where the graph is bipartite, else as few as greed finds.

    The next layer to be coloured is always the one with the most colours around it, then the one with the most
    neighbours; on a bipartite graph that needs two colours (Brelaz).
    """
    colour: dict[str, int] = {}
    while len(colour) < len(names):
        around = {name: {colour[b] for b in beside[name] if b in colour} for name in names if name not in colour}
        name = max(around, key=lambda n: (len(around[n]), len(beside[n] - {n})))
        colour[name] = next(k for k in range(len(names)) if k not in around[name])
    kinds = sorted(set(colour.values()), key=lambda k: (k == colour[names[0]], k))
    return tuple(tuple(name for name in names if colour[name] == k) for k in kinds)


def _times(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class Drawing(str):
    """A picture as SVG text."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self, encoding="utf-8")


COLOURS = ("#cfe3f5", "#fbe0c3", "#d5edd0", "#ecd5ea", "#f6f0bf", "#d9d9d9")
WIDE, HIGH, ACROSS, DOWN = 130, 52, 190, 96


def _columns(net: Network) -> dict[str, int]:
    """How many connections each layer is away from the input, along the longest way without turning back."""
    column = {INPUT: 0}
    for _ in net.names:  # a longest way has no more connections than there are layers
        for c in net.connections:
            if c.pre in column and c.pre != c.post and column[c.pre] < len(net.names):
                column[c.post] = max(column.get(c.post, 0), column[c.pre] + 1)
    return {name: column.get(name, 1) for name in (INPUT, *net.names)}


def _drawn(net: Network) -> Drawing:
    column = _columns(net)
    place: dict[str, tuple[int, int]] = {}
    for name in (INPUT, *reversed(net.names)):
        row = sum(column[other] == column[name] for other in place)
        place[name] = (20 + ACROSS * column[name], 60 + DOWN * row)
    group_of = {name: k for k, group in enumerate(net.groups) for name in group}
    sigma = {name: a.name for name, a in zip(net.names, net.activations, strict=True)}
    parts = [_edge(c, place) for c in net.connections]
    for name, (x, y) in place.items():
        colour = "#ffffff" if name == INPUT else COLOURS[group_of[name] % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="6" fill="{colour}" stroke="#555"/>')
        lines = (name, _times(net.shape(name)), sigma.get(name, ""))
        for k, line in enumerate(lines):
            weight = ' font-weight="bold"' if k == 0 else ""
            parts.append(f'<text x="{x + WIDE // 2}" y="{y + 16 + 15 * k}"{weight}>{escape(line)}</text>')
    width = max(x for x, _ in place.values()) + WIDE + 20
    height = max(y for _, y in place.values()) + HIGH + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return Drawing(f'{head} font-family="sans-serif" font-size="12" text-anchor="middle">{"".join(parts)}</svg>')


def _edge(c: Connection, place: Mapping[str, tuple[int, int]]) -> str:
    """A line from pre to post, an arc over layers in between or back to the layer itself; what it is as a tooltip."""
    (x, y), (u, v) = place[c.pre], place[c.post]
    if c.pre == c.post:
        path = f"M{x + 40} {y} C{x + 30} {y - 36} {x + WIDE - 30} {y - 36} {x + WIDE - 40} {y}"
    elif u - x == ACROSS:
        path = f"M{x + WIDE} {y + HIGH // 2} L{u} {v + HIGH // 2}"
    else:
        path = f"M{x + WIDE // 2} {y} C{x + WIDE} {y - 60} {u} {v - 60} {u + WIDE // 2} {v}"
    return f'<path d="{path}" fill="none" stroke="#555"><title>{escape(f"{c}: {c.describe()}")}</title></path>'
