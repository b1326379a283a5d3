"""Random models of a user's own, made of a few kinds of terms; each the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eqprop import Cost, Dynamics, FunctionCost, SquaredError, from_energy, from_primitive, from_transition
from eqprop.dynamics import PrimitiveDynamics
from eqprop.models.readout import CrossEntropy
from eqprop.state import State, zero_state

Theta = Mapping[str, Tensor]
OUT, HID, SIDE, IN, SAMPLES = 3, 8, 4, 5, 4
Term = Callable[[Tensor, Tensor, Theta, str], Tensor]
"""(post, pre, theta, name) -> a value per sample; layers are flat."""


def product(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (a * (b @ th[w].T)).sum(-1)


def by_einsum(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return torch.einsum("bi,ij,bj->b", a.tanh(), th[w], b)


def attention(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    scores = torch.softmax(b @ th[w].T * a, -1)
    return (scores * a).sum(-1)


def dot_product_attention(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    keys = b.unflatten(-1, (-1, 1))
    found = F.scaled_dot_product_attention((a @ th[w])[:, :, None], keys, keys.sin())
    return (found * b[..., None]).sum((-2, -1))


def gate(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (torch.sigmoid(a) * F.gelu(b @ th[w].T)).sum(-1)


def convolution(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    image = F.conv2d(_image(b @ th[w].T), torch.ones(2, 1, 2, 2, dtype=b.dtype) / 4.0, padding=1)
    return (F.max_pool2d(image, 2).flatten(1)[:, : a.shape[-1]] * _fitting(a, image)).sum(-1)


def _image(v: Tensor) -> Tensor:
    return F.pad(v, (0, 16 - v.shape[-1])).unflatten(-1, (1, 4, 4))


def _fitting(a: Tensor, image: Tensor) -> Tensor:
    return a[:, : min(a.shape[-1], image.shape[1] * (image.shape[-1] // 2) ** 2)]


def average_pool(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (F.avg_pool2d(_image(b @ th[w].T), 2).flatten(1).sum(-1)) * a.mean(-1)


def log_sum_exp(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return torch.logsumexp(b @ th[w].T + a, -1)


def layer_norm(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (F.layer_norm(b, b.shape[-1:]) @ th[w].T * a).sum(-1)


def hinge(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (F.relu(a) * F.leaky_relu(b @ th[w].T, 0.1)).clamp(-1.0, 1.0).sum(-1)


def ordered(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (torch.sort(a, -1).values * (b @ th[w].T).cumsum(-1)).sum(-1)


def chosen(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    part = b @ th[w].T
    return torch.where(a > 0, a * part, 0.1 * part**2).sum(-1) + part.amax(-1)


def rolled(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (torch.roll(a, 1, -1) * torch.cat([b[:, 1:], b[:, :1]], -1).matmul(th[w].mT)).sum(-1)


def in_place(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    part = (b @ th[w].T).mul_(0.5)
    part[:, 0] += a[:, 0]
    return (part.clone().tanh_() * a).sum(-1)


def indexed(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    places = torch.arange(a.shape[-1]).flip(0)
    return (a[:, places] * (b @ th[w].T).gather(-1, places.expand_as(a))).sum(-1)


def symmetric(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    square = th[w] @ th[w].T
    return (a * (a @ (square - torch.diag_embed(square.diagonal())))).sum(-1) * 0.1 + (b**2).mean(-1)


def polynomial(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    part = b @ th[w].T
    return (a * part / (1.0 + part**2) + 0.05 * a**3).sum(-1)


def normalised(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return F.cosine_similarity(a, b @ th[w].T, dim=-1) + (F.normalize(b, dim=-1).sum(-1) * 0.1)


def complex_phase(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    return (torch.complex(a, b @ th[w].T) * torch.complex(a.cos(), a.sin())).abs().sum(-1)


def looped(a: Tensor, b: Tensor, th: Theta, w: str) -> Tensor:
    total = a.new_zeros(a.shape[0])
    for n, row in enumerate(th[w]):
        total = total + a[:, n] * torch.tanh(b @ row)
    return total


TERMS: tuple[Term, ...] = (
    *(product, by_einsum, attention, dot_product_attention, gate, convolution, average_pool, log_sum_exp),
    *(layer_norm, hinge, ordered, chosen, rolled, in_place, indexed, symmetric, polynomial, normalised),
    *(complex_phase, looped),
)


def own_model(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Dynamics, Cost, Tensor, Tensor, str]:
    """A model, a cost, x, y, and what they are made of."""
    choice, source = random.Random(seed), torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)

    layers: list[Any] = [OUT, HID, *choice.choice([[], [SIDE], [(2, 2)]])]
    sizes = [n if isinstance(n, int) else 4 for n in layers]
    pairs = [(0, 1), *[(n - 1, n) for n in range(2, len(layers))]]
    terms = [(i, j, choice.choice(TERMS), f"W{i}{j}") for i, j in pairs]
    theta = {w: drawn(sizes[i], sizes[j]) * 0.4 / sizes[j] ** 0.5 for i, j, _, w in terms}
    theta |= {"V": drawn(sizes[-1], IN) * 0.4, "b": drawn(sizes[0]) * 0.2}
    gain, mask = choice.uniform(0.5, 1.0), (drawn(sizes[-1]) > -1.0).to(dtype)

    def phi(x: Tensor, s: State, th: Theta) -> Tensor:
        flat = [v.flatten(1) for v in s]
        value = (flat[-1] * mask * (x @ th["V"].T)).sum(-1) + flat[0] @ th["b"]
        for i, j, term, w in terms:
            value = value + gain * term(flat[i], flat[j], th, w)
        return value

    def energy(x: Tensor, s: State, th: Theta) -> Tensor:
        return torch.stack([v.flatten(1).square().sum(-1) for v in s]).sum(0) * 0.5 - phi(x, s, th)

    def transition(x: Tensor, s: State, th: Theta) -> State:
        with torch.enable_grad():
            inputs = tuple(v if v.requires_grad else v.view_as(v).requires_grad_() for v in s)
            total = phi(x, inputs, th).sum()
            found = torch.autograd.grad(total, inputs, create_graph=True)
        return tuple(torch.tanh(0.5 * g + 0.1 * v) for g, v in zip(found, s, strict=True))

    kind = choice.choice(["energy", "primitive", "transition", "class"])
    squash = choice.choice([torch.tanh, torch.sigmoid, lambda v: v.clamp(0.0, 1.0), lambda v: v.softmax(-1)])
    if kind == "energy":
        project = choice.choice([None, lambda v: v.clamp(-1.0, 1.0)])
        model: Dynamics = from_energy(energy, theta, layers, eps=choice.choice([0.1, 0.3]), project=project)
    elif kind == "primitive":
        model = from_primitive(phi, theta, layers, squash=squash, nudge_site=choice.choice(["outside", "inside"]))
    elif kind == "transition":
        model = from_transition(transition, theta, layers)
    else:
        model = OwnClass(phi, theta, layers)
    cost = _cost(choice, dtype)
    x, y = drawn(SAMPLES, IN), torch.rand((SAMPLES, OUT), generator=source, dtype=torch.float64).to(dtype)
    title = f"{kind}, {', '.join(term.__name__ for *_, term, _ in terms)}, {cost.title}"
    return model, cost, x, y, title


class OwnClass(PrimitiveDynamics):
    """A model as a class, with a buffer and a module of its own."""

    def __init__(self, phi: Callable[..., Tensor], theta: Theta, layers: list[Any]) -> None:
        super().__init__()
        self.phi, self.shapes = phi, [n if isinstance(n, tuple) else (n,) for n in layers]
        self.theta = nn.ParameterDict({name: nn.Parameter(v.clone()) for name, v in theta.items()})
        self.register_buffer("scale", torch.tensor(0.9, dtype=theta["V"].dtype))
        self.inner = nn.Linear(OUT, OUT, dtype=theta["V"].dtype)
        nn.init.constant_(self.inner.weight, 0.1)

    def init_state(self, x: Tensor) -> State:
        return zero_state(x, self.shapes, x.shape[:1])

    def primitive(self, x: Tensor, s: State) -> Tensor:
        own = (s[0] * self.inner(s[0])).sum(-1)
        return self.scale * self.phi(x, s, dict(self.theta.items())) + 0.1 * own

    def squash(self, s: State) -> State:
        return tuple(torch.tanh(v) for v in s)


def _cost(choice: random.Random, dtype: torch.dtype) -> Cost:
    def huber(s: State, y: Tensor) -> Tensor:
        return F.huber_loss(s[0], y, reduction="none").sum(-1)

    def regular(s: State, y: Tensor, theta: Theta) -> Tensor:
        return (s[0] - y).square().sum(-1) + 0.01 * next(iter(theta.values())).square().sum()

    return choice.choice(
        [
            SquaredError,
            SquaredError,
            lambda: FunctionCost(huber),
            lambda: FunctionCost(regular, parametric=True),
            lambda: CrossEntropy(OUT, OUT, seed=choice.randrange(9), dtype=dtype),
        ]
    )()
