"""Your own function that builds a network: FILE.py:FUNCTION, a registered model, or a function given in Python."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from eqprop.cost import Cost, FunctionCost, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.messages import EXPECTED_ERRORS, unknown
from eqprop.models.settings import ModelSettings
from eqprop.physical.settings import OWN
from eqprop.plugins import Table
from eqprop.settings import about
from eqprop.state import LayerParameters

Factory = Callable[..., Any]
"""Your own function: what `OwnFunction` describes."""


@final
class OwnNet(ModelSettings, frozen=True):
    """A custom network. Only its name is data; the function that builds it is passed alongside the spec.

    A run folder therefore never names code to execute: whoever opens it must pass the function again.
    """

    function: Annotated[str, about("FILE.py:FUNCTION that builds your own network.", flag="--model")] = "own"
    kind: Literal["own"] = "own"

    @property
    def layer_parameters(self) -> tuple[LayerParameters, ...]:
        return ()

    def build(self, seed: int, dtype: torch.dtype) -> Dynamics:
        if (own := registered_own(self)) is not None:
            return own(seed).to(dtype)
        raise ValueError(
            f"The experiment uses your own network ({self.function}), but got no function that builds it. Give it "
            f"again: --model {self._where()}, or model=function in Python."
        )

    def _where(self) -> str:
        return self.function if ":" in self.function else f"FILE.py:{self.function}"

    def __str__(self) -> str:
        return f"own model {self.function}"


class OwnParts(NamedTuple):
    """What your function returned: a network and, if it gave them, a cost, samples x with answers y, or a data set."""

    model: Dynamics
    cost: Cost | None = None
    x: Tensor | None = None
    y: Tensor | None = None
    data: Any = None


class OwnFunction:
    """Your own function, for `gdu`, `doctor`, `train` and `tune`. It takes a seed or nothing, and returns one of

        model                   a `Dynamics`, such as `eqprop.from_energy` makes
        model, cost             with a `Cost`, or a function l(s, y) of state and targets, one value per sample
        model, cost, x, y       with samples and their targets or class numbers
        model, cost, data       with anything that `data=` takes, such as "fashion-mnist" or (x, y, x_test, y_test)

    Random numbers it draws from torch are seeded as well, so that it is reproducible even if it takes no seed. A cost
    that reads the model's parameters must do so through theta (see `eqprop.FunctionCost`).
    """

    def __init__(self, function: Factory, name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__qualname__", type(function).__name__))
        self._arguments = _seed_arguments(function, self.name)
        self._last: tuple[int, OwnParts] | None = None

    def __call__(self, seed: int) -> Dynamics:
        return self.build(seed).model

    def build(self, seed: int) -> OwnParts:
        """Call the function; its last result is kept and copied, as it may be slow or load data."""
        if self._last is None or self._last[0] != seed:
            with torch.random.fork_rng(devices=[]), own_code(self.name):
                torch.manual_seed(seed)
                made = self.function(*([seed] * self._arguments[0]), **dict.fromkeys(self._arguments[1], seed))
            self._last = seed, _built(made, self.name)
        built = self._last[1]
        model, cost = copy.deepcopy((built.model, built.cost))
        return built._replace(model=model, cost=cost)

    @property
    def has_cost(self) -> bool:
        """Whether it gives a cost other than the squared error, which runs have anyway."""
        return type(self.build(0).cost) not in (NoneType, SquaredError)

    def data(self) -> Any:
        """The data it gives, in a form that `data=` takes; None if it gives none.

        Samples without a test set are also what is tested on.
        """
        built = self.build(0)
        if built.x is None:
            return built.data
        return (built.x, built.y, built.x, built.y)


def as_own(function: Factory | None, name: str | None = None) -> OwnFunction | None:
    return function if function is None or isinstance(function, OwnFunction) else OwnFunction(function, name)


MODELS: Table[Factory] = Table("model", {}, lambda name, part: part)
"""Models from outside by name."""


def registered_own(net: ModelSettings) -> OwnFunction | None:
    """The registered model that a spec's net names, if it is one; a class is made with its settings first."""
    if not isinstance(net, OwnNet) or net.function not in MODELS:
        return None
    part, common = MODELS[net.function], OwnNet.__struct_fields__
    own = {name: value for name, value in msgspec.to_builtins(net).items() if name not in common}
    return OwnFunction(part(**own) if isinstance(part, type) else part, net.function)


def own_of(model: Factory | None, net: ModelSettings) -> OwnFunction | None:
    """Your own function, as given, or a registered model."""
    return as_own(model) or registered_own(net)


def is_own(target: object) -> bool:
    """Whether a target is a user's FILE.py:FUNCTION, or a registered model."""
    return isinstance(target, str) and (target.endswith(".py") or ".py:" in target or target in MODELS)


def load_own(where: str) -> OwnFunction:
    """FILE.py:FUNCTION, package.module:FUNCTION or a registered model as `OwnFunction`."""
    if not isinstance(where, str):
        raise ValueError(f"The model is {where!r}; expected FILE.py:FUNCTION, package.module:FUNCTION or a name.")
    return OwnFunction(MODELS[where] if where in MODELS else load_function(where), where)


def meet_machine(where: object) -> None:
    """Load the class of your own machine, FILE.py:CLASS, so that specs may name it in this process."""
    if isinstance(where, str) and ".py:" in where and where not in OWN:
        OWN[where] = load_function(where)


def _seed_arguments(function: Factory, name: str) -> tuple[int, tuple[str, ...]]:
    """How many seeds to pass by position, and under which names."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins
        return 1, ()
    seed = [p for p in parameters if p.name == "seed" and p.kind is not p.POSITIONAL_ONLY]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p not in seed and p.default is p.empty and p.kind not in variadic]
    if len(needed) > (0 if seed else 1) or any(p.kind is p.KEYWORD_ONLY for p in needed):
        raise ValueError(
            f"{name} needs {', '.join(p.name for p in needed)}; expected a function of a seed, or of nothing. Give the "
            "other parameters a default."
        )
    return len(needed), ("seed",) if seed else ()


CONTRACT = "model; model, cost; model, cost, x, y; or model, cost, data"


def _built(made: Any, name: str) -> OwnParts:
    values = tuple(made) if isinstance(made, tuple | list) else (made,)
    if len(values) not in (1, 2, 3, 4):
        raise ValueError(f"{name} returned {len(values)} values; expected {CONTRACT}.")
    model, cost = values[0], values[1] if len(values) > 1 else None
    if not isinstance(model, Dynamics):
        raise ValueError(
            f"{name} returned {type(model).__name__} as model; expected an eqprop.Dynamics, such as eqprop.from_energy "
            f"makes. It may return {CONTRACT}."
        )
    if cost is not None and not isinstance(cost, Cost):
        if not callable(cost):
            raise ValueError(f"{name} returned {type(cost).__name__} as cost; expected a Cost or a function l(s, y).")
        cost = FunctionCost(cost)
    if len(values) < 4:
        return OwnParts(model, cost, data=values[2] if len(values) == 3 else None)
    return OwnParts(model, cost, *_samples(values[2], values[3], name))


def _samples(x: Any, y: Any, name: str) -> tuple[Tensor, Tensor]:
    for value, what in ((x, "x"), (y, "y")):
        if not isinstance(value, Tensor | np.ndarray):
            raise ValueError(f"{name} returned {type(value).__name__} as {what}; expected a tensor or a numpy array.")
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if x.dim() < 2 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"{name} returned x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}; expected the samples "
            "along the first dimension, equally many in both, and at least one."
        )
    return x, y


def load_function(where: str) -> Callable[..., Any]:
    """FILE.py:FUNCTION or package.module:FUNCTION -> the function."""
    source, _, name = where.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(f"{where!r} does not name a function; expected FILE.py:FUNCTION or MODULE:FUNCTION.")
    if source.endswith(".py") and not Path(source).is_file():
        raise FileNotFoundError(f"There is no file {source}. Expected FILE.py:FUNCTION.")
    with own_code(where):
        module = _module(source)
    found = getattr(module, name, None)
    if callable(found):
        return cast("Callable[..., Any]", found)
    there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    what = (
        unknown("function", name, there) if there else f"There is no function {name!r}; no functions are defined there."
    )
    raise ValueError(f"{source}: {what}")


def _module(source: str) -> ModuleType:
    """Import a module by name or file. A file can import its neighbours, as if it were run as a script."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    # A prefix, so that a file called random.py does not replace the standard library's.
    name = f"eqprop_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # At the end, so that no file there replaces a module of the standard library or an installed one.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


@contextmanager
def own_code(where: str | None) -> Iterator[None]:
    """Turn an error in the user's FILE.py:FUNCTION into one message with its line; keep eqprop's own errors.

    Errors of a function that is not named by its file are left alone: Python shows their traceback.
    """
    if where is None or ".py" not in where:
        yield
        return
    path = Path(where.rpartition(":")[0])
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"{path} ends the program (exit code {error.code}); expected a function.") from error
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        if isinstance(error, EXPECTED_ERRORS) and not lines:
            raise
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = f"{path}, line {line}" if line else str(path)
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
