"""The difference form of a graph's step: how far it leads from F(x, s*) when the state has moved by d from s*."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eqprop.dynamics import UNBOUNDED, Drive, solve_implicit
from eqprop.models.activations import clamp_moves
from eqprop.models.connections import Ends, fed
from eqprop.state import State

if TYPE_CHECKING:
    from eqprop.models.graph import Graph, Link, Way


class GraphDeparture:
    """d -> F(x, s* + d; nudged) - F(x, s*), nothing being subtracted that is nearly equal.

    Prototypical, a the input of a layer at s* and e the sum of W d:    d' = sigma(a + e) - sigma(a) + push
    Energy-based, r = sigma(s*), dr = sigma(s* + d) - r:
        d' = (1 - eps) d + eps (dsigma' (a + e) + sigma' e) + push,   e the sum of W dr

    What depends on s* alone is computed once.
    """

    def __init__(self, graph: Graph, drive: Drive, s: State) -> None:
        self.graph, self._s0 = graph, s[0]
        r, layers = graph.activity(s), range(len(s))
        self._links: dict[int, Any] = {id(link): self._around(link, r) for link in graph._inner}
        inputs = [fed(v) for v in graph.gathered(drive, r, layers, graph.along)]
        self._inputs, self._none = inputs, [None] * len(s)
        if not graph.energy_based:
            self._moves = [sigma.around(a) for sigma, a in zip(graph.activations, inputs, strict=True)]
            self._output = graph.activations[0](inputs[0])
            return
        self._activity = [sigma.around(layer) for sigma, layer in zip(graph.activations, s, strict=True)]
        bent = [n for n in layers if n or graph.output_slope]
        self._slopes = {n: graph.activations[n].slope(s[n]) for n in bent}
        self._turns = {n: graph.activations[n].slope_around(s[n]) for n in bent}
        if graph.clip:
            free = [graph._leaked(a, layer, n) for n, (a, layer) in enumerate(zip(inputs, s, strict=True))]
            self._clips = [clamp_moves(v, 0.0, 1.0) for v in free]

    def __call__(self, d: State, push: Sequence[Tensor | None], layers: Collection[int] | None = None) -> State:
        """The next d; of some layers, the others unchanged, or of all."""
        chosen = range(len(d)) if layers is None else layers
        step = self._energy_step if self.graph.energy_based else self._prototypical_step
        return tuple([step(n, v, e, push[n]) if n in chosen else v for n, v, e in self._arriving(d, chosen)])

    def implicit(
        self, d: State, target: Tensor, strength: float | Tensor, layers: Collection[int] | None = None
    ) -> State:
        """The same with the output nudged implicitly: its d solves d = sigma(a + e + beta (y - o* - d)) - sigma(a)."""
        chosen = range(len(d)) if layers is None else layers
        if self.graph.energy_based:
            return self._implicit_energy(d, target, strength, chosen)
        out = []
        for n, v, e in self._arriving(d, chosen):
            if n == 0 and n in chosen:
                out.append(self._solved(e, target, strength))
            else:
                out.append(self._moves[n](fed(e)) if n in chosen else v)
        return tuple(out)

    def _arriving(self, d: State, layers: Collection[int]) -> list[tuple[int, Tensor, Tensor | None]]:
        """The number of each layer, its d, and the change of its input."""
        r = tuple([move(v) for move, v in zip(self._activity, d, strict=True)]) if self.graph.energy_based else d
        total = self.graph.gathered(self._none, r, layers, self._moved_along)
        return [(n, v, e) for n, (v, e) in enumerate(zip(d, total, strict=True))]

    def _prototypical_step(self, n: int, d: Tensor, e: Tensor | None, push: Tensor | None) -> Tensor:
        e = torch.zeros_like(d) if e is None else e
        if push is not None and self.graph.nudge_site == "inside":
            return self._moves[n](e + push)
        moved = self._moves[n](e)
        return moved if push is None else moved + push

    def _energy_step(self, n: int, d: Tensor, e: Tensor | None, push: Tensor | None) -> Tensor:
        moved = self._leaked(n, d, e)
        moved = moved if push is None else moved + push
        return self._clips[n](moved) if self.graph.clip else moved

    def _leaked(self, n: int, d: Tensor, e: Tensor | None) -> Tensor:
        e = torch.zeros_like(d) if e is None else e
        eps = self.graph.eps
        if n in self._slopes:
            e = self._turns[n](d) * (self._inputs[n] + e) + self._slopes[n] * e
        return (1.0 - eps) * d + eps * e

    def _solved(self, e: Tensor | None, target: Tensor, strength: float | Tensor) -> Tensor:
        e, bounds, o = fed(e), self.graph.output_bounds, self._output
        size = e.abs() + torch.as_tensor(strength).abs().to(e) * (target - o).abs()
        if bounds is None or bounds == UNBOUNDED:
            return solve_implicit(self._moves[0], e, target - o, strength, bounds, size)
        ends = (bounds[0] - o, bounds[1] - o)
        return solve_implicit(self._moves[0], e + (self._inputs[0] - o), target - o, strength, ends, size)

    def _implicit_energy(self, d: State, target: Tensor, strength: float | Tensor, layers: Collection[int]) -> State:
        """Without sigma around the step: (1 + beta) d = F(s* + d) - F(s*) + beta (y - F(s*)), before the clip."""
        out = []
        for n, v, e in self._arriving(d, layers):
            if n not in layers:
                out.append(v)
                continue
            moved = self._leaked(n, v, e)
            if n == 0:
                free = self.graph._leaked(self._inputs[0], self._s0, 0)
                moved = (moved + strength * (target - free)) / (1.0 + strength)
            out.append(self._clips[n](moved) if self.graph.clip else moved)
        return tuple(out)

    def _around(self, link: Link, r: State) -> Any:
        """A connection's maps around s*; one for each network where it serves only one."""
        c, graph = link.connection, self.graph
        at, theta, back = Ends(r[link.post], r[link.pre]), graph.theta_of(link.names), graph.theta_of(link.back)
        back = back if c.untied else theta
        if graph.networks is None or c.stacks:
            return c.around(at, theta, back)
        return [
            c.around(
                Ends(at.post[k], at.pre[k]), {n: v[k] for n, v in theta.items()}, {n: v[k] for n, v in back.items()}
            )
            for k in range(graph.networks)
        ]

    def _moved_along(self, link: Link, name: Way, *ends: Tensor) -> Any:
        found = self._links[id(link)]
        if not isinstance(found, list):
            return getattr(found, name)(*ends)
        each = [getattr(part, name)(*(v[k] for v in ends)) for k, part in enumerate(found)]
        return tuple(map(torch.stack, zip(*each, strict=True))) if name == "both" else torch.stack(each)
