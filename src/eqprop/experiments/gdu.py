"""A comparison as a document: what was compared, what was found, where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.data import mnist, one_hot
from eqprop.dynamics import Dynamics, NudgePlace, place_nudge
from eqprop.experiments.experiment import COSTS, READOUT_SEED, CostName
from eqprop.gdu import AUTHORS, PAPER, Convention, Options, Report, compare
from eqprop.messages import unknown
from eqprop.models import Convolutional, CrossEntropy, Layered, Toy
from eqprop.provenance import provenance
from eqprop.relax import Schedule

Kind = Literal["toy", "energy-based", "prototypical", "convolutional"]
InitName = Literal["default", "glorot"]
PRESETS: Mapping[str, Convention] = {"paper": PAPER, "authors": AUTHORS}


@dataclass(frozen=True)
class GduRecord:
    """One row of the paper's table of hyper-parameters of the GDU experiments  [table-hyp-th].

    hidden          sizes of the hidden layers, from the output side
    batch           samples over which the processes are averaged before their distance is taken
    init            "default" is PyTorch's, with which the published figures are reached; the paper is silent
    output_slope    energy-based: False leaves sigma' out at the output, as the authors' code does
    cost            "cross-entropy": a softmax readout takes the place of the output layer (the toy model keeps its own)
    nudge           prototypical: "inside" puts the nudge into sigma's argument; the paper has it outside
    seed            of the weights and of the batch
    reported        what the paper says about the RMSE, in its own words or close to them
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
    nudge: NudgePlace = "outside"
    cost: CostName = "squared-error"
    seed: int = 0
    preset: str = "paper"
    reported: str = ""

    def __post_init__(self) -> None:
        if self.init not in ("default", "glorot"):
            raise ValueError(f"init is {self.init!r}; expected 'default' (PyTorch's) or 'glorot'.")
        if self.cost not in COSTS:
            raise ValueError(unknown("cost", self.cost, COSTS))
        if not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(f"batch is {self.batch!r}; expected a number of samples, 1 or more.")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}; expected a whole number, 0 or more.")

    @property
    def convention(self) -> Convention:
        return PRESETS[self.preset]

    def override(self, **fields: Any) -> GduRecord:
        """A copy with the given fields, those that are None left alone."""
        return replace(self, **{name: value for name, value in fields.items() if value is not None})

    def build(self, dtype: torch.dtype) -> Dynamics:
        """The network with its initial weights, on the CPU."""
        model = self._network(dtype)
        place_nudge(model, self.nudge)
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


def _rows() -> tuple[GduRecord, ...]:
    eb: dict[str, Any] = {"kind": "energy-based", "eps": 0.08}
    p: dict[str, Any] = {"kind": "prototypical"}
    deeper = "increases to ~1e-1 with more hidden layers, greater away from the output"
    p_nets = "neurons significantly higher than energy-based, synapses similar or lower"
    return (
        GduRecord("toy", "toy", 5000, 80, 0.01, eps=0.08, reported="processes perfectly coincide"),
        GduRecord("EB-1h", T=800, K=80, beta=0.001, hidden=(512,), **eb, reported="around ~1e-2"),
        GduRecord("EB-2h", T=5000, K=150, beta=0.01, hidden=(512,) * 2, **eb, reported=deeper),
        GduRecord("EB-3h", T=30000, K=200, beta=0.02, hidden=(512,) * 3, **eb, reported=deeper),
        GduRecord("P-1h", T=150, K=10, beta=0.01, hidden=(512,), **p, reported=p_nets),
        GduRecord("P-2h", T=1500, K=40, beta=0.01, hidden=(512,) * 2, **p, reported=f"{p_nets}; grows with depth"),
        GduRecord("P-3h", T=5000, K=40, beta=0.015, hidden=(512,) * 3, **p, reported=f"{p_nets}; grows with depth"),
        GduRecord(
            "P-conv", "convolutional", 5000, 10, 0.02, "hard-sigmoid", reported="~1e-1 for the network parameters"
        ),
    )


def _as_authors(record: GduRecord) -> GduRecord:
    """As their code ran: no sigma' at the output of layered energy-based nets; one sample for toy, P-2h and P-3h."""
    return replace(
        record,
        preset="authors",
        output_slope=record.kind != "energy-based",
        batch=1 if record.name in ("toy", "P-2h", "P-3h") else record.batch,
    )


GDU_RECORDS: Mapping[str, Mapping[str, GduRecord]] = {
    "paper": {r.name: r for r in _rows()},
    "authors": {r.name: _as_authors(r) for r in _rows()},
}


def gdu_record(name: str, preset: str = "paper") -> GduRecord:
    """The record of that name (whatever its case) as printed ("paper") or as the authors' code ran ("authors")."""
    if preset not in GDU_RECORDS:
        raise ValueError(unknown("preset", preset, GDU_RECORDS))
    folded = {known.lower(): known for known in GDU_RECORDS[preset]}
    if name.lower() not in folded:
        raise ValueError(unknown("GDU record", name, GDU_RECORDS[preset]))
    return GDU_RECORDS[preset][folded[name.lower()]]


FORMAT = 1
NAMES: dict[type[Cost], str] = {SquaredError: "squared-error", CrossEntropy: "cross-entropy"}
"""The costs of records as documents call them; one's own goes by the name of its class."""
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Subject:
    """What is put on the bench: a model with its batch, the phases, and the names the document carries."""

    name: str
    preset: str
    model: Dynamics
    cost: Cost
    x: Tensor
    y: Tensor
    T: int
    K: int
    beta: float
    seed: int
    init: str | None
    convention: Convention
    trained: dict[str, Any] | None = None
    """The method and the trial of a run that the weights come from, and how long it had been trained."""
    schedule: Schedule = "synchronous"
    """Of the free phase."""

    @classmethod
    def of_record(cls, record: GduRecord, dtype: torch.dtype, device: str = "cpu") -> Subject:
        cost, x, y = record.data(dtype)
        model = record.build(dtype).to(device)
        return cls(
            name=record.name,
            preset=record.preset,
            model=model,
            cost=cost.to(device),
            x=x.to(device),
            y=y.to(device),
            T=record.T,
            K=record.K,
            beta=record.beta,
            seed=record.seed,
            init=record.init,
            convention=record.convention,
        )


def run(
    subject: Subject, drop_unsettled: bool = False, progress: Callable[[float], None] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare, and return the document and the traces as plain values."""
    options = Options(
        drop_unsettled=drop_unsettled,
        convention=subject.convention,
        seed=subject.seed,
        schedule=subject.schedule,
        progress=progress,
    )
    report = compare(subject.model, subject.cost, subject.x, subject.y, subject.T, subject.K, subject.beta, options)
    return document(subject, report, drop_unsettled), {"name": subject.name, **report.traces_to_dict()}


def document(subject: Subject, report: Report, drop_unsettled: bool) -> dict[str, Any]:
    """The content of gdu.json."""
    found = report.to_dict()
    head = {
        "name": subject.name,
        "preset": subject.preset,
        **{key: found.pop(key) for key in ("T", "K", "beta", "dtype", "schedule")},
        "batch": len(subject.x),
        "seed": subject.seed,
        "init": subject.init,
        "nudge": getattr(subject.model, "nudge", "outside"),
        "cost": NAMES.get(type(subject.cost), type(subject.cost).__name__),
        "drop_unsettled": drop_unsettled,
        **({"trained": subject.trained} if subject.trained else {}),
    }
    return {**head, **found, "format": FORMAT, "provenance": provenance(subject.x.device)}


def same_settings(document: dict[str, Any], record: GduRecord, dtype: str, drop_unsettled: bool) -> bool:
    """Whether a document is what this record would give, so that it need not be made again."""
    wanted = {
        "name": record.name,
        "preset": record.preset,
        "T": record.T,
        "K": record.K,
        "beta": record.beta,
        "dtype": dtype,
        "batch": record.batch,
        "seed": record.seed,
        "init": record.init,
        "nudge": record.nudge,
        "cost": record.cost,
        "schedule": "synchronous",
        "drop_unsettled": drop_unsettled,
        "format": FORMAT,
    }
    # A document of an earlier version does not say what had no alternative then.
    found = {"nudge": "outside", "cost": "squared-error", "schedule": "synchronous", **document}
    return all(found.get(key) == value for key, value in wanted.items())
