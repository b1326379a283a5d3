"""The contract suite over every model: the paper's, models from functions, stacked ones, a user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.contract import CHECKS, Case, check_model
from helpers.nets import F64, asymmetric, batch, convolutional, energy_based, prototypical, random_like, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from eqprop import CrossEntropy, Dynamics, PrimitiveDynamics, from_energy, from_primitive
from eqprop.models import Activation, Connection, Conv, Convolutional, Dense, Layered, Network, Toy, Transposed, stack
from eqprop.models.predictive import PredictiveCoding
from eqprop.physical.oscillators import Oscillators
from eqprop.physical.spins import Spins
from eqprop.state import State

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def swish(v: Tensor) -> Tensor:
    return v * torch.sigmoid(v)


SHIFTED = Activation("shifted tanh", lambda v: 0.5 + 0.5 * torch.tanh(v), lambda v: 0.5 - 0.5 * torch.tanh(v).square())


def case(model: Dynamics, samples: int = 3) -> Case:
    return Case(model, *batch(model, samples))


def read_out(model: Dynamics, layer: int = 0) -> Case:
    """The same with a softmax readout of three classes for a cost."""
    x, _ = batch(model)
    inputs = model.init_state(x)[layer][0].numel()
    y = torch.nn.functional.one_hot(torch.arange(len(x)) % 3, 3).to(F64)
    return Case(model, x, y, CrossEntropy(inputs, 3, layer, seed=1, dtype=F64))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def energy(x: Tensor, s: State, theta: Any) -> Tensor:
    """A layer of vectors under one of images, coupled by their products."""
    s0, s1 = s
    image = s1.flatten(1)
    coupled = (torch.tanh(image) @ theta["W"].T * torch.tanh(s0)).sum(-1)
    return 0.5 * (s0.square().sum(-1) + image.square().sum(-1)) - coupled - (s1 * x).flatten(1).sum(-1)


def given_by_energy() -> Dynamics:
    model = from_energy(energy, {"W": random_like((2, 6), 0)}, layers=(2, (2, 3)), eps=0.4)
    model.input_shape = (2, 3)
    return model


def given_by_primitive(squash: Callable[[Tensor], Tensor] | None) -> Dynamics:
    def phi(x: Tensor, s: State, theta: Any) -> Tensor:
        return (s[1] @ theta["W"].T * s[0]).sum(-1) + (torch.sin(x @ theta["V"].T) * s[1]).sum(-1)

    parameters = {"W": random_like((2, 4), 0), "V": random_like((4, 3), 1)}
    model = from_primitive(phi, parameters, layers=(2, 4), squash=squash)
    model.input_shape = (3,)
    return model


def stacked(build: Callable[[int], PrimitiveDynamics]) -> Case:
    model = stack([build(seed) for seed in range(2)])
    pairs = [batch(build(0), seed=seed) for seed in range(2)]
    return Case(model, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))


def without_feedback() -> Network:
    links = [Dense("x", "h"), Dense("h", "out", feedback_gain=0.0)]
    return Network(6, {"out": 3, "h": 5}, links, "tanh", seed=0, dtype=F64)


def untied_convolutions() -> Network:
    kinds: dict[str, Any] = {"kernel": 3, "padding": 1, "untied": True, "feedback_angle": 60.0}
    links: list[Connection] = [
        Conv("x", "h1", kernel=3, padding=1),
        Conv("h1", "h2", stride=2, pool=2, pooling="average", bias=True, **kinds),
        Conv("h1", "h3", pool=2, pooling="soft", **kinds),
        Transposed("h2", "h3", kernel=2, stride=2, untied=True),
        Dense("h2", "out"),
        Dense("h3", "out", untied=True),
    ]
    layers: dict[str, int | tuple[int, ...]] = {"out": 3, "h3": (2, 4, 4), "h2": (3, 2, 2), "h1": (2, 8, 8)}
    return Network((1, 8, 8), layers, links, "tanh", init="glorot", seed=0, dtype=F64)


def predictive(visible: tuple[int, ...], first: Connection, hidden: tuple[int, ...] = (4,)) -> PredictiveCoding:
    return PredictiveCoding(visible, {"s0": 3, "s1": hidden}, [first, Dense("s1", "s0")], "tanh", seed=0, dtype=F64)


def own_model() -> Any:
    return example("own_model").Lateral(2, 4, 3)


def own_model_by_function() -> Dynamics:
    module = example("own_model")
    model = module.by_function(module.Lateral(2, 4, 3))
    model.input_shape = (3,)
    return model


CASES: dict[str, Callable[[], Case]] = {
    "toy": lambda: case(toy()),
    "toy, no bias, own activation": lambda: case(toy(bias=False, activation=swish)),
    "EB clipped": lambda: case(energy_based(3, "hard-sigmoid", clip=True)),
    "EB own activation": lambda: case(energy_based(2, swish)),
    "EB own activation with its slope": lambda: case(energy_based(3, SHIFTED, bias=False)),
    "EB step 1": lambda: case(energy_based(2, "sigmoid", eps=1.0)),
    "P own activation": lambda: case(prototypical(3, swish)),
    "P one sample": lambda: case(prototypical(3), samples=1),
    "P nudged inside": lambda: case(prototypical(3, "sigmoid", nudge_site="inside")),
    "P untied": lambda: case(Layered((3, 5, 4, 6), activation="tanh", untied=True, seed=0, dtype=F64)),
    "EB untied": lambda: case(Layered((3, 5, 6), "energy-based", "tanh", untied=True, eps=0.3, seed=0, dtype=F64)),
    "feedback 0": lambda: case(without_feedback()),
    "conv": lambda: case(convolutional()),
    "conv nudged inside": lambda: case(convolutional(activation="tanh", nudge_site="inside")),
    "conv own activation": lambda: case(convolutional(activation=swish, bias=False)),
    "conv three layers deep": lambda: case(convolutional(channels=(2, 2, 2), flat=(3, 4), kernel=2, padding=1)),
    "conv untied": lambda: case(convolutional(flat=(3, 4), activation="tanh", untied=True)),
    "graph of untied convolutions": lambda: case(untied_convolutions()),
    "predictive": lambda: case(predictive((6,), Dense("x", "s1"))),
    "predictive conv": lambda: case(predictive((1, 4, 6), Conv("x", "s1", kernel=3, padding=1, pool=2), (2, 2, 3))),
    "oscillators": lambda: case(Oscillators((3, 5, 4), eps=0.1, seed=0, dtype=F64)),
    "spins": lambda: case(Spins((3, 5, 4), seed=0, dtype=F64)),
    "conv without flat layers": lambda: read_out(convolutional(flat=(), activation="tanh")),
    "P read out": lambda: read_out(prototypical(3, "sigmoid")),
    "toy read out": lambda: read_out(toy()),
    "EB read out, a hidden layer": lambda: read_out(energy_based(3, "sigmoid"), layer=1),
    "from_transition": lambda: case(asymmetric()),
    "from_primitive": lambda: case(given_by_primitive(None)),
    "from_primitive squashed": lambda: case(given_by_primitive(torch.sigmoid)),
    "from_energy": lambda: case(given_by_energy()),
    "stacked toy": lambda: stacked(lambda seed: toy(seed=seed)),
    "stacked EB": lambda: stacked(lambda seed: energy_based(3, "sigmoid", clip=True, seed=seed)),
    "stacked P": lambda: stacked(lambda seed: prototypical(3, seed=seed)),
    "stacked conv": lambda: stacked(lambda seed: convolutional(flat=(3, 4), seed=seed)),
    "own model": lambda: case(own_model()),
    "own model by function": lambda: case(own_model_by_function()),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_models(build: Callable[[], Case], check: Callable[[Case], None]) -> None:
    check(build())


sizes = st.integers(1, 4)
activations: st.SearchStrategy[Any] = st.sampled_from(["tanh", "sigmoid", "hard-sigmoid", swish, SHIFTED])
seeds = st.integers(0, 2**31)


@st.composite
def layered(draw: st.DrawFn) -> Case:
    options: dict[str, Any] = {"bias": draw(st.booleans()), "init": draw(st.sampled_from(["glorot", "default"]))}
    setting: Any = draw(st.sampled_from(["energy-based", "prototypical"]))
    if setting == "energy-based":
        options |= {"eps": draw(st.sampled_from([0.05, 0.2, 0.5, 1.0])), "clip": draw(st.booleans())}
    shape = draw(st.lists(sizes, min_size=2, max_size=5))
    model = Layered(shape, setting, draw(activations), seed=draw(seeds), dtype=F64, **options)
    return case(model, draw(st.integers(1, 3)))


@st.composite
def toys(draw: st.DrawFn) -> Case:
    shape = draw(st.tuples(sizes, sizes, sizes))
    options: dict[str, Any] = {
        "eps": draw(st.sampled_from([0.08, 0.5, 1.0])),
        "bias": draw(st.booleans()),
        "seed": draw(seeds),
    }
    return case(Toy(shape, draw(activations), dtype=F64, **options), draw(st.integers(1, 3)))


@st.composite
def convolutionals(draw: st.DrawFn) -> Case:
    """Sizes are drawn from the output side, so that every image is large enough and pooling need not divide it."""
    kernel, pool = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, (kernel - 1) // 2))
    channels = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    rest, grown = st.integers(0, pool - 1), kernel - 1 - 2 * padding
    height, width = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    for _ in channels:
        height, width = (side * pool + draw(rest) + grown for side in (height, width))
    model = Convolutional(
        (draw(st.integers(1, 2)), height, width),
        channels,
        draw(st.lists(sizes, min_size=1, max_size=2)),
        draw(activations),
        kernel=kernel,
        padding=padding,
        pool=pool,
        bias=draw(st.booleans()),
        seed=draw(seeds),
        dtype=F64,
    )
    return case(model, draw(st.integers(1, 2)))


@settings(max_examples=30)
@given(layered())
def test_layered_of_any_size(drawn: Case) -> None:
    check_model(drawn)


@settings(max_examples=10)
@given(toys())
def test_toys_of_any_size(drawn: Case) -> None:
    check_model(drawn)


@settings(max_examples=25)
@given(convolutionals())
def test_convolutional_of_any_size(drawn: Case) -> None:
    check_model(drawn)


class Plain(PrimitiveDynamics):
    """A right model, of which each model below gets one thing wrong."""

    input_shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.W, self.V = nn.Parameter(random_like((2, 4), 0)), nn.Parameter(random_like((4, 3), 1))

    def init_state(self, x: Tensor) -> State:
        return x.new_zeros(len(x), 2), x.new_zeros(len(x), 4)

    def primitive(self, x: Tensor, s: State) -> Tensor:
        leak = 0.25 * (s[0].square().sum(-1) + s[1].square().sum(-1))
        return leak + 0.5 * (torch.tanh(s[0]) * (s[1] @ self.W.T)).sum(-1) + (s[1] * (x @ self.V.T)).sum(-1)


class OneLayerForgotten(Plain):
    def gradient(self, drive: Tensor, s: State) -> State:
        right = self.autodiff_gradient(drive, s)
        return (*right[:-1], right[-1] - 0.5 * torch.tanh(s[0]) @ self.W)


class SumInsteadOfMean(Plain):
    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        return {name: len(x) * g for name, g in self.autodiff_contrast(x, s_plus, s_minus).items()}


class BatchNormalised(Plain):
    def primitive(self, x: Tensor, s: State) -> Tensor:
        return super().primitive(x, (s[0], s[1] - s[1].mean(0)))


class Remembering(Plain):
    def primitive(self, x: Tensor, s: State) -> Tensor:
        self.count = getattr(self, "count", 0.0) + 1.0
        return super().primitive(x, s) + 0.01 * self.count * s[0].sum(-1)


class NudgedInside(Plain):
    def squash(self, s: State) -> State:
        return tuple(torch.tanh(layer) for layer in s)

    def step(self, drive: Tensor, s: State, push: Any = None) -> State:
        raw = self.gradient(drive, s)
        moved = raw if push is None else tuple(v if p is None else v + p for v, p in zip(raw, push, strict=True))
        return self.squash(moved)


class NotBipartite(Plain):
    bipartite = True

    def half_step(self, drive: Tensor, s: State, parity: int) -> State:
        after = self.transition(drive, s)
        return tuple(a if n % 2 == parity else v for n, (a, v) in enumerate(zip(after, s, strict=True)))


class WrongBackward(Plain):
    def gradient(self, drive: Tensor, s: State) -> State:
        first, second = self.autodiff_gradient(drive, s)
        return first, second.detach() if torch.is_grad_enabled() else second


class NotTelescoping(Plain):
    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        return {name: g.square() for name, g in self.autodiff_contrast(x, s_plus, s_minus).items()}


class OtherStep(Plain):
    def transition(self, x: Tensor, s: State) -> State:
        return tuple(0.9 * layer for layer in super().transition(x, s))


class WeakerWhenFrozen(Plain):
    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        strength = 1.0 if self.W.requires_grad else 0.5
        return {name: strength * g for name, g in self.autodiff_contrast(x, s_plus, s_minus).items()}


class AlwaysDouble(Plain):
    def squash(self, s: State) -> State:
        return tuple(layer.double() for layer in s)


class HalfPrecise(Plain):
    def init_state(self, x: Tensor) -> State:
        return tuple(layer.float() for layer in super().init_state(x))


def test_the_right_model_passes() -> None:
    check_model(case(Plain()))


@pytest.mark.parametrize(
    ("wrong", "noticed_by"),
    [
        (OneLayerForgotten, "the_gradient_is_the_autodiff_of_phi"),
        (SumInsteadOfMean, "the_contrast_is_a_mean_over_samples"),
        (SumInsteadOfMean, "the_contrast_is_the_autodiff_of_phi"),
        (WeakerWhenFrozen, "a_frozen_parameter_is_left_alone"),
        (NotTelescoping, "estimators_are_the_sums_of_their_steps"),
        (OtherStep, "a_step_is_the_transition"),
        (AlwaysDouble, "single_precision_follows"),
        (BatchNormalised, "samples_do_not_mix"),
        (Remembering, "the_model_keeps_no_state"),
        (NudgedInside, "the_push_comes_after_squash_and_before_projection"),
        (NotBipartite, "layers_of_one_parity_see_only_the_others"),
        (WrongBackward, "forward_and_reverse_derivatives_agree"),
        (OneLayerForgotten, "the_jacobian_is_symmetric_where_f_is_the_gradient_of_phi"),
        (HalfPrecise, "the_state_is_laid_out_as_promised"),
    ],
)
def test_a_wrong_model_is_noticed(wrong: type[Plain], noticed_by: str) -> None:
    check = next(c for c in CHECKS if c.__name__ == noticed_by)
    with pytest.raises(AssertionError):
        check(case(wrong()))
