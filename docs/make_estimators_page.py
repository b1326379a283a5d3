"""Measure the forms of EP, draw their figure, and fill the numbers into docs/estimators.md: none on it is typed.

python docs/make_estimators_page.py --measure   gradients against beta (minutes; a net may be named), and the figure
python docs/make_estimators_page.py --time      seconds an iteration into results/estimators; on a GPU if there is one
python docs/make_estimators_page.py --train     short trainings with each form into results/estimators (minutes)
python docs/make_estimators_page.py             rewrite the marked blocks of docs/estimators.md
python docs/make_estimators_page.py --check     say whether they are up to date
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blocks import write_or_check
from torch import Tensor

from eqprop import EP, RBP, ContinualEP, Dynamics, Estimator, HolomorphicEP, Phase, SquaredError, limit_steps, relax
from eqprop.data import mnist, one_hot
from eqprop.engines import Job, Task, choose
from eqprop.experiments.architecture import LayeredNet
from eqprop.experiments.experiment import Experiment
from eqprop.experiments.io import OLD_ESTIMATORS
from eqprop.experiments.paper import PAPER
from eqprop.files import write_bytes, write_json
from eqprop.provenance import provenance
from eqprop.report.figures import COLOURS, GREY, drawn, new_figure, save
from eqprop.training import train
from eqprop.training.plan import make_optimizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "estimators"
PAGE = ROOT / "docs" / "estimators.md"
NETS = ("P-2h", "P-2h-inside", "EB-2h")
"""Experiments by name; with "-inside" the nudge stands inside sigma."""
BATCH, SEED, TERMS = 20, 0, 400
BETAS = sorted([*(round(10 ** (-3 + 0.25 * n), 6) for n in range(13)), 0.5, 0.8])
FORMS = ("one-sided", "random-sign", "symmetric", "holomorphic, 4 points", "holomorphic, 8 points", "continual")
SLOWER = 1000
"""Divides the learning rates for continual EP: its distance to EP goes with the rate over beta."""
TIMED = ("one-sided", "random-sign", "symmetric", "holomorphic", "continual")

Document = Mapping[str, Any]


def setting(name: str) -> Experiment:
    """The training experiment with PyTorch's initial weights, which settle, and without the clip (not analytic)."""
    experiment = PAPER[name.removesuffix("-inside")]
    assert isinstance(experiment.architecture, LayeredNet), "the nets drawn are fully connected"
    nudge = "inside" if name.endswith("-inside") else "outside"
    return replace(
        experiment, init="default", nudge_site=nudge, architecture=replace(experiment.architecture, clip=False)
    )


def estimators(form: str, experiment: Experiment, names: list[str], beta: float) -> list[Estimator]:
    """The estimator of that name; for random signs, the two it chooses between."""
    K = experiment.K
    return {
        "one-sided": [EP(0, K, beta=beta)],
        "random-sign": [EP(0, K, beta=beta), EP(0, K, beta=-beta)],
        "symmetric": [EP(0, K, beta=beta, nudging="symmetric")],
        "holomorphic, 4 points": [HolomorphicEP(0, K, beta=beta, points=4)],
        "holomorphic, 8 points": [HolomorphicEP(0, K, beta=beta, points=8)],
        "continual": [ContinualEP(0, K, beta=beta, rates={n: r / SLOWER for n, r in experiment.rates(names).items()})],
    }[form]


def flat(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in grads.values()])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


class Subject:
    """A net at the steady state of one mini-batch, its true gradient, and EP's in the limit beta -> 0."""

    def __init__(self, name: str) -> None:
        self.experiment = setting(name)
        self.model: Dynamics = self.experiment.build(0, torch.float64)
        self.x, labels = mnist(dtype=torch.float64).sample(BATCH, SEED)
        self.y, self.cost = one_hot(labels, 10, torch.float64), SquaredError()
        self.names = [n for n, _ in self.model.named_parameters()]
        self.free = relax(self.model, self.x, Phase(20_000, stop="settled", still=1e-15))
        exact = RBP(0, TERMS, stop="settled").gradient(*self.case, self.free.state)
        assert exact[0].adjoint_residual is not None, "recurrent backprop gives it"
        self.adjoint_residual = float(exact[0].adjoint_residual.max())
        self.true = self.vector(exact[1])
        steps = list(limit_steps(*self.case, self.free, self.experiment.K))
        self.limit = -flat({n: torch.stack([s.synapses[n] for s in steps]).sum(0) for n in self.names})

    @property
    def case(self) -> tuple[Dynamics, SquaredError, Tensor, Tensor]:
        return self.model, self.cost, self.x, self.y

    def vector(self, grads: Mapping[Any, Tensor]) -> Tensor:
        return flat({name: grads[p] for name, p in self.model.named_parameters()})

    def measured(self, form: str, beta: float) -> dict[str, float | None]:
        """Cosine with the true gradient, and distance to the limit beside its length; the mean over random signs.

        None where a state is not finite.
        """
        found = []
        for estimator in estimators(form, self.experiment, self.names, beta):
            try:
                found.append(self.vector(estimator.gradient(*self.case, self.free.state)[1]))
            except ArithmeticError:
                return {"cosine": None, "distance": None}
        away = [float((g - self.limit).norm() / self.limit.norm()) for g in found]
        return {"cosine": statistics.mean(cosine(g, self.true) for g in found), "distance": statistics.mean(away)}


def measure() -> None:
    for name in [n for n in NETS if n in sys.argv] or NETS:
        began = time.perf_counter()
        subject = Subject(name)
        forms = {form: [subject.measured(form, beta) for beta in BETAS] for form in FORMS}
        experiment = subject.experiment
        content = {
            "name": name,
            "network": {
                "sizes": experiment.architecture.sizes,
                "setting": experiment.architecture.setting,
                "clip": False,
            }  # type: ignore[union-attr]
            | {"activation": "sigmoid", "init": experiment.init, "seed": experiment.seed},
            "nudge_site": experiment.nudge_site,
            "batch": BATCH,
            "K": experiment.K,
            "learning_rates": experiment.learning_rates,
            "continual_rates_divided_by": SLOWER,
            "free_steps": subject.free.steps,
            "residual_max": float(subject.free.residual.max()),
            "adjoint_residual_max": subject.adjoint_residual,
            "betas": BETAS,
            "beta_of_experiment": experiment.beta,
            "limit_cosine": cosine(subject.limit, subject.true),
            "forms": {form: {key: [v[key] for v in values] for key in values[0]} for form, values in forms.items()},
            "seconds": time.perf_counter() - began,
            "provenance": provenance(),
        }
        write_json(RESULTS / f"{name}.json", content)
        print(f"{name}: {content['seconds']:.0f} s, residual {content['residual_max']:.1e}")
    if all((RESULTS / f"{name}.json").is_file() for name in NETS):
        draw()


def draw() -> None:
    for ending, content in save(figure([read(f"{name}.json") for name in NETS])).items():
        write_bytes(RESULTS / f"cosine.{ending}", content)


@drawn
def figure(documents: list[dict[str, Any]]) -> Figure:
    """Cosine with the true gradient above, distance to the limit below, against beta, a column a net."""
    figure = new_figure(10.0, 6.2)
    panels = figure.subplots(2, len(documents), sharex=True, sharey="row")
    for column, document in zip(panels.T, documents, strict=True):
        _draw_column(column, document)
    panels[0, 0].set_ylabel("cosine with the true gradient")
    panels[1, 0].set_ylabel(r"distance to the limit $\beta \to 0$, relative")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _draw_column(column: Any, document: Document) -> None:
    above, below = column
    labels = {"continual": f"continual, rates / {document['continual_rates_divided_by']}"}
    styles = ("-", "--", "-", "-", "-", (0, (1, 1.5)))
    for form, colour, style in zip(FORMS, COLOURS, styles, strict=True):
        for ax, key in ((above, "cosine"), (below, "distance")):
            values = [math.nan if v is None else v for v in document["forms"][form][key]]
            ax.plot(
                document["betas"],
                values,
                color=colour,
                linestyle=style,
                label=labels.get(form, form),
                marker=".",
                markersize=4,
            )
    above.axhline(document["limit_cosine"], color=GREY, linewidth=1.0, zorder=0, label=r"the limit $\beta \to 0$")
    for ax in (above, below):
        ax.axvline(document["beta_of_experiment"], color=GREY, linewidth=0.8, linestyle=":", zorder=0)
    above.set_title(f"{_title(document)}, K = {document['K']}")
    below.set(xscale="log", yscale="log", xlabel=r"$\beta$", ylim=(1e-12, 10.0))
    above.set_ylim(-0.05, 1.02)


def _title(document: Document) -> str:
    return str(document["name"]).replace("-inside", ", nudge inside sigma")


def time_iterations(rounds: int = 25, iterations: int = 10) -> None:
    """Seconds an iteration of P-1h as its experiment has it: processor time of one CPU thread, or the wall on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    clock = time.perf_counter if device == "cuda" else time.process_time
    runners = {form: _runner(form, device) for form in TIMED}
    order = torch.randint(2000, (iterations, PAPER["P-1h"].batch), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {form: [] for form in TIMED}
    for n in range(rounds + 1):  # the first one warms up
        for form, (_, runner) in runners.items():
            began = clock()
            runner.run(order)
            if device == "cuda":
                torch.cuda.synchronize()
            if n:
                seconds[form].append((clock() - began) / iterations)
    content = {
        "name": "P-1h",
        "rounds": rounds,
        "iterations": iterations,
        "clock": clock.__name__,
        "engines": {form: name for form, (name, _) in runners.items()},
        "seconds": seconds,
        "provenance": provenance(device),
    }
    write_json(RESULTS / f"cost-{device}.json", content)
    print({form: statistics.median(values) for form, values in seconds.items()})


def _runner(form: str, device: str) -> tuple[str, Any]:
    """The reference iteration: the loop in Python, or captured in a graph on a GPU."""
    experiment = PAPER["P-1h"]
    model = experiment.build(0).to(device)
    images = mnist(device)
    optimizer = make_optimizer(experiment, model)
    estimator = experiment.make_estimator(OLD_ESTIMATORS[form], model)
    task = Task(model, SquaredError(), estimator, optimizer)
    engine = choose("cuda-graph" if device == "cuda" else "eager", task)
    y = one_hot(images.train_y, 10, torch.float32)
    return engine.name, engine.runner(
        Job(model, SquaredError(), estimator, optimizer, images.train_x, y, images.train_y)
    )


def train_each(epochs: int = 3, samples: int = 6000) -> None:
    """P-1h from one seed with each form; continual EP at the experiment's rates, and at a hundredth of them."""
    printed = PAPER["P-1h"]
    slow = {name: rate / 100 for name, rate in printed.learning_rates.items()}
    wanted: dict[str, dict[str, Any]] = {form: {"estimators": OLD_ESTIMATORS[form]} for form in TIMED}
    wanted["continual, rates / 100"] = {"estimators": "ep-continual", "learning_rates": slow}
    wanted["one-sided, rates / 100"] = {"estimators": "ep", "learning_rates": slow}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in wanted.items():
            place = Path(folder) / str(len(found))
            result = train(printed, place, epochs=epochs, samples=samples, engine="eager", threads=1, **options)
            lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
            found[name] = {
                "test_error": next(iter(result.summary["estimators"].values()))["trials"][0]["test_error"],
                "loss": [line["loss"] for line in lines],
                "diverged": [line["diverged"] for line in lines if line["diverged"]],
            }
            print(name, found[name])
    content = {"name": "P-1h", "epochs": epochs, "samples": samples, "seed": printed.seed, "forms": found}
    write_json(RESULTS / "train.json", {**content, "provenance": provenance()})


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(headings), " | ".join("---" for _ in headings), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def cosines_block() -> str:
    """Cosine and distance at a usual beta and at the experiment's."""
    documents = [read(f"{name}.json") for name in NETS]
    columns = [(d, beta) for d in documents for beta in (0.1, d["beta_of_experiment"])]
    rows = []
    for form in FORMS:
        cells = []
        for d, beta in columns:
            found, at = d["forms"][form], d["betas"].index(beta)
            cells.append(f"{_number(found['cosine'][at])}, {_small(found['distance'][at])}")
        rows.append([form, *cells])
    rows.append(["the limit beta → 0", *(f"{_number(d['limit_cosine'])}, 0" for d, _ in columns)])
    return table(["cosine, distance", *(f"{_title(d)}, beta {beta:g}" for d, beta in columns)], rows)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _small(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def orders_block() -> str:
    """The slope of the distance against beta over the two smallest betas where it is above rounding."""
    rows = []
    for form in FORMS[:-1]:
        cells = []
        for name in NETS:
            d = read(f"{name}.json")
            points = [(b, v) for b, v in zip(d["betas"], d["forms"][form]["distance"], strict=True) if v and v > 1e-11]
            (b0, v0), (b1, v1) = points[:2]
            cells.append(f"{math.log(v1 / v0) / math.log(b1 / b0):.2f} (from {b0:.2g} to {b1:.2g})")
        rows.append([form, *cells])
    return table(["form", *(_title(read(f"{name}.json")) for name in NETS)], rows)


def cost_block() -> str:
    documents = [read(path.name) for path in sorted(RESULTS.glob("cost-*.json"))]
    headings = [f"{d['engines']['one-sided']}, {_machine(d)}: ms an iteration" for d in documents]
    rows = []
    for form in TIMED:
        cells = []
        for d in documents:
            own, base = (statistics.median(d["seconds"][f]) for f in (form, "one-sided"))
            cells.append(f"{1e3 * own:.2f} ({own / base:.1f} ×)")
        rows.append([form, *cells])
    return table(["P-1h, T = 30, K = 10", *headings], rows)


def _machine(document: Document) -> str:
    p = document["provenance"]
    return str(p["device"]) if p["device"] != "cpu" else f"one thread of {p['processor']}"


def provenance_block() -> str:
    d = read(f"{NETS[0]}.json")
    p, seconds = d["provenance"], ", ".join(f"{n} {read(f'{n}.json')['seconds']:.0f} s" for n in NETS)
    return (
        f"Made with `{p['command']}`: eqprop {p['eqprop']} at commit `{p['commit']}`, torch {p['torch']}, Python "
        f"{p['python']}, {p['processor']}, {p['threads']} threads, {p['date'][:10]} ({seconds})."
    )


def train_block() -> str:
    d = read("train.json")
    rows = []
    for form, found in d["forms"].items():
        error = f"{found['test_error'][-1]:.2f} %" if found["test_error"] else "diverged"
        rows.append([form, error, ", ".join("–" if v is None else f"{v:.4f}" for v in found["loss"])])
    return table(["form", f"test error after {d['epochs']} epochs", "mean loss, epoch by epoch"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "cosines": cosines_block,
    "orders": orders_block,
    "cost": cost_block,
    "training": train_block,
    "provenance": provenance_block,
}


def main() -> None:
    if "--measure" in sys.argv:
        measure()
    elif "--time" in sys.argv:
        time_iterations()
    elif "--train" in sys.argv:
        train_each()
    else:
        write_or_check(PAGE, BLOCKS, check="--check" in sys.argv)


if __name__ == "__main__":
    main()
