"""Random models of a user's own: every estimator in every schedule against loops over the model's own functions.

    python tests/campaigns/own_gradients.py --models 500 --seed 2026 --out results/own-gradients.json

A loop knows Phi (or F), squash and project as the model defines them, and differentiates copies of the state: nothing
of the library's own stepping, unrolling or contrasts. A model counts as refused if any estimator refuses it; those
that are not analytic (a clamp, a sort, a softmax of real numbers), which holomorphic EP refuses, are counted apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from helpers.own_nets import own_model  # noqa: E402
from helpers.written_out import ESTIMATORS, Layers, Net, Task, Theta  # noqa: E402

from eqprop import Dynamics, PrimitiveDynamics, SquaredError  # noqa: E402
from eqprop.provenance import provenance  # noqa: E402
from eqprop.relax import SCHEDULES, Schedule  # noqa: E402

SAME = 1e-8
"""The largest difference, relative to the largest number of the gradient: other orders of sums in float64, which some
of the models (sorting, cosine similarity) magnify."""


class Called(nn.Module):
    """A function of a model as a module, so that it can be called with other parameters."""

    def __init__(self, model: Dynamics, function: str) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *values: Any) -> Any:
        return getattr(self.model, self.function)(*values)


def called(model: Dynamics, function: str) -> Callable[..., Any]:
    module = Called(model, function)

    def run(theta: Theta, *values: Any) -> Any:
        return functional_call(module, {f"model.{name}": v for name, v in theta.items()}, values)

    return run


class ModelNet(Net):
    """The formulas of a model, taken from its functions."""

    def step(self, x: Tensor, s: Layers, theta: Theta, push: Tensor | None = None) -> Layers:
        new = list(self.slope(x, s, theta))
        model = self.model
        if not isinstance(model, PrimitiveDynamics):
            return (new[0] if push is None else new[0] + push, *new[1:])
        inside = model.nudge_site == "inside"
        if push is not None and inside:
            new[0] = new[0] + push
        new = list(called(model, "squash")(theta, tuple(new)))
        if push is not None and not inside:
            new[0] = new[0] + push
        return tuple(called(model, "project")(theta, tuple(new)))


def net_of(model: Dynamics, x: Tensor) -> Net:
    """The model's formulas: Phi differentiated at a copy of the state, or F."""
    layers = len(model.init_state(x))
    groups = model.sweep(layers)
    if not isinstance(model, PrimitiveDynamics):
        transition = called(model, "transition")
        return ModelNet(model, lambda x, s, theta: transition(theta, x, s), None, groups, eps=model.nudge_scale)
    primitive = called(model, "primitive")

    def slope(x: Tensor, s: Layers, theta: Theta) -> Layers:
        with torch.enable_grad():
            copies = tuple(v.view_as(v) if v.requires_grad else v.detach().requires_grad_() for v in s)
            value = primitive(theta, x, copies)
            ones = torch.ones_like(value)  # complex states have a complex derivative: torch's is its conjugate
            found = torch.autograd.grad(
                value, copies, ones, create_graph=True, allow_unused=True, materialize_grads=True
            )
            found = tuple(v.conj().resolve_conj() if v.is_complex() else v for v in found)
        return found if torch.is_grad_enabled() else tuple(v.detach() for v in found)

    return ModelNet(model, slope, lambda x, s, theta: primitive(theta, x, s), groups, eps=model.nudge_scale)


def difference(task: Task, estimator: str, schedule: Schedule) -> float:
    """The largest relative difference between the estimator's gradient and the loop's."""
    make, loop = ESTIMATORS[estimator]
    chosen, model = make(schedule=schedule), task.net.model
    _, grads = chosen.gradient(model, SquaredError(), task.x, task.y)
    theirs = loop(task, chosen)
    ours = {name: grads[p] for name, p in model.named_parameters() if p in grads}
    if ours.keys() != theirs.keys():
        return float("inf")
    size = max(float(g.abs().max()) for g in theirs.values())
    return max(float((ours[n] - g).abs().max()) for n, g in theirs.items()) / max(size, 1e-300)


def schedules(model: Dynamics) -> Sequence[Schedule]:
    return [schedule for schedule in SCHEDULES if schedule != "alternating" or getattr(model, "bipartite", False)]


def examine(seed: int) -> tuple[str, dict[str, float], dict[str, str]]:
    """What model a seed gives; differences and refusals by estimator and schedule."""
    model, _, x, y, title = own_model(seed)
    task, apart, refused = Task(net_of(model, x), x, y), {}, {}
    for estimator in ESTIMATORS:
        for schedule in schedules(model):
            case = f"{estimator}, {schedule}"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    apart[case] = difference(task, estimator, schedule)
            except (ValueError, RuntimeError, TypeError, NotImplementedError, ArithmeticError) as error:
                refused[case] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return title, apart, refused


def campaign(models: int, seed: int, keep: Callable[[dict[str, Any]], None] = lambda found: None) -> dict[str, Any]:
    """Examine models from consecutive seeds; `keep` gets what is known after every tenth."""
    started, wrong, causes = time.process_time(), {}, Counter[str]()
    refused_models = not_analytic = cases = 0
    worst = 0.0

    def summary(examined: int) -> dict[str, Any]:
        return {
            "models": examined,
            "seed": seed,
            "cases": cases,
            "tolerance": SAME,
            "largest_difference": worst,
            "differing": wrong,
            "not_analytic_for_holomorphic_EP": not_analytic,
            "models_with_another_refusal": refused_models,
            "refusals": dict(causes),
            "cpu_seconds": round(time.process_time() - started, 1),
            "environment": provenance(),
        }

    for n in range(seed, seed + models):
        title, apart, refused = examine(n)
        cases += len(apart)
        finite = [v for v in apart.values() if v == v]
        worst = max([worst, *(v for v in finite if v <= SAME)])
        wrong |= {f"{n} ({title}): {case}": v for case, v in apart.items() if not v <= SAME}
        complex_states = [case for case in refused if case.startswith("holomorphic")]
        not_analytic += bool(complex_states)
        others = {case: why for case, why in refused.items() if case not in complex_states}
        causes.update(others.values())
        refused_models += bool(others)
        if (n - seed) % 10 == 9:
            keep(summary(n - seed + 1))
    return summary(models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)

    def keep(found: dict[str, Any]) -> None:
        if options.out:
            options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    found = campaign(options.models, options.seed, keep)
    keep(found)
    print(json.dumps(found, indent=2))
    sys.exit(bool(found["differing"]))


if __name__ == "__main__":
    main()
