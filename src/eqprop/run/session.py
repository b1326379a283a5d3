"""`Session`: a spec bound to its data; network, cost, estimator, optimizer, engine and start are built once per leg."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from eqprop import papers
from eqprop.cost import Cost, Problem, SquaredError
from eqprop.data import Data, Images, Streamed, as_floats, from_arrays
from eqprop.data.sources import SETS
from eqprop.dynamics import Dynamics, PrimitiveDynamics, set_nudge_site
from eqprop.engines import EXCHANGE, STEERED, STREAMED, Engine, Task, choose, load_engine, threads_for
from eqprop.estimators import EP, Backprop, ContinualEP, Estimator
from eqprop.estimators.homeostasis import Homeostasis
from eqprop.estimators.named import ESTIMATORS
from eqprop.models import CrossEntropy, stack, stack_readouts
from eqprop.models.readout import COSTS, OWN_COST, READOUT_SEED
from eqprop.models.settings import ModelSettings
from eqprop.relax import SWEEPS, Phase, relax
from eqprop.run.checkpoint import digest
from eqprop.run.dataset import describe, given_data, read_images, source_fields, where_from
from eqprop.run.distributed import ALONE, Ranks, check_divides
from eqprop.run.extras import Preparation, image_shape, make_optimizer
from eqprop.run.folder import FORMAT
from eqprop.run.own import Factory, OwnFunction, OwnNet, meet_machine, own_of
from eqprop.run.spec import DataSettings, Spec, fields_of_spec, section_type
from eqprop.starts import Carried, Initialised, Persistent, Start, fingerprint

ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Optimizers that update each element independently, so that stacked networks do not mix."""


@dataclass(frozen=True)
class Leg:
    """One estimator on trials that run together: a part of a run with its own checkpoints."""

    estimator: str
    trials: tuple[int, ...]
    folder: str


def leg_folder(estimator: str, trial: int, spec: Spec) -> str:
    """The subfolder of a trial's checkpoints."""
    return estimator if spec.run.stacked or spec.run.trials == 1 else f"{estimator}-{trial}"


@dataclass(frozen=True, eq=False)
class Parts:
    """What one leg is trained with: the network of its trial, or of its trials stacked, and all that belongs to it.

    Each part is built when it is first asked for, and then kept. `named` is an engine in place of the spec's.
    """

    session: Session
    leg: Leg
    named: str | None = None

    @cached_property
    def model(self) -> Dynamics:
        return self.session.network(self.leg.trials)

    @cached_property
    def cost(self) -> Cost:
        return self.session.make_cost(self.model, self.leg.trials)

    @cached_property
    def estimator(self) -> Estimator:
        with of_field("estimator"):
            return make_estimator(self.session.spec, self.leg.estimator, self.model)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        with of_field("optimizer"):
            return make_optimizer(self.session.spec, self.model, self.cost)

    @cached_property
    def engine(self) -> Engine:
        return self.session.choose(self.task(self.estimator), self.named)

    def task(self, estimator: Estimator) -> Task:
        """The task an engine runs for one estimator."""
        of = self.session
        # One forward pass has no start.
        start = "zero" if isinstance(estimator, Backprop) else of.spec.phases.start
        precision, work = of.spec.run.precision, of.work(self.model, estimator)
        return Task(self.model, self.cost, estimator, self.optimizer, start, of.extras, precision, work)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of each trial's weights and mini-batches."""
        return tuple(self.session.spec.run.seed + trial for trial in self.leg.trials)

    @cached_property
    def preparation(self) -> Preparation | None:
        """What makes inputs of stored samples in each iteration; None if they are inputs, or are made once.

        Once, and so in whole, for an engine that has no such step: it is for nets that take small images.
        """
        of = self.session
        if not of.makes_inputs or not (of.augments or self.engine.reference or isinstance(of.images, Streamed)):
            return None
        augmentation = of.spec.data.augmentation if of.augments else None
        shape = image_shape(of.images.shape)
        return Preparation(augmentation, lambda x: of.inputs(x, self.model), shape, self.seeds, of.device)

    def stored(self, x: Tensor) -> Tensor:
        """Samples as an iteration finds them: inputs, unless it makes them itself."""
        return x if self.preparation is not None else self.session.inputs(x, self.model)

    @cached_property
    def x(self) -> Tensor:
        """All training samples as an iteration finds them; none where they are streamed."""
        images = self.session.images
        if isinstance(images, Images):
            return self.stored(images.train_x)
        return torch.empty(0, math.prod(images.shape), dtype=images.dtype, device=images.device)

    @property
    def answers(self) -> Tensor:
        """Labels or targets of all training samples; none where they are streamed."""
        images = self.session.images
        if isinstance(images, Images):
            return images.train_y
        shape, kind = ((0,), torch.int64) if images.labelled else ((0, images.classes), images.dtype)
        return torch.empty(shape, dtype=kind, device=images.device)

    @cached_property
    def start(self) -> Start | None:
        """Where free phases begin. Inputs that are not made yet have the shape and type of one that is."""
        spec, images = self.session.spec, self.session.images
        if isinstance(self.estimator, Backprop):  # one forward pass
            return None
        if self.preparation is None:
            return make_start(spec, self.model, self.x)
        like = self.preparation.inputs(images.first(1)[0])
        streams, persists = isinstance(images, Streamed), spec.phases.start == "persistent"
        source = None if not persists else images.sha256 if streams else fingerprint(self.x)
        return make_start(spec, self.model, like.expand(images.train_samples, *like.shape[1:]), source)


@dataclass(eq=False)
class Session:
    """A spec with its data: what `train`, `resume`, `evaluate`, `gdu`, `doctor` and `tune` work on. See `bind`.

    spec        with what was decided for it: whether to stack trials, how many threads
    images      on the device, cut as the spec says         dtype       of inputs and networks
    own         builds your own network                     ranks       divide each mini-batch
    source      the name of the data set, or the directory it came from; None for tensors
    identity    digest of the run's experiment.json, which ties checkpoints to it
    """

    spec: Spec
    images: Images | Streamed
    own: OwnFunction | None = None
    source: str | None = None
    ranks: Ranks = ALONE
    identity: str = ""
    dtype: torch.dtype = torch.float32
    built: dict[Leg, Parts] = field(default_factory=dict, init=False, repr=False)
    """Parts that no leg has been trained with yet."""

    @property
    def model(self) -> Dynamics:
        """The network of the first leg."""
        return self.parts().model

    @property
    def cost(self) -> Cost:
        """The cost of the first leg."""
        return self.parts().cost

    @property
    def estimator(self) -> Estimator:
        """The estimator of the first leg."""
        return self.parts().estimator

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the first leg."""
        return self.parts().optimizer

    @property
    def engine(self) -> Engine:
        """The engine of the first leg."""
        return self.parts().engine

    @property
    def start(self) -> Start | None:
        """Where free phases of the first leg begin; None for the zero state."""
        return self.parts().start

    def legs(self) -> list[Leg]:
        """One estimator after the other; its trials together if stacked, else one by one."""
        spec = self.spec
        trials = tuple(range(spec.run.trials))
        groups = [trials] if spec.run.stacked else [(trial,) for trial in trials]
        return [Leg(name, group, leg_folder(name, group[0], spec)) for name in spec.estimators for group in groups]

    def parts(self, leg: Leg | None = None, engine: str | None = None) -> Parts:
        """What a leg, by default the first, is trained with; `engine` replaces the spec's."""
        leg = self.legs()[0] if leg is None else leg
        if leg not in self.built or engine not in (None, self.built[leg].named):
            self.built[leg] = Parts(self, leg, engine)
        return self.built[leg]

    def alone(self) -> Parts:
        """What the first trial is trained with by itself, whether or not it will be stacked."""
        name = self.spec.estimators[0]
        return self.parts(Leg(name, (0,), name if self.spec.run.trials == 1 else f"{name}-0"))

    def take(self, leg: Leg, engine: str | None = None) -> Parts:
        """The same, handed over: training changes them, and who asks again gets new ones."""
        found = self.parts(leg, engine)
        self.built.clear()
        return found

    def problem(self, samples: int | None = None) -> Problem:
        """The first leg's network and cost on training samples, drawn by the seed: what `gdu` and `doctor` examine.

        samples     how many; by default a mini-batch, or all that your own function returned
        """
        parts, images = self.alone(), self.images
        brings_samples = self.source is None and _own_samples(self.own, self.spec.run.seed) is not None
        if brings_samples or isinstance(images, Streamed):
            default = images.train_samples if brings_samples else self.spec.optimizer.batch
            stored, answers = images.first(default if samples is None else samples)
        else:
            n = self.spec.optimizer.batch if samples is None else samples
            chosen = images.rows(n, self.spec.run.seed)
            stored, answers = images.train_x[chosen], images.train_y[chosen]
        return Problem(parts.model, parts.cost, self.inputs(stored, parts.model), images.targets(answers, self.dtype))

    @property
    def groups(self) -> int | None:
        """How many updates make a sweep; None where all layers move at once."""
        return self._groups(self.model) if self.spec.phases.schedule in SWEEPS else None

    def _groups(self, model: Dynamics) -> int:
        x = self.inputs(self.images.first(1)[0], model)
        x = x if model.networks is None else x.expand(model.networks, *x.shape)
        return len(model.sweep(len(model.init_state(x))))

    @property
    def iterations(self) -> int:
        """Iterations per epoch."""
        return self.images.train_samples // self.spec.optimizer.batch

    @property
    def device(self) -> torch.device:
        return self.images.device if isinstance(self.images, Streamed) else self.images.train_x.device

    def targets(self, y: Tensor) -> Tensor:
        """What training compares outputs with, (N, classes), smoothed if the spec says so."""
        targets, share = self.images.targets(y, self.dtype), self.spec.optimizer.label_smoothing
        return targets if not share else targets * (1.0 - share) + share / self.images.classes

    def inputs(self, x: Tensor, model: Dynamics) -> Tensor:
        """Images (..., pixels) as floats in the model's input shape, normalised if the spec says so."""
        lead, normalisation = x.shape[:-1], self.spec.data.normalisation
        if normalisation is None:
            x = as_floats(x, self.dtype)
        else:
            x = normalisation(x.reshape(*lead, *image_shape(self.images.shape)), self.dtype).flatten(len(lead))
        return x if model.input_shape is None else x.view(*lead, *model.input_shape)

    @property
    def augments(self) -> bool:
        augmentation = self.spec.data.augmentation
        return augmentation is not None and augmentation.active

    @property
    def makes_inputs(self) -> bool:
        """Whether inputs are other numbers than the stored samples, and so are made batch by batch."""
        stored = None if isinstance(self.images, Streamed) else self.images.train_x.dtype
        return self.augments or self.spec.data.normalisation is not None or stored != self.dtype

    @property
    def data(self) -> dict[str, Any]:
        """Name, checksum and counts of the data, and where it was read from."""
        return {**describe(self.images), **source_fields(self.source)}

    def to_dict(self) -> dict[str, Any]:
        """The content of experiment.json."""
        return {
            "format": FORMAT,
            "experiment": self.spec.to_dict(),
            "changes_from_paper": self.changes_from_paper,
            "data": self.data,
        }

    @property
    def changes_from_paper(self) -> list[str] | None:
        """What is not as printed; None for a user's spec."""
        known = papers.printed(self.spec)
        return None if known is None else [str(change) for change in self.spec.changes(known)]

    # Building

    def network(self, trials: tuple[int, ...]) -> Dynamics:
        """These trials' networks with their initial weights, stacked if there are several."""
        models = [build_model(self.spec, trial, self.dtype, self.own).to(self.device) for trial in trials]
        return stack([m for m in models if isinstance(m, PrimitiveDynamics)]) if len(trials) > 1 else models[0]

    def make_cost(self, model: Dynamics, trials: tuple[int, ...] = (0,)) -> Cost:
        """These trials' cost with its initial weights, if it has any; stacked like the networks."""
        x = self.inputs(self.images.first(1)[0], model)
        x = x if model.networks is None else x.expand(model.networks, *x.shape)
        inputs = math.prod(model.init_state(x)[0].shape[model.sample_dims(x) :])
        costs = [
            build_cost(self.spec, trial, inputs, self.images.classes, self.dtype, self.own).to(x.device)
            for trial in trials
        ]
        readouts = [cost for cost in costs if isinstance(cost, CrossEntropy)]
        return stack_readouts(readouts) if readouts and model.networks is not None else costs[0]

    def work(self, model: Dynamics, estimator: Estimator) -> float:
        """Multiplications and additions of the phases of an epoch, BPTT's way back counted as steps."""
        twice = isinstance(estimator, EP) and estimator.nudging == "symmetric"
        updates = estimator.T + estimator.K * (2 if twice else 1)
        samples = self.iterations * self.spec.optimizer.batch
        groups = self._groups(model) if self.spec.phases.schedule in SWEEPS else 1
        return max(1.0, float(samples * model.operations() * updates / groups))  # 0 is unknown

    @property
    def extras(self) -> tuple[str, ...]:
        """What an iteration does besides mini-batch, gradient and optimizer step (see `Job.extras`)."""
        asked = {
            "preparation of samples": self.augments,
            STREAMED: isinstance(self.images, Streamed),
            "gradient clipping": self.spec.optimizer.clip_norm,
            EXCHANGE: self.ranks.several,
            "weight averaging": self.spec.optimizer.average,
            STEERED: self.spec.phases.steered,
        }
        return tuple(name for name, given in asked.items() if given)

    def choose(self, task: Task, named: str | None = None) -> Engine:
        """The spec's engine, or the fastest that supports the task.

        `named` by a checkpoint: where it was trained alone, that engine may not train among several ranks.
        """
        run, name = self.spec.run, named or self.spec.run.engine
        if named not in (None, "auto") and self.ranks.several and load_engine(name).refuses(task) is not None:
            name = "auto"
        away = self.spec.phases.start == "persistent" and run.states == "cpu" and run.device != "cpu"
        if away and name not in ("auto", "eager"):
            raise ValueError(
                f"The engine {name!r} cannot serve: it runs on {run.device}, but the states are kept on the CPU. Keep "
                "them on the device (--states device), or use engine='auto'."
            )
        return choose("eager" if away else name, task)


# Parts of a spec


@contextmanager
def of_field(name: str) -> Iterator[None]:
    """Name the field of the spec that a part could not be built of."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or str(error).startswith(name):
            raise
        raise ValueError(f"{name}: {error}") from error


def build_model(spec: Spec, trial: int, dtype: torch.dtype = torch.float32, own: Factory | None = None) -> Dynamics:
    """The network of one trial with its initial weights, the same for every estimator and device."""
    seed, function = spec.run.seed + trial, own_of(own, spec.model)
    if isinstance(spec.model, OwnNet) and function is not None:
        if spec.model.init != OwnNet().init and spec.cost.kind != "cross-entropy":  # a readout is drawn by it
            raise ValueError(
                f"init is {spec.model.init!r}, but your own function draws its weights. Omit init, or set it there."
            )
        model = function(seed).to(dtype)
    else:
        with of_field("model"):
            model = spec.model.build(seed, dtype)
    _begin_outputs(spec, model)
    if spec.model.nudge_site != "outside":  # a custom network may already have it there
        set_nudge_site(model, spec.model.nudge_site)
    with of_field("machine"):
        return spec.machine.around(model, trial)


@torch.no_grad()
def _begin_outputs(spec: Spec, model: Dynamics) -> None:
    net = spec.model
    if net.output_scale != 1.0:
        _of_output_layer(spec, model, "output_scale", "weights").mul_(net.output_scale)
    if net.output_bias is not None:
        _of_output_layer(spec, model, "output_bias", "biases").fill_(net.output_bias)


def _of_output_layer(spec: Spec, model: Dynamics, setting: str, kind: str) -> Tensor:
    known = spec.cost.kind == "squared-error" and not isinstance(spec.model, OwnNet)
    layers = model.layer_parameters if known else ()
    name = None if not layers else layers[0].bias if kind == "biases" else layers[0].weights[0]
    found = dict(model.named_parameters()).get(name or "")
    if found is None:
        raise ValueError(
            f"{setting} is {getattr(spec.model, setting)}, but {spec.name} has no output layer with {kind} in its "
            f"dynamics. Omit {setting}, or set the {kind} in the function that builds your network."
        )
    return found


def build_cost(
    spec: Spec, trial: int, inputs: int, classes: int, dtype: torch.dtype, own: Factory | None = None
) -> Cost:
    """The cost of one trial; a readout reads `inputs` neurons and draws its weights from the trial's seed."""
    kind = spec.cost.kind
    if kind == "squared-error":
        return SquaredError()
    if kind == OWN_COST:
        function = own_of(own, spec.model)
        cost = None if function is None else function.build(spec.run.seed + trial).cost
        if cost is None:
            raise ValueError(
                f"{spec.name} was trained with your own cost, and got no function that returns it. Give it again: "
                "--model FILE.py:FUNCTION, or model=function in Python."
            )
        return cost.to(dtype)
    if (make := COSTS[kind]) is not None:
        settings = {name: v for name, v in msgspec.to_builtins(spec.cost).items() if name != "kind"}
        return make(**settings).for_classes(classes).to(dtype)
    seed = spec.run.seed + trial + READOUT_SEED
    return CrossEntropy(inputs, classes, init=spec.model.init, seed=seed, dtype=dtype)


def make_estimator(spec: Spec, name: str | None = None, model: Dynamics | None = None) -> Estimator:
    """The spec's estimator, or one by name. For a given model, continual EP gets a rate per parameter."""
    kind = spec.estimator.kind if name is None else name
    form = ESTIMATORS[kind]
    if form.takes is None:
        made: Estimator = form.make(spec)
        return made
    own = spec.estimator if kind == spec.estimator.kind else section_type("estimator", {"kind": kind})(kind=kind)
    known = fields_of_spec(spec) | {n: getattr(own, n) for n in own.__struct_fields__ if n != "kind"}
    made = form.make(**{name: known[name] for name in form.takes if name in known} | dict(form.fixed))
    odd, rest = spec.optimizer.homeostasis, spec.phases.keep_at_rest
    size = 0.0 if rest is None else rest.penalty
    if (odd or size) and not isinstance(made, Backprop):  # a single forward pass has no Jacobian
        return Homeostasis(base=made, weight=odd, size=size)
    if not isinstance(made, ContinualEP) or model is None:
        return made
    names = [name for name, _ in model.named_parameters()]
    rates = spec.rates([*names, *spec.readout_names], model.layer_parameters)
    return replace(made, rates={name: rates[name] for name in names})


def make_start(spec: Spec, model: Dynamics, x: Tensor, source: str | None = None) -> Start | None:
    """The spec's start for these networks and training inputs, before the first iteration."""
    start = spec.phases.start
    if start == "persistent":
        return Persistent(model, x, "cpu" if spec.run.states == "cpu" else None, source)
    if start == "initialised":
        return Initialised(model, x, spec.phases.initialiser_rate)
    if start == "carried":
        return Carried(model, x, spec.optimizer.batch)
    return None


# Binding


def bind(
    what: str | Path | Spec | Session | Factory,
    data: Data | Streamed = None,
    ranks: Ranks = ALONE,
    *,
    model: Factory | ModelSettings | None = None,
    dtype: torch.dtype | None = None,
    trains: bool = True,
    **options: Any,
) -> Session:
    """Build what a spec says, once, and check that it fits together; `train`, `doctor` and `gdu` take the session.

        session = eqprop.bind("P-1h", trials=2)
        session.model, session.cost, session.estimator, session.optimizer, session.engine

    ranks       the processes that share the work, as `eqprop.distributed.join()` finds them
    what        a `Spec`, the name of an experiment, a TOML or JSON file, your own function or FILE.py:FUNCTION; a
                session is returned as it is
    data        what `train` takes; None: what the spec names, or your own function gives, or MNIST
    model       another net: settings such as `LayeredNet`, or your own function
    dtype       of the network; None: that of the data, float32 where it is read from files
    trains      False for what only looks at gradients: what training alone needs is not built and not checked
    options     any setting by its flat name (T, K, beta, epochs, rates, trials, engine, ...) and `preset`

    Raises a ValueError that names the field of the spec that cannot be met.
    """
    if isinstance(what, Session):
        given = [name for name, value in {"data": data, "model": model, **options}.items() if value is not None]
        if given:
            raise ValueError(f"Got {given[0]} for a session, which is already bound. Give it to bind.")
        return what
    spec, own = chosen(what, model, options)
    spec = spec.override(device=ranks.device(spec.run.device))
    images, source = _data(spec, own, data, dtype)
    session = Session(spec, images, own, source, ranks, dtype=dtype or images.dtype)
    _check(session)
    if trains:
        check_training(session)
    return session


def chosen(
    what: str | Path | Spec | Factory, model: Factory | ModelSettings | None, options: Mapping[str, Any]
) -> tuple[Spec, OwnFunction | None]:
    """The spec of an experiment with flat options, and your own function if there is one."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(model, ModelSettings | Mapping):
        given["model"], model = model, None
    meet_machine(given.get("machine"))
    found, own = papers.find_own(what, model)
    spec = papers.find(found, given.pop("preset", None))
    if given.get("validation") and "test_samples" not in given and spec.data.test_samples:
        # Held-out samples replace the test set, all of them.
        spec = spec.override(data={"test_samples": None})
    return under_own_name(spec.override(**given), own), own


def under_own_name(spec: Spec, own: OwnFunction | None) -> Spec:
    """The spec for a user's network: under the name of its function, with no preset and no paper result.

    If the function also gives a cost, and the spec names no other, it is trained with that one.
    """
    if own is None:
        return spec
    if own.has_cost and spec.cost.kind == "squared-error":
        spec = spec.override(cost=OWN_COST)
    if isinstance(spec.model, OwnNet):
        return spec
    name = own.name.rpartition(":")[2].rpartition(".")[2]
    return Spec(
        **{
            **spec.to_dict(),
            "name": name if name.isidentifier() else "own",
            "model": OwnNet(function=own.name),
            "preset": "own",
            "published": {},
        }
    )


def _own_samples(own: OwnFunction | None, seed: int) -> tuple[Tensor, Tensor] | None:
    built = None if own is None else own.build(seed)
    return None if built is None or built.x is None or built.y is None else (built.x, built.y)


def _data(
    spec: Spec, own: OwnFunction | None, data: Data | Streamed, dtype: torch.dtype | None
) -> tuple[Images | Streamed, str | None]:
    """The data of a spec on its device, and where it came from."""
    names_it = data is None and spec.data.set is not None
    source: Any = _named_set(spec.data) if names_it else data
    seed, floats = spec.run.seed, dtype or torch.float32
    if source is None:
        samples = _own_samples(own, seed) or spec.model.samples(spec.optimizer.batch, seed)
        if samples is not None:
            source = from_arrays(*samples, *samples, dtype=floats)
        elif own is not None:
            source = own.data()
    known = given_data(source)
    images = read_images(known, spec.data, spec.run.device, floats)
    if isinstance(images, Streamed):
        augmentation = spec.data.augmentation
        images = images.in_unit_range() if augmentation is not None and augmentation.active else images
    elif dtype is not None:
        images = images.as_type(dtype)
    return images, where_from(spec.data.set if names_it else known)


def _named_set(data: DataSettings) -> Any:
    """The name of a set, or what one from outside makes of the settings that it declares."""
    common = DataSettings.__struct_fields__
    own = {name: value for name, value in msgspec.to_builtins(data).items() if name not in common}
    return SETS.part(str(data.set))(**own) if own else data.set


def _check(session: Session) -> None:
    """Check that spec, data, network and estimator fit together. What is built on the way is kept for the first leg."""
    spec, parts = session.spec, session.alone()
    site = getattr(parts.model, "nudge_site", spec.model.nudge_site)
    if site != spec.model.nudge_site:
        # The user's own network declares its nudge site.
        session.spec = spec.override(nudge_site=site)
    _check_shapes(session, parts.model)
    _check_images(session)
    _check_serves(session, parts.estimator)


def check_training(session: Session) -> None:
    """Check what training needs beyond that; decide whether to stack trials, and on how many threads."""
    spec, images, parts = session.spec, session.images, session.alone()
    check_divides(spec.optimizer.batch, session.ranks.size)
    if spec.optimizer.label_smoothing and not images.labelled:
        raise ValueError(
            f"label_smoothing is {spec.optimizer.label_smoothing}, but {images.name} has targets, not labels. Omit it."
        )
    if spec.optimizer.batch > images.train_samples:
        raise ValueError(
            f"A mini-batch of {spec.optimizer.batch} is too large; there are only {images.train_samples} training "
            "samples. Lower the batch, or hold out fewer samples."
        )
    engines = [parts.engine.name]
    for name in spec.estimators[1:]:
        estimator = make_estimator(spec, name, parts.model)
        engines.append(session.choose(parts.task(estimator)).name)
        _check_serves(session, estimator)
    stacked = _decide_stacking(session, engines)
    threads = spec.run.threads or _threads(session, stacked)
    session.spec = spec.override(stacked=stacked, threads=threads)
    session.identity = identity(session.spec.to_dict(), session.data)


def identity(spec: Mapping[str, Any], data: Mapping[str, Any], epochs: int | None = None) -> str:
    """Digest that ties checkpoints to experiment.json: a run whose experiment was edited does not resume.

    epochs      the first number of epochs, where they were raised: earlier checkpoints stay valid
    """
    if epochs is not None:
        spec = {**spec, "optimizer": {**spec["optimizer"], "epochs": epochs}}
    return digest([spec, data])


def _check_images(session: Session) -> None:
    """Raise unless the images can be normalised and augmented as the spec says."""
    data, images = session.spec.data, session.images
    if data.normalisation is not None:
        data.normalisation.check(image_shape(images.shape))
    if data.augmentation is not None:
        # Test images are not augmented, but are taken to have the same grey levels.
        known = (images.train_x, images.test_x) if isinstance(images, Images) else (images.first(1)[0],)
        for x in known:
            data.augmentation.check(x, images.shape)


def is_channels_last(shape: Sequence[int], takes: tuple[int, ...] | None) -> bool:
    """Whether samples of this shape are images with channels last, for a network that takes them first."""
    if takes is None or len(takes) != 3 or len(shape) != 3:
        return False
    return tuple(shape) != takes and takes == (shape[2], *shape[:2])


def check_inputs(session: Session, model: Dynamics) -> None:
    """Raise unless the samples fit the model's input shape."""
    shape, takes, name = session.images.shape, model.input_shape, session.spec.name
    pixels = math.prod(shape)
    if takes is not None and math.prod(takes) != pixels:
        sizes = f" (sizes end with {pixels})" if len(takes) == 1 else ""
        raise ValueError(
            f"{name} takes inputs of shape {takes}; the images of {session.images.name} have shape {shape}, {pixels} "
            f"pixels. Give a network for them{sizes}, or other data."
        )
    if is_channels_last(shape, takes):
        raise ValueError(
            f"{name} takes inputs of shape {takes}; the images of {session.images.name} have shape {shape}, channels "
            "last. Give them channels first, such as x.transpose(0, 3, 1, 2)."
        )


def _check_shapes(session: Session, model: Dynamics) -> None:
    check_inputs(session, model)
    images = session.images
    x = session.inputs(images.first(1)[0], model)
    outputs = model.init_state(x)[0].shape[-1]
    if session.spec.cost.kind == "squared-error" and outputs != images.classes:
        if not _brings_few_labels(session, outputs):
            raise ValueError(
                f"{session.spec.name} has {outputs} outputs; {images.name} has {images.classes} "
                f"{'classes' if images.labelled else 'targets per sample'}. Give the output layer one neuron for each."
            )
        assert isinstance(images, Images), "a stream is not one's own function's"
        session.images = replace(images, classes=outputs)
    # Fail early if the network does not support the schedule.
    relax(model, x, Phase(2, session.spec.phases.schedule))


def _brings_few_labels(session: Session, outputs: int) -> bool:
    """Whether these are the few samples of a net, or of a user's function, which need not show every class."""
    images, seed = session.images, session.spec.run.seed
    own, net = _own_samples(session.own, seed), session.spec.model.samples(1, seed)
    return session.source is None and (own or net) is not None and images.labelled and images.classes < outputs


def _check_serves(session: Session, estimator: Estimator) -> None:
    """Try one sample, to fail early if the network does not support the estimator."""
    parts, (stored, answers) = session.alone(), session.images.first(1)
    x, y = session.inputs(stored, parts.model), session.images.targets(answers, session.dtype)
    with of_field("estimator"):
        estimator.check_serves(parts.model, parts.cost, x, y)


def _decide_stacking(session: Session, engines: Sequence[str]) -> bool:
    """Stack if the networks allow it and a stack gets the same engine as a single network."""
    run, spec, model = session.spec.run, session.spec, session.alone().model
    reason = _against_stacking(model, spec)
    if run.stacked and reason:
        raise ValueError(f"The trials cannot be stacked: {reason}. Omit stacked, or set stacked=False.")
    if run.trials == 1 or reason or run.stacked is False:
        return False
    if run.stacked:
        return True
    pair = Parts(session, Leg(spec.estimators[0], (0, 1), ""))
    found = [session.choose(pair.task(make_estimator(spec, name, pair.model))).name for name in spec.estimators]
    return list(engines) == found


def _threads(session: Session, stacked: bool) -> int:
    """CPU threads where none are given."""
    # As many networks as are trained together make as many times the work.
    model, networks = session.alone().model, session.spec.run.trials if stacked else 1
    rows = min(session.spec.optimizer.batch * networks, session.images.train_samples)
    return threads_for(model, session.inputs(session.images.first(rows)[0], model))


def _against_stacking(model: Dynamics, spec: Spec) -> str | None:
    if not isinstance(model, PrimitiveDynamics) or isinstance(spec.model, OwnNet):
        return "the trials of your own network run one after the other"
    if model.settles_itself:
        return "a machine runs one network at a time"
    if spec.phases.steered:
        return "what keeps a network at rest, or leads beta, looks at one network at a time"
    if spec.optimizer.kind not in ELEMENTWISE:
        kind = spec.optimizer.kind
        return f"the optimizer {kind} does not update elements independently and would mix the trials"
    return None
