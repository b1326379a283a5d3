"""A run as it is decided before it starts: experiment, settings, data, and the legs it consists of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.data import Images, one_hot, open_set, set_name, split_validation
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import Engine, Task, choose, engine_names
from eqprop.experiments.architecture import Factory, OwnNet
from eqprop.experiments.experiment import ESTIMATORS, Experiment, setting
from eqprop.experiments.io import OLD_ESTIMATORS, from_dict, to_dict
from eqprop.experiments.paper import printed_experiment
from eqprop.messages import unknown
from eqprop.models import CrossEntropy, stack, stack_readouts
from eqprop.relax import Phase, relax
from eqprop.starts import Initialised, Persistent, Start
from eqprop.training.checkpoint import digest
from eqprop.training.folder import FORMAT, OLD_FORMAT, experiment_file, read_json


@dataclass(frozen=True)
class Settings:
    """What a run is, beside its experiment.

    estimators          keys of ESTIMATORS, trained one after the other from the same weights and batches; none: the
                        experiment's own
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

    estimators: tuple[str, ...] = ()
    trials: int = setting("Networks to train, each from its own seed.", 1)
    engine: str = setting("auto, or an engine by name.", "auto")
    device: str = setting("cpu, cuda, cuda:1, ...", "cpu")
    threads: int | None = setting("Threads of the CPU.", None)
    validation: int = setting("Hold out N training samples; test on them.", 0)
    samples: int | None = setting("Train on the first N samples only.", None)
    train_error_every: int = setting("Measure the train error every N epochs.", 0)
    checkpoint_every: float = setting("Seconds between checkpoints in an epoch.", 120.0)
    stacked: bool | None = setting("Trials side by side. [default: where faster]", None)
    states: str = setting("Keep persistent states on the device, or on the cpu.", "device")

    def __post_init__(self) -> None:
        strange = next((m for m in self.estimators if m not in ESTIMATORS), None)
        if strange is not None:
            raise ValueError(unknown("estimator", strange, ESTIMATORS))
        if len(set(self.estimators)) < len(self.estimators):
            raise ValueError(f"estimators is {self.estimators}; expected different ones of {', '.join(ESTIMATORS)}.")
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> Settings:
        known = [f.name for f in fields(cls)]
        strange = next((name for name in values if name not in known), None)
        if strange is not None:
            raise ValueError(f"{source}: {unknown('setting', strange, known)}")
        return cls(**{**values, "estimators": tuple(values.get("estimators", ()))})


def split_estimators(names: str | Sequence[str]) -> tuple[str, ...]:
    """ "ep,bptt" -> ("ep", "bptt")."""
    parts = names.split(",") if isinstance(names, str) else names
    return tuple(part.strip().lower() for part in parts if part.strip())


def named_estimators(
    estimators: str | Sequence[str] | None, methods: str | Sequence[str] | None, experiment: Experiment
) -> tuple[str, ...]:
    """The estimators asked for, the experiment's own where none is.

    Version 0.1.0 named them in two parts: methods "ep", "bptt", "rbp", and for "ep" its form, such as "symmetric".
    """
    asked = split_estimators(estimators or ())
    forms = [name for name in asked if name in OLD_ESTIMATORS]
    if methods is None and not forms:
        return asked or (experiment.estimator,)
    own = experiment.estimator if experiment.estimator.startswith("ep") else "ep"
    form = OLD_ESTIMATORS[forms[0]] if forms else asked[0] if asked else own
    return tuple(form if name == "ep" else name for name in split_estimators(methods or "ep"))


ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Optimizers that treat every number by itself, so that stacked networks stay independent."""


@dataclass(frozen=True)
class Leg:
    """One estimator on trials that run together: a stretch of a run with checkpoints of its own."""

    estimator: str
    trials: tuple[int, ...]
    folder: str


def leg_folder(estimator: str, trial: int, settings: Settings, old: bool = False) -> str:
    """Where the checkpoints of a trial lie in a run folder; version 0.1.0 had one name for every form of EP."""
    name = estimator.partition("-")[0] if old else estimator
    return name if settings.stacked or settings.trials == 1 else f"{name}-{trial}"


@dataclass(frozen=True, eq=False)
class Plan:
    """A run, decided.

    images      on the device          own     builds a network of the user's own
    source      the name of the data set or the directory it came from; None for data given as tensors
    identity    the digest of the experiment.json of the run, which ties checkpoints to it
    old         whether the folder was written by version 0.1.0
    """

    experiment: Experiment
    settings: Settings
    images: Images
    own: Factory | None = None
    identity: str = ""
    source: str | None = None
    old: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.images.train_x.dtype

    @property
    def iterations(self) -> int:
        """Of one epoch."""
        return len(self.images.train_x) // self.experiment.batch

    def legs(self) -> list[Leg]:
        """Estimator after estimator; its trials together, or one after the other where they are not stacked."""
        trials = tuple(range(self.settings.trials))
        groups = [trials] if self.settings.stacked else [(trial,) for trial in trials]
        return [
            Leg(name, group, leg_folder(name, group[0], self.settings, self.old))
            for name in self.settings.estimators
            for group in groups
        ]

    def network(self, trials: tuple[int, ...]) -> Dynamics:
        """The networks of these trials with their initial weights: stacked, or the one."""
        models = [self.experiment.build(trial, self.dtype, self.own).to(self.images.train_x.device) for trial in trials]
        return stack(_stackable(models)) if self.settings.stacked and len(trials) > 1 else models[0]

    def cost(self, model: Dynamics, trials: tuple[int, ...] = (0,)) -> Cost:
        """The cost of these trials with its initial weights, if it has any: stacked as the networks are."""
        x = self.inputs(self.images.train_x[:1], model)
        x = x if model.networks is None else x.expand(model.networks, *x.shape)
        inputs = math.prod(model.init_state(x)[0].shape[model.sample_dims(x) :])
        costs = [
            self.experiment.make_cost(trial, inputs, self.images.classes, self.dtype).to(x.device) for trial in trials
        ]
        readouts = [cost for cost in costs if isinstance(cost, CrossEntropy)]
        return stack_readouts(readouts) if readouts and model.networks is not None else costs[0]

    def task(self, estimator: str, model: Dynamics, cost: Cost, optimizer: torch.optim.Optimizer) -> Task:
        """What an engine is asked to run for one estimator of this run."""
        made = self.experiment.make_estimator(estimator, model)
        return Task(model, cost, made, optimizer, self.experiment.start)

    def engine(self, name: str, task: Task) -> Engine:
        """The engine of that name for this run, or the fastest that serves."""
        away = self.experiment.start == "persistent" and self.settings.states == "cpu" and self.settings.device != "cpu"
        if away and name not in ("auto", "eager"):
            raise ValueError(
                f"The engine {name!r} cannot serve: the states are kept on the CPU, and it runs on "
                f"{self.settings.device}. Keep them on the device (--states device), or use engine='auto'."
            )
        return choose("eager" if away else name, task)

    def inputs(self, x: Tensor, model: Dynamics) -> Tensor:
        """Images (N, pixels) as the model takes them."""
        return x if model.input_shape is None else x.view(len(x), *model.input_shape)

    def to_dict(self) -> dict[str, Any]:
        """What experiment.json holds."""
        printed = printed_experiment(self.experiment)
        return {
            "format": FORMAT,
            "experiment": to_dict(self.experiment),
            "changes_from_paper": None if printed is None else [str(c) for c in self.experiment.changes(printed)],
            "settings": asdict(self.settings),
            "data": {**describe(self.images), **_whence(self.source)},
        }


def make_optimizer(experiment: Experiment, model: Dynamics, cost: Cost | None = None) -> torch.optim.Optimizer:
    """The experiment's optimizer with one group a parameter, the network's then the cost's, each with its own rate."""
    named = [*model.named_parameters(), *([] if cost is None else cost.named_parameters())]
    rates = experiment.rates((name for name, _ in named), model.layer_parameters)
    groups = [{"params": [p], "lr": rates[name]} for name, p in named]
    chosen = getattr(torch.optim, experiment.optimizer)
    options = dict(experiment.optimizer_options)
    try:
        optimizer: torch.optim.Optimizer = chosen(groups, **options)
    except TypeError as error:
        raise ValueError(f"torch.optim.{experiment.optimizer} does not take the options {options}: {error}.") from error
    return optimizer


def make_start(experiment: Experiment, settings: Settings, model: Dynamics, x: Tensor) -> Start | None:
    """The experiment's start for these networks and training inputs, as it is before the first iteration."""
    if experiment.start == "persistent":
        return Persistent(model, x, "cpu" if settings.states == "cpu" else None)
    if experiment.start == "initialised":
        return Initialised(model, x, experiment.initialiser_rate)
    return None


def describe(images: Images) -> dict[str, Any]:
    return {
        "name": images.name,
        "sha256": images.sha256,
        "training_samples": len(images.train_x),
        "test_samples": len(images.test_x),
    }


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
    """Where the data of a run is to be found again, from what its experiment.json says of it."""
    source = data.get("set") or data.get("directory")
    return None if source is None else str(source)


def make_plan(
    experiment: Experiment, settings: Settings, images: Images, own: Factory | None = None, source: str | None = None
) -> Plan:
    """Check that experiment, data and engine go together, and decide whether trials are stacked."""
    if own is not None and not isinstance(experiment.architecture, OwnNet):
        experiment = experiment.override(architecture=OwnNet(_name(own)))
    settings = replace(settings, estimators=settings.estimators or (experiment.estimator,))
    plan = Plan(experiment, settings, images, own, source=source)
    model = experiment.build(0, plan.dtype, own)
    if getattr(model, "nudge_site", experiment.nudge_site) != experiment.nudge_site:
        # A network of one's own says it itself.
        experiment = experiment.override(nudge_site="inside")
        plan = replace(plan, experiment=experiment)
    _check_shapes(plan, model)
    if experiment.batch > len(images.train_x):
        raise ValueError(
            f"A mini-batch of {experiment.batch} needs as many training samples; there are {len(images.train_x)}. "
            "Lower the batch, or hold out fewer samples."
        )
    cost = plan.cost(model)
    optimizer = make_optimizer(experiment, model, cost)
    for name in settings.estimators:
        task = plan.task(name, model, cost, optimizer)
        plan.engine(settings.engine, task)
        _check_estimator(plan, task)
    stacked = _decide_stacking(plan, model)
    plan = replace(plan, settings=replace(settings, stacked=stacked))
    return replace(plan, identity=identity(plan.to_dict()))


def identity(content: Mapping[str, Any]) -> str:
    """What ties a checkpoint to its experiment.json: a run whose experiment was changed under it does not go on."""
    return digest([content.get("experiment", content.get("record")), content["settings"], content["data"]])


@dataclass(frozen=True)
class Described:
    """What a run folder says of itself.

    content     experiment.json as it is        data    of the run: name, checksum, counts, where it was read from
    old         whether version 0.1.0 wrote it
    """

    experiment: Experiment
    settings: Settings
    content: Mapping[str, Any]
    old: bool = False

    @property
    def data(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.content["data"]
        return found

    @property
    def changes(self) -> list[str]:
        """What is not as the paper prints it."""
        return list(self.content.get("changes_from_paper") or [])

    def folder_of(self, estimator: str, trial: int) -> str:
        return leg_folder(estimator, trial, self.settings, self.old)


def read_description(folder: Path) -> Described:
    """The experiment, settings and data of a run."""
    path = experiment_file(folder)
    content = read_json(path, "the experiment of the run; without it this is not a run folder")
    if content.get("format") not in (FORMAT, OLD_FORMAT):
        found = content.get("format")
        raise ValueError(f"{path} has format {found!r}; this version reads {OLD_FORMAT} and {FORMAT}.")
    old = content["format"] == OLD_FORMAT
    key = "record" if old else "experiment"
    missing = [name for name in (key, "settings", "data") if name not in content]
    if missing:
        raise ValueError(f"{path} is damaged: it lacks {', '.join(missing)}. Restore it from a copy.")
    experiment, settings = from_dict(content[key], str(path)), dict(content["settings"])
    if old:
        settings["estimators"] = named_estimators(None, settings.pop("methods", ("ep",)), experiment)
    return Described(experiment, Settings.from_dict(settings, str(path)), content, old)


def _check_shapes(plan: Plan, model: Dynamics) -> None:
    pixels = plan.images.train_x.shape[1]
    if model.input_shape is not None and math.prod(model.input_shape) != pixels:
        raise ValueError(
            f"{plan.experiment.name} takes inputs of shape {model.input_shape}; the images of {plan.images.name} have "
            f"{pixels} pixels. Give a network for them (sizes end with {pixels}), or other data."
        )
    device = plan.images.train_x.device
    x = plan.inputs(plan.images.train_x[:1], model)
    outputs = model.to(device).init_state(x)[0].shape[-1]
    if plan.experiment.cost == "squared-error" and outputs != plan.images.classes:
        raise ValueError(
            f"{plan.experiment.name} has {outputs} outputs; {plan.images.name} has {plan.images.classes} classes. "
            "Give the output layer one neuron a class."
        )
    # A step in the schedule asked for, so that a network that cannot alternate is told before anything is written.
    relax(model, x, Phase(2, plan.experiment.schedule))


def _check_estimator(plan: Plan, task: Task) -> None:
    """One sample is tried, so that an estimator a network cannot have is told before anything is written."""
    images = plan.images
    x = plan.inputs(images.train_x[:1], task.model)
    y = one_hot(images.train_y[:1], images.classes, plan.dtype)
    assert task.estimator is not None, "a task of this run has one"
    task.estimator.check_serves(task.model, plan.cost(task.model), x, y)


def _decide_stacking(plan: Plan, model: Dynamics) -> bool:
    """Side by side where the networks can be stacked and the engine is the one a single network would get."""
    settings, experiment = plan.settings, plan.experiment
    reason = _against_stacking(model, experiment)
    if settings.stacked and reason:
        raise ValueError(f"The trials cannot be stacked: {reason}. Leave stacked out, or say stacked=False.")
    if settings.trials == 1 or reason or settings.stacked is False:
        return False
    if settings.stacked:
        return True
    pair = stack(_stackable([model, model]))
    return _engines(plan, model, (0,)) == _engines(plan, pair, (0, 1))


def _engines(plan: Plan, model: Dynamics, trials: tuple[int, ...]) -> list[str]:
    """The engine each estimator would get for this model."""
    cost = plan.cost(model, trials)
    optimizer = make_optimizer(plan.experiment, model, cost)
    tasks = [plan.task(name, model, cost, optimizer) for name in plan.settings.estimators]
    return [plan.engine(plan.settings.engine, task).name for task in tasks]


def _against_stacking(model: Dynamics, experiment: Experiment) -> str | None:
    if not isinstance(model, PrimitiveDynamics) or isinstance(experiment.architecture, OwnNet):
        return "a network of one's own runs one trial after the other"
    if experiment.optimizer not in ELEMENTWISE:
        return f"the optimizer {experiment.optimizer} looks at more than one number at a time, and would mix the trials"
    return None


def _stackable(models: list[Dynamics]) -> list[PrimitiveDynamics]:
    return [m for m in models if isinstance(m, PrimitiveDynamics)]


def _name(own: Factory) -> str:
    return str(getattr(own, "__qualname__", type(own).__name__))
