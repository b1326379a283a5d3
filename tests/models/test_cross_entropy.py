"""Cross-entropy with a softmax readout outside the dynamics: its derivatives, the theorem with it, runs with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.nets import (
    F64,
    LONG,
    batch,
    convolutional,
    energy_based,
    gap,
    gather,
    prototypical,
    random_like,
    settle,
    toy,
)
from helpers.tolerances import EXACT_LIMIT, NOT_EQUAL, SAME_FORMULA, SYMMETRIC_EP
from helpers.training_runs import SMALL, few_images
from torch import Tensor, nn
from torch.testing import assert_close

from eqprop import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Cost,
    CrossEntropy,
    Dynamics,
    FunctionCost,
    HolomorphicEP,
    from_primitive,
    limit_steps,
    load,
    papers,
    predict,
    train,
)
from eqprop.data import one_hot
from eqprop.models import stack, stack_readouts, unstack_readout
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.run import evaluate
from eqprop.run.own import OwnNet
from eqprop.run.spec import Spec
from eqprop.state import State

K = 12
CLASSES = 4


def readout(net: Dynamics, layer: int = 0, seed: int = 1) -> CrossEntropy:
    x, _ = batch(net)
    return CrossEntropy(net.init_state(x)[layer][0].numel(), CLASSES, layer, seed=seed, dtype=F64)


def problem(net: Dynamics, layer: int = 0) -> tuple[CrossEntropy, Tensor, Tensor]:
    x, _ = batch(net)
    return readout(net, layer), x, one_hot(torch.arange(len(x)) % CLASSES, CLASSES, F64)


def own() -> Dynamics:
    def phi(x: Tensor, s: State, theta: Any) -> Tensor:
        return (s[1] @ theta["W"].T * s[0]).sum(-1) + (x @ theta["V"].T * s[1]).sum(-1)

    parameters = {"W": random_like((2, 4), 0), "V": random_like((4, 3), 1)}
    model = from_primitive(phi, parameters, (2, 4), squash=torch.tanh, nudge_site="inside")
    model.input_shape = (3,)
    return model


EXACT: dict[str, Callable[[], Dynamics]] = {
    "toy": toy,
    "EB depth 1": lambda: energy_based(1),
    "EB depth 3": lambda: energy_based(3, "sigmoid"),
    "P inside": lambda: prototypical(3, "sigmoid", nudge_site="inside"),
    "conv inside": lambda: convolutional(activation="tanh", nudge_site="inside"),
    "conv without flat layers, inside": lambda: convolutional(activation="tanh", flat=(), nudge_site="inside"),
    "own Phi inside": own,
}


@pytest.mark.parametrize("layer", [0, 1])
def test_value_and_pull_are_those_of_torch(layer: int) -> None:
    net = energy_based(3)
    cost, x, y = problem(net, layer)
    s = tuple(random_like(tuple(v.shape), n) for n, v in enumerate(net.init_state(x)))

    def plain(s: State, y: Tensor) -> Tensor:
        logits = nn.functional.linear(s[layer], cost.Wout, cost.bout)
        return nn.functional.cross_entropy(logits, y.argmax(-1), reduction="none")

    oracle = FunctionCost(plain)
    assert_close(cost(s, y, {}), oracle(s, y, {}), rtol=0.0, atol=SAME_FORMULA)
    for a, b in zip(cost.pull(s, y, {}), oracle.pull(s, y, {}), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_close(a, b, rtol=0.0, atol=SAME_FORMULA)
    # Soft targets too, by automatic differentiation of the formula itself.
    soft = torch.softmax(random_like((len(x), CLASSES), 5), -1)
    by_hand, by_autodiff = cost.pull(s, soft, {})[layer], Cost.pull(cost, s, soft, {})[layer]
    assert_close(by_hand, by_autodiff, rtol=0.0, atol=SAME_FORMULA)


def test_large_scores_do_not_overflow() -> None:
    cost = CrossEntropy(2, 2, seed=0, dtype=F64)
    s = (torch.tensor([[1e5, -1e5]], dtype=F64),)
    for y in (torch.tensor([[1.0, 0.0]], dtype=F64), torch.tensor([[0.0, 1.0]], dtype=F64)):
        assert bool(torch.isfinite(cost(s, y, {})).all())
        pull = cost.pull(s, y, {})[0]
        assert pull is not None
        assert bool(torch.isfinite(pull).all())


@pytest.mark.parametrize("build", EXACT.values(), ids=EXACT)
def test_the_theorem_holds_with_it(build: Callable[[], Dynamics]) -> None:
    """The synapse processes of EP as beta -> 0 are BPTT's, and the readout's gradient is the same term in both."""
    net = build()
    cost, x, y = problem(net)
    free = settle(net, x, keep=K)
    delta = gather(limit_steps(net, cost, x, y, free, K))
    nabla = BPTT(T=LONG, K=K).processes(net, cost, x, y, free)
    gaps = gap(delta, nabla)
    assert max(gaps[name] for name in nabla.synapses) < EXACT_LIMIT
    assert max(float(v.abs().max()) for v in nabla.synapses.values()) > NOT_EQUAL


def test_outside_sigma_the_theorem_fails_with_it_as_with_any_cost() -> None:
    net = prototypical(3, "sigmoid")
    cost, x, y = problem(net)
    free = settle(net, x, keep=K)
    delta = gather(limit_steps(net, cost, x, y, free, K))
    gaps = gap(delta, BPTT(T=LONG, K=K).processes(net, cost, x, y, free))
    assert gaps["W01"] > NOT_EQUAL * float(delta.synapses["W01"].abs().max())


@pytest.mark.parametrize("build", EXACT.values(), ids=EXACT)
def test_the_gradient_of_net_and_readout_against_finite_differences(build: Callable[[], Dynamics]) -> None:
    net = build()
    cost, x, y = problem(net)
    start, h = settle(net, x).state, 1e-5
    one, other = (EP(T=0, K=150, beta=b).gradient(net, cost, x, y, start)[1] for b in (1e-4, -1e-4))
    grads = {p: 0.5 * (g + other[p]) for p, g in one.items()}
    assert set(grads) == {*net.parameters(), *cost.parameters()}

    def loss() -> float:
        return float(cost(settle(net, x).state, y, {}).mean().detach())

    for seed, (p, grad) in enumerate(grads.items()):
        u, kept, found = random_like(tuple(p.shape), seed), p.detach().clone(), []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                p.copy_(kept + sign * h * u)
            found.append(loss())
        with torch.no_grad():
            p.copy_(kept)
        assert float((grad * u).sum()) == pytest.approx((found[0] - found[1]) / (2 * h), abs=10 * SYMMETRIC_EP)


def test_every_estimator_gives_the_readout_the_same_gradient() -> None:
    net = energy_based(3, "sigmoid")
    cost, x, y = problem(net)
    state = settle(net, x).state
    estimators = (
        EP(T=0, K=5),
        EP(T=0, K=5, nudging="symmetric"),
        BPTT(T=5, K=5),
        RBP(T=0, K=5),
        HolomorphicEP(T=0, K=5),
        ContinualEP(T=0, K=5, rates=0.01),
    )
    found = [estimator.gradient(net, cost, x, y, state)[1] for estimator in estimators]
    for grads in found[1:]:
        for p in cost.parameters():
            assert_close(grads[p], found[0][p], rtol=0.0, atol=1e-10)


def test_stacked_readouts_are_the_single_ones() -> None:
    nets = [prototypical(2, seed=n) for n in range(2)]
    costs = [readout(net, seed=n) for n, net in enumerate(nets)]
    _, x, y = problem(nets[0])
    both = EP(T=20, K=5).gradient(stack(nets), stack_readouts(costs), x.expand(2, *x.shape), y.expand(2, *y.shape))[1]
    singles = [EP(T=20, K=5).gradient(net, cost, x, y)[1] for net, cost in zip(nets, costs, strict=True)]
    shapes = {tuple(g.shape): g for g in both.values()}
    for r, (net, cost) in enumerate(zip(nets, costs, strict=True)):
        for p in (*net.parameters(), *cost.parameters()):
            assert_close(shapes[(2, *p.shape)][r], singles[r][p], rtol=0.0, atol=SAME_FORMULA)
    assert torch.equal(unstack_readout(stack_readouts(costs), 1).Wout, costs[1].Wout)


def test_the_readout_takes_the_place_of_the_output_layer() -> None:
    experiment = papers.find("P-2h").override(cost="cross-entropy")
    assert experiment.model == LayeredNet((512, 512, 784))
    assert dict(experiment.optimizer.rates) == {"W12": 0.2, "W01": 0.05, "Wout": 0.005}
    changes = [change.field for change in experiment.changes(papers.find("P-2h"))]
    assert changes == ["sizes", "cost", "rates"]
    conv = papers.find("P-conv").override(cost="cross-entropy")
    assert conv.model == ConvolutionalNet(flat=())
    assert dict(conv.optimizer.rates) == {"Wconv12": 0.15, "Wconv01": 0.035, "Wout": 0.015}
    assert Spec(**experiment.to_dict()) == experiment
    # What is cross-entropy already stays as it is, and a network of one's own has no layer to spare.
    assert experiment.override(cost="cross-entropy", T=7).model == experiment.model
    mine = papers.find("P-1h").override(model=OwnNet(), rates={"*": 0.1}).override(cost="cross-entropy")
    assert mine.model == OwnNet()
    with pytest.raises(ValueError, match="Unknown cost 'entropy'"):
        papers.find("P-1h").override(cost="entropy")


def small(**options: Any) -> Any:
    """Two hidden layers under a readout."""
    net = SMALL.override(model=LayeredNet((10, 16, 24, 784)), rates={"W23": 0.1, "W12": 0.1})
    return net.override(cost="cross-entropy", **options)


def test_a_run_learns_and_is_measured_through_its_readout(tmp_path: Path) -> None:
    images = few_images()
    result = train(small(epochs=8), tmp_path / "run", data=images)
    errors = result.summary["estimators"]["ep"]["trials"][0]["test_error"]
    # Chance is 90. Where eight epochs lead is a matter of rounding: 42 to 57 over seeds and processors.
    assert errors[-1] < 70.0
    assert errors[-1] < errors[0]
    network = load(tmp_path / "run")
    answers = predict(network, images.test_x)
    assert 100.0 * float((answers != images.test_y).double().mean()) == pytest.approx(errors[-1])
    assert evaluate(tmp_path / "run", data=images)["ep"][0]["test_error"] == pytest.approx(errors[-1])
    plain = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert plain["experiment"]["cost"] == {"kind": "cross-entropy"}
