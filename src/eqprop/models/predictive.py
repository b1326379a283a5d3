"""Predictive-coding nets: layers that predict the next; their free phase is one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.functional import layer_shapes
from eqprop.models.connections import Connection, Ends, Init, Shape, fed
from eqprop.models.graph import INPUT, Graph, Link, Wiring, _gather
from eqprop.models.network import (
    AnyActivation,
    ConnectedNet,
    Groups,
    check_connections,
    check_groups,
    check_layers,
    sigma_by_layer,
)
from eqprop.settings import about
from eqprop.state import State, zero_state


@final
class PredictiveCoding(Graph):
    """E = 1/2 sum_n |s_n - a_n|^2, a_n = sigma(sum over connections into n of A(pre) + b); Phi = 1/2 |s|^2 - E.

        s_n <- dPhi/ds_n = a_n + sum over layers m fed by n of (da_m/ds_n)^T (s_m - a_m)

    sigma stands in the prediction a_n, not around the state, so the forward pass s_n = a_n is at rest, exactly: it is
    where a free phase begins, and one step leaves it alone. The nudge is added to the output's step. At rest it makes
    the errors s_n - a_n beta times those of backprop, with activities moved by order beta: EP's gradient tends to
    backprop's as beta -> 0, and Theorem 1 is exact  [thm:main]. A net that keeps errors instead of states as variables
    has backprop's errors after a single sweep; so a comparison of any such net with backprop must say how long its
    second phase is.

    Train it in "sweeps", which update one layer after the other and from the output on when nudged: synchronous steps
    need not settle. K counts updates of one group, so a second phase of five sweeps through L layers has K = 5 L.
    `Backprop` trains the same weights by backpropagation through the forward pass, the twin.

    input_shape, layers, connections, groups    as of `Network`; connections make no loop, each layer is a group
    activation      sigma, for all layers or by layer
    """

    def __init__(
        self,
        input_shape: int | Shape,
        layers: Mapping[str, int | Shape],
        connections: Sequence[Connection],
        activation: AnyActivation | Mapping[str, AnyActivation] = "relu",
        *,
        bias: bool = True,
        groups: Groups | None = None,
        init: Init = "default",
        bias_gain: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        (visible,) = layer_shapes([input_shape])
        shapes = check_layers(layers)
        check_connections(connections, shapes | {INPUT: visible})
        sigmas = sigma_by_layer(activation, tuple(shapes), of_input=False)
        chosen = None if groups is None else check_groups(groups, tuple(shapes))
        net = Wiring(
            visible,
            shapes,
            tuple(connections),
            tuple(sigmas[name] for name in shapes),
            groups=chosen,
            bias=bias,
            bias_gain=bias_gain,
        )
        super().__init__(net, init, seed, dtype)
        order = self._forward_order()
        if order is None or any(c.pre == c.post for c in connections):
            raise ValueError("The connections make a loop; expected a net with a forward pass. Use Network.")
        if not self.conservative:
            raise ValueError(
                f"{self._lopsided()} has gains or weights of its own on the way back; in a predictive-coding net an "
                "error comes back by the derivative of the prediction. Leave them out, or use Network."
            )
        self._order_of_layers = tuple(order)
        self.groups = chosen or tuple((self.names[n],) for n in order)
        self.bipartite = False

    @property
    def squashes(self) -> bool:
        return False

    def squash(self, s: State) -> State:
        return s

    @torch.no_grad()
    def init_state(self, x: Tensor) -> State:
        """The forward pass, where the net is at rest."""
        return self.feedforward(x)

    @in_own_precision
    def feedforward(self, x: Tensor) -> State:
        layers: list[Tensor] = list(zero_state(x, tuple(self.layers.values()), x.shape[: -len(self.input_shape)]))
        total = list(self.drive(x))
        for n in self._order_of_layers:
            layers[n] = self.activations[n](self._input(n, total, tuple(layers))).expand_as(layers[n])
        return tuple(layers)

    def drive(self, x: Tensor) -> tuple[Tensor | None, ...]:
        return PhaseInputs(super().drive(x))

    def input_activity(self, x: Tensor) -> Tensor:
        """x, its channels last: convolutions and pooling are several times faster on a CPU so, and layers follow x."""
        images = x.dim() == 4 and not x.is_complex()
        return x.contiguous(memory_format=torch.channels_last) if images else x

    def _input(self, n: int, drive: Sequence[Tensor | None], s: State) -> Tensor:
        """The total input of layer n, before its activation."""
        total = list(drive)
        for link in self._inner:
            if link.post == n:
                _gather(total, s, n, self._call(link, link.connection.forward, s[link.pre]))
        return fed(total[n])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        lead, drive = self.sample_dims(x), self.drive(x)
        predicted = [self.activations[n](self._input(n, drive, s)) for n in range(len(s))]
        parts = [(v * a - 0.5 * a * a).flatten(lead).sum(-1) for v, a in zip(s, predicted, strict=True)]
        return torch.stack(parts).sum(0)

    def gradient(self, drive: Sequence[Tensor | None], s: State) -> State:
        return self.group_gradient(drive, s, range(len(s)))

    def group_gradient(self, drive: Sequence[Tensor | None], s: State, layers: Collection[int]) -> State:
        """a_n plus what the errors of the layers that n feeds pull back."""
        reached = {link.post for link in self._inner if link.pre in layers}
        total, back = list(drive), list[tuple[int, int, Callable[[Tensor], Tensor]]]()
        for link in self._inner:
            if link.post in reached or link.post in layers:
                forward, pull = self._passed(link, drive, s)
                _gather(total, s, link.post, forward)
                back += [(link.post, link.pre, pull)] if link.pre in layers else []
        new: list[Tensor] = [self.activations[n](fed(total[n])) if n in layers else v for n, v in enumerate(s)]
        errors = {m: self._error(m, fed(total[m]), s[m]) for m in reached}
        for post, pre, pull in back:
            new[pre] = new[pre] + pull(errors[post]).view_as(s[pre])
        return tuple(v.expand_as(s[n]) for n, v in enumerate(new))

    def _passed(
        self, link: Link, drive: Sequence[Tensor | None], s: State
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """As `_pass`; that of an update before, while the layer it reads has not moved since."""
        if not isinstance(drive, PhaseInputs) or torch.is_grad_enabled():
            return self._pass(link, s)
        found = drive.known.get(id(link))
        if found is None or found[0] is not s[link.pre]:
            found = drive.known[id(link)] = (s[link.pre], *self._pass(link, s))
        return found[1:]

    def _pass(self, link: Link, s: State) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """A(pre), and post -> d<post, A(pre)>/dpre."""
        if self.networks is None or link.connection.stacks:
            found: tuple[Tensor, Callable[[Tensor], Tensor]] = link.connection.passed(
                s[link.pre], self.theta_of(link.names)
            )
            return found
        forward = self._call(link, link.connection.forward, s[link.pre])
        return forward, lambda post: self._call(link, link.connection.feedback, post, s[link.pre])

    def _error(self, n: int, total: Tensor, s: Tensor) -> Tensor:
        """sigma'(z) (s - sigma(z)) at the total input z."""
        sigma = self.activations[n]
        return sigma.slope(total) * (s - sigma(total))

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        """(1/B) sum of sigma' (s - a) at one end and pre at the other, at s_plus minus the same at s_minus.

        Both errors are small, as both states are near the forward pass, so their difference loses nothing.
        """
        visible, lead, drive = self.input_activity(x), self.sample_dims(x), self.drive(x)
        errors = [[self._error(n, self._input(n, drive, s), s[n]) for n in range(len(s))] for s in (s_plus, s_minus)]
        pre_plus, pre_minus = ((*s, visible) for s in (s_plus, s_minus))
        out: dict[str, Tensor] = {}
        for link in self._links:
            c, post, pre, names = link[:4]
            plus, minus = Ends(errors[0][post], pre_plus[pre]), Ends(errors[1][post], pre_minus[pre])
            for short, g in self._call(link, c.contrast, plus, minus).items():
                out[names[short]] = g
        for n, name in enumerate(self._biases):
            if name is not None:
                moved = (errors[0][n] - errors[1][n]).sum(lead - 1)
                out[name] = moved if moved.dim() == lead else moved.flatten(lead).sum(-1)
        return {name: self._mean(out[name], x.shape[lead - 1]) for name in self._order}


class PhaseInputs(tuple[Tensor | None, ...]):
    """A drive that keeps what connections made of layers during its phase, without gradients: (pre, A(pre), pull)."""

    known: dict[int, tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]

    def __new__(cls, parts: Sequence[Tensor | None]) -> PhaseInputs:
        made = super().__new__(cls, parts)
        made.known = {}
        return made


@final
class PredictiveNet(ConnectedNet, frozen=True, kw_only=True):
    """`PredictiveCoding` as data; layers and connections as those of a graph."""

    activation: Annotated[str | Mapping[str, str], about("Activation of every layer, or a table by layer.")] = "relu"
    kind: Literal["predictive"] = "predictive"

    network = PredictiveCoding
