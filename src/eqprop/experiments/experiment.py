"""A training experiment as frozen data: architecture, phases, estimator, optimizer and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.data.augment import Augmentation, Normalisation
from eqprop.dynamics import NUDGE_SITES, Dynamics, NudgeSite, set_nudge_site
from eqprop.engines.base import PRECISIONS, Precision
from eqprop.estimators import BPTT, EP, RBP, Backprop, ContinualEP, Estimator, HolomorphicEP
from eqprop.experiments.architecture import (
    LARGEST,
    Architecture,
    Factory,
    InitName,
    Own,
    OwnNet,
    as_own,
    check_types,
    own_of,
)
from eqprop.messages import shown, unknown
from eqprop.models import CrossEntropy
from eqprop.models.readout import COSTS, OWN_COST, READOUT_SEED, CostName
from eqprop.plugins import Table
from eqprop.relax import SCHEDULES, Schedule, Stop
from eqprop.starts import STARTS, StartName
from eqprop.state import LayerParameters

EVERY_OTHER = "*"
"""The key for the learning rate of every parameter that is not named."""

READOUT = LayerParameters(("Wout",), "bout")

MOST_NAME, MOST_STEPS, MOST_EPOCHS, MOST_SEED = 200, 1_000_000, 100_000, 2**53
"""Limits of an experiment: characters of its name, T and K, epochs, and seeds, which JSON keeps exactly up to here."""

DecayName = Literal["none", "cosine"]
DECAYS = ("none", "cosine")
WeightDecay = Literal["coupled", "decoupled"]

EstimatorName = str
BACKPROP = "backprop"
"""The estimator of a net's feed-forward twin: free phases are one forward pass."""


def _phases(e: Experiment) -> dict[str, Any]:
    return {"T": e.T, "K": e.K, "schedule": e.schedule, "stop": e.stop}


_BUILT_IN: dict[str, Callable[[Experiment], Estimator]] = {
    "ep": lambda e: EP(**_phases(e), beta=e.beta),
    "ep-symmetric": lambda e: EP(**_phases(e), beta=e.beta, nudging="symmetric"),
    "ep-random-sign": lambda e: EP(**_phases(e), beta=e.beta, nudging="random-sign"),
    "ep-holomorphic": lambda e: HolomorphicEP(**_phases(e), beta=e.beta, points=e.points),
    "ep-continual": lambda e: ContinualEP(**_phases(e), beta=e.beta, rates=dict(e.learning_rates)),
    "bptt": lambda e: BPTT(**_phases(e)),
    "rbp": lambda e: RBP(**_phases(e)),
    BACKPROP: lambda e: Backprop(),
}


def _from_outside(name: str, part: Any) -> Callable[[Experiment], Estimator]:
    """An estimator's class takes from the experiment the fields it has: T, K, beta, schedule, stop, ..."""
    if not (isinstance(part, type) and issubclass(part, Estimator)):
        maker: Callable[[Experiment], Estimator] = part
        return maker
    names = [f.name for f in fields(part) if f.init and f.name in Experiment.__dataclass_fields__]
    return lambda experiment: part(**{name: getattr(experiment, name) for name in names})


ESTIMATORS: Table[Callable[[Experiment], Estimator]] = Table("estimator", _BUILT_IN, _from_outside)
"""The estimators an experiment can be trained with, by the name used on the command line and in files."""


def label(estimator: str) -> str:
    """EP, EP symmetric, ..., BPTT, RBP, backprop."""
    if estimator not in ESTIMATORS.built_in or estimator == BACKPROP:
        return estimator
    family, _, form = estimator.partition("-")
    return f"{family.upper()} {form}".strip()


@dataclass(frozen=True)
class PaperResult:
    """Errors in percent as printed in the paper, over five trials  [table-results].

    None for a deviation or a train error that is not published.
    """

    test: float
    test_std: float | None = None
    train: float | None = None

    def __str__(self) -> str:
        spread = "" if self.test_std is None else f" ± {self.test_std:.2f}"
        return f"{self.test:.2f}{spread}" + ("" if self.train is None else f" ({self.train:.2f})")


class Change(NamedTuple):
    """A field of an experiment that differs from the printed one."""

    field: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.field} {_shown(self.now)} instead of {_shown(self.was)}"


def setting(help: str, default: Any, group: str | None = None) -> Any:
    """A field exposed as an option of `eqprop train`, with its help text and the group of options it stands in."""
    return field(default=default, metadata={"help": help} | ({"group": group} if group else {}))


@dataclass(frozen=True)
class Experiment:
    """One row of the paper's table of training hyper-parameters  [table-hyp-training], or a custom experiment.

    learning_rates  by parameter name; a bias takes the rate of its layer's weight (b0 that of W01); "*" stands for
                    every parameter that is not named
    decay           "cosine": rates fall along half a cosine, epoch by epoch; "none": constant rates
    decay_epochs    epochs over which they fall; then they stay. None: all
    decay_floor     the rate they fall to; one that is lower from the start stays as it is
    warmup          epochs, or a part of one, over which rates rise from zero in equal steps, one per iteration
    weight_decay    "coupled": weight_decay * w is added to the gradient, as torch.optim's own option does;
                    "decoupled": w shrinks by its rate times weight_decay before each step
    clip_norm       the largest norm of a network's gradient; a longer one is scaled down to it
    label_smoothing share of a target that is spread over all classes
    average         weights to evaluate with: their average over iterations, each earlier one counting so many times
                    the next, without the initial weights; 0: the last ones
    seed            of trial 0; trial r draws weights and batches from seed + r
    schedule, stop  of the free phase (see `eqprop.relax.Phase`); stop="settled" gives the same bits sooner
    estimator       the default estimator, a key of ESTIMATORS; random signs are drawn from the seed
    points          on the circle of "ep-holomorphic"
    nudge_site      where the nudge enters a prototypical net: "outside" sigma, as in the paper, "inside", or
                    "implicit", at the new output
    cost            "squared-error", or "cross-entropy" of a softmax readout outside the dynamics, with weights Wout and
                    bout (see `eqprop.CrossEntropy`), or "own", the one that your own function returns
    optimizer       any class of torch.optim by name, with optimizer_options
    start           where free phases begin (see `eqprop.starts`): "zero", "persistent", "initialised", "carried"
    initialiser_rate    learning rate of the feed-forward net of "initialised", above 0 and below 2
    output_bias     initial biases of the output layer; None: as drawn by `init`. BPTT gives no gradient to an output
                    that a clip or a hard sigmoid holds at 0 from the start (see docs/table1.md).
    output_scale    factor on the initial weights of the output layer
    augmentation    random changes of training images, drawn from seed, epoch and sample (see `eqprop.data.augment`)
    data            the data set it is for, by name; None: MNIST, or the one given
    normalisation   of all images; None: from 0 to 1, as they are
    top5            whether to count labels that are not among the five largest outputs too; takes a little longer
    evaluation_T    free steps when measuring errors; None: T. With persistent states, training samples settle in
                    fewer steps than unseen ones.
    precision       of the products in a step (see `eqprop.engines.base.Precision`): "float32", "tf32", "float16",
                    "bfloat16"; sums, states, gradients and weights stay float32
    paper_results   what the paper reports, by estimator
    """

    name: str
    architecture: Architecture
    T: int = field(metadata={"help": "Steps of the free phase.", "group": "Phases"})
    K: int = field(metadata={"help": "Steps of the second phase.", "group": "Phases"})
    epochs: int = field(metadata={"help": "Passes over the training set.", "group": "Optimizer"})
    learning_rates: Mapping[str, float]
    beta: float = setting("Strength of the nudge.", 0.1, group="Phases")
    decay: DecayName = setting("Decay of the rates: none or cosine.", "none", group="Optimizer")
    decay_epochs: int | None = setting(
        "Epochs over which rates fall; then they stay. [default: all]", None, group="Optimizer"
    )
    decay_floor: float = setting("The rate that decay ends at.", 0.0, group="Optimizer")
    warmup: float = setting("Epochs, or a part of one, over which rates rise from 0.", 0.0, group="Optimizer")
    weight_decay: float = setting("Decay of the weights.", 0.0, group="Optimizer")
    weight_decay_kind: WeightDecay = setting(
        "coupled (added to the gradient) or decoupled.", "coupled", group="Optimizer"
    )
    weight_decay_biases: bool = setting("Whether biases decay too.", True, group="Optimizer")
    clip_norm: float | None = setting("Largest norm of the gradient. [default: any]", None, group="Optimizer")
    label_smoothing: float = setting("Share of a target that is spread over all classes.", 0.0, group="Optimizer")
    average: float = setting("Evaluate with an average of the weights, such as 0.999.", 0.0, group="Optimizer")
    batch: int = setting("Mini-batch size.", 20, group="Optimizer")
    init: InitName = setting("Initial weights: glorot or default (PyTorch's).", "glorot", group="What to train")
    seed: int = setting("Seed of trial 0; trial r uses seed + r.", 0)
    schedule: Schedule = setting("synchronous; alternating free phase; or sweeps.", "synchronous", group="Phases")
    stop: Stop = setting("Stop early: never, or settled (same bits).", "never", group="Phases")
    estimator: EstimatorName = "ep"
    points: int = setting("Points on the circle of ep-holomorphic.", 4, group="Phases")
    nudge_site: NudgeSite = setting(
        "Nudge outside sigma, as in the paper, inside, or implicit.", "outside", group="What to train"
    )
    cost: CostName = setting(
        "squared-error, or cross-entropy of a softmax readout.", "squared-error", group="What to train"
    )
    optimizer: str = setting("Any class of torch.optim.", "SGD", group="Optimizer")
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    start: StartName = setting("Initial states: zero, persistent, initialised or carried.", "zero", group="Phases")
    initialiser_rate: float = setting("Rate of the initialiser, below 2.", 1.0, group="Phases")
    output_bias: float | None = setting("Initial biases of the outputs.", None, group="What to train")
    output_scale: float = setting("Factor on the outputs' initial weights.", 1.0, group="What to train")
    top5: bool = setting("Count top-5 errors too.", False)
    evaluation_T: int | None = setting("T when measuring errors. [default: T]", None, group="Phases")
    augmentation: Augmentation | None = None
    normalisation: Normalisation | None = None
    precision: Precision = setting("Of products: float32, tf32, float16 or bfloat16.", "float32")
    data: str | None = None
    preset: Literal["paper", "authors", "tuned", "fast", "own"] = "own"
    paper_results: Mapping[str, PaperResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least, most in COUNTS:
            _check_count(name, getattr(self, name), least, most)
        if self.evaluation_T is not None:
            _check_count("evaluation_T", self.evaluation_T, 1, MOST_STEPS)
        if not _is_finite(self.beta):
            raise ValueError(f"beta is {shown(self.beta)}; expected a finite number, such as 0.1.")
        if self.output_bias is not None and not _is_finite(self.output_bias):
            raise ValueError(f"output_bias is {shown(self.output_bias)}; expected a finite number, such as 0.5.")
        if not _is_finite(self.output_scale):
            raise ValueError(f"output_scale is {shown(self.output_scale)}; expected a finite number, such as 0.1.")
        self._check_regime()
        _check_choice("init", self.init, ("glorot", "default"))
        _check_choice("decay", self.decay, DECAYS)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("stop", self.stop, ("never", "settled"))
        _check_choice("estimator", self.estimator, ESTIMATORS)
        _check_choice("nudge_site", self.nudge_site, NUDGE_SITES)
        if self.cost != OWN_COST:
            _check_choice("cost", self.cost, COSTS)
        _check_choice("optimizer", self.optimizer, optimizer_names())
        _check_choice("start", self.start, STARTS)
        _check_choice("precision", self.precision, PRECISIONS)
        if not _is_finite(self.initialiser_rate) or not 0.0 < self.initialiser_rate < 2.0:
            got = shown(self.initialiser_rate)
            raise ValueError(f"initialiser_rate is {got}; expected a number above 0 and below 2.")
        check_types(self)
        if not 1 <= len(self.name) <= MOST_NAME:
            raise ValueError(f"name is {shown(self.name)}; expected 1 to {MOST_NAME} characters.")
        self._check_rates()
        self.make_estimator(self.estimator)

    def _check_regime(self) -> None:
        """How the weights are moved: decay, warm-up, clipping, smoothing, averaging."""
        if self.decay_epochs is not None:
            _check_count("decay_epochs", self.decay_epochs, 1, MOST_EPOCHS)
        for name in ("decay_floor", "warmup", "weight_decay"):
            if not _is_finite(value := getattr(self, name)) or value < 0:
                raise ValueError(f"{name} is {shown(value)}; expected a number, 0 or more.")
        for name in ("label_smoothing", "average"):
            if not _is_finite(value := getattr(self, name)) or not 0 <= value < 1:
                raise ValueError(f"{name} is {shown(value)}; expected a number from 0 to below 1.")
        if self.clip_norm is not None and (not _is_finite(self.clip_norm) or self.clip_norm <= 0):
            raise ValueError(f"clip_norm is {shown(self.clip_norm)}; expected a number above 0, or none.")
        if self.weight_decay and "weight_decay" in self.optimizer_options:
            raise ValueError("weight_decay is set twice: as a field and in optimizer_options. Omit one of them.")

    def _check_rates(self) -> None:
        if not self.learning_rates:
            raise ValueError(f"{self.name} has no learning rates; expected one per weight, such as W01 = 0.04.")
        for name in (*self.learning_rates, *self.optimizer_options):
            if not isinstance(name, str) or not name.isprintable():
                raise ValueError(f"A learning rate or optimizer option is called {shown(name)}; expected a name.")
        for name, rate in self.learning_rates.items():
            if not _is_finite(rate) or rate < 0:
                raise ValueError(f"The learning rate of {name} is {shown(rate)}; expected a number, 0 or more.")
        fixed = [name for name in ("lr", "params") if name in self.optimizer_options]
        if fixed:
            raise ValueError(
                f"optimizer_options sets {fixed[0]}, which the learning rates do. Use learning_rates, or --lr."
            )

    def make_estimator(self, name: str, model: Dynamics | None = None) -> Estimator:
        """Make an estimator by name. For a given model, continual EP gets a rate per parameter."""
        _check_choice("estimator", name, ESTIMATORS)
        made = ESTIMATORS[name](self)
        if not isinstance(made, ContinualEP):
            return made
        self._check_continual()
        if model is None:
            return made
        names = [name for name, _ in model.named_parameters()]
        rates = self.rates([*names, *self.readout_names], model.layer_parameters)
        return replace(made, rates={name: rates[name] for name in names})

    def _check_continual(self) -> None:
        set_to = {"decay": self.decay != "none", "warmup": self.warmup, "weight_decay": self.weight_decay}
        moved = next((name for name, given in {**set_to, "clip_norm": self.clip_norm}.items() if given), None)
        if moved is not None:
            raise ValueError(
                f"{moved} is {getattr(self, moved)}, but continual EP moves the parameters itself at constant rates; "
                f"expected no {moved}. Omit it, or use another estimator."
            )
        if self.optimizer != "SGD" or self.optimizer_options:
            options = ", ".join(f"{k}={v}" for k, v in self.optimizer_options.items())
            raise ValueError(
                f"The optimizer is {self.optimizer}{f' with {options}' if options else ''}, but continual EP moves the "
                "parameters itself, like SGD without options. Omit the optimizer and its options, or use another "
                "estimator."
            )

    @property
    def readout_names(self) -> tuple[str, ...]:
        """The names of the cost's parameters."""
        return ("Wout", "bout") if self.cost == "cross-entropy" else ()

    def make_cost(self, trial: int, inputs: int, classes: int, dtype: torch.dtype, own: Factory | None = None) -> Cost:
        """The cost of one trial; a readout reads `inputs` neurons and draws its weights from the trial's seed."""
        if self.cost == "squared-error":
            return SquaredError()
        if self.cost == OWN_COST:
            function = own_of(own, self.architecture)
            cost = None if function is None else function.build(self.seed + trial).cost
            if cost is None:
                raise ValueError(
                    f"{self.name} was trained with your own cost, and got no function that returns it. Pass "
                    "model=function in Python, or --model FILE.py:FUNCTION on the command line."
                )
            return cost.to(dtype)
        if (make := COSTS[self.cost]) is not None:
            return make().to(dtype)
        return CrossEntropy(inputs, classes, init=self.init, seed=self.seed + trial + READOUT_SEED, dtype=dtype)

    def build(self, trial: int, dtype: torch.dtype = torch.float32, own: Factory | None = None) -> Dynamics:
        """The network of one trial with its initial weights, the same for every estimator and device."""
        seed = self.seed + trial
        if isinstance(self.architecture, OwnNet) and own is not None:
            function = as_own(own)
            assert function is not None, "own is not None"
            model = function(seed).to(dtype)
        else:
            model = self.architecture.build(self.init, seed, dtype)
        self._begin_outputs(model)
        if self.nudge_site != "outside":  # a custom network may already have it there
            set_nudge_site(model, self.nudge_site)
        return model

    def _begin_outputs(self, model: Dynamics) -> None:
        if self.output_scale != 1.0:
            weight = self._of_output_layer(model, "output_scale", "weights")
            with torch.no_grad():
                weight.mul_(self.output_scale)
        if self.output_bias is not None:
            bias = self._of_output_layer(model, "output_bias", "biases")
            with torch.no_grad():
                bias.fill_(self.output_bias)

    def _of_output_layer(self, model: Dynamics, setting: str, kind: Literal["weights", "biases"]) -> Tensor:
        layers = self.architecture.layer_parameters if self.cost == "squared-error" else ()
        name = None if not layers else layers[0].bias if kind == "biases" else layers[0].weights[0]
        found = dict(model.named_parameters()).get(name or "")
        if found is None:
            raise ValueError(
                f"{setting} is {getattr(self, setting)}, but {self.name} has no output layer with {kind} in its "
                f"dynamics. Omit {setting}, or set the {kind} in the function that builds your network."
            )
        return found

    def rates(self, names: Iterable[str], layers: Iterable[LayerParameters] = ()) -> dict[str, float]:
        """The learning rate of each named parameter; a bias takes the rate of its weights, found in `layers`."""
        names = list(names)
        strange = [key for key in self.learning_rates if key != EVERY_OTHER and key not in names]
        if strange:
            raise ValueError(f"Got a learning rate for no known parameter. {unknown('parameter', strange[0], names)}")
        weights = {layer.bias: layer.weights for layer in (*layers, READOUT)}
        return {name: self._rate(name, weights.get(name, ())) for name in names}

    def _rate(self, name: str, weights: Iterable[str]) -> float:
        for key in (name, *weights, EVERY_OTHER):
            if key in self.learning_rates:
                return float(self.learning_rates[key])
        raise ValueError(
            f"The parameter {name} has no learning rate; got rates for {', '.join(self.learning_rates)}. "
            f'Add one ({name} = 0.01), or "*" for every parameter that is not named.'
        )

    def rate_factor(self, epoch: int) -> float:
        """The share of the way down to the floor that is left to the rates in this epoch, counted from 0."""
        over = self.decay_epochs or self.epochs
        return 1.0 if self.decay == "none" else 0.5 * (1.0 + math.cos(math.pi * min(epoch, over) / over))

    def rate_in(self, epoch: int, rate: float, warmth: float = 1.0) -> float:
        """A learning rate in this epoch, from its initial value; `warmth` is the share of the warm-up that is done."""
        floor = 0.0 if self.decay == "none" else min(self.decay_floor, rate)
        fallen = rate * self.rate_factor(epoch) if not floor else floor + (rate - floor) * self.rate_factor(epoch)
        return fallen if warmth >= 1.0 else warmth * fallen

    def changes(self, printed: Experiment) -> list[Change]:
        """The fields that differ from another experiment, usually the paper's; the architecture field by field."""
        found = []
        for name in self.__dataclass_fields__:
            if name in ("name", "preset", "paper_results", "seed"):
                continue
            was, now = getattr(printed, name), getattr(self, name)
            if name == "architecture" and type(was) is type(now):
                found += [
                    Change(f, getattr(was, f), getattr(now, f))
                    for f in now.__dataclass_fields__
                    if getattr(was, f) != getattr(now, f)
                ]
            elif was != now:
                found.append(Change(name, was, now))
        return found

    def override(self, **fields: Any) -> Experiment:
        """A copy with the given fields changed, ignoring those that are None; learning rates are merged.

        A rate for "*" replaces all current ones. Augmentation and normalisation may be given as the fields to change.
        A readout replaces the output layer: it takes over its rate, and the layers below are renumbered from 0.
        """
        if fields.get("cost") == "cross-entropy" and self.cost != "cross-entropy":
            return self._read_out().override(**fields)
        given = {name: value for name, value in fields.items() if value is not None}
        strange = next((name for name in given if name not in self.__dataclass_fields__), None)
        if strange is not None:
            raise ValueError(unknown("field", strange, self.__dataclass_fields__))
        for name, kind in (("augmentation", Augmentation), ("normalisation", Normalisation)):
            if isinstance(changed := given.get(name), Mapping):
                given[name] = kind.from_dict({**(getattr(self, name) or kind()).to_dict(), **changed}, name)
        rates = given.get("learning_rates")
        if rates is not None and EVERY_OTHER not in rates:
            given["learning_rates"] = {**self.learning_rates, **rates}
        return replace(self, **given)

    def _read_out(self) -> Experiment:
        """A copy with a readout instead of the output layer; each layer's rates move to its replacement."""
        net = self.architecture.without_output()
        was, now = self.architecture.layer_parameters, (READOUT, *net.layer_parameters)
        renamed: dict[str, str] = {}
        for old, new in zip(was, now, strict=bool(was)):
            renamed |= dict(zip(old.weights, new.weights, strict=False))  # a graph's output may have several
            renamed |= {old.bias: new.bias} if old.bias and new.bias else {}
        rates = {renamed.get(name, name): rate for name, rate in self.learning_rates.items()}
        return replace(self, cost="cross-entropy", architecture=net, learning_rates=rates)


OWN_T, OWN_K, OWN_EPOCHS, OWN_RATE = 50, 10, 10, 0.001
OWN_ESTIMATOR: EstimatorName = "ep-symmetric"
"""Of own models, chosen over ten of them (see docs/estimators.md)."""


def own_experiment(own: Own) -> Experiment:
    """The experiment of your own function, where nothing else is given: Adam at a rate that rarely fails."""
    source, _, function = own.name.rpartition(":")
    return Experiment(
        name=f"{Path(source).stem}-{function}" if source else function,
        architecture=OwnNet(own.name),
        T=OWN_T,
        K=OWN_K,
        epochs=OWN_EPOCHS,
        learning_rates={EVERY_OTHER: OWN_RATE},
        estimator=OWN_ESTIMATOR,
        optimizer="Adam",
        cost=OWN_COST if own.has_cost else "squared-error",
    )


def optimizer_names() -> tuple[str, ...]:
    """The optimizers of the installed torch.optim that step without a closure."""
    found = (name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type))
    classes = {name: getattr(torch.optim, name) for name in found}
    skipped = ("Optimizer", "LBFGS", "SparseAdam")
    return tuple(n for n, c in classes.items() if issubclass(c, torch.optim.Optimizer) and n not in skipped)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


COUNTS = (
    ("T", 1, MOST_STEPS),
    ("K", 1, MOST_STEPS),
    ("epochs", 1, MOST_EPOCHS),
    ("batch", 1, MOST_STEPS),
    ("seed", 0, MOST_SEED),
)


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}; expected an integer from {least} to {most}.")


def _check_choice(what: str, value: object, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(unknown(what, value if isinstance(value, str) else shown(value), known))


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)
