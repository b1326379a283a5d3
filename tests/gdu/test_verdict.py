"""The verdict of `gdu.compare` on models of a user's own: the right cause, a remedy that cures, no false alarm."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.ailing_nets import AILING, HEALTHY, SAMPLES, Draw
from torch import Tensor, nn

from eqprop import EP, PrimitiveDynamics, SquaredError, doctor, from_energy, from_primitive, from_transition, gdu
from eqprop.gdu import NeverSettlesError, Options
from eqprop.gdu.budget import ErrorParts, sentence
from eqprop.gdu.comparison import Report
from eqprop.gdu.verdict import Diagnosis
from eqprop.state import State

COST = SquaredError()
QUIET = Options(shown=0)


def of(name: str, **other: Any) -> Report:
    """The comparison on a planted cause, at its own settings and few steps."""
    case = (AILING | HEALTHY)[name](5)
    options = Options(shown=0, **other)
    K = min(case.ep.K, case.ep.T, 40)
    return gdu.compare(case.model, case.cost, case.x, case.y, case.ep.T, K, float(case.ep.beta), options)


def test_a_slow_hopfield_net_is_given_another_form_and_a_longer_free_phase_that_cures_it() -> None:
    report = of("slow_hopfield")
    assert report.budget.outcome != "holds"
    assert "The state still drifts while it is nudged" in report.verdict
    assert "Use EP(form='difference', ...) (tried on this batch: the cosine" in report.verdict
    assert "drop" not in report.verdict
    assert "alternating" not in report.verdict
    T = int(re.search(r"Or raise T to (\d+)\.", report.verdict)[1])
    case = AILING["slow_hopfield"](5)
    cured = gdu.compare(case.model, COST, case.x, case.y, T, 20, case.ep.beta, QUIET)
    assert cured.budget.outcome == "holds"


def test_predictive_coding_that_overshoots_is_given_half_its_step() -> None:
    case = AILING["step_overshoots"](5)
    verdict = gdu.compare(case.model, COST, case.x, case.y, 100, 20, 0.02, QUIET).verdict
    assert re.search(r"The step is too large.*Use .*eps=0\.15 in the model \(tried on this batch: the cosine", verdict)


def test_where_no_sample_settles_the_error_says_what_does() -> None:
    model = from_transition(lambda x, s, theta: (1.0 - s[0] * theta["w"],), {"w": torch.ones(2)}, (2,))
    with pytest.raises(NeverSettlesError, match=r"None of the 4.*goes back and forth.*s \+ 0\.5 \(F\(s\) - s\)"):
        gdu.compare(model, COST, torch.rand(4, 3), torch.rand(4, 2), 100, 20, 0.02, QUIET)


def test_a_step_that_explodes_is_given_half_of_itself() -> None:
    with pytest.raises(ArithmeticError, match=r"The step is too large.*Use .*eps=0\.15 in the model"):
        of("step_explodes")


def readme_net() -> tuple[Tensor, Tensor, object]:
    """The snippet of README.md."""

    def phi(x: Tensor, s: State, theta: dict[str, Tensor]) -> Tensor:
        s0, s1 = s
        return ((s1 @ theta["W"].T) * s0).sum(-1) + (x * s1).sum(-1)

    draw = Draw(0)
    model = from_primitive(phi, {"W": 0.3 * draw.normal(2, 3)}, layers=(2, 3), squash=torch.tanh)
    return draw.uniform(SAMPLES, 3), draw.uniform(SAMPLES, 2, low=-0.5, high=0.5), model


def test_a_net_given_by_its_primitive_is_not_told_that_it_has_none() -> None:
    x, y, model = readme_net()
    verdict = gdu.compare(model, COST, x, y, T=150, K=10, beta=0.01).verdict
    assert "no primitive" not in verdict
    assert "derive" not in verdict
    assert "synapses do not feel" in verdict


def test_a_parameter_that_phi_does_not_read_is_named() -> None:
    report = of("parameter_outside_phi")
    assert report.budget.outcome == "fails"
    assert "Phi does not read a parameter: EP gives gain the gradient 0" in report.verdict
    case = AILING["parameter_outside_phi"](5)
    case.model.gain.requires_grad_(False)
    frozen = gdu.compare(case.model, COST, case.x, case.y, 300, 60, 0.01, QUIET)
    assert "gain" not in frozen.verdict


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_nets_are_not_accused(name: str) -> None:
    verdict = of(name).verdict
    assert "Use " not in verdict
    assert "Nothing has to change" in verdict or "Learning does not suffer" in verdict


@pytest.mark.parametrize(("cosine", "words"), [(0.25, "A step still leads down"), (0.9, "Learning does not suffer")])
def test_a_gradient_far_from_the_exact_one_is_not_called_harmless(cosine: float, words: str) -> None:
    parts = ErrorParts(0.5, None, 0.4, None, None, None, None)
    diagnosis = Diagnosis(None, {"gradient": f"a cosine of {cosine}"}, cosine=cosine)
    text = sentence("fails", parts, parts, diagnosis, has_primitive=True)
    assert words in text
    assert f": a cosine of {cosine}, the sums" in text


def test_a_strong_nudge_is_given_a_weaker_one() -> None:
    verdict = of("beta_too_large").verdict
    assert re.search(r"The nudge is too strong.*Use EP\(beta=0\.\d+, ...\)", verdict)


@pytest.mark.parametrize("with_primitive", [True, False])
def test_a_net_without_a_signal_has_nothing_to_compare(with_primitive: bool) -> None:
    """Neither a success nor a crash: at a target that the output meets, both gradients are zero."""

    def step(x: Tensor, s: State, theta: Any) -> State:
        return (torch.tanh(x @ theta["W"]),)

    def phi(x: Tensor, s: State, theta: Any) -> Tensor:
        return (s[0] * (x @ theta["W"])).sum(-1)

    theta = {"W": torch.eye(2, dtype=torch.float64)}
    model = (
        from_primitive(phi, theta, (2,), squash=torch.tanh) if with_primitive else from_transition(step, theta, (2,))
    )
    x = Draw(0).uniform(SAMPLES, 2).double()
    report = gdu.compare(model, COST, x, torch.tanh(x), T=20, K=5, beta=0.1)
    assert report.budget.outcome == "silent"
    assert report.verdict.startswith("No synapse carries a signal, so there is nothing to compare.")
    assert "holds" not in report.verdict
    assert "no synapse carries" in str(report).lower()


def test_a_model_that_stays_in_float32_is_told_so() -> None:
    """Rounding is measured in float64, which a tensor beside the parameters does not follow."""
    beside = torch.rand(3, 2)
    model = from_primitive(lambda x, s, theta: (s[0] * (x @ beside @ theta["W"])).sum(-1), {"W": torch.eye(2)}, (2,))
    with pytest.raises(ValueError, match=r"SquaredError cannot be computed in float64.*register_buffer.*float64"):
        gdu.compare(model, COST, torch.rand(4, 3), torch.rand(4, 2), T=20, K=5, beta=0.1)
    beside = beside.double()
    gdu.compare(model.double(), COST, torch.rand(4, 3).double(), torch.rand(4, 2).double(), T=20, K=5, beta=0.1)


def clamped(seed: int, kind: str) -> tuple[Any, Tensor, Tensor]:
    """An energy whose outputs a clip holds at its edge: by project, or by an activation with no slope there."""
    draw = Draw(seed)
    n = draw.whole(4, 7)

    def rho(v: Tensor) -> Tensor:
        return v.clamp(0.0, 1.0)

    def energy(x: Tensor, s: State, theta: Any) -> Tensor:
        r0, r1 = rho(s[0]), rho(s[1])
        leak = 0.5 * (s[0].square().sum(-1) + s[1].square().sum(-1))
        return leak - (r0 * (r1 @ theta["A"].T + theta["b"])).sum(-1) - (r1 * (x @ theta["B"].T)).sum(-1)

    b = torch.full((2,), draw.number(4.0, 6.0), dtype=torch.float64)
    theta = {"A": 0.3 * draw.normal(2, n), "B": 0.3 * draw.normal(n, 4), "b": b if kind == "top" else -b}
    model = from_energy(energy, theta, (2, n), eps=0.3, project=None if kind == "flat" else rho)
    return model, draw.uniform(SAMPLES, 4, low=0.0), draw.uniform(SAMPLES, 2, low=0.1, high=0.9)


@pytest.mark.parametrize("kind", ["top", "bottom", "flat"])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_that_pass_no_signal_are_the_cause(kind: str, seed: int) -> None:
    """BPTT's gradient is zero: neither the nudge's place nor its strength is to blame, and neither cures."""
    model, x, y = clamped(seed, kind)
    report = gdu.compare(model, COST, x, y, 300, 20, 0.01, QUIET)
    assert report.budget.outcome == "silent"
    assert "Saturated or clipped neurons pass no signal" in report.verdict
    assert "Begin with outputs inside the range" in report.verdict
    assert "Use " not in report.verdict
    assert "tried" not in report.verdict
    assert doctor(model, COST, x, y, EP(300, 20, 0.01)).cause == "silent"


def saturated_outputs(nudge_site: Any, at: float = 18.0) -> tuple[Any, Tensor, Tensor]:
    """Outputs tanh(18) = 1 - 4e-16."""
    draw = Draw(0)

    def phi(x: Tensor, s: State, theta: Any) -> Tensor:
        return (s[0] * (s[1] @ theta["A"].T + at)).sum(-1) + (s[1] * (x @ theta["B"].T)).sum(-1)

    theta = {"A": 0.1 * draw.normal(2, 3), "B": 0.3 * draw.normal(3, 4)}
    model = from_primitive(phi, theta, (2, 3), squash=torch.tanh, nudge_site=nudge_site)
    return model, draw.uniform(SAMPLES, 4), draw.uniform(SAMPLES, 2)


def test_rounding_is_no_signal_and_a_faint_signal_is_one() -> None:
    """What is left of a difference of states near 1 divided by beta is about 1e-14, and no error of 1."""
    model, x, y = saturated_outputs("inside")
    report = gdu.compare(model, COST, x, y, 200, 20, 0.01, QUIET)
    assert report.budget.outcome == "silent"
    assert all(m.rmse is None and m.left_out == m.elements for m in report.synapses.values())
    assert "tried" not in report.verdict
    model, x, y = saturated_outputs("inside", at=7.0)  # sigma' is 3e-6
    faint = gdu.compare(model, COST, x, y, 200, 20, 0.01, QUIET)
    assert faint.budget.outcome == "holds"
    assert faint.synapses["A"].left_out == 0
    assert faint.synapses["A"].norm < 1e-5


class Outputs(PrimitiveDynamics):
    """tanh of two outputs: one saturated and far from its target, one neither."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.tensor([[3.0, 3.0], [0.1, 0.1]], dtype=torch.float64))

    def init_state(self, x: Tensor) -> State:
        return (torch.zeros_like(x),)

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return (s[0] * (x @ self.W.T)).sum(-1)

    def squash(self, s: State) -> State:
        return (torch.tanh(s[0]),)


class OwnStep(Outputs):
    """The same, adding the nudge in a step of its own."""

    def step(self, drive: Any, s: State, push: Any = None) -> State:
        return super().step(drive, s, push)


def test_another_place_of_the_nudge_is_proposed_where_the_model_takes_it() -> None:
    x = torch.ones(SAMPLES, 2, dtype=torch.float64)
    y = torch.tensor([[-1.0, 0.19]], dtype=torch.float64).expand(SAMPLES, 2).contiguous()
    verdict = gdu.compare(Outputs(), COST, x, y, 50, 10, 0.01, QUIET).verdict
    assert "Use nudge_site='inside' (tried on this batch: the cosine to the exact gradient is then 1.000)" in verdict
    refused = gdu.compare(OwnStep(), COST, x, y, 50, 10, 0.01, QUIET).verdict
    assert "The nudge bypasses the activation" in refused
    assert "Use " not in refused
    assert "tried" not in refused
