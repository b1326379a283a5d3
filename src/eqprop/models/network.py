"""Nets as graphs, written by their user: any layers, joined by any connections; bad graphs are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, final

import msgspec
import torch
from torch import Tensor

from eqprop.dynamics import NudgeSite
from eqprop.functional import layer_shapes
from eqprop.messages import did_you_mean, unknown
from eqprop.models.activations import Activation
from eqprop.models.activations import activation as _activation
from eqprop.models.connections import CONNECTIONS, Connection, Init, Shape
from eqprop.models.graph import INPUT, Graph, Setting, Wiring, energy_step
from eqprop.models.settings import ModelSettings, from_input
from eqprop.settings import Finite, Positive, about, check

AnyActivation = str | Activation | Callable[[Tensor], Tensor]
Groups = Sequence[Sequence[str]]

REST = "*"
"""The key of an activation that serves all layers not named."""


@final
class Network(Graph):
    """Any layers, joined by any connections: Phi = sum over connections <post, A(pre)> + sum over layers b . s.

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

    input_shape     of one sample
    setting         "prototypical" or "energy-based"
    bias            whether layers have biases
    nudge_site      where the nudge enters: "outside", "inside" or "implicit"
    bias_gain       what initial biases are scaled by
    dtype           of the weights; None: torch's default
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
        (visible,) = layer_shapes([input_shape])
        shapes = check_layers(layers)
        check_connections(connections, shapes | {INPUT: visible})
        step = energy_step(setting, eps, clip)
        sigmas = sigma_by_layer(activation, tuple(shapes), of_input=step is not None)
        net = Wiring(
            visible,
            shapes,
            tuple(connections),
            tuple(sigmas[name] for name in shapes),
            groups=None if groups is None else check_groups(groups, tuple(shapes)),
            input_activation=sigmas.get(INPUT),
            eps=step,
            clip=clip,
            bias=bias,
            bias_gain=bias_gain,
            nudge_site=nudge_site,
        )
        super().__init__(net, init, seed, dtype)
        self._check_forward_maps()

    @torch.no_grad()
    def _check_forward_maps(self) -> None:
        """Try each A on a sample of zeros: a user's connection may not fit."""
        for link in self._links:
            c, like = link.connection, next(self.parameters())
            got = self._call(link, c.forward, like.new_zeros(1, *self.shape(c.pre)))
            if got.shape[0] != 1 or got.numel() != math.prod(self.shape(c.post)):
                raise ValueError(
                    f"{type(c).__name__} {c} makes {tuple(got.shape)} of a sample of {self.shape(c.pre)}; expected (1, "
                    f"{', '.join(map(str, self.shape(c.post)))}), the layer {c.post}. Change its forward map."
                )


def check_layers(layers: Mapping[str, int | Shape]) -> dict[str, Shape]:
    for name in layers:
        if not isinstance(name, str) or not name.isidentifier() or name == INPUT:
            raise ValueError(f"A layer is named {name!r}; expected a word of letters, numbers and _, and not 'x'.")
    return dict(zip(layers, layer_shapes(list(layers.values())), strict=True))


def check_connections(connections: Sequence[Connection], shapes: Mapping[str, Shape]) -> None:
    for c in connections:
        for end in (c.pre, c.post):
            if end not in shapes:
                raise ValueError(
                    f"The connection {c} names a layer {end!r}, which is not there; the layers are "
                    f"{', '.join(shapes)}.{did_you_mean(end, shapes)}"
                )
        if c.post == INPUT:
            raise ValueError(f"The connection {c} leads into the input, which stays as it is. Swap its ends.")
        c.check(shapes[c.pre], shapes[c.post])
    for layer in shapes:
        if layer != INPUT and not any(c.post == layer and c.pre != layer for c in connections):
            raise ValueError(f"Nothing feeds the layer {layer!r}: give it a connection from another layer or x.")
    if not any(c.pre == INPUT for c in connections):
        raise ValueError("No connection begins at the input 'x': the net would not see it.")


def sigma_by_layer(
    choice: AnyActivation | Mapping[str, AnyActivation], names: Sequence[str], of_input: bool
) -> dict[str, Activation]:
    """The activation of each layer by name; of the input if one is named, or `of_input` and one serves the rest."""
    chosen = choice if isinstance(choice, Mapping) else {REST: choice}
    known = [*names, INPUT, REST]
    strange = next((name for name in chosen if name not in known), None)
    if strange is not None:
        raise ValueError(
            f"activation names a layer {strange!r}, which is not there; expected some of {', '.join(known)}."
            f"{did_you_mean(strange, known)}"
        )
    missing = [name for name in names if name not in chosen and REST not in chosen]
    if missing:
        raise ValueError(f"activation has none for {', '.join(missing)}. Give one by name, or for all others as '*'.")
    wanted = [*names, INPUT] if INPUT in chosen or (of_input and REST in chosen) else names
    return {name: _activation(chosen[name] if name in chosen else chosen[REST]) for name in wanted}


def check_groups(declared: Groups, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
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


Sizes = Positive | tuple[Positive, ...]


class ConnectedNet(ModelSettings, frozen=True, kw_only=True):
    """Base of nets of connections as data.

    layers          sizes by name, the output first
    connections     their fields and their kind: {"kind": "conv", "pre": "x", "post": "h1", "kernel": 3, ...}
    groups          of layers that a sweep updates together; None: a colouring
    """

    input_shape: Annotated[Sizes, about("Shape of an input.")]
    layers: Annotated[Mapping[str, Sizes], about("Sizes of the layers by name, the output first.")]
    connections: Annotated[tuple[Mapping[str, Any], ...], about("Connections: kind, pre, post and their settings.")]
    bias: Annotated[bool, about("Whether layers have biases.")] = True
    bias_gain: Annotated[Finite, about("Factor on the initial range of biases.")] = 1.0
    groups: Annotated[tuple[tuple[str, ...], ...], about("Layers that a sweep updates together.")] | None = None

    def __post_init__(self) -> None:
        self.made()

    def made(self) -> list[Connection]:
        """The connections; raises ValueError for one that cannot be made."""
        return [made_connection(values) for values in self.connections]

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "connections": self.made()}

    def __str__(self) -> str:
        sizes = [n if isinstance(n, int) else n[0] for n in self.layers.values()]
        return f"{self.kind} {from_input(sizes)}, {len(self.connections)} connections"


@final
class GraphNet(ConnectedNet, frozen=True, kw_only=True):
    """`Network` as data."""

    activation: Annotated[str | Mapping[str, str], about("Activation of every layer, or a table by layer.")] = (
        "hard-sigmoid"
    )
    setting: Annotated[Setting, about("energy-based or prototypical.")] = "prototypical"
    eps: Annotated[Finite, about("Step of energy-based nets.")] | None = None
    clip: Annotated[bool, about("Keep the states of energy-based nets in [0, 1].")] = False
    kind: Literal["graph"] = "graph"

    network = Network

    def without_output(self) -> GraphNet:
        """A copy without the output layer and its connections."""
        output, *rest = self.layers
        if not rest:
            raise ValueError(f"The net has no layer but {output}, so a readout has nothing to read.")
        left = tuple(c for c in self.connections if output not in (c.get("pre"), c.get("post")))
        groups = self.groups and tuple(g for g in (tuple(n for n in g if n != output) for g in self.groups) if g)
        named = self.activation
        sigma = named if isinstance(named, str) else {name: a for name, a in named.items() if name != output}
        layers = {name: self.layers[name] for name in rest}
        return msgspec.structs.replace(self, layers=layers, connections=left, activation=sigma, groups=groups)


def made_connection(values: Mapping[str, Any]) -> Connection:
    """A connection from its fields and its kind."""
    given = dict(values)
    kind = str(given.pop("kind", "dense"))
    if kind not in CONNECTIONS:
        raise ValueError(unknown("kind of connection", kind, CONNECTIONS))
    known = [f.name for f in fields(CONNECTIONS[kind])]
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ValueError(f"A connection of kind {kind}: {unknown('field', strange, known)}")
    missing = [name for name in ("pre", "post") if name not in given and not (kind == "lateral" and name == "post")]
    if missing:
        raise ValueError(f"A connection of kind {kind} lacks {' and '.join(missing)}, the names of its layers.")
    return check(given, CONNECTIONS[kind], f"A connection of kind {kind}")
