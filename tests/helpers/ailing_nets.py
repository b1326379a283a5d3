"""Small nets with one known cause each why EP does not learn, and healthy ones, drawn from a seed.

Every generator breaks a net that would learn in one way, so its cause is known by construction. The campaign over all
of them is benchmarks/doctor_campaign.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from eqprop import (
    EP,
    Cost,
    Dynamics,
    FunctionCost,
    PrimitiveDynamics,
    SquaredError,
    from_energy,
    from_primitive,
    from_transition,
    relax,
)
from eqprop.models import Convolutional, Layered, Toy
from eqprop.state import State

F64 = torch.float64
Theta = dict[str, Tensor]
SAMPLES = 8


@dataclass
class Case:
    """What the doctor is asked about.

    cause       the key it should answer with, None for a healthy net
    rewritten   by cause, the same net where only its author can follow the remedy, by writing other code; a cause that
                is not the net's own has none
    twin        the net as it was before it was broken; None where remedies bring back the gradient itself
    """

    cause: str | None
    model: Dynamics
    x: Tensor
    y: Tensor
    ep: EP
    cost: Cost = field(default_factory=SquaredError)
    state: State | None = None
    rates: Any = None
    rewritten: Mapping[str, Callable[[], Case]] = field(default_factory=dict)
    twin: Callable[[], Case] | None = None

    def but(self, **changes: Any) -> Case:
        """The same with other fields, and with neither cause nor twin."""
        return replace(self, **{"cause": None, "rewritten": {}, "twin": None, **changes})


class Draw:
    """Random numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self.source = torch.Generator().manual_seed(1000 + seed)

    def uniform(self, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.source, dtype=F64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.source, dtype=F64)

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.source, dtype=F64))

    def log(self, low: float, high: float) -> float:
        """Uniform in the logarithm."""
        return low * (high / low) ** self.number(0.0, 1.0)

    def whole(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.source))

    def glorot(self, rows: int, columns: int) -> Tensor:
        return self.uniform(rows, columns) * (6.0 / (rows + columns)) ** 0.5

    def batch(self, inputs: int, outputs: int, low: float = 0.0) -> tuple[Tensor, Tensor]:
        return self.uniform(SAMPLES, inputs, low=low), self.uniform(SAMPLES, outputs, low=max(low, -0.6), high=0.6)


def energy_net(draw: Draw, eps: float, **options: Any) -> Layered:
    sizes = (draw.whole(2, 4), draw.whole(5, 8), 4)
    chosen = {"init": "default", "seed": draw.whole(0, 10**6), "dtype": F64} | options
    return Layered(sizes, "energy-based", "tanh", eps=eps, **chosen)


def prototypical(draw: Draw, *hidden: int, activation: str = "tanh", **options: Any) -> Layered:
    sizes = (draw.whole(2, 4), *(hidden or (draw.whole(5, 8),)), 4)
    chosen = {"init": "default", "seed": draw.whole(0, 10**6), "dtype": F64} | options
    return Layered(sizes, "prototypical", activation, **chosen)


def batch_of(draw: Draw, model: Layered | Toy, low: float = 0.0) -> tuple[Tensor, Tensor]:
    return draw.batch(model.sizes[-1], model.sizes[0], low)


def phase_too_short(seed: int) -> Case:
    draw = Draw(seed)
    model = energy_net(draw, eps=draw.number(0.02, 0.05))
    return Case("T", model, *batch_of(draw, model), EP(T=draw.whole(5, 20), K=300, beta=0.05))


def slow_hopfield(seed: int) -> Case:
    """A recurrent net with symmetric weights close to where its rest loses its stability: slow to settle."""
    draw = Draw(seed)
    n, outputs = draw.whole(6, 10), 2
    M = draw.normal(n + outputs, n + outputs)
    W = M + M.T
    W = W * (draw.number(0.95, 0.97) / float(torch.linalg.eigvalsh(W).max()))

    def energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        v = torch.cat(s, 1)
        return 0.5 * v.square().sum(-1) - 0.5 * ((v @ theta["W"]) * v).sum(-1) - (s[1] * (x @ theta["V"].T)).sum(-1)

    model = from_energy(energy, {"W": W, "V": draw.normal(n, 4)}, (outputs, n), eps=0.1)
    return Case("T", model, *draw.batch(4, outputs), EP(T=300, K=1000, beta=0.001))


def predictive_coding(draw: Draw, gain: float, eps: float, squash: Callable[[Tensor], Tensor]) -> Dynamics:
    """E = |s0 - A f(s1)|^2 / 2 + |s1 - B x|^2 / 2: its curvature grows with the weights."""
    outputs, hidden = draw.whole(2, 3), draw.whole(5, 7)
    A = draw.normal(outputs, hidden)
    A = A * (gain / float(torch.linalg.matrix_norm(A, 2)))

    def energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        errors = s[0] - squash(s[1]) @ theta["A"].T, s[1] - x @ theta["B"].T
        return 0.5 * (errors[0].square().sum(-1) + errors[1].square().sum(-1))

    return from_energy(energy, {"A": A, "B": 0.5 * draw.normal(hidden, 4)}, (outputs, hidden), eps=eps)


def outputs_of(model: Dynamics) -> int:
    return model.init_state(torch.zeros(1, 4, dtype=F64))[0].shape[-1]


def step_overshoots(seed: int) -> Case:
    """Bounded by tanh, it goes back and forth at eps 0.3 and settles at 0.15."""
    draw = Draw(seed)
    model = predictive_coding(draw, draw.number(3.0, 3.4), 0.3, torch.tanh)
    return Case("eps", model, *draw.batch(4, outputs_of(model), low=-1.0), EP(T=600, K=200, beta=0.02))


def step_explodes(seed: int) -> Case:
    """The same without a bound."""
    draw = Draw(seed)
    model = predictive_coding(draw, draw.number(2.8, 3.2), 0.3, lambda v: v)
    return Case("eps", model, *draw.batch(4, outputs_of(model), low=-1.0), EP(T=600, K=200, beta=0.02))


def inhibition_oscillates(seed: int) -> Case:
    """Neurons that inhibit each other, all updated at once: all on, all off, ..."""
    draw = Draw(seed)
    outputs, n, c = 2, draw.whole(5, 8), draw.number(0.9, 1.2)

    def phi(x: Tensor, s: State, theta: Theta) -> Tensor:
        s0, s1 = s
        lateral = -0.5 * c * (s1.sum(-1).square() - s1.square().sum(-1))
        return lateral + (s0 * (s1 @ theta["A"].T)).sum(-1) + (s1 * (x @ theta["B"].T + 1.0)).sum(-1)

    parameters = {"A": 0.3 * draw.normal(outputs, n), "B": 0.3 * draw.normal(n, 4)}
    model = from_primitive(phi, parameters, (outputs, n), squash=lambda v: torch.sigmoid(4 * v - 2))
    case = Case("two-cycle", model, *draw.batch(4, outputs), EP(T=300, K=30, beta=0.05))

    def smaller_steps() -> Case:
        """s + a (F(s) - s) with a of a quarter."""

        def transition(x: Tensor, s: State, theta: Theta) -> State:
            lateral = -c * (s[1].sum(-1, keepdim=True) - s[1])
            slopes = s[1] @ theta["A"].T, lateral + s[0] @ theta["A"] + x @ theta["B"].T + 1.0
            return tuple(v + 0.25 * (torch.sigmoid(4 * w - 2) - v) for v, w in zip(s, slopes, strict=True))

        damped = from_transition(transition, parameters, (outputs, n))
        return case.but(model=damped, ep=replace(case.ep, K=120))

    return replace(case, rewritten={"two-cycle": smaller_steps}, twin=smaller_steps)


def chains_disagree(seed: int) -> Case:
    """Two strongly coupled hidden layers: the states at even and at odd times end in different places."""
    draw = Draw(seed)
    n = draw.whole(2, 4)
    model = prototypical(draw, n, n)
    with torch.no_grad():
        model.W12.copy_(draw.number(2.5, 3.5) * torch.eye(n, dtype=F64))
        model.W23.copy_(draw.uniform(n, 4, low=0.3, high=0.8))
        model.b1.fill_(-0.5)
        model.b2.zero_()
    x, y = draw.batch(4, model.sizes[0], low=0.1)
    return Case("two-cycle", model, x, y, EP(T=200, K=20, beta=0.05))


def untied(seed: int) -> Case:
    """Feedback through weights of its own."""
    draw = Draw(seed)
    outputs, n = 4, draw.whole(6, 9)

    def transition(x: Tensor, s: State, theta: Theta) -> State:
        return torch.tanh(s[1] @ theta["A"].T), torch.tanh(s[0] @ theta["B"].T + x @ theta["V"].T)

    # Contracting, whatever is drawn: it settles, and asymmetry is all that is wrong with it.
    A, B = (0.9 * W / torch.linalg.matrix_norm(W, 2) for W in (draw.normal(outputs, n), draw.normal(n, outputs)))
    parameters = {"A": A, "B": B, "V": draw.glorot(n, 4)}
    model = from_transition(transition, parameters, (outputs, n))
    case = Case("asymmetric", model, *draw.batch(4, outputs), EP(T=500, K=100, beta=0.01))

    def tied() -> Case:
        def transition(x: Tensor, s: State, theta: Theta) -> State:
            return torch.tanh(s[1] @ theta["A"].T), torch.tanh(s[0] @ theta["A"] + x @ theta["V"].T)

        forward = {"A": A, "V": parameters["V"]}
        return case.but(model=from_transition(transition, forward, (outputs, n)))

    return replace(case, rewritten={"asymmetric": tied}, twin=tied)


def beta_too_large(seed: int) -> Case:
    draw = Draw(seed)
    model = energy_net(draw, eps=0.2)
    return Case("beta", model, *batch_of(draw, model), EP(T=300, K=100, beta=draw.number(4.0, 8.0)))


def nudge_tips_over(seed: int) -> Case:
    """Outputs with two states of rest, the target on the other side."""
    draw = Draw(seed)
    outputs, n = 2, draw.whole(3, 5)

    def phi(x: Tensor, s: State, theta: Theta) -> Tensor:
        s0, s1 = s
        own = 0.5 * theta["c"] * s0.square().sum(-1)
        return own + (s0 * (s1 @ theta["A"].T)).sum(-1) + (s1 * (x @ theta["B"].T)).sum(-1)

    A, B = draw.uniform(outputs, n, low=0.1, high=0.3), draw.uniform(n, 4, low=0.1, high=0.3)
    c = torch.full((1,), draw.number(1.8, 2.2), dtype=F64)
    model = from_primitive(phi, {"A": A, "B": B, "c": c}, (outputs, n), squash=torch.tanh)
    x = draw.uniform(SAMPLES, 4, low=0.2)
    y = torch.full((SAMPLES, outputs), -0.9, dtype=F64)
    return Case("beta", model, x, y, EP(T=300, K=60, beta=draw.number(0.8, 1.2)))


def second_phase_too_short(seed: int) -> Case:
    draw = Draw(seed)
    model = prototypical(draw, *[5] * draw.whole(3, 4), init="glorot")
    return Case("K", model, *batch_of(draw, model), EP(T=300, K=draw.whole(1, 2), beta=0.02))


def outputs_clipped(seed: int) -> Case:
    """Outputs that their biases hold at the lower end of the clip."""
    draw = Draw(seed)
    model = Layered((3, 6, 4), "energy-based", "hard-sigmoid", eps=0.4, clip=True, seed=seed, dtype=F64)
    with torch.no_grad():
        model.b0.copy_(-draw.uniform(3, low=4.0, high=6.0))
    x, _ = draw.batch(4, 3)
    return Case("silent", model, x, draw.uniform(SAMPLES, 3, low=0.4), EP(T=100, K=30, beta=0.1))


def inputs_unscaled(seed: int) -> Case:
    """Bytes as they come from a file, 0 to 255, saturate the hidden layer."""
    draw = Draw(seed)
    model = prototypical(draw, init="glorot")
    x, y = batch_of(draw, model)
    case = Case("silent", model, 255.0 * x, y, EP(T=100, K=30, beta=0.05))
    return replace(case, twin=lambda: case.but(x=x))


def start_carried_over(seed: int) -> Case:
    """A net with memory, begun where samples of the opposite kind ended."""
    draw = Draw(seed)
    outputs, n = 2, draw.whole(4, 6)

    def phi(x: Tensor, s: State, theta: Theta) -> Tensor:
        s0, s1 = s
        own = 0.5 * theta["c"] * s1.square().sum(-1)
        return own + (s0 * (s1 @ theta["A"].T)).sum(-1) + (s1 * (x @ theta["B"].T)).sum(-1)

    c = torch.full((1,), draw.number(1.6, 2.0), dtype=F64)
    parameters = {"A": 0.3 * draw.normal(outputs, n), "B": 0.1 * draw.normal(n, 4), "c": c}
    model = from_primitive(phi, parameters, (outputs, n), squash=torch.tanh)
    x, y = draw.batch(4, outputs, low=-1.0)
    other = relax(model, -x, 300).state
    case = Case("start", model, x, y, EP(T=300, K=60, beta=0.005), state=other)
    return replace(case, twin=lambda: case.but(state=None))


def float32_rounding(seed: int) -> Case:
    draw = Draw(seed)
    model = energy_net(draw, eps=0.5, dtype=torch.float32)
    x, y = batch_of(draw, model)
    return Case("rounding", model, x.float(), y.float(), EP(T=200, K=60, beta=draw.log(1e-8, 2e-7)))


class Gained(PrimitiveDynamics):
    """A trainable gain inside squash, where Phi does not see it."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        outputs, hidden = 2, draw.whole(4, 6)
        self.A = nn.Parameter(draw.glorot(outputs, hidden))
        self.B = nn.Parameter(draw.glorot(hidden, 4))
        self.gain = nn.Parameter(draw.uniform(1, low=0.6, high=1.2))

    def init_state(self, x: Tensor) -> State:
        return x.new_zeros(len(x), self.A.shape[0]), x.new_zeros(len(x), self.A.shape[1])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        s0, s1 = s
        return (s0 * (s1 @ self.A.T)).sum(-1) + (s1 * (x @ self.B.T)).sum(-1)

    def squash(self, s: State) -> State:
        return tuple(torch.tanh(self.gain * layer) for layer in s)


class GainInPhi(Gained):
    """The same F with the gain where Phi reads it."""

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return self.gain * super().primitive(x, s)

    def squash(self, s: State) -> State:
        return tuple(torch.tanh(layer) for layer in s)


def parameter_outside_phi(seed: int) -> Case:
    draw = Draw(seed)
    model = Gained(draw)
    case = Case("outside-phi", model, *draw.batch(4, 2), EP(T=300, K=60, beta=0.01))

    def moved() -> Case:
        other = copy.deepcopy(model)
        other.__class__ = GainInPhi
        return case.but(model=other)

    return replace(case, rewritten={"outside-phi": moved}, twin=moved)


def rate_too_large(seed: int) -> Case:
    draw = Draw(seed)
    model = energy_net(draw, eps=0.5)
    case = Case("rate-large", model, *batch_of(draw, model), EP(T=100, K=30, beta=0.05), rates=draw.log(30.0, 300.0))
    return replace(case, twin=lambda: case.but(rates=0.1))


def rate_too_small(seed: int) -> Case:
    draw = Draw(seed)
    model = energy_net(draw, eps=0.5)
    case = Case("rate-small", model, *batch_of(draw, model), EP(T=100, K=30, beta=0.05), rates=draw.log(1e-9, 1e-7))
    return replace(case, twin=lambda: case.but(rates=0.1))


def targets_out_of_range(seed: int) -> Case:
    """Targets in other units than outputs that tanh keeps between -1 and 1."""
    draw = Draw(seed)
    model = prototypical(draw)
    x, y = batch_of(draw, model)
    case = Case("targets", model, x, draw.number(4.0, 100.0) * y, EP(T=100, K=30, beta=0.02))
    return replace(case, twin=lambda: case.but(y=y))


def dropout_left_on(seed: int) -> Case:
    draw = Draw(seed)
    drop = nn.Dropout(draw.number(0.1, 0.5))

    def phi(x: Tensor, s: State, theta: Theta) -> Tensor:
        return (s[0] * (drop(s[1]) @ theta["A"].T)).sum(-1) + (s[1] * (x @ theta["B"].T)).sum(-1)

    n = draw.whole(5, 8)
    model = from_primitive(phi, {"A": draw.glorot(2, n), "B": draw.glorot(n, 4)}, (2, n), squash=torch.tanh)
    case = Case("random", model, *draw.batch(4, 2), EP(T=100, K=30, beta=0.02))

    def turned_off() -> Case:
        """Where the function holds it, which is not where model.eval() looks."""
        drop.eval()
        return case.but()

    return replace(case, rewritten={"random": turned_off}, twin=turned_off)


class HandWritten(PrimitiveDynamics):
    """Phi = s0 A s1 + s1 B x, F = tanh(dPhi/ds), with formulas by hand, one of them wrong."""

    def __init__(self, draw: Draw, mistake: str) -> None:
        super().__init__()
        self.A = nn.Parameter(draw.glorot(3, draw.whole(5, 7)))
        self.B = nn.Parameter(draw.glorot(self.A.shape[1], 4))
        self.mistake = mistake

    def init_state(self, x: Tensor) -> State:
        return x.new_zeros(len(x), 3), x.new_zeros(len(x), self.A.shape[1])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return (s[0] * (s[1] @ self.A.T)).sum(-1) + (s[1] * (x @ self.B.T)).sum(-1)

    def squash(self, s: State) -> State:
        return tuple(torch.tanh(layer) for layer in s)

    def gradient(self, drive: Any, s: State) -> State:
        feedback = 0.0 if self.mistake == "no feedback" else s[0] @ self.A
        return s[1] @ self.A.T, feedback + drive @ self.B.T

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        samples = len(x)
        A = (s_plus[0].T @ s_plus[1] - s_minus[0].T @ s_minus[1]) / samples
        B = (s_plus[1] - s_minus[1]).T @ x / samples
        return {"A": -A, "B": -B} if self.mistake == "sign" else {"A": A, "B": B}


def hand_written(draw: Draw, mistake: str) -> Case:
    model = HandWritten(draw, mistake)
    right = copy.deepcopy(model)
    right.mistake = ""
    case = Case("formula", model, *draw.batch(4, 3), EP(T=200, K=50, beta=0.02))
    return replace(case, twin=lambda: case.but(model=right))


def contrast_with_wrong_sign(seed: int) -> Case:
    draw = Draw(seed)
    return hand_written(draw, "sign")


def gradient_without_feedback(seed: int) -> Case:
    draw = Draw(seed)
    return hand_written(draw, "no feedback")


def weights_of_zero(seed: int) -> Case:
    draw = Draw(seed)
    model = prototypical(draw, init=lambda name, shape, source: torch.zeros(shape, dtype=F64))
    case = Case("zero-weights", model, *batch_of(draw, model), EP(T=100, K=30, beta=0.02))
    return replace(case, twin=lambda: case.but(model=prototypical(Draw(seed))))


def cost_of_rounded_outputs(seed: int) -> Case:
    """A cost that counts errors instead of measuring them."""
    draw = Draw(seed)
    model = prototypical(draw)
    cost = FunctionCost(lambda s, y: (s[0].round() - y.round()).square().sum(-1) + 0.0 * s[0].sum(-1) + 1.0)
    case = Case("no-pull", model, *batch_of(draw, model), EP(T=100, K=30, beta=0.02), cost=cost)
    return replace(case, twin=lambda: case.but(cost=SquaredError()))


def optimizer_of_another_model(seed: int) -> Case:
    """Made before the model was built again."""
    draw = Draw(seed)
    old, model = energy_net(draw, eps=0.5), energy_net(draw, eps=0.5)
    rates = torch.optim.SGD(old.parameters(), lr=0.1)
    case = Case("optimizer", model, *batch_of(draw, model), EP(T=100, K=30, beta=0.05), rates=rates)
    return replace(case, twin=lambda: case.but(rates=0.1))


def samples_mixed(seed: int) -> Case:
    """States normalised over the mini-batch."""
    draw = Draw(seed)
    n = draw.whole(5, 8)

    def phi(x: Tensor, s: State, theta: Theta) -> Tensor:
        centred = s[1] - s[1].mean(0)
        return (s[0] * (centred @ theta["A"].T)).sum(-1) + (s[1] * (x @ theta["B"].T)).sum(-1)

    parameters = {"A": draw.glorot(2, n), "B": draw.glorot(n, 4)}
    model = from_primitive(phi, parameters, (2, n), squash=torch.tanh)
    case = Case("mixing", model, *draw.batch(4, 2), EP(T=100, K=30, beta=0.02))

    def each_alone() -> Case:
        def phi(x: Tensor, s: State, theta: Theta) -> Tensor:
            return (s[0] * (s[1] @ theta["A"].T)).sum(-1) + (s[1] * (x @ theta["B"].T)).sum(-1)

        return case.but(model=from_primitive(phi, parameters, (2, n), squash=torch.tanh))

    return replace(case, rewritten={"mixing": each_alone}, twin=each_alone)


def energy_without_minimum(seed: int) -> Case:
    """Linear neurons whose weights are stronger than their leak."""
    draw = Draw(seed)
    n = draw.whole(4, 6)
    A = draw.normal(2, n)
    A = A * (draw.number(1.2, 1.6) / float(torch.linalg.matrix_norm(A, 2)))

    def energy(x: Tensor, s: State, theta: Theta) -> Tensor:
        squares = 0.5 * (s[0].square().sum(-1) + s[1].square().sum(-1))
        return squares - (s[0] * (s[1] @ theta["A"].T)).sum(-1) - (s[1] * (x @ theta["B"].T)).sum(-1)

    model = from_energy(energy, {"A": A, "B": draw.glorot(n, 4)}, (2, n), eps=0.3)
    return Case("unbounded", model, *draw.batch(4, 2), EP(T=500, K=50, beta=0.02))


def inputs_all_alike(seed: int) -> Case:
    """The same sample over and over, with the targets of many."""
    draw = Draw(seed)
    model = energy_net(draw, eps=0.5)
    x, y = batch_of(draw, model)
    case = Case("inputs", model, x[:1].repeat(SAMPLES, 1), y, EP(T=100, K=30, beta=0.05))

    def as_drawn() -> Case:
        return case.but(x=x)

    return replace(case, rewritten={"inputs": as_drawn}, twin=as_drawn)


def signal_fades(seed: int) -> Case:
    """Many layers with small weights: what enters hardly arrives, and what comes back even less."""
    draw = Draw(seed)
    activation, layers = ("sigmoid", draw.whole(10, 12)) if draw.whole(0, 1) else ("tanh", draw.whole(8, 10))
    model = prototypical(draw, *[6] * layers, activation=activation, init="default")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(draw.number(0.1, 0.3) if name.startswith("W") else 1.0)
    case = Case("fades", model, *batch_of(draw, model), EP(T=100, K=3 * layers, beta=0.02))
    other = Layered(model.sizes, "prototypical", activation, init="glorot", seed=seed, dtype=F64)
    return replace(case, twin=lambda: case.but(model=other))


def healthy_deep(seed: int) -> Case:
    """As many layers, with weights that keep a signal alive."""
    draw = Draw(seed)
    layers = draw.whole(6, 8)
    model = prototypical(draw, *[8] * layers, activation="tanh", init="glorot")
    return Case(None, model, *batch_of(draw, model), EP(T=2000, K=10 * layers, beta=0.01, schedule="alternating"))


def healthy_toy(seed: int) -> Case:
    draw = Draw(seed)
    model = Toy((3, 6, 4), eps=0.3, seed=seed, dtype=F64)
    return Case(None, model, *batch_of(draw, model), EP(T=300, K=60, beta=0.02), rates=0.2)


def healthy_prototypical(seed: int) -> Case:
    """In float32 and with the nudge outside sigma, as in the paper."""
    draw = Draw(seed)
    model = prototypical(draw, 8, activation="sigmoid", dtype=torch.float32)
    x, _ = batch_of(draw, model)
    labels = torch.arange(SAMPLES) % model.sizes[0]
    y = torch.nn.functional.one_hot(labels, model.sizes[0]).float()
    return Case(None, model, x.float(), y, EP(T=30, K=10, beta=0.1), rates={"W01": 0.1, "W12": 0.05, "*": 0.05})


def healthy_predictive_coding(seed: int) -> Case:
    draw = Draw(seed)
    model = predictive_coding(draw, draw.number(1.0, 2.0), 0.15, torch.tanh)
    x, y = draw.batch(4, outputs_of(model), low=-1.0)
    return Case(None, model, x, y, EP(T=400, K=150, beta=0.02), rates=torch.optim.Adam(model.parameters(), lr=1e-3))


def healthy_convolutional(seed: int) -> Case:
    draw = Draw(seed)
    model = Convolutional((1, 10, 10), channels=(3, 2), flat=(3,), kernel=3, seed=seed, dtype=F64, activation="sigmoid")
    x = draw.uniform(4, 1, 10, 10, low=0.0)
    y = torch.eye(3, dtype=F64)[torch.arange(4) % 3]
    return Case(None, model, x, y, EP(T=100, K=20, beta=0.05), rates=0.02)


def healthy_trained(seed: int) -> Case:
    """Trained until its targets are nearly met: little is left to learn, and nothing is wrong."""
    draw = Draw(seed)
    model = prototypical(draw, 8)
    x, y = batch_of(draw, model)
    ep = EP(T=60, K=30, beta=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(150):
        optimizer.zero_grad()
        ep.backward(model, SquaredError(), x, y)
        optimizer.step()
    return Case(None, model, x, y, ep, rates=optimizer)


AILING: dict[str, Callable[[int], Case]] = {
    f.__name__: f
    for f in (
        phase_too_short,
        slow_hopfield,
        step_overshoots,
        step_explodes,
        inhibition_oscillates,
        chains_disagree,
        untied,
        beta_too_large,
        nudge_tips_over,
        second_phase_too_short,
        outputs_clipped,
        inputs_unscaled,
        start_carried_over,
        float32_rounding,
        parameter_outside_phi,
        rate_too_large,
        rate_too_small,
        targets_out_of_range,
        dropout_left_on,
        contrast_with_wrong_sign,
        gradient_without_feedback,
        weights_of_zero,
        cost_of_rounded_outputs,
        optimizer_of_another_model,
        samples_mixed,
        energy_without_minimum,
        inputs_all_alike,
        signal_fades,
    )
}

HEALTHY: dict[str, Callable[[int], Case]] = {
    f.__name__: f
    for f in (
        healthy_toy,
        healthy_prototypical,
        healthy_predictive_coding,
        healthy_convolutional,
        healthy_trained,
        healthy_deep,
    )
}
