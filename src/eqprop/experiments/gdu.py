"""The paper's GDU experiments  [table-hyp-th], and a comparison as a JSON document.

They share only their names with the training experiments; activation, T, K and beta differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from eqprop.cost import Cost, Problem, SquaredError
from eqprop.data import mnist, one_hot
from eqprop.dynamics import Dynamics, NudgeSite, set_nudge_site
from eqprop.estimators.ep import Nudging
from eqprop.gdu import AUTHORS, PAPER, Convention, Options, Report, compare
from eqprop.messages import shown, unknown
from eqprop.models import Convolutional, CrossEntropy, Layered, Toy
from eqprop.models.readout import COSTS, READOUT_SEED, CostName
from eqprop.provenance import provenance
from eqprop.relax import Schedule, threads_for, using_threads

if TYPE_CHECKING:
    from eqprop.experiments.experiment import Experiment

Kind = Literal["toy", "energy-based", "prototypical", "convolutional"]
InitName = Literal["default", "glorot"]
MOST_T, MOST_K, MOST_BATCH = 1_000_000, 10_000, 60_000
"""Limits of a comparison, which keeps K states of every sample."""
OWN_T, OWN_K, OWN_BETA = 1000, 20, 0.01
"""How a model is compared that comes without phases of its own."""
PRESETS: Mapping[str, Convention] = {"paper": PAPER, "authors": AUTHORS}


@dataclass(frozen=True)
class GduExperiment:
    """One row of the paper's table of hyper-parameters of the GDU experiments  [table-hyp-th].

    hidden          sizes of the hidden layers, from the output side
    batch           samples to average the processes over before measuring their distance
    init            "default" is PyTorch's, which reproduces the published numbers; the paper does not say
    output_slope    energy-based: False omits sigma' at the output, as the authors' code does
    cost            "cross-entropy": a softmax readout replaces the output layer (the toy model keeps its own)
    nudge_site      prototypical: "inside" puts the nudge in sigma's argument; the paper has it outside
    seed            of the weights and the batch
    paper_result    the paper's statement on the RMSE, quoted or paraphrased
    """

    name: str
    kind: Kind
    T: int
    K: int
    beta: float
    activation: str = "tanh"
    eps: float | None = None
    hidden: tuple[int, ...] = ()
    batch: int = 20
    init: InitName = "default"
    output_slope: bool = True
    nudge_site: NudgeSite = "outside"
    cost: CostName = "squared-error"
    seed: int = 0
    preset: str = "paper"
    paper_result: str = ""

    def __post_init__(self) -> None:
        if self.init not in ("default", "glorot"):
            raise ValueError(f"init is {self.init!r}; expected 'default' (PyTorch's) or 'glorot'.")
        if self.cost not in COSTS.built_in:
            raise ValueError(unknown("cost", self.cost, COSTS.built_in))
        for name, least, most in (("T", 1, MOST_T), ("K", 1, MOST_K), ("batch", 1, MOST_BATCH), ("seed", 0, 2**53)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} is {shown(value)}; expected an integer from {least} to {most}.")

    @property
    def convention(self) -> Convention:
        return PRESETS[self.preset]

    def override(self, **fields: Any) -> GduExperiment:
        """A copy with the given fields changed, ignoring those that are None."""
        return replace(self, **{name: value for name, value in fields.items() if value is not None})

    def build(self, dtype: torch.dtype) -> Dynamics:
        """The network with its initial weights, on the CPU."""
        model = self._network(dtype)
        set_nudge_site(model, self.nudge_site)
        return model

    def _network(self, dtype: torch.dtype) -> Dynamics:
        if self.kind == "toy":
            assert self.eps is not None, "a row of the table: energy-based nets have a step"
            return Toy((5, 50, 10), self.activation, eps=self.eps, init=self.init, seed=self.seed, dtype=dtype)
        outputs = (10,) if self.cost == "squared-error" else ()
        if self.kind == "convolutional":
            return Convolutional(flat=outputs, activation=self.activation, init=self.init, seed=self.seed, dtype=dtype)
        return Layered(
            (*outputs, *self.hidden, 784),
            self.kind,
            self.activation,
            eps=self.eps,
            output_slope=self.output_slope,
            init=self.init,
            seed=self.seed,
            dtype=dtype,
        )

    def data(self, dtype: torch.dtype) -> tuple[Cost, Tensor, Tensor]:
        """Cost, inputs and one-hot targets: MNIST training images, or dummy data for the toy model."""
        if self.kind == "toy":
            source = torch.Generator().manual_seed(self.seed)
            x = torch.rand(self.batch, 10, generator=source, dtype=torch.float64).to(dtype)
            labels = torch.randint(5, (self.batch,), generator=source)
            return self._cost(x, 5, dtype), x, one_hot(labels, 5, dtype)
        images = mnist(dtype=dtype)
        x, labels = images.sample(self.batch, self.seed)
        if self.kind == "convolutional":
            x = x.view(-1, 1, 28, 28)
        return self._cost(x, 10, dtype), x, one_hot(labels, 10, dtype)

    def _cost(self, x: Tensor, classes: int, dtype: torch.dtype) -> Cost:
        if self.cost == "squared-error":
            return SquaredError()
        inputs = self._network(dtype).init_state(x)[0][0].numel()
        return CrossEntropy(inputs, classes, init=self.init, seed=self.seed + READOUT_SEED, dtype=dtype)


def _rows() -> tuple[GduExperiment, ...]:
    eb: dict[str, Any] = {"kind": "energy-based", "eps": 0.08}
    p: dict[str, Any] = {"kind": "prototypical"}
    deeper = "increases to ~1e-1 with more hidden layers, greater away from the output"
    p_nets = "neurons significantly higher than energy-based, synapses similar or lower"
    deep_p_nets = f"{p_nets}; grows with depth"
    return (
        GduExperiment("toy", "toy", 5000, 80, 0.01, eps=0.08, batch=1, paper_result="processes perfectly coincide"),
        GduExperiment("EB-1h", T=800, K=80, beta=0.001, hidden=(512,), **eb, paper_result="around ~1e-2"),
        GduExperiment("EB-2h", T=5000, K=150, beta=0.01, hidden=(512,) * 2, **eb, paper_result=deeper),
        GduExperiment("EB-3h", T=30000, K=200, beta=0.02, hidden=(512,) * 3, **eb, paper_result=deeper),
        GduExperiment("P-1h", T=150, K=10, beta=0.01, hidden=(512,), **p, paper_result=p_nets),
        GduExperiment("P-2h", T=1500, K=40, beta=0.01, hidden=(512,) * 2, **p, paper_result=deep_p_nets),
        GduExperiment("P-3h", T=5000, K=40, beta=0.015, hidden=(512,) * 3, **p, paper_result=deep_p_nets),
        GduExperiment(
            "P-conv", "convolutional", 5000, 10, 0.02, "hard-sigmoid", paper_result="~1e-1 for the network parameters"
        ),
    )


def _as_authors(experiment: GduExperiment) -> GduExperiment:
    """As in their code: no sigma' at the output of layered energy-based nets; one sample for P-2h and P-3h."""
    return replace(
        experiment,
        preset="authors",
        output_slope=experiment.kind != "energy-based",
        batch=1 if experiment.name in ("P-2h", "P-3h") else experiment.batch,
    )


GDU_EXPERIMENTS: Mapping[str, Mapping[str, GduExperiment]] = {
    "paper": {r.name: r for r in _rows()},
    "authors": {r.name: _as_authors(r) for r in _rows()},
}


def gdu_experiment(name: str, preset: str = "paper") -> GduExperiment:
    """The experiment of that name (case-insensitive), as printed ("paper") or as in the authors' code ("authors")."""
    if preset not in GDU_EXPERIMENTS:
        raise ValueError(unknown("preset", preset, GDU_EXPERIMENTS))
    folded = {known.lower(): known for known in GDU_EXPERIMENTS[preset]}
    if name.lower() not in folded:
        raise ValueError(unknown("GDU experiment", name, GDU_EXPERIMENTS[preset]))
    return GDU_EXPERIMENTS[preset][folded[name.lower()]]


FORMAT = 1
NAMES: dict[type[Cost], str] = {SquaredError: "squared-error", CrossEntropy: "cross-entropy"}
"""Names of the costs in documents; a custom cost uses its class name."""
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Setup:
    """A comparison to run: the problem, the phases, and the names for the document."""

    problem: Problem
    name: str
    preset: str = "paper"
    T: int = OWN_T
    K: int = OWN_K
    beta: float = OWN_BETA
    seed: int = 0
    init: str | None = None
    convention: Convention = PAPER
    trained: dict[str, Any] | None = None
    """The run the weights come from: its estimator, trial and epochs trained."""
    schedule: Schedule = "synchronous"
    """The schedule of the free phase."""
    nudging: Nudging = "one-sided"
    """How the estimator of the run or experiment nudges; the comparison with BPTT is one-sided, as in Theorem 1."""

    @classmethod
    def of(cls, problem: Problem, experiment: GduExperiment | Experiment, **changed: Any) -> Setup:
        """A problem with the names and phases of its experiment, apart from the fields given."""
        names = ("name", "preset", "T", "K", "beta", "seed", "init")
        return cls(**{"problem": problem} | {name: getattr(experiment, name) for name in names} | changed)

    @classmethod
    def of_experiment(cls, experiment: GduExperiment, dtype: torch.dtype, device: str = "cpu") -> Setup:
        cost, x, y = experiment.data(dtype)
        model = experiment.build(dtype).to(device)
        problem = Problem(model, cost.to(device), x.to(device), y.to(device))
        return cls.of(problem, experiment, convention=experiment.convention)


def run(
    setup: Setup,
    drop_unsettled: bool = False,
    progress: Callable[[float], None] | None = None,
    threads: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare; return the document and the traces, ready for JSON. Threads are chosen by the size of the work."""
    options = Options(
        drop_unsettled=drop_unsettled,
        convention=setup.convention,
        seed=setup.seed,
        schedule=setup.schedule,
        progress=progress,
        voice="command line",
    )
    of = setup.problem
    with using_threads(threads or threads_for(of.model, of.x)):
        report = compare(of.model, of.cost, of.x, of.y, setup.T, setup.K, setup.beta, options)
        found = document(setup, report, drop_unsettled)
    return found, {"name": setup.name, **report.traces_to_dict()}


def document(setup: Setup, report: Report, drop_unsettled: bool) -> dict[str, Any]:
    """The content of gdu.json."""
    found = report.to_dict()
    head = {
        "name": setup.name,
        "preset": setup.preset,
        **{key: found.pop(key) for key in ("T", "K", "beta", "dtype", "schedule")},
        "batch": len(setup.problem.x),
        "seed": setup.seed,
        "init": setup.init,
        "nudge_site": getattr(setup.problem.model, "nudge_site", "outside"),
        "cost": NAMES.get(type(setup.problem.cost), type(setup.problem.cost).__name__),
        "drop_unsettled": drop_unsettled,
        **({"trained": setup.trained} if setup.trained else {}),
    }
    return {**head, **found, "format": FORMAT, "provenance": provenance(setup.problem.x.device)}


def same_settings(document: dict[str, Any], experiment: GduExperiment, dtype: str, drop_unsettled: bool) -> bool:
    """Whether a document has this experiment's settings, so that it can be reused."""
    wanted = {
        "name": experiment.name,
        "preset": experiment.preset,
        "T": experiment.T,
        "K": experiment.K,
        "beta": experiment.beta,
        "dtype": dtype,
        "batch": experiment.batch,
        "seed": experiment.seed,
        "init": experiment.init,
        "nudge_site": experiment.nudge_site,
        "cost": experiment.cost,
        "schedule": "synchronous",
        "drop_unsettled": drop_unsettled,
        "format": FORMAT,
    }
    # Documents of earlier versions lack settings that had no alternative then.
    found = {
        "nudge_site": document.get("nudge", "outside"),
        "cost": "squared-error",
        "schedule": "synchronous",
        **document,
    }
    return all(found.get(key) == value for key, value in wanted.items())
