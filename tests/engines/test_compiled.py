"""The compiled engine: any model's steps, traced and joined, against the reference in float64.

The graphs run as torch's operators: inductor compiles them on a GPU alone.
"""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import eqprop
from eqprop import EP, Phase, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines import Job
from eqprop.engines.compiled import (
    Compiled,
    StepInputs,
    all_inputs,
    join,
    step_of,
    trace_step,
    unpool_elementwise,
)
from eqprop.engines.eager import Eager, PreciseStepper
from eqprop.models import Conv, Dense, Network
from eqprop.relax import Stepper, relax, stepping
from eqprop.run.session import bind
from eqprop.run.watch import Progress, Watch
from tests.helpers.engine_contract import (
    EXACT,
    Case,
    check_calls,
    check_frozen,
    check_gradient,
    check_relaxation,
    check_settled,
    check_training,
    conv_cases,
    layered,
    layered_cases,
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as they are, on the CPU."""
    monkeypatch.setattr("eqprop.engines.compiled._compile", lambda graph, inputs: graph)
    monkeypatch.setattr("eqprop.engines.compiled.why_not_compiled", lambda device: None)


SMALL = Case("P depth 2", layered((5, 9, 12), activation="tanh"), "ep-symmetric", networks=None, samples=3)


def phi(x: Tensor, s: tuple[Tensor, ...], theta: Any) -> Tensor:
    """A net with a skip, as a user writes one; the input's product does not depend on the state."""
    seen = (s[0] * (s[1] @ theta["W01"].T + s[2] @ theta["W02"].T)).sum(-1) + (s[1] * (s[2] @ theta["W12"].T)).sum(-1)
    return seen + (s[2] * (x @ theta["W2x"].tanh().T)).sum(-1)


def own_model(sizes: tuple[int, int, int, int] = (3, 7, 8, 11), gain: float = 0.4) -> Dynamics:
    torch.manual_seed(0)
    out, h1, h2, inputs = sizes
    shapes = {"W01": (out, h1), "W02": (out, h2), "W12": (h1, h2), "W2x": (h2, inputs)}
    theta = {name: gain * torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return eqprop.from_primitive(phi, theta, (out, h1, h2), squash=torch.tanh, input_shape=(inputs,))


def trained(engine: Any, model: Dynamics, estimator: Any, cost: Any = None, rows: int = 2, **options: Any) -> Dynamics:
    """A copy of the model after some iterations on random data."""
    model, cost = copy.deepcopy(model), cost or SquaredError()
    source = torch.Generator().manual_seed(1)
    x = torch.rand(12, *(model.input_shape or ()), generator=source, dtype=torch.float64)
    labels = torch.randint(3, (12,), generator=source)
    y = eqprop.data.one_hot(labels, 3, torch.float64)
    optimizer = torch.optim.SGD([*model.parameters(), *cost.parameters()], lr=0.1)
    runner = engine.runner(Job(model, cost, estimator, optimizer, x, y, labels, **options))
    runner.run(torch.arange(4 * rows).view(rows, 4))
    return model


def apart(a: Dynamics, b: Dynamics) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_net_written_by_hand_keeps_every_promise_of_an_engine() -> None:
    check_gradient(Compiled(), SMALL, EXACT)
    check_training(Compiled(), SMALL, EXACT)
    check_relaxation(Compiled(), SMALL, EXACT)
    check_calls(Compiled(), SMALL, EXACT)
    check_frozen(Compiled(), SMALL, EXACT)


def test_a_phi_differentiated_at_every_step_trains_as_the_reference_does() -> None:
    model = own_model()
    ep = EP(T=13, K=7, beta=0.3, nudging="symmetric", schedule="sweeps")
    twin, ours = (trained(engine, model, ep) for engine in (Eager(), Compiled()))
    assert apart(twin, model) > 1e-4
    assert apart(twin, ours) < 1e-12


def test_what_does_not_depend_on_the_state_is_computed_once_per_phase() -> None:
    model = own_model()
    x = torch.rand(2, 11, dtype=torch.float64)
    s = tuple(torch.rand(2, n, dtype=torch.float64) for n in (3, 7, 8))
    theta = tuple(p.detach() for p in model.parameters())

    def step(given: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = dict(zip(("W01", "W02", "W12", "W2x"), given[:4], strict=True))
        grads = torch.func.grad(lambda *v: phi(given[4], v, values).sum(), argnums=(0, 1, 2))(*state)
        return tuple(torch.tanh(g) for g in grads)

    split = trace_step(step, (*theta, x), s)
    names = [str(node.target) for node in split.moving.graph.nodes]
    assert sum("mm" in name for name in names) == 6, "forward and back of three connections, the input's not"
    assert [str(node.target) for node in split.fixed.graph.nodes].count("aten.tanh.default") == 1
    held = split.fixed(*theta, x)
    for a, b in zip(split.moving(*theta, x, *held, *s), model.step(model.drive(x), s), strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=1e-14)


def test_a_step_that_looks_at_its_values_is_refused_in_words_or_falls_back_with_a_warning() -> None:
    def looking(x: Tensor, s: tuple[Tensor, ...], theta: Any) -> Tensor:
        strength = 1.0 if bool(s[0].sum() > 0) else 0.5
        return strength * (s[0] * (x @ theta["W"].T)).sum(-1)

    model = eqprop.from_primitive(looking, {"W": torch.randn(3, 4)}, (3,), squash=torch.tanh)
    x = torch.rand(2, 4)
    with pytest.raises(ValueError, match=r"'compiled' cannot serve looking: it reads the values .*Use 'eager'"):
        Compiled().relaxation(model, x, Phase(4))
    with pytest.warns(UserWarning, match="looking runs on the eager engine, which is slower: it reads"):
        found = Compiled(falls_back=True).relaxation(model, x, Phase(4))
    assert torch.equal(found.state[0], relax(model, x, 4).state[0])


def test_the_work_of_an_epoch_is_counted() -> None:
    pixels, labels = torch.zeros(5010, 3, 32, 32, dtype=torch.uint8), torch.arange(5010) % 10
    data = eqprop.data.from_arrays(pixels[:5000], labels[:5000], pixels[5000:], labels[5000:])
    session = bind("cifar10-small", data, test_samples=10, engine="eager")
    batch = session.spec.optimizer.batch
    work = session.work(session.model, session.estimator)
    samples = 5000 // batch * batch
    assert samples / 5000 * 1.42e12 < work < 1.43e12


def test_changed_rates_and_weights_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counted(graph: Any, inputs: Any) -> Any:
        made.append(inputs)
        return graph

    monkeypatch.setattr("eqprop.engines.compiled._compile", counted)
    model = own_model((3, 4, 6, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = torch.rand(8, 9, dtype=torch.float64), torch.arange(8) % 3
    y = eqprop.data.one_hot(labels, 3, torch.float64)
    runner = Compiled().runner(Job(model, SquaredError(), EP(T=7, K=2), optimizer, x, y, labels))
    runner.run(torch.arange(8).view(2, 4))
    first = len(made)
    for n in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (n + 1)
        runner.take_rates()
        runner.run(torch.arange(8).view(2, 4))
    assert 0 < first == len(made)
    runner.run(torch.arange(6).view(2, 3))
    assert len(made) > first, "another mini-batch is another program"


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_sweep_computes_every_convolution_once_forward_and_once_back(precision: Any) -> None:
    """The arg-max of a pooled convolution is kept until its input moves, in half precision too."""
    network = Network(
        (2, 8, 8),
        {"out": 3, "h2": (4, 4, 4), "h1": (3, 8, 8)},
        [Conv("x", "h1", kernel=3, padding=1), Conv("h1", "h2", kernel=3, padding=1, pool=2), Dense("h2", "out")],
        {"out": "identity", "*": "hard-sigmoid"},
        seed=0,
    )
    given = StepInputs(network, torch.rand(2, 2, 8, 8), None)
    values, s = given.tensors(), tuple(torch.rand_like(v) for v in network.init_state(given.x))
    groups = network.sweep(len(s))
    splits = [
        trace_step(lambda v, state, g=g: step_of(given, v, state, g, precision), values, s)  # type: ignore[misc]
        for g in groups
    ]
    sweeps = 5
    joined = join(splits, [0, 1] * sweeps, len(s))
    count = [str(node.target) for node in joined.graph.nodes].count("aten.convolution.default")
    assert count - 2 * sweeps in (0, 1), "one more where the first half needs an arg-max"
    inputs: dict[str, Tensor] = {}
    for split in splits:
        held = split.fixed(*values, *split.constants)
        inputs |= dict(zip(split.inputs, (*values, *split.constants, *held), strict=True))
    expected, step = s, PreciseStepper(network, given.x, None, precision)
    for n in range(2 * sweeps):
        expected = step(expected, groups[n % 2])
    found = joined(*(inputs[name] for name in all_inputs(splits)), *s)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def pooled_step(precision: Any) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A step of a net with two max-poolings, one of which leaves a row and a column out, with its inputs."""
    network = Network(
        (2, 13, 13),
        {"out": 3, "h2": (4, 2, 2), "h1": (3, 6, 6)},
        [Conv("x", "h1", kernel=3, padding=1, pool=2), Conv("h1", "h2", kernel=2, pool=2), Dense("h2", "out")],
        "hard-sigmoid",
        seed=0,
    )
    given = StepInputs(network, torch.rand(2, 2, 13, 13), None)
    s = tuple(torch.rand_like(v) for v in network.init_state(given.x))
    return lambda v, state: step_of(given, v, state, None, precision), given.tensors(), s


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_unpooling_by_comparison_puts_the_same_values_in_the_same_places(precision: Any) -> None:
    step, values, s = pooled_step(precision)
    traced = make_fx(lambda *v: step(v[: len(values)], v[len(values) :]))(*values, *s)
    expected = traced(*values, *s)
    ways = [str(node.target) for node in traced.graph.nodes]
    unpool_elementwise(traced)
    traced.recompile()
    assert ways.count("aten.max_unpool2d.default") == 1
    assert "aten.max_unpool2d.default" not in [str(node.target) for node in traced.graph.nodes]
    assert all(torch.equal(a, b) for a, b in zip(traced(*values, *s), expected, strict=True))


@pytest.mark.parametrize("overlap", [{"kernel_size": 3, "stride": 2}, {"kernel_size": 2, "padding": 1}])
def test_pools_that_overlap_or_reach_out_are_left_alone(overlap: dict[str, int]) -> None:
    def back(z: Tensor, h: Tensor) -> Tensor:
        indices = torch.nn.functional.max_pool2d(z, return_indices=True, **overlap)[1]
        return torch.ops.aten.max_unpool2d(h, indices, z.shape[-2:])

    z = torch.randn(1, 2, 9, 9)
    h = torch.randn_like(torch.nn.functional.max_pool2d(z, **overlap))
    traced = make_fx(back)(z, h)
    unpool_elementwise(traced)
    assert any(node.target is torch.ops.aten.max_unpool2d.default for node in traced.graph.nodes)


def test_images_are_laid_out_with_their_channels_last_unless_a_step_takes_views_of_them() -> None:
    def primitive(flat: Any) -> Any:
        def phi(x: Tensor, s: tuple[Tensor, ...], theta: Any) -> Tensor:
            seen = (s[1] * torch.nn.functional.conv2d(x, theta["W1"], padding=1)).sum((1, 2, 3))
            seen = seen + 0.1 * (s[1] * torch.nn.functional.conv2d(s[1], theta["W11"], padding=1)).sum((1, 2, 3))
            return seen + (s[0] * (flat(s[1]) @ theta["W0"].T)).sum(-1)

        return phi

    source = torch.Generator().manual_seed(0)
    shapes = {"W0": (3, 64), "W1": (4, 2, 3, 3), "W11": (4, 4, 3, 3)}
    theta = {name: 0.3 * torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in shapes.items()}
    x = torch.rand(5, 2, 4, 4, generator=source, dtype=torch.float64)
    ways = {"reshape": lambda h: h.flatten(1), "view": lambda h: h.view(len(h), -1)}
    found = {}
    for name, flat in ways.items():
        model = eqprop.from_primitive(primitive(flat), theta, (3, (4, 4, 4)), squash=torch.tanh, input_shape=(2, 4, 4))
        state = Compiled().relaxation(model, x, Phase(8)).state
        torch.testing.assert_close(state, relax(model, x, 8).state, rtol=0, atol=1e-14)
        found[name] = state[1].is_contiguous(memory_format=torch.channels_last)
    assert found == {"reshape": True, "view": False}


def test_blocks_reach_the_states_to_keep_and_the_fixed_point_of_single_steps() -> None:
    class InBlocks(Stepper):
        block = 5

    model = own_model(gain=0.1)
    x = torch.rand(4, 11, dtype=torch.float64)
    for phase, keep in ((Phase(23), 4), (Phase(400, stop="settled", still=1e-13), 0), (Phase(21, "sweeps"), 3)):
        expected = relax(model, x, phase, keep=keep)
        with stepping(lambda m, x, nudge, phase: InBlocks(m, m.drive(x), nudge)):
            found = relax(model, x, phase, keep=keep)
        for a, b in zip((*found.trail, found.state), (*expected.trail, expected.state), strict=True):
            assert all(torch.allclose(u, v, rtol=0.0, atol=1e-12) for u, v in zip(a, b, strict=True))
        assert phase.stop == "never" or max(found.steps, expected.steps) < phase.T


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """A small net in float32 by the compiled engine, stopped after its first iteration."""
    options: dict[str, Any] = {"T": 6, "K": 2, "epochs": 2, "samples": 60, "test_samples": 30, "batch": 30}

    class Stop(Watch):
        def progress(self, progress: Progress) -> None:
            if (progress.epoch, progress.iteration) == (0, 1):
                os.kill(os.getpid(), signal.SIGINT)

    eqprop.train("P-1h", tmp_path / "whole", engine="compiled", threads=1, deterministic=True, **options)
    with pytest.raises(eqprop.run.Stopped):
        eqprop.train("P-1h", tmp_path / "parts", engine="compiled", threads=1, watch=Stop(), **options)
    eqprop.resume(tmp_path / "parts")
    ours, theirs = (eqprop.load(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", [*layered_cases()[::5], *conv_cases()[::4]], ids=str)
def test_every_kind_of_net(case: Case) -> None:
    check_gradient(Compiled(), case, EXACT)
    check_relaxation(Compiled(), case, EXACT)


@pytest.mark.slow
def test_a_settled_free_phase_changes_no_bit() -> None:
    check_settled(Compiled(), SMALL, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("nudging", ["one-sided", "symmetric", "random-sign"])
@pytest.mark.parametrize("site", ["outside", "inside", "implicit"])
def test_nudgings_and_nudge_sites_of_a_graph(nudging: Any, site: Any) -> None:
    network = Network(
        (2, 8, 8),
        {"out": 3, "h2": (4, 3, 3), "h1": (3, 8, 8)},
        [Conv("x", "h1", kernel=3, padding=1), Conv("h1", "h2", kernel=3, pool=2), Dense("h2", "out")],
        {"out": "identity", "*": "hard-sigmoid"},
        nudge_site=site,
        seed=0,
        dtype=torch.float64,
    )
    ep = EP(T=9, K=5, beta=0.3, nudging=nudging, schedule="sweeps")
    twin, ours = (trained(engine, network, ep) for engine in (Eager(), Compiled()))
    assert apart(twin, network) > 1e-6
    assert apart(twin, ours) < 1e-12


class Held(eqprop.PrimitiveDynamics):
    """Phi = <s, held (W x)> - 1/4 <held s, s>, with whatever it holds, read by `numbers`."""

    input_shape = (4,)

    def __init__(self, held: Any) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.held = held
        self.W = torch.nn.Parameter(torch.randn(3, 4, generator=source, dtype=torch.float64))

    def numbers(self) -> Any:
        return self.held

    def init_state(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_zeros(len(x), 3),)

    def primitive(self, x: Tensor, s: tuple[Tensor, ...]) -> Tensor:
        held = self.numbers()
        return (s[0] * (x @ self.W.T) * held - 0.25 * held * s[0] * s[0]).sum(-1)


class Called(Held):
    def numbers(self) -> Any:
        return self.held(self.W.mean())


def same_as_the_reference(engine: Compiled, model: Dynamics, x: Tensor, T: int = 7) -> bool:
    found, expected = engine.relaxation(model, x, Phase(T)), relax(model, x, T)
    return all(torch.allclose(a, b, rtol=0.0, atol=1e-12) for a, b in zip(found.state, expected.state, strict=True))


def test_a_model_that_holds_the_same_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[object] = []

    def counted(*arguments: Any) -> Any:
        traced.append(arguments)
        return trace_step(*arguments)

    monkeypatch.setattr("eqprop.engines.compiled.trace_step", counted)
    images = Network((2, 6, 6), {"out": 3, "h": (4, 2, 2)}, [Conv("x", "h", pool=2), Dense("h", "out")], seed=0)
    for model, shape in ((Called(torch.sin), (4,)), (images, (2, 6, 6))):
        engine, cost = Compiled(), SquaredError()
        x = torch.rand(2, *shape, dtype=next(model.parameters()).dtype)
        y = torch.rand(2, 3, dtype=x.dtype)
        with engine.steps.stepping():
            EP(T=9, K=5).gradient(model, cost, x, y)
            first = len(traced)
            for _ in range(3):
                EP(T=9, K=5).gradient(model, cost, torch.rand_like(x), y)
        assert len(traced) == first


def test_a_cost_may_share_a_parameter_with_its_model() -> None:
    """As a cost that reads the same weights from theta."""

    class Tied(eqprop.Cost):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.W = model.W01

        def forward(self, s: Any, y: Tensor, theta: Any) -> Tensor:
            return 0.5 * (s[1] @ self.W.T - y).square().sum(-1)

    model = eqprop.models.Layered((3, 5, 4), activation="tanh", seed=0, dtype=torch.float64)
    cost, engine = Tied(model), Compiled()
    read = eqprop.FunctionCost(lambda s, y, theta: 0.5 * (s[1] @ theta["W01"].T - y).square().sum(-1), parametric=True)
    x, y = torch.rand(2, 4, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    for estimator in (EP(T=30, K=20), eqprop.HolomorphicEP(T=30, K=20)):
        _, expected = estimator.gradient(model, read, x, y)
        _, alone = estimator.gradient(model, cost, x, y)
        with engine.steps.stepping():
            _, found = estimator.gradient(model, cost, x, y)
        for p, g in expected.items():
            assert torch.allclose(alone[p], g, rtol=0.0, atol=1e-12)
            assert torch.allclose(found[p], g, rtol=0.0, atol=1e-10)


def test_a_model_that_changes_at_every_phase_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eqprop.engines.compiled.MOST", 4)
    engine, x = Compiled(), torch.rand(2, 4, dtype=torch.float64)
    model = Held(0.0)
    for n in range(20):
        model.held = 0.05 * n
        assert same_as_the_reference(engine, model, x)
        assert all(len(kept[model]) <= 8 for kept in (engine.steps._splits, engine.steps._blocks))
