"""`Spec`: an experiment as data. Every setting is declared here, or beside the part it belongs to, once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta

from eqprop.data.augment import Augmentation, Normalisation
from eqprop.data.sources import SETS
from eqprop.engines.base import Precision, engine_names
from eqprop.estimators.named import CONTINUAL, ESTIMATORS
from eqprop.estimators.settings import EstimatorSettings
from eqprop.messages import shown, unknown
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet, ToyNet
from eqprop.models.network import GraphNet
from eqprop.models.readout import COSTS, OWN_COST
from eqprop.models.settings import ModelSettings
from eqprop.optimizers import OPTIMIZERS
from eqprop.physical.settings import MachineSettings
from eqprop.plugins import Table, part
from eqprop.relax import Schedule, Stop
from eqprop.run.own import MODELS, OwnNet
from eqprop.run.published import PaperResult
from eqprop.settings import LARGEST, Field, Finite, Section, about, check, extended, fields_of
from eqprop.starts import StartName
from eqprop.state import LayerParameters

EVERY_OTHER = "*"
"""The key for the learning rate of every parameter that is not named."""
READOUT = LayerParameters(("Wout",), "bout")
MOST_STEPS, MOST_EPOCHS, MOST_SEED, MANY = 1_000_000, 100_000, 2**53, 10**9
"""Limits: T and K, epochs, seeds (which JSON keeps exactly up to here), other whole numbers."""


class CostSettings(Section, frozen=True, kw_only=True):
    """The cost, by name: "cross-entropy" is that of a softmax readout (see `eqprop.CrossEntropy`), with weights Wout
    and bout; "own" the one that your own function returns."""

    kind: Annotated[str, about("squared-error, or cross-entropy of a softmax readout.", flat="cost")] = "squared-error"


Rate = Annotated[float, Meta(ge=0, le=LARGEST)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class AtRest(Section, frozen=True, kw_only=True):
    """What keeps free phases at rest while a net learns, looked at every so many iterations; each part is off unless
    given, and a net that needs none of them stays as it is, bit for bit.

    radius      the largest |l| allowed of the step's Jacobian; above it weights between neurons shrink (a cap)
    penalty     weight of |J|^2 / n, estimated by random probes, beside the loss (see `eqprop.estimators.homeostasis`)
    longest     free phases may grow to so many steps while the mean residual is above `residual`
    slower      whether rates are halved while it is, and rise again once it is not
    """

    every: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 50
    radius: Annotated[float, Meta(gt=0, le=100)] | None = None
    penalty: Rate = 0.0
    longest: Annotated[int, Meta(ge=1, le=MOST_STEPS)] | None = None
    slower: bool = False
    residual: Annotated[float, Meta(gt=0, le=LARGEST)] = 1e-3


class Phases(Section, frozen=True, kw_only=True):
    """Both phases: how long, how strong the nudge, where free phases begin.

    beta_led            beta is chosen on the first mini-batch, and again after each epoch (see `eqprop.gdu.best_beta`)
    keep_at_rest        controls of settling (see `AtRest`)
    schedule, stop      of the free phase (see `eqprop.relax.Phase`); stop="settled" gives the same bits sooner
    start               where free phases begin (see `eqprop.starts`)
    evaluation_T        with persistent states, training samples settle in fewer steps than unseen ones
    """

    T: Annotated[int, about("Steps of the free phase.", common=True, ge=1, le=MOST_STEPS)] = 50
    K: Annotated[int, about("Steps of the second phase.", common=True, ge=1, le=MOST_STEPS)] = 10
    beta: Annotated[Finite, about("Strength of the nudge; auto: let it follow the residual.", common=True)] = 0.1
    beta_led: Annotated[bool, about("Whether beta follows the residual, as --beta auto asks.")] = False
    schedule: Annotated[Schedule, about("synchronous; alternating free phase; or sweeps.")] = "synchronous"
    stop: Annotated[Stop, about("Stop early: never, or settled (same bits).")] = "never"
    start: Annotated[StartName, about("Initial states: zero, persistent, initialised or carried.")] = "zero"
    initialiser_rate: Annotated[float, about("Rate of the initialiser.", gt=0, lt=2)] = 1.0
    evaluation_T: Annotated[int, about("T of evaluation; by default that of training.", ge=1, le=MOST_STEPS)] | None = (
        None
    )
    keep_at_rest: (
        Annotated[AtRest, about("radius=0.95, longest=200, slower=true, ... (repeatable).", flag="--keep-at-rest")]
        | None
    ) = None

    @property
    def steered(self) -> bool:
        """Whether phases or rates may change while a net learns."""
        return self.beta_led or self.keep_at_rest is not None


class Optimizer(Section, frozen=True, kw_only=True):
    """How weights are moved.

    rates           by parameter name; a bias takes the rate of its layer's weight (b0 that of W01); "*" stands for
                    every parameter that is not named
    decay           "cosine": rates fall along half a cosine, epoch by epoch; "exponential": each epoch's are
                    `decay_factor` times the last one's; "none": constant rates
    decay_floor     the rate they fall to; one that is lower from the start stays as it is
    warmup          rates rise from zero in equal steps, one per iteration
    weight_decay    "coupled": weight_decay * w is added to the gradient, as torch.optim's own option does;
                    "decoupled": w shrinks by its rate times weight_decay before each step
    label_smoothing share of a target that is spread over all classes
    homeostasis     weight of a penalty on the asymmetry of the Jacobian (see `eqprop.estimators.homeostasis`)
    average         weights to evaluate with: their average over iterations, each earlier one counting so many times
                    the next, without the initial weights; 0: the last ones
    """

    kind: Annotated[str, about("Any class of torch.optim, Lion or Bop.", flat="optimizer")] = "Adam"
    rates: Annotated[
        Mapping[str, Rate], about("W01=0.04 (repeatable), or one rate for all.", common=True, flag="--lr", min_length=1)
    ] = msgspec.field(default_factory=lambda: {EVERY_OTHER: 0.001})
    options: Annotated[
        Mapping[str, Any],
        about("Optimizer's option: momentum=0.9 (repeatable).", flat="optimizer_options", flag="--optimizer-option"),
    ] = {}
    batch: Annotated[int, about("Mini-batch size.", common=True, ge=1, le=MOST_STEPS)] = 20
    epochs: Annotated[int, about("Passes over the training set.", common=True, ge=1, le=MOST_EPOCHS)] = 10
    decay: Annotated[
        Literal["none", "cosine", "exponential"],
        about("Decay of the rates: none, cosine or exponential."),
    ] = "none"
    decay_factor: Annotated[float, about("Factor on the rates per epoch, for exponential decay.", gt=0, le=1)] = 0.99
    decay_epochs: (
        Annotated[int, about("Epochs over which rates fall, then stay; by default all.", ge=1, le=MOST_EPOCHS)] | None
    ) = None
    decay_floor: Annotated[Rate, about("The rate that decay ends at.")] = 0.0
    warmup: Annotated[Rate, about("Epochs, or a part of one, over which rates rise from 0.")] = 0.0
    weight_decay: Annotated[Rate, about("Decay of the weights.")] = 0.0
    weight_decay_kind: Annotated[
        Literal["coupled", "decoupled"], about("coupled (added to the gradient) or decoupled.")
    ] = "coupled"
    weight_decay_biases: Annotated[bool, about("Whether biases decay too.")] = True
    clip_norm: Annotated[float, about("Largest norm of the gradient.", gt=0, le=LARGEST)] | None = None
    label_smoothing: Annotated[Share, about("Share of a target that is spread over all classes.")] = 0.0
    homeostasis: Annotated[Rate, about("Weight of a penalty on |J - J^T|, the Jacobian's asymmetry.")] = 0.0
    average: Annotated[Share, about("Evaluate with a running average of the weights; its decay, such as 0.999.")] = 0.0

    def rate_factor(self, epoch: int) -> float:
        """The share of the way down to the floor that is left to the rates in this epoch, counted from 0."""
        over = self.decay_epochs or self.epochs
        if self.decay == "exponential":
            return float(self.decay_factor ** min(epoch, over))
        return 1.0 if self.decay == "none" else 0.5 * (1.0 + math.cos(math.pi * min(epoch, over) / over))

    def rate_in(self, epoch: int, rate: float, warmth: float = 1.0) -> float:
        """A learning rate in this epoch, from its initial value; `warmth` is the share of the warm-up that is done."""
        floor = 0.0 if self.decay == "none" else min(self.decay_floor, rate)
        fallen = rate * self.rate_factor(epoch) if not floor else floor + (rate - floor) * self.rate_factor(epoch)
        return fallen if warmth >= 1.0 else warmth * fallen


class DataSettings(Section, frozen=True, kw_only=True):
    """The data and what is done to them.

    set             a name, a folder or an .npz file; None: MNIST, or what is given in Python
    augmentation    random changes of training images, drawn from seed, epoch and sample (see `eqprop.data.augment`)
    normalisation   of all images; None: from 0 to 1, as they are
    """

    set: (
        Annotated[
            str,
            about(
                "mnist, fashion-mnist, kmnist, cifar10, cifar100, a folder of their files, or an .npz file.",
                common=True,
                flat="data",
            ),
        ]
        | None
    ) = None
    augmentation: Annotated[Augmentation, about("flip=true, crop=4, ... (repeatable).", flag="--augment")] | None = None
    normalisation: (
        Annotated[Normalisation, about("mean=[0.5], std=[0.2], scale=3 (repeatable).", flag="--normalise")] | None
    ) = None
    validation: Annotated[int, about("Hold out N training samples; test on them.", ge=0, le=MANY)] = 0
    samples: Annotated[int, about("Train on the first N samples only.", common=True, ge=1, le=MANY)] | None = None
    test_samples: Annotated[int, about("Test on the first N samples only.", ge=1, le=MANY)] | None = None
    top5: Annotated[bool, about("Count top-5 errors too.")] = False


class Run(Section, frozen=True, kw_only=True):
    """How a spec is run: seeds, machine, what is kept.

    seed                of trial 0; trial r draws weights and batches from seed + r
    estimators          trained one after the other from the same weights and batches; empty: the spec's own
    engine, device      see `eqprop.engines`; "auto" takes the fastest engine that supports the task
    precision           of the products in a step (see `eqprop.engines.base.Precision`); sums, states, gradients and
                        weights stay float32
    threads             None: one for small networks (see `eqprop.engines.threads_for`)
    train_error_every   measure the error on the whole training set every N epochs; 0: only after the last
    stacked             train all trials together as one stacked network; None: if possible and faster
    patience            end a leg when its test error has not fallen for N epochs; 0: never
    keep_every          keep the weights of every N-th epoch too; 0: only the last
    states              where to keep persistent states: on the "device", or on the "cpu" if they do not fit there
    """

    seed: Annotated[int, about("Seed of trial 0; trial r uses seed + r.", common=True, ge=0, le=MOST_SEED)] = 0
    trials: Annotated[int, about("Networks to train, each from its own seed.", common=True, ge=1, le=1000)] = 1
    estimators: tuple[str, ...] = ()
    engine: Annotated[str, about("auto, or an engine by name.")] = "auto"
    device: Annotated[str, about("cpu, cuda, cuda:1, ...", common=True)] = "cpu"
    threads: Annotated[int, about("CPU threads.", ge=1, le=1024)] | None = None
    precision: Annotated[Precision, about("Precision of products: float32, tf32, float16 or bfloat16.")] = "float32"
    train_error_every: Annotated[int, about("Measure the train error every N epochs.", ge=0, le=MANY)] = 0
    checkpoint_every: Annotated[float, about("Seconds between checkpoints in an epoch.", gt=0)] = 120.0
    stacked: Annotated[bool, about("Train trials side by side; by default where that is faster.")] | None = None
    patience: Annotated[int, about("Stop when the test error has not fallen for N epochs.", ge=0, le=MANY)] = 0
    keep_best: Annotated[bool, about("Also keep the weights with the lowest test error.")] = False
    keep_every: Annotated[int, about("Also keep the weights of every N-th epoch.", ge=0, le=MANY)] = 0
    deterministic: Annotated[bool, about("Use algorithms that repeat every bit, on a GPU too.")] = False
    states: Annotated[Literal["device", "cpu"], about("Where to keep persistent states: device or cpu.")] = "device"


MODEL_KINDS: dict[str, type[ModelSettings]] = {
    "layered": LayeredNet,
    "convolutional": ConvolutionalNet,
    "graph": GraphNet,
    "predictive": part("models.predictive:PredictiveNet"),
    "toy": ToyNet,
    "resistive": part("physical.resistive:ResistiveNet"),
    "oscillators": part("physical.oscillators:OscillatorNet"),
    "spins": part("physical.spins:SpinNet"),
    "own": OwnNet,
}
SECTIONS: dict[str, type[Section]] = {
    "model": ModelSettings,
    "cost": CostSettings,
    "phases": Phases,
    "estimator": EstimatorSettings,
    "optimizer": Optimizer,
    "data": DataSettings,
    "machine": MachineSettings,
    "run": Run,
}
"""The sections of a spec; `section_type` says which settings one of a given kind has."""
NAMED = {"cost": "kind", "estimator": "kind", "optimizer": "kind", "data": "set", "machine": "kind"}
"""Sections that a name alone stands for: cost = "cross-entropy"."""


def section_type(section: str, values: Mapping[str, Any]) -> type[Section]:
    """The settings of a section of the kind that its values name; a part from outside may add its own."""
    if section == "model":
        kind = values.get("kind", "layered")
        if not isinstance(kind, str) or kind not in MODEL_KINDS:
            raise ValueError(unknown("model.kind", str(kind), MODEL_KINDS))
        function = values.get("function")
        outside = kind == "own" and isinstance(function, str) and function in MODELS
        return extended(OwnNet, MODELS[str(function)]) if outside else MODEL_KINDS[kind]
    name = values.get(NAMED.get(section, ""), "")
    if section == "estimator":
        form = ESTIMATORS[name] if isinstance(name, str) and name in ESTIMATORS else None
        outside = form is not None and name not in ESTIMATORS.built_in
        base = EstimatorSettings if form is None else form.settings
        return extended(base, form.make, _shared()) if form is not None and outside else base
    tables: dict[str, Table[Any]] = {"cost": COSTS, "data": SETS}
    parts = tables.get(section)
    if parts is not None and isinstance(name, str) and name in parts and name not in parts.built_in:
        return extended(SECTIONS[section], parts.part(name))
    return SECTIONS[section]


@cache
def _shared() -> frozenset[str]:
    """The settings of every spec, which an estimator from outside may ask for by name."""
    return frozenset(f.flat for section in ("phases", "optimizer", "data", "run") for f in fields_of(SECTIONS[section]))


def fields_of_spec(spec: Spec) -> dict[str, Any]:
    """The settings by flat name that an estimator may ask for: phases, optimizer, data and run."""
    sections = ("phases", "optimizer", "data", "run")
    return {f.flat: getattr(getattr(spec, f.section), f.leaf) for f in declared() if f.section in sections}


class Change(NamedTuple):
    """A setting that differs from the printed one."""

    field: str
    was: object
    now: object

    def __str__(self) -> str:
        other = "" if self.was is None else f" instead of {_shown(self.was)}"  # the printed kind may not have it
        return f"{self.field} {_shown(self.now)}{other}"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment as data: a row of a paper's table, or your own.

        Spec.of(model=LayeredNet((10, 64, 784)), T=20, K=5, rates={"*": 0.1})

    name        what pages and messages call it
    preset      the name of this version of its settings
    model, cost, phases, estimator, optimizer, data, machine, run    the sections, as a TOML file has them
    source      where it is printed             preset      "paper", "tuned", ...; "own" for your own
    published   errors in percent by estimator, as printed: "2.00 ± 0.13 (0.20)" (see `PaperResult`)
    notes       what a reader of it should know

    Sections may be given as tables of plain data. Every field is checked, however the spec is made.
    """

    name: str
    source: str = ""
    preset: str = "own"
    notes: str = ""
    published: Mapping[str, str] = {}
    model: ModelSettings = LayeredNet()
    cost: CostSettings = CostSettings()
    phases: Phases = Phases()
    estimator: EstimatorSettings = EstimatorSettings()
    optimizer: Optimizer = Optimizer()
    data: DataSettings = DataSettings()
    machine: MachineSettings = MachineSettings()
    run: Run = Run()

    def __post_init__(self) -> None:
        for field, kind in _HEAD.items():
            msgspec.structs.force_setattr(self, field, check(getattr(self, field), kind, field))
        for section in SECTIONS:
            values = _plain(section, getattr(self, section))
            msgspec.structs.force_setattr(self, section, check(values, section_type(section, values), section))
        _check_all(self)

    @classmethod
    def of(cls, name: str | None = None, **flat: Any) -> Spec:
        """A spec from flat settings: T=30, rates={...}, model=LayeredNet(...); what is not given has its default."""
        values = _merged({}, flat)
        return cls(**{"name": name or values.get("model", {}).get("kind", "layered"), **values})

    def override(self, **flat: Any) -> Spec:
        """A copy with these settings changed, ignoring those that are None; learning rates are merged.

        A rate for "*" replaces all current ones. Augmentation and normalisation may be given as the fields to change.
        A readout replaces the output layer: it takes over its rate, and the layers below are renumbered from 0.
        """
        if _named(flat.get("cost")) == "cross-entropy" and self.cost.kind != "cross-entropy":
            return self._read_out().override(**flat)
        return Spec(**_merged(self.to_dict(), flat))

    def _read_out(self) -> Spec:
        """A copy with a readout instead of the output layer; each layer's rates move to its replacement."""
        net = self.model.without_output()
        was, now = self.model.layer_parameters, (READOUT, *net.layer_parameters)
        renamed: dict[str, str] = {}
        for old, new in zip(was, now, strict=bool(was)):
            renamed |= dict(zip(old.weights, new.weights, strict=False))  # a graph's output may have several
            renamed |= {old.bias: new.bias} if old.bias and new.bias else {}
        rates = {renamed.get(name, name): rate for name, rate in self.optimizer.rates.items()}
        optimizer = msgspec.structs.replace(self.optimizer, rates=rates)
        return msgspec.structs.replace(self, cost=CostSettings(kind="cross-entropy"), model=net, optimizer=optimizer)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain data, section by section."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @property
    def estimators(self) -> tuple[str, ...]:
        """What is trained, one after the other."""
        return self.run.estimators or (self.estimator.kind,)

    @property
    def results(self) -> dict[str, PaperResult]:
        """The published errors, by estimator."""
        return {name: PaperResult.parse(text) for name, text in self.published.items()}

    @property
    def readout_names(self) -> tuple[str, ...]:
        """The names of the cost's parameters."""
        return ("Wout", "bout") if self.cost.kind == "cross-entropy" else ()

    def rates(self, names: Iterable[str], layers: Iterable[LayerParameters] = ()) -> dict[str, float]:
        """The learning rate of each named parameter; a bias takes the rate of its weights, found in `layers`."""
        names, given = list(names), self.optimizer.rates
        strange = [key for key in given if key != EVERY_OTHER and key not in names]
        if strange:
            raise ValueError(f"Got a learning rate for no known parameter. {unknown('parameter', strange[0], names)}")
        weights = {layer.bias: layer.weights for layer in (*layers, READOUT)}
        return {name: self._rate(name, weights.get(name, ())) for name in names}

    def _rate(self, name: str, weights: Iterable[str]) -> float:
        given = self.optimizer.rates
        for key in (name, *weights, EVERY_OTHER):
            if key in given:
                return float(given[key])
        raise ValueError(
            f"The parameter {name} has no learning rate; got rates for {', '.join(given)}. "
            f'Add one ({name} = 0.01), or "*" for every parameter that is not named.'
        )

    def changes(self, printed: Spec) -> list[Change]:
        """The settings that differ from another spec's, usually the paper's; those of the machine do not count."""
        found = []
        for section in SECTIONS:
            was, now = getattr(printed, section), getattr(self, section)
            if section == "model" and type(was) is not type(now):
                found.append(Change("model", was, now))
            else:
                found += _section_changes(section, was, now, printed.published)
        return found


Text = Annotated[str, Meta(max_length=10_000)]
_HEAD = {
    "name": Annotated[str, Meta(min_length=1, max_length=200)],
    "source": Text,
    "preset": Annotated[str, Meta(min_length=1, max_length=200)],
    "notes": Text,
    "published": Mapping[str, str],
}
"""The fields of a spec outside its sections."""


def _plain(section: str, value: Any) -> dict[str, Any]:
    """A section as a table: given as one, as a Struct, or by the name it stands for."""
    if isinstance(value, str) and section in NAMED:
        return {NAMED[section]: value}
    if isinstance(value, msgspec.Struct):
        found: dict[str, Any] = msgspec.to_builtins(value)
        return found
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{section} is {shown(value)}; expected a table.")
    return dict(value)


def _named(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", value)


def _flat_name(section: str, leaf: str) -> str:
    return "" if not leaf else next((f.flat for f in fields_of(SECTIONS[section]) if f.leaf == leaf), leaf)


def _merged(start: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a spec with flat settings put in their sections, ignoring those that are None."""
    given = {name: value for name, value in flat.items() if value is not None}
    if given.get("beta") == "auto":
        given = {**given, "beta_led": True}
        del given["beta"]
    out = {name: dict(value) if name in SECTIONS else value for name, value in start.items()}
    given |= _split_estimators(given, start)
    for name in [n for n in given if n in SECTIONS or n in _HEAD]:
        value = given.pop(name)
        if name in _HEAD:
            out[name] = value
            continue
        new = _plain(name, value)
        other = new.get("kind", out.get(name, {}).get("kind")) != out.get(name, {}).get("kind")
        keeps = not isinstance(value, msgspec.Struct) and not (other and name in ("model", "estimator", "cost"))
        out[name] = _joined(name, out.get(name, {}), new) if keeps else new
    places = _places(out)
    for name, value in given.items():
        if name not in places:
            raise ValueError(
                unknown("option", name, [*places, "estimators", *(n for n in SECTIONS if n not in places)])
            )
        section, leaf = places[name]
        out[section] = _joined(section, out.get(section, {}), {leaf: value})
    return out


def _joined(section: str, was: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A section's table with others' values; rates are merged, and so are tables that are sections of their own."""
    new = {name: _table(value) for name, value in new.items()}
    rates = new.get("rates")
    if isinstance(rates, Mapping) and EVERY_OTHER not in rates:
        new["rates"] = {**was.get("rates", {}), **rates}
    for name in ("augmentation", "normalisation", "keep_at_rest", "imperfections"):
        if isinstance(table := new.get(name), Mapping):
            new[name] = {**(was.get(name) or {}), **table}
    return {**was, **new}


def _table(value: Any) -> Any:
    """A Struct as a table; anything else as it is."""
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value


def _split_estimators(given: dict[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """ "ep,bptt" or a list of several names are trained one after the other; one name is the spec's own."""
    several = given.pop("estimators", None)
    one = given.get("estimator")
    if several is not None and one is not None:
        raise ValueError("Give estimators or estimator, not both: they are two names for one option.")
    asked = several if several is not None else one
    if asked is None or isinstance(asked, Mapping | msgspec.Struct):
        return {}
    given.pop("estimator", None)
    names = split_estimators(asked)
    run = {"estimators": names if len(names) > 1 else ()}
    return {"run": {**run, **_plain("run", given.get("run", {}))}, "estimator": names[0]}


def split_estimators(names: str | Sequence[str]) -> tuple[str, ...]:
    """ "ep,bptt" -> ("ep", "bptt")."""
    parts = names.split(",") if isinstance(names, str) else names
    words = parts if isinstance(parts, Sequence) and all(isinstance(part, str) for part in parts) else ()
    if not (found := tuple(part.strip().lower() for part in words if part.strip())):
        raise ValueError(f"estimators is {shown(names)}; expected names from {', '.join(ESTIMATORS)}.")
    return found


def _places(values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Where each flat setting stands, for a spec of these kinds."""
    kinds = {section: section_type(section, values.get(section, {})) for section in SECTIONS}
    found = [f for section, kind in kinds.items() for f in _declared(kind, section)]
    return {f.flat: (f.section, f.leaf) for f in found}


@cache
def _declared(kind: Any, section: str) -> tuple[Field, ...]:
    return tuple(fields_of(kind, section))


def declared(spec: Spec | None = None) -> list[Field]:
    """Every setting that can be given, in the order of the sections; for one spec, with those of its kinds."""
    if spec is not None:
        kinds: dict[str, Any] = {section: type(getattr(spec, section)) for section in SECTIONS}
        return [f for section, kind in kinds.items() for f in _declared(kind, section)]
    found: dict[str, Field] = {}
    for section, kind in SECTIONS.items():
        for each in (kind, *(MODEL_KINDS.values() if section == "model" else ())):
            for f in _declared(each, section):
                known = found.setdefault(f.flat, f)
                if known.default != f.default:
                    found[f.flat] = replace(known, varies=True)
    for form in ESTIMATORS.built_in.values():
        for f in _declared(form.settings, "estimator"):
            found.setdefault(f.flat, f)
    return list(found.values())


def _check_all(spec: Spec) -> None:
    """What no field shows alone: names that registries hold, and settings that exclude each other."""
    for printed in spec.published.values():
        PaperResult.parse(printed)
    table = spec.to_dict()
    table |= {name: table[name].split("\n") for name in ("source", "notes")}  # the only texts of several lines
    for text in _texts(table):
        if not text.isprintable():
            raise ValueError(f"The experiment {spec.name!r} holds {shown(text)}; expected printable characters.")
    _check_choice("estimator", spec.estimator.kind, ESTIMATORS)
    for name in spec.run.estimators:
        _check_choice("estimator", name, ESTIMATORS)
    if len(set(spec.run.estimators)) < len(spec.run.estimators):
        raise ValueError(f"estimators is {spec.run.estimators}; expected no duplicates, from {', '.join(ESTIMATORS)}.")
    if spec.cost.kind != OWN_COST:
        _check_choice("cost", spec.cost.kind, COSTS)
    _check_choice("optimizer", spec.optimizer.kind, optimizer_names())
    if spec.run.engine != "auto":
        _check_choice("engine", spec.run.engine, engine_names())
    options = spec.optimizer.options
    fixed = [name for name in ("lr", "params") if name in options]
    if fixed:
        raise ValueError(f"optimizer.options sets {fixed[0]}, which the learning rates do. Use rates, or --lr.")
    if spec.optimizer.weight_decay and "weight_decay" in options:
        raise ValueError("weight_decay is set twice: in optimizer and in its options. Omit one of them.")
    if CONTINUAL in spec.estimators:
        _check_continual(spec.optimizer)


def _check_continual(optimizer: Optimizer) -> None:
    set_to = {"decay": optimizer.decay != "none", "warmup": optimizer.warmup, "weight_decay": optimizer.weight_decay}
    set_to["homeostasis"] = optimizer.homeostasis
    moved = next((name for name, given in {**set_to, "clip_norm": optimizer.clip_norm}.items() if given), None)
    if moved is not None:
        raise ValueError(
            f"{moved} is {getattr(optimizer, moved)}, but continual EP moves the parameters itself at constant rates; "
            f"expected no {moved}. Omit it, or use another estimator."
        )
    if optimizer.kind != "SGD" or optimizer.options:
        options = ", ".join(f"{k}={v}" for k, v in optimizer.options.items())
        raise ValueError(
            f"The optimizer is {optimizer.kind}{f' with {options}' if options else ''}, but continual EP moves the "
            "parameters itself, like SGD without options. Use SGD without options, or another estimator."
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from (*_texts(name), *_texts(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


@cache
def optimizer_names() -> tuple[str, ...]:
    """Those of here, and the optimizers of the installed torch.optim that step without a closure."""
    found = (name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type))
    classes = {name: getattr(torch.optim, name) for name in found}
    skipped = ("Optimizer", "LBFGS", "SparseAdam")
    own = tuple(n for n, c in classes.items() if issubclass(c, torch.optim.Optimizer) and n not in skipped)
    return (*own, *OPTIMIZERS)


def _check_choice(what: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(unknown(what, value, known))


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


MACHINE = {
    "data": ("set", "validation", "samples", "test_samples"),
    "run": tuple(n for n in Run.__struct_fields__ if n != "precision"),
}
"""Settings that say how much and where, not what; whose data they were, a checksum says."""


def _section_changes(section: str, was: Section, now: Section, published: Mapping[str, str]) -> Iterator[Change]:
    for leaf in now.__struct_fields__:
        pair = getattr(was, leaf, None), getattr(now, leaf)
        is_published = section == "estimator" and leaf == "kind" and pair[1] in published
        if pair[0] != pair[1] and leaf not in MACHINE.get(section, ()) and not is_published:
            yield Change(_flat_name(section, leaf), *pair)
