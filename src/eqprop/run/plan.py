"""The plan of a run, checked before it starts: experiment, settings, data, and the legs it consists of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.data import Data, Images, Streamed, as_images, content_digest, open_set, set_name, split_validation
from eqprop.data.images import MNIST_DIGEST, check_device, is_mnist
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import ENGINES, EXCHANGE, STREAMED, Engine, Task, choose, engine_names, threads_for
from eqprop.estimators import EP, Backprop, Estimator
from eqprop.experiments.architecture import Factory, Own, OwnNet, as_own
from eqprop.experiments.experiment import ESTIMATORS, Experiment, setting
from eqprop.experiments.io import from_dict, to_dict
from eqprop.experiments.paper import printed_experiment
from eqprop.messages import shown, unknown
from eqprop.models import CrossEntropy, stack, stack_readouts
from eqprop.models.readout import OWN_COST
from eqprop.relax import SWEEPS, Phase, relax
from eqprop.run.checkpoint import digest
from eqprop.run.distributed import ALONE, Ranks, check_divides
from eqprop.run.extras import image_shape, make_optimizer
from eqprop.run.folder import EXPERIMENT, FORMAT, read_json
from eqprop.starts import Carried, Initialised, Persistent, Start

COUNTS = {
    "trials": (1, 1000),
    "validation": (0, 10**9),
    "train_error_every": (0, 10**9),
    "threads": (1, 1024),
    "samples": (1, 10**9),
    "test_samples": (1, 10**9),
    "patience": (0, 10**9),
    "keep_every": (0, 10**9),
}
"""Limits of the whole numbers among the settings."""
PARALLEL = ("auto", "networks", "batch")
MOST_LINES = 1_000_000
"""Limit of estimators x trials x epochs: each has a line in metrics.jsonl, of about 3 kB in memory."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run that do not belong to its experiment.

    estimators          keys of ESTIMATORS, trained one after the other from the same weights and batches; empty: the
                        experiment's own
    trials              number of networks; trial r uses seed + r
    engine, device      see `eqprop.engines`; "auto" takes the fastest engine that supports the task
    threads             CPU threads; None: one for small networks (see `eqprop.engines.threads_for`)
    validation          hold out the last N training samples, and test on them instead of the test set
    samples             train on the first N samples only; None: all
    test_samples        test on the first N samples only; None: all
    train_error_every   measure the error on the whole training set every N epochs; 0: only after the last
    checkpoint_every    seconds between checkpoints within a long epoch
    stacked             train all trials together as one stacked network; None: if possible and faster
    patience            end a leg when its test error has not fallen for N epochs; 0: never
    keep_best           keep the weights of the epoch with the lowest test error too
    keep_every          keep the weights of every N-th epoch too; 0: only the last
    deterministic       use torch's algorithms that repeat every bit, on a GPU too
    states              where to keep persistent states: on the "device", or on the "cpu" if they do not fit there
    parallel            what several processes divide: whole "networks" (estimators and trials), or each mini-"batch";
                        "auto" divides networks if there are several
    """

    estimators: tuple[str, ...] = ()
    trials: int = setting("Networks to train, each from its own seed.", 1)
    engine: str = setting("auto, or an engine by name.", "auto")
    device: str = setting("cpu, cuda, cuda:1, ...", "cpu")
    threads: int | None = setting("CPU threads.", None)
    validation: int = setting("Hold out N training samples; test on them.", 0, group="Data")
    samples: int | None = setting("Train on the first N samples only.", None, group="Data")
    test_samples: int | None = setting("Test on the first N samples only.", None, group="Data")
    train_error_every: int = setting("Measure the train error every N epochs.", 0)
    checkpoint_every: float = setting("Seconds between checkpoints in an epoch.", 120.0)
    stacked: bool | None = setting("Train trials side by side. [default: if faster]", None)
    patience: int = setting("Stop when the test error has not fallen for N epochs.", 0)
    keep_best: bool = setting("Also keep the weights with the lowest test error.", False)
    keep_every: int = setting("Also keep the weights of every N-th epoch.", 0)
    deterministic: bool = setting("Use algorithms that repeat every bit, on a GPU too.", False)
    states: str = setting("Where to keep persistent states: device or cpu.", "device")
    parallel: str = setting("What processes divide: auto, networks or batch.", "auto")

    def __post_init__(self) -> None:
        object.__setattr__(self, "estimators", split_estimators(self.estimators))
        strange = next((m for m in self.estimators if m not in ESTIMATORS), None)
        if strange is not None:
            raise ValueError(unknown("estimator", strange, ESTIMATORS))
        if len(set(self.estimators)) < len(self.estimators):
            raise ValueError(f"estimators is {self.estimators}; expected no duplicates, from {', '.join(ESTIMATORS)}.")
        for name in ("engine", "device", "states", "parallel"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {shown(getattr(self, name))}; expected a name.")
        if self.engine != "auto" and self.engine not in ENGINES:
            raise ValueError(unknown("engine", self.engine, engine_names()))
        for name, (least, most) in COUNTS.items():
            value = getattr(self, name)
            if value is None and name in ("threads", "samples", "test_samples"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name} is {shown(value)}; expected a whole number from {least} to {most}.")
        for name in ("keep_best", "deterministic", "stacked"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "stacked"):
                raise ValueError(f"{name} is {shown(value)}; expected True or False.")
        if self.states not in ("device", "cpu"):
            raise ValueError(
                f"states is {self.states!r}; expected 'device' or 'cpu', the place to keep persistent states."
            )
        if self.parallel not in PARALLEL:
            raise ValueError(unknown("way to divide the work (parallel)", self.parallel, PARALLEL))
        seconds = self.checkpoint_every
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(f"checkpoint_every is {self.checkpoint_every!r}; expected a number of seconds above 0.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> Settings:
        known = [f.name for f in fields(cls)]
        strange = next((name for name in values if name not in known), None)
        if strange is not None:
            raise ValueError(f"{source}: {unknown('setting', strange, known)}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error


def split_estimators(names: str | Sequence[str]) -> tuple[str, ...]:
    """ "ep,bptt" -> ("ep", "bptt")."""
    parts = names.split(",") if isinstance(names, str) else names
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"estimators is {shown(names)}; expected names from {', '.join(ESTIMATORS)}.")
    return tuple(part.strip().lower() for part in parts if part.strip())


ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Optimizers that update each element independently, so that stacked networks do not mix."""


@dataclass(frozen=True)
class Leg:
    """One estimator on trials that run together: a part of a run with its own checkpoints."""

    estimator: str
    trials: tuple[int, ...]
    folder: str


def leg_folder(estimator: str, trial: int, settings: Settings) -> str:
    """The subfolder of a trial's checkpoints."""
    return estimator if settings.stacked or settings.trials == 1 else f"{estimator}-{trial}"


def all_legs(settings: Settings) -> list[Leg]:
    """One estimator after the other; its trials together if stacked, else one by one."""
    trials = tuple(range(settings.trials))
    groups = [trials] if settings.stacked else [(trial,) for trial in trials]
    return [Leg(name, group, leg_folder(name, group[0], settings)) for name in settings.estimators for group in groups]


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a run needs.

    images      on the device          own     builds the user's own network
    source      the name of the data set, or the directory it came from; None for tensors
    identity    digest of the run's experiment.json, which ties checkpoints to it
    ranks       the processes among which each mini-batch is divided
    """

    experiment: Experiment
    settings: Settings
    images: Images | Streamed
    own: Own | None = None
    identity: str = ""
    source: str | None = None
    ranks: Ranks = ALONE

    @property
    def dtype(self) -> torch.dtype:
        return self.images.dtype

    @property
    def iterations(self) -> int:
        """Iterations per epoch."""
        return self.images.train_samples // self.experiment.batch

    @property
    def device(self) -> torch.device:
        return self.images.device if isinstance(self.images, Streamed) else self.images.train_x.device

    def first(self, n: int = 1) -> tuple[Tensor, Tensor]:
        """The first n training samples as they are stored, (n, pixels), and their answers."""
        return self.images.first(n)

    @cached_property
    def groups(self) -> int | None:
        """How many updates make a sweep; None where all layers move at once."""
        if self.experiment.schedule not in SWEEPS:
            return None
        model = self.network((0,))
        return len(model.sweep(len(model.init_state(self.inputs(self.first()[0], model)))))

    def legs(self) -> list[Leg]:
        return all_legs(self.settings)

    def network(self, trials: tuple[int, ...]) -> Dynamics:
        """Build these trials' networks with their initial weights, stacked if there are several."""
        models = [self.experiment.build(trial, self.dtype, self.own).to(self.device) for trial in trials]
        return stack(_stackable(models)) if self.settings.stacked and len(trials) > 1 else models[0]

    def cost(self, model: Dynamics, trials: tuple[int, ...] = (0,)) -> Cost:
        """Build these trials' cost with its initial weights, if it has any; stacked like the networks."""
        x = self.inputs(self.first()[0], model)
        x = x if model.networks is None else x.expand(model.networks, *x.shape)
        inputs = math.prod(model.init_state(x)[0].shape[model.sample_dims(x) :])
        costs = [
            self.experiment.make_cost(trial, inputs, self.images.classes, self.dtype, self.own).to(x.device)
            for trial in trials
        ]
        readouts = [cost for cost in costs if isinstance(cost, CrossEntropy)]
        return stack_readouts(readouts) if readouts and model.networks is not None else costs[0]

    def task(self, estimator: str, model: Dynamics, cost: Cost, optimizer: torch.optim.Optimizer) -> Task:
        """The task an engine runs for one estimator."""
        made = self.experiment.make_estimator(estimator, model)
        # One forward pass has no start.
        start = "zero" if isinstance(made, Backprop) else self.experiment.start
        work = self._work(model, made)
        return Task(model, cost, made, optimizer, start, self.extras, self.experiment.precision, work)

    def _work(self, model: Dynamics, estimator: Estimator) -> float:
        """Multiplications and additions of the phases of an epoch by EP; 0 by other estimators."""
        if not isinstance(estimator, EP):
            return 0.0
        updates = estimator.T + estimator.K * (2 if estimator.nudging == "symmetric" else 1)
        samples = self.iterations * self.experiment.batch
        return float(samples * model.operations() * updates / (self.groups or 1))

    @property
    def extras(self) -> tuple[str, ...]:
        """What an iteration does besides mini-batch, gradient and optimizer step (see `Job.extras`)."""
        asked = {
            "preparation of samples": self.augments,
            STREAMED: isinstance(self.images, Streamed),
            "gradient clipping": self.experiment.clip_norm,
            EXCHANGE: self.ranks.several,
            "weight averaging": self.experiment.average,
        }
        return tuple(name for name, given in asked.items() if given)

    def targets(self, y: Tensor) -> Tensor:
        """What training compares outputs with, (N, classes), smoothed if the experiment says so."""
        targets, share = self.images.targets(y, self.dtype), self.experiment.label_smoothing
        return targets if not share else targets * (1.0 - share) + share / self.images.classes

    def engine(self, name: str, task: Task) -> Engine:
        """The engine of that name, or the fastest that supports the task."""
        away = self.experiment.start == "persistent" and self.settings.states == "cpu" and self.settings.device != "cpu"
        if away and name not in ("auto", "eager"):
            raise ValueError(
                f"The engine {name!r} cannot serve: it runs on {self.settings.device}, but the states are "
                f"kept on the CPU. Keep them on the device (--states device), or use engine='auto'."
            )
        return choose("eager" if away else name, task)

    def inputs(self, x: Tensor, model: Dynamics) -> Tensor:
        """Images (..., pixels) as floats in the model's input shape, normalised if the experiment says so."""
        lead = x.shape[:-1]
        normalisation = self.experiment.normalisation
        if normalisation is None:
            x = self.images.floats(x)
        else:
            x = normalisation(x.reshape(*lead, *image_shape(self.images.shape)), self.dtype).flatten(len(lead))
        return x if model.input_shape is None else x.view(*lead, *model.input_shape)

    @property
    def augments(self) -> bool:
        augmentation = self.experiment.augmentation
        return augmentation is not None and augmentation.active

    @property
    def makes_inputs(self) -> bool:
        """Whether inputs are other numbers than the stored samples, and so are made batch by batch."""
        stored = None if isinstance(self.images, Streamed) else self.images.train_x.dtype
        return self.augments or self.experiment.normalisation is not None or stored != self.dtype

    def to_dict(self) -> dict[str, Any]:
        """The content of experiment.json."""
        return {
            "format": FORMAT,
            "experiment": to_dict(self.experiment),
            "changes_from_paper": self.changes_from_paper,
            "settings": asdict(self.settings),
            "data": self.data,
        }

    @property
    def data(self) -> dict[str, Any]:
        """Name, checksum and counts of the data, and where it was read from."""
        return {**describe(self.images), **_whence(self.source)}

    @property
    def changes_from_paper(self) -> list[str] | None:
        """What is not as printed; None for an experiment of one's own."""
        printed = printed_experiment(self.experiment)
        return None if printed is None else [str(change) for change in self.experiment.changes(printed)]


def make_start(
    experiment: Experiment, settings: Settings, model: Dynamics, x: Tensor, source: str | None = None
) -> Start | None:
    """The experiment's start for these networks and training inputs, before the first iteration."""
    if experiment.start == "persistent":
        return Persistent(model, x, "cpu" if settings.states == "cpu" else None, source)
    if experiment.start == "initialised":
        return Initialised(model, x, experiment.initialiser_rate)
    if experiment.start == "carried":
        return Carried(model, x, experiment.batch)
    return None


TARGETS = "targets"
"""Field of the data in experiment.json: the numbers a sample has as its answer, where that is no class."""


def describe(images: Images | Streamed) -> dict[str, Any]:
    return {
        "name": images.name,
        "sha256": images.sha256,
        "training_samples": images.train_samples,
        "test_samples": images.test_samples,
        **({"fingerprint": images.fingerprint} if images.fingerprint else {}),
        **({"class_names": list(images.class_names)} if images.class_names else {}),
        **({} if images.labelled else {TARGETS: images.classes}),
    }


@overload
def given_data(data: Streamed) -> Streamed: ...


@overload
def given_data(data: Data) -> Images | str | Path | None: ...


def given_data(data: Data | Streamed) -> Images | Streamed | str | Path | None:
    """A name or path unchanged; anything else as `Images` with a fingerprint, to recognise it on resume."""
    if isinstance(data, Streamed):
        return data
    found = as_images(data)
    if not isinstance(found, Images):
        return found
    return replace(found, fingerprint=content_digest(found.train_x, found.train_y, found.test_x, found.test_y))


@overload
def read_images(source: Images | str | Path | None, settings: Settings) -> Images: ...


@overload
def read_images(source: Images | Streamed | str | Path | None, settings: Settings) -> Images | Streamed: ...


def read_images(source: Images | Streamed | str | Path | None, settings: Settings) -> Images | Streamed:
    """Load a set by name (None: MNIST) or path, or take it as given; move it to the device and cut it to size."""
    check_device(settings.device)
    if isinstance(source, Streamed):
        source = source.to(settings.device)
        source = source.split_validation(settings.validation) if settings.validation else source
        return source.cut(settings.samples, settings.test_samples)
    images = source.to(settings.device) if isinstance(source, Images) else open_set(source, settings.device)
    if settings.validation:
        images = split_validation(images, settings.validation)
    if (n := settings.samples) is not None:
        _check_there(f"samples is {n}; {images.name}", n, images.train_samples, "training")
        images = replace(images, train_x=images.train_x[:n], train_y=images.train_y[:n])
    if (n := settings.test_samples) is not None:
        _check_there(f"test_samples is {n}; {images.name}", n, images.test_samples, "test")
        images = replace(images, test_x=images.test_x[:n], test_y=images.test_y[:n])
    if not len(images.test_x):
        raise ValueError(f"{images.name} has no test images. Hold out training images: --validation N.")
    return images


def _check_there(what: str, n: int, there: int, kind: str) -> None:
    if n > there:
        raise ValueError(f"{what} has {there} {kind} samples. Lower it.")


def where_from(source: Images | Streamed | str | Path | None) -> str | None:
    """The recorded origin of data: the name of a set, or a path; None for tensors that are not MNIST's."""
    if isinstance(source, Streamed):
        return None
    if isinstance(source, Images):
        return "mnist" if is_mnist(source) else None
    name = set_name(source)
    return str(Path(str(source)).resolve()) if name is None else name


def _whence(source: str | None) -> dict[str, str | None]:
    name = None if source is None else set_name(source)
    return {"set": name, "directory": source if name is None else None}


def data_name(data: Mapping[str, Any]) -> str:
    """What a run's data is called, from its experiment.json."""
    return str(data.get("set") or data.get("name") or "data without a name")


def data_again(described: Described, data: Data | Streamed, own: Own | None) -> Images | Streamed | str | Path | None:
    """The data of a run: as given, where its folder says it was, or from your own function."""
    if data is not None:
        return given_data(data)
    recorded = described.data
    if source := recorded.get("set") or recorded.get("directory"):
        return str(source)
    # Tensors that were given and changed keep the checksum of the files they came from.
    if recorded.get("sha256") == MNIST_DIGEST and "fingerprint" not in recorded:
        return None
    if own is not None and (its := own.data()) is not None:
        return given_data(its)
    raise ValueError(
        f"The run was trained on arrays ({recorded.get('name')}), which its folder does not hold. Give the same data "
        "again with data=, or --model FILE.py:FUNCTION if that function returned it."
    )


def make_plan(
    experiment: Experiment,
    settings: Settings,
    images: Images | Streamed,
    own: Factory | None = None,
    source: str | None = None,
    ranks: Ranks = ALONE,
) -> Plan:
    """Check that experiment, data and engine fit together, and decide whether to stack trials."""
    function = as_own(own)
    experiment = under_own_name(experiment, function)
    settings = replace(settings, estimators=settings.estimators or (experiment.estimator,))
    _check_lines(experiment, settings)
    check_divides(experiment.batch, ranks.size)
    if isinstance(images, Streamed) and experiment.augmentation is not None and experiment.augmentation.active:
        images = images.in_unit_range()
    plan = Plan(experiment, settings, images, function, source=source, ranks=ranks)
    model = experiment.build(0, plan.dtype, function)
    site = getattr(model, "nudge_site", experiment.nudge_site)
    if site != experiment.nudge_site:
        # The user's own network declares its nudge site.
        experiment = experiment.override(nudge_site=site)
        plan = replace(plan, experiment=experiment)
    _check_shapes(plan, model)
    _check_images(experiment, images)
    if experiment.label_smoothing and not images.labelled:
        raise ValueError(
            f"label_smoothing is {experiment.label_smoothing}, but {images.name} has targets, not labels. Omit it."
        )
    if experiment.batch > images.train_samples:
        raise ValueError(
            f"A mini-batch of {experiment.batch} is too large; there are only {images.train_samples} training samples. "
            "Lower the batch, or hold out fewer samples."
        )
    cost = plan.cost(model)
    optimizer = make_optimizer(experiment, model, cost)
    for name in settings.estimators:
        task = plan.task(name, model, cost, optimizer)
        plan.engine(settings.engine, task)
        _check_estimator(plan, task)
    stacked = _decide_stacking(plan, model)
    threads = settings.threads or _threads(plan, model, stacked)
    plan = replace(plan, settings=replace(settings, stacked=stacked, threads=threads))
    return replace(plan, identity=identity(plan.to_dict()))


def _check_images(experiment: Experiment, images: Images | Streamed) -> None:
    """Raise unless the images can be normalised and augmented as the experiment says."""
    shape = image_shape(images.shape)
    if experiment.normalisation is not None:
        experiment.normalisation.check(shape)
    if experiment.augmentation is not None:
        # Test images are not augmented, but are taken to have the same grey levels.
        known = (images.train_x, images.test_x) if isinstance(images, Images) else (images.first(1)[0],)
        for x in known:
            experiment.augmentation.check(x, images.shape)


def _check_lines(experiment: Experiment, settings: Settings) -> None:
    lines = len(settings.estimators) * settings.trials * experiment.epochs
    if lines > MOST_LINES:
        raise ValueError(
            f"{len(settings.estimators)} estimators x {settings.trials} trials x {experiment.epochs} epochs are "
            f"{lines} lines of metrics; at most {MOST_LINES} are kept. Lower the trials or the epochs."
        )


def under_own_name(experiment: Experiment, own: Own | None) -> Experiment:
    """The experiment for a network of one's own: under the name of its function, with no preset and no paper result.

    If the function also gives a cost, and the experiment names no other, it is trained with that one.
    """
    if own is None:
        return experiment
    if own.has_cost and experiment.cost == "squared-error":
        experiment = replace(experiment, cost=OWN_COST)
    if isinstance(experiment.architecture, OwnNet):
        return experiment
    name = own.name.rpartition(":")[2].rpartition(".")[2]
    return replace(
        experiment,
        name=name if name.isidentifier() else "own",
        architecture=OwnNet(own.name),
        preset="own",
        paper_results={},
    )


EARLIER = "earlier_epochs"
"""Field of experiment.json: the numbers of epochs a run was to have before they were raised, the first one first."""


def identity(content: Mapping[str, Any]) -> str:
    """Digest that ties checkpoints to experiment.json: a run whose experiment was edited does not resume.

    Of the epochs it takes the first number, so that earlier checkpoints stay valid when they are raised.
    """
    experiment = content["experiment"]
    if content.get(EARLIER):
        experiment = {**experiment, "epochs": content[EARLIER][0]}
    return digest([experiment, content["settings"], content["data"]])


@dataclass(frozen=True)
class Described:
    """The description of a run, read from its folder.

    content     experiment.json, parsed         data    name, checksum, sample counts and origin of the data
    """

    experiment: Experiment
    settings: Settings
    content: Mapping[str, Any]

    @property
    def data(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.content["data"]
        return found

    @property
    def changes(self) -> list[str]:
        """Differences from the paper's settings."""
        return list(self.content.get("changes_from_paper") or [])

    @property
    def earlier_epochs(self) -> tuple[int, ...]:
        """The numbers of epochs the run was to have before they were raised."""
        return tuple(self.content.get(EARLIER, ()))

    def lengthened(self, epochs: int) -> Described:
        """The same run with more epochs. Raises if a run of so many would have begun differently."""
        now = self.experiment
        longer = now.override(epochs=epochs)
        if epochs < now.epochs:
            raise ValueError(
                f"epochs is {shown(epochs)}; the run is to have {now.epochs}, and they can only be raised. Stop it "
                "with Ctrl-C to train fewer."
            )
        if now.decay != "none" and now.decay_epochs is None:
            raise ValueError(
                f"epochs cannot be raised to {epochs}: the rates fall ({now.decay}) over the {now.epochs} epochs of "
                f"the run, so one of {epochs} would have had others from the start. Start a new run, or say over how "
                "many epochs they fall: --decay-epochs."
            )
        _check_lines(longer, self.settings)
        printed = printed_experiment(longer)
        changes = None if printed is None else [str(change) for change in longer.changes(printed)]
        content = {
            **self.content,
            "experiment": {**self.content["experiment"], "epochs": epochs},
            EARLIER: [*self.earlier_epochs, now.epochs],
            "changes_from_paper": changes,
        }
        return replace(self, experiment=longer, content=content)

    def legs(self) -> list[Leg]:
        return all_legs(self.settings)

    def folder_of(self, estimator: str, trial: int) -> str:
        return leg_folder(estimator, trial, self.settings)


def _check_data_fields(data: Mapping[str, Any], path: Path) -> None:
    kinds: dict[str, type] = dict.fromkeys(("name", "sha256", "set", "directory"), str)
    for name, kind in (kinds | {"training_samples": int, "test_samples": int}).items():
        value = data.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            expected = "text" if kind is str else "a whole number"
            raise ValueError(
                f"{path} is damaged: {name} of its data is {shown(value)}; expected {expected}. Restore it from a copy."
            )
    if not isinstance(names := data.get("class_names", []), list):
        raise ValueError(
            f"{path} is damaged: class_names of its data is {shown(names)}; expected a list. Restore it from a copy."
        )


def read_description(folder: Path) -> Described:
    """Read the experiment, settings and data of a run."""
    path = folder / EXPERIMENT
    content = read_json(path, "the experiment of the run; without it this is not a run folder")
    if content.get("format") != FORMAT:
        found = content.get("format")
        raise ValueError(f"{path} has format {found!r}; this version reads {FORMAT}. Use the version that wrote it.")
    missing = [name for name in ("experiment", "settings", "data") if name not in content]
    if missing:
        raise ValueError(f"{path} is damaged: it lacks {', '.join(missing)}. Restore it from a copy.")
    strange = next(
        (name for name in ("experiment", "settings", "data") if not isinstance(content[name], Mapping)), None
    )
    if strange is not None:
        raise ValueError(
            f"{path} is damaged: {strange} is {shown(content[strange])}; expected an object. Restore it from a copy."
        )
    _check_data_fields(content["data"], path)
    earlier = content.get(EARLIER, [])
    if not isinstance(earlier, list) or not all(type(n) is int and n > 0 for n in earlier):
        raise ValueError(
            f"{path} is damaged: {EARLIER} is {shown(earlier)}; expected numbers of epochs. Restore it from a copy."
        )
    experiment = from_dict(content["experiment"], str(path))
    return Described(experiment, Settings.from_dict(content["settings"], str(path)), content)


def is_channels_last(shape: Sequence[int], takes: tuple[int, ...] | None) -> bool:
    """Whether samples of this shape are images with channels last, for a network that takes them first."""
    if takes is None or len(takes) != 3 or len(shape) != 3:
        return False
    return tuple(shape) != takes and takes == (shape[2], *shape[:2])


def check_inputs(plan: Plan, model: Dynamics) -> None:
    """Raise unless the samples fit the model's input shape."""
    shape, takes = plan.images.shape, model.input_shape
    pixels = math.prod(shape)
    if takes is not None and math.prod(takes) != pixels:
        sizes = f" (sizes end with {pixels})" if len(takes) == 1 else ""
        raise ValueError(
            f"{plan.experiment.name} takes inputs of shape {takes}; the images of {plan.images.name} have shape "
            f"{shape}, {pixels} pixels. Give a network for them{sizes}, or other data."
        )
    if is_channels_last(shape, takes):
        raise ValueError(
            f"{plan.experiment.name} takes inputs of shape {takes}; the images of {plan.images.name} have shape "
            f"{shape}, channels last. Give them channels first, such as x.transpose(0, 3, 1, 2)."
        )


def _check_shapes(plan: Plan, model: Dynamics) -> None:
    check_inputs(plan, model)
    device = plan.device
    x = plan.inputs(plan.first()[0], model)
    outputs = model.to(device).init_state(x)[0].shape[-1]
    if plan.experiment.cost == "squared-error" and outputs != plan.images.classes:
        raise ValueError(
            f"{plan.experiment.name} has {outputs} outputs; {plan.images.name} has {plan.images.classes} "
            f"{'classes' if plan.images.labelled else 'targets per sample'}. Give the output layer one neuron for each."
        )
    # Fail early if the network does not support the schedule.
    relax(model, x, Phase(2, plan.experiment.schedule))


def _check_estimator(plan: Plan, task: Task) -> None:
    """Try one sample, to fail early if the network does not support the estimator."""
    images = plan.images
    stored, answers = plan.first()
    x, y = plan.inputs(stored, task.model), images.targets(answers, plan.dtype)
    assert task.estimator is not None, "every task of a plan has an estimator"
    task.estimator.check_serves(task.model, plan.cost(task.model), x, y)


def _decide_stacking(plan: Plan, model: Dynamics) -> bool:
    """Stack if the networks allow it and a stack gets the same engine as a single network."""
    settings, experiment = plan.settings, plan.experiment
    reason = _against_stacking(model, experiment)
    if settings.stacked and reason:
        raise ValueError(f"The trials cannot be stacked: {reason}. Omit stacked, or set stacked=False.")
    if settings.trials == 1 or reason or settings.stacked is False:
        return False
    if settings.stacked:
        return True
    pair = stack(_stackable([model, model]))
    return _engines(plan, model, (0,)) == _engines(plan, pair, (0, 1))


def _threads(plan: Plan, model: Dynamics, stacked: bool) -> int:
    """CPU threads where none are given. The C engine takes all: its threads hardly wait, and do not change a bit."""
    if set(_engines(plan, model, (0,))) == {"cpu"}:
        return torch.get_num_threads()
    # As many networks as are trained together make as many times the work.
    networks = plan.settings.trials if stacked else 1
    rows = min(plan.experiment.batch * networks, plan.images.train_samples)
    return threads_for(model, plan.inputs(plan.first(rows)[0], model))


def _engines(plan: Plan, model: Dynamics, trials: tuple[int, ...]) -> list[str]:
    """The engine each estimator would get for this model."""
    cost = plan.cost(model, trials)
    optimizer = make_optimizer(plan.experiment, model, cost)
    tasks = [plan.task(name, model, cost, optimizer) for name in plan.settings.estimators]
    return [plan.engine(plan.settings.engine, task).name for task in tasks]


def _against_stacking(model: Dynamics, experiment: Experiment) -> str | None:
    if not isinstance(model, PrimitiveDynamics) or isinstance(experiment.architecture, OwnNet):
        return "the trials of your own network run one after the other"
    if experiment.optimizer not in ELEMENTWISE:
        return f"the optimizer {experiment.optimizer} does not update elements independently and would mix the trials"
    return None


def _stackable(models: list[Dynamics]) -> list[PrimitiveDynamics]:
    return [m for m in models if isinstance(m, PrimitiveDynamics)]
