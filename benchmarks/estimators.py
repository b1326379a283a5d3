"""The gradients of the estimators against beta, what an iteration costs, and short trainings.

python -m benchmarks.estimators bias     results/estimators/bias.json (minutes)
python -m benchmarks.estimators cost     seconds per iteration, added to cost.json; on a GPU if there is one
python -m benchmarks.estimators train    short trainings into train.json (minutes)
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.collect import RESULTS, write_compact
from eqprop import (
    EP,
    RBP,
    ContinualEP,
    Dynamics,
    Estimator,
    HolomorphicEP,
    Phase,
    SquaredError,
    limit_steps,
    papers,
    relax,
)
from eqprop.data import mnist, one_hot
from eqprop.dynamics import NudgeSite
from eqprop.engines import Job, Task, choose
from eqprop.models.layered import LayeredNet
from eqprop.provenance import provenance
from eqprop.report.figures import COLOURS, GREY, drawn, new_figure
from eqprop.run import train
from eqprop.run.extras import make_optimizer
from eqprop.run.session import build_model, make_estimator
from eqprop.run.spec import Spec

OUT = RESULTS / "estimators"
NETS: tuple[tuple[str, NudgeSite], ...] = (("P-2h", "outside"), ("P-2h", "inside"), ("EB-2h", "outside"))
BATCH, SEED, TERMS = 20, 0, 400
BETAS = sorted([*(round(10 ** (-3 + 0.25 * n), 6) for n in range(13)), 0.5, 0.8])
FORMS = ("one-sided", "random-sign", "symmetric", "holomorphic, 4 points", "holomorphic, 8 points", "continual")
SLOWER = 1000
"""Divides the learning rates for continual EP: its distance to EP grows with the rate over beta."""
DASHED, DOTTED = {"random-sign": "--"}, (0, (1, 1.5))
NAMES = {
    "one-sided": "ep",
    **{form: f"ep-{form}" for form in ("random-sign", "symmetric", "holomorphic", "continual")},
}
TIMED = tuple(NAMES)


def setting(name: str, site: NudgeSite) -> Spec:
    """The training experiment with PyTorch's initial weights, which settle, and without the clip (not analytic)."""
    experiment = papers.find(name)
    assert isinstance(experiment.model, LayeredNet), "the nets drawn are fully connected"
    net = msgspec.structs.replace(experiment.model, clip=False)
    return experiment.override(init="default", nudge_site=site, model=net)


def estimators(form: str, experiment: Spec, model: Dynamics, beta: float) -> list[Estimator]:
    """The estimator of that name; for random signs, the two it chooses between."""
    K, names = experiment.phases.K, [name for name, _ in model.named_parameters()]
    rates = {name: rate / SLOWER for name, rate in experiment.rates(names, model.layer_parameters).items()}
    made: dict[str, list[Estimator]] = {
        "one-sided": [EP(0, K, beta=beta)],
        "random-sign": [EP(0, K, beta=beta), EP(0, K, beta=-beta)],
        "symmetric": [EP(0, K, beta=beta, nudging="symmetric")],
        "holomorphic, 4 points": [HolomorphicEP(0, K, beta=beta, points=4)],
        "holomorphic, 8 points": [HolomorphicEP(0, K, beta=beta, points=8)],
        "continual": [ContinualEP(0, K, beta=beta, rates=rates)],
    }
    return made[form]


def flat(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in grads.values()])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


class Net:
    """A net at the steady state of one mini-batch, its true gradient, and EP's in the limit beta -> 0."""

    def __init__(self, name: str, site: NudgeSite) -> None:
        self.experiment = setting(name, site)
        self.model: Dynamics = build_model(self.experiment, 0, torch.float64)
        self.x, labels = mnist(dtype=torch.float64).sample(BATCH, SEED)
        self.y, self.cost = one_hot(labels, 10, torch.float64), SquaredError()
        self.free = relax(self.model, self.x, Phase(20_000, stop="settled", still=1e-15))
        exact = RBP(0, TERMS, stop="settled").gradient(*self.problem, self.free.state)
        assert exact[0].adjoint_residual is not None, "recurrent backprop gives it"
        self.adjoint_residual = float(exact[0].adjoint_residual.max())
        self.true = self.vector(exact[1])
        steps = list(limit_steps(*self.problem, self.free, self.experiment.phases.K))
        names = [n for n, _ in self.model.named_parameters()]
        self.limit = -flat({n: torch.stack([s.synapses[n] for s in steps]).sum(0) for n in names})

    @property
    def problem(self) -> tuple[Dynamics, SquaredError, Tensor, Tensor]:
        return self.model, self.cost, self.x, self.y

    def vector(self, grads: Mapping[Any, Tensor]) -> Tensor:
        return flat({name: grads[p] for name, p in self.model.named_parameters()})

    def measured(self, form: str, beta: float) -> dict[str, float | None]:
        """Cosine with the true gradient, and distance to the limit beside its length; the mean over random signs.

        None where a state is not finite.
        """
        found = []
        for estimator in estimators(form, self.experiment, self.model, beta):
            try:
                found.append(self.vector(estimator.gradient(*self.problem, self.free.state)[1]))
            except ArithmeticError:
                return {"cosine": None, "distance": None}
        away = [float((g - self.limit).norm() / self.limit.norm()) for g in found]
        return {"cosine": statistics.mean(cosine(g, self.true) for g in found), "distance": statistics.mean(away)}


def measure_bias() -> None:
    write_compact(OUT / "bias.json", [bias(name, site) for name, site in NETS])


def bias(name: str, site: NudgeSite) -> dict[str, Any]:
    began = time.perf_counter()
    net = Net(name, site)
    found = {form: [net.measured(form, beta) for beta in BETAS] for form in FORMS}
    experiment = net.experiment
    assert isinstance(experiment.model, LayeredNet), "the nets drawn are fully connected"
    network = {"sizes": experiment.model.sizes, "setting": experiment.model.setting, "clip": False}
    return {
        "name": name,
        "network": network | {"activation": "sigmoid", "init": experiment.model.init, "seed": experiment.run.seed},
        "nudge_site": site,
        "batch": BATCH,
        "K": experiment.phases.K,
        "rates": experiment.optimizer.rates,
        "continual_rates_divided_by": SLOWER,
        "free_steps": net.free.steps,
        "residual_max": float(net.free.residual.max()),
        "adjoint_residual_max": net.adjoint_residual,
        "betas": BETAS,
        "beta_of_experiment": experiment.phases.beta,
        "limit_cosine": cosine(net.limit, net.true),
        "forms": {form: {key: [v[key] for v in values] for key in values[0]} for form, values in found.items()},
        "seconds": time.perf_counter() - began,
        "provenance": provenance(),
    }


def measure_cost(rounds: int = 25, iterations: int = 10) -> None:
    """Seconds per iteration of P-1h as printed: processor time of one CPU thread, or wall time on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    clock = time.perf_counter if device == "cuda" else time.process_time
    runners = {form: _runner(form, device) for form in TIMED}
    order = torch.randint(
        2000, (iterations, papers.find("P-1h").optimizer.batch), generator=torch.Generator().manual_seed(0)
    )
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
    path = OUT / "cost.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    write_compact(path, [*(d for d in kept if d["clock"] != content["clock"]), content])
    print({form: statistics.median(values) for form, values in seconds.items()})


def _runner(form: str, device: str) -> tuple[str, Any]:
    """The reference iteration: the loop in Python, or captured in a graph on a GPU."""
    experiment = papers.find("P-1h")
    model = build_model(experiment, 0).to(device)
    images = mnist(device)
    optimizer = make_optimizer(experiment, model)
    estimator = make_estimator(experiment, NAMES[form], model)
    task = Task(model, SquaredError(), estimator, optimizer)
    engine = choose("cuda-graph" if device == "cuda" else "eager", task)
    y = one_hot(images.train_y, 10, torch.float32)
    return engine.name, engine.runner(
        Job(model, SquaredError(), estimator, optimizer, images.train_x, y, images.train_y)
    )


def measure_training(epochs: int = 3, samples: int = 6000) -> None:
    """P-1h from one seed with each form; continual EP at the experiment's rates, and at a hundredth of them."""
    printed = papers.find("P-1h")
    slow = {name: rate / 100 for name, rate in printed.optimizer.rates.items()}
    wanted: dict[str, dict[str, Any]] = {form: {"estimators": NAMES[form]} for form in TIMED}
    wanted["continual, rates / 100"] = {"estimators": "ep-continual", "rates": slow}
    wanted["one-sided, rates / 100"] = {"estimators": "ep", "rates": slow}
    found: dict[str, Any] = {}
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
    content = {"name": "P-1h", "epochs": epochs, "samples": samples, "seed": printed.run.seed, "forms": found}
    write_compact(OUT / "train.json", {**content, "provenance": provenance()})


def title(found: Mapping[str, Any]) -> str:
    return str(found["name"]) + (", nudge inside" if found["nudge_site"] == "inside" else "")


@drawn
def drawn_bias(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Cosine with the true gradient above, distance to the limit below, against beta, a column per net."""
    figure = new_figure(10.0, 5.6)
    panels = figure.subplots(2, len(found), sharex=True, sharey="row")
    for column, document in zip(panels.T, found, strict=True):
        _draw_column(column, document)
    panels[0, 0].set_ylabel("cosine with the true gradient")
    panels[1, 0].set_ylabel(r"relative distance to the limit $\beta \to 0$")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _draw_column(column: Any, found: Mapping[str, Any]) -> None:
    above, below = column
    for (form, own), colour in zip(found["forms"].items(), COLOURS, strict=True):
        label = f"{form}, rates / {found['continual_rates_divided_by']}" if form == "continual" else form
        style = DOTTED if form == "continual" else DASHED.get(form, "-")
        for ax, key in ((above, "cosine"), (below, "distance")):
            values = [math.nan if v is None else v for v in own[key]]
            ax.plot(found["betas"], values, color=colour, linestyle=style, label=label)
    above.axhline(found["limit_cosine"], color=GREY, linewidth=1.0, zorder=0, label=r"the limit $\beta \to 0$")
    for ax in (above, below):
        ax.axvline(found["beta_of_experiment"], color=GREY, linewidth=0.8, linestyle=":", zorder=0)
    above.set_title(f"{title(found)}, K = {found['K']}")
    below.set(xscale="log", yscale="log", xlabel=r"$\beta$", ylim=(1e-12, 10.0))
    above.set_ylim(-0.05, 1.02)


if __name__ == "__main__":
    {"bias": measure_bias, "cost": measure_cost, "train": measure_training}[sys.argv[1]]()
