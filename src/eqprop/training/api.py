"""`train` and `resume`: run an experiment, or continue a run, and return its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from eqprop.data import Data, Images
from eqprop.engines import using_threads
from eqprop.experiments.architecture import Factory, Own, as_own, own_of
from eqprop.experiments.experiment import Experiment
from eqprop.experiments.io import find_experiment, find_own, up_to_date
from eqprop.experiments.paper import EXPERIMENTS
from eqprop.files import write_json
from eqprop.messages import unknown
from eqprop.provenance import provenance
from eqprop.training.folder import (
    EXPERIMENT,
    RESULT,
    Held,
    default_folder,
    is_run,
    last_session,
    locked,
    prepare_new,
)
from eqprop.training.loop import Interruption, Loop, Turn
from eqprop.training.metrics import Result, summarise
from eqprop.training.plan import (
    Plan,
    Settings,
    data_again,
    describe,
    given_data,
    identity,
    make_plan,
    named_estimators,
    read_description,
    read_images,
    under_own_name,
    where_from,
)
from eqprop.training.watch import Steady, Watch

CONTINUAL = "ep-continual"


def known_ratio() -> float:
    """The largest rate / beta of a published experiment that learns with continual EP."""
    known = [e for preset in EXPERIMENTS.values() for e in preset.values() if e.estimator == CONTINUAL]
    return max(_ratio(experiment) for experiment in known)


def _ratio(experiment: Experiment) -> float:
    """The largest rate / beta of the network: what a step of the second phase moves its parameters by."""
    rates = [rate for name, rate in experiment.learning_rates.items() if name not in experiment.readout_names]
    return max(rates, default=0.0) / abs(experiment.beta)


def continual_warning(plan: Plan) -> str | None:
    """A warning if the parameters move faster during the second phase than is known to work, else None."""
    if CONTINUAL not in plan.settings.estimators:
        return None
    found, known = _ratio(plan.experiment), known_ratio()
    if found <= known:
        return None
    factor = found / known
    return (
        f"continual EP moves the parameters by rate / beta at each step of the second phase, here {found:.2g}, "
        f"{factor:.2g} times the largest known to work ({known:.2g}, continual-ep-1h). It may not learn: divide the "
        f"learning rates by {math.ceil(factor)}, or begin with continual-ep-1h or continual-ep-2h."
    )


def no_test_set(own: Own | None) -> str | None:
    """A warning if errors are measured on the training samples, else None."""
    if own is None or own.build(0).x is None:
        return None
    return (
        f"{own.name} gives samples x and y but no test set, so the test error is that of the training samples. Return "
        "model, cost, (x, y, x_test, y_test), or hold some out with --validation N."
    )


RESUMABLE = ("engine", "device", "threads", "checkpoint_every", "keep_best", "keep_every", "states")
"""Settings that may change on resume: those of the machine, not of the experiment."""


def train(
    experiment: str | Path | Experiment | Factory,
    out: str | Path | None = None,
    *,
    data: Data = None,
    model: Factory | None = None,
    watch: Watch | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Train an experiment, given by name, as a TOML file or as an `Experiment`, in a new run folder.

    It may also be your own function, or FILE.py:FUNCTION (see `eqprop.experiments.architecture.Own`), which then gives
    the network, its cost and its data; T, K, learning_rates and the like are options.

    out         the run folder; by default runs/NAME-DATE-TIME
    data        "mnist" (also None), "fashion-mnist" or "kmnist", a directory of IDX files, an .npz file, or your own:
                (x, y, x_test, y_test) as arrays or tensors, a dictionary of these, or (train, test) with two Datasets
                or DataLoaders (see `eqprop.data.from_arrays`)
    model       your own function, to train its network with the settings of an experiment
    watch       receives progress and warnings (see `eqprop.training.watch`); silent by default
    only        train only these estimators now; `resume` trains the others
    options     any field of `Settings` (estimators, trials, engine, device, ...) or of `Experiment` (T, K, beta,
                epochs, batch, learning_rates, ...), and `preset` to choose among the experiments of that name

    Ctrl-C finishes the iteration, saves, and raises `Stopped`; `resume` continues the run.
    """
    found, own = find_own(experiment, model)
    chosen, settings = resolve(found, options)
    with using_threads(settings.threads):
        given = given_data(own.data() if data is None and own is not None else data)
        plan = make_plan(chosen, settings, read_images(given, settings), own, where_from(given))
    with using_threads(plan.settings.threads):
        folder = default_folder(plan.experiment.name) if out is None else Path(out)
        prepare_new(folder)
        with locked(folder) as held:
            _write(held, EXPERIMENT, plan.to_dict())
            watching = watch or Watch()
            for problem in (continual_warning(plan), None if data is not None else no_test_set(own)):
                if problem is not None:
                    watching.warn(problem)
            return _work(plan, held, watching, Turn(only=only))


def resume(
    folder: str | Path,
    *,
    data: Data = None,
    model: Factory | None = None,
    watch: Watch | None = None,
    only: Sequence[str] | None = None,
    restart: bool = False,
    **options: Any,
) -> Result:
    """Continue a run from its last checkpoint; for a finished run, just return its result.

    data        where the data is now, if it has moved; it must be the same data
    model       the function that built your own network
    only        continue only these estimators
    restart     train estimators again whose checkpoint is lost or damaged, instead of raising; what is left of them is
                kept in ESTIMATOR.old
    options     engine, device or threads, if this machine needs others. With the recorded ones, a run on the CPU
                ends bit for bit as if it had never been stopped.
    """
    folder = Path(folder)
    described = read_description(folder)
    settings = described.settings
    strange = next((name for name in options if name not in RESUMABLE), None)
    if strange is not None:
        raise ValueError(
            f"{strange} cannot be changed on resume; a run keeps its settings except {', '.join(RESUMABLE)}. "
            "Start a new run for another setting."
        )
    here = replace(settings, **{k: v for k, v in options.items() if v is not None})
    with using_threads(here.threads), locked(folder) as held:
        own = own_of(model, described.experiment.architecture)
        images = read_images(data_again(described, data, own), here)
        _check_same_data(images, described.data, folder)
        source = described.data.get("set") or described.data.get("directory")
        plan = Plan(described.experiment, here, images, own, identity(described.content), source, described.old)
        # Keep the engine the run started with, unless it moves to a device that engine may not support.
        moved = "auto" if here.device != settings.device else None
        turn = Turn(options.get("engine") or moved, only, restart)
        return _work(plan, held, watch or Watch(), turn, settings)


def begin_or_resume(
    experiment: Experiment,
    folder: Path,
    *,
    model: Factory | None = None,
    watch: Watch | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Resume the run in the folder, or start it there. Raises if the folder holds a run with other settings."""
    if not is_run(folder):
        return train(experiment, folder, model=model, watch=watch, only=only, **options)
    machine = {name: options[name] for name in RESUMABLE if options.get(name) is not None}
    wanted, settings = resolve(experiment, {k: v for k, v in options.items() if k != "data"})
    wanted = under_own_name(wanted, as_own(model))
    described = read_description(folder)
    there, recorded = described.experiment, described.settings
    other = [str(change) for change in wanted.changes(there)]
    other += [
        f"{f.name} {getattr(settings, f.name)} instead of {getattr(recorded, f.name)}"
        for f in fields(Settings)
        if f.name not in (*RESUMABLE, "stacked") and getattr(settings, f.name) != getattr(recorded, f.name)
    ]
    if other or wanted.seed != there.seed:
        other = other or [f"seed {wanted.seed} instead of {there.seed}"]
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(other)}). Use its settings, or choose another --out."
        )
    return resume(folder, data=options.get("data"), model=model, watch=watch, only=only, **machine)


def resolve(experiment: str | Path | Experiment, options: Mapping[str, Any]) -> tuple[Experiment, Settings]:
    """Split options into experiment and settings; the preset defaults to "paper"."""
    given = up_to_date({name: value for name, value in options.items() if value is not None})
    chosen = find_experiment(experiment, given.pop("preset", "paper"))
    if "estimators" in given and "estimator" in given:
        raise ValueError("Give estimators or estimator, not both: they are two names for one option.")
    asked = given.pop("estimators", None) or given.pop("estimator", None)
    estimators = named_estimators(asked, given.pop("methods", None), chosen)
    in_settings = [f.name for f in fields(Settings)]
    known = [*in_settings, *(f.name for f in fields(Experiment))]
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ValueError(unknown("option", strange, known))
    settings = Settings(estimators, **{name: value for name, value in given.items() if name in in_settings})
    return chosen.override(**{name: v for name, v in given.items() if name not in in_settings}), settings


def _work(plan: Plan, held: Held, watch: Watch, turn: Turn, recorded: Settings | None = None) -> Result:
    """Train every unfinished leg, with graceful shutdown on signals; write the result.

    `recorded` are the settings of a run that is resumed: where nothing is left to train, its result stays as they say.
    """
    folder, watch = held.folder, Steady(watch)
    session = {"provenance": provenance(plan.settings.device), "engines": {}}
    _warn_other_machine(last_session(folder), session["provenance"], watch)
    with Interruption() as interruption:
        loop = Loop(plan, held, watch, interruption)
        watch.begin(plan, folder)
        try:
            loop.run(session, turn)
        finally:
            watch.end()
    shown = plan if recorded is None or session["engines"] else replace(plan, settings=recorded)
    summary = summarise(shown, folder)
    _write(held, RESULT, summary)
    return Result(folder, summary)


def _write(held: Held, name: str, content: object) -> None:
    with held.writing():
        write_json(held.folder / name, content, parents=False)


def _check_same_data(images: Images, recorded: Mapping[str, Any], folder: Path) -> None:
    got = describe(images)
    # Runs of data that was read from files have no fingerprint of the tensors; their sha256 is that of the files.
    compared = [key for key in got if key != "name" and not (key == "fingerprint" and key not in recorded)]
    differing = [key for key in compared if recorded.get(key) != got[key]]
    if differing:
        key = differing[0]
        raise ValueError(
            f"{folder} was trained on other data: {key} was {recorded.get(key)} ({recorded.get('name')}), now "
            f"{got[key]} ({got['name']}). Give the same data with --data, or data= in Python."
        )


def _warn_other_machine(before: Mapping[str, Any] | None, now: Mapping[str, Any], watch: Watch) -> None:
    """Warn about what differs: bits are only guaranteed on the same machine, versions and threads."""
    if before is None:
        return
    then = before["provenance"]
    names = ("eqprop", "torch", "processor", "threads", "device")
    other = [f"{name} {then.get(name)} -> {now[name]}" for name in names if then.get(name) != now[name]]
    if other:
        watch.warn(
            f"the environment has changed ({'; '.join(other)}); results may differ slightly from an uninterrupted run."
        )
