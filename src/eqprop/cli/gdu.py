"""eqprop gdu."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from torch import Tensor

from eqprop.cli import EXPECTED_ERRORS, app
from eqprop.cli.common import check_json, give_json
from eqprop.cli.display import progress_bar, show
from eqprop.cost import Cost
from eqprop.data import one_hot
from eqprop.dynamics import Dynamics, NudgePlace, place_nudge
from eqprop.experiments.gdu import DTYPES, GDU_RECORDS, Subject, gdu_record
from eqprop.gdu import AUTHORS, PAPER
from eqprop.messages import unknown
from eqprop.relax import SCHEDULES, Schedule

NUDGES = ("outside", "inside")
OWN_T, OWN_K, OWN_BETA = 1000, 20, 0.01
"""The phases of a model of one's own, unless told otherwise."""


@dataclass(frozen=True)
class Wishes:
    """What the options say; None where one was not given."""

    preset: str = "paper"
    T: int | None = None
    K: int | None = None
    beta: float | None = None
    init: str | None = None
    batch: int | None = None
    seed: int | None = None
    dtype: str = "float64"
    device: str = "cpu"
    data: str | None = None
    nudge: NudgePlace | None = None
    cost: str | None = None
    method: str | None = None
    trial: int | None = None
    schedule: Schedule | None = None


def subject(target: str, wishes: Wishes) -> Subject:
    """What the target names, ready to be compared."""
    _check(wishes)
    # A record wins over a folder that happens to have its name; ./toy is then the folder.
    other = not is_own(target) and target.lower() not in (name.lower() for name in GDU_RECORDS[wishes.preset])
    if other and Path(target).is_dir():
        return _fitted(_trained(Path(target), wishes), wishes)
    if other and "/" in target:
        raise FileNotFoundError(
            f"There is no folder {target}. Give the folder of a run, FILE.py:FUNCTION, or one of "
            f"{', '.join(GDU_RECORDS['paper'])}."
        )
    if wishes.method is not None or wishes.trial is not None:
        raise ValueError(
            f"--method and --trial choose among the networks of a run, and {target} is none. Leave them out."
        )
    if is_own(target):
        return _fitted(_own(target, wishes), wishes)
    names = ("T", "K", "beta", "init", "nudge", "cost", "batch", "seed")
    record = gdu_record(target, wishes.preset).override(**{name: getattr(wishes, name) for name in names})
    found = Subject.of_record(record, DTYPES[wishes.dtype], wishes.device)
    return replace(found, schedule=wishes.schedule or found.schedule)


def is_own(target: str) -> bool:
    """Whether the target is a user's FILE.py:FUNCTION."""
    return target.endswith(".py") or ".py:" in target


def _check(wishes: Wishes) -> None:
    if wishes.dtype not in DTYPES:
        raise ValueError(unknown("dtype", wishes.dtype, DTYPES))
    if wishes.preset not in GDU_RECORDS:
        raise ValueError(unknown("preset", wishes.preset, GDU_RECORDS))
    if wishes.nudge is not None and wishes.nudge not in NUDGES:
        raise ValueError(unknown("nudge", wishes.nudge, NUDGES))
    if wishes.schedule is not None and wishes.schedule not in SCHEDULES:
        raise ValueError(unknown("schedule", wishes.schedule, SCHEDULES))
    check_device(wishes.device)


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Cannot use device {device!r}: {reason}. Use cpu, or one this machine has.") from error


def _fitted(found: Subject, wishes: Wishes) -> Subject:
    """A subject that does not come from a record, with the options applied."""
    if wishes.init is not None:
        raise ValueError(f"--init belongs to records; {found.name} brings its own weights. Leave it out.")
    if wishes.cost is not None:
        raise ValueError(f"--cost belongs to records; {found.name} brings its own cost. Leave it out.")
    if wishes.batch is not None and not 1 <= wishes.batch <= len(found.x):
        raise ValueError(f"--batch is {wishes.batch}; {found.name} gives {len(found.x)} samples.")
    if wishes.nudge is not None:
        place_nudge(found.model, wishes.nudge)
    dtype, device = DTYPES[wishes.dtype], wishes.device
    x, y = (v[: wishes.batch].to(device) for v in (found.x, found.y))
    return replace(
        found,
        model=found.model.to(device=device, dtype=dtype),
        cost=found.cost.to(device=device, dtype=dtype),
        x=x.to(dtype) if x.is_floating_point() else x,
        y=y.to(dtype) if y.is_floating_point() else y,
        T=found.T if wishes.T is None else wishes.T,
        K=found.K if wishes.K is None else wishes.K,
        beta=found.beta if wishes.beta is None else wishes.beta,
        schedule=wishes.schedule or found.schedule,
    )


def _trained(folder: Path, wishes: Wishes) -> Subject:
    """Trained weights: of one trial of one method, at the record's T, K and beta, on images it was trained on."""
    from eqprop.training import load
    from eqprop.training.folder import is_run
    from eqprop.training.plan import read_images, read_plan, recorded_source

    if not is_run(folder):
        raise FileNotFoundError(
            f"{folder} is not the folder of a run: it holds no record.json. Give one that eqprop train has made, or "
            f"one of {', '.join(GDU_RECORDS['paper'])}."
        )
    record, settings, plain = read_plan(folder)
    method, trial = wishes.method or settings.methods[0], wishes.trial or 0
    model = load(folder, method, trial)
    images = read_images(wishes.data or recorded_source(plain["data"]), replace(settings, device="cpu"))
    if images.sha256 != plain["data"].get("sha256"):
        raise ValueError(
            f"{folder} was trained on {plain['data'].get('name')}, and these images ({images.name}) are others. "
            "Give the directory of its IDX files with --data."
        )
    seed = wishes.seed or 0
    x, labels = images.sample(wishes.batch or 20, seed)
    if model.input_shape is not None:
        x = x.view(-1, *model.input_shape)
    return Subject(
        name=record.name,
        preset=record.preset,
        model=model,
        cost=vars(model)["cost"],
        x=x,
        y=one_hot(labels, images.classes, x.dtype),
        T=record.T,
        K=record.K,
        beta=record.beta,
        seed=seed,
        init=None,
        convention=AUTHORS if wishes.preset == "authors" else PAPER,
        trained={"method": method, "trial": trial, "epochs": model.epochs},
        schedule=record.schedule,
    )


def _own(target: str, wishes: Wishes) -> Subject:
    """FILE.py:FUNCTION, the function returning model, cost, x, y."""
    source, _, name = target.rpartition(":")
    if not source.endswith(".py"):
        raise ValueError(
            f"{target!r} does not say which function to call; expected FILE.py:FUNCTION, the function returning model, "
            "cost, x, y."
        )
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Expected FILE.py:FUNCTION.")
    with own_code(path):
        module = _import(path)
        function = getattr(module, name, None)
        if not callable(function):
            there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
            what = unknown("function", name, there) if there else f"there is no function {name!r}, nor any other."
            raise ValueError(f"{path}: {what}")
        made = function()
    model, cost, x, y = _checked(made, target)
    return Subject(
        name=name,
        preset=wishes.preset,
        model=model,
        cost=cost,
        x=x,
        y=y,
        T=OWN_T,
        K=OWN_K,
        beta=OWN_BETA,
        seed=wishes.seed or 0,
        init=None,
        convention=AUTHORS if wishes.preset == "authors" else PAPER,
    )


@contextmanager
def own_code(path: Path) -> Iterator[None]:
    """An error that comes out of a user's file becomes one message that says where; one of eqprop's own stays."""
    try:
        yield
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        if isinstance(error, EXPECTED_ERRORS) and not lines:
            raise
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"{path}, line {line}" if line else str(path)
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error


def _import(path: Path) -> ModuleType:
    """The file as a module; files beside it can be imported by it, as when it is run itself."""
    name = f"eqprop_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _checked(made: Any, target: str) -> tuple[Dynamics, Cost, Tensor, Tensor]:
    expected = (("model", Dynamics), ("cost", Cost), ("x", Tensor), ("y", Tensor))
    if not isinstance(made, tuple) or len(made) != len(expected):
        got = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"{target} returned {got}; expected the four values model, cost, x, y.")
    for value, (what, kind) in zip(made, expected, strict=True):
        if not isinstance(value, kind):
            raise ValueError(f"{target} returned {type(value).__name__} as {what}; expected {kind.__name__}.")
    model, cost, x, y = made
    if x.dim() < 2 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"{target} returned x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}; expected samples first, "
            "as many of both, and at least one."
        )
    return model, cost, x, y


@app.command()
def gdu(
    target: Annotated[str, typer.Argument(help="A record (toy, EB-1h, ...), FILE.py:FUNCTION, or a run folder.")],
    preset: Annotated[str, typer.Option(help="paper: as printed. authors: as their code ran.")] = "paper",
    T: Annotated[int | None, typer.Option("--T", help="Steps of the free phase.")] = None,
    K: Annotated[int | None, typer.Option("--K", help="Steps compared.")] = None,
    beta: Annotated[float | None, typer.Option(help="Strength of the nudge.")] = None,
    init: Annotated[str | None, typer.Option(help="Initial weights of a record: default or glorot.")] = None,
    nudge: Annotated[str | None, typer.Option(help="outside sigma, as in the paper, or inside.")] = None,
    cost: Annotated[str | None, typer.Option(help="Of a record: squared-error or cross-entropy.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Of the free phase: synchronous or alternating; a run's own by default.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, samples and probes.")] = None,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    drop_unsettled: Annotated[bool, typer.Option("--drop-unsettled", help="Leave out what has not settled.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    method: Annotated[str | None, typer.Option(help="Of a run folder; its first by default.")] = None,
    trial: Annotated[int | None, typer.Option(help="Of a run folder; 0 by default.")] = None,
    data: Annotated[str | None, typer.Option(help="The data of a run folder, if it is elsewhere now.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for gdu.json, traces.json and figures/.")] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="The result as JSON.")] = None,
) -> None:
    """Does EP compute the gradient of this model, and if not, why?

    EP's updates against BPTT's gradients, step by step and layer by layer, with an error budget.
    """
    from eqprop.experiments.gdu import run

    check_json(json)
    check_out(out)
    if threads is not None:
        torch.set_num_threads(threads)
    place = cast(NudgePlace | None, nudge)
    turns = cast(Schedule | None, schedule)
    wishes = Wishes(preset, T, K, beta, init, batch, seed, dtype, device, data, place, cost, method, trial, turns)
    console = Console(file=sys.stderr if json == "-" else sys.stdout, highlight=False)
    with own_code(Path(target.rpartition(":")[0])) if is_own(target) else nullcontext():
        chosen = subject(target, wishes)
        with progress_bar(chosen.name) as tell:
            document, traces = run(chosen, drop_unsettled, tell)
    if out is not None:
        from eqprop.report.gdu import write_folder

        write_folder(out, document, traces)
    show(document, console)
    give_json(document, json)


def check_out(out: Path | None) -> None:
    """A folder that cannot be made is said before the work, not after it."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out got {out}, which is a file; expected a folder.")
    there = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise PermissionError(f"--out got {out}, but {there} cannot be written. Choose another folder.")
