"""What the page of a run shows beyond its log, measured on its trained nets.

Per estimator, for trial 0: errors by class and the worst pictures of the test set, how the state settles, the doctor's
verdict, and on request the cosine of the estimator's gradient with BPTT's.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.data import Images, one_hot
from eqprop.estimators import EP
from eqprop.estimators.named import BACKPROP
from eqprop.gdu.gradients import Gradients, compare_gradients
from eqprop.gdu.verdict import Diagnosis
from eqprop.messages import EXPECTED_ERRORS
from eqprop.relax import Phase, relax, using_threads
from eqprop.report.runs import RunFolder
from eqprop.run.dataset import data_again, read_images
from eqprop.run.evaluate import Trained, evaluation_phase, load
from eqprop.run.laboratory import Weights, examine, find_problem
from eqprop.run.own import Factory, OwnFunction, OwnNet, own_of
from eqprop.run.session import Session, leg_folder, make_estimator
from eqprop.state import State, distance

OPERATIONS = 1e12
"""Multiplications spent on the test set; of larger nets the first samples are looked at, and the page says how many."""
BATCH = 500
SETTLING_SAMPLES = 50
SETTLING_NUMBERS = 2e7
"""States kept to measure the settling, in numbers; nets with large layers show fewer samples."""
WORST = 12


@dataclass(frozen=True)
class ClassErrors:
    """One class of the test set: how many samples it has, how many of them are wrong, what those are taken for."""

    name: str
    samples: int
    wrong: int
    mistaken_for: str | None

    @property
    def percent(self) -> float:
        return 100.0 * self.wrong / self.samples


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: the picture as PNG (none where a sample is no picture), what it is, what it was taken for."""

    png: bytes | None
    label: str
    answer: str

    @property
    def source(self) -> str:
        """The picture as the source of an HTML image."""
        return f"data:image/png;base64,{base64.b64encode(self.png or b'').decode()}"


@dataclass(frozen=True)
class SettlingCurve:
    """How far each step moves the state, max over the neurons: median and largest over samples, step by step.

    free, nudged    (median, largest) per step of the phase
    """

    samples: int
    free: tuple[tuple[float, float], ...]
    nudged: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ExaminedNet:
    """What was seen of one estimator's net; parts that could not be seen are None, and `missing` says why."""

    estimator: str
    epoch: int = 0
    samples: int = 0
    of: int = 0
    classes: tuple[ClassErrors, ...] = ()
    worst: tuple[Mistake, ...] = ()
    settling: SettlingCurve | None = None
    diagnosis: Diagnosis | None = None
    gradients: Gradients | None = None
    missing: tuple[str, ...] = ()


def examinations(run: RunFolder, gradients: bool = False, model: Factory | None = None) -> Iterator[ExaminedNet]:
    """Look at the first trial of every estimator that has weights.

    gradients   also compare the estimator's gradient with BPTT's
    model       the function that builds the net, of a run that trained your own
    """
    own = own_of(model if isinstance(run.spec.model, OwnNet) else None, run.spec.model)
    for name in run.spec.estimators:
        if (run.folder / leg_folder(name, 0, run.spec)).is_dir():
            yield _examined(run, name, gradients, own)


def _examined(run: RunFolder, estimator: str, gradients: bool, own: OwnFunction | None) -> ExaminedNet:
    """Load an estimator's net, pass the test set, ask the doctor; what fails is said in `missing`."""
    found = ExaminedNet(estimator)
    try:
        trained = load(run.folder, estimator, model=own)
        images = read_images(data_again(run.described.data, None, own), run.spec.data)
    except EXPECTED_ERRORS as error:
        return replace(
            found,
            missing=(
                f"The net could not be loaded, so its errors by class, its settling and the "
                f"doctor's verdict are missing. {error}",
            ),
        )
    found = replace(found, epoch=trained.epoch)
    if isinstance(images, Images):
        with using_threads(run.spec.run.threads or torch.get_num_threads()):
            found = _on_test_set(found, trained, images)
    return _by_the_doctor(found, run, gradients, own)


def _on_test_set(found: ExaminedNet, trained: Trained, images: Images) -> ExaminedNet:
    """Errors by class, the worst pictures and the settling."""
    session = Session(trained.spec, images, dtype=images.dtype)
    phase = replace(evaluation_phase(trained.spec), checked=True)
    steps = 1 if trained.estimator == BACKPROP else phase.T
    each = 2.0 * steps * sum(p.numel() for p in trained.model.parameters())
    n = min(len(images.test_x), max(BATCH, int(OPERATIONS / max(each, 1.0))))
    try:
        made = [session.inputs(part, trained.model) for part in images.test_x[:n].split(BATCH)]
        with torch.no_grad():
            outputs = torch.cat([trained.cost.scores(trained.state(x, phase)) for x in made])
        found = replace(found, samples=n, of=len(images.test_x))
        if images.labelled:
            found = replace(found, classes=_classes(outputs, images), worst=_worst(outputs, images))
        if trained.estimator != BACKPROP and not trained.model.settles_itself:
            found = replace(found, settling=_settling(trained, made[0], images))
    except EXPECTED_ERRORS as error:
        found = replace(found, missing=(*found.missing, f"The test set could not be evaluated. {error}"))
    return found


def _name_of(images: Images, label: int) -> str:
    return images.class_names[label] if label < len(images.class_names) else str(label)


def _classes(outputs: Tensor, images: Images) -> tuple[ClassErrors, ...]:
    """Errors by class: how many samples are wrong, and which class they are most often taken for."""
    answers, labels = outputs.argmax(-1), images.test_y[: len(outputs)]
    out = []
    for label in labels.unique().tolist():
        given = answers[labels == label]
        others = given[given != label]
        most = _name_of(images, int(others.mode().values)) if len(others) else None
        out.append(ClassErrors(_name_of(images, label), len(given), len(others), most))
    return tuple(out)


def _worst(outputs: Tensor, images: Images) -> tuple[Mistake, ...]:
    """The wrong answers with the largest lead over the right one."""
    answers, labels = outputs.argmax(-1), images.test_y[: len(outputs)]
    known = labels < outputs.shape[-1]
    lead = outputs.max(-1).values - outputs.gather(-1, labels.clamp(max=outputs.shape[-1] - 1)[:, None])[:, 0]
    order = torch.where(known & (answers != labels), lead, -math.inf).argsort(descending=True, stable=True)
    chosen = [n for n in order[:WORST].tolist() if answers[n] != labels[n]]
    return tuple(
        Mistake(
            _png(images.test_x[n], images.shape),
            _name_of(images, int(labels[n])),
            _name_of(images, int(answers[n])),
        )
        for n in chosen
    )


def _png(sample: Tensor, shape: tuple[int, ...]) -> bytes | None:
    """A sample as a PNG, if it has the shape of one: grey or of three colours."""
    from PIL import Image

    channels, sides = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
    if len(sides) != 2 or channels not in (1, 3) or max(sides) > 256:
        return None
    pixels = sample.cpu().reshape(channels, *sides)
    if pixels.is_floating_point():
        low, high = float(pixels.min()), float(pixels.max())
        low, high = (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high)
        pixels = ((pixels - low) * (255.0 / max(high - low, 1e-12))).round().to(torch.uint8)
    content = io.BytesIO()
    array = pixels[0].numpy() if channels == 1 else pixels.permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(array).save(content, format="PNG", optimize=True)
    return content.getvalue()


def _settling(trained: Trained, x: Tensor, images: Images) -> SettlingCurve:
    """Movement per step of the free phase, and of the nudged one towards the samples' targets."""
    spec, model = trained.spec, trained.model
    T, K = spec.phases.T, spec.phases.K
    start = None if trained.start is None else trained.start.unseen(x)
    state = model.init_state(x) if start is None else start
    numbers = max(sum(layer[0].numel() for layer in state) * max(T, K), 1)
    n = max(1, min(SETTLING_SAMPLES, len(x), int(SETTLING_NUMBERS / numbers)))
    x, state = x[:n], tuple(layer[:n] for layer in state)
    schedule = spec.phases.schedule
    free = relax(model, x, Phase(T, schedule, then=K), state, keep=T)
    answers = images.test_y[:n]
    y = one_hot(answers, images.classes).to(x.dtype) if images.labelled else answers.to(x.dtype)
    nudge = Nudge(trained.cost, y, spec.phases.beta)
    nudged = relax(model, x, Phase(K, schedule), free.state, nudge, keep=K) if K else None
    return SettlingCurve(
        n, _moves((*free.trail, free.state)), () if nudged is None else _moves((*nudged.trail, nudged.state))
    )


def _moves(states: tuple[State, ...]) -> tuple[tuple[float, float], ...]:
    """(median, largest) over the samples of the largest change of a neuron, per step."""
    moves = [distance(after, before, 1) for before, after in pairwise(states)]
    return tuple((float(move.median()), float(move.max())) for move in moves)


def _by_the_doctor(found: ExaminedNet, run: RunFolder, gradients: bool, own: OwnFunction | None) -> ExaminedNet:
    """The doctor's verdict on the weights as they are, for the variants of EP; the gradient's cosine if asked."""
    if found.estimator == BACKPROP:
        return found
    try:
        subject = find_problem(str(run.folder.resolve()), model=own, weights=Weights(found.estimator, 0))
        estimator = make_estimator(subject.spec, found.estimator, subject.problem.model)
        if isinstance(estimator, EP):
            found = replace(found, diagnosis=examine(subject))
        if gradients:
            of = subject.problem
            found = replace(found, gradients=compare_gradients(estimator, of.model, of.cost, of.x, of.y))
    except EXPECTED_ERRORS as error:
        found = replace(found, missing=(*found.missing, f"The doctor could not examine the net. {error}"))
    return found
