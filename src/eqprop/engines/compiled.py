"""Steps compiled by torch's inductor for a GPU, for any model, your own included, with any estimator on top.

A step is traced once, below automatic differentiation, so that a primitive differentiated at every step becomes a list
of products and elementwise operations. What does not depend on the state is computed once per phase, like a drive
written by hand; several steps in a row become one graph, which inductor turns into code. Estimator, contrast and
optimizer are those of the reference, and the whole iteration is captured in a CUDA graph. On a CPU the engine `xla`
compiles; there the tests run these graphs as torch's operators.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from eqprop.autodiff import with_values
from eqprop.cache import CacheError, code_folder
from eqprop.cost import Nudge
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines.base import PRECISIONS, STREAMED, Engine, Job, Precision, Runner, Task, full_precision
from eqprop.engines.cuda.graph import GraphRunner, rates_read_from, refuses_optimizer
from eqprop.engines.eager import EagerRunner, PreciseStepper, difference_in
from eqprop.engines.traced import CannotTrace, Checks, Fingerprint, apart, first, first_line, size_of, trace
from eqprop.relax import SWEEPS, Phase, Relaxation, Stepper, Update, relax, stepping
from eqprop.state import State

Arguments = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """A step as two graphs: `fixed` of what does not depend on the state, and `moving` of the rest.

    fixed(*given, *constants) -> held                   moving(*given, *constants, *held, *state) -> state
    constants   tensors that the model holds besides its parameters and buffers, read anew at every phase
    inputs      names of given, constants and held: equal in two steps where the values are
    """

    fixed: fx.GraphModule
    moving: fx.GraphModule
    constants: Arguments
    inputs: tuple[str, ...]


def trace_step(step: Callable[[Arguments, State], State], given: Arguments, s: State) -> Split:
    """Trace step(given, s) and split it. Raises CannotTrace where tracing cannot follow."""

    def flat(*values: Tensor) -> State:
        return tuple(step(values[: len(given)], values[len(given) :]))

    traced = trace(flat, (*given, *s))
    _forget_values_of_likes(traced)
    unpool_elementwise(traced)
    return _split(traced, len(s))


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _is_view(node: fx.Node) -> bool:
    """Whether a node costs nothing: a view of its input, or a constant without one."""
    schema = _schema(node)
    views = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return views or not node.all_input_nodes


_LIKES = {torch.ops.aten.ones_like.default: 1.0, torch.ops.aten.zeros_like.default: 0.0}


def _forget_values_of_likes(traced: fx.GraphModule) -> None:
    """Write ones_like and zeros_like as constants, so that the value they copy the shape of need not be computed.

    The seed of every gradient is such a ones_like: with it goes the value of Phi itself, which no step needs.
    """
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target in _LIKES:
            value = node.meta["val"]
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            with graph.inserting_before(node):
                new = graph.call_function(
                    torch.ops.aten.full.default, (list(value.shape), _LIKES[node.target]), options
                )
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    graph.eliminate_dead_code()


_aten = torch.ops.aten


def _shape(node: Any) -> torch.Size | None:
    """A node's shape; None of a tensor that the model holds, of which the trace keeps no record."""
    value = node.meta.get("val")
    return None if value is None else value.shape


def unpool_elementwise(traced: fx.GraphModule) -> None:
    """Write the way back through a max-pooling as elementwise operations, which inductor fuses with their neighbours.

    Its own way fills an image with zeros and scatters into it. Where the result is rounded, the smaller image is
    rounded instead: the values are the same, and the rounded one is there already, as the factor of another product.
    """
    graph = traced.graph
    node: Any
    for node in list(graph.nodes):
        if node.target is _aten.view.default and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is not _aten.max_unpool2d.default or (zone := _zone_of(node)) is None:
            continue
        h, indices, sides = node.args
        value, rounded = h.meta["val"], _rounding(node)
        if rounded:
            with graph.inserting_before(node):
                h = graph.call_function(_aten._to_copy.default, (h,), rounded[0].kwargs)
        dtype = rounded[0].meta["val"].dtype if rounded else value.dtype
        pair = [torch.empty(value.shape, dtype=kind, device=value.device) for kind in (dtype, torch.int64)]
        part = make_fx(functools.partial(_unpool, zone=zone, sides=tuple(sides)))(*pair).graph
        places = (n for n in part.nodes if n.op == "placeholder")
        with graph.inserting_before(node):
            new = graph.graph_copy(part, dict(zip(places, (h, indices), strict=True)))
        for result in rounded or [node]:
            result.replace_all_uses_with(new)  # type: ignore[arg-type]
    graph.eliminate_dead_code()


def _rounding(node: fx.Node) -> list[fx.Node]:
    """The users of a node if they all convert it to one type; none if there is any other."""
    users = list(node.users)
    alike = len({(user.target, str(user.kwargs)) for user in users}) == 1
    return users if alike and users[0].target is _aten._to_copy.default else []


def _zone_of(unpool: Any) -> tuple[int, int] | None:
    """The sides of the zones whose maxima an unpooling puts back; None if they may overlap or are not known."""
    indices = unpool.args[1]
    pool = indices.args[0] if indices.args else None
    if not isinstance(pool, fx.Node) or pool.target is not _aten.max_pool2d_with_indices.default:
        return None
    left_out: list[Any] = [None, None, [], [0], [1], False]
    given: list[Any] = [*pool.args]
    z, size, stride, padding, dilation, ceil = given + left_out[len(given) :]
    apart = list(stride or size) == list(size) and not any(padding) and set(dilation) == {1} and not ceil
    same = list(unpool.args[2]) == list(z.meta["val"].shape[-2:])
    return (size[0], size[-1]) if apart and same else None


def _unpool(h: Tensor, indices: Tensor, zone: tuple[int, int], sides: tuple[int, int]) -> Tensor:
    """h at the places of the maxima, zero elsewhere: every place is compared with the index of its zone's maximum."""
    rows, columns = (n * k for n, k in zip(h.shape[-2:], zone, strict=True))

    def spread(v: Tensor) -> Tensor:
        each = v[..., :, None, :, None].expand(*v.shape[:-1], zone[0], v.shape[-1], zone[1])
        return each.reshape(*v.shape[:-2], rows, columns)

    places = torch.arange(sides[0] * sides[1], device=h.device).view(sides)[:rows, :columns]
    found = torch.where(spread(indices) == places, spread(h), 0.0)
    return found if (rows, columns) == sides else F.pad(found, (0, sides[1] - columns, 0, sides[0] - rows))


def _split(traced: fx.GraphModule, layers: int) -> Split:
    nodes = list(traced.graph.nodes)
    output = nodes[-1]
    inputs = [node for node in nodes if node.op == "placeholder"]
    given, state = inputs[: len(inputs) - layers], inputs[len(inputs) - layers :]
    constants = [node for node in nodes if node.op == "get_attr"]
    moving = set(state)
    for node in nodes:
        if any(n in moving for n in node.all_input_nodes):
            moving.add(node)
    held, repeated = _frontier(nodes, moving)
    fixed = _Writer([*given, *constants])
    for node in nodes:
        if node.op == "call_function" and node not in moving:
            fixed.copy(node)
    rest = _Writer([*given, *constants, *held, *state])
    for node in nodes:
        if node.op == "call_function" and (node in moving or node in repeated):
            rest.copy(node)
    values = tuple(_attribute(traced, str(node.target)) for node in constants)
    names = {node: f"given {n}" for n, node in enumerate(given)}
    names |= {node: _layout(v, v.data_ptr()) for node, v in zip(constants, values, strict=True)}
    for node in nodes:
        if node.op == "call_function" and node not in moving:
            names[node] = _digest(node, names)
    return Split(
        fixed.finish([fixed.known[node] for node in held]),
        rest.finish(fx.node.map_arg(output.args[0], lambda n: rest.known[n])),
        values,
        tuple(names[node] for node in (*given, *constants, *held)),
    )


def _layout(v: Tensor, *more: object) -> str:
    return str((tuple(v.shape), v.stride(), v.dtype, str(v.device), *more))


def _digest(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """A name for the value of a node, the same for equal expressions."""
    leaves, shape = tree_flatten((node.args, node.kwargs))
    parts = [names[leaf] if isinstance(leaf, fx.Node) else f"{type(leaf)} {leaf}" for leaf in leaves]
    return hashlib.sha256(f"{node.target} {shape} {parts}".encode()).hexdigest()


def _frontier(nodes: Sequence[fx.Node], moving: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """Of the nodes that do not move: those whose values a step needs, and the views it makes of them itself."""
    held: dict[fx.Node, None] = {}
    repeated: set[fx.Node] = set()

    def need(node: fx.Node) -> None:
        if node.op != "call_function" or node in held or node in repeated:
            return
        if _is_view(node):
            repeated.add(node)
            for source in node.all_input_nodes:
                need(source)
        else:
            held[node] = None

    for node in nodes:
        if node in moving or node.op == "output":
            for source in node.all_input_nodes:
                if source not in moving:
                    need(source)
    return list(held), repeated


class _Writer:
    """Writes a graph from nodes of another; `known` are its nodes by theirs."""

    def __init__(self, inputs: Sequence[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.known = {node: self.graph.placeholder(f"in{n}") for n, node in enumerate(inputs)}

    def copy(self, node: fx.Node) -> None:
        self.known.setdefault(node, None)  # type: ignore[arg-type]
        self.known[node] = self.graph.node_copy(node, lambda n: self.known[n])

    def finish(self, output: Any) -> fx.GraphModule:
        self.graph.output(output)
        self.graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self.graph)


def _attribute(owner: Any, path: str) -> Tensor:
    for name in path.split("."):
        owner = getattr(owner, name)
    if not isinstance(owner, Tensor):
        raise CannotTrace("its step branches or loops by an operator of torch, such as torch.cond")
    return owner.detach()


def join(steps: Sequence[Split], order: Sequence[int], layers: int) -> fx.GraphModule:
    """Several steps in a row as one graph: (*inputs of all steps, each once, *state) -> state.

    `order` says which of the steps follows which.
    """
    graph = fx.Graph()
    inputs = {name: graph.placeholder(f"in{n}") for n, name in enumerate(all_inputs(steps))}
    state: Sequence[Any] = [graph.placeholder(f"s{n}") for n in range(layers)]
    for k in order:
        places = [node for node in steps[k].moving.graph.nodes if node.op == "placeholder"]
        own = [inputs[name] for name in steps[k].inputs]
        known: dict[fx.Node, Any] = dict(zip(places, [*own, *state], strict=True))
        state = graph.graph_copy(steps[k].moving.graph, known)  # type: ignore[assignment]
    graph.output(tuple(state))
    _compute_once(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def keep_layout(joined: fx.GraphModule, state: State) -> None:
    """Let a graph return images as it takes them: channels last, where `state` is so."""
    output = next(node for node in joined.graph.nodes if node.op == "output")
    results = list(output.args[0])
    for n, layer in enumerate(state):
        if layer.dim() == 4 and layer.is_contiguous(memory_format=torch.channels_last):
            with joined.graph.inserting_before(output):
                last: dict[str, Any] = {"memory_format": torch.channels_last}
                results[n] = joined.graph.call_function(_aten.clone.default, (results[n],), last)
    output.args = (tuple(results),)
    joined.recompile()


def all_inputs(steps: Sequence[Split]) -> list[str]:
    """The names of the inputs of several steps, each once."""
    return list(dict.fromkeys(name for step in steps for name in step.inputs))


def _compute_once(graph: fx.Graph) -> None:
    """Compute equal expressions once: in sweeps, the arg-max of a pooled convolution is kept until its input moves.

    The half that updates the layer behind a convolution computes it, and the next half needs where its maxima were.
    """
    known: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        leaves, shape = tree_flatten((node.args, node.kwargs))
        key = (node.target, shape, tuple((type(leaf), leaf) for leaf in leaves))
        if key in known:
            node.replace_all_uses_with(known[key])
            graph.erase_node(node)
        else:
            known[key] = node


_COMPILED: dict[tuple[object, ...], Callable[..., Sequence[Tensor]]] = {}
"""Compiled graphs of this process by their text and their inputs' layouts: equal nets share them."""


def compile_graph(
    graph: fx.GraphModule, inputs: Arguments, before: Callable[[], None]
) -> Callable[..., Sequence[Tensor]]:
    """The graph as compiled code for inputs of these shapes, from memory or disk where it is there already."""
    layout = tuple((tuple(v.shape), v.stride(), v.dtype, str(v.device)) for v in inputs)
    key = (graph.code, layout, *_compiled_for())
    if key not in _COMPILED:
        before()
        _COMPILED[key] = _compile(graph, inputs)
    return _COMPILED[key]


def _compiled_for() -> tuple[int, bool]:
    """What of torch's settings compiled code depends on: threads, and whether algorithms are fixed."""
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()


def _options() -> dict[str, Any]:
    """Inductor's settings: its cache, and fixed choices if asked."""
    options: dict[str, Any] = {"fx_graph_cache": True}
    if torch.are_deterministic_algorithms_enabled():
        options["triton.autotune_pointwise"] = False
    return options


def _compile(graph: fx.GraphModule, inputs: Arguments) -> Callable[..., Sequence[Tensor]]:
    import torch._inductor

    try:
        with (
            _code_kept_in(str(code_folder() / "inductor")),
            _with_shapes_of(inputs) as shapes,
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            # Holomorphic EP's states are complex, and torch's operators serve those.
            warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex")
            made = torch._inductor.compile(graph, shapes, options=_options())
            made(*inputs)  # loads the code, so that what is wrong with it is found here
    except CacheError as error:
        raise CannotTrace(str(error).rstrip(".")) from error
    except Exception as error:  # a compiler has many ways to fail
        raise CannotTrace(f"its step cannot be compiled ({first_line(error)})") from error
    found: Callable[..., Sequence[Tensor]] = made
    return found


@contextmanager
def _code_kept_in(folder: str) -> Iterator[None]:
    """Let inductor keep its files in this folder, unless the user chose one.

    Torch notes its own default in the same place, as if the user had chosen it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    if before is None or before == default_cache_dir():
        os.environ[name] = folder
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        else:
            os.environ.pop(name, None)


@contextmanager
def _with_shapes_of(inputs: Arguments) -> Iterator[list[Any]]:
    """The inputs without their values, in a context for tracing with symbolic shapes.

    Without the context inductor's cache stands aside; with values in their place it would take sizes for variables.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        yield [mode.from_tensor(v, static_shapes=True) for v in inputs]


def why_not_compiled(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device; None if it can."""
    if device.type == "cpu":
        return "it compiles for GPUs; on a CPU the engine xla does."
    from torch.utils._triton import has_triton

    return None if has_triton() else "it needs Triton, which does not serve this device."


class Same:
    """Stands for an object as part of a key: equal while it lives, and never to another that gets its address."""

    def __init__(self, part: object) -> None:
        self.number = id(part)
        self.get: Callable[[], object]
        try:
            self.get = weakref.ref(part)
        except TypeError:  # such as a dtype: keep it
            self.get = lambda: part

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.get() is not None and self.get() is other.get()


@dataclass(frozen=True)
class StepInputs:
    """What a step reads besides the state, as tensors: parameters and buffers, x, and the nudge's y and beta."""

    model: Dynamics
    x: Tensor
    nudge: Nudge | None

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [self.model] if self.nudge is None else [self.model, self.nudge.cost]

    @property
    def names(self) -> list[list[str]]:
        return [[name for name, _ in (*m.named_parameters(), *m.named_buffers())] for m in self.modules]

    def tensors(self) -> Arguments:
        """All of them as they are now, detached."""
        theta = [v for m in self.modules for _, v in (*m.named_parameters(), *m.named_buffers())]
        return tuple(v.detach() for v in (*theta, self.x, *self._nudged()))

    def _nudged(self) -> list[Tensor]:
        if self.nudge is None:
            return []
        return [self.nudge.y, *([self.nudge.beta] if isinstance(self.nudge.beta, Tensor) else [])]

    def unpack(self, values: Arguments) -> tuple[list[dict[str, Tensor]], Tensor, Nudge | None]:
        """The inverse of `tensors`: parameters by module and name, x and the nudge."""
        left = iter(values)
        theta = [{name: next(left) for name in names} for names in self.names]
        x = next(left)
        if self.nudge is None:
            return theta, x, None
        y = next(left)
        beta = next(left) if isinstance(self.nudge.beta, Tensor) else self.nudge.beta
        return theta, x, Nudge(self.nudge.cost, y, beta, checked=False)


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)

BOUNDS = (6, 12)
"""Steps per compiled block: enough that the host's work per block does not count, few enough to compile in seconds."""


def _convolves(step: Split) -> bool:
    """Whether convolutions of the state are part of a step."""
    return first(step.moving, lambda node: node.target in _CONVOLUTIONS) is not None


def laid_out(values: Arguments, form: torch.memory_format) -> Arguments:
    """The same values, images and kernels in this memory format."""
    return tuple(v.contiguous(memory_format=form) if v.dim() == 4 else v for v in values)


def block_length(T: int, sweep: int = 1, bounds: tuple[int, int] = BOUNDS) -> int:
    """How many steps to take at once in a phase of T: whole sweeps, and few single steps left over."""
    shortest, longest = bounds
    lengths = [n for n in range(longest, 0, -1) if n % sweep == 0 and (n >= shortest or n == sweep)] or [sweep]
    fitting = [n for n in lengths if n <= T]
    return min(fitting, key=lambda n: T % n) if fitting else 1


class CompiledStepper(Stepper):
    """Takes steps in compiled blocks; what does not depend on the state is computed at the first step of each kind."""

    def __init__(self, steps: CompiledSteps, given: StepInputs, phase: Phase) -> None:
        self.steps, self.given, self.phase = steps, given, phase
        self.reference: Stepper | None = None
        model = given.model
        steps.renew(given)
        if given.nudge is not None and isinstance(model, PrimitiveDynamics) and model.nudge_site == "implicit":
            # Raises if it has none.
            given.nudge.implicit(model.init_state(given.x)[0], model.nudge_scale, model.least_curvature)
        self.form = steps.memory_format(given)
        self.values = laid_out(given.tensors(), self.form)
        self.inputs: dict[str, Tensor] = {}
        self.known: set[Update] = set()

    @functools.cached_property
    def block(self) -> int:  # type: ignore[override]
        return block_length(self.phase.T, _period(self.given, self.phase))

    def __call__(self, s: State, update: Update = None) -> State:
        return self.run(s, [update])

    def run(self, s: State, updates: Sequence[Update]) -> State:
        if self.reference is not None:
            return self.reference.run(s, updates)
        try:
            block, inputs = self._block(s, updates)
            with full_precision(tf32=self.steps.precision == "tf32"):
                found = tuple(block.run(*inputs))
            if not capturing(s[0]) and block.checks.due():
                found = self._checked(block, s, updates, found)
        except CannotTrace as error:
            self.steps.give_up(self.given.model, error)
            self.reference = self._reference()
            return self.reference.run(s, updates)
        return found

    def _reference(self) -> Stepper:
        given = self.given
        return PreciseStepper(given.model, given.x, given.nudge, self.steps.precision)

    def _checked(self, block: Block, s: State, updates: Sequence[Update], found: State) -> State:
        """The same state if the reference's steps give it too; else theirs, and the block is forgotten."""
        expected = self._reference().run(s, updates)
        allowed = [AGREE[self.steps.precision] * size_of(v) for v in expected]
        if apart(found, expected, allowed):
            nearby = tuple(layer * (1.0 + 2.0 * torch.finfo(layer.dtype).eps) for layer in s)
            shaken = self._reference().run(nearby, updates)
            noise = [NOISE * size_of(a - b) + most for a, b, most in zip(expected, shaken, allowed, strict=True)]
            if apart(found, expected, noise):
                if not block.compared:
                    raise CannotTrace("its compiled steps differ from the reference's")
                self.steps.forget(self.given.model)
                title = self.given.model.title
                warnings.warn(f"The step of {title} had changed unseen; it was compiled again.", stacklevel=5)
                self.inputs, self.known = {}, set()
                return expected
        block.compared = True
        return found

    def _block(self, s: State, updates: Sequence[Update]) -> tuple[Block, Arguments]:
        """These updates as compiled code, and its inputs."""
        s = self._laid_out(s)
        kinds = list(dict.fromkeys(updates))
        splits = [self.steps.split(self.given, self.values, s, update) for update in kinds]
        for update, split in zip(kinds, splits, strict=True):
            self._learn(update, split)
        flat = (*(self.inputs[name] for name in all_inputs(splits)), *s)
        return self.steps.block(self.given.model, splits, [kinds.index(u) for u in updates], flat), flat

    def _laid_out(self, s: State) -> State:
        return laid_out(tuple(layer if layer.dim() == 4 else layer.contiguous() for layer in s), self.form)

    def _learn(self, update: Update, split: Split) -> None:
        """Compute what a kind of step needs besides the state, unless an earlier kind did."""
        if update in self.known:
            return
        self.known.add(update)
        given = (*self.values, *split.constants)
        if not set(split.inputs) <= set(self.inputs):
            values = (*given, *split.fixed(*given))
            self.inputs = dict(zip(split.inputs, values, strict=True)) | self.inputs


def _period(given: StepInputs, phase: Phase) -> int:
    """How many updates a sweep or a pair of half-steps takes."""
    if phase.schedule == "alternating":
        return 2
    return len(given.model.sweep(len(given.model.init_state(given.x)))) if phase.schedule in SWEEPS else 1


def capturing(v: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be read."""
    return v.is_cuda and torch.cuda.is_current_stream_capturing()


MOST = 100
"""Steps kept per model; one that changes at every phase would fill the memory with its past."""


AGREE = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""How far a block may be from the reference's steps, relative to a layer's largest number, rounding apart."""
NOISE = 100.0
"""How many times what the last bits of a state change in the result is the work of rounding."""


@dataclass
class Block:
    """Several steps in a row as compiled code, and when to compare it with the reference."""

    run: Callable[..., Sequence[Tensor]]
    steps: tuple[Split, ...]
    checks: Checks = field(default_factory=Checks)
    compared: bool = False


class CompiledSteps:
    """Makes compiled steppers; remembers what it traced and compiled, by model and shapes.

    falls_back  whether a step that cannot be captured is taken by the reference, with a warning
    before      is called before something is compiled
    """

    precision: Precision = "float32"

    def __init__(self, falls_back: bool, before: Callable[[], None]) -> None:
        self.falls_back, self.before = falls_back, before
        self._splits: WeakKeyDictionary[Dynamics, dict[tuple[object, ...], Split]] = WeakKeyDictionary()
        # By the addresses of splits, which a block keeps so that they stay theirs.
        self._blocks: WeakKeyDictionary[Dynamics, dict[tuple[object, ...], Block]] = WeakKeyDictionary()
        self._refused: WeakKeyDictionary[Dynamics, str] = WeakKeyDictionary()
        self._formats: WeakKeyDictionary[Dynamics, dict[Same | None, torch.memory_format]] = WeakKeyDictionary()
        self._watches: WeakKeyDictionary[Dynamics, dict[Same | None, Fingerprint]] = WeakKeyDictionary()

    def stepper(self, model: Dynamics, x: Tensor, nudge: Nudge | None, phase: Phase) -> Stepper:
        if model in self._refused:
            return PreciseStepper(model, x, nudge, self.precision)
        return CompiledStepper(self, StepInputs(model, x, nudge), phase)

    def memory_format(self, given: StepInputs) -> torch.memory_format:
        """Channels last where a step convolves the state, as is fastest, if it can be traced so."""
        known = self._formats.setdefault(given.model, {})
        cost = None if given.nudge is None else Same(given.nudge.cost)
        if cost not in known:
            known[cost] = self._fastest_format(given)
        return known[cost]

    def _fastest_format(self, given: StepInputs) -> torch.memory_format:
        last = torch.channels_last
        values, s = given.tensors(), given.model.init_state(given.x)

        def step(v: Arguments, state: State) -> State:
            return step_of(given, v, state, None, self.precision)

        try:
            if _convolves(trace_step(step, values, s)):
                trace_step(step, laid_out(values, last), laid_out(s, last))
                return last
        except CannotTrace:
            pass  # a model may take views of its images that only the other format allows
        return torch.contiguous_format

    def renew(self, given: StepInputs) -> None:
        """Forget what was traced of a model if what it or its cost holds besides tensors has changed."""
        watches = self._watches.setdefault(given.model, {})
        cost = None if given.nudge is None else Same(given.nudge.cost)
        if any(watch.changed() for watch in watches.values()):
            self.forget(given.model)
            watches.clear()
        if cost not in watches:
            # What a model makes when first used, such as a mask, must hold numbers.
            step_of(given, given.tensors(), given.model.init_state(given.x), None, self.precision)
            watches[cost] = Fingerprint(*given.modules)

    def forget(self, model: Dynamics) -> None:
        """Forget what was traced and compiled of a model."""
        for known in (self._splits, self._blocks, self._formats):
            known.pop(model, None)

    def refusal(self, given: StepInputs) -> str | None:
        """Why what a model holds cannot be watched; None if it can."""
        return next((w.refusal for w in self._watches[given.model].values() if w.refusal is not None), None)

    def give_up(self, model: Dynamics, error: CannotTrace) -> None:
        """Leave this model to the reference, with a warning; raise ValueError if that was not asked for."""
        if not self.falls_back:
            raise ValueError(f"The engine 'compiled' cannot serve {model.title}: {error}. Use 'eager'.") from error
        self._refused[model] = str(error)
        warnings.warn(f"{model.title} runs on the eager engine, which is slower: {error}.", stacklevel=2)

    def split(self, given: StepInputs, values: Arguments, s: State, update: Update) -> Split:
        beta = None if given.nudge is None else given.nudge.beta
        cost = None if given.nudge is None else Same(given.nudge.cost)
        if (refusal := self.refusal(given)) is not None:
            raise CannotTrace(refusal)
        layouts = tuple((v.shape, v.stride(), v.dtype, v.device) for v in (*values, *s))
        key = (update, cost, None if isinstance(beta, Tensor) else beta, layouts, self.precision)
        known = self._splits.setdefault(given.model, {})
        if key not in known:
            if len(known) >= MOST:
                known.clear()
                self._blocks.pop(given.model, None)
            known[key] = trace_step(lambda v, state: step_of(given, v, state, update, self.precision), values, s)
        return known[key]

    def block(self, model: Dynamics, splits: Sequence[Split], order: Sequence[int], flat: Arguments) -> Block:
        key = (tuple(map(id, splits)), tuple(order), tuple(v.stride() for v in flat), *_compiled_for())
        known = self._blocks.setdefault(model, {})
        if key not in known:
            layers = len(flat) - len(all_inputs(splits))
            joined = join(splits, order, layers)
            keep_layout(joined, flat[-layers:])
            known[key] = Block(compile_graph(joined, flat, self.before), tuple(splits))
        return known[key]

    def stepping(self) -> AbstractContextManager[None]:
        return stepping(self.stepper, difference_in(self.precision))


def step_of(given: StepInputs, values: Arguments, s: State, update: Update, precision: Precision) -> State:
    """One step with these values in the place of the parameters and the data."""
    theta, x, nudge = given.unpack(values)

    def run() -> State:
        with torch.no_grad():
            return PreciseStepper(given.model, x, nudge, precision)(s, update)

    return with_values(given.modules, theta, run)


class CompiledRunner(EagerRunner):
    """The reference iteration over compiled steps."""

    def __init__(self, job: Job, steps: CompiledSteps) -> None:
        super().__init__(job, steps.precision)
        self.steps = steps

    def stepping(self) -> AbstractContextManager[None]:
        return self.steps.stepping()


@contextmanager
def _convolutions_timed() -> Iterator[None]:
    """Let cuDNN choose its algorithms by timing them, unless fixed ones are asked for."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class CompiledGraphRunner(GraphRunner):
    """The same captured in CUDA graphs; the steps are compiled in the warm-up before the capture.

    Learning rates are tensors that the graphs read: a changed rate is no new capture.
    """

    def __init__(self, job: Job, steps: CompiledSteps) -> None:
        super().__init__(job, steps.precision)
        self.steps = steps
        self.rates = [torch.zeros((), device=job.images.device) for _ in job.optimizer.param_groups]
        self.take_rates()

    def _capture(self, rows: Tensor) -> None:
        with _convolutions_timed():
            super()._capture(rows)

    def take_rates(self) -> None:
        for rate, group in zip(self.rates, self.job.optimizer.param_groups, strict=True):
            rate.fill_(float(group["lr"]))

    def update(self, loss: Tensor) -> None:
        with rates_read_from(self.job.optimizer, self.rates):
            super().update(loss)

    def stepping(self) -> AbstractContextManager[None]:
        return self.steps.stepping()


class Compiled(Engine):
    name = "compiled"
    reference = True
    starts = ("zero", "persistent", "initialised", "carried")
    precisions = PRECISIONS

    def __init__(self, falls_back: bool = False) -> None:
        self.steps = CompiledSteps(falls_back, self._say_once)
        self._said = False

    def _say_once(self) -> None:
        if not self._said:
            self.notice("compiling the steps of this network, which later runs find in the cache")
        self._said = True

    def automatic(self, task: Task) -> Engine | None:
        """Not before it is measured."""
        return None

    def refuses_more(self, task: Task) -> str | None:
        if task.device.type != "cpu" and STREAMED in task.extras:
            return "it captures whole iterations, and samples are read from outside."
        captured = None if task.device.type == "cpu" else refuses_optimizer(task.optimizer)
        return captured or why_not_compiled(task.device)

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        self.steps.precision = self.precision
        with full_precision(), self.steps.stepping():
            return relax(model, x, phase, state)

    def runner(self, job: Job) -> Runner:
        self.steps.precision = self.precision
        # Other starts are exchanged between processes, within the half of an iteration that would be captured.
        local = job.exchange is None or job.start is None or job.start.kind == "carried"
        captured = job.images.device.type == "cuda" and local
        return CompiledGraphRunner(job, self.steps) if captured else CompiledRunner(job, self.steps)
