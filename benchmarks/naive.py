"""The naive twin: a straightforward implementation of the paper's algorithms, the reference for every engine.

One network, eager torch, every product of every layer at every step (even of the static input), SGD by hand. It shares
no code with the models and engines it is compared with: parameters are a dictionary of tensors, the equations are
those of the paper's appendix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Theta = Mapping[str, Tensor]
Layers = list[Tensor]
Method = Literal["ep", "bptt"]


def sigmoid(v: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-4.0 * (v - 0.5)))


def sigmoid_slope(v: Tensor) -> Tensor:
    return 4.0 * sigmoid(v) * (1.0 - sigmoid(v))


def hard_sigmoid(v: Tensor) -> Tensor:
    return v.clamp(0.0, 1.0)


def hard_sigmoid_slope(v: Tensor) -> Tensor:
    return ((v >= 0.0) & (v <= 1.0)).to(v.dtype)


def tanh_slope(v: Tensor) -> Tensor:
    return 1.0 - torch.tanh(v) ** 2


SIGMA: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (sigmoid, sigmoid_slope),
    "hard-sigmoid": (hard_sigmoid, hard_sigmoid_slope),
    "tanh": (torch.tanh, tanh_slope),
}


class Net(ABC):
    """One step of a net and its dPhi/dtheta; `nudge_scale` is eps in the energy-based setting, else 1."""

    nudge_scale: float = 1.0

    @abstractmethod
    def zeros(self, theta: Theta, x: Tensor) -> Layers:
        """The state at t = 0."""

    @abstractmethod
    def step(self, theta: Theta, x: Tensor, s: Layers, push: Tensor | None = None) -> Layers:
        """All layers at t + 1 from all layers at t, with `push` added to the output."""

    def half_step(self, theta: Theta, x: Tensor, s: Layers, parity: int) -> Layers:
        """The layers of one parity (0: even) at t + 1, the others unchanged."""
        raise ValueError(f"The naive twin of {type(self).__name__} does not alternate. Use the synchronous schedule.")

    @abstractmethod
    def pairings(self, theta: Theta, x: Tensor, s: Layers) -> dict[str, Tensor]:
        """dPhi/dtheta at s, summed over the batch and divided by `nudge_scale`."""


def depth_of(theta: Theta, prefix: str = "W") -> int:
    """Number of matrices prefix01, prefix12, ..."""
    n = 0
    while f"{prefix}{n}{n + 1}" in theta:
        n += 1
    return n


def flat_zeros(theta: Theta, x: Tensor, prefix: str = "W") -> Layers:
    sizes = [theta[f"{prefix}{n}{n + 1}"].shape[0] for n in range(depth_of(theta, prefix))]
    return [x.new_zeros(x.shape[0], size) for size in sizes]


def total_input(theta: Theta, r: Layers, n: int) -> Tensor:
    """W_{n,n+1} r^{n+1} + b^n + W_{n-1,n}^T r^{n-1}, r ending with the input."""
    total = F.linear(r[n + 1], theta[f"W{n}{n + 1}"], theta.get(f"b{n}"))
    return total if n == 0 else total + torch.mm(r[n - 1], theta[f"W{n - 1}{n}"])


def flat_pairings(theta: Theta, r: Layers) -> dict[str, Tensor]:
    out = {}
    for n in range(len(r) - 1):
        out[f"W{n}{n + 1}"] = torch.mm(r[n].T, r[n + 1])
        if f"b{n}" in theta:
            out[f"b{n}"] = r[n].sum(0)
    return out


@dataclass(frozen=True)
class EnergyNet(Net):
    """s^n <- s^n + eps (-s^n + sigma'(s^n) (W sigma(s^{n+1}) + W^T sigma(s^{n-1}) + b)), then clipped to [0, 1].

    The nudge is eps beta (y - s^0), added before the clip  [exp:def-fc-eb]. Without `output_slope`, sigma'(s^0) is
    omitted, as in the authors' code.
    """

    eps: float
    sigma: str = "sigmoid"
    clip: bool = True
    output_slope: bool = True

    @property
    def nudge_scale(self) -> float:  # type: ignore[override]
        return self.eps

    def zeros(self, theta: Theta, x: Tensor) -> Layers:
        return flat_zeros(theta, x)

    def step(self, theta: Theta, x: Tensor, s: Layers, push: Tensor | None = None) -> Layers:
        sigma, slope = SIGMA[self.sigma]
        r = [sigma(v) for v in (*s, x)]
        new = []
        for n, v in enumerate(s):
            force = total_input(theta, r, n)
            if n > 0 or self.output_slope:
                force = slope(v) * force
            moved = v + self.eps * (force - v)
            if n == 0 and push is not None:
                moved = moved + push
            new.append(moved.clamp(0.0, 1.0) if self.clip else moved)
        return new

    def pairings(self, theta: Theta, x: Tensor, s: Layers) -> dict[str, Tensor]:
        sigma, _ = SIGMA[self.sigma]
        return flat_pairings(theta, [sigma(v) for v in (*s, x)])


@dataclass(frozen=True)
class PrototypicalNet(Net):
    """s^n <- sigma(W s^{n+1} + W^T s^{n-1} + b), the nudge beta (y - s^0) outside sigma  [exp:def-fc-p]."""

    sigma: str = "sigmoid"

    def zeros(self, theta: Theta, x: Tensor) -> Layers:
        return flat_zeros(theta, x)

    def step(self, theta: Theta, x: Tensor, s: Layers, push: Tensor | None = None) -> Layers:
        sigma, _ = SIGMA[self.sigma]
        new = [sigma(total_input(theta, [*s, x], n)) for n in range(len(s))]
        if push is not None:
            new[0] = new[0] + push
        return new

    def half_step(self, theta: Theta, x: Tensor, s: Layers, parity: int) -> Layers:
        sigma, _ = SIGMA[self.sigma]
        return [sigma(total_input(theta, [*s, x], n)) if n % 2 == parity else v for n, v in enumerate(s)]

    def pairings(self, theta: Theta, x: Tensor, s: Layers) -> dict[str, Tensor]:
        return flat_pairings(theta, [*s, x])


@dataclass(frozen=True)
class ConvNet(Net):
    """h^n <- sigma(P(W * h^{n+1} + b) + W~ * P^-1(h^{n-1})) under flat layers as in `PrototypicalNet`  [exp:conv].

    Layers are s0, ..., then h0, h1, ...; h0 flattened is the last flat layer's input. Inverse pooling uses the arg-max
    of the current state.
    """

    sigma: str = "hard-sigmoid"
    pool: int = 2
    padding: int = 0

    def zeros(self, theta: Theta, x: Tensor) -> Layers:
        maps: Layers = []
        h = x
        for n in reversed(range(depth_of(theta, "Wconv"))):
            h = torch.zeros_like(self.pooled(theta, h, n)[0])
            maps.insert(0, h)
        return [*flat_zeros(theta, x, "Wfc"), *maps]

    def pooled(self, theta: Theta, h: Tensor, n: int) -> tuple[Tensor, Tensor, torch.Size]:
        """P(W_{n,n+1} * h + b), the positions of the maxima, the size before pooling."""
        z = F.conv2d(h, theta[f"Wconv{n}{n + 1}"], theta.get(f"bconv{n}"), padding=self.padding)
        values, indices = F.max_pool2d(z, self.pool, return_indices=True)
        return values, indices, z.shape

    def unpooled(self, h: Tensor, indices: Tensor, size: torch.Size) -> Tensor:
        return F.max_unpool2d(h, indices, [self.pool, self.pool], output_size=list(size))

    def step(self, theta: Theta, x: Tensor, s: Layers, push: Tensor | None = None) -> Layers:
        new = self.update(theta, x, s, range(len(s)))
        if push is not None:
            new[0] = new[0] + push
        return new

    def half_step(self, theta: Theta, x: Tensor, s: Layers, parity: int) -> Layers:
        return self.update(theta, x, s, range(parity, len(s), 2))

    def update(self, theta: Theta, x: Tensor, s: Layers, wanted: range) -> Layers:
        """The wanted layers at t + 1; each convolution they need is computed once."""
        sigma, _ = SIGMA[self.sigma]
        first = depth_of(theta, "Wfc")
        flat, maps = s[:first], [*s[first:], x]
        chain = [*flat, maps[0].flatten(1)]
        new = list(s)
        for n in range(first):
            if n in wanted:
                new[n] = sigma(self.flat_input(theta, chain, n))
        needed = [n for n in range(len(maps) - 1) if first + n in wanted or first + n + 1 in wanted]
        pooled = {n: self.pooled(theta, maps[n + 1], n) for n in needed}
        for n in range(len(maps) - 1):
            if first + n not in wanted:
                continue
            if n == 0:
                feedback = torch.mm(flat[-1], theta[f"Wfc{first - 1}{first}"]).view_as(maps[0])
            else:
                spread = self.unpooled(maps[n - 1], *pooled[n - 1][1:])
                feedback = F.conv_transpose2d(spread, theta[f"Wconv{n - 1}{n}"], padding=self.padding)
            new[first + n] = sigma(pooled[n][0] + feedback)
        return new

    def flat_input(self, theta: Theta, chain: Layers, n: int) -> Tensor:
        total = F.linear(chain[n + 1], theta[f"Wfc{n}{n + 1}"], theta.get(f"bfc{n}"))
        return total if n == 0 else total + torch.mm(chain[n - 1], theta[f"Wfc{n - 1}{n}"])

    def pairings(self, theta: Theta, x: Tensor, s: Layers) -> dict[str, Tensor]:
        first = depth_of(theta, "Wfc")
        flat, maps = s[:first], [*s[first:], x]
        chain = [*flat, maps[0].flatten(1)]
        out = {}
        for n in range(first):
            out[f"Wfc{n}{n + 1}"] = torch.mm(chain[n].T, chain[n + 1])
            if f"bfc{n}" in theta:
                out[f"bfc{n}"] = chain[n].sum(0)
        for n in range(len(maps) - 1):
            _, indices, size = self.pooled(theta, maps[n + 1], n)
            spread = self.unpooled(maps[n], indices, size)
            by_channel = F.conv2d(maps[n + 1].transpose(0, 1), spread.transpose(0, 1), padding=self.padding)
            out[f"Wconv{n}{n + 1}"] = by_channel.transpose(0, 1)
            if f"bconv{n}" in theta:
                out[f"bconv{n}"] = maps[n].sum((0, 2, 3))
        return out


@dataclass(frozen=True)
class Recipe:
    """How to train a net: T free steps, K more, SGD with a learning rate per parameter.

    With `alternating` the free phase updates even and odd layers in turn, the even ones last; the K nudged or
    differentiated steps are synchronous.
    """

    net: Net
    method: Method
    T: int
    K: int
    beta: float
    lr: Mapping[str, float]
    alternating: bool = False


@torch.no_grad()
def free_phase(recipe: Recipe, theta: Theta, x: Tensor, T: int) -> Layers:
    """T steps from zero  [eq:1st-phase]."""
    s = recipe.net.zeros(theta, x)
    for t in range(T):
        if recipe.alternating:
            s = recipe.net.half_step(theta, x, s, (T - 1 - t) % 2)
        else:
            s = recipe.net.step(theta, x, s)
    return s


def train_step(recipe: Recipe, theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Layers:
    """Run one iteration on a mini-batch and update theta in place. Returns the last state of the first phase."""
    return (_ep if recipe.method == "ep" else _bptt)(recipe, theta, x, y)


@torch.no_grad()
def _ep(recipe: Recipe, theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Layers:
    """theta += lr / (B beta) (dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_*))  [eq:ep-grad]."""
    net = recipe.net
    free = free_phase(recipe, theta, x, recipe.T)
    s = free
    for _ in range(recipe.K):
        s = net.step(theta, x, s, recipe.beta * net.nudge_scale * (y - s[0]))
    plus, minus = net.pairings(theta, x, s), net.pairings(theta, x, free)
    for name, value in theta.items():
        value += recipe.lr[name] / (recipe.beta * x.shape[0]) * (plus[name] - minus[name])
    return free


def _bptt(recipe: Recipe, theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Layers:
    """theta -= lr dL/dtheta through the last K steps  [eq:total-gradient]."""
    s = free_phase(recipe, theta, x, recipe.T - recipe.K)
    leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
    for _ in range(recipe.K):
        s = recipe.net.step(leaves, x, s)
    loss = 0.5 * ((s[0] - y) ** 2).sum() / x.shape[0]
    loss.backward()
    with torch.no_grad():
        for name, value in theta.items():
            grad = leaves[name].grad
            if grad is not None:
                value -= recipe.lr[name] * grad
    return [v.detach() for v in s]
