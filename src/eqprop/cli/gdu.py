"""eqprop gdu: check an experiment by name, a function in a file, or a trained run."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eqprop.cli import app
from eqprop.cli.common import OfRun, Threads, check_json, check_out, factory, give_json, new_console, progress_bar
from eqprop.cost import Problem, SquaredError
from eqprop.data import Images, as_images, one_hot, open_set
from eqprop.data.images import check_device
from eqprop.dynamics import NUDGE_SITES, NudgeSite, set_nudge_site
from eqprop.engines.base import PRECISIONS, Precision
from eqprop.engines.eager import compare_precision, compare_with_float64
from eqprop.estimators.ep import EP, Nudging
from eqprop.experiments.gdu import DTYPES, GDU_EXPERIMENTS, Setup, gdu_experiment
from eqprop.gdu import AUTHORS, PAPER, Convention
from eqprop.gdu.comparison import Concentration, phases
from eqprop.gdu.metrics import Silence
from eqprop.gdu.settling import Release
from eqprop.messages import unknown
from eqprop.relax import SCHEDULES, Schedule

if TYPE_CHECKING:
    from eqprop.experiments.architecture import Built


@dataclass(frozen=True)
class Asked:
    """The options; None where one was not given."""

    preset: str = "paper"
    T: int | None = None
    K: int | None = None
    beta: float | None = None
    init: str | None = None
    batch: int | None = None
    seed: int | None = None
    dtype: str | None = "float64"
    device: str = "cpu"
    data: str | None = None
    nudge_site: NudgeSite | None = None
    cost: str | None = None
    estimator: str | None = None
    trial: int | None = None
    schedule: Schedule | None = None
    model: str | None = None

    @property
    def convention(self) -> Convention:
        return AUTHORS if self.preset == "authors" else PAPER


def setup(target: str, asked: Asked) -> Setup:
    """Resolve the target to a setup, ready to be compared."""
    _check(asked)
    # An experiment takes precedence over a folder of the same name; ./toy is always the folder.
    if not _is_named(target, asked.preset):
        found = _other(target, asked)
        if found is not None:
            return found
    if asked.estimator is not None or asked.trial is not None:
        raise ValueError(f"--estimator and --trial choose a network of a run; {target} is not a run folder. Omit them.")
    if asked.model is not None:
        raise ValueError(f"--model builds the network of a run; {target} is not a run folder. Omit it.")
    if asked.data is not None:
        raise ValueError(
            f"--data applies to your own function, or to a run whose data has moved; {target} is neither. Omit it."
        )
    names = ("T", "K", "beta", "init", "nudge_site", "cost", "batch", "seed")
    experiment = gdu_experiment(target, asked.preset).override(**{name: getattr(asked, name) for name in names})
    chosen = Setup.of_experiment(experiment, DTYPES[asked.dtype or "float64"], asked.device)
    return replace(chosen, schedule=asked.schedule or chosen.schedule)


def _is_named(target: str, preset: str) -> bool:
    return target.lower() in (name.lower() for name in GDU_EXPERIMENTS[preset])


def _other(target: str, asked: Asked) -> Setup | None:
    """The setup of a run folder, a file or a user's function; None if the target is none of them."""
    from eqprop.experiments.architecture import is_own
    from eqprop.experiments.io import READERS

    if is_own(target):
        if asked.estimator is not None or asked.trial is not None or asked.model is not None:
            return None
        return _fitted(_own(target, asked), asked)
    if Path(target).is_dir():
        return _fitted(_trained(Path(target), asked), asked)
    if Path(target).suffix in READERS and Path(target).is_file():
        return _described(Path(target), asked)
    if "/" in target:
        raise FileNotFoundError(
            f"There is no folder {target}. Give the folder of a run, FILE.py:FUNCTION, an experiment's FILE.toml, or "
            f"one of {', '.join(GDU_EXPERIMENTS['paper'])}."
        )
    return None


@contextmanager
def _naming_own(target: str, preset: str, model: str | None) -> Iterator[None]:
    """Name the line of a user's function in its errors."""
    if _is_named(target, preset if preset in GDU_EXPERIMENTS else "paper"):
        yield
        return
    from eqprop.experiments.architecture import is_own, own_code

    with own_code(target if is_own(target) else model):
        yield


def _check(asked: Asked) -> None:
    if asked.dtype is not None and asked.dtype not in DTYPES:
        raise ValueError(unknown("dtype", asked.dtype, DTYPES))
    if asked.preset not in GDU_EXPERIMENTS:
        raise ValueError(unknown("preset", asked.preset, GDU_EXPERIMENTS))
    if asked.nudge_site is not None and asked.nudge_site not in NUDGE_SITES:
        raise ValueError(unknown("nudge_site", asked.nudge_site, NUDGE_SITES))
    if asked.schedule is not None and asked.schedule not in SCHEDULES:
        raise ValueError(unknown("schedule", asked.schedule, SCHEDULES))
    check_device(asked.device)


def _fitted(found: Setup, asked: Asked) -> Setup:
    """Apply the options to a setup that does not come from an experiment."""
    if asked.init is not None:
        raise ValueError(f"--init applies to experiments only; {found.name} has its own weights. Omit it.")
    if asked.cost is not None:
        raise ValueError(f"--cost applies to experiments only; {found.name} has its own cost. Omit it.")
    problem = found.problem
    if asked.batch is not None and not 1 <= asked.batch <= len(problem.x):
        raise ValueError(f"--batch is {asked.batch}; expected 1 to {len(problem.x)}, the samples of {found.name}.")
    if asked.nudge_site is not None:
        set_nudge_site(found.problem.model, asked.nudge_site)
    dtype = next(problem.model.parameters()).dtype if asked.dtype is None else DTYPES[asked.dtype]
    device = asked.device
    x, y = (v[: asked.batch].to(device) for v in (problem.x, problem.y))
    return replace(
        found,
        problem=Problem(
            problem.model.to(device=device, dtype=dtype),
            problem.cost.to(device=device, dtype=dtype),
            x.to(dtype) if x.is_floating_point() else x,
            y.to(dtype) if y.is_floating_point() else y,
        ),
        T=found.T if asked.T is None else asked.T,
        K=found.K if asked.K is None else asked.K,
        beta=found.beta if asked.beta is None else asked.beta,
        schedule=asked.schedule or found.schedule,
    )


def _trained(folder: Path, asked: Asked) -> Setup:
    """Trained weights of one trial and estimator, with the run's T, K and beta, on its training images."""
    from eqprop.run import load
    from eqprop.run.evaluate import normalised
    from eqprop.run.folder import is_run
    from eqprop.run.plan import data_again, read_description, read_images

    if not is_run(folder):
        raise FileNotFoundError(
            f"{folder} is not a run folder: it holds no experiment.json. Give one written by eqprop train, "
            f"or one of {', '.join(GDU_EXPERIMENTS['paper'])}."
        )
    described = read_description(folder)
    experiment, settings, data = described.experiment, described.settings, described.data
    estimator, trial = asked.estimator or settings.estimators[0], asked.trial or 0
    own = factory(asked.model)
    found = load(folder, estimator, trial, model=own)
    images = read_images(data_again(described, asked.data, own), replace(settings, device="cpu"))
    if images.sha256 != data.get("sha256"):
        raise ValueError(
            f"{folder} was trained on {data.get('name')}; these images ({images.name}) differ. "
            "Give the directory of its IDX files with --data."
        )
    seed = asked.seed or 0
    x, labels = images.sample(asked.batch or 20, seed)
    x = normalised(x, experiment)
    if found.model.input_shape is not None:
        x = x.view(-1, *found.model.input_shape)
    return Setup.of(
        Problem(found.model, found.cost, x, images.targets(labels, x.dtype)),
        experiment,
        seed=seed,
        init=None,
        convention=asked.convention,
        trained={"estimator": estimator, "trial": trial, "epochs": found.epoch},
        nudging=nudging_of(estimator),
        schedule=experiment.schedule,
    )


def _described(path: Path, asked: Asked) -> Setup:
    """The untrained network of an experiment's file, on training images."""
    from eqprop.experiments.io import find_experiment
    from eqprop.run.evaluate import normalised
    from eqprop.run.plan import Settings, read_images

    names = ("T", "K", "beta", "init", "nudge_site", "cost", "seed", "schedule")
    experiment = find_experiment(path).override(**{name: getattr(asked, name) for name in names})
    dtype, images = DTYPES[asked.dtype or "float64"], read_images(asked.data, Settings(device="cpu"))
    model = experiment.build(0, dtype)
    x, labels = images.sample(asked.batch or 20, experiment.seed)
    x = normalised(x.to(dtype), experiment)
    x = x if model.input_shape is None else x.view(-1, *model.input_shape)
    cost = experiment.make_cost(0, model.init_state(x)[0][0].numel(), images.classes, dtype)
    y, device = images.targets(labels, dtype), asked.device
    problem = Problem(model.to(device), cost.to(device), x.to(device), y.to(device))
    nudging = nudging_of(experiment.estimator)
    return Setup.of(problem, experiment, convention=asked.convention, schedule=experiment.schedule, nudging=nudging)


def _own(target: str, asked: Asked) -> Setup:
    """The network of FILE.py:FUNCTION on its own samples, or on some of its data (see `Own`)."""
    from eqprop.experiments.architecture import load_own
    from eqprop.experiments.experiment import OWN_ESTIMATOR

    built = load_own(target).build(asked.seed or 0)
    name, seed = target.rpartition(":")[2], asked.seed or 0
    nudging = nudging_of(OWN_ESTIMATOR)
    return Setup(_problem(built, asked), name, "own", seed=seed, convention=asked.convention, nudging=nudging)


def nudging_of(estimator: str) -> Nudging:
    """How EP of this name nudges; one-sided for any other estimator."""
    return cast(dict[str, Nudging], {f"ep-{n}": n for n in ("symmetric", "random-sign")}).get(estimator, "one-sided")


def _problem(built: Built, asked: Asked) -> Problem:
    cost, model = built.cost or SquaredError(), built.model
    if built.x is not None and built.y is not None and asked.data is None:
        y = built.y
        if isinstance(cost, SquaredError) and y.dim() == 1 and not y.is_floating_point():
            y = one_hot(y.long(), model.init_state(built.x[:1])[0].shape[-1], built.x.dtype)
        return Problem(model, cost, built.x, y)
    given = as_images(built.data if asked.data is None else asked.data)
    images = given if isinstance(given, Images) else open_set(given)
    x, y = images.sample(min(asked.batch or 20, len(images.train_x)), asked.seed or 0)
    x = x if model.input_shape is None else x.view(len(x), *model.input_shape)
    return Problem(model, cost, x, images.targets(y, x.dtype))


@app.command()
def gdu(
    target: Annotated[str, typer.Argument(help="An experiment (toy, EB-1h, ...), FILE.py:FUNCTION, or a run folder.")],
    preset: Annotated[str, typer.Option(help="paper: as printed. authors: as in their code.")] = "paper",
    T: Annotated[int | None, typer.Option("--T", help="Free-phase steps.")] = None,
    K: Annotated[int | None, typer.Option("--K", help="Steps compared.")] = None,
    beta: Annotated[float | None, typer.Option(help="Nudge strength.")] = None,
    init: Annotated[str | None, typer.Option(help="Initial weights of an experiment: default or glorot.")] = None,
    nudge_site: Annotated[str | None, typer.Option(help="Nudge outside sigma, as in the paper, or inside.")] = None,
    cost: Annotated[str | None, typer.Option(help="Cost of an experiment: squared-error or cross-entropy.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Free-phase schedule: synchronous or alternating. [default: the run's]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Number of samples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, samples and probes.")] = None,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    drop_unsettled: Annotated[
        bool, typer.Option("--drop-unsettled", help="Omit samples that have not settled.")
    ] = False,
    precision: Annotated[
        str | None, typer.Option(help="Where products in tf32, float16 or bfloat16 lose the update.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Threads = None,
    estimator: Annotated[str | None, typer.Option(help="Estimator of a run. [default: its first]")] = None,
    trial: Annotated[int | None, typer.Option(help="Trial of a run. [default: 0]")] = None,
    data: Annotated[str | None, typer.Option(help="Data of a run, if it has moved.")] = None,
    model: OfRun = None,
    out: Annotated[Path | None, typer.Option(help="Folder for gdu.json, traces.json and figures/.")] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="The result as JSON.")] = None,
) -> None:
    """Does EP compute the gradient of this model, and if not, why?

    Compares EP's updates with BPTT's gradients, step by step and layer by layer, with an error budget.
    """
    from eqprop.experiments.gdu import run

    check_json(json)
    check_out(out)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(unknown("precision", precision, PRECISIONS))
    site = cast(NudgeSite | None, nudge_site)
    turns = cast(Schedule | None, schedule)
    asked = Asked(
        preset, T, K, beta, init, batch, seed, dtype, device, data, site, cost, estimator, trial, turns, model
    )  # fmt: skip
    console = new_console(file=sys.stderr if json == "-" else sys.stdout)
    with _naming_own(target, preset, model):
        chosen = setup(target, asked)
        with progress_bar(chosen.name) as tell:
            document, traces = run(chosen, drop_unsettled, tell, threads)
        if precision is not None:
            document["precision"] = lost_in(chosen, precision)
    if out is not None:
        from eqprop.report.gdu import write_folder

        write_folder(out, document, traces)
    show(document, console)
    if out is not None:
        console.print(Text(f"Figures as PNG and PDF: {out / 'figures'}"))
    give_json(document, json)


PARTS = ("residual", "finite_beta", "output_slope", "asymmetry", "rounding", "unsettled")
KINDS = ("neurons", "synapses", "biases")


def show(document: Mapping[str, Any], console: Console) -> None:
    console.print(Text(_heading(document), style="bold"))
    console.print(Text(_settling(document)))
    console.print(_metrics(document))
    console.print(_budget(document))
    console.print(Text(_jacobian(document)))
    for name, counts in document.get("silenced", {}).items():  # absent in documents of earlier versions
        if counts["unheard"]:
            console.print(Text(f"{name}: {Silence(**counts)}"))
    if "release" in document:  # absent in documents of earlier versions
        console.print(Text(str(Release(**document["release"]))))
    if document.get("concentration"):
        console.print(Text(str(Concentration(**document["concentration"]))))
    if "precision" in document:
        console.print(_precision(document["precision"]))
    console.print(Text(document["budget"]["verdict"], style="bold"))


def lost_in(setup: Setup, precision: Precision) -> dict[str, Any]:
    """How far EP's update in this precision agrees with float32's, and float32's with float64's, by parameter."""
    model, cost = copy.deepcopy(setup.problem.model).float(), copy.deepcopy(setup.problem.cost).float()
    x, y = (v.float() if v.is_floating_point() else v for v in (setup.problem.x, setup.problem.y))
    problem = Problem(model, cost, x, y)
    ep = EP(setup.T, setup.K, setup.beta, nudging=setup.nudging, schedule=setup.schedule, checked=False)
    return {
        "declared": precision,
        "nudging": setup.nudging,
        "with_float32": {name or "whole": a.to_dict() for name, a in compare_precision(problem, ep, precision).items()},
        "float32_with_float64": {name or "whole": a.to_dict() for name, a in compare_with_float64(problem, ep).items()},
    }


def _precision(found: Mapping[str, Any]) -> Table:
    title = f"EP's update, nudging {found['nudging']}, with products in {found['declared']}, against float32's"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("parameter")
    for heading in ("cosine", "norm", "float32 with float64: cosine", "norm"):
        table.add_column(heading, justify="right")
    for name, one in found["with_float32"].items():
        itself = found["float32_with_float64"][name]
        values = [part[what] for part in (one, itself) for what in ("cosine", "norm")]
        table.add_row(name, *("-" if value is None else f"{value:.4f}" for value in values))
    return table


def _heading(d: Mapping[str, Any]) -> str:
    said = f"{phases(d['T'], d['K'], d.get('schedule', ''), d.get('groups'))}, beta = {d['beta']:g}"
    said += {"inside": " inside sigma", "implicit": " implicitly"}.get(d.get("nudge_site", ""), "")
    if d.get("cost", "squared-error") != "squared-error":
        said += f", {d['cost']}"
    what = f"{d['name']} ({d['preset']}{_training(d['trained']) if 'trained' in d else ''})"
    return f"{what}: {said}, {d['samples']} samples, {d['dtype']}, {d['seconds']:.1f} s"


def _training(trained: Mapping[str, Any]) -> str:
    n = trained.get("epochs")  # absent in documents of earlier versions
    by = trained.get("estimator", trained.get("method"))
    long = "" if n is None else f" for {n} epoch{'s' if n != 1 else ''}"
    return f", trained by {by}{long}, trial {trained['trial']}"


def _settling(d: Mapping[str, Any]) -> str:
    r = d["residual"]
    state = "all samples settled" if not r["unsettled"] else f"{r['unsettled']} of {d['batch']} samples NOT settled"
    dropped = f", {r['dropped']} left out" if r["dropped"] else ""
    return f"residual: max {r['max']:.1e}, median {r['median']:.1e} after {d['steps']} steps; {state}{dropped}"


def _metrics(d: Mapping[str, Any]) -> Table:
    title = "EP's updates against BPTT's gradients"
    if d["settled"]:
        title += " (settled: RMSE over the settled samples only)"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("group")
    settled = d["settled"]
    for heading in ("RMSE", *(["settled"] if settled else []), "cumulative", "sign", "cosine", "norm", "left out"):
        table.add_column(heading, justify="right")
    for kind in KINDS:
        for name, m in d[kind].items():
            left_out = f"{m['left_out']} of {m['elements']}" if m["left_out"] else "-"
            rest = [_short(settled[kind][name]["rmse"])] if settled else []
            figures = [_short(m["rmse_cumulative"]), _fixed(m["sign"]), _fixed(m["cosine"]), _short(m["norm"])]
            table.add_row(name, _short(m["rmse"]), *rest, *figures, left_out)
        table.add_section()
    return table


def _budget(d: Mapping[str, Any]) -> Table:
    title = "Error budget: parts of the RMSE (means over groups; their sum bounds it)"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("RMSE", *PARTS):
        table.add_column(heading.replace("_", "\n"), justify="right", no_wrap=True)
    for kind in ("neurons", "synapses"):
        parts = d["budget"]["parts"][kind]
        table.add_row(kind, _short(parts["rmse"]), *(_short(parts[name]) for name in PARTS))
    return table


def _jacobian(d: Mapping[str, Any]) -> str:
    b = d["budget"]
    radius = b["spectral_radius"]
    contracts = "contracts" if radius < 1.0 else "does not contract"
    return (
        f"Jacobian: asymmetry {b['asymmetry']:.1e} (0 symmetric, 1 antisymmetric), spectral radius {radius:.4f} "
        f"({contracts}); saturated neurons: {100 * b['saturated']:.1f} %"
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
