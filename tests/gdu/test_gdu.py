"""The GDU laboratory against plain twins: stacked processes, dense Jacobians, dropped samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers.nets import F64, asymmetric, batch, convolutional, energy_based, prototypical, toy
from helpers.tolerances import EXACT_LIMIT, FIRST_ORDER, NOT_EQUAL, SAME_FORMULA
from torch import Tensor

from eqprop import (
    BPTT,
    EP,
    Dynamics,
    Phase,
    Relaxation,
    SquaredError,
    from_transition,
    gdu,
    limit_steps,
    relax,
)
from eqprop.cost import Problem
from eqprop.gdu import AUTHORS, PAPER, NeverSettlesError, Options, settling
from eqprop.gdu.lockstep import (
    Linearised,
    asymmetry,
    dissect,
    flat,
    spectral_radius,
    unflat,
)
from eqprop.gdu.metrics import batch_mean, groups
from eqprop.gdu.settling import settle
from eqprop.models import Layered
from eqprop.run import bind

COST = SquaredError()
T, K, BETA = 400, 6, 0.01


def small_nets() -> dict[str, Dynamics]:
    return {
        "toy": toy(),
        "EB": energy_based(3),
        "EB without sigma' at the output": energy_based(2, output_slope=False),
        "P": prototypical(3, "sigmoid"),
        "conv": convolutional(activation="sigmoid"),
    }


def case_of(model: Dynamics, beta: float = BETA, steps: int = T) -> tuple[Problem, Relaxation, EP]:
    x, y = batch(model)
    return Problem(model, COST, x, y), relax(model, x, steps, keep=K), EP(steps, K, beta)


def stacked(model: Dynamics, beta: float = BETA) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """EP's processes and minus BPTT's, every group (K, elements), averaged over the samples."""
    problem, free, _ = case_of(model, beta)
    arguments = (model, COST, problem.x, problem.y, free)
    ep, bptt = EP(T, K, beta=beta).processes(*arguments), BPTT(T, K).processes(*arguments)
    names = model.layer_names or [f"s{n}" for n in range(len(ep.neurons))]
    pairs = []
    for sign, found in ((1, ep), (-1, bptt)):
        layers = {n: v.mean(1) for n, v in zip(names, found.neurons, strict=True)}
        pairs.append({name: sign * v.flatten(1) for name, v in (layers | found.synapses).items()})
    return pairs[0], pairs[1]


def rmse(f: Tensor, g: Tensor) -> float:
    """The paper's formula on whole processes (K, elements), elements without any signal left out."""
    scale = torch.maximum(f.norm(dim=0), g.norm(dim=0))
    return float(((f - g).norm(dim=0) / scale)[scale > 0].mean())


@pytest.mark.parametrize("name", small_nets())
def test_metrics_are_those_of_the_whole_processes(name: str) -> None:
    model = small_nets()[name]
    ep, bptt = stacked(model)
    x, y = batch(model)
    report = gdu.compare(model, COST, x, y, T, K, BETA)
    found = report.neurons | report.synapses | report.biases
    assert set(found) == set(ep)
    for group, m in found.items():
        f, g = ep[group], bptt[group]
        assert m.rmse == pytest.approx(rmse(f, g), rel=1e-6, abs=1e-11)
        assert m.rmse_cumulative == pytest.approx(rmse(f.cumsum(0), g.cumsum(0)), rel=1e-6, abs=1e-11)
        signed = g != 0
        assert m.sign == pytest.approx(float((f.sign() == g.sign())[signed].double().mean()), abs=1e-12)
        assert m.cosine == pytest.approx(float((f * g).sum() / (f.norm() * g.norm())), rel=1e-9)
        assert m.norm == pytest.approx(float(g.square().mean().sqrt()), rel=1e-9)
        assert m.left_out == int(((f == 0) & (g == 0)).all(0).sum())
        assert m.elements == f.shape[1]


@pytest.mark.parametrize("name", small_nets())
def test_the_parts_add_up_to_the_difference(name: str) -> None:
    # Far from settled, so that no part is negligible.
    problem, free, ep = case_of(small_nets()[name], beta=0.1, steps=12)
    every = groups(problem.model, free.state)
    for moment in dissect(problem, free, ep):
        for group in every:
            if group.kind == "neurons":
                whole = sum(batch_mean(p, group) for p in moment.parts.values() if p.neurons)
            else:
                whole = sum(batch_mean(p, group) for p in moment.parts.values())
            difference = batch_mean(moment.ep, group) - batch_mean(moment.bptt, group)
            assert float((whole - difference).abs().max()) < SAME_FORMULA


@pytest.mark.parametrize("name", small_nets())
def test_products_with_the_jacobian_in_reverse_mode_are_those_of_the_limit_in_forward_mode(name: str) -> None:
    """At rest the limit of small beta is J^t N (-dl/ds), and its synapses are the parameters' response to it."""
    problem, free, _ = case_of(small_nets()[name], steps=4000)
    around = Linearised(problem.model, problem.x, free.state)
    zeros = tuple(torch.zeros_like(layer) for layer in free.state)
    moved = around.product(zeros, tuple(-layer for layer in problem.pull(free.state)))
    for step in limit_steps(problem.model, COST, problem.x, problem.y, free, K):
        for a, b in zip(moved, step.neurons, strict=True):
            assert float((a - b).abs().max()) < SAME_FORMULA
        for group, value in around.synapses(moved).items():
            assert float((value - step.synapses[group]).abs().max()) < SAME_FORMULA
        moved = around.product(moved)


def test_the_finite_beta_part_is_first_order_in_beta() -> None:
    model = toy()
    x, y = batch(model)
    found = [gdu.compare(model, COST, x, y, T, K, beta).budget for beta in (4e-3, 2e-3, 1e-3)]
    for coarse, fine in pairwise(found):
        for kind in ("neurons", "synapses"):
            ratio = getattr(coarse, kind).finite_beta / getattr(fine, kind).finite_beta
            assert ratio == pytest.approx(2.0, rel=FIRST_ORDER)
        assert coarse.synapses.asymmetry < EXACT_LIMIT
        assert coarse.synapses.residual < EXACT_LIMIT


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_on_prototypical_nets_synapses_miss_the_output_slope_and_nothing_else(depth: int) -> None:
    model = prototypical(depth, "sigmoid")
    x, y = batch(model)
    parts = gdu.compare(model, COST, x, y, T, K, 1e-5).budget.synapses
    assert parts.asymmetry < EXACT_LIMIT
    assert parts.output_slope > NOT_EQUAL
    assert parts.largest()[0] == "output_slope"


def test_an_asymmetric_transition_fails_and_is_told_so() -> None:
    model = asymmetric()
    x, y = batch(model)
    y = y[:, :2]
    report = gdu.compare(model, COST, x, y, T, K, 1e-3)
    assert report.budget.outcome == "fails"
    assert report.budget.synapses.largest()[0] == "asymmetry"
    assert "fails" in report.verdict
    assert "asymmetry" in report.verdict
    assert report.budget.asymmetry > 0.1
    assert report.budget.synapses.asymmetry > 0.05


def dense_jacobian(model: Dynamics, x: Tensor, s: tuple[Tensor, ...]) -> Tensor:
    """dF/ds of one sample as a matrix."""
    return torch.autograd.functional.jacobian(lambda rows: flat(model.transition(x, unflat(rows, s))), flat(s))[0, :, 0]


@pytest.mark.parametrize("make", [toy, lambda: prototypical(3), asymmetric, convolutional])
def test_products_asymmetry_and_radius_are_those_of_the_dense_jacobian(make: Callable[[], Dynamics]) -> None:
    model = make()
    x, _ = batch(model, samples=1)
    s = relax(model, x, T).state
    J = dense_jacobian(model, x, s)
    around, rows = Linearised(model, x, s), flat(s)
    v = torch.randn(rows.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    assert float((around.on_rows(v)[0] - J @ v[0]).abs().max()) < SAME_FORMULA
    radius = float(torch.linalg.eigvals(J).abs().max())
    assert spectral_radius(around) == pytest.approx(radius, rel=1e-6, abs=1e-12)
    rest = J - torch.eye(len(J), dtype=F64) * J.trace() / len(J)
    expected = float((J - J.T).norm() / (2 * rest.norm()))
    # The same sample 400 times over is probed 3200 times, which knows a Frobenius norm to a few per cent.
    many = tuple(layer.expand(400, *layer.shape[1:]) for layer in s)
    around = Linearised(model, x.expand(400, *x.shape[1:]), many)
    assert asymmetry(around) == pytest.approx(expected, rel=0.1, abs=1e-12)


def two_chains() -> Dynamics:
    """A prototypical net of one neuron a layer, the two hidden ones strongly coupled. Its two chains end in the same
    state for x = -0.5 and in different states, a cycle of two, for x = 0.5."""
    model = Layered((1, 1, 1, 1), "prototypical", "tanh", init="default", seed=0, dtype=F64)
    values = {"W01": 0.3, "W12": 3.0, "W23": 1.0, "b0": 0.0, "b1": -0.5, "b2": 0.0}
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).fill_(value)
    return model


def test_samples_that_do_not_settle_are_seen_and_can_be_dropped() -> None:
    model = two_chains()
    x = torch.tensor([[0.5], [-0.5], [-0.4]], dtype=F64)
    y = torch.ones(3, 1, dtype=F64)
    kept = gdu.compare(model, COST, x, y, 200, K, BETA)
    assert (kept.residual.unsettled, kept.residual.dropped, kept.samples) == (1, 0, 3)
    assert kept.residual.max > 0.5
    assert kept.residual.median < 1e-12
    assert kept.budget.synapses.largest()[0] == "unsettled"
    assert "unsettled" in kept.verdict

    dropped = gdu.compare(model, COST, x, y, 200, K, BETA, Options(drop_unsettled=True))
    assert (dropped.residual.unsettled, dropped.residual.dropped, dropped.samples) == (1, 1, 2)
    alone = gdu.compare(model, COST, x[1:], y[1:], 200, K, BETA)
    assert alone.residual.unsettled == 0
    assert alone.settled is None
    assert dropped.settled is None
    for group, m in dropped.synapses.items():
        assert m.rmse == pytest.approx(alone.synapses[group].rmse, rel=1e-9)
        assert kept.settled["synapses"][group] == m
    # What the sample adds is the difference between the two.
    before, after = kept.budget.synapses.rmse, dropped.budget.synapses.rmse
    assert kept.budget.synapses.unsettled == pytest.approx(before - after, rel=1e-9)
    assert dropped.budget.synapses.unsettled == 0.0
    # The figures show a sample that has settled.
    assert kept.sample == 1


def test_alternating_steps_bring_to_rest_what_goes_back_and_forth() -> None:
    model = two_chains()
    x = torch.tensor([[0.5], [-0.5], [-0.4]], dtype=F64)
    y = torch.ones(3, 1, dtype=F64)
    still = gdu.compare(model, COST, x, y, 200, K, BETA, Options(schedule="alternating"))
    assert (still.schedule, still.residual.unsettled, still.samples, still.release.tipped) == ("alternating", 0, 3, 0)
    assert still.residual.max < 1e-12
    assert "T = 200 alternating" in str(still)
    # From there on everything is as on any state of rest: the same as if the phase had begun in it.
    rest = relax(model, x, Phase(400, "alternating")).state
    arguments = (model, COST, x, y, relax(model, x, 2 * K, rest, keep=K))
    ep, bptt = (e.processes(*arguments).synapses for e in (EP(T, K, beta=BETA), BPTT(T, K)))
    for name, m in still.synapses.items():
        assert m.rmse == pytest.approx(rmse(ep[name].flatten(1), -bptt[name].flatten(1)), rel=1e-9)


def two_rests() -> Dynamics:
    """A neuron with a steady state on either side of 0; from zero it goes to that of its input's sign."""
    return from_transition(
        lambda x, s, theta: (torch.tanh(theta["w"] * s[0] + x),), {"w": torch.full((1,), 2.0, dtype=F64)}, (1,)
    )


def test_samples_that_a_nudge_tips_over_are_counted() -> None:
    model = two_rests()
    x = torch.tensor([[0.1], [0.1], [-0.1]], dtype=F64)
    y = torch.tensor([[-1.0], [1.0], [1.0]], dtype=F64)
    rests = relax(model, x, 200).state[0]
    strong = gdu.compare(model, COST, x, y, 200, K, 0.6).release
    assert (strong.samples, strong.tipped) == (3, 2)
    # From the steady state of one sign to that of the other, with the same input.
    other = relax(model, x[:1], 200, (-rests[:1],)).state[0]
    assert strong.farthest == pytest.approx(float((rests[:1] - other).abs().max()), rel=1e-3)
    assert "2 of 3 samples do not return (neurons are off by up to 1.9e+00)" in str(strong)
    weak = gdu.compare(model, COST, x, y, 200, K, BETA)
    assert (weak.release.tipped, weak.release.farthest) == (0, 0.0)
    assert "After the nudge all samples return to their steady states." in str(weak)
    assert weak.to_dict()["release"] == {"samples": 3, "tipped": 0, "farthest": 0.0}


def test_a_model_that_never_settles_is_an_error() -> None:
    model = two_chains()
    x, y = torch.tensor([[0.5]], dtype=F64), torch.ones(1, 1, dtype=F64)
    with pytest.raises(NeverSettlesError, match="None of the 1 samples settles.*no steady state"):
        gdu.compare(model, COST, x, y, 200, K, BETA)


def test_a_model_on_its_way_is_compared_and_the_residual_named() -> None:
    model = energy_based(2, eps=0.05)
    x, y = batch(model)
    report = gdu.compare(model, COST, x, y, 60, K, 1e-3)
    assert report.residual.unsettled == 3
    assert report.budget.synapses.largest()[0] == "residual"
    assert "The state still drifts while it is nudged" in report.verdict
    assert "Or raise T to 300." in report.verdict
    with pytest.raises(ValueError, match="leaves none of the 3 samples"):
        gdu.compare(model, COST, x, y, 60, K, 1e-3, Options(drop_unsettled=True))


def test_a_frozen_parameter_is_left_out() -> None:
    model = toy()
    model.W01.requires_grad_(False)
    x, y = batch(model)
    report = gdu.compare(model, COST, x, y, T, K, BETA)
    assert set(report.synapses) == {"W0x", "W1x"}


@pytest.mark.parametrize(("steps", "kept"), [(1, 1), (7, 3), (50, 50), (120, 10), (333, 100)])
def test_the_free_phase_in_pieces_is_the_one_of_a_single_run(
    steps: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "STILL", 0.0)
    model = energy_based(2, eps=0.1)
    x, _ = batch(model)
    told: list[int] = []
    found = settle(Problem(model, COST, x, x), EP(steps, kept, BETA), progress=told.append)
    whole = relax(model, x, steps, keep=kept)
    assert found.steps == steps
    assert told == sorted(told)
    assert all(torch.equal(a, b) for a, b in zip(found.state, whole.state, strict=True))
    assert len(found.trail) == len(whole.trail) == kept
    for mine, theirs in zip(found.trail, whole.trail, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_the_authors_convention_dilutes_by_dead_elements_and_blanks_early_steps() -> None:
    model = prototypical(3, "sigmoid")
    x, y = batch(model)
    x[:, 1] = 0.0
    paper, authors = (gdu.compare(model, COST, x, y, 8, K, BETA, Options(convention=c)) for c in (PAPER, AUTHORS))
    for group, m in paper.synapses.items():
        alive = m.elements - m.left_out
        assert authors.synapses[group].rmse == pytest.approx(m.rmse * alive / m.elements, rel=1e-12)
        assert authors.synapses[group].left_out == m.left_out
    assert paper.synapses["W23"].left_out == 5
    # The free phase is short, so that EP's neurons drift before any signal can have reached them.
    assert authors.neurons["s0"].rmse == pytest.approx(paper.neurons["s0"].rmse, rel=1e-12)
    assert authors.neurons["s2"].rmse < paper.neurons["s2"].rmse


def test_traces_are_those_of_one_sample() -> None:
    model = prototypical(2, "sigmoid")
    x, y = batch(model)
    x[:, 2] = 0.0
    report = gdu.compare(model, COST, x, y, T, K, BETA, Options(shown=3))
    free = relax(model, x[:1], T, keep=K)
    ep = EP(T, K, beta=BETA).processes(model, COST, x[:1], y[:1], free)
    bptt = BPTT(T, K).processes(model, COST, x[:1], y[:1], free)
    trace = report.traces["synapses"]["W12"]
    assert len(trace.elements) == len(trace.ep) == len(trace.bptt) == 3
    for position, f, g in zip(trace.elements, trace.ep, trace.bptt, strict=True):
        where = (slice(None), *position)
        assert torch.allclose(torch.tensor(f, dtype=F64), ep.synapses["W12"][where], atol=1e-10, rtol=0)
        assert torch.allclose(torch.tensor(g, dtype=F64), -bptt.synapses["W12"][where], atol=1e-10, rtol=0)
        assert position[1] != 2, "a synapse from a pixel that is always 0 has no process to show"
    layer = report.traces["neurons"]["s1"]
    root = ep.neurons[1][:, 0].square().mean(-1).sqrt()
    assert torch.allclose(torch.tensor(layer.rms_ep, dtype=F64), root, atol=1e-10, rtol=0)


def test_the_toy_record_keeps_what_the_theorem_promises() -> None:
    """Every group within 2e-2 at the paper's beta, and ten times less at a tenth of it."""
    session = bind("toy", preset="gdu", dtype=F64, trains=False)
    of, phases = session.problem(), session.spec.phases
    coarse, fine = (
        gdu.compare(of.model, of.cost, of.x, of.y, phases.T, phases.K, b) for b in (phases.beta, phases.beta / 10)
    )
    assert coarse.residual.max < 1e-12
    for kind in ("neurons", "synapses"):
        for name, m in getattr(coarse, kind).items():
            assert m.rmse <= 2e-2
            assert m.rmse / getattr(fine, kind)[name].rmse == pytest.approx(10.0, rel=FIRST_ORDER)
    assert "finite beta" in coarse.verdict
    assert coarse.budget.outcome == "holds"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", small_nets())
def test_a_cuda_device_finds_the_same(name: str) -> None:
    model = small_nets()[name]
    x, y = batch(model)
    here = gdu.compare(model, COST, x, y, T, K, BETA)
    there = gdu.compare(model.cuda(), COST, x.cuda(), y.cuda(), T, K, BETA)
    for kind in ("neurons", "synapses", "biases"):
        for group, m in getattr(here, kind).items():
            assert getattr(there, kind)[group].rmse == pytest.approx(m.rmse, rel=1e-6, abs=1e-9)
    assert there.budget.spectral_radius == pytest.approx(here.budget.spectral_radius, rel=1e-6)
    assert there.budget.asymmetry == pytest.approx(here.budget.asymmetry, rel=1e-6, abs=1e-12)


def test_rounding_is_told_apart_in_float32() -> None:
    """At a tiny beta it is nearly all of the error, at a large one nearly nothing."""
    model = toy(dtype=torch.float32)
    x, y = (v.float() for v in batch(model))
    fine, coarse = (gdu.compare(model, COST, x, y, T, K, beta).budget.synapses for beta in (1e-5, 0.1))
    assert fine.largest()[0] == "rounding"
    assert fine.rounding > 0.9 * fine.rmse
    assert coarse.largest()[0] == "finite_beta"
    assert coarse.rounding < 1e-3 * coarse.finite_beta
    exact = gdu.compare(toy(), COST, x.double(), y.double(), T, K, 0.1).budget.synapses
    assert coarse.finite_beta == pytest.approx(exact.finite_beta, rel=1e-3)
    for moment in dissect(Problem(model, COST, x, y), relax(model, x, T, keep=K), EP(T, K, 1e-4)):
        for name, g in moment.bptt.synapses.items():
            parts = sum(p.synapses[name].double() for p in moment.parts.values())
            gap = parts - (moment.ep.synapses[name].double() - g.double())
            assert float(gap.abs().max()) < 1e-5


def silencing(bias: float) -> Dynamics:
    """A net with hard-sigmoid hidden neurons, half of which a bias holds at 1."""
    model = Layered((3, 8, 4), "prototypical", "hard-sigmoid", init="default", seed=0, dtype=F64)
    with torch.no_grad():
        model.b0.fill_(0.5)
        model.W01.mul_(0.2)
        model.W12.mul_(0.2)
        model.b1.copy_(torch.tensor([bias] * 4 + [0.5] * 4))
    return model


def test_neurons_that_hear_bptt_and_not_ep_are_counted() -> None:
    """sigma' stops EP's update of a neuron, and not BPTT's gradient by its state."""
    model = silencing(5.0)
    x, y = batch(model)
    found = gdu.compare(model, COST, x, y, T, K, BETA).silenced
    problem, free, ep = case_of(model)
    of = (model, COST, problem.x, problem.y, free)
    f, g = (e.processes(*of).neurons for e in (ep, BPTT(T, K)))
    for n, (name, silence) in enumerate(found.items()):
        zero = [(layer == 0.0).all(0) for layer in (f[n], g[n])]
        assert silence.unheard == int((zero[0] & ~zero[1]).sum())
        assert silence.neurons == zero[0].numel()
        assert name == f"s{n}"
    assert found["s0"].saturated == found["s0"].unheard == 0
    held = found["s1"]
    assert (held.saturated, held.unheard, held.unheard_saturated, held.neurons) == (
        4 * len(x),
        *[4 * len(x)] * 2,
        8 * len(x),
    )
    free_net = gdu.compare(silencing(0.5), COST, x, y, T, K, BETA)
    assert all(silence.unheard == silence.saturated == 0 for silence in free_net.silenced.values())


def test_theorem_1_holds_in_float32_at_a_beta_that_rounding_hides_from_the_plain_form() -> None:
    model = toy().float()
    x, y = (v.float() for v in batch(model))
    found, plain = (
        gdu.compare(model, COST, x, y, 400, 20, 1e-5, Options(form=form, shown=0)).synapses  # type: ignore[arg-type]
        for form in ("difference", "plain")
    )
    assert max(m.rmse for m in found.values()) < 1e-3
    assert min(m.rmse or 1.0 for m in plain.values()) > 1e-2


def test_the_parts_add_up_in_the_difference_form_too() -> None:
    name = next(iter(small_nets()))
    problem, free, ep = case_of(small_nets()[name], beta=0.1, steps=12)
    ep = replace(ep, form="difference")
    for moment in dissect(problem, free, ep):
        for group in groups(problem.model, free.state):
            parts = [batch_mean(p, group) for p in moment.parts.values() if p.neurons or group.kind != "neurons"]
            gap = batch_mean(moment.ep, group) - batch_mean(moment.bptt, group)
            assert float((sum(parts) - gap).abs().max()) < SAME_FORMULA
