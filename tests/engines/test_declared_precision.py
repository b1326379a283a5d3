"""Products in a declared precision: what is rounded and what is not, who refuses, and the guard of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

import eqprop
from eqprop import EP, Phase, SquaredError
from eqprop.cost import Nudge, Problem
from eqprop.engines import Job, Task, choose
from eqprop.engines.base import PRECISIONS, Precision
from eqprop.engines.compiled import StepInputs, step_of, trace_step
from eqprop.engines.eager import (
    Agreement,
    PreciseStepper,
    compare_precision,
    compare_with_float64,
    products,
    stepping_in,
    update_in,
)
from eqprop.models import Conv, Dense, Layered, Network
from eqprop.relax import relax
from eqprop.run.log import read_metrics
from eqprop.run.loop import GUARD
from eqprop.run.watch import Watch

LOWER: tuple[Precision, ...] = ("tf32", "float16", "bfloat16")
BITS = {"tf32": 10, "float16": 10, "bfloat16": 7}


def half(v: Tensor) -> Tensor:
    return v.half().float()


def net() -> Network:
    return Network(
        (2, 8, 8),
        {"out": 5, "h2": (4, 3, 3), "h1": (3, 8, 8)},
        [Conv("x", "h1", kernel=3, padding=1), Conv("h1", "h2", kernel=3, pool=2), Dense("h2", "out")],
        {"out": "identity", "*": "hard-sigmoid"},
        seed=0,
    )


def problem(model: Any, samples: int = 6) -> Problem:
    source = torch.Generator().manual_seed(1)
    x = torch.rand(samples, *model.input_shape, generator=source)
    return Problem(model, SquaredError(), x, eqprop.data.one_hot(torch.arange(samples) % 5, 5))


def test_products_round_their_factors_and_results_and_nothing_else() -> None:
    torch.manual_seed(0)
    a, b, c = torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)
    image, kernel, bias = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3), torch.randn(4)
    with products("float16"):
        found = (a @ b, torch.addmm(c, a, b, beta=2.0, alpha=3.0), conv2d(image, kernel, bias), torch.tanh(a) + a)
    product = half(half(a) @ half(b))
    assert torch.equal(found[0], product)
    assert torch.equal(found[1], 2.0 * c + 3.0 * product)
    assert torch.equal(found[2], half(conv2d(half(image), half(kernel))) + bias.view(-1, 1, 1))
    assert torch.equal(found[3], torch.tanh(a) + a)


@pytest.mark.parametrize("precision", LOWER)
def test_rounding_is_to_the_bits_of_the_precision(precision: Precision) -> None:
    v = torch.randn(1000, 1) * torch.logspace(-2, 2, 1000).view(-1, 1)
    with products(precision):
        once = v @ torch.ones(1, 1)
        twice = once @ torch.ones(1, 1)
    assert torch.equal(once, twice)
    error = float(((once - v) / v).abs().max())
    assert 2.0 ** -(BITS[precision] + 2) < error <= 2.0 ** -(BITS[precision] + 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_traced_step_has_the_bits_of_the_reference(precision: Precision) -> None:
    given = problem(net())
    s = tuple(torch.rand_like(layer) for layer in given.model.init_state(given.x))
    for nudge in (None, Nudge(given.cost, given.y, 0.5)):
        inputs = StepInputs(given.model, given.x, nudge)
        values = inputs.tensors()
        split = trace_step(
            lambda v, state, inputs=inputs: step_of(inputs, v, state, None, precision),  # type: ignore[misc]
            values,
            s,
        )
        held = split.fixed(*values, *split.constants)
        traced = split.moving(*values, *split.constants, *held, *s)
        expected = PreciseStepper(given.model, given.x, nudge, precision)(s)
        assert all(torch.equal(a, b) for a, b in zip(traced, expected, strict=True))
        exact = PreciseStepper(given.model, given.x, nudge, "float32")(s)
        assert all(torch.equal(a, b) for a, b in zip(expected, exact, strict=True)) == (precision == "float32")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_products_of_an_update_are_tf32_where_less_than_float32_is_declared(precision: Precision) -> None:
    given, ep = problem(net()), EP(T=20, K=6, beta=0.5)
    found = update_in(given, ep, precision)
    with stepping_in(precision):
        free = relax(given.model, given.x, ep.T)
        nudge = Nudge(given.cost, given.y, 0.5)
        end = relax(given.model, given.x, ep.K, free.state, nudge)
    exact = given.model.contrast(given.x, end.state, free.state)
    with products("tf32"):
        rounded = given.model.contrast(given.x, end.state, free.state)
    expected, other = (exact, rounded) if precision == "float32" else (rounded, exact)
    for name, g in found.items():
        torch.testing.assert_close(g, -expected[name] / 0.5, rtol=1e-6, atol=1e-8)
    assert not torch.equal(other["W_out_h2"], expected["W_out_h2"])


@pytest.mark.parametrize("precision", LOWER)
def test_a_settled_net_keeps_its_update_and_weights_stay_float32(precision: Precision) -> None:
    given = problem(net())
    ep = EP(T=40, K=15, beta=0.5, nudging="symmetric")
    found = compare_precision(given, ep, precision)
    assert set(found) == {"", *(name for name, _ in given.model.named_parameters())}
    assert 0.99 < found[""].cosine < 1.0 - 1e-9
    assert abs(found[""].norm - 1.0) < 0.05
    itself = compare_with_float64(given, ep)
    assert itself[""].cosine > found[""].cosine

    labels = torch.arange(6) % 5
    optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1, momentum=0.9)
    engine = choose("auto", Task(given.model, given.cost, ep, optimizer, precision=precision))
    assert (engine.name, engine.precision) == ("eager", precision)
    engine.runner(Job(given.model, given.cost, ep, optimizer, given.x, given.y, labels)).run(torch.arange(6).view(1, 6))
    state = [v for one in optimizer.state.values() for v in one.values() if isinstance(v, Tensor)]
    kept = [*given.model.parameters(), *(p.grad for p in given.model.parameters()), *state]
    assert {v.dtype for v in kept if v is not None} == {torch.float32}
    free = engine.relaxation(given.model, given.x, Phase(10))
    assert {layer.dtype for layer in free.state} == {torch.float32}


def test_engines_that_cannot_do_a_precision_refuse_in_words() -> None:
    model = Layered((10, 16, 20), seed=0)
    ep, optimizer = EP(T=5, K=2), torch.optim.SGD(model.parameters(), lr=0.1)
    task = Task(model, SquaredError(), ep, optimizer, precision="float16")
    with pytest.raises(ValueError, match="cannot serve: it computes in float32, and the precision is float16"):
        choose("xla", task)
    with pytest.raises(ValueError, match="Unknown run.precision 'half'; expected one of float32, tf32"):
        eqprop.train("P-1h", precision="half")


def test_agreement_of_updates() -> None:
    a = torch.tensor([3.0, 4.0])
    doubled = Agreement.of(2.0 * a, a)
    assert doubled.cosine == pytest.approx(1.0)
    assert doubled.norm == pytest.approx(2.0)
    assert Agreement.of(-a, a).cosine == pytest.approx(-1.0)
    assert Agreement.of(0.0 * a, 0.0 * a) == Agreement(1.0, 1.0)
    assert math.isnan(Agreement.of(0.0 * a, a).cosine)
    assert Agreement.of(0.0 * a, a).to_dict() == {"cosine": None, "norm": 0.0}


class Warned(Watch):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, message: str) -> None:
        self.said.append(message)


OPTIONS: dict[str, Any] = {"T": 10, "K": 3, "epochs": 2, "samples": 60, "test_samples": 20, "threads": 1}


@pytest.mark.parametrize(
    ("cosine", "ending"), [(0.9, "expected 0.95 or more"), (-0.1, "it points away"), (math.nan, "it points away")]
)
def test_the_guard_warns_and_stops(cosine: float, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"": Agreement(cosine, 1.0), "W01": Agreement(cosine - 0.05, 1.0)}
    monkeypatch.setattr("eqprop.run.trainer.compare_precision", lambda *_: found)
    warned = Warned()
    if cosine > 0:
        eqprop.train("P-1h", tmp_path / "run", precision="bfloat16", watch=warned, **{**OPTIONS, "epochs": 1})
    else:
        with pytest.raises(ValueError, match=ending):
            eqprop.train("P-1h", tmp_path / "run", precision="bfloat16", watch=warned, **OPTIONS)
    assert not cosine >= GUARD
    assert bool([said for said in warned.said if ending in said and "for W01" in said]) == (cosine > 0)
    assert len(read_metrics(tmp_path / "run")) == 1, "what was measured is written before the run ends"
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
