"""What every model promises, whoever wrote it: a list of checks to run on any `Dynamics`.

    check_model(Case(model, x, y))

A check that does not apply to a model (there is no Phi, it is not bipartite) says so by returning at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.testing import assert_close

from eqprop import (
    BPTT,
    EP,
    RBP,
    ContinualEP,
    Cost,
    Dynamics,
    Estimator,
    HolomorphicEP,
    PrimitiveDynamics,
    SquaredError,
    limit_steps,
    relax,
)
from eqprop.estimators.asymmetric import AsymEP, VectorField
from eqprop.estimators.base import transition_vjp
from eqprop.estimators.dyadic import Dyadic
from eqprop.state import State, add
from helpers.nets import F64, at_rest, gather, named, sums
from helpers.tolerances import FLOAT32, HOLOMORPHIC, SAME_FORMULA

K = 4


@dataclass(frozen=True)
class Case:
    """A model in float64, inputs and targets for it, and the seed of the states it is tried at."""

    model: Dynamics
    x: Tensor
    y: Tensor
    cost: Cost = field(default_factory=SquaredError)
    seed: int = 0

    def state(self, which: int = 0) -> State:
        """A random state inside (0, 1), where every activation has a slope."""
        source = torch.Generator().manual_seed(self.seed + which)
        return tuple(
            0.1 + 0.8 * torch.rand(layer.shape, generator=source, dtype=F64) for layer in self.model.init_state(self.x)
        )

    @property
    def samples_at(self) -> int:
        """The dimension that numbers samples: 0, or 1 when networks are stacked."""
        return self.model.sample_dims(self.x) - 1


def same(actual: object, expected: object) -> None:
    assert_close(actual, expected, rtol=SAME_FORMULA, atol=SAME_FORMULA)


def has_phi(model: Dynamics) -> TypeGuard[PrimitiveDynamics]:
    """Not where feedback has gains or weights of its own."""
    return isinstance(model, PrimitiveDynamics) and model.conservative


def the_state_is_laid_out_as_promised(case: Case) -> None:
    start = case.model.init_state(case.x)
    assert isinstance(start, tuple)
    lead = case.x.shape[: case.samples_at + 1]
    for layer in start:
        assert layer.shape[: len(lead)] == lead
        assert layer.dim() > len(lead)
        assert layer.dtype == case.x.dtype
        assert bool(torch.isfinite(layer).all())
    names = case.model.layer_names
    assert names is None or len(names) == len(set(names)) == len(start)


def the_model_keeps_no_state(case: Case) -> None:
    model, before = case.model, copy.deepcopy(case.model.state_dict())
    attributes = set(vars(model))
    first = relax(model, case.x, 5)
    relax(model, case.x, 3, case.state())
    again = relax(model, case.x, 5)
    same(again.state, first.state)
    assert set(vars(model)) == attributes
    same(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())


def a_step_is_the_transition(case: Case) -> None:
    model, s = case.model, case.state()
    with torch.no_grad():
        after = model.transition(case.x, s)
        same(model.step(model.drive(case.x), s), after)
        assert [v.shape for v in after] == [v.shape for v in s]
        same(relax(model, case.x, 1, s).state, after)


def the_push_comes_after_squash_and_before_projection(case: Case) -> None:
    """Or, where the model says so, inside squash."""
    model, s, pushed = case.model, case.state(), case.state(1)
    push = (0.3 * pushed[0], *[None] * (len(s) - 1))
    with torch.no_grad():
        drive = model.drive(case.x)
        if isinstance(model, PrimitiveDynamics):
            inputs = model.gradient(drive, s)
            inside = model.nudge_site != "outside"
            expected = model.project(model.squash(add(inputs, push)) if inside else add(model.squash(inputs), push))
        else:
            expected = add(model.transition(case.x, s), push)
        same(model.step(drive, s, push), expected)


def samples_do_not_mix(case: Case) -> None:
    model, s, dim = case.model, case.state(), case.samples_at
    with torch.no_grad():
        together = model.transition(case.x, s)
        for n in range(case.x.shape[dim]):
            alone = model.transition(case.x.narrow(dim, n, 1), tuple(v.narrow(dim, n, 1) for v in s))
            same(alone, tuple(v.narrow(dim, n, 1) for v in together))


def the_gradient_is_the_autodiff_of_phi(case: Case) -> None:
    model, s = case.model, case.state()
    if has_phi(model):
        with torch.no_grad():
            same(model.gradient(model.drive(case.x), s), model.autodiff_gradient(case.x, s))


def the_contrast_is_the_autodiff_of_phi(case: Case) -> None:
    model, a, b = case.model, case.state(), case.state(1)
    if has_phi(model):
        contrast = model.contrast(case.x, a, b)
        same(contrast, model.autodiff_contrast(case.x, a, b))
        assert contrast.keys() == dict(model.named_parameters()).keys()
        assert all(float(g.detach().abs().max()) == 0.0 for g in model.contrast(case.x, a, a).values())


def the_contrast_is_a_mean_over_samples(case: Case) -> None:
    model, a, b, dim = case.model, case.state(), case.state(1), case.samples_at
    if isinstance(model, PrimitiveDynamics):
        count = case.x.shape[dim]
        single = [
            model.contrast(*(_sample(v, dim, n) for v in (case.x, a, b)))  # type: ignore[arg-type]
            for n in range(count)
        ]
        mean = {name: sum(c[name] for c in single) / count for name in single[0]}
        same(model.contrast(case.x, a, b), mean)


def _sample(v: Tensor | State, dim: int, n: int) -> Tensor | State:
    return v.narrow(dim, n, 1) if isinstance(v, Tensor) else tuple(layer.narrow(dim, n, 1) for layer in v)


def forward_and_reverse_derivatives_agree(case: Case) -> None:
    """v . (J u) = (J^T v) . u, sample by sample."""
    s, u, v = case.state(), case.state(1), case.state(2)
    forward, (backward, _) = forward_derivative(case, s, u), transition_vjp(case.model, case.x, s, v)
    same(dot(case, v, forward), dot(case, backward, u))


def the_jacobian_is_symmetric_where_f_is_the_gradient_of_phi(case: Case) -> None:
    if not has_phi(case.model) or not _plain(case.model, case.state()):
        return
    s, u, v = case.state(), case.state(1), case.state(2)
    same(dot(case, v, forward_derivative(case, s, u)), dot(case, u, forward_derivative(case, s, v)))


def _plain(model: PrimitiveDynamics, s: State) -> bool:
    """Whether squash and projection leave every state alone, tried where they would not."""
    far = tuple(5.0 * layer for layer in s)
    changed = (*model.squash(far), *model.project(far))
    return all(torch.equal(a, b) for a, b in zip(changed, (*far, *far), strict=True))


def forward_derivative(case: Case, s: State, u: State) -> State:
    with torch.no_grad(), forward_ad.dual_level():
        dual = tuple(forward_ad.make_dual(a, b) for a, b in zip(s, u, strict=True))
        out = [forward_ad.unpack_dual(v) for v in case.model.step(case.model.drive(case.x), dual)]
        return tuple(torch.zeros_like(v.primal) if v.tangent is None else v.tangent.clone() for v in out)


def dot(case: Case, a: State, b: State) -> Tensor:
    """The scalar product over each sample's neurons."""
    lead = case.samples_at + 1
    return torch.stack([(p * q).flatten(lead).sum(-1) for p, q in zip(a, b, strict=True)]).sum(0)


def layers_of_one_parity_see_only_the_others(case: Case) -> None:
    model, s = case.model, case.state()
    if not model.bipartite:
        return
    after = model.transition(case.x, s)
    for parity in (0, 1):
        half = model.half_step(model.drive(case.x), s, parity)
        expected = tuple(a if n % 2 == parity else v for n, (a, v) in enumerate(zip(after, s, strict=True)))
        same(half, expected)
        # No derivative from a layer to its own parity.
        u = tuple(v if n % 2 == parity else torch.zeros_like(v) for n, v in enumerate(case.state(1)))
        moved = forward_derivative(case, s, u)
        assert all(float(v.abs().max()) == 0.0 for n, v in enumerate(moved) if n % 2 == parity)


def estimators_are_the_sums_of_their_steps(case: Case) -> None:
    model, cost, x, y = case.model, case.cost, case.x, case.y
    free = relax(model, x, 20, keep=K)
    starts = dict.fromkeys(forms_of_ep(case, T=0), free.state)
    starts |= {BPTT(T=K, K=K): free.trail[-K], RBP(0, K, checked=False): free.state}
    for estimator, start in starts.items():
        _, grads = estimator.gradient(model, cost, x, y, start)
        total = sums(gather(estimator.steps(model, cost, x, y, free)))
        same(named(model, grads), {name: estimator.orientation * value for name, value in total.items()})
        assert named(model, grads).keys() == dict(model.named_parameters()).keys()


def forms_of_ep(case: Case, T: int, rates: float | dict[str, float] = 0.02) -> list[Estimator]:
    """Every form of EP that serves the model; holomorphic EP does where it is analytic, and says so elsewhere."""
    forms: list[Estimator] = [VectorField(T, K), AsymEP(T, K), Dyadic(T, K)]
    if isinstance(case.model, PrimitiveDynamics) and not case.model.conservative:
        return forms  # without Phi the update of EP is one-sided, and no sum over steps
    forms += [EP(T, K), EP(T, K, nudging="symmetric"), ContinualEP(T, K, rates=rates)]
    holomorphic = HolomorphicEP(T, K, points=3)
    return [*forms, holomorphic] if is_analytic(case, holomorphic) else forms


def is_analytic(case: Case, holomorphic: HolomorphicEP) -> bool:
    try:
        holomorphic.check_serves(case.model, case.cost, case.x, case.y)
    except ValueError as error:
        if "needs an analytic model and cost" not in str(error):
            raise
        return False
    return True


def holomorphic_ep_is_the_limit_of_small_beta(case: Case) -> None:
    """Also away from a steady state, where Phi telescopes: what moves without the nudge drops out of the circle."""
    model, cost, x, y = case.model, case.cost, case.x, case.y
    holomorphic = HolomorphicEP(T=0, K=K, beta=1e-3, points=6)
    if not has_phi(model) or not is_analytic(case, holomorphic):
        return
    free = relax(model, x, 20)
    _, grads = holomorphic.gradient(model, cost, x, y, free.state)
    limit = sums(gather(limit_steps(model, cost, x, y, free, K)))
    assert_close(named(model, grads), {name: -g for name, g in limit.items()}, rtol=HOLOMORPHIC, atol=HOLOMORPHIC)


def recurrent_backprop_is_bptt_at_rest(case: Case) -> None:
    args = (case.model, case.cost, case.x, case.y, at_rest(relax(case.model, case.x, 20), K))
    rbp, bptt = gather(RBP(T=0, K=K).steps(*args)), gather(BPTT(T=K, K=K).steps(*args))
    same(rbp.neurons, bptt.neurons)
    same(rbp.synapses, bptt.synapses)


def a_frozen_parameter_is_left_alone(case: Case) -> None:
    args = (case.cost, case.x, case.y)
    frozen = copy.deepcopy(case.model)
    first = next(name for name, _ in frozen.named_parameters())
    frozen.get_parameter(first).requires_grad_(False)
    rates = {name: 0.0 if name == first else 0.02 for name, _ in frozen.named_parameters()}
    for estimator in (*forms_of_ep(case, T=5, rates=rates), BPTT(T=5, K=K), RBP(T=5, K=K, checked=False)):
        estimator.backward(frozen, *args)
        _, grads = estimator.gradient(case.model, *args)
        expected = {name: g for name, g in named(case.model, grads).items() if name != first}
        same({name: p.grad for name, p in frozen.named_parameters() if p.grad is not None}, expected)
        frozen.zero_grad()


def single_precision_follows(case: Case) -> None:
    model, s = copy.deepcopy(case.model).float(), case.state()
    with torch.no_grad():
        rough = model.transition(case.x.float(), tuple(v.float() for v in s))
        assert all(v.dtype == torch.float32 for v in rough)
        exact = case.model.transition(case.x, s)
    assert_close(tuple(v.double() for v in rough), exact, rtol=FLOAT32, atol=FLOAT32)


CHECKS: tuple[Callable[[Case], None], ...] = (
    the_state_is_laid_out_as_promised,
    the_model_keeps_no_state,
    a_step_is_the_transition,
    the_push_comes_after_squash_and_before_projection,
    samples_do_not_mix,
    the_gradient_is_the_autodiff_of_phi,
    the_contrast_is_the_autodiff_of_phi,
    the_contrast_is_a_mean_over_samples,
    forward_and_reverse_derivatives_agree,
    the_jacobian_is_symmetric_where_f_is_the_gradient_of_phi,
    layers_of_one_parity_see_only_the_others,
    estimators_are_the_sums_of_their_steps,
    holomorphic_ep_is_the_limit_of_small_beta,
    recurrent_backprop_is_bptt_at_rest,
    a_frozen_parameter_is_left_alone,
    single_precision_follows,
)


def check_model(case: Case) -> None:
    """Run every check."""
    for check in CHECKS:
        check(case)
