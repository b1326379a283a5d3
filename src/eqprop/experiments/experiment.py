"""A training experiment as a frozen record: what is trained, how long, with which steps and rates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.dynamics import Dynamics, NudgePlace, place_nudge
from eqprop.estimators import BPTT, EP, RBP, ContinualEP, Estimator, HolomorphicEP
from eqprop.experiments.architecture import Architecture, Factory, InitName, OwnNet
from eqprop.messages import unknown
from eqprop.models import CrossEntropy
from eqprop.relax import SCHEDULES, Schedule, Stop
from eqprop.starts import STARTS, StartName

EVERY_OTHER = "*"
"""The learning rate of every parameter that is not named."""

CostName = Literal["squared-error", "cross-entropy"]
COSTS = ("squared-error", "cross-entropy")
READOUT = ("Wout", "bout")
READOUT_SEED = 1 << 32
"""Added to a trial's seed for the readout's weights, so that they are not the network's numbers once more."""

DecayName = Literal["none", "cosine"]
DECAYS = ("none", "cosine")

EstimatorName = Literal["one-sided", "symmetric", "random-sign", "holomorphic", "continual"]

ESTIMATORS: dict[str, Callable[[Record], Estimator]] = {
    "one-sided": lambda r: EP(r.T, r.K, r.schedule, r.stop, beta=r.beta),
    "symmetric": lambda r: EP(r.T, r.K, r.schedule, r.stop, beta=r.beta, nudging="symmetric"),
    "random-sign": lambda r: EP(r.T, r.K, r.schedule, r.stop, beta=r.beta, nudging="random-sign"),
    "holomorphic": lambda r: HolomorphicEP(r.T, r.K, r.schedule, r.stop, beta=r.beta, points=r.points),
    "continual": lambda r: ContinualEP(r.T, r.K, r.schedule, r.stop, beta=r.beta, rates=dict(r.learning_rates)),
}
"""The forms of EP, by the name used on the command line (see docs/estimators.md)."""

METHODS: dict[str, Callable[[Record], Estimator]] = {
    "ep": lambda r: ESTIMATORS[r.estimator](r),
    "bptt": lambda r: BPTT(r.T, r.K, r.schedule, r.stop),
    "rbp": lambda r: RBP(r.T, r.K, r.schedule, r.stop),
}
"""The estimators a record can be trained with, by the name used on the command line."""


@dataclass(frozen=True)
class Reported:
    """Errors in percent as the paper prints them, over five trials  [table-results].

    What is published without a deviation or a train error has None there.
    """

    test: float
    test_std: float | None = None
    train: float | None = None

    def __str__(self) -> str:
        spread = "" if self.test_std is None else f" ± {self.test_std:.2f}"
        return f"{self.test:.2f}{spread}" + ("" if self.train is None else f" ({self.train:.2f})")


class Change(NamedTuple):
    """A field of a record that is not as the paper prints it."""

    field: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.field} {_plain(self.now)} instead of {_plain(self.was)}"


@dataclass(frozen=True)
class Record:
    """One row of the paper's table of training hyper-parameters  [table-hyp-training], or a user's own.

    learning_rates  by parameter name; a bias takes the rate of its layer's weight (b0 that of W01); "*" stands for
                    every parameter that is not named
    decay           "cosine": the rates fall to nothing over the epochs, in half a turn of a cosine; "none": they stay
    seed            of trial 0; trial r draws weights and batches from seed + r
    schedule, stop  of the free phase (see `eqprop.relax.Phase`); stop="settled" gives the same bits sooner
    estimator       which form of EP method "ep" is: a key of ESTIMATORS; its random signs are drawn from the seed
    points          of the circle of "holomorphic"
    nudge           where the nudge enters a prototypical net: "outside" sigma, as in the paper, or "inside"
    cost            "squared-error", or "cross-entropy" of a softmax readout outside the dynamics, whose weights are
                    called Wout and bout (see `eqprop.CrossEntropy`)
    optimizer       any class of torch.optim by name, with optimizer_options
    start           where free phases begin (see `eqprop.starts`): "zero", "persistent", "initialised"
    initialiser_rate    of "initialised": how fast its feed-forward net learns, above 0 and below 2
    output_bias     what the biases of the output layer begin with; None: what `init` draws. An output that a clip or a
                    hard sigmoid holds at 0 from the start has no gradient by BPTT (see docs/table1.md).
    output_scale    what the weights of the output layer, as `init` draws them, are multiplied by
    evaluation_T    free steps where errors are measured; None: T. Persistent states make a training sample settle in
                    fewer steps than one that was never seen.
    reported        what the paper reports, by method
    """

    name: str
    architecture: Architecture
    T: int
    K: int
    epochs: int
    learning_rates: Mapping[str, float]
    beta: float = 0.1
    decay: DecayName = "none"
    batch: int = 20
    init: InitName = "glorot"
    seed: int = 0
    schedule: Schedule = "synchronous"
    stop: Stop = "never"
    estimator: EstimatorName = "one-sided"
    points: int = 4
    nudge: NudgePlace = "outside"
    cost: CostName = "squared-error"
    optimizer: str = "SGD"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    start: StartName = "zero"
    initialiser_rate: float = 1.0
    output_bias: float | None = None
    output_scale: float = 1.0
    evaluation_T: int | None = None
    preset: Literal["paper", "authors", "tuned", "own"] = "own"
    reported: Mapping[str, Reported] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("T", "K", "epochs", "batch"):
            _check_count(name, getattr(self, name), least=1)
        _check_count("seed", self.seed, least=0)
        if self.evaluation_T is not None:
            _check_count("evaluation_T", self.evaluation_T, least=1)
        if not _is_finite(self.beta):
            raise ValueError(f"beta is {self.beta!r}; expected a finite number, such as 0.1.")
        if self.output_bias is not None and not _is_finite(self.output_bias):
            raise ValueError(f"output_bias is {self.output_bias!r}; expected a finite number, such as 0.5, or nothing.")
        if not _is_finite(self.output_scale):
            raise ValueError(f"output_scale is {self.output_scale!r}; expected a finite number, such as 0.1.")
        _check_choice("init", self.init, ("glorot", "default"))
        _check_choice("decay", self.decay, DECAYS)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("stop", self.stop, ("never", "settled"))
        _check_choice("estimator", self.estimator, ESTIMATORS)
        _check_choice("nudge", self.nudge, ("outside", "inside"))
        _check_choice("cost", self.cost, COSTS)
        _check_choice("optimizer", self.optimizer, optimizer_names())
        _check_choice("start", self.start, STARTS)
        if not self.learning_rates:
            raise ValueError(f"{self.name} has no learning rates; expected one a weight, such as W01 = 0.04.")
        for name, rate in self.learning_rates.items():
            if not _is_finite(rate) or rate < 0:
                raise ValueError(f"The learning rate of {name} is {rate!r}; expected a number, 0 or more.")
        if not isinstance(self.initialiser_rate, int | float) or not 0.0 < self.initialiser_rate < 2.0:
            raise ValueError(f"initialiser_rate is {self.initialiser_rate!r}; expected a number above 0 and below 2.")
        METHODS["ep"](self)
        if self.estimator == "continual" and self.decay != "none":
            raise ValueError(
                f"Continual EP moves the parameters itself at constant rates; decay is {self.decay}. Leave decay away, "
                "or use another estimator."
            )
        if self.estimator == "continual" and (self.optimizer != "SGD" or self.optimizer_options):
            options = ", ".join(f"{k}={v}" for k, v in self.optimizer_options.items())
            raise ValueError(
                f"Continual EP moves the parameters itself, as plain SGD does; the optimizer is {self.optimizer}"
                f"{f' with {options}' if options else ''}. Leave the optimizer as it is, or use another estimator."
            )

    def make_estimator(self, method: str, names: Iterable[str] = ()) -> Estimator:
        """The estimator of a method. `names`, those of the network's parameters, give each its rate in continual EP."""
        if method not in METHODS:
            raise ValueError(unknown("method", method, METHODS))
        made = METHODS[method](self)
        names = list(names)
        if not names or not isinstance(made, ContinualEP):
            return made
        rates = self.rates([*names, *self.readout_names])
        return replace(made, rates={name: rates[name] for name in names})

    @property
    def readout_names(self) -> tuple[str, ...]:
        """The parameters of the cost."""
        return READOUT if self.cost == "cross-entropy" else ()

    def make_cost(self, trial: int, inputs: int, classes: int, dtype: torch.dtype) -> Cost:
        """The cost of one trial; a readout has the initial weights of its seed and looks at `inputs` neurons."""
        if self.cost == "squared-error":
            return SquaredError()
        return CrossEntropy(inputs, classes, init=self.init, seed=self.seed + trial + READOUT_SEED, dtype=dtype)

    def label(self, method: str) -> str:
        """EP, BPTT or RBP, and the form of EP where it is not the paper's."""
        return method.upper() + (f" {self.estimator}" if method == "ep" and self.estimator != "one-sided" else "")

    def build(self, trial: int, dtype: torch.dtype = torch.float32, own: Factory | None = None) -> Dynamics:
        """The network of one trial with its initial weights, the same whatever the method and the device."""
        seed = self.seed + trial
        if isinstance(self.architecture, OwnNet) and own is not None:
            model = own(seed).to(dtype)
        else:
            model = self.architecture.build(self.init, seed, dtype)
        self._begin_outputs(model)
        if self.nudge == "inside":  # a network of one's own may have it there by itself
            place_nudge(model, self.nudge)
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
        layer = self.architecture.output_layer
        name = "" if layer is None else layer[kind == "biases"]
        found = dict(model.named_parameters()).get(name)
        if found is None or self.cost != "squared-error":
            raise ValueError(
                f"{setting} is {getattr(self, setting)}, and {self.name} has no output layer with {kind} in its "
                f"dynamics. Leave {setting} away, or set the {kind} in the function that builds your network."
            )
        return found

    def rates(self, names: Iterable[str]) -> dict[str, float]:
        """The learning rate of each of these parameters."""
        names = list(names)
        strange = [key for key in self.learning_rates if key != EVERY_OTHER and key not in names]
        if strange:
            raise ValueError(f"A learning rate names no parameter. {unknown('parameter', strange[0], names)}")
        return {name: self._rate(name) for name in names}

    def _rate(self, name: str) -> float:
        for key in (name, *_weights_of_bias(name), EVERY_OTHER):
            if key in self.learning_rates:
                return float(self.learning_rates[key])
        raise ValueError(
            f"The parameter {name} has no learning rate; there are rates for {', '.join(self.learning_rates)}. "
            f'Add one ({name} = 0.01), or "*" for every parameter that is not named.'
        )

    def rate_factor(self, epoch: int) -> float:
        """What the learning rates are multiplied by in this epoch, the first being 0."""
        return 1.0 if self.decay == "none" else 0.5 * (1.0 + math.cos(math.pi * epoch / self.epochs))

    def changes(self, printed: Record) -> list[Change]:
        """The fields in which this record is not as another, usually the paper's, architecture field by field."""
        found = []
        for name in self.__dataclass_fields__:
            if name in ("name", "preset", "reported", "seed"):
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

    def override(self, **fields: Any) -> Record:
        """A copy with the given fields, those that are None left alone; learning rates are added to the present ones.

        A rate for "*" replaces all present ones. A readout takes the place of the output layer: its weights have the
        rate of that layer's, and the layers below count from 0 anew.
        """
        if fields.get("cost") == "cross-entropy" and self.cost != "cross-entropy":
            return self._read_out().override(**fields)
        given = {name: value for name, value in fields.items() if value is not None}
        strange = next((name for name in given if name not in self.__dataclass_fields__), None)
        if strange is not None:
            raise ValueError(unknown("field", strange, self.__dataclass_fields__))
        rates = given.get("learning_rates")
        if rates is not None and EVERY_OTHER not in rates:
            given["learning_rates"] = {**self.learning_rates, **rates}
        return replace(self, **given)

    def _read_out(self) -> Record:
        rates = {_renamed(name, self.architecture): rate for name, rate in self.learning_rates.items()}
        net = self.architecture.without_output()
        return replace(self, cost="cross-entropy", architecture=net, learning_rates=rates)


def _renamed(name: str, net: Architecture) -> str:
    """A parameter's name where the output layer is gone: W01 -> Wout, W12 -> W01, Wfc01 -> Wout; others stay."""
    kind = {"layered": "", "convolutional": "fc"}.get(net.kind)
    found = None if kind is None else re.fullmatch(rf"([Wb]){kind}(\d)\d?", name)
    if found is None:
        return name
    letter, n = found[1], int(found[2])
    if n == 0:
        return f"{letter}out"
    return f"{letter}{kind}{n - 1}{n}" if letter == "W" else f"{letter}{kind}{n - 1}"


def optimizer_names() -> tuple[str, ...]:
    """The optimizers that torch.optim has here and that step without a closure."""
    found = (name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type))
    classes = {name: getattr(torch.optim, name) for name in found}
    skipped = ("Optimizer", "LBFGS", "SparseAdam")
    return tuple(n for n, c in classes.items() if issubclass(c, torch.optim.Optimizer) and n not in skipped)


def _weights_of_bias(name: str) -> tuple[str, ...]:
    """b0 -> W01 (or W0x of the toy model), bfc0 -> Wfc01, bconv1 -> Wconv12, bout -> Wout."""
    if name == "bout":
        return ("Wout",)
    bias = re.fullmatch(r"b([a-z]*)(\d+)", name)
    if bias is None:
        return ()
    kind, n = bias[1], int(bias[2])
    return (f"W{kind}{n}{n + 1}", f"W{kind}{n}x")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number, {least} or more.")


def _check_choice(what: str, value: object, known: Iterable[str]) -> None:
    names = tuple(known)
    if value not in names:
        raise ValueError(unknown(what, str(value), names))


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)
