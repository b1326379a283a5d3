"""Deep resistive nets: layers of nodes joined by conductances, with diodes, relaxed layer by layer exactly."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, final

import torch
from torch import Tensor

from eqprop.dynamics import NudgeSite
from eqprop.physical.chain import Chain, ChainNet
from eqprop.settings import Positive, about
from eqprop.state import State, zero_state


class Currents(NamedTuple):
    """What a phase needs once: the current that flows into each layer whatever its state, and nodes' conductances."""

    constant: tuple[Tensor, ...]
    total: tuple[Tensor, ...]


@final
class Resistive(Chain):
    """A resistive net at rest minimises its dissipated power under the limits that diodes set:

        E(x, v) = 1/2 sum_ij g_ij (v_i - v_j)^2 - sum_i b_i v_i,   g_ij >= 0,   Phi = -E

    between each layer and the next, the input last, where it is held at the voltages gain [x, -x]. Of each hidden layer
    diodes keep the first half of the nodes at 0 or above, the second half at 0 or below; outputs are free. A step moves
    each node to the minimum over its own voltage, the others held,

        v_i <- clamp((sum_j g_ij v_j + b_i + beta y_i) / (sum_j g_ij + beta)),

    which is the nudge taken implicitly. In sweeps every other layer moves in turn, which is exact: nodes of a layer are
    not joined. `step` divides dPhi/dv by the conductance of the node, so EP's updates follow from Phi at rest, and only
    there: step by step they are not those of BPTT.

    bias        whether nodes have current sources
    dtype       of the conductances; None: torch's default
    sizes       from the output to the input, such as (10, 100, 784); the input is x, of which there are two voltages
    gain        volts per unit of x
    seed        conductances are drawn from U(-1, 1)/sqrt(fan_in), negative ones set to 0

    Parameters W01 (n0, n1), W12, ..., the conductances, and b0, b1, ..., currents into the nodes.
    """

    nudge_site: NudgeSite = "implicit"
    bipartite = True
    least_curvature = math.inf  # of its own: `check_nudge`

    def __init__(
        self,
        sizes: Sequence[int],
        gain: float = 1.0,
        *,
        bias: bool = True,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.take_sizes(sizes)
        if not math.isfinite(gain) or gain == 0.0:
            raise ValueError(f"gain is {gain!r}; expected the volts per unit of x, such as 100.")
        self.gain = float(gain)
        dtype = dtype or torch.get_default_dtype()
        self.draw_parameters(_conductances, 2 * self.sizes[-1], bias, seed, dtype)
        for n, size in enumerate(self.sizes[1:-1], start=1):
            first = torch.arange(size) < (size + 1) // 2
            inf = torch.full((size,), math.inf, dtype=dtype)
            zero = torch.zeros(size, dtype=dtype)
            self.register_buffer(f"low{n}", torch.where(first, zero, -inf), persistent=False)
            self.register_buffer(f"high{n}", torch.where(first, inf, zero), persistent=False)

    def __repr__(self) -> str:
        return f"{super().__repr__()}, gain {self.gain:g}"

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, tuple((n,) for n in self.sizes[:-1]), x.shape[:1])

    def voltages(self, x: Tensor) -> Tensor:
        """Of the input's nodes: gain [x, -x], (B, 2 inputs)."""
        return self.gain * torch.cat([x, -x], -1)

    def primitive(self, x: Tensor, s: State) -> Tensor:
        """-E, per sample."""
        seen = (*s, self.voltages(x))
        phi = x.new_zeros(x.shape[:1])
        for n, (post, pre) in enumerate(pairwise(seen)):
            g = self.weight(n)
            squares = post.square() @ g.sum(1) + pre.square() @ g.sum(0)
            phi = phi - 0.5 * squares + ((post @ g) * pre).sum(-1)
        for n, layer in enumerate(s):
            offset = self.bias(n)
            phi = phi if offset is None else phi + layer @ offset
        return phi

    def drive(self, x: Tensor) -> Currents:
        last, inputs = self.depth - 1, self.sizes[-1]
        g = self.weight(last)
        # One product instead of two: g [x, -x] = (g_+ - g_-) x.
        fed = [None] * last + [self.gain * (x @ (g[:, :inputs] - g[:, inputs:]).mT)]
        offsets = [self.bias(n) for n in range(self.depth)]
        zero = x.new_zeros(())
        constant = [
            (zero if b is None else b) if i is None else (i if b is None else i + b)
            for b, i in zip(offsets, fed, strict=True)
        ]
        return Currents(tuple(constant), tuple(self._total(n) for n in range(self.depth)))

    def _total(self, n: int) -> Tensor:
        """The sum of the conductances at each node of layer n."""
        after = self.weight(n).sum(1)
        return after if n == 0 else after + self.weight(n - 1).sum(0)

    def gradient(self, drive: Currents | Tensor, s: State) -> State:
        """-dE/dv: the net current into each node."""
        drive = drive if isinstance(drive, Currents) else self.drive(drive)
        return tuple([self._current(drive, s, n) - drive.total[n] * v for n, v in enumerate(s)])

    def _current(self, drive: Currents, s: State, n: int) -> Tensor:
        """sum_j g_ij v_j + b_i for the nodes of a layer."""
        current = drive.constant[n]
        if n > 0:
            current = current + s[n - 1] @ self.weight(n - 1)
        if n < self.depth - 1:
            current = current + s[n + 1] @ self.weight(n).mT
        return current.expand_as(s[n])

    def step(self, drive: Currents, s: State, push: Sequence[Tensor | None] | None = None) -> State:
        return self.group_step(drive, s, range(len(s)), push)

    def group_step(
        self, drive: Currents, s: State, layers: Collection[int], push: Sequence[Tensor | None] | None = None
    ) -> State:
        """The exact minimum over these layers' nodes, one at a time; a push is a current into the node."""
        return tuple([self._minimum(drive, s, n, push) if n in layers else v for n, v in enumerate(s)])

    def _minimum(self, drive: Currents, s: State, n: int, push: Sequence[Tensor | None] | None = None) -> Tensor:
        current, force = self._current(drive, s, n), None if push is None else push[n]
        current = current if force is None else current + force
        return self._diodes(n, current / _positive(drive.total[n]))

    def _diodes(self, n: int, v: Tensor) -> Tensor:
        return v if n == 0 else torch.clamp(v, getattr(self, f"low{n}"), getattr(self, f"high{n}"))

    def half_step(self, drive: Currents, s: State, parity: int) -> State:
        return self.group_step(drive, s, range(parity, len(s), 2))

    def implicit_step(
        self,
        drive: Currents,
        s: State,
        target: Tensor,
        strength: float | Tensor,
        layers: Collection[int] | None = None,
    ) -> State:
        """A step with the conductance `strength` to the target at each output; it is not a number where it has none.

        A negative conductance that outweighs a node's own leaves no minimum.
        """
        chosen = range(len(s)) if layers is None else layers
        new = [self._minimum(drive, s, n) if n in chosen and n else v for n, v in enumerate(s)]
        if 0 in chosen:
            total = drive.total[0] + strength
            o = (self._current(drive, s, 0) + strength * target) / total
            new[0] = torch.where(total > 0.0, o, math.nan)
        return tuple(new)

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """-(1/2B) sum of (v_i - v_j)^2 at s_plus minus at s_minus, for g_ij; differences come before products.

        The input's voltages are the same in both, so their squares cancel and one product serves x and -x.
        """
        moved = [a - b for a, b in zip(s_plus, s_minus, strict=True)]
        squares = [(0.5 / len(x)) * (d * (a + b)).sum(0) for d, a, b in zip(moved, s_plus, s_minus, strict=True)]
        out: dict[str, Tensor] = {}
        for n in reversed(range(self.depth)):
            if n == self.depth - 1:
                product = (moved[n] * (self.gain / len(x))).mT @ x
                own = squares[n].unsqueeze(1)
                out[f"W{n}{n + 1}"] = torch.cat([product - own, -product - own], 1)
            else:
                both = (moved[n].mT @ s_plus[n + 1] + s_minus[n].mT @ moved[n + 1]) / len(x)
                out[f"W{n}{n + 1}"] = both - squares[n].unsqueeze(1) - squares[n + 1]
            if self.bias(n) is not None:
                out[f"b{n}"] = moved[n].mean(0)
        return self.learned(out)

    def constrained(self) -> dict[str, Tensor]:
        """Conductances are not negative."""
        return {f"W{n}{n + 1}": self.weight(n).clamp(min=0.0) for n in range(self.depth)}

    @property
    def least_conductance(self) -> float:
        """The least that an output sees: a nudge of -beta at or beyond it has no minimum."""
        with torch.no_grad():
            return float(self._total(0).min())

    def check_nudge(self, beta: float) -> None:
        """Raise ValueError if a nudge of +beta or -beta leaves the outputs no minimum."""
        least = self.least_conductance
        if not abs(beta) < least:
            raise ValueError(
                f"beta is {beta:g}, and the least conductance that an output of {self!r} sees is {least:.4g}: a nudge "
                "of the other sign then has no minimum. Use a smaller beta, or larger conductances at the output."
            )

    def notices(self) -> tuple[str, ...]:
        return (f"The least conductance that an output sees is {self.least_conductance:.4g}; beta must stay below it.",)


def _positive(total: Tensor) -> Tensor:
    """A node's conductance to divide by; a node that nothing joins stays at 0."""
    return total.clamp(min=torch.finfo(total.dtype).tiny)


def _conductances(name: str, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    drawn = 2.0 * torch.rand(shape, generator=source, dtype=torch.float64) - 1.0
    return (drawn / math.sqrt(shape[1])).clamp(min=0.0)


@final
class ResistiveNet(ChainNet, frozen=True):
    """`Resistive` as data; sizes go from the output to the input."""

    sizes: Annotated[tuple[Positive, ...], about("Nodes per layer, from the output to the input.")] = (10, 100, 784)
    gain: Annotated[float, about("Volts per unit of the input.", gt=0, le=1e9)] = 100.0
    bias: Annotated[bool, about("Whether layers have biases.")] = True
    nudge_site: Annotated[NudgeSite, about("Where the nudge enters: implicit, a conductance to the target.")] = (
        "implicit"
    )
    kind: Literal["resistive"] = "resistive"

    network = Resistive
