"""Steps and updates written again in plain numpy, sample by sample, from the paper's equations.

The library's fast formulas are tested against the autodiff of its Phi elsewhere; a mistake in Phi itself would pass
there. It would not pass here: nothing below uses Phi, torch's autograd or a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.tolerances import SAME_FORMULA
from numpy.typing import NDArray

from eqprop import EP, Nudge, Phase, SquaredError, relax
from eqprop.models import Convolutional, Layered, Toy

Array = NDArray[np.float64]
Rows = list[tuple[list[Array], list[Array]]]
"""Free and nudged state of each sample."""

ETA = 0.35  # a large beta: nothing here is a limit


def sigmoid(v: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-4.0 * (v - 0.5)))


def sigmoid_slope(v: Array) -> Array:
    return 4.0 * np.exp(-4.0 * (v - 0.5)) / (1.0 + np.exp(-4.0 * (v - 0.5))) ** 2


def weights(model: torch.nn.Module) -> dict[str, Array]:
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random(shape)


def prototypical_step(w: dict[str, Array], x: Array, s: list[Array], y: Array, beta: float) -> list[Array]:
    """Three layers: s0 = sigma(W01 s1 + b0) + beta (y - s0), s1 = sigma(W12 s2 + W01^T s0 + b1), ..."""
    s0, s1, s2 = s
    return [
        sigmoid(w["W01"] @ s1 + w["b0"]) + beta * (y - s0),
        sigmoid(w["W12"] @ s2 + w["W01"].T @ s0 + w["b1"]),
        sigmoid(w["W23"] @ x + w["W12"].T @ s1 + w["b2"]),
    ]


def energy_based_step(w: dict[str, Array], x: Array, s: list[Array], y: Array, beta: float, eps: float) -> list[Array]:
    """s <- (1 - eps) s + eps sigma'(s) (W sigma(s) + b), the output nudged by beta eps (y - s0), then cut to [0, 1]."""
    s0, s1, s2 = s
    r0, r1, r2, rx = (sigmoid(v) for v in (s0, s1, s2, x))
    new = [
        (1 - eps) * s0 + eps * sigmoid_slope(s0) * (w["W01"] @ r1 + w["b0"]) + beta * eps * (y - s0),
        (1 - eps) * s1 + eps * sigmoid_slope(s1) * (w["W12"] @ r2 + w["W01"].T @ r0 + w["b1"]),
        (1 - eps) * s2 + eps * sigmoid_slope(s2) * (w["W23"] @ rx + w["W12"].T @ r1 + w["b2"]),
    ]
    return [np.minimum(np.maximum(v, 0.0), 1.0) for v in new]


def toy_step(w: dict[str, Array], x: Array, s: list[Array], y: Array, beta: float, eps: float) -> list[Array]:
    s0, s1 = s
    t0, t1, tx = np.tanh(s0), np.tanh(s1), np.tanh(x)
    return [
        (1 - eps) * s0 + eps * (1 - t0**2) * (w["W01"] @ t1 + w["W0x"] @ tx + w["b0"]) + eps * beta * (y - s0),
        (1 - eps) * s1 + eps * (1 - t1**2) * (w["W01"].T @ t0 + w["W1x"] @ tx + w["b1"]),
    ]


def ep_gradient(rows: Rows, x: Array, kind: str) -> dict[str, Array]:
    """-(1/beta) times the mean of r r^T at the end of the second phase minus that at its beginning."""
    rates: dict[str, Callable[[Array], Array]] = {"P": lambda v: v, "EB": sigmoid, "toy": np.tanh}
    rate = rates[kind]
    out: dict[str, Array] = {}
    for n, (free, nudged) in enumerate(rows):
        for sign, state in ((-1.0, nudged), (1.0, free)):
            r = [rate(v) for v in state] + [rate(x[n])]
            last = len(state) - 1
            products = {f"b{i}": r[i] for i in range(len(state))}
            if kind == "toy":
                products |= {"W01": np.outer(r[0], r[1]), "W0x": np.outer(r[0], r[2]), "W1x": np.outer(r[1], r[2])}
            else:
                products |= {f"W{i}{i + 1}": np.outer(r[i], r[i + 1]) for i in range(last + 1)}
            for name, value in products.items():
                out[name] = out.get(name, np.zeros_like(value)) + sign * value / (ETA * len(rows))
    return out


def run(kind: str, w: dict[str, Array], x: Array, y: Array, sizes: list[int], T: int, K: int) -> Rows:
    """Both phases of every sample, from the zero state."""
    rows = []
    for n in range(len(x)):
        s = [np.zeros(size) for size in sizes]
        for t in range(T + K):
            beta = ETA if t >= T else 0.0
            if t == T:
                free = [v.copy() for v in s]
            if kind == "P":
                s = prototypical_step(w, x[n], s, y[n], beta)
            elif kind == "EB":
                s = energy_based_step(w, x[n], s, y[n], beta, 0.4)
            else:
                s = toy_step(w, x[n], s, y[n], beta, 0.4)
        rows.append((free, s))
    return rows


MODELS = {
    "P": lambda: Layered((2, 4, 3, 5), "prototypical", "sigmoid", init="default", seed=3, dtype=torch.float64),
    "EB": lambda: Layered(
        (2, 4, 3, 5), "energy-based", "sigmoid", eps=0.4, clip=True, init=_wide, seed=3, dtype=torch.float64
    ),
    "toy": lambda: Toy((2, 4, 5), "tanh", eps=0.4, seed=3, dtype=torch.float64),
}


def _wide(name: str, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """Weights large enough that the clip holds some neurons at 0 and some at 1."""
    return 12.0 * torch.rand(shape, generator=source, dtype=torch.float64) - 5.0


@pytest.mark.parametrize("kind", MODELS)
def test_both_phases_and_the_update(kind: str) -> None:
    model, T, K = MODELS[kind](), 12, 5
    x, y = draw(3, 5), draw(3, 2, seed=1)
    rows = run(kind, weights(model), x, y, [2, 4, 3] if kind != "toy" else [2, 4], T, K)
    xt, yt = torch.from_numpy(x), torch.from_numpy(y)
    free = relax(model, xt, T)
    nudged = relax(model, xt, Phase(K), free.state, Nudge(SquaredError(), yt, ETA))
    for which, relaxation in enumerate((free, nudged)):
        for n, layer in enumerate(relaxation.state):
            twin = np.stack([row[which][n] for row in rows])
            np.testing.assert_allclose(layer.numpy(), twin, rtol=0.0, atol=SAME_FORMULA)
    _, grads = EP(T=T, K=K, beta=ETA).gradient(model, SquaredError(), xt, yt)
    updates = ep_gradient(rows, x, kind)
    assert updates.keys() == weights(model).keys()
    for name, p in model.named_parameters():
        np.testing.assert_allclose(grads[p].numpy(), updates[name], rtol=0.0, atol=100 * SAME_FORMULA, err_msg=name)
    if kind == "EB":
        held = np.concatenate([np.concatenate(row[1]) for row in rows])
        assert (held == 0.0).any()
        assert (held == 1.0).any()


def test_one_step_of_a_convolutional_net() -> None:
    """Two convolutions written as loops: h1 sees the image and what h0 sends back through the pooling zones' maxima."""
    model = Convolutional((1, 8, 8), (3, 2), (2,), "sigmoid", kernel=3, padding=1, pool=2, seed=1, dtype=torch.float64)
    w, x = weights(model), draw(1, 8, 8)
    s0, h0, h1 = draw(2, seed=1), draw(3, 2, 2, seed=2), draw(2, 4, 4, seed=3)
    step = model.transition(torch.from_numpy(x)[None], tuple(torch.from_numpy(v)[None] for v in (s0, h0, h1)))
    pooled0, where = pool(convolve(w["Wconv01"], h1) + w["bconv0"][:, None, None])
    pooled1, _ = pool(convolve(w["Wconv12"], x) + w["bconv1"][:, None, None])
    back = np.zeros((2, 6, 6))  # h1 with its padding of 1
    for (c, i, j), (p, q) in where.items():
        back[:, p : p + 3, q : q + 3] += h0[c, i, j] * w["Wconv01"][c]
    expected = [
        sigmoid(w["Wfc01"] @ h0.reshape(-1) + w["bfc0"]),
        sigmoid(pooled0 + (w["Wfc01"].T @ s0).reshape(3, 2, 2)),
        sigmoid(pooled1 + back[:, 1:5, 1:5]),
    ]
    for layer, twin in zip(step, expected, strict=True):
        np.testing.assert_allclose(layer[0].detach().numpy(), twin, rtol=0.0, atol=SAME_FORMULA)


def convolve(w: Array, h: Array) -> Array:
    padded = np.pad(h, ((0, 0), (1, 1), (1, 1)))
    out = np.zeros((len(w), *h.shape[1:]))
    for c in range(len(w)):
        for i in range(h.shape[1]):
            for j in range(h.shape[2]):
                out[c, i, j] = (w[c] * padded[:, i : i + 3, j : j + 3]).sum()
    return out


def pool(z: Array) -> tuple[Array, dict[tuple[int, int, int], tuple[int, int]]]:
    """The maximum of each 2 x 2 zone and where in z it stands."""
    channels, height, width = z.shape
    out, where = np.zeros((channels, height // 2, width // 2)), {}
    for c in range(channels):
        for i in range(height // 2):
            for j in range(width // 2):
                zone = z[c, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
                r, q = np.unravel_index(zone.argmax(), zone.shape)
                out[c, i, j], where[c, i, j] = zone[r, q], (2 * i + int(r), 2 * j + int(q))
    return out, where
