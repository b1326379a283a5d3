"""Ten nets of a user's own, drawn from a seed: five that learn as they are, five with a fault each.

eqprop doctor tests/helpers/ten_nets.py:net_3
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eqprop import PrimitiveDynamics, SquaredError, from_energy, from_primitive
from eqprop.state import State

SEED, NETS, PIXELS, CLASSES = 39, 10, 12, 3
FAULTS = {
    "moves too slowly": {"eps": 0.002},
    "overshoots": {"stiffness": 9.0, "eps": 0.5},
    "unbounded below": {"leak": -1.0},
    "clamped outputs": {"frozen": True},
    "goes back and forth": {"gain": 6.0, "sigma": True},
}
"""What is wrong with the nets of odd numbers, in this order."""


def digits(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy patterns of three classes."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % CLASSES
    patterns = torch.eye(CLASSES).repeat_interleave(PIXELS // CLASSES, 1)
    x = 0.7 * patterns[labels] + 0.3 * torch.rand(samples, PIXELS, generator=source)
    return x, labels


def net(number: int, fault: dict[str, Any]) -> PrimitiveDynamics:
    draw, source = random.Random(f"{SEED} {number}"), torch.Generator().manual_seed(SEED + number)
    hidden = draw.randint(6, 14)
    gain = fault.get("gain", draw.uniform(0.4, 0.8))
    theta = {"W": torch.randn(CLASSES, hidden, generator=source), "V": torch.randn(hidden, PIXELS, generator=source)}
    theta = {name: gain * w / w.shape[1] ** 0.5 for name, w in theta.items()}
    theta["b"] = torch.zeros(CLASSES)
    seen = draw.choice([torch.tanh, torch.sin, torch.nn.functional.softsign])
    leak, stiffness = fault.get("leak", 1.0), fault.get("stiffness", 1.0)
    frozen = fault.get("frozen", False)

    def phi(x: Tensor, s: State, th: dict[str, Tensor]) -> Tensor:
        back = (s[0] * (seen(s[1]) @ th["W"].T + th["b"])).sum(-1)
        return back + (seen(s[1]) * (x @ th["V"].T)).sum(-1)

    def energy(x: Tensor, s: State, th: dict[str, Tensor]) -> Tensor:
        return 0.5 * leak * (s[0].square().sum(-1) + stiffness * s[1].square().sum(-1)) - phi(x, s, th)

    if frozen:
        return from_primitive(phi, theta, (CLASSES, hidden), squash=lambda v: v.clamp(5.0, 6.0))
    if fault.get("sigma"):
        return from_primitive(phi, theta, (CLASSES, hidden), squash=torch.tanh)
    if not fault and draw.random() < 0.5:
        return from_primitive(phi, theta, (CLASSES, hidden), squash=torch.tanh, nudge_site="inside")
    return from_energy(energy, theta, (CLASSES, hidden), eps=fault.get("eps", 0.3))


def _factory(number: int) -> Callable[[], Any]:
    fault = list(FAULTS.values())[number // 2] if number % 2 else {}

    def made() -> Any:
        return net(number, fault), SquaredError(), (*digits(60, 1), *digits(30, 2))

    return made


globals().update({f"net_{n}": _factory(n) for n in range(NETS)})
