"""A session in the laboratory: does EP compute the gradient of its problem, and why does it not learn?"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from eqprop import papers
from eqprop.cost import Problem
from eqprop.engines.base import Precision
from eqprop.engines.eager import compare_precision, compare_with_float64
from eqprop.estimators import EP, Estimator
from eqprop.estimators.named import nudging_of
from eqprop.gdu import AUTHORS, PAPER, Options, Report
from eqprop.gdu import compare as compare_problem
from eqprop.gdu.verdict import Diagnosis
from eqprop.provenance import provenance
from eqprop.relax import Phase, PhaseForm, relax, threads_for, using_threads
from eqprop.run.dataset import check_same_data, data_again
from eqprop.run.extras import make_optimizer
from eqprop.run.own import Factory, is_own, own_of
from eqprop.run.session import Session, bind
from eqprop.run.spec import Spec

if TYPE_CHECKING:
    from eqprop.gdu.nudging import NudgingTable

FORMAT = 1
"""Of gdu.json."""


@dataclass(frozen=True)
class BoundProblem:
    """What is examined: the problem of a session, or the same with trained weights.

    trained     what the weights come from: estimator, trial and epochs; empty for initial weights
    """

    session: Session
    problem: Problem
    trained: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        return self.session.spec

    @property
    def estimator(self) -> Estimator:
        """The session's without a penalty; where it is no EP but Theorem 1 speaks of it, EP with the same phases."""
        phases, estimator = self.spec.phases, self.session.estimator.plain
        same = EP(phases.T, phases.K, phases.beta, schedule=phases.schedule, stop=phases.stop)
        return estimator if isinstance(estimator, EP) or not estimator.follows_theorem else same

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The session's, of the weights that are examined."""
        if not self.trained:
            return self.session.optimizer
        return make_optimizer(self.spec.override(decay="none"), self.problem.model, self.problem.cost)

    @property
    def threads(self) -> int:
        return self.spec.run.threads or threads_for(self.problem.model, self.problem.x)


class Weights(NamedTuple):
    """Which network of a run: its first estimator's and trial 0 by default."""

    estimator: str | None = None
    trial: int | None = None


def find_problem(
    target: str,
    preset: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    model: Factory | None = None,
    weights: Weights = Weights(),  # noqa: B008
    dtype: torch.dtype | None = None,
    *,
    trains: bool = True,
) -> BoundProblem:
    """The problem of an experiment, a file or your own function, by the session that trains it; or weights of a run.

    settings    by flat name, in place of the target's own
    trains      False for what only looks at gradients (see `bind`)
    """
    # An experiment takes precedence over a folder of the same name; ./toy is always the folder.
    if papers.known_name(target) is None and Path(target).is_dir():
        if preset is not None:
            raise ValueError(f"preset is {preset!r}, but {target} is a run folder, which has its settings. Omit it.")
        return _of_run(Path(target), dict(settings), model, weights, dtype)
    if weights.trial is not None:
        raise ValueError(
            f"trial is {weights.trial}, which chooses a network of a run; {target} is not a run folder. Omit it."
        )
    if "/" in target and not is_own(target) and Path(target).suffix not in papers.READERS:
        raise FileNotFoundError(f"There is no folder {target}. Give a run folder, a file or the name of an experiment.")
    given = {"preset": preset, "estimator": weights.estimator, **settings}
    session = bind(target, model=model, dtype=dtype, trains=trains, **given)
    return BoundProblem(session, session.problem(settings.get("batch")))


def _of_run(
    folder: Path, settings: dict[str, Any], model: Factory | None, weights: Weights, dtype: torch.dtype | None
) -> BoundProblem:
    """Trained weights of a run on its training images."""
    from eqprop.run.description import read_description
    from eqprop.run.evaluate import load

    described, data, trial = read_description(folder), settings.pop("data", None), weights.trial or 0
    own = own_of(model, described.spec.model)
    found = load(folder, weights.estimator, trial, model=own)
    given = data_again(described.data, data, own)
    session = bind(described.spec.override(**settings), given, model=own, dtype=dtype, trains=False)
    check_same_data(session.images, described.data, folder)
    problem = replace(session.problem(settings.get("batch")), model=found.model, cost=found.cost)
    trained = {"estimator": found.estimator, "trial": trial, "epochs": found.epoch}
    return BoundProblem(session, in_dtype(problem, session.dtype), trained)


def in_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same problem in another precision."""
    x, y = (v.to(dtype) if v.is_floating_point() else v for v in (problem.x, problem.y))
    device = problem.x.device
    return Problem(problem.model.to(device, dtype), problem.cost.to(device, dtype), x, y)


def compare(
    subject: BoundProblem, *, drop_unsettled: bool = False, progress: Callable[[float], None] | None = None
) -> tuple[dict[str, Any], Report]:
    """EP against BPTT with the phases of the spec: the document gdu.json, and the report it is made of."""
    spec, of, phases = subject.spec, subject.problem, subject.spec.phases
    options = Options(
        drop_unsettled=drop_unsettled,
        convention=AUTHORS if spec.preset == "gdu-authors" else PAPER,
        seed=spec.run.seed,
        schedule=phases.schedule,
        form=getattr(spec.estimator, "form", "plain"),
        progress=progress,
        voice="command line",
    )
    with using_threads(subject.threads):
        report = compare_problem(of.model, of.cost, of.x, of.y, _free_steps(subject), phases.K, phases.beta, options)
        made_by = provenance(of.x.device)
    found = report.to_dict()
    document = {
        "name": spec.name,
        "preset": spec.preset,
        **{key: found.pop(key) for key in ("T", "K", "beta", "dtype", "schedule")},
        "batch": len(of.x),
        "seed": spec.run.seed,
        "init": spec.model.init,
        "nudge_site": getattr(of.model, "nudge_site", "outside"),
        "cost": spec.cost.kind,
        **({"form": options.form} if options.form != "plain" else {}),
        "drop_unsettled": drop_unsettled,
        **({"trained": dict(subject.trained)} if subject.trained else {}),
        **found,
        "spec": spec.to_dict(),
        "format": FORMAT,
        "provenance": made_by,
    }
    return document, report


def _free_steps(subject: BoundProblem) -> int:
    """T; K where that is longer and the free phase begins at rest, as that of a predictive-coding net does."""
    phases, of = subject.spec.phases, subject.problem
    if phases.T >= phases.K:
        return phases.T
    begun = relax(of.model, of.x, Phase(phases.T, phases.schedule, checked=False))
    return phases.K if bool(begun.settled.all()) else phases.T


def nudging_table(subject: BoundProblem, rules: str) -> NudgingTable:
    """The nudging rules named there, or all, beside the exact gradient at rest, in sweeps where the session's are."""
    from eqprop.gdu.nudging import compare_nudging

    of, chosen = subject.problem, rules if rules == "all" else [rule.strip() for rule in rules.split(",")]
    with using_threads(subject.threads):
        return compare_nudging(of.model, of.cost, of.x, of.y, rules=chosen, schedule=subject.spec.phases.schedule)


def is_same(document: Mapping[str, Any], spec: Spec, dtype: torch.dtype) -> bool:
    """Whether a document is that of this spec, with all samples, so that it can be reused."""
    wanted = {"spec": spec.to_dict(), "dtype": str(dtype).removeprefix("torch."), "drop_unsettled": False}
    found = {key: document.get(key) for key in (*wanted, "format")}
    return json.dumps(found) == json.dumps(
        {**wanted, "format": FORMAT}
    )  # a document that was read has lists for tuples


def lost_in(subject: BoundProblem, precision: Precision) -> dict[str, Any]:
    """How far EP's update in this precision agrees with float32's, and float32's with float64's, by parameter."""
    own, phases = subject.spec.estimator, subject.spec.phases
    nudging, held = nudging_of(own.kind), getattr(own, "held", False)
    form: PhaseForm = getattr(own, "form", "plain")
    of = subject.problem
    problem = in_dtype(replace(of, model=copy.deepcopy(of.model), cost=copy.deepcopy(of.cost)), torch.float32)
    ep = EP(phases.T, phases.K, phases.beta, nudging, schedule=phases.schedule, form=form, held=held, checked=False)
    return {
        "declared": precision,
        "nudging": nudging,
        "form": form,
        "with_float32": {name or "whole": a.to_dict() for name, a in compare_precision(problem, ep, precision).items()},
        "float32_with_float64": {name or "whole": a.to_dict() for name, a in compare_with_float64(problem, ep).items()},
    }


def examine(subject: BoundProblem) -> Diagnosis:
    """Why EP does not learn with what `train` would run: the estimator and learning rates of the session."""
    from eqprop.gdu.doctor import doctor

    of = subject.problem
    with using_threads(subject.threads):
        return doctor(of.model, of.cost, of.x, of.y, subject.estimator, rates=subject.optimizer, voice="command line")
