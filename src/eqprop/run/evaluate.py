"""Error rates on whole sets; load a trained network from a run folder, predict, evaluate again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, SquaredError
from eqprop.data import Data, Images, Streamed, open_set
from eqprop.dynamics import Dynamics
from eqprop.engines import Engine, Job, Runner, Task, choose
from eqprop.estimators import EP
from eqprop.estimators.named import BACKPROP
from eqprop.messages import command, unknown
from eqprop.relax import Phase, relax
from eqprop.run.checkpoint import BEST, LAST, SUFFIX, Checkpoint, checkpoint_file, kept, read_checkpoint, restore_start
from eqprop.run.dataset import TARGETS, data_again, read_images
from eqprop.run.description import Description, read_description
from eqprop.run.distributed import Ranks
from eqprop.run.own import Factory, OwnFunction, own_of
from eqprop.run.session import Session, build_cost, build_model, check_inputs, is_channels_last, leg_folder, make_start
from eqprop.run.spec import Spec
from eqprop.run.watch import counted
from eqprop.starts import Start
from eqprop.state import State

BATCH = 1000
"""Samples relaxed at once on a CPU; fixed, so that the same weights give the same bits."""

NEURONS = 1 << 26
"""Neurons relaxed at once on another device, where large batches cost fewer launches."""


def evaluation_phase(spec: Spec) -> Phase:
    """The free phase for measuring errors; stops early once no bit changes."""
    return Phase(spec.phases.evaluation_T or spec.phases.T, spec.phases.schedule, stop="settled", checked=False)


PARTS: tuple[Literal["test", "train"], ...] = ("test", "train")


class Errors(NamedTuple):
    """Percentage of wrong answers per network: the label is not the largest output; not among the five largest.

    The latter is None unless the experiment asks for it (`top5`) and there are six classes or more.
    """

    top1: list[float | None]
    top5: list[float | None]


def outside_top5(outputs: Tensor, y: Tensor) -> Tensor:
    """Whether five outputs or more come before the label's; of equal ones the first comes first."""
    place = torch.arange(outputs.shape[-1], device=outputs.device)
    y = y.expand(outputs.shape[:-1]).unsqueeze(-1)
    own = outputs.gather(-1, y.clamp(max=outputs.shape[-1] - 1))
    before = (outputs > own) | ((outputs == own) & (place < y))
    return ~((before.sum(-1) < 5) & torch.isfinite(own).squeeze(-1) & (y < outputs.shape[-1]).squeeze(-1))


@dataclass(frozen=True, eq=False)
class Measure:
    """Measures errors on one part of a session's data (see `evaluation_phase`).

    part        the training or the test samples; stacked networks all see the same ones
    networks    number of networks stacked in the model; None for a single one
    cost        decides what the prediction is read from
    start       where free phases start; an initialiser serves any sample, persistent states only their own
    forward     whether the net is its feed-forward twin, passed once

    Each of the session's ranks measures its share.
    """

    engine: Engine
    model: Dynamics
    session: Session
    part: Literal["train", "test"] = "test"
    networks: int | None = None
    start: Start | None = None
    cost: Cost = field(default_factory=SquaredError)
    forward: bool = False

    @property
    def samples(self) -> int:
        images = self.session.images
        return images.train_samples if self.part == "train" else images.test_samples

    def error_rates(self, between: Callable[[], None] = lambda: None) -> list[float]:
        """Percentage of samples whose largest output is not the label, per network.

        For targets, the percentage of their variance that is not explained. `between` is called between batches.
        """
        return [error for error in self.errors(between).top1 if error is not None]

    @in_own_precision
    def errors(self, between: Callable[[], None] = lambda: None) -> Errors:
        """`error_rates`, and the percentage of samples whose label is not among the five largest outputs."""
        nothing: list[float | None] = [None] * (self.networks or 1)
        if not self.session.images.labelled:
            return Errors([*self._unexplained(between)], nothing)
        runner = self._runner
        done, wrong = (0, [0.0] * (self.networks or 1)) if runner is None else self._counted(runner, between)
        rest, beyond = self._relaxed(done, between)
        top1: list[float | None] = [100.0 * (a + b) / self.samples for a, b in zip(wrong, rest, strict=True)]
        return Errors(top1, nothing if beyond is None else [100.0 * n / self.samples for n in beyond])

    def _relaxed(self, begin: int, between: Callable[[], None]) -> tuple[list[int], list[int] | None]:
        """Count errors among the samples from `begin` on, relaxed in large batches: top-1, top-5 of six or more."""
        wrong = torch.zeros(self.networks or 1, dtype=torch.int64, device=self.session.device)
        beyond, ranked = torch.zeros_like(wrong), False
        for outputs, y in self._outputs(begin, between):
            wrong += (outputs.argmax(-1) != y).reshape(wrong.numel(), -1).sum(1)
            if ranked := self.session.spec.data.top5 and outputs.shape[-1] > 5:
                beyond += outside_top5(outputs, y).reshape(wrong.numel(), -1).sum(1)
        counts = [self.session.ranks.total(n).tolist() for n in (wrong, beyond)]
        return counts[0], counts[1] if ranked else None

    def _unexplained(self, between: Callable[[], None]) -> list[float]:
        """100 |outputs - y|^2 / |y - mean|^2 over the set, per network; of |y|^2 where all targets are equal."""
        missed = torch.zeros(self.networks or 1, dtype=torch.float64, device=self.session.device)
        seen = []
        for outputs, y in self._outputs(0, between):
            seen.append(y)
            missed += (outputs - y).double().square().reshape(missed.numel(), -1).sum(1)
        self.session.ranks.total(missed)
        empty = torch.empty(0, self.session.images.classes, device=self.session.device)
        spread = _spread(torch.cat([empty, *seen]), self.session.ranks)
        return (100.0 * missed / spread.clamp(min=1e-300)).tolist()

    @torch.no_grad()
    def _outputs(self, begin: int, between: Callable[[], None]) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs, (B, classes) or (R, B, classes), and answers of the samples from `begin` on, in large batches."""
        batch, phase = self._batch(), evaluation_phase(self.session.spec)
        begin, end, most = self.session.ranks.bounds(begin, self.samples)
        reading = self._read(begin, end, batch)
        # As many turns on every rank: `between` may be a meeting.
        for first in range(begin, begin + most, batch):
            between()
            if first < end:
                x, y = next(reading)
                yield self._answers(self.session.inputs(x, self.model), phase), y

    def _read(self, first: int, last: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples from `first` to `last` as they are stored, and their answers."""
        images = self.session.images
        if isinstance(images, Streamed):
            return ((found.x.flatten(1), found.y) for found in images.in_order(self.part, batch, first, last))
        x, y = (images.train_x, images.train_y) if self.part == "train" else (images.test_x, images.test_y)
        return zip(x[first:last].split(batch), y[first:last].split(batch), strict=True)

    def _answers(self, x: Tensor, phase: Phase) -> Tensor:
        """The outputs of inputs (B, ...), which all networks see."""
        x = x if self.networks is None else x.expand(self.networks, *x.shape)
        if self.forward:
            return self.cost.scores(self.model.feedforward(x))
        begun = None if self.start is None else self.start.unseen(x)
        return self.cost.scores(self.engine.relaxation(self.model, x, phase, begun).state)

    def _batch(self) -> int:
        if self.session.device.type == "cpu":
            return BATCH
        neurons = sum(layer.numel() for layer in self.model.init_state(self._one()))
        return min(max(NEURONS // neurons, BATCH), 10 * BATCH)

    def _one(self) -> Tensor:
        """One sample per network, black."""
        of = self.session
        stored = torch.zeros(1, math.prod(of.images.shape), dtype=of.images.dtype, device=of.device)
        one = of.inputs(stored, self.model)
        return one if self.networks is None else one.expand(self.networks, *one.shape)

    def _counted(self, runner: Runner, between: Callable[[], None]) -> tuple[int, list[float]]:
        """The number of samples in whole mini-batches, and the errors the runner counts among them."""
        batch = self.session.spec.optimizer.batch
        done = self.samples // batch * batch
        order = torch.arange(done, device=self.session.device).view(-1, batch)
        if self.networks is not None:
            order = order.unsqueeze(1).expand(-1, self.networks, -1)
        runner.reset()
        wrong = [0.0] * (self.networks or 1)
        for part in order.split(max(10 * BATCH // batch, 1)):
            between()
            # A runner freezes a network that diverges; clear the flag so that it is still counted.
            runner.tally.bad.zero_()
            runner.run(part)
            wrong = runner.tally.read()["errors"]
        return done, wrong

    @cached_property
    def _runner(self) -> Runner | None:
        """A runner with learning rate 0, made once: it reads the model's current parameters at each run.

        None if the engine has none faster than `relaxation`, if free phases do not start at zero or are one forward
        pass, or if top-5 errors are wanted, which runners do not count.
        """
        of, batch = self.session, self.session.spec.optimizer.batch
        fast = self.engine.evaluates(batch * (self.networks or 1)) and not isinstance(of.images, Streamed)
        slow = self.forward or of.spec.data.top5 or of.ranks.several
        if not fast or slow or self.start is not None or self.samples < batch:
            return None
        phase = evaluation_phase(of.spec)
        estimator = EP(T=phase.T, K=1, schedule=phase.schedule, stop=phase.stop, checked=False)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        task = Task(self.model, self.cost, estimator, optimizer, precision=self.engine.precision)
        if self.engine.refuses(task) is not None:
            return None
        ((stored, y),) = self._read(0, self.samples, self.samples)
        x = of.inputs(stored, self.model)
        # A label without an output is an error, whatever its target.
        outputs = torch.arange(self.model.init_state(self._one())[0].shape[-1], device=x.device)
        targets = (y.unsqueeze(1) == outputs).to(x.dtype)
        return self.engine.runner(Job(self.model, self.cost, estimator, optimizer, x, targets, y, self.networks))


def _spread(y: Tensor, ranks: Ranks) -> Tensor:
    """|y - mean|^2 over the targets of all ranks; |y|^2 where all are equal."""
    y = y.double()
    count = ranks.total(torch.tensor(float(len(y)), dtype=torch.float64))
    mean = ranks.total(y.sum(0)) / count.to(y.device)
    around, square = ranks.total(torch.stack([(y - mean).square().sum(), y.square().sum()]))
    return around if around > 0 else square


UNTIL_SETTLED = 1000
"""Most free steps for a bare model, whose T is not known; it stops once nothing changes."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A network from a run folder, with everything needed to use it.

    spec        what it was trained with
    model       the network, with the weights of its last checkpoint
    cost        the training cost, including its readout if it has one
    start       the feed-forward net that initialises its free phases, if it was trained with one
    epoch       number of epochs trained
    class_names what the classes are called, if the data says so
    estimator   what trained it; by backprop it is a feed-forward net
    labelled    whether its answers are classes; False if it was trained on numbers
    """

    model: Dynamics
    cost: Cost
    spec: Spec
    start: Start | None
    epoch: int
    class_names: tuple[str, ...] = ()
    estimator: str = ""
    labelled: bool = True

    def __repr__(self) -> str:
        by = f", trained by {self.estimator}" if self.estimator else ""
        return f"Trained({self.spec.name}, {self.spec.model}{by} for {counted(self.epoch, 'epoch')})"

    def state(self, x: Tensor, phase: Phase) -> State:
        """The state that answers are read from: after the free phase, or of the feed-forward net."""
        if self.estimator == BACKPROP:
            return self.model.feedforward(x)
        return relax(self.model, x, phase, None if self.start is None else self.start.unseen(x)).state


def load(
    folder: str | Path,
    estimator: str | None = None,
    trial: int = 0,
    *,
    at: int | Literal["best"] | None = None,
    model: Factory | None = None,
    device: str = "cpu",
) -> Trained:
    """Load the network of one trial, with the weights of its last checkpoint, averaged if the experiment says so.

    folder      the run folder
    trial       which of its trials
    device      where to put the network
    estimator   the run's first by default
    at          "best", or the number of an epoch, for weights kept by keep_best or keep_every
    model       the function that builds your own network
    """
    folder = Path(folder)
    described = read_description(folder)
    spec = described.spec
    name = estimator or spec.estimators[0]
    if name not in spec.estimators:
        raise ValueError(f"{folder}: {unknown('estimator', name, spec.estimators)}")
    if not 0 <= trial < spec.run.trials:
        raise ValueError(f"{folder} has trials 0 to {spec.run.trials - 1}; there is no trial {trial}.")
    place = folder / leg_folder(name, trial, spec)
    if not place.is_dir():
        raise FileNotFoundError(
            f"{folder} has no weights of {name}, trial {trial}: its training has not started. Start it with: "
            f"{command('resume', folder)}"
        )
    own = own_of(model, spec.model)
    network = build_model(spec, trial, torch.float32, own)
    checkpoint = read_checkpoint(place, LAST if at is None else _kept_name(place, at))
    cost = _readout(described, checkpoint, trial, own)
    for parameter, p in (*network.named_parameters(), *cost.named_parameters(prefix="cost")):
        saved = (checkpoint.average or checkpoint.weights).get(f"{trial}.{parameter}")
        if saved is None or saved.shape != p.shape:
            raise ValueError(
                f"{folder} has no weights for {parameter} of shape {tuple(p.shape)} (trial {trial}). Another network "
                "was trained: give the function that built it."
            )
        with torch.no_grad():
            p.copy_(saved)
    network, cost = network.to(device), cost.to(device)
    initialised = spec.phases.start == "initialised" and name != BACKPROP
    start = _initialiser(spec, network, checkpoint, trial) if initialised else None
    names = tuple(map(str, described.data.get("class_names") or ()))
    labelled = not described.data.get(TARGETS)
    return Trained(network, cost, spec, start, checkpoint.position.epoch, names, name, labelled)


def _kept_name(leg: Path, at: int | Literal["best"]) -> str:
    if at != BEST and (not isinstance(at, int) or isinstance(at, bool)):
        raise ValueError(f"at is {at!r}; expected 'best' or the number of an epoch.")
    name = kept(at) if isinstance(at, int) else BEST
    if not checkpoint_file(leg, name).is_file():
        there = sorted(path.stem for path in leg.glob(f"*{SUFFIX}") if path.stem != LAST)
        raise FileNotFoundError(
            f"{leg} has no weights kept as {name}; it holds {', '.join(there) or 'only the last'}. Train with "
            "keep_best or keep_every to keep others."
        )
    return name


def _readout(described: Description, checkpoint: Checkpoint, trial: int, own: OwnFunction | None) -> Cost:
    """The cost of a trial, sized from its saved weights; without any, from the data."""
    saved = checkpoint.weights.get(f"{trial}.cost.Wout")
    classes, inputs = (int(described.data.get("classes", 10)), 1) if saved is None else saved.shape
    return build_cost(described.spec, trial, inputs, classes, torch.float32, own)


def _number(name: str) -> int:
    """ "0.V12" -> 12."""
    return int(name.rpartition("V")[2])


def _initialiser(spec: Spec, network: Dynamics, checkpoint: Checkpoint, trial: int) -> Start | None:
    """The feed-forward net that initialises the network's free phases, as trained."""
    first = max((name for name in checkpoint.start if name.startswith(f"{trial}.V")), key=_number)
    shape = network.input_shape or (checkpoint.start[first].shape[1],)
    start = make_start(spec, network, next(network.parameters()).new_zeros(1, *shape))
    restore_start(start, (trial,), checkpoint)
    return start


def _as_input(x: Any, model: Dynamics) -> Tensor:
    """Samples as a tensor of the model's type on its device; a single sample gets a leading dimension."""
    if _is_picture(x):
        x = _read_picture(x, model)
    elif isinstance(x, list | tuple) and x and all(map(_is_picture, x)):
        x = np.stack([_read_picture(picture, model) for picture in x])
    tensor = x if isinstance(x, Tensor) else torch.as_tensor(np.array(x))
    like = next(model.parameters(), torch.empty(0))
    tensor = tensor.to(like.dtype).div(255) if tensor.dtype == torch.uint8 else tensor.to(like.dtype)
    if is_channels_last(tensor.shape[-3:], model.input_shape):
        raise ValueError(
            f"The input x has shape {tuple(tensor.shape)}, channels last; expected {model.input_shape} per sample. "
            "Give it channels first, such as x.transpose(0, 3, 1, 2)."
        )
    shape = model.input_shape
    if shape is None:
        return tensor.to(like.device)
    numbers = math.prod(shape)
    if tensor.numel() == numbers:  # a single sample
        return tensor.reshape(1, *shape).to(like.device)
    if tensor.dim() < 2 or math.prod(tensor.shape[1:]) != numbers:
        raise ValueError(
            f"The input x has shape {tuple(tensor.shape)}; expected (B, ...) with {numbers} numbers per sample, as the "
            f"model takes {shape}. For one sample add a dimension: x[None]."
        )
    return tensor.reshape(len(tensor), *shape).to(like.device)


def _is_picture(x: Any) -> bool:
    """Whether x is the path of a picture, or one of Pillow."""
    return isinstance(x, str | Path) or hasattr(x, "getbands")


def _read_picture(source: Any, model: Dynamics) -> Any:
    """A picture as the model's data is, (C, height, width) of uint8: in colour, or grey and light on dark."""
    from PIL import Image, UnidentifiedImageError

    shape = model.input_shape or ()
    numbers = math.prod(shape)
    channels = shape[0] if len(shape) == 3 else 1 if math.isqrt(numbers) ** 2 == numbers else 3
    side = math.isqrt(numbers // channels)
    height, width = (shape[-2], shape[-1]) if len(shape) > 1 else (side, side)
    if not shape or channels not in (1, 3) or channels * height * width != numbers:
        raise ValueError(f"{model.title} takes inputs of shape {shape or 'any'}, not a picture. Give an array.")
    try:
        with Image.open(source) if isinstance(source, str | Path) else nullcontext(source) as picture:
            held = picture.convert("L" if channels == 1 else "RGB").resize((width, height))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise ValueError(f"{source} is not a picture; expected a file such as PNG or JPEG.") from error
    if picture.mode.startswith(("I", "F")):
        # Pillow cuts what is above 255.
        raise ValueError(f"{source} has the mode {picture.mode}; expected 8 bits of grey or of RGB. Convert it.")
    pixels = np.asarray(held)
    if channels == 3:
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    # Data sets such as MNIST are light on dark; a scan or a photograph is the other way round.
    return (255 - pixels if pixels.mean() > 127.5 else pixels)[None]


def normalised(x: Tensor, spec: Spec) -> Tensor:
    """Samples from 0 to 1, (B, ...), as the spec normalises them: channels come first in every sample."""
    normalisation = spec.data.normalisation
    if normalisation is None:
        return x
    channels = max(len(normalisation.mean), len(normalisation.std))
    if x[0].numel() % channels:
        return x  # refused for its shape
    return normalisation(x.reshape(len(x), channels, 1, -1), x.dtype).view_as(x)


@torch.no_grad()
@in_own_precision
def predict(
    network: Trained | Dynamics | str | Path, x: Any, T: int | None = None, *, outputs: bool | None = None
) -> Tensor:
    """The class of each input, (B,): the largest output, or readout, after the free phase.

    network     from `load`, a run folder, or a bare model, which relaxes until nothing changes
    x           (B, ...) of the model's input shape, or anything that reshapes to it, such as (B, 28, 28); one sample;
                or an image of Pillow or the path of one, or several, which get the model's size and colours; if grey,
                light on dark. Pixels are uint8, or from 0 to 1, and normalised as in training.
    T           free steps; by default the experiment's
    outputs     return the outputs themselves, (B, n): by default for a run that was trained on numbers, not classes
    """
    network = load(network) if isinstance(network, str | Path) else network
    trained = network if isinstance(network, Trained) else None
    model = network.model if isinstance(network, Trained) else network
    inputs = _as_input(x, model)
    phase = Phase(UNTIL_SETTLED, stop="settled")
    if trained is not None:
        inputs = normalised(inputs, trained.spec)
        phase = replace(evaluation_phase(trained.spec), checked=True)
    phase = phase if T is None else replace(phase, T=T)
    found = (
        relax(model, inputs, phase).state[0] if trained is None else trained.cost.scores(trained.state(inputs, phase))
    )
    wanted = outputs if outputs is not None else trained is not None and not trained.labelled
    return found if wanted else found.argmax(-1)


def evaluate(
    folder: str | Path,
    *,
    data: Data = None,
    model: Factory | None = None,
    device: str | None = None,
    engine: str = "auto",
    precision: str | None = None,
    whole: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """The test error in percent of every trial at its last checkpoint, by estimator.

    Omits trials that have not started.

    folder      the run folder
    data        other data, of which the whole test set is used; None: the run's own
    model       the function that built your own network
    device      where to compute; None: as the run did
    engine      "auto", or an engine by name
    precision   that of the products; None: the run's
    whole       the set's whole test set, though the run was tested on training images that it held out
    """
    folder = Path(folder)
    described = read_description(folder)
    spec = described.spec.override(device=device)
    given = data_again(described.data, data, own_of(model, spec.model))
    given = given if isinstance(given, Images | Streamed) else open_set(given)
    cut = spec.data
    if whole or (data is not None and not _is_recorded(given, described.data)):
        cut = msgspec.structs.replace(cut, validation=0, samples=None, test_samples=None)
    images = read_images(given, cut, spec.run.device)
    out: dict[str, list[dict[str, Any]]] = {}
    for name in spec.estimators:
        for trial in range(spec.run.trials):
            place = folder / leg_folder(name, trial, spec)
            if place.is_dir():
                found = load(folder, name, trial, model=model, device=spec.run.device)
                session = Session(spec, images, dtype=images.dtype)
                check_inputs(session, found.model)
                errors = _test_errors(found, session, engine, precision)
                lost = trial in read_checkpoint(place).diverged
                seed = spec.run.seed + trial
                entry = {"seed": seed, "epoch": found.epoch, **errors, "diverged": lost}
                out.setdefault(name, []).append(entry)
    return out


def _is_recorded(given: Images | Streamed, recorded: Mapping[str, Any]) -> bool:
    """Whether these are the data of the run."""
    if given.fingerprint and "fingerprint" in recorded:
        return bool(given.fingerprint == recorded["fingerprint"])
    return bool(given.sha256 == recorded.get("sha256"))


def _test_errors(found: Trained, session: Session, engine: str, precision: str | None) -> dict[str, float | None]:
    spec = found.spec.override(precision=precision)
    chosen = choose(engine, Task(found.model, precision=spec.run.precision))
    measure = Measure(
        chosen, found.model, session, start=found.start, cost=found.cost, forward=found.estimator == BACKPROP
    )
    errors = measure.errors()
    return {"test_error": errors.top1[0]} | ({} if errors.top5[0] is None else {"test_error_top5": errors.top5[0]})
