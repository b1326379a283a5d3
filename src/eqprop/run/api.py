"""`train` and `resume`: run an experiment, or continue a run, and return its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eqprop.data import Data, open_set
from eqprop.data.images import check_device
from eqprop.engines import using_threads
from eqprop.files import write_bytes, write_json
from eqprop.messages import command, unknown
from eqprop.models.settings import ModelSettings
from eqprop.provenance import __version__, commit, provenance
from eqprop.run.dataset import check_same_data, data_again, describe, given_data, read_images
from eqprop.run.description import read_description
from eqprop.run.distributed import check_divides, check_same, join, restarts, to_join
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
from eqprop.run.loop import Interruption, Loop, Scope
from eqprop.run.metrics import Result, summarise
from eqprop.run.own import Factory, OwnFunction, own_of
from eqprop.run.session import Session, bind, check_training, chosen
from eqprop.run.spec import MACHINE, Spec, split_estimators
from eqprop.run.watch import Several, Watch, as_watch, counted


def no_test_set(own: OwnFunction | None) -> str | None:
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
    experiment: str | Path | Spec | Session | Factory,
    out: str | Path | None = None,
    *,
    data: Data = None,
    model: Factory | ModelSettings | None = None,
    watch: Watch | str | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Train an experiment, given by name, as a TOML file, a `Spec` or a bound `Session`, in a new run folder.

    It may also be your own function, or FILE.py:FUNCTION (see `eqprop.run.own.OwnFunction`), which then gives the
    network, its cost and its data; T, K, rates and the like are options.

    experiment  a name, a TOML file, a `Spec`, a bound `Session`, or your own function
    out         the run folder; by default runs/NAME-DATE-TIME
    data        "mnist" (also None), "fashion-mnist" or "kmnist", a directory of IDX files, an .npz file, or your own:
                (x, y, x_test, y_test) as arrays or tensors, a dictionary of these, or (train, test) with two Datasets
                or DataLoaders (see `eqprop.data.from_arrays`)
    model       another net: settings such as `LayeredNet`, or your own function
    watch       receives progress and warnings (see `eqprop.run.watch`): "lines" prints a line per epoch; silent
                by default
    only        train only these estimators now; `resume` trains the others
    options     any setting of `Spec` by its flat name (T, K, beta, epochs, rates, trials, engine, device, ...), and
                `preset` to choose among the experiments of that name

    Ctrl-C finishes the iteration, saves, and raises `Stopped`; `resume` continues the run. Called in every process of a
    torchrun job, it divides each mini-batch among them; restarted by torchrun, it continues its run.
    """
    watch = as_watch(watch)
    folder = None if out is None else Path(out)
    # Before joining: a rank that ends while another is still joining would only be seen as lost.
    if folder is None and (size := to_join().size) > 1:
        raise ValueError(f"{size} ranks need a run folder that all of them see. Give it with --out, or out=.")
    if isinstance(experiment, Session):
        session = bind(experiment, data, model=model, **options)
        return _start(session.spec, session.own, folder, data, only, watch, session)
    spec, own = chosen(experiment, model, options)
    if folder is not None and all(join().largest([restarts(), is_run(folder)])):
        # torchrun started this command again, here or on another machine: its own run is continued.
        return begin_or_resume(spec, folder, data=data, model=own, watch=watch, only=only, **options)
    return _start(spec, own, folder, data, only, watch)


def _start(
    spec: Spec,
    own: OwnFunction | None,
    out: Path | None,
    data: Data,
    only: Sequence[str] | None,
    watch: Watch,
    session: Session | None = None,
) -> Result:
    """Train a new run: make its folder, write its experiment."""
    ranks = join()
    with ranks.in_step(), using_threads(spec.run.threads):
        session = bind(spec, data, ranks, model=own) if session is None else session
        if session.ranks.size != ranks.size:
            raise ValueError(
                f"The session is bound for {session.ranks.size} ranks, and there are {ranks.size}. Bind it with "
                "ranks=eqprop.distributed.join()."
            )
        if not session.identity:
            check_training(session)
    _agree(session)
    scope = Scope(only=_named(only, session.spec))
    folder = default_folder(session.spec.name) if out is None else out
    with ranks.in_step():
        if ranks.leads:
            prepare_new(folder)
    with using_threads(session.spec.run.threads), locked_by_first(folder, ranks):
        with ranks.in_step():
            if ranks.leads:
                _write(folder, EXPERIMENT, session.to_dict())
                _write_picture(folder, session)
        if data is None and ranks.leads and (problem := no_test_set(own)) is not None:
            Several(watch).warn(problem)
        return _work(session, folder, scope, watch)


def _named(only: str | Sequence[str] | None, spec: Spec) -> tuple[str, ...] | None:
    """The estimators to train now, None for all; each one of the run's."""
    if only is None:
        return None
    names = split_estimators(only)
    strange = next((name for name in names if name not in spec.estimators), None)
    if strange is not None:
        raise ValueError(unknown("estimator", strange, spec.estimators))
    return names


def _agree(session: Session) -> None:
    """Give the session the identity that rank 0 writes. Raises on every rank if one has other settings or versions."""
    ranks = session.ranks
    if not ranks.several:
        return
    settings = session.spec.to_dict()
    settings["run"] = {name: v for name, v in settings["run"].items() if name not in ("device", "threads")}
    check_same(
        ranks,
        {
            "eqprop": f"{__version__} {commit() or ''}".strip(),
            "torch": torch.__version__,
            "experiment": settings,
            "data": {name: v for name, v in describe(session.images).items() if name != "name"},
        },
    )
    session.identity = ranks.text_of_first(session.identity)


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

    folder      the run folder
    watch       receives progress and warnings, as in `train`
    data        where the data is now, if it has moved; it must be the same data
    model       the function that built your own network
    only        continue only these estimators
    options     engine, device or threads, if this machine needs others. With the recorded ones, a run on the CPU
                ends bit for bit as if it had never been stopped. precision, for the epochs to come. epochs, to
                train longer: refused where the rates fall over all epochs, and so depend on their number.
    """
    return _continue(Path(folder), model, data, only, as_watch(watch), options)


def _continue(
    folder: Path,
    model: Factory | None,
    data: Data,
    only: Sequence[str] | None,
    watch: Watch,
    options: Mapping[str, Any],
) -> Result:
    """Train what is left of a run, with its data read again."""
    ranks = join()
    with ranks.in_step():
        described = read_description(folder)
    recorded = described.spec
    only = _named(only, recorded)
    strange = next((name for name in options if name not in RESUMABLE), None)
    if strange is not None:
        raise ValueError(
            f"{strange} cannot be changed on resume; a run keeps its settings except {', '.join(RESUMABLE)}. "
            "Start a new run for another setting."
        )
    changed = {k: v for k, v in options.items() if v is not None}
    epochs = changed.pop("epochs", None)
    longer = epochs is not None and epochs != recorded.optimizer.epochs
    if longer:
        described = described.lengthened(epochs)
    spec = described.spec.override(**changed)
    now, then = spec.run, recorded.run
    check_device(now.device)
    # Keep the engine the run started with, unless it moves to a device that engine may not support.
    other_kind = torch.device(now.device).type != torch.device(then.device).type
    moved = other_kind or (not ranks.several and now.device != then.device) or now.precision != then.precision
    spec = spec.override(device=ranks.device(now.device))
    with using_threads(spec.run.threads), locked_by_first(folder, ranks):
        with ranks.in_step():
            own = own_of(model, spec.model)
            given = data_again(described.data, data, own)
            if data is not None and "fingerprint" in described.data and isinstance(given, str | Path):
                given = given_data(open_set(given))
            images = read_images(given, spec.data, spec.run.device)
            check_same_data(images, described.data, folder)
            source = described.data.get("set") or described.data.get("directory")
            check_divides(spec.optimizer.batch, ranks.size)
            session = Session(spec, images, own, source, ranks, described.identity, images.dtype)
        _agree(session)
        with ranks.in_step():
            if longer and ranks.leads:
                _write(folder, EXPERIMENT, described.content)
        scope = Scope(options.get("engine") or ("auto" if moved else None), only, described.earlier_epochs)
        return _work(session, folder, scope, watch, recorded)


def begin_or_resume(
    experiment: str | Path | Spec | Factory,
    folder: Path,
    *,
    data: Data = None,
    model: Factory | None = None,
    watch: Watch | str | None = None,
    only: Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Resume the run in the folder, or start it there. Raises if the folder holds a run with other settings."""
    spec, own = chosen(experiment, model, options)
    watch = as_watch(watch)
    if not join().largest([float(is_run(folder))])[0]:
        return _start(spec, own, folder, data, only, watch)
    with join().in_step():
        _check_same_run(spec, folder, own)
    machine = {name: options[name] for name in RESUMABLE if options.get(name) is not None}
    return _continue(folder, own, data, only, watch, machine)


def _check_same_run(wanted: Spec, folder: Path, own: OwnFunction | None) -> None:
    """Raise unless the folder's run has these settings; those of the machine may differ."""
    there = read_description(folder).spec
    if own is not None:  # its network declares it
        wanted = wanted.override(nudge_site=there.model.nudge_site)
    other = [str(change) for change in wanted.changes(there) if change.field not in RESUMABLE]
    if wanted.estimators != there.estimators:
        other.append(f"estimators {', '.join(wanted.estimators)} instead of {', '.join(there.estimators)}")
    for section, names in MACHINE.items():
        for name in names:
            was, now = getattr(getattr(there, section), name), getattr(getattr(wanted, section), name)
            if was != now and name not in (*RESUMABLE, "stacked", "estimators", "set"):  # data have a checksum
                other.append(f"{name} {now} instead of {was}")
    if other:
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(other)}). Use its settings, or choose another --out."
        )


def _work(session: Session, folder: Path, scope: Scope, watch: Watch, recorded: Spec | None = None) -> Result:
    """Train every unfinished leg, with graceful shutdown on signals; write the result.

    recorded    the spec of a run that is resumed: where nothing is left to train, its result stays as it says
    """
    ranks = session.ranks
    watch = Several(watch) if ranks.leads else Watch()
    entry = _entry(session, folder, watch)
    with Interruption() as interruption:
        loop = Loop(session, folder, watch, interruption)
        watch.begin(session, folder)
        try:
            loop.run(entry, scope)
        finally:
            watch.end()
    if recorded is not None and not entry["engines"]:
        if not scope.only:
            epochs = counted(session.spec.optimizer.epochs, "epoch")
            longer = command("resume", folder, "--epochs", "N")
            watch.note(f"This run is finished, after {epochs}: nothing is left to train. For more: {longer}.")
        session = replace(session, spec=recorded)
    summary = summarise(session, loop.log.lines, loop.reached)
    with ranks.in_step():
        if ranks.leads:
            _write(folder, RESULT, summary)
    return Result(folder, summary)


def _entry(session: Session, folder: Path, watch: Watch) -> dict[str, Any]:
    """What the environment says of this process."""
    run = session.spec.run
    more: dict[str, Any] = {"ranks": session.ranks.size} if session.ranks.several else {}
    if run.precision != "float32":
        more["precision"] = run.precision
    found = {"provenance": provenance(run.device) | more, "engines": {}}
    _warn_other_machine(last_session(folder), found["provenance"], watch)
    return found


def _write_picture(folder: Path, session: Session) -> None:
    """Show what augmentation does to the training images, for the report."""
    augmentation, images = session.spec.data.augmentation, session.images
    if augmentation is None or not augmentation.active:
        return
    sixteen = images.first(min(16, images.train_samples))[0]
    picture = augmented_picture(augmentation, sixteen, image_shape(images.shape), session.spec.run.seed)
    if picture is not None:
        with saving(folder):
            write_bytes(folder / AUGMENTED, picture, parents=False)


def _write(folder: Path, name: str, content: object) -> None:
    with saving(folder):
        write_json(folder / name, content, parents=False)


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
