"""Every equation of the paper by hand, beside what the package computes; in float64, on small nets without biases.

python -m benchmarks.equations          prints how far they are apart, by label
python -m benchmarks.equations --write  and writes results/claims/equations.json

The hand-written side uses torch alone: loops over indices for convolutions, autograd for derivatives of functions that
are written here. One long file, because it follows the paper from (1) to Algorithm 2. `exact` holds relative
differences, `order` the power of beta by which a difference falls, `gap` differences that are meant to be there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor
from torch.func import jvp

import eqprop
from benchmarks.collect import rounded, write_compact
from eqprop import BPTT, EP, RBP, CrossEntropy, Dynamics, SquaredError
from eqprop.cost import Nudge, Problem
from eqprop.models import Convolutional, Layered, Toy
from eqprop.models.activations import activation
from eqprop.models.convolutional import Window, conv, conv_transpose, max_pool
from eqprop.provenance import provenance
from eqprop.relax import Relaxation, relax

OUT = Path(__file__).resolve().parents[1] / "results" / "claims" / "equations.json"
T, K, BETA, EPS, LONG = 30, 6, 0.1, 0.3, 600
SIZES = (3, 6, 5, 4)
KERNEL, POOL = 3, 2
State = tuple[Tensor, ...]
Theta = dict[str, Tensor]
Checks = dict[str, Callable[[], float]]

EXACT: Checks = {}
ORDER: Checks = {}
GAP: Checks = {}


def check(table: Checks, *labels: str) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Decorator: this function measures these equations."""

    def add(function: Callable[[], float]) -> Callable[[], float]:
        table.update(dict.fromkeys(labels, function))
        return function

    return add


def gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference over the largest number; ZeroDivisionError where zeros would be compared with zeros."""
    size = max(float(v.detach().abs().max()) for v in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs) / size


def order_of(error: Callable[[float], float]) -> float:
    """The power of beta by which an error falls."""
    return math.log10(error(1e-3) / error(1e-4))


grad = partial(torch.autograd.grad, retain_graph=True, allow_unused=True, materialize_grads=True)


SOURCE = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=SOURCE, dtype=torch.float64)


COST = SquaredError()
X, Y = draw(4, SIZES[-1]), draw(4, SIZES[0])
TOY = Toy((SIZES[0], SIZES[1], SIZES[-1]), "tanh", eps=EPS, bias=False, seed=0, dtype=torch.float64)
EB = Layered(SIZES, "energy-based", "tanh", eps=EPS, bias=False, init="default", seed=0, dtype=torch.float64)
P = Layered(SIZES, "prototypical", "tanh", bias=False, init="default", seed=0, dtype=torch.float64)
LINEAR = Layered(SIZES, "prototypical", lambda v: v, bias=False, init="default", seed=0, dtype=torch.float64)


class General(Dynamics):
    """s <- tanh(A s + B x) with an A that is not symmetric: no primitive function."""

    def __init__(self) -> None:
        super().__init__()
        self.A = torch.nn.Parameter((draw(5, 5) - 0.5) * 0.8)
        self.B = torch.nn.Parameter(draw(5, SIZES[-1]) - 0.5)

    def init_state(self, x: Tensor) -> State:
        return x.new_zeros(len(x), 3), x.new_zeros(len(x), 2)

    def transition(self, x: Tensor, s: State) -> State:
        return general(x, s, {"A": self.A, "B": self.B})


def general(x: Tensor, s: State, theta: Theta) -> State:
    new = torch.tanh(torch.cat(s, -1) @ theta["A"].T + x @ theta["B"].T)
    return new[:, :3], new[:, 3:]


GENERAL = General()


def theta_of(model: torch.nn.Module) -> Theta:
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def ell(s: State) -> Tensor:
    """l = |s0 - y|^2 / 2, summed over the batch."""
    return 0.5 * ((s[0] - Y) ** 2).sum()


def pull(s: State) -> State:
    return (s[0] - Y, *(torch.zeros_like(v) for v in s[1:]))


def toy_energy(x: Tensor, s: State, theta: Theta) -> Tensor:
    r0, r1, rx = torch.tanh(s[0]), torch.tanh(s[1]), torch.tanh(x)
    joined = (r0 * (r1 @ theta["W01"].T + rx @ theta["W0x"].T)).sum() + (r1 * (rx @ theta["W1x"].T)).sum()
    return 0.5 * sum((v * v).sum() for v in s) - joined


def toy_phi(x: Tensor, s: State, theta: Theta) -> Tensor:
    return 0.5 * sum((v * v).sum() for v in s) - EPS * toy_energy(x, s, theta)


def slope(phi: Callable[..., Tensor], x: Tensor, s: State, theta: Theta) -> State:
    """dPhi/ds."""
    with torch.enable_grad():
        leaves = tuple(v if v.requires_grad else v.detach().requires_grad_() for v in s)
        return grad(phi(x, leaves, theta), leaves, create_graph=True)


def toy(x: Tensor, s: State, theta: Theta) -> State:
    return slope(toy_phi, x, s, theta)


def zeros(model: Dynamics) -> State:
    return model.init_state(X)


def loop(step: Callable[[State], State], s: State, steps: int) -> list[State]:
    states = [s]
    for _ in range(steps):
        states.append(tuple(v.detach() for v in step(states[-1])))
    return states


def nudged(F: Callable[..., State], theta: Theta, scale: float, beta: float = BETA) -> Callable[[State], State]:
    """s -> F(x, s) - beta dl/ds."""
    return lambda s: tuple(f - beta * scale * d for f, d in zip(F(X, s, theta), pull(s), strict=True))


def settled(model: Dynamics, steps: int = LONG, keep: int = K) -> Relaxation:
    return relax(model, X, steps, keep=keep)


def minus(s: Sequence[Tensor]) -> State:
    return tuple(-v for v in s)


def contrast(phi: Callable[..., Tensor], after: State, before: State, theta: Theta) -> list[Tensor]:
    """dPhi/dtheta(after) - dPhi/dtheta(before), the batch mean."""
    parameters = tuple(theta.values())
    ends = [grad(phi(X, s, theta), parameters) for s in (after, before)]
    return [(a - b) / len(X) for a, b in zip(*ends, strict=True)]


# The first phase, the second phase, the loss


@check(EXACT, "eq:1st-phase", "(7)", "eq:discrete-time-dynamics", "eq:gradient-field")
def first_phase() -> float:
    theta = theta_of(TOY)
    return gap(relax(TOY, X, T).state, loop(lambda s: toy(X, s, theta), zeros(TOY), T)[-1])


@check(EXACT, "eq:2nd-phase")
def second_phase() -> float:
    start = settled(TOY).state
    found = relax(TOY, X, K, start, Nudge(COST, Y, BETA)).state
    return gap(found, loop(nudged(toy, theta_of(TOY), EPS), start, K)[-1])


@check(EXACT, "second-steady-state")
def second_steady_state() -> float:
    """The residual; infinite where the nudge did not move the outputs away from the first steady state."""
    first = settled(TOY).state
    second = relax(TOY, X, LONG, first, Nudge(COST, Y, BETA))
    moved = gap(second.state[:1], first[:1]) > BETA**2
    return float(second.residual.max()) if moved else math.inf


@check(EXACT, "eq:proof3-1")
def any_second_phase() -> float:
    start = settled(GENERAL).state
    found = relax(GENERAL, X, K, start, Nudge(COST, Y, BETA)).state
    return gap(found, loop(nudged(general, theta_of(GENERAL), 1.0), start, K)[-1])


@check(EXACT, "eq:definition-L", "eq:aux1")
def loss() -> float:
    theta = theta_of(TOY)
    by_hand = ell(loop(lambda s: toy(X, s, theta), zeros(TOY), T)[-1])
    return gap([COST(relax(TOY, X, T).state, Y).sum()], [by_hand])


# BPTT


def unfolded(F: Callable[..., State], model: Dynamics, steps: int) -> tuple[list[State], list[Theta]]:
    """The states s_0 ... s_T with a parameter of its own for each step: copies[t] leads from s_t to s_{t+1}."""
    copies = [theta_of(model) for _ in range(steps)]
    states = [tuple(v.clone().requires_grad_() for v in zeros(model))]
    for theta in copies:
        states.append(F(X, states[-1], theta))
    return states, copies


def by_hand(steps: int, count: int) -> list[tuple[State, list[Tensor]]]:
    """nabla_s(t) and nabla_theta(t) of the toy model, t = 0 ... count - 1, in the index of the main text."""
    states, copies = unfolded(toy, TOY, steps)
    L = ell(states[-1])
    found = []
    for t in range(count):
        own = states[-1 - t]
        neurons = grad(L, own)
        synapses = grad(L, tuple(copies[-1 - t].values()))
        found.append((neurons, [g / len(X) for g in synapses]))
    return found


def of_package(steps: int, count: int) -> list[tuple[State, list[Tensor]]]:
    taken = BPTT(steps, count).steps(TOY, COST, X, Y, relax(TOY, X, steps, keep=count))
    return [(s.neurons, list(s.synapses.values())) for s in taken]


@check(EXACT, "prop:bptt", "eq:aux2")
def bptt() -> float:
    pairs = zip(of_package(T, K), by_hand(T, K), strict=True)
    return max(max(gap(a[0], b[0]), gap(a[1], b[1])) for a, b in pairs)


def recurrence(steps: int, count: int, steady: bool) -> tuple[float, float]:
    """How far nabla(t) is from (dF)^T nabla(t - 1), for neurons and for parameters; at the last state if steady."""
    theta, trail = theta_of(TOY), loop(lambda s: toy(X, s, theta_of(TOY)), zeros(TOY), steps)
    found, states, synapses = of_package(steps, count), [], []
    for t in range(1, count):
        at = trail[-1] if steady else trail[-1 - t]
        leaves = tuple(v.clone().requires_grad_() for v in at)
        pulled = grad(toy(X, leaves, theta), (*leaves, *theta.values()), found[t - 1][0])
        states.append(gap(found[t][0], pulled[: len(at)]))
        synapses.append(gap(found[t - 1][1], [g / len(X) for g in pulled[len(at) :]]))
    return max(states), max(synapses)


@check(EXACT, "eq:bptt-state")
def bptt_state() -> float:
    return recurrence(T, K, steady=False)[0]


@check(EXACT, "eq:bptt-param")
def bptt_param() -> float:
    return recurrence(T, K, steady=False)[1]


@check(EXACT, "eq:bptt-steady-condition")
def steady_condition() -> float:
    free = settled(TOY)
    return max(gap(s, free.state) for s in free.trail)


@check(EXACT, "eq:bptt-steady-init")
def steady_init() -> float:
    return gap(of_package(LONG, K)[0][0], pull(settled(TOY).state))


@check(EXACT, "eq:bptt-steady-state")
def steady_state() -> float:
    return recurrence(LONG, K, steady=True)[0]


@check(EXACT, "eq:bptt-steady-param")
def steady_param() -> float:
    return recurrence(LONG, K, steady=True)[1]


@check(EXACT, "cor:bptt-steady-state")
def corollary() -> float:
    return max(steady_init(), steady_state(), steady_param())


def shared_gradient() -> list[Tensor]:
    """dL/dtheta with one theta for all steps, the batch mean."""
    theta, s = theta_of(TOY), zeros(TOY)
    s = tuple(v.clone().requires_grad_() for v in s)
    for _ in range(T):
        s = toy(X, s, theta)
    return [g / len(X) for g in grad(ell(s), tuple(theta.values()))]


@check(EXACT, "eq:total-gradient")
def total_gradient() -> float:
    states, copies = unfolded(toy, TOY, T)
    each = grad(ell(states[-1]), [p for theta in copies for p in theta.values()])
    size = len(copies[0])
    summed = [sum(each[n::size], torch.zeros(())) / len(X) for n in range(size)]
    return gap(summed, shared_gradient())


@check(EXACT, "bptt-grad")
def summed_process() -> float:
    synapses = [step[1] for step in of_package(T, T)]
    summed = [torch.stack(own).sum(0) for own in zip(*synapses, strict=True)]
    found = list(BPTT(T, T).gradient(TOY, COST, X, Y)[1].values())
    return max(gap(summed, shared_gradient()), gap(found, shared_gradient()))


# EP


def ep_steps(model: Dynamics, beta: float = BETA) -> list[tuple[State, list[Tensor]]]:
    taken = EP(LONG, K, beta).steps(model, COST, X, Y, settled(model))
    return [(s.neurons, list(s.synapses.values())) for s in taken]


def second_states(F: Callable[..., State], model: Dynamics, scale: float, beta: float = BETA) -> list[State]:
    return loop(nudged(F, theta_of(model), scale, beta), settled(model).state, K)


@check(EXACT, "eq:delta-ep", "eq:ep-weight-update-2")
def updates() -> float:
    states, theta, unit = second_states(toy, TOY, EPS), theta_of(TOY), 1 / (BETA * EPS)
    errors = []
    for (neurons, synapses), (before, after) in zip(ep_steps(TOY), pairwise(states), strict=True):
        errors.append(gap(neurons, [unit * (a - b) for a, b in zip(after, before, strict=True)]))
        errors.append(gap(synapses, [unit * g for g in contrast(toy_phi, after, before, theta)]))
    return max(errors)


@check(EXACT, "eq:ep-grad2")
def telescoping() -> float:
    summed = [torch.stack(own).sum(0) for own in zip(*(step[1] for step in ep_steps(TOY)), strict=True)]
    return gap(minus(summed), list(EP(LONG, K, BETA).gradient(TOY, COST, X, Y)[1].values()))


@check(ORDER, "eq:ep-grad")
def limit_of_gradient() -> float:
    exact = list(RBP(LONG, LONG).gradient(TOY, COST, X, Y)[1].values())
    return order_of(lambda beta: gap(list(EP(LONG, LONG, beta).gradient(TOY, COST, X, Y)[1].values()), exact))


def theorem_error(kind: int, beta: float) -> float:
    pairs = zip(ep_steps(TOY, beta), of_package(LONG, K), strict=True)
    return max(gap(ep[kind], minus(nabla[kind])) for ep, nabla in pairs)


@check(ORDER, "thm:main")
def theorem_for_neurons() -> float:
    return order_of(lambda beta: theorem_error(0, beta))


@check(ORDER, "eq:thm-main")
def theorem_for_synapses() -> float:
    return order_of(lambda beta: theorem_error(1, beta))


def any_updates() -> tuple[float, float]:
    """Neural and weight updates of a transition function without a primitive."""
    states, neurons, synapses = second_states(general, GENERAL, 1.0), [], []
    for (found, weights), (before, after) in zip(ep_steps(GENERAL), pairwise(states), strict=True):
        moved = tuple((a - b) / BETA for a, b in zip(after, before, strict=True))
        theta = theta_of(GENERAL)
        pulled = grad(general(X, before, theta), tuple(theta.values()), moved)
        neurons.append(gap(found, moved))
        synapses.append(gap(weights, [g / len(X) for g in pulled]))
    return max(neurons), max(synapses)


@check(EXACT, "eq:ep-state-update")
def state_update() -> float:
    return any_updates()[0]


@check(EXACT, "eq:ep-weight-update")
def weight_update() -> float:
    return any_updates()[1]


@check(ORDER, "weight-updates")
def two_weight_updates() -> float:
    def error(beta: float) -> float:
        before, after = second_states(toy, TOY, EPS, beta)[1:3]
        theta, unit = theta_of(TOY), 1 / (beta * EPS)
        moved = tuple(unit * (a - b) for a, b in zip(after, before, strict=True))
        general_way = grad(toy(X, before, theta), tuple(theta.values()), moved)
        primitive_way = [unit * g for g in contrast(toy_phi, after, before, theta)]
        return gap([g / len(X) for g in general_way], primitive_way)

    return order_of(error)


def limit(model: Dynamics) -> list[tuple[State, list[Tensor]]]:
    """EP's processes as beta goes to 0."""
    taken = eqprop.limit_steps(model, COST, X, Y, settled(model), K)
    return [(s.neurons, list(s.synapses.values())) for s in taken]


@check(EXACT, "eq:ep-init")
def ep_init() -> float:
    return gap(limit(GENERAL)[0][0], minus(pull(settled(GENERAL).state)))


@check(EXACT, "eq:ep-state")
def ep_state() -> float:
    """The Jacobian itself, not its transpose."""
    s, found, theta = settled(GENERAL).state, limit(GENERAL), theta_of(GENERAL)
    moved = [jvp(lambda *v: general(X, v, theta), s, neurons)[1] for neurons, _ in found]
    return max(gap(later[0], by) for later, by in zip(found[1:], moved[:-1], strict=True))


@check(EXACT, "eq:ep-weight")
def ep_weight() -> float:
    s, errors = settled(GENERAL).state, []
    for neurons, synapses in limit(GENERAL):
        theta = theta_of(GENERAL)
        pulled = grad(general(X, s, theta), tuple(theta.values()), neurons)
        errors.append(gap(synapses, [g / len(X) for g in pulled]))
    return max(errors)


@check(EXACT, "lemma:ep")
def lemma() -> float:
    return max(ep_init(), ep_state(), ep_weight())


def along_beta(steps: int) -> State:
    """d s_t^beta / d beta at beta = 0."""
    start, theta = settled(GENERAL).state, theta_of(GENERAL)

    def end(beta: Tensor) -> State:
        s = start
        for _ in range(steps):
            s = tuple(f - beta * d for f, d in zip(general(X, s, theta), pull(s), strict=True))
        return s

    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    return tuple(torch.zeros_like(v) for v in start) if steps == 0 else jvp(end, (zero,), (one,))[1]


@check(EXACT, "eq:proof3-2")
def differentiated() -> float:
    s, theta, errors = settled(GENERAL).state, theta_of(GENERAL), []
    for t in range(K):
        moved = jvp(lambda *v: general(X, v, theta), s, along_beta(t))[1]
        errors.append(gap(along_beta(t + 1), [m - d for m, d in zip(moved, pull(s), strict=True)]))
    return max(errors)


@check(EXACT, "eq:proof3-4")
def free_of_beta() -> float:
    """The second phase starts at the same state whatever beta is."""
    starts = [relax(GENERAL, X, 0, settled(GENERAL).state, Nudge(COST, Y, beta)).state for beta in (0.1, 0.2)]
    return gap(*starts)


@check(EXACT, "RBP")
def recurrent_backprop() -> float:
    nabla = RBP(LONG, K).steps(TOY, COST, X, Y, settled(TOY))
    pairs = zip(limit(TOY), nabla, strict=True)
    return max(max(gap(ep[0], minus(by.neurons)), gap(ep[1], minus(list(by.synapses.values())))) for ep, by in pairs)


def neurons_apart(model: Dynamics) -> float:
    """EP's neural updates in the limit against minus the gradients, at the last of K steps."""
    nabla = list(RBP(LONG, K).steps(model, COST, X, Y, settled(model)))
    return gap(limit(model)[-1][0], minus(nabla[-1].neurons))


@check(GAP, "general")
def apart_in_general() -> float:
    return neurons_apart(GENERAL)


@check(GAP, "symmetric")
def apart_if_symmetric() -> float:
    return neurons_apart(TOY)


@check(EXACT, "eq:t=0")
def first_update() -> float:
    s, theta, beta = settled(TOY).state, theta_of(TOY), 0.5 * EPS
    both = [slope(phi, X, s, theta) for phi in (lambda *a: toy_phi(*a) - beta * ell(a[1]), toy_phi)]
    return gap([(a - b) / beta for a, b in zip(*both, strict=True)], limit(TOY)[0][0])


@check(EXACT, "direct")
def direct_term() -> float:
    readout = CrossEntropy(SIZES[0], 5, seed=0, dtype=torch.float64)
    s, y = settled(TOY).state, torch.eye(5, dtype=torch.float64)[:4]
    W, b = (p.detach().clone().requires_grad_() for p in (readout.Wout, readout.bout))
    by_hand = torch.nn.functional.cross_entropy(s[0] @ W.T + b, y)
    return gap(list(Problem(TOY, readout, X, y).direct_gradient(s).values()), grad(by_hand, (W, b)))


# Settings


def block_matrix(model: Layered) -> Tensor:
    """The symmetric W over all layers, the visible one last."""
    ends = [0, *torch.tensor(SIZES).cumsum(0).tolist()]
    W = torch.zeros(ends[-1], ends[-1], dtype=torch.float64)
    for n in range(len(SIZES) - 1):
        rows, columns = slice(ends[n], ends[n + 1]), slice(ends[n + 1], ends[n + 2])
        W[rows, columns] = model.weight(n).detach()
        W[columns, rows] = model.weight(n).detach().T
    return W


def layers(u: Tensor) -> State:
    return torch.split(u, SIZES, -1)[:-1]


def some_state() -> State:
    return tuple(0.5 * draw(4, n) for n in SIZES[:-1])


def eb_phi(x: Tensor, s: State, W: Tensor) -> Tensor:
    r = torch.tanh(torch.cat((*s, x), -1))
    return 0.5 * (1 - EPS) * sum((v * v).sum() for v in s) + EPS * 0.5 * ((r @ W) * r).sum()


@check(EXACT, "eq:energy-based")
def energy_based() -> float:
    s, W = some_state(), block_matrix(EB)
    phi = [EB.primitive(X, s).sum(), *slope(lambda x, v, _: eb_phi(x, v, W), X, s, {})]
    return gap([phi[0], *EB.transition(X, s)], [eb_phi(X, s, W), *phi[1:]])


def layered_steps(model: Layered, F: Callable[..., State], scale: float, r: Callable[[Tensor], Tensor]) -> float:
    """The updates of a layered net as printed: differences of products of activities over beta."""
    states, errors = second_states(F, model, scale), []
    for (neurons, synapses), (before, after) in zip(ep_steps(model), pairwise(states), strict=True):
        errors.append(gap(neurons, [(a - b) / (BETA * scale) for a, b in zip(after, before, strict=True)]))
        own = []
        for n in range(len(SIZES) - 1):
            ends = [[r(v) for v in (*s, X)[n : n + 2]] for s in (after, before)]
            late, early = (post.T @ pre for post, pre in ends)
            own.append((late - early) / (BETA * len(X)))
        errors.append(gap(synapses, own))
    return max(errors)


def eb_step(x: Tensor, s: State, _: Theta) -> State:
    return slope(lambda x, v, _: eb_phi(x, v, block_matrix(EB)), x, s, {})


def p_step(x: Tensor, s: State, _: Theta) -> State:
    return layers(torch.tanh(torch.cat((*s, x), -1) @ block_matrix(P)))


@check(EXACT, "delta-fc-canon")
def energy_based_updates() -> float:
    names = [name for name, _ in EB.named_parameters()]
    assert names == [f"W{n}{n + 1}" for n in range(len(SIZES) - 1)]
    return layered_steps(EB, eb_step, EPS, torch.tanh)


@check(EXACT, "def-prototypical")
def prototypical() -> float:
    s = some_state()
    return gap(P.transition(X, s), p_step(X, s, {}))


@check(EXACT, "delta-fc")
def prototypical_updates() -> float:
    return layered_steps(P, p_step, 1.0, lambda v: v)


@check(EXACT, "without-sigma")
def without_sigma() -> float:
    s, W = some_state(), block_matrix(LINEAR)

    def phi(x: Tensor, v: State, _: Theta) -> Tensor:
        u = torch.cat((*v, x), -1)
        return 0.5 * ((u @ W) * u).sum()

    return gap(LINEAR.transition(X, s), slope(phi, X, s, {}))


@check(EXACT, "Euler", "eq:real-time-dynamics")
def euler() -> float:
    s, theta = tuple(0.5 * draw(4, n) for n in SIZES[:2]), theta_of(TOY)
    down = slope(toy_energy, X, s, theta)
    return gap(TOY.transition(X, s), [v - EPS * d for v, d in zip(s, down, strict=True)])


@check(EXACT, "eq:symmetric-vector-field")
def symmetric() -> float:
    s, n = settled(TOY).state, SIZES[0] + SIZES[1]

    def step(v: Tensor) -> Tensor:
        return torch.cat(TOY.transition(X[:1], (v[None, : SIZES[0]], v[None, SIZES[0] :])), -1)[0]

    J = torch.autograd.functional.jacobian(step, torch.cat(s, -1)[0])
    assert J.shape == (n, n)
    return gap([J], [J.T])


def tanh_slope(v: Tensor) -> Tensor:
    return 1 - torch.tanh(v) ** 2


@check(EXACT, "eq-toymodel-ep-cont")
def toy_as_printed() -> float:
    start = settled(TOY).state
    s0, s1 = start
    r0, r1, rx = torch.tanh(s0), torch.tanh(s1), torch.tanh(X)
    W01, W0x, W1x = (TOY.get_parameter(n).detach() for n in ("W01", "W0x", "W1x"))
    new0 = (1 - EPS) * s0 + EPS * tanh_slope(s0) * (r1 @ W01.T + rx @ W0x.T) + EPS * BETA * (Y - s0)
    new1 = (1 - EPS) * s1 + EPS * tanh_slope(s1) * (r0 @ W01 + rx @ W1x.T)
    return gap(relax(TOY, X, 1, start, Nudge(COST, Y, BETA)).state, (new0, new1))


@check(EXACT, "eq-mnist-ep-cont")
def layered_as_printed() -> float:
    start = some_state()
    r = [torch.tanh(v) for v in (*start, X)]
    W = [EB.weight(n).detach() for n in range(len(SIZES) - 1)]
    new = []
    for n, s in enumerate(start):
        drive = r[n + 1] @ W[n].T + (r[n - 1] @ W[n - 1] if n else 0.0)
        new.append((1 - EPS) * s + EPS * tanh_slope(s) * drive + (EPS * BETA * (Y - s) if n == 0 else 0.0))
    return gap(relax(EB, X, 1, start, Nudge(COST, Y, BETA)).state, new)


@check(EXACT, "(73)")
def rmse() -> float:
    report = eqprop.gdu.compare(TOY, COST, X, Y, T=LONG, K=K, beta=BETA)
    ep, nabla = ep_steps(TOY), of_package(LONG, K)
    found, expected = [], []
    for layer, name in enumerate(("s0", "s1")):
        f = torch.stack([step[0][layer].mean(0) for step in ep])
        g = torch.stack([-step[0][layer].mean(0) for step in nabla])
        norms = [v.square().mean(0).sqrt() for v in (f - g, f, g)]
        expected.append((norms[0] / torch.maximum(norms[1], norms[2])).mean())
        found.append(torch.tensor(report.neurons[name].rmse, dtype=torch.float64))
    return gap(found, expected)


@check(EXACT, "activations")
def activations() -> float:
    v = torch.linspace(-1, 2, 61, dtype=torch.float64)
    soft, hard = (
        1 / (1 + torch.exp(-4 * (v - 0.5))),
        torch.tensor([max(min(float(u), 1.0), 0.0) for u in v], dtype=v.dtype),
    )
    return max(gap([activation("sigmoid")(v)], [soft]), gap([activation("hard-sigmoid")(v)], [hard]))


# Convolutions, by loops over indices


def convolved(W: Tensor, x: Tensor) -> Tensor:
    """(W * X)_{c,i,j} = sum W_{c,k,r,s} X_{k,i+r,j+s}, indices from 0."""
    out = torch.zeros(len(W), *(n - KERNEL + 1 for n in x.shape[1:]), dtype=x.dtype)
    for c, i, j in product(*map(range, out.shape)):
        for k, r, s in product(range(len(x)), range(KERNEL), range(KERNEL)):
            out[c, i, j] += W[c, k, r, s] * x[k, i + r, j + s]
    return out


def corners(shape: Sequence[int]) -> list[tuple[int, int, int]]:
    return list(product(range(shape[0]), range(shape[1] // POOL), range(shape[2] // POOL)))


def argmax(z: Tensor, c: int, i: int, j: int) -> tuple[int, int]:
    zone = z[c, POOL * i : POOL * i + POOL, POOL * j : POOL * j + POOL]
    r, s = divmod(int(zone.argmax()), POOL)
    return POOL * i + r, POOL * j + s


def pooled(z: Tensor) -> Tensor:
    out = torch.zeros(len(z), z.shape[1] // POOL, z.shape[2] // POOL, dtype=z.dtype)
    for c, i, j in corners(z.shape):
        p, q = argmax(z, c, i, j)
        out[c, i, j] = z[c, p, q]
    return out


def unpooled(y: Tensor, z: Tensor) -> Tensor:
    """P^-1(Y, ind(Z)): each value at the place of its zone's maximum."""
    out = torch.zeros_like(z)
    for c, i, j in corners(z.shape):
        p, q = argmax(z, c, i, j)
        out[c, p, q] = y[c, i, j]
    return out


def unpooled_sum(y: Tensor, z: Tensor) -> Tensor:
    """The same as a sum over Kronecker deltas."""
    out = torch.zeros_like(z)
    for c, p, q in product(*map(range, z.shape)):
        zones = product(range(z.shape[1] // POOL), range(z.shape[2] // POOL))
        out[c, p, q] = sum(float(y[c, i, j]) * (argmax(z, c, i, j) == (p, q)) for i, j in zones)
    return out


def flipped(W: Tensor, z: Tensor) -> Tensor:
    """W~ * z with z padded by F - 1."""
    padded = torch.nn.functional.pad(z, (KERNEL - 1,) * 4)
    return convolved(W.transpose(0, 1).flip(-1, -2), padded)


def by_components(W: Tensor, z: Tensor, sides: Sequence[int]) -> Tensor:
    """sum W~_{c,c',r,s} z_{c',p+r-F,q+s-F}, zero where an index is out of bounds; indices from 1."""
    out = torch.zeros(W.shape[1], *sides, dtype=z.dtype)
    inside = lambda p, q: 0 <= p < z.shape[1] and 0 <= q < z.shape[2]  # noqa: E731
    for c, p, q in product(*map(range, out.shape)):
        for k, r, s in product(range(len(W)), range(1, KERNEL + 1), range(1, KERNEL + 1)):
            i, j = p + r - KERNEL, q + s - KERNEL
            if inside(i, j):
                out[c, p, q] += W[k, c, KERNEL - r, KERNEL - s] * z[k, i, j]
    return out


def filter_gradient(z: Tensor, x: Tensor, W: Tensor) -> Tensor:
    """(z * X)_{c,k,r,s} = sum z_{c,i,j} X_{k,r+i,s+j}."""
    out = torch.zeros_like(W)
    for c, k, r, s in product(*map(range, W.shape)):
        out[c, k, r, s] = (z[c] * x[k, r : r + z.shape[1], s : s + z.shape[2]]).sum()
    return out


IMAGE, FILTER = draw(2, 6, 6), draw(3, 2, KERNEL, KERNEL) - 0.5
TARGET = draw(3, 2, 2)


def lemma_gradients() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The derivatives of Phi = Y . P(W * X) along Z, X, W and Y, by autograd through torch's own operations."""
    x, W, y = (v.clone().requires_grad_() for v in (IMAGE, FILTER, TARGET))
    z = torch.nn.functional.conv2d(x[None], W)[0]
    phi = (y * torch.nn.functional.max_pool2d(z[None], POOL)[0]).sum()
    return grad(phi, (z, x, W, y))


@check(EXACT, "defconv")
def convolution() -> float:
    return gap([conv(IMAGE[None], FILTER, None, Window())[0]], [convolved(FILTER, IMAGE)])


@check(EXACT, "definvpool")
def inverse_pooling() -> float:
    z = convolved(FILTER, IMAGE)
    return gap([max_pool(z[None], POOL).spread(TARGET[None])[0]], [unpooled(TARGET, z)])


@check(EXACT, "invpool")
def inverse_pooling_as_sum() -> float:
    z = convolved(FILTER, IMAGE)
    return gap([max_pool(z[None], POOL).spread(TARGET[None])[0]], [unpooled_sum(TARGET, z)])


@check(EXACT, "lma1")
def along_z() -> float:
    return gap([lemma_gradients()[0]], [unpooled(TARGET, convolved(FILTER, IMAGE))])


@check(EXACT, "lma2")
def along_x() -> float:
    return gap([lemma_gradients()[1]], [flipped(FILTER, unpooled(TARGET, convolved(FILTER, IMAGE)))])


@check(EXACT, "proof-lma2")
def along_x_by_components() -> float:
    z = unpooled(TARGET, convolved(FILTER, IMAGE))
    return gap([lemma_gradients()[1]], [by_components(FILTER, z, IMAGE.shape[1:])])


@check(EXACT, "lma3")
def along_w() -> float:
    z = unpooled(TARGET, convolved(FILTER, IMAGE))
    return gap([lemma_gradients()[2]], [filter_gradient(z, IMAGE, FILTER)])


@check(EXACT, "lma4")
def along_y() -> float:
    return gap([lemma_gradients()[3]], [pooled(convolved(FILTER, IMAGE))])


@check(EXACT, "lma:conv")
def lemma_of_convolutions() -> float:
    return max(along_z(), along_x(), along_w(), along_y())


@check(EXACT, "sizes")
def sizes() -> float:
    back = conv_transpose(conv(IMAGE[None], FILTER, None, Window()), FILTER, Window())
    return float(sum(abs(a - b) for a, b in zip(back.shape[1:], IMAGE.shape, strict=True)))


def net(function: Callable[[Tensor], Tensor]) -> Convolutional:
    """Two convolutions with pooling and a flat layer: 10 x 10 -> 4 x 4 -> 1 x 1 -> 3."""
    return Convolutional(
        (1, 10, 10), (3, 2), (3,), function, kernel=KERNEL, pool=POOL, bias=False, seed=0, dtype=torch.float64
    )


IMAGES = draw(2, 1, 10, 10)


def conv_phi(x: Tensor, s: State, model: Convolutional) -> Tensor:
    """Phi of one sample, by loops."""
    out, h0, h1 = s
    W01, W12 = (model.get_parameter(n).detach() for n in ("Wconv01", "Wconv12"))
    flat = (out * (model.Wfc01.detach() @ h0.flatten())).sum()
    return flat + (h0 * pooled(convolved(W01, h1))).sum() + (h1 * pooled(convolved(W12, x))).sum()


def conv_state(model: Convolutional) -> State:
    return tuple(draw(*v.shape) for v in model.init_state(IMAGES))


@check(EXACT, "defdot")
def scalar_product() -> float:
    model = net(lambda v: v)
    s = conv_state(model)
    by_loops = [conv_phi(IMAGES[n], tuple(v[n] for v in s), model) for n in range(2)]
    return gap([model.primitive(IMAGES, s)], [torch.stack(by_loops)])


@check(EXACT, "approxdyn")
def convolutional_without_sigma() -> float:
    model = net(lambda v: v)
    s = conv_state(model)
    leaves = tuple(v[0].clone().requires_grad_() for v in s)
    expected = grad(conv_phi(IMAGES[0], leaves, model), leaves)
    return gap([v[0] for v in model.transition(IMAGES, s)], expected)


@check(EXACT, "deltaconv", "deltaconv-main")
def filter_updates() -> float:
    model, y = net(torch.tanh), draw(2, 3)
    free = relax(model, IMAGES, LONG)
    s, found, expected = free.state, [], []
    for step in EP(LONG, 3, BETA).steps(model, COST, IMAGES, y, free):
        new = relax(model, IMAGES, 1, s, Nudge(COST, y, BETA)).state
        for name, post, pre in (("Wconv01", 1, 2), ("Wconv12", 2, None)):
            W, ends = model.get_parameter(name).detach(), []
            for state in (new, s):
                below = IMAGES if pre is None else state[pre]
                pairs = zip(state[post], below, strict=True)
                ends.append(sum(filter_gradient(unpooled(h, convolved(W, b)), b, W) for h, b in pairs))
            found.append(step.synapses[name])
            expected.append((ends[0] - ends[1]) / (BETA * len(IMAGES)))
        s = new
    return gap(found, expected)


# Algorithms: one iteration of each


RATE = 0.1


def trained(estimator: EP | BPTT) -> list[Tensor]:
    model = Toy((SIZES[0], SIZES[1], SIZES[-1]), "tanh", eps=EPS, bias=False, seed=0, dtype=torch.float64)
    estimator.backward(model, COST, X, Y)
    torch.optim.SGD(model.parameters(), RATE).step()
    return [p.detach() for p in model.parameters()]


@check(EXACT, "alg-ep")
def algorithm_1() -> float:
    theta = theta_of(TOY)
    s = loop(lambda v: toy(X, v, theta), zeros(TOY), T)[-1]
    total = [torch.zeros_like(p) for p in theta.values()]
    for _ in range(K):
        new = tuple(v.detach() for v in nudged(toy, theta, EPS)(s))
        total = [a + g / (BETA * EPS) for a, g in zip(total, contrast(toy_phi, new, s, theta), strict=True)]
        s = new
    expected = [p + RATE * d for p, d in zip(theta.values(), total, strict=True)]
    return gap(trained(EP(T, K, BETA)), expected)


@check(EXACT, "alg-bptt")
def algorithm_2() -> float:
    total = [torch.stack(own).sum(0) for own in zip(*(nabla[1] for nabla in by_hand(T, K)), strict=True)]
    expected = [p - RATE * d for p, d in zip(theta_of(TOY).values(), total, strict=True)]
    return gap(trained(BPTT(T, K)), expected)


def measured() -> dict[str, dict[str, float]]:
    tables = {"exact": EXACT, "order": ORDER, "gap": GAP}
    return {name: {label: function() for label, function in table.items()} for name, table in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="The equations of the paper, by hand and by the package.")
    parser.add_argument("--write", action="store_true", help=f"write {OUT.relative_to(OUT.parents[2])}")
    write = parser.parse_args().write
    found = measured()
    for kind, table in found.items():
        for label, value in table.items():
            print(f"{kind:6} {label:26} {value:.2g}")
    if write:
        write_compact(OUT, {**rounded(found), "provenance": provenance(torch.device("cpu"))})


if __name__ == "__main__":
    main()
