"""`train` and `resume`: from a record or a folder to a result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from eqprop.data import Images, one_hot
from eqprop.data.images import epoch_order
from eqprop.estimators import EP, ContinualEP
from eqprop.experiments.architecture import Factory
from eqprop.experiments.experiment import Record
from eqprop.experiments.io import find_record
from eqprop.files import write_json
from eqprop.messages import unknown
from eqprop.provenance import provenance
from eqprop.training.folder import (
    RECORD,
    RESULT,
    default_folder,
    explain_full_disk,
    is_run,
    last_session,
    locked,
    prepare_new,
)
from eqprop.training.loop import Interruption, Loop
from eqprop.training.metrics import Result, summarise
from eqprop.training.plan import (
    Plan,
    Settings,
    describe,
    make_plan,
    read_images,
    read_plan,
    recorded_source,
    run_digest,
    split_methods,
    where_from,
)
from eqprop.training.watch import Watch

TOO_FAR = 0.5
"""The distance to EP's gradient, beside its length, from which a continual gradient is no longer like it."""


def drift(plan: Plan) -> float:
    """How far continual EP's gradient is from EP's on the first mini-batch of trial 0, beside the length of EP's."""
    record, images = plan.record, plan.images
    model = plan.network((0,))
    rows = epoch_order(record.seed, 0, len(images.train_x), record.batch)[0].to(images.train_x.device)
    x, y = plan.inputs(images.train_x[rows], model), one_hot(images.train_y[rows], images.classes, plan.dtype)
    moving = plan.estimator("ep", model)
    assert isinstance(moving, ContinualEP), "asked of continual EP only"
    still = EP(moving.T, moving.K, moving.schedule, moving.stop, checked=False, beta=moving.beta)
    cost = plan.cost(model)
    free, expected = still.gradient(model, cost, x, y)
    _, found = ContinualEP(0, moving.K, checked=False, beta=moving.beta, rates=moving.rates).gradient(
        model, cost, x, y, free.state
    )
    away = sum(float((found[p] - g).square().sum()) for p, g in expected.items())
    length = sum(float(g.square().sum()) for g in expected.values())
    return float((away / length) ** 0.5) if length else 0.0


def continual_warning(plan: Plan) -> str | None:
    """What to say of a run whose parameters move too fast during the second phase; None for every other."""
    if plan.record.estimator != "continual" or "ep" not in plan.settings.methods:
        return None
    far = drift(plan)
    if far <= TOO_FAR:
        return None
    how = f"is {far:.2g} times the length of EP's away from it" if math.isfinite(far) else "is not finite"
    return (
        "continual EP is far from EP at these learning rates: on the first mini-batch its gradient "
        f"{how}. The parameters move too fast during the second phase. Lower the rates (--lr), or raise beta."
    )


Data = Images | str | Path | None

RESUMABLE = ("engine", "device", "threads", "checkpoint_every", "states")
"""The settings a run may go on with otherwise: those of the machine, not of the experiment."""


def train(
    record: str | Path | Record,
    out: str | Path | None = None,
    *,
    data: Data = None,
    model: Factory | None = None,
    watch: Watch | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Train a record, by name, from a TOML file or as it is, in a new run folder.

    out         the run folder; by default runs/NAME-DATE-TIME
    data        "mnist" (also None), "fashion-mnist" or "kmnist", a directory of IDX files, or an `eqprop.data.Images`
    model       a function seed -> network, for a network of one's own
    watch       is told how it goes (see `eqprop.training.watch`); by default nobody is
    only        train these of the methods now and leave the others to `resume`
    options     any field of `Settings` (methods, trials, engine, device, ...) or of `Record` (T, K, beta, epochs,
                batch, learning_rates, ...), and `preset` to choose among the records of that name

    Ctrl-C finishes the iteration, saves, and raises `Stopped`; `resume` goes on.
    """
    chosen, settings = resolve(record, options)
    settings = replace(settings, threads=settings.threads or torch.get_num_threads())
    with _threads(settings):
        plan = make_plan(chosen, settings, read_images(data, settings), model, where_from(data))
        folder = default_folder(chosen.name) if out is None else Path(out)
        prepare_new(folder)
        with locked(folder):
            _write(folder / RECORD, plan.plain(), folder)
            told = watch or Watch()
            if (problem := continual_warning(plan)) is not None:
                told.warn(problem)
            return _work(plan, folder, told, Turn(only=only))


def resume(
    folder: str | Path,
    *,
    data: Data = None,
    model: Factory | None = None,
    watch: Watch | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Go on with a run where its last checkpoint is; a finished run just gives its result.

    data        where the data is now, if it is not where it was; it must be the same data
    model       the function a network of one's own was built with
    only        go on with these of the methods and leave the others
    options     engine, device or threads, where this machine has others. Only with the recorded ones does a run
                on the CPU end bit for bit as if it had never been stopped.
    """
    folder = Path(folder)
    record, settings, plain = read_plan(folder)
    strange = next((name for name in options if name not in RESUMABLE), None)
    if strange is not None:
        raise ValueError(
            f"A run goes on with its own settings; {strange} cannot be given anew, only {', '.join(RESUMABLE)}. "
            "Start a new run for another setting."
        )
    here = replace(settings, **{k: v for k, v in options.items() if v is not None})
    with _threads(here), locked(folder):
        images = read_images(recorded_source(plain["data"]) if data is None else data, here)
        _check_same_data(images, plain["data"], folder)
        plan = Plan(record, here, images, model, run_digest(plain))
        # The engine a run was begun with, unless it moves to a device that engine may not know.
        moved = "auto" if here.device != settings.device else None
        return _work(plan, folder, watch or Watch(), Turn(options.get("engine") or moved, only))


def begin_or_resume(
    record: Record,
    folder: Path,
    *,
    model: Factory | None = None,
    watch: Watch | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Go on with the run of these settings in the folder, or begin it. A run of other settings there is an error."""
    if not is_run(folder):
        return train(record, folder, model=model, watch=watch, only=only, **options)
    machine = {name: options[name] for name in RESUMABLE if options.get(name) is not None}
    wanted, settings = resolve(record, {k: v for k, v in options.items() if k != "data"})
    there, recorded, _ = read_plan(folder)
    other = [str(change) for change in wanted.changes(there)]
    other += [
        f"{f.name} {getattr(settings, f.name)} instead of {getattr(recorded, f.name)}"
        for f in fields(Settings)
        if f.name not in (*RESUMABLE, "stacked") and getattr(settings, f.name) != getattr(recorded, f.name)
    ]
    if other or wanted.seed != there.seed:
        other = other or [f"seed {wanted.seed} instead of {there.seed}"]
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(other)}). Go on with those it has, or choose "
            "another --out."
        )
    return resume(folder, data=options.get("data"), model=model, watch=watch, only=only, **machine)


def resolve(record: str | Path | Record, options: Mapping[str, Any]) -> tuple[Record, Settings]:
    """Split options into fields of the settings and of the record; a preset of None is the record's own or `paper`."""
    given = {name: value for name, value in options.items() if value is not None}
    chosen = find_record(record, given.pop("preset", "paper"))
    in_settings = [f.name for f in fields(Settings)]
    known = [*in_settings, *(f.name for f in fields(Record))]
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ValueError(unknown("option", strange, known))
    if isinstance(given.get("methods"), str):
        given["methods"] = split_methods(given["methods"])
    settings = Settings(**{name: value for name, value in given.items() if name in in_settings})
    if "estimator" in given and "ep" not in settings.methods:
        raise ValueError(
            f"estimator is {given['estimator']!r}, a form of EP, and the methods are {', '.join(settings.methods)}. "
            "Add ep to the methods, or leave the estimator out."
        )
    return chosen.override(**{name: v for name, v in given.items() if name not in in_settings}), settings


@dataclass(frozen=True)
class Turn:
    """What one session does of a run: the engine that stands in, and the methods it is about."""

    engine: str | None = None
    only: Sequence[str] | None = None


def _work(plan: Plan, folder: Path, watch: Watch, turn: Turn) -> Result:
    """Train what is not finished, under signals that only ask; write the result."""
    session = {"provenance": provenance(plan.settings.device), "engines": {}}
    _warn_other_machine(last_session(folder), session["provenance"], watch)
    with Interruption() as interruption:
        loop = Loop(plan, folder, watch, interruption)
        watch.begin(plan, folder)
        try:
            loop.run(session, turn.engine, turn.only)
        finally:
            watch.end()
    summary = summarise(plan, folder)
    _write(folder / RESULT, summary, folder)
    return Result(folder, summary)


def _write(path: Path, content: object, folder: Path) -> None:
    try:
        write_json(path, content)
    except OSError as error:
        raise explain_full_disk(folder, error) from error


def _check_same_data(images: Images, recorded: Mapping[str, Any], folder: Path) -> None:
    got = describe(images)
    differing = [key for key in got if key != "name" and recorded.get(key) != got[key]]
    if differing:
        key = differing[0]
        raise ValueError(
            f"{folder} was trained on other data: {key} was {recorded.get(key)} ({recorded.get('name')}), now "
            f"{got[key]} ({got['name']}). Give the same data with --data."
        )


def _warn_other_machine(before: Mapping[str, Any] | None, now: Mapping[str, Any], watch: Watch) -> None:
    """Bits are promised for the same machine, versions and threads; say what is not the same."""
    if before is None:
        return
    then = before["provenance"]
    names = ("eqprop", "torch", "processor", "threads", "device")
    other = [f"{name} {then.get(name)} -> {now[name]}" for name in names if then.get(name) != now[name]]
    if other:
        watch.warn(f"this run goes on elsewhere ({'; '.join(other)}), so its bits may differ from an undisturbed one.")


@contextmanager
def _threads(settings: Settings) -> Iterator[None]:
    """torch's threads as the settings have them, and as they were afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
