"""A run as it is decided before it starts: record, settings, data, and the legs it consists of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.data import Images, one_hot, open_set, set_name, split_validation
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import Engine, choose, engine_names
from eqprop.estimators import Estimator
from eqprop.experiments.architecture import Factory, OwnNet
from eqprop.experiments.experiment import METHODS, Record
from eqprop.experiments.io import from_plain, to_plain
from eqprop.experiments.paper import printed_record
from eqprop.messages import unknown
from eqprop.models import CrossEntropy, stack, stack_readouts
from eqprop.relax import Phase, relax
from eqprop.starts import Initialised, Persistent, Start
from eqprop.training.checkpoint import digest
from eqprop.training.folder import FORMAT, RECORD, read_json


@dataclass(frozen=True)
class Settings:
    """What a run is, beside its record.

    methods             "ep", "bptt", "rbp", trained one after the other from the same weights and batches
    trials              networks trained, trial r from seed + r
    engine, device      see `eqprop.engines`; "auto" takes the fastest engine that serves
    threads             of the CPU; None: as torch has it
    validation          hold out the last N training samples, and test on them instead of the test set
    samples             train on the first N samples only; None: all
    train_error_every   measure the error on the whole training set every N epochs; 0: after the last one only
    checkpoint_every    seconds between two checkpoints inside a long epoch
    stacked             trials side by side as one stacked network; None: where that is possible and faster
    states              where persistent states are kept: on the "device", or on the "cpu" where they do not fit there
    """

    methods: tuple[str, ...] = ("ep",)
    trials: int = 1
    engine: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    validation: int = 0
    samples: int | None = None
    train_error_every: int = 0
    checkpoint_every: float = 120.0
    stacked: bool | None = None
    states: str = "device"

    def __post_init__(self) -> None:
        strange = next((m for m in self.methods if m not in METHODS), None)
        if strange is not None:
            raise ValueError(unknown("method", strange, METHODS))
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods is {self.methods}; expected one or more different ones of {', '.join(METHODS)}.")
        if self.engine not in engine_names():
            raise ValueError(unknown("engine", self.engine, engine_names()))
        for name, least in (("trials", 1), ("validation", 0), ("train_error_every", 0), ("threads", 1), ("samples", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} is {value!r}; expected a whole number, {least} or more.")
        if self.states not in ("device", "cpu"):
            raise ValueError(
                f"states is {self.states!r}; expected 'device' or 'cpu', where persistent states are kept."
            )
        if not self.checkpoint_every > 0:
            raise ValueError(f"checkpoint_every is {self.checkpoint_every!r}; expected a number of seconds above 0.")

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], source: str) -> Settings:
        known = [f.name for f in fields(cls)]
        strange = next((name for name in values if name not in known), None)
        if strange is not None:
            raise ValueError(f"{source}: {unknown('setting', strange, known)}")
        return cls(**{**values, "methods": tuple(values.get("methods", ("ep",)))})


def split_methods(text: str) -> tuple[str, ...]:
    """ "ep,bptt" -> ("ep", "bptt")."""
    return tuple(part.strip().lower() for part in text.split(",") if part.strip())


ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Optimizers that treat every number by itself, so that stacked networks stay independent."""


@dataclass(frozen=True)
class Leg:
    """One method on trials that run together: a stretch of a run with checkpoints of its own."""

    method: str
    trials: tuple[int, ...]
    folder: str


@dataclass(frozen=True, eq=False)
class Plan:
    """A run, decided.

    images      on the device          own     builds a network of the user's own
    source      the name of the data set or the directory it came from; None for data given as tensors
    identity    the digest of the record.json of the run, which ties checkpoints to it
    """

    record: Record
    settings: Settings
    images: Images
    own: Factory | None = None
    identity: str = ""
    source: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.images.train_x.dtype

    @property
    def iterations(self) -> int:
        """Of one epoch."""
        return len(self.images.train_x) // self.record.batch

    def legs(self) -> list[Leg]:
        """Method after method; the trials of a method together, or one after the other where they are not stacked."""
        trials = tuple(range(self.settings.trials))
        if self.settings.stacked:
            return [Leg(method, trials, method) for method in self.settings.methods]
        return [
            Leg(method, (trial,), method if len(trials) == 1 else f"{method}-{trial}")
            for method in self.settings.methods
            for trial in trials
        ]

    def network(self, trials: tuple[int, ...]) -> Dynamics:
        """The networks of these trials with their initial weights: stacked, or the one."""
        models = [self.record.build(trial, self.dtype, self.own).to(self.images.train_x.device) for trial in trials]
        return stack(_stackable(models)) if self.settings.stacked and len(trials) > 1 else models[0]

    def cost(self, model: Dynamics, trials: tuple[int, ...] = (0,)) -> Cost:
        """The cost of these trials with its initial weights, if it has any: stacked as the networks are."""
        x = self.inputs(self.images.train_x[:1], model)
        x = x if model.networks is None else x.expand(model.networks, *x.shape)
        inputs = math.prod(model.init_state(x)[0].shape[model.sample_dims(x) :])
        costs = [self.record.make_cost(trial, inputs, self.images.classes, self.dtype).to(x.device) for trial in trials]
        readouts = [cost for cost in costs if isinstance(cost, CrossEntropy)]
        return stack_readouts(readouts) if readouts and model.networks is not None else costs[0]

    def estimator(self, method: str, model: Dynamics) -> Estimator:
        return self.record.make_estimator(method, [name for name, _ in model.named_parameters()])

    def engine(
        self, name: str, model: Dynamics, cost: Cost, estimator: Estimator, optimizer: torch.optim.Optimizer
    ) -> Engine:
        """The engine of that name for this run, or the fastest that serves."""
        away = self.record.start == "persistent" and self.settings.states == "cpu" and self.settings.device != "cpu"
        if away and name not in ("auto", "eager"):
            raise ValueError(
                f"The engine {name!r} cannot serve: the states are kept on the CPU, and it runs on "
                f"{self.settings.device}. Keep them on the device (--states device), or use engine='auto'."
            )
        return choose("eager" if away else name, model, cost, estimator, optimizer, self.record.start)

    def inputs(self, x: Tensor, model: Dynamics) -> Tensor:
        """Images (N, pixels) as the model takes them."""
        return x if model.input_shape is None else x.view(len(x), *model.input_shape)

    def plain(self) -> dict[str, Any]:
        """What record.json holds."""
        printed = printed_record(self.record)
        return {
            "format": FORMAT,
            "record": to_plain(self.record),
            "changes_from_paper": None if printed is None else [str(c) for c in self.record.changes(printed)],
            "settings": self.settings.to_plain(),
            "data": {**describe(self.images), **_whence(self.source)},
        }


def make_optimizer(record: Record, model: Dynamics, cost: Cost | None = None) -> torch.optim.Optimizer:
    """The record's optimizer with one group a parameter, the network's then the cost's, each with its own rate."""
    named = [*model.named_parameters(), *([] if cost is None else cost.named_parameters())]
    rates = record.rates(name for name, _ in named)
    groups = [{"params": [p], "lr": rates[name]} for name, p in named]
    chosen = getattr(torch.optim, record.optimizer)
    options = dict(record.optimizer_options)
    try:
        optimizer: torch.optim.Optimizer = chosen(groups, **options)
    except TypeError as error:
        raise ValueError(f"torch.optim.{record.optimizer} does not take the options {options}: {error}.") from error
    return optimizer


def make_start(record: Record, settings: Settings, model: Dynamics, x: Tensor) -> Start | None:
    """The record's start for these networks and training inputs, as it is before the first iteration."""
    if record.start == "persistent":
        return Persistent(model, x, "cpu" if settings.states == "cpu" else None)
    if record.start == "initialised":
        return Initialised(model, x, record.initialiser_rate)
    return None


def describe(images: Images) -> dict[str, Any]:
    return {
        "name": images.name,
        "sha256": images.sha256,
        "training_samples": len(images.train_x),
        "test_samples": len(images.test_x),
    }


def run_digest(plain: Mapping[str, Any]) -> str:
    """What ties a checkpoint to its record.json: a record that was changed under a run does not go on."""
    return digest([plain["record"], plain["settings"], plain["data"]])


def read_images(source: Images | str | Path | None, settings: Settings) -> Images:
    """A set by name (None: MNIST), in a directory, or at hand; on the device, cut as the settings say."""
    if isinstance(source, Images):
        images = replace(
            source,
            **{name: getattr(source, name).to(settings.device) for name in ("train_x", "train_y", "test_x", "test_y")},
        )
    else:
        images = open_set(source, settings.device)
    if settings.validation:
        images = split_validation(images, settings.validation)
    if settings.samples is not None:
        if settings.samples > len(images.train_x):
            raise ValueError(f"samples is {settings.samples}; {images.name} has {len(images.train_x)} to train on.")
        n = settings.samples
        images = replace(images, train_x=images.train_x[:n], train_y=images.train_y[:n])
    return images


def where_from(source: Images | str | Path | None) -> str | None:
    """Where data was read from, as it is recorded: the name of a set, or a directory; None for tensors."""
    if isinstance(source, Images):
        return None
    name = set_name(source)
    return str(Path(str(source)).resolve()) if name is None else name


def _whence(source: str | None) -> dict[str, str | None]:
    name = None if source is None else set_name(source)
    return {"set": name, "directory": source if name is None else None}


def recorded_source(data: Mapping[str, Any]) -> str | None:
    """Where the data of a run is to be found again, from what its record.json says of it."""
    source = data.get("set") or data.get("directory")
    return None if source is None else str(source)


def make_plan(
    record: Record, settings: Settings, images: Images, own: Factory | None = None, source: str | None = None
) -> Plan:
    """Check that record, data and engine go together, and decide whether trials are stacked."""
    if own is not None and not isinstance(record.architecture, OwnNet):
        record = record.override(architecture=OwnNet(_name(own)))
    plan = Plan(record, settings, images, own, source=source)
    model = record.build(0, plan.dtype, own)
    if getattr(model, "nudge", record.nudge) != record.nudge:  # a network of one's own says it itself
        record = record.override(nudge="inside")
        plan = replace(plan, record=record)
    _check_shapes(plan, model)
    if record.batch > len(images.train_x):
        raise ValueError(
            f"A mini-batch of {record.batch} needs as many training samples; there are {len(images.train_x)}. "
            "Lower the batch, or hold out fewer samples."
        )
    cost = plan.cost(model)
    optimizer = make_optimizer(record, model, cost)
    for method in settings.methods:
        estimator = plan.estimator(method, model)
        plan.engine(settings.engine, model, cost, estimator, optimizer)
        _check_estimator(plan, estimator, model)
    stacked = _decide_stacking(plan, model)
    plan = replace(plan, settings=replace(settings, stacked=stacked))
    return replace(plan, identity=run_digest(plan.plain()))


def read_plan(folder: Path) -> tuple[Record, Settings, dict[str, Any]]:
    """What ran in a folder: its record, its settings and everything record.json says."""
    plain = read_json(folder / RECORD, "the record of the run; without it this is not a run folder")
    if plain.get("format") != FORMAT:
        raise ValueError(f"{folder / RECORD} has format {plain.get('format')!r}; this version reads {FORMAT}.")
    missing = [key for key in ("record", "settings", "data") if key not in plain]
    if missing:
        raise ValueError(f"{folder / RECORD} is damaged: it lacks {', '.join(missing)}. Restore it from a copy.")
    source = str(folder / RECORD)
    return from_plain(plain["record"], source), Settings.from_plain(plain["settings"], source), plain


def _check_shapes(plan: Plan, model: Dynamics) -> None:
    pixels = plan.images.train_x.shape[1]
    if model.input_shape is not None and math.prod(model.input_shape) != pixels:
        raise ValueError(
            f"{plan.record.name} takes inputs of shape {model.input_shape}; the images of {plan.images.name} have "
            f"{pixels} pixels. Give a network for them (sizes end with {pixels}), or other data."
        )
    device = plan.images.train_x.device
    x = plan.inputs(plan.images.train_x[:1], model)
    outputs = model.to(device).init_state(x)[0].shape[-1]
    if plan.record.cost == "squared-error" and outputs != plan.images.classes:
        raise ValueError(
            f"{plan.record.name} has {outputs} outputs; {plan.images.name} has {plan.images.classes} classes. "
            "Give the output layer one neuron a class."
        )
    # A step in the schedule asked for, so that a network that cannot alternate is told before anything is written.
    relax(model, x, Phase(2, plan.record.schedule))


def _check_estimator(plan: Plan, estimator: Estimator, model: Dynamics) -> None:
    """One sample is tried, so that an estimator a network cannot have is told before anything is written."""
    images = plan.images
    x = plan.inputs(images.train_x[:1], model)
    estimator.check_serves(model, plan.cost(model), x, one_hot(images.train_y[:1], images.classes, plan.dtype))


def _decide_stacking(plan: Plan, model: Dynamics) -> bool:
    """Side by side where the networks can be stacked and the engine is the one a single network would get."""
    settings, record = plan.settings, plan.record
    reason = _against_stacking(model, record)
    if settings.stacked and reason:
        raise ValueError(f"The trials cannot be stacked: {reason}. Leave stacked out, or say stacked=False.")
    if settings.trials == 1 or reason or settings.stacked is False:
        return False
    if settings.stacked:
        return True
    pair = stack(_stackable([model, model]))
    return _engines(plan, model, (0,)) == _engines(plan, pair, (0, 1))


def _engines(plan: Plan, model: Dynamics, trials: tuple[int, ...]) -> list[str]:
    """The engine each method would get for this model."""
    cost = plan.cost(model, trials)
    optimizer = make_optimizer(plan.record, model, cost)
    return [
        plan.engine(plan.settings.engine, model, cost, plan.estimator(method, model), optimizer).name
        for method in plan.settings.methods
    ]


def _against_stacking(model: Dynamics, record: Record) -> str | None:
    if not isinstance(model, PrimitiveDynamics) or isinstance(record.architecture, OwnNet):
        return "a network of one's own runs one trial after the other"
    if record.optimizer not in ELEMENTWISE:
        return f"the optimizer {record.optimizer} looks at more than one number at a time, and would mix the trials"
    return None


def _stackable(models: list[Dynamics]) -> list[PrimitiveDynamics]:
    return [m for m in models if isinstance(m, PrimitiveDynamics)]


def _name(own: Factory) -> str:
    return str(getattr(own, "__qualname__", type(own).__name__))
