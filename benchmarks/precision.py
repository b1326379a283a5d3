"""python -m benchmarks.precision FILE: which form of half precision keeps EP's update, by its cosine with float64.

Products in float16 or bfloat16 always sum in float32. The forms differ in what else is rounded, and where:

    products    the factors of every product; results float32
    results     the factors and the results: what `eqprop.engines.eager.Products` does, and a GPU does fastest
    states      the factors, and the state after every step
    deviations  the nudged phases: products of W with s - s_free in half, added to those of the free state in float32
    polished    as results, with the last tenth of the free phase in float32

Each is the cosine of the whole update, and the lowest of a parameter, at initial weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.nets import subject
from eqprop.cost import Nudge, Problem
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Precision
from eqprop.engines.eager import _FACTORS, HALVES, PreciseStepper, agreements, products, update_in
from eqprop.files import write_json
from eqprop.provenance import provenance
from eqprop.relax import Phase, Stepper, StepperMaker, Update, stepping
from eqprop.state import State

NETS = {"mlp-small": 16, "B-small": 8, "A-small": 8}
"""Nets and samples."""

_aten = torch.ops.aten
Log = list[tuple[list[Tensor], Any]]


class Factors(TorchDispatchMode):
    """Rounds the factors of products, and leaves their results.

    With `base`, the products of another state, those with a factor that has not changed multiply the difference.
    """

    def __init__(self, dtype: torch.dtype | None, base: Log | None = None) -> None:
        super().__init__()
        self.dtype, self.base = dtype, base
        self.log: Log = []

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, places = kwargs or {}, _FACTORS.get(function)
        if places is None:
            return function(*args, **options)
        given, factors = list(args), [args[place] for place in places]
        known = None if self.base is None else self.base[len(self.log)]
        self.log.append((factors, None))
        moved = (
            None if known is None else [f.data_ptr() != b.data_ptr() for f, b in zip(factors, known[0], strict=True)]
        )
        if known is not None and moved is not None and sum(moved) == 1:
            for place, factor, before, apart in zip(places, factors, known[0], moved, strict=True):
                given[place] = self._rounded(factor - before if apart else factor)
            if function in (_aten.addmm.default, _aten.baddbmm.default):
                given[0] = torch.zeros_like(given[0])
            if function is _aten.convolution.default:
                given[2] = None
            return known[1] + function(*given, **options)
        for place, factor in zip(places, factors, strict=True):
            given[place] = self._rounded(factor)
        found = function(*given, **options)
        self.log[-1] = (factors, found)
        return found

    def _rounded(self, v: Tensor) -> Tensor:
        return v if self.dtype is None else v.to(self.dtype).to(v.dtype)


class FormStepper(Stepper):
    """A step in one of the forms."""

    def __init__(self, form: str, precision: Precision, model: Dynamics, x: Tensor, nudge: Nudge | None) -> None:
        with products(precision):
            super().__init__(model, model.drive(x), nudge)
        self.form, self.dtype = form, HALVES[precision]
        self.bases: dict[Update, Log] = {}

    def __call__(self, s: State, update: Update = None) -> State:
        if self.form == "deviations" and self.nudge is not None:
            return self._deviation(s, update)
        with Factors(self.dtype):
            new = super().__call__(s, update)
        return tuple(v.to(self.dtype).to(v.dtype) for v in new) if self.form == "states" else new

    def _deviation(self, s: State, update: Update) -> State:
        if update not in self.bases:
            with Factors(None) as exact:
                super().__call__(s, update)
            self.bases[update] = exact.log
        with Factors(self.dtype, self.bases[update]):
            return super().__call__(s, update)


class Polished(Stepper):
    """The last tenth of a free phase in float32."""

    def __init__(self, half: Stepper, exact: Stepper, T: int) -> None:
        self.half, self.exact, self.left, self.last = half, exact, T, T // 10

    def __call__(self, s: State, update: Update = None) -> State:
        self.left -= 1
        return (self.exact if self.left < self.last else self.half)(s, update)


def maker(form: str, precision: Precision) -> StepperMaker:
    def make(model: Dynamics, x: Tensor, nudge: Nudge | None, phase: Phase) -> Stepper:
        half = PreciseStepper(model, x, nudge, precision)
        if form == "results" or (form == "polished" and nudge is not None):
            return half
        if form == "polished":
            return Polished(half, Stepper(model, model.drive(x), None), phase.T)
        return FormStepper(form, precision, model, x, nudge)

    return make


FORMS = ("products", "results", "states", "deviations", "polished")


def measure(say: Callable[[str], None]) -> dict[str, Any]:
    rows = []
    for name, samples in NETS.items():
        one = subject(f"{name}@{samples}")
        problem = one.problem(torch.device("cpu"))
        exact = update_in(_in_float64(problem), one.estimator, "float32")
        single = update_in(problem, one.estimator, "float32")
        rows.append({"net": name, "precision": "float32", "form": "", **_cosines(single, exact)})
        for precision in HALVES:
            for form in FORMS:
                with stepping(maker(form, precision)):  # type: ignore[arg-type]
                    found = update_in(problem, one.estimator, "float32")
                rows.append({"net": name, "precision": precision, "form": form, **_cosines(found, exact)})
                say(str(rows[-1]))
    return {"machine": provenance(torch.device("cpu")), "samples": NETS, "rows": rows}


def _in_float64(problem: Problem) -> Problem:
    model, cost = copy.deepcopy(problem.model).double(), copy.deepcopy(problem.cost).double()
    return Problem(model, cost, problem.x.double(), problem.y.double())


def _cosines(update: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    found = agreements(update, exact)
    whole = found.pop("")
    worst = min(found, key=lambda name: found[name].cosine)
    return {"cosine": whole.cosine, "norm": whole.norm, "worst": worst, "worst_cosine": found[worst].cosine}


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), measure(lambda line: print(line, file=sys.stderr, flush=True)))
