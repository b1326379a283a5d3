"""Traced graphs as functions of jax arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from torch import Tensor, fx

from eqprop.engines.traced import CannotTrace, core_operations
from eqprop.engines.xla.operations import KEPT, TABLE, WRITTEN, dtype_of
from eqprop.engines.xla.windows import Array, Zones

Values = dict[fx.Node, Any]

_aten = torch.ops.aten

_OF_PLACES = frozenset({_aten.max_unpool2d.default, _aten.max_pool2d_with_indices_backward.default})
"""Operations that know what to do with `Zones`; others take the places as numbers."""

_LINEAR = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.mul.Tensor, _aten.mul.Scalar, _aten.neg.default),
        *(_aten.permute.default, _aten.view.default, _aten.reshape.default, _aten.clone.default),
        *(_aten.unsqueeze.default, _aten.squeeze.dims, _aten.expand.default, _aten.sum.dim_IntList),
    }
)
"""Operations linear in each of their arguments."""
_FRACTIONS = frozenset({_aten.div.Tensor, _aten.div.Scalar})
"""Linear in the first."""


def operations() -> dict[Any, Callable[..., Any]]:
    """How graphs are to be traced to be lowered."""
    return core_operations(KEPT, WRITTEN)


class Lowered:
    """A traced graph as a function of arrays.

    graph       traced with the table `operations()`
    moving      how many of its last inputs change from call to call: what depends on the others is computed once

    Raises CannotTrace if an operation is not in the table.
    """

    def __init__(self, graph: fx.GraphModule, moving: int = 0) -> None:
        nodes = list(graph.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.constants = {node: _attribute(graph, str(node.target)) for node in nodes if node.op == "get_attr"}
        self.output: Sequence[fx.Node] = nodes[-1].args[0]
        calls = [node for node in nodes if node.op == "call_function"]
        missing = {str(node.target) for node in calls if node.target not in TABLE and not _is_item(node)}
        if missing:
            raise CannotTrace(f"it uses {', '.join(sorted(missing))}, which is not lowered")
        for node in calls:
            _check_types(node)
        self.split = len(self.inputs) - moving
        moved = set(self.inputs[self.split :])
        for node in calls:
            if any(n in moved for n in node.all_input_nodes):
                moved.add(node)
        self.fixed_nodes = [node for node in calls if node not in moved]
        self.moving_nodes = [node for node in calls if node in moved]

    def prepare(self, given: Sequence[Array], constants: Mapping[fx.Node, Array]) -> Values:
        """What does not change from call to call; `constants` are the values of the graph's attributes."""
        values = dict(zip(self.inputs[: self.split], given, strict=True)) | dict(constants)
        _evaluate(self.fixed_nodes, values)
        return values

    def __call__(self, prepared: Values, moving: Sequence[Array] = ()) -> tuple[Array, ...]:
        values = prepared | dict(zip(self.inputs[self.split :], moving, strict=True))
        _evaluate(self.moving_nodes, values)
        return self._values(values, self.output)

    def chains(self, count: int) -> list[list[fx.Node]]:
        """How the last outputs follow from what moves: each linear in the first node of its chain, and made from it.

        The sum of such an output over steps is the chain applied once to the sum of the first node, which is no larger:
        of weights of x, for instance, the sum of what the neurons contribute, times x.
        """
        moved = {*self.inputs[self.split :], *self.moving_nodes}
        found: list[list[fx.Node]] = []
        for node in self.output[len(self.output) - count :]:
            chain = [node]
            while (before := _linear_in(chain[0], moved)) is not None:
                chain.insert(0, before)
            least = min(_numbers(n) for n in chain)
            while _numbers(chain[0]) > least:
                chain.pop(0)
            found.append(chain)
        return found

    def terms(
        self, prepared: Values, moving: Sequence[Array], chains: Sequence[Sequence[fx.Node]]
    ) -> tuple[Array, ...]:
        """The same with the first nodes of the chains in the place of their outputs."""
        values = prepared | dict(zip(self.inputs[self.split :], moving, strict=True))
        _evaluate(self.moving_nodes, values)
        first = self.output[: len(self.output) - len(chains)]
        return self._values(values, [*first, *(chain[0] for chain in chains)])

    def sums(self, prepared: Values, terms: Sequence[Array], chains: Sequence[Sequence[fx.Node]]) -> tuple[Array, ...]:
        """The outputs summed over steps, from the sums of those nodes."""
        found = list[Array]()
        for term, chain in zip(terms, chains, strict=True):
            values = prepared | {chain[0]: term}
            _evaluate(chain[1:], values)
            found += self._values(values, chain[-1:])
        return tuple(found)

    def _values(self, values: Values, nodes: Sequence[fx.Node]) -> tuple[Array, ...]:
        return tuple([_typed(_plain(values[node]), node) for node in nodes])


def _attribute(graph: fx.GraphModule, path: str) -> Tensor:
    found = operator.attrgetter(path)(graph)
    if not isinstance(found, Tensor):
        raise CannotTrace("it branches or loops by an operator of torch, such as torch.cond")
    return found.detach()


def _linear_in(node: fx.Node, moved: set[fx.Node]) -> fx.Node | None:
    """The one input that moves, if an operation is linear in it."""
    inputs = [n for n in node.all_input_nodes if n in moved]
    uses = sum(n in moved for n in node.args if isinstance(n, fx.Node))
    if len(inputs) != 1 or uses != 1:
        return None
    linear = node.target in _LINEAR or (node.target in _FRACTIONS and node.args[0] is inputs[0])
    return inputs[0] if linear and node.meta["val"].dtype == inputs[0].meta["val"].dtype else None


def _numbers(node: fx.Node) -> int:
    found: int = node.meta["val"].numel()
    return found


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _check_types(node: fx.Node) -> None:
    found = node.meta.get("val")
    for v in found if isinstance(found, tuple | list) else (found,):
        if isinstance(v, Tensor):
            dtype_of(v.dtype)


def _evaluate(nodes: Sequence[fx.Node], values: Values) -> None:
    """Compute nodes in order, each from those before it."""
    for node in nodes:
        keep = node.target in _OF_PLACES or _is_item(node)

        def value(n: fx.Node, keep: bool = keep) -> Array:
            return values[n] if keep else _plain(values[n])

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        function: Callable[..., Any] = operator.getitem if _is_item(node) else TABLE[node.target]
        found = function(*args, **kwargs)
        values[node] = _typed(found, node)


def _plain(found: Any) -> Any:
    return found.places if isinstance(found, Zones) else found


def _typed(found: Any, node: fx.Node) -> Any:
    """A result in the type that torch has, but for the width of whole numbers."""
    like = node.meta.get("val")
    if not isinstance(like, Tensor) or isinstance(found, Zones):
        return found
    wanted, found = dtype_of(like.dtype), jnp.asarray(found)
    if found.dtype == wanted or (found.dtype.kind == wanted.kind == "i"):
        return found
    return found.real.astype(wanted) if found.dtype.kind == "c" and wanted.kind != "c" else found.astype(wanted)
