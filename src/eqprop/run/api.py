"""`train` and `resume`: run an experiment, or continue a run, and return its result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from eqprop.data import Data, Images, Streamed, open_set
from eqprop.engines import using_threads
from eqprop.experiments.architecture import Factory, Own, as_own, own_of
from eqprop.experiments.experiment import Experiment
from eqprop.experiments.io import find_experiment, find_own, to_dict, up_to_date
from eqprop.experiments.paper import RUN_WITH
from eqprop.files import write_bytes, write_json
from eqprop.messages import unknown
from eqprop.provenance import __version__, commit, provenance
from eqprop.run.distributed import Ranks, check_divides, check_same, join, restarts, to_join
from eqprop.run.extras import augmented_picture, image_shape
from eqprop.run.folder import (
    AUGMENTED,
    EXPERIMENT,
    RESULT,
    default_folder,
    is_run,
    last_session,
    locked_by_first,
    prepare_new,
    saving,
)
from eqprop.run.loop import Interruption, Loop, Turn
from eqprop.run.metrics import Result, summarise
from eqprop.run.plan import (
    TARGETS,
    Plan,
    Settings,
    data_again,
    describe,
    given_data,
    identity,
    make_plan,
    read_description,
    read_images,
    split_estimators,
    under_own_name,
    where_from,
)
from eqprop.run.watch import Watch, as_watch, steady

CONTINUAL = "ep-continual"


def known_ratio() -> float:
    """The largest rate / beta of a published experiment that learns with continual EP."""
    from eqprop.experiments.literature import EXPERIMENTS

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


RESUMABLE = (
    *("engine", "device", "threads", "checkpoint_every", "keep_best", "keep_every", "states", "precision", "epochs"),
)
"""Settings that may change on resume: those of the machine, the precision, which the metrics name, and more epochs."""


def train(
    experiment: str | Path | Experiment | Factory,
    out: str | Path | None = None,
    *,
    data: Data = None,
    model: Factory | None = None,
    watch: Watch | str | None = None,
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
    watch       receives progress and warnings (see `eqprop.run.watch`): "lines" prints a line per epoch; silent
                by default
    only        train only these estimators now; `resume` trains the others
    options     any field of `Settings` (estimators, trials, engine, device, ...) or of `Experiment` (T, K, beta,
                epochs, batch, learning_rates, ...), and `preset` to choose among the experiments of that name

    Ctrl-C finishes the iteration, saves, and raises `Stopped`; `resume` continues the run. Called in every process of a
    torchrun job, it divides each mini-batch among them; restarted by torchrun, it continues its run.
    """
    watch = as_watch(watch)
    found, own = find_own(experiment, model)
    folder = None if out is None else Path(out)
    # Before joining: a rank that ends while another is still joining would only be seen as lost.
    if folder is None and (size := to_join().size) > 1:
        raise ValueError(f"{size} ranks need a run folder that all of them see. Give it with --out, or out=.")
    if folder is not None and all(join().largest([restarts(), is_run(folder)])):
        # torchrun started this command again, here or on another machine: its own run is continued.
        chosen = resolve(found, options)[0]
        return begin_or_resume(chosen, folder, data=data, model=own, watch=watch, only=only, **options)
    with _started(found, own, folder, Request(data, only, options)) as opened:
        return _work(opened, watch)


@dataclass(frozen=True)
class Request:
    """What is asked of a run: its data, the estimators to train now, and the options of `train` or `resume`."""

    data: Data = None
    only: Sequence[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Opened:
    """A run whose folder rank 0 has locked.

    recorded    settings of a run that is resumed: where nothing is left to train, its result stays as they say
    problems    what the user should read first
    """

    plan: Plan
    folder: Path
    turn: Turn
    recorded: Settings | None = None
    problems: tuple[str, ...] = ()


@contextmanager
def _started(found: Any, own: Own | None, out: Path | None, asked: Request) -> Iterator[Opened]:
    """A new run, its folder made and its experiment written."""
    chosen, settings = resolve(found, asked.options)
    ranks = join()
    with ranks.in_step(), using_threads(settings.threads):
        settings = replace(settings, device=ranks.device(settings.device))
        own_data = own.data() if asked.data is None and own is not None else asked.data
        given = given_data(chosen.data if own_data is None else own_data)
        plan = make_plan(chosen, settings, read_images(given, settings), own, where_from(given), ranks)
    plan = _agreed(plan, ranks)
    only = _named(asked.only, plan.settings)
    with using_threads(plan.settings.threads):
        folder = default_folder(plan.experiment.name) if out is None else out
        with ranks.in_step():
            if ranks.leads:
                prepare_new(folder)
        with locked_by_first(folder, ranks):
            with ranks.in_step():
                if ranks.leads:
                    _write(folder, EXPERIMENT, plan.to_dict())
                    _write_picture(folder, plan)
            problems = (continual_warning(plan), None if asked.data is not None else no_test_set(own))
            said = tuple(problem for problem in problems if problem is not None)
            yield Opened(plan, folder, Turn(only=only), problems=said)


def _named(only: str | Sequence[str] | None, settings: Settings) -> tuple[str, ...] | None:
    """The estimators to train now, None for all; each one of the run's."""
    if only is None:
        return None
    names = split_estimators(only)
    strange = next((name for name in names if name not in settings.estimators), None)
    if strange is not None:
        raise ValueError(unknown("estimator", strange, settings.estimators))
    return names


def _agreed(plan: Plan, ranks: Ranks) -> Plan:
    """The plan, with the identity that rank 0 writes. Raises on every rank if one has other settings or versions."""
    if not ranks.several:
        return plan
    machine = ("device", "threads")
    check_same(
        ranks,
        {
            "eqprop": f"{__version__} {commit() or ''}".strip(),
            "torch": torch.__version__,
            "experiment": to_dict(plan.experiment),
            "settings": {name: v for name, v in asdict(plan.settings).items() if name not in machine},
            "data": {name: v for name, v in describe(plan.images).items() if name != "name"},
        },
    )
    return replace(plan, identity=ranks.text_of_first(plan.identity))


def resume(
    folder: str | Path,
    *,
    data: Data = None,
    model: Factory | None = None,
    watch: Watch | str | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Continue a run from its last checkpoint; for a finished run, just return its result.

    data        where the data is now, if it has moved; it must be the same data
    model       the function that built your own network
    only        continue only these estimators
    options     engine, device or threads, if this machine needs others. With the recorded ones, a run on the CPU
                ends bit for bit as if it had never been stopped. precision, for the epochs to come. epochs, to
                train longer: refused where the rates fall over all epochs, and so depend on their number.
    """
    watch = as_watch(watch)
    with _continued(Path(folder), model, Request(data, only, options)) as opened:
        return _work(opened, watch)


@contextmanager
def _continued(folder: Path, model: Factory | None, asked: Request) -> Iterator[Opened]:
    """A run that is resumed, with its data read again."""
    ranks = join()
    with ranks.in_step():
        described = read_description(folder)
    settings = described.settings
    only = _named(asked.only, settings)
    strange = next((name for name in asked.options if name not in RESUMABLE), None)
    if strange is not None:
        raise ValueError(
            f"{strange} cannot be changed on resume; a run keeps its settings except {', '.join(RESUMABLE)}. "
            "Start a new run for another setting."
        )
    changed = {k: v for k, v in asked.options.items() if v is not None}
    epochs = changed.pop("epochs", None)
    longer = epochs is not None and epochs != described.experiment.epochs
    if longer:
        described = described.lengthened(epochs)
    experiment = described.experiment.override(precision=changed.pop("precision", described.experiment.precision))
    here = replace(settings, **changed)
    # Keep the engine the run started with, unless it moves to a device that engine may not support.
    moved = "auto" if torch.device(here.device).type != torch.device(settings.device).type else None
    if not ranks.several and here.device != settings.device:
        moved = "auto"
    if experiment.precision != described.experiment.precision:
        moved = "auto"
    here = replace(here, device=ranks.device(here.device))
    with using_threads(here.threads), locked_by_first(folder, ranks):
        with ranks.in_step():
            own = own_of(model, described.experiment.architecture)
            given = data_again(described, asked.data, own)
            if asked.data is not None and "fingerprint" in described.data and isinstance(given, str | Path):
                given = given_data(open_set(given))
            images = read_images(given, here)
            _check_same_data(images, described.data, folder)
            source = described.data.get("set") or described.data.get("directory")
            check_divides(described.experiment.batch, ranks.size)
            plan = Plan(experiment, here, images, own, identity(described.content), source, ranks)
        plan = _agreed(plan, ranks)
        with ranks.in_step():
            if longer and ranks.leads:
                _write(folder, EXPERIMENT, described.content)
        turn = Turn(asked.options.get("engine") or moved, only, described.earlier_epochs)
        yield Opened(plan, folder, turn, settings)


def begin_or_resume(
    experiment: Experiment,
    folder: Path,
    *,
    model: Factory | None = None,
    watch: Watch | str | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Resume the run in the folder, or start it there. Raises if the folder holds a run with other settings."""
    asked = Request(options.pop("data", None), only, options)
    with _begun(experiment, folder, as_own(model), asked) as opened:
        return _work(opened, as_watch(watch))


@contextmanager
def _begun(experiment: Experiment, folder: Path, own: Own | None, asked: Request) -> Iterator[Opened]:
    if not join().largest([float(is_run(folder))])[0]:
        with _started(experiment, own, folder, asked) as opened:
            yield opened
        return
    with join().in_step():
        machine = _check_same_run(experiment, folder, own, asked.options)
    with _continued(folder, own, Request(asked.data, asked.only, machine)) as opened:
        yield opened


def _check_same_run(
    experiment: Experiment, folder: Path, own: Own | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Raise unless the folder's run has these settings; return those of the machine."""
    wanted, settings = resolve(experiment, options)
    wanted = under_own_name(wanted, own)
    described = read_description(folder)
    there, recorded = described.experiment, described.settings
    if own is not None:  # its network declares it
        wanted = replace(wanted, nudge_site=there.nudge_site)
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
    return {name: options[name] for name in RESUMABLE if options.get(name) is not None}


def resolve(experiment: str | Path | Experiment, options: Mapping[str, Any]) -> tuple[Experiment, Settings]:
    """Split options into experiment and settings; the preset defaults to "paper"."""
    given = up_to_date({name: value for name, value in options.items() if value is not None})
    chosen = find_experiment(experiment, given.pop("preset", "paper"))
    # Held-out samples replace the test set, all of them.
    usual = {
        k: v for k, v in RUN_WITH.get(chosen.name, {}).items() if k != "test_samples" or not given.get("validation")
    }
    given = {**usual, **given}
    if "estimators" in given and "estimator" in given:
        raise ValueError("Give estimators or estimator, not both: they are two names for one option.")
    asked = given.pop("estimators", None) or given.pop("estimator", None)
    estimators = split_estimators(asked or ()) or (chosen.estimator,)
    in_settings = [f.name for f in fields(Settings)]
    known = [*in_settings, *(f.name for f in fields(Experiment))]
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ValueError(unknown("option", strange, known))
    settings = Settings(estimators, **{name: value for name, value in given.items() if name in in_settings})
    return chosen.override(**{name: v for name, v in given.items() if name not in in_settings}), settings


def _work(opened: Opened, watch: Watch) -> Result:
    """Train every unfinished leg, with graceful shutdown on signals; write the result."""
    plan, folder, ranks = opened.plan, opened.folder, opened.plan.ranks
    watch = steady(watch) if ranks.leads else Watch()
    for problem in opened.problems:
        watch.warn(problem)
    session = _session(opened, watch)
    with Interruption() as interruption:
        loop = Loop(plan, folder, watch, interruption)
        watch.begin(plan, folder)
        try:
            loop.run(session, opened.turn)
        finally:
            watch.end()
    trained = bool(session["engines"])
    shown = plan if opened.recorded is None or trained else replace(plan, settings=opened.recorded)
    summary = summarise(shown, loop.log.lines, loop.reached)
    with ranks.in_step():
        if ranks.leads:
            _write(folder, RESULT, summary)
    return Result(folder, summary)


def _session(opened: Opened, watch: Watch) -> dict[str, Any]:
    plan = opened.plan
    more: dict[str, Any] = {"ranks": plan.ranks.size} if plan.ranks.several else {}
    if plan.experiment.precision != "float32":
        more["precision"] = plan.experiment.precision
    found = {"provenance": provenance(plan.settings.device) | more, "engines": {}}
    _warn_other_machine(last_session(opened.folder), found["provenance"], watch)
    return found


def _write_picture(folder: Path, plan: Plan) -> None:
    """Show what augmentation does to the training images, for the report."""
    augmentation, images = plan.experiment.augmentation, plan.images
    if augmentation is None or not augmentation.active:
        return
    sixteen = plan.first(min(16, images.train_samples))[0]
    picture = augmented_picture(augmentation, sixteen, image_shape(images.shape), plan.experiment.seed)
    if picture is not None:
        with saving(folder):
            write_bytes(folder / AUGMENTED, picture, parents=False)


def _write(folder: Path, name: str, content: object) -> None:
    with saving(folder):
        write_json(folder / name, content, parents=False)


def _check_same_data(images: Images | Streamed, recorded: Mapping[str, Any], folder: Path) -> None:
    got = describe(images)
    # Runs of data that was read from files have no fingerprint of the tensors; their sha256 is that of the files.
    may_lack = ("fingerprint", TARGETS)
    compared = [
        key for key in got if key not in ("name", "class_names") and not (key in may_lack and key not in recorded)
    ]
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
