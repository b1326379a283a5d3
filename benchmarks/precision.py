"""Which form of half precision keeps EP's update, by its cosine with float64.

    python -m benchmarks.precision FILE [--run RUN --cifar10 FOLDER]

Products in float16 or bfloat16 always sum in float32. The forms differ in what else is rounded, and where:

    products    the factors of every product; results float32
    results     the factors and the results: what `eqprop.engines.eager.Products` does, and a GPU does fastest
    states      the factors, and the state after every step
    deviations  the nudged phases: products of W with s - s_free in half, added to those of the free state in float32
    polished    as results, with the last tenth of the free phase in float32
    sums        as results, the update by autodiff of Phi: two sums over the batch, then their difference
    update      as results, with the products of the update in half too

Each row has the cosine of the whole update and of every parameter, at initial weights and, with a run on CIFAR-10
(`eqprop train cifar10-small`), at its initial and trained weights on the first images it was trained on. Half precision
is emulated: the values are those of a GPU up to the order of sums.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.nets import subject
from eqprop import papers
from eqprop.cost import Nudge, Problem
from eqprop.data import cifar10, one_hot
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines.base import Precision
from eqprop.engines.eager import _FACTORS, HALVES, PreciseStepper, agreements, products, update_in
from eqprop.estimators import Estimator
from eqprop.files import write_json
from eqprop.provenance import provenance
from eqprop.relax import Phase, Stepper, StepperMaker, Update, stepping
from eqprop.run import load
from eqprop.run.log import read_metrics
from eqprop.run.session import build_model, make_estimator
from eqprop.state import State

NETS = {"mlp-small": 16, "B-small": 32, "A-small": 8}
"""Nets and samples."""
OF_RUN = 64
"""Samples of a run's net."""

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
        if form in ("results", "sums", "update") or (form == "polished" and nudge is not None):
            return half
        if form == "polished":
            return Polished(half, Stepper(model, model.drive(x), None), phase.T)
        return FormStepper(form, precision, model, x, nudge)

    return make


FORMS = ("products", "results", "states", "deviations", "polished", "sums", "update")


def updating(form: str, precision: Precision, model: Dynamics) -> AbstractContextManager[None]:
    """The form's own way to take the update, where it has one."""
    if form not in ("sums", "update"):
        return nullcontext()
    assert isinstance(model, PrimitiveDynamics), "every subject has a Phi"
    return _Contrast(model, form, precision)


class _Contrast:
    """Replaces a model's contrast for a while."""

    def __init__(self, model: PrimitiveDynamics, form: str, precision: Precision) -> None:
        self.model, self.form, self.precision = model, form, precision

    def __enter__(self) -> None:
        form, precision = self.form, self.precision

        def contrast(model: PrimitiveDynamics, x: Tensor, plus: State, minus: State) -> dict[str, Tensor]:
            if form == "sums":
                return model.autodiff_contrast(x, plus, minus)
            with products(precision):
                return type(model).contrast(model, x, plus, minus)

        self.model.contrast = MethodType(contrast, self.model)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.model.contrast


def in_form(problem: Problem, estimator: Estimator, form: str, precision: Precision) -> dict[str, Tensor]:
    """The update of a problem in one of the forms."""
    with stepping(maker(form, precision)), updating(form, precision, problem.model):
        return update_in(problem, estimator, "float32")


def measure(run: Path | None, cifar: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    rows = []
    for name, samples in NETS.items():
        one = subject(f"{name}@{samples}")
        problem = one.problem(torch.device("cpu"))
        rows += _compare(problem, one.estimator, {"net": name, "weights": "initial", "data": "random"}, say)
    found: dict[str, Any] = {"machine": provenance(torch.device("cpu")), "samples": NETS, "seed": 0, "rows": rows}
    return found if run is None else found | _at_trained_weights(run, cifar, rows, say)


def _at_trained_weights(
    run: Path, cifar: Path | None, rows: list[dict[str, Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    """Add the rows of a run's net, before and after its training; return what to say about it."""
    trained = load(run)
    experiment, last = trained.experiment, read_metrics(run)[-1]
    x, y = _images(cifar, OF_RUN)
    estimator = make_estimator(experiment, trained.estimator)
    untrained = build_model(experiment, experiment.run.seed).to(next(trained.model.parameters()).dtype)
    for model, epoch in ((untrained, 0), (trained.model, trained.epoch)):
        about = {"net": experiment.name, "weights": f"epoch {epoch}", "data": "CIFAR-10"}
        rows += _compare(Problem(model, trained.cost, x, y), estimator, about, say)
    settings = json.loads((run / "experiment.json").read_text())["experiment"]
    return {"run": {"experiment": settings, "samples": OF_RUN, **{k: last[k] for k in ("test_error", "train_error")}}}


def _images(folder: Path | None, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the first images of CIFAR-10's training set."""
    images = cifar10(folder)
    x = images.train_x[:samples].view(-1, *images.shape).float() / 255.0
    normal = papers.find("cifar10-scellier-2023").data.normalisation
    assert normal is not None, "the published experiment normalises"
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (normal.mean, normal.std))
    return (x - mean) / (3.0 * std), one_hot(images.train_y[:samples], images.classes)


def _compare(
    problem: Problem, estimator: Estimator, about: dict[str, Any], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every form and precision at the problem's weights, and float32 itself."""
    exact = update_in(_in_float64(problem), estimator, "float32")
    rows = [{**about, "precision": "float32", "form": "", **_cosines(update_in(problem, estimator, "float32"), exact)}]
    say(_line(rows[0]))
    for precision in HALVES:
        for form in FORMS:
            found = _cosines(in_form(problem, estimator, form, precision), exact)  # type: ignore[arg-type]
            rows.append({**about, "precision": precision, "form": form, **found})
            say(_line(rows[-1]))
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['net']} {row['weights']} {row['precision']} {row['form']}: cosine {row['cosine']:.4f}, "
        f"{row['worst']} {row['worst_cosine']:.4f}"
    )


def _in_float64(problem: Problem) -> Problem:
    model, cost = copy.deepcopy(problem.model).double(), copy.deepcopy(problem.cost).double()
    return Problem(model, cost, problem.x.double(), problem.y.double())


def _cosines(update: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    found = agreements(update, exact)
    whole = found.pop("")
    worst = min(found, key=lambda name: found[name].cosine)
    return {
        "cosine": whole.cosine,
        "norm": whole.norm,
        "worst": worst,
        "worst_cosine": found[worst].cosine,
        "parameters": {name: one.cosine for name, one in found.items()},
    }


def cells(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row per net, weights and precision, a column per form: the whole update's cosine and the lowest parameter's."""
    rows = document["rows"]
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["form"]:
            pair = f"{row['cosine']:.4f}, {row['worst_cosine']:.2f}"
            lines.setdefault((row["net"], row["weights"], row["precision"]), []).append(pair)
    return ["net", "weights", "precision", *FORMS], [[*names, *found] for names, found in lines.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--run", type=Path, metavar="RUN")
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    found = measure(given.run, given.cifar10, lambda line: print(line, file=sys.stderr, flush=True))
    write_json(given.file, found)


if __name__ == "__main__":
    main()
