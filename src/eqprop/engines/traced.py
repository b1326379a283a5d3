"""Traced steps, and the guard that keeps them from going stale.

A function of tensors is traced once, below automatic differentiation, into a list of operations. Whatever it reads
besides tensors is part of that list, so three things keep the list true. Reading a tensor's values while tracing is
refused. What the function holds besides tensors is watched, and a change traces it again. And at some calls one step is
compared with the reference.
"""

from __future__ import annotations

import array
import contextvars
import datetime
import enum
import functools
import logging
import numbers
import operator
import pathlib
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Traceable = Callable[..., Sequence[Tensor]]


class CannotTrace(Exception):
    """A function cannot be traced; the message says why, as the end of a sentence."""


class Restless(CannotTrace):
    """What a function holds changes whenever it is called."""


_READERS = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.data_ptr,
        torch.Tensor.__array__,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__complex__,
        torch.Tensor.__index__,
        torch.Tensor.__dlpack__,
        torch.is_nonzero,
        torch.equal,
    }
)
"""Functions that read a tensor's values. Fake tensors refuse most of them; this also covers tensors that are held."""


_OUTLIVES = "it changes a tensor in place that outlives the step"


class _NoReading(TorchFunctionMode):
    """Refuse to read values."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _READERS:
            raise CannotTrace(f"it reads the values of a tensor ({function.__name__})")
        return function(*args, **(kwargs or {}))


@functools.cache
def core_operations(kept: tuple[Any, ...] = (), more: tuple[Any, ...] = ()) -> dict[Any, Callable[..., Any]]:
    """How torch writes its operations by a core set, and `more` of them, but for those `kept` as they are."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    found = {**dict(core_aten_decompositions().items()), **get_decompositions(more)}
    return {op: way for op, way in found.items() if op not in kept}


def trace(
    function: Traceable, inputs: Sequence[Tensor], table: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.GraphModule:
    """The operations of function(*inputs) as a graph with one placeholder per input.

    function    of tensors, returning tensors; called with tensors that have shapes and no values
    inputs      tensors of the shapes and types to trace for; one that is given twice has two placeholders
    table       how operations are to be written by others (see `core_operations`); None: as they are

    Other tensors that the function reads become attributes of the graph, which share their memory. Operations in place
    on tensors of its own are written without. Raises CannotTrace for anything that a list of operations cannot follow.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        graph = _traced(function, inputs, table)
        if first(graph, _is_mutating) is not None:
            graph = _traced(_without_mutations(function), inputs, table)
    except CannotTrace:
        raise
    except DataDependentOutputException as error:
        raise CannotTrace(f"it reads the values of a tensor ({error.func})") from error
    except DynamicOutputShapeException as error:
        raise CannotTrace(f"it makes a tensor whose shape depends on values ({error.func})") from error
    except Exception as error:  # whatever a model raises when its tensors have no values
        raise CannotTrace(f"it cannot be traced ({first_line(error)})") from error
    for kind, reason in (
        (_is_mutating, _OUTLIVES),
        (_is_random, "it draws random numbers"),
    ):
        if (node := first(graph, kind)) is not None:
            raise CannotTrace(f"{reason} ({node.target})")
    graph.graph.eliminate_dead_code()
    return graph


def _traced(
    function: Traceable, inputs: Sequence[Tensor], table: Mapping[Any, Callable[..., Any]] | None
) -> fx.GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in inputs]
    tracer = make_fx(function, dict(table or {}), tracing_mode="fake", _allow_non_fake_inputs=True)
    # Attention as products and a softmax: the derivative of torch's own kernel is one operation that nothing else has.
    with (
        _NoReading(),
        _quiet(),
        torch.autocast(fakes[0].device.type, enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        return tracer(*fakes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let torch not log what fails: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _without_mutations(function: Traceable) -> Traceable:
    """The same function with new tensors for those it changes in place. Raises CannotTrace if its arguments change."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    def plain(v: Any) -> Any:
        if not isinstance(v, FunctionalTensor):
            return v
        torch._sync(v)  # type: ignore[attr-defined]
        return torch._from_functional_tensor(v.elem)

    def run(*values: Tensor) -> list[Tensor]:
        with FunctionalTensorMode():
            wrapped = [FunctionalTensor.to_functional(v) for v in values]
            found = [plain(v) for v in function(*wrapped)]
        if any(torch._functionalize_has_data_mutation(v.elem) for v in wrapped):  # type: ignore[attr-defined]
            raise CannotTrace(_OUTLIVES)
        return found

    return run


def first_line(error: BaseException) -> str:
    """An error in one line, for the end of a sentence."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160].rstrip('.') if text else 'no message'}"


def first(graph: fx.GraphModule, kind: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The first operation of this kind."""
    return next((node for node in graph.graph.nodes if node.op == "call_function" and kind(node)), None)


def _is_mutating(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


MOST = 2000
"""Objects to watch per model; one that holds more is left to the reference."""
ARRAY = 1 << 14
"""Bytes of a numpy array whose values are watched."""
_LIBRARIES = frozenset({"torch", "numpy", "jax", "jaxlib", "scipy", "builtins", "math", *sys.stdlib_module_names})
_HARMLESS = (
    *(numbers.Number, np.generic, np.dtype, np.ufunc, datetime.date, datetime.time, datetime.timedelta),
    *(enum.Enum, pathlib.PurePath, re.Pattern, slice, logging.Logger),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias, types.UnionType),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller, type(...), type(NotImplemented)),
    *(type(threading.Lock()), type(threading.RLock())),
)
"""Objects of libraries that never change, or on which no step depends."""
_SILENT = frozenset({"builtins", "torch", "typing", "jax", "jaxlib"})
"""Libraries whose other objects, such as an optimizer, are not looked at."""
_OUTSIDE = frozenset({"open", "read_text", "read_bytes", "environ", "getenv"})
"""Names of what reads files or the environment."""
_CACHED = type(functools.cache(len))
_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    types.CodeType,
    range,
)
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if name.endswith("_hooks") and isinstance(value, dict))


class Fingerprint:
    """What modules and functions hold besides the values of tensors, as it was when they were traced.

    Watched are attributes, closures, globals, defaults, containers, methods, the identity of tensors, and the shapes,
    types and `requires_grad` of parameters. `changed` compares them, mostly by identity, which takes microseconds.

    roots       modules, functions, or other objects
    refusal     why the roots cannot be watched, as the end of a sentence; None if they can
    """

    def __init__(self, *roots: object) -> None:
        self.refusal: str | None = None
        # Containers that stay the same object, with a copy and the names that are not looked at; what is iterated to
        # see all that they hold; and what has to be read anew, with what it was.
        self._held: list[tuple[Any, Any, frozenset[str]]] = []
        self._views: list[Iterable[Any]] = []
        self._reads: list[tuple[Callable[[], Any], Any]] = []
        self._hooks: list[Mapping[Any, Any]] = [v for n, v in vars(nn.modules.module).items() if n in _GLOBAL_HOOKS]
        self._seen: dict[int, object] = {}
        queue = list(roots)
        while queue and self.refusal is None:
            queue += self._add(queue.pop())
            if len(self._seen) > MOST:
                self.refusal = f"it holds more than {MOST} objects, too many to watch for changes"
        if self._hooked():
            self.refusal = "it has hooks, which run at every step"
        self._seen.clear()  # or a model would live as long as what is remembered of it
        self._objects, self._sizes = list(chain.from_iterable(self._views)), [len(now) for now, _, _ in self._held]

    def changed(self) -> bool:
        """Whether anything that is watched is no longer as it was."""
        if self._hooked() or not all(_same(read(), was) for read, was in self._reads):
            return True
        objects = chain.from_iterable(self._views)
        if [len(now) for now, _, _ in self._held] == self._sizes and all(map(operator.is_, objects, self._objects)):
            return False  # the same objects, which is a question of microseconds
        return not all(_same(_without(now, names), _without(then, names)) for now, then, names in self._held)

    def _hooked(self) -> bool:
        return any(self._hooks)

    def _hold(self, container: Any, skipped: frozenset[str] = frozenset()) -> Iterable[object]:
        """Watch a mapping, but for some names, or a list; its members are to be looked at too."""
        if not isinstance(container, Mapping):
            self._held.append((container, type(container)(container), frozenset()))
            self._views.append(container)
            return container
        self._held.append((container, dict(container), skipped))
        self._views += (container.keys(), container.values())
        return container.values()

    def _read(self, read: Callable[[], Any]) -> Any:
        """Watch what a function returns."""
        value = read()
        self._reads.append((read, value))
        return value

    def _add(self, part: object) -> Iterator[object]:
        """Watch an object; yield those that it holds."""
        if type(part) in _LEAVES or id(part) in self._seen:
            return
        self._seen[id(part)] = part
        if isinstance(part, Tensor):
            self._add_tensor(part)
        elif isinstance(part, np.ndarray):
            self._add_bytes(part.nbytes, part.tobytes)
        elif isinstance(part, nn.Module):
            yield from self._of_module(part)
        elif isinstance(part, types.FunctionType):
            yield from self._of_function(part)
        elif isinstance(part, types.MethodType):
            yield from (part.__self__, part.__func__)
        elif isinstance(part, functools.partial):
            yield from (part.func, *part.args, *part.keywords.values())
        elif isinstance(part, types.BuiltinFunctionType | types.MethodWrapperType):
            yield from () if isinstance(part.__self__, types.ModuleType) else (part.__self__,)
        elif isinstance(part, type):
            yield from self._of_class(part)
        elif isinstance(part, types.ModuleType):
            yield from () if _is_library_module(part) else self._hold(vars(part))
        elif isinstance(part, _CACHED):
            self._read(lambda: part.cache_info().misses)
            yield part.__wrapped__
        else:
            yield from self._of_content(part)

    def _of_content(self, part: Any) -> Iterator[object]:
        """Watch what an object holds as a container, and its attributes."""
        watched = True
        if isinstance(part, dict | list | set | types.MappingProxyType):
            yield from self._hold(part)
        elif isinstance(part, tuple | frozenset):
            yield from part
        elif isinstance(part, deque):
            yield from self._read(lambda: list(part))
        elif isinstance(part, bytearray | memoryview | array.array):
            with memoryview(part) as seen:
                size = seen.nbytes
            self._add_bytes(size, lambda: bytes(part))
        elif isinstance(part, contextvars.ContextVar):
            yield self._read(lambda: part.get(None))
        elif isinstance(part, weakref.ref):  # what it refers to may be the model, which must not live by it
            self._read(lambda: part() is None)
            yield part()
        else:
            watched = isinstance(part, threading.local)
        if _top(type(part)) not in _SILENT and not isinstance(part, _HARMLESS):
            yield from self._of_object(part, watched)

    def _add_tensor(self, v: Tensor) -> None:
        self._read(lambda: (v.shape, v.dtype, v.device, v.requires_grad, v.is_leaf, v.data_ptr() if _loose(v) else 0))
        if v.requires_grad:
            self._read(lambda: bool(v._backward_hooks))
            if v._backward_hooks:
                self.refusal = "it has hooks, which run at every step"

    def _add_bytes(self, size: int, read: Callable[[], bytes]) -> None:
        if size > ARRAY:
            self.refusal = f"it holds an array of {size} bytes, too large to watch for changes"
        else:
            self._read(read)

    def _of_module(self, module: nn.Module) -> Iterator[object]:
        held = vars(module)
        self._hooks += [held[name] for name in _HOOKS if name in held]
        yield from (v for name, v in held.items() if name not in _HOOKS)
        self._hold(held)
        yield from self._of_type(module)

    def _of_object(self, part: object, watched: bool) -> Iterator[object]:
        """Watch the attributes of an object. One that holds more than those must be watched by what it contains."""
        kind = type(part)
        if hasattr(part, "__dict__"):
            yield from self._hold(vars(part))
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(part, name)]
        if slots:
            yield from self._read(lambda: [getattr(part, name) for name in slots])
        if not watched and _is_opaque(kind):
            self.refusal = f"it holds an object of {kind.__module__}.{kind.__qualname__}, which cannot be watched"
        yield from self._of_type(part)

    def _of_type(self, part: object) -> Iterator[object]:
        own = [kind for kind in type(part).__mro__ if not _is_library(kind)]
        if own:  # else nobody gives it another type
            place = weakref.ref(part) if isinstance(part, nn.Module) else lambda: part
            self._read(lambda: type(place()))
        yield from own

    def _of_class(self, kind: type) -> Iterator[object]:
        if _is_library(kind):
            return
        held = vars(kind)
        self._hold(held, _VOLATILE)
        if not kind.__module__.startswith("eqprop."):
            parts = _without(held, _VOLATILE | _GENERATED).values()
            yield from (getattr(v, "__func__", getattr(v, "fget", v)) for v in parts)

    def _of_function(self, function: types.FunctionType) -> Iterator[object]:
        # Where it was written: a decorator may give it another's __module__.
        written = str(function.__globals__.get("__name__"))
        if written.partition(".")[0] in _LIBRARIES or written.startswith("eqprop."):
            yield from self._cells(function)
            return
        self._read(lambda: (function.__code__, function.__defaults__, function.__kwdefaults__))
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield from self._cells(function)
        yield from self._globals(function)

    def _cells(self, function: types.FunctionType) -> Iterator[object]:
        cells = function.__closure__ or ()
        if cells:
            yield from self._values(self._read(lambda: [_content(cell) for cell in cells]), _names(function.__code__))

    def _globals(self, function: types.FunctionType) -> Iterator[object]:
        """The globals that a function names, and of modules among them, other than libraries, what it may name."""
        space, names = function.__globals__, _names(function.__code__)
        if _OUTSIDE & set(names):
            self.refusal = "it reads files or the environment, which cannot be watched"
        known = [name for name in names if name in space]
        if known:
            yield from self._values(self._read(lambda: [space.get(name) for name in known]), names)

    def _values(self, values: Iterable[object], names: Sequence[str]) -> Iterator[object]:
        """Values that a function names; of modules among them what it may name."""
        for value in values:
            if isinstance(value, types.ModuleType):
                yield from self._of_names(value, names)
            else:
                yield value

    def _of_names(self, module: types.ModuleType, names: Sequence[str]) -> Iterator[object]:
        if not _is_library_module(module):
            held = vars(module)
            known = [name for name in names if name in held]
            if known:
                yield from self._read(lambda: [held.get(name) for name in known])


_GLOBAL_HOOKS = tuple(n for n, v in vars(nn.modules.module).items() if n.startswith("_global_") and isinstance(v, dict))
_VOLATILE = frozenset({"__doc__", "__annotations__", "__annotations_cache__", "__abstractmethods__", "_abc_impl"})
_GENERATED = frozenset(f"__{name}__" for name in ("dataclass_fields", "dataclass_params", "match_args"))
"""What describes the fields of a dataclass; none of its methods reads it."""


def _without(held: Any, names: frozenset[str]) -> Any:
    """A mapping without these names; what is no mapping has none."""
    return {name: v for name, v in held.items() if name not in names} if names else held


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one object, equal numbers or words, or containers of such."""
    if a is b:
        return True
    kind = type(a)
    if kind is list or kind is tuple:
        return type(b) is kind and len(a) == len(b) and _all_same(a, b)
    if isinstance(a, _LEAVES):
        return type(b) is kind and (a == b or (a != a and b != b))
    if kind is dict or isinstance(a, Mapping):
        if len(a) != (len(b) if type(b) is dict or isinstance(b, Mapping) else -1):
            return False
        return not a or (_all_same(a.values(), b.values()) and _all_same(a, b))
    if isinstance(a, set):
        return bool(a == b)
    return isinstance(a, list | tuple) and type(b) is kind and len(a) == len(b) and _all_same(a, b)


def _all_same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    return all(map(operator.is_, a, b)) or all(map(_same, a, b))


def _loose(v: Tensor) -> bool:
    """Whether a tensor is held as it is; the memory of parameters is read anew at every call."""
    return not isinstance(v, nn.Parameter)


def _top(part: Any) -> str:
    """The package that a class or function is from."""
    found: str = (getattr(part, "__module__", None) or "builtins").partition(".")[0]
    return found


def _is_library(part: Any) -> bool:
    return _top(part) in _LIBRARIES


def _is_library_module(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] in _LIBRARIES


def _is_opaque(kind: type) -> bool:
    """Whether objects of this class may hold what nothing shows: it, or one of its bases, is not written in Python."""
    bases = (base for base in kind.__mro__ if base is not object and "__slots__" not in vars(base))
    return any(base.__dictoffset__ == 0 for base in bases)


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global and attribute names in a function's code, those of functions inside it too."""
    inner = (name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def watched(take_steps: Callable[[], object], *roots: object) -> Fingerprint:
    """A watch of what is to be traced, which has taken steps by then.

    What a model makes when first used, such as a mask, then holds numbers. Raises CannotTrace if it cannot be watched,
    and Restless if it is never the same.
    """
    take_steps()
    watch = Fingerprint(*roots)
    if watch.refusal is not None:
        raise CannotTrace(watch.refusal)
    take_steps()
    if watch.changed():
        raise Restless("what it reads beside tensors changes at every call")
    return watch


def size_of(v: Tensor) -> float:
    """The largest number."""
    return float(v.abs().max()) if v.numel() else 0.0


def apart(a: Sequence[Tensor], b: Sequence[Tensor], allowed: Sequence[float]) -> bool:
    """Whether two lists of tensors differ by more than allowed; what is not finite in both is equal."""
    pairs = zip(a, b, allowed, strict=True)
    return len(a) != len(b) or any(size_of((p - q).nan_to_num(0.0, 0.0, 0.0)) > most for p, q, most in pairs)


class Checks:
    """When a traced step is compared with the reference: at calls 1, 2, 4, 8, ..., and when asked to."""

    def __init__(self) -> None:
        self._calls, self._next = 0, 1

    def due(self) -> bool:
        """Count a call; whether it is one to check."""
        self._calls += 1
        if self._calls < self._next:
            return False
        self._next = 2 * self._calls
        return True

    def ask(self) -> None:
        """Check at the next call."""
        self._next = self._calls + 1
