"""Steps of torch's optimizers as functions of arrays, for the few that training in a program serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from eqprop.engines.xla.windows import Array

Values = tuple[Array, ...]


@dataclass(frozen=True)
class Rule(ABC):
    """How an optimizer steps one parameter, by its group's options; the rate comes with every step."""

    weight_decay: float
    maximize: bool

    @abstractmethod
    def read(self, p: nn.Parameter, state: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
        """What torch keeps of the parameter, as arrays; what it has not made yet is zero."""

    @abstractmethod
    def write(self, p: nn.Parameter, state: dict[str, Any], values: list[np.ndarray[Any, Any]]) -> None:
        """Keep it as torch does."""

    @abstractmethod
    def step(self, p: Array, g: Array, kept: Values, rate: Array) -> tuple[Array, Values]:
        """The parameter and what is kept after a step."""

    def plain(self, p: Any, slope: Any, decay: bool = True) -> np.ndarray[Any, Any]:
        """The gradient that `slope` was made of."""
        g = slope - p * p.dtype.type(self.weight_decay) if decay and self.weight_decay else slope
        return np.ascontiguousarray(-g if self.maximize else g)

    @abstractmethod
    def gradient(self, before: Any, after: Any, kept: Any, rate: float) -> np.ndarray[Any, Any]:
        """The gradient of a first step, with nothing kept before it, from what it left."""

    def slope(self, p: Array, g: Array, decay: bool = True) -> Array:
        """The gradient with its sign and, in the gradient, the decay of weights."""
        g = -g if self.maximize else g
        return g + p * self.weight_decay if decay and self.weight_decay else g


@dataclass(frozen=True)
class Sgd(Rule):
    """p <- p - rate v, v <- momentum v + (1 - dampening) g, where v is g at the first step."""

    momentum: float
    dampening: float
    nesterov: bool

    def read(self, p: nn.Parameter, state: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
        if not self.momentum:
            return []
        v = state.get("momentum_buffer")
        return [np.array(float(v is not None)), np.zeros(p.shape, _of(p)) if v is None else v.detach().numpy()]

    def write(self, p: nn.Parameter, state: dict[str, Any], values: list[np.ndarray[Any, Any]]) -> None:
        if values and float(values[0]):
            state["momentum_buffer"] = _kept(state.get("momentum_buffer"), p, values[1])

    def step(self, p: Array, g: Array, kept: Values, rate: Array) -> tuple[Array, Values]:
        g = self.slope(p, g)
        if self.momentum:
            begun, v = kept
            v = jnp.where(begun > 0, v * self.momentum + g * (1.0 - self.dampening), g)
            kept = jnp.ones_like(begun), v
            g = g + v * self.momentum if self.nesterov else v
        return p + g * (-rate).astype(p.dtype), kept

    def gradient(self, before: Any, after: Any, kept: Any, rate: float) -> np.ndarray[Any, Any]:
        found = np.asarray(kept[1]) if self.momentum else (before - np.asarray(after)) / before.dtype.type(rate)
        return self.plain(before, found)


@dataclass(frozen=True)
class Adam(Rule):
    """p <- p - rate m / (sqrt(v) + eps), with m and v the running means of g and g^2, corrected for their start."""

    betas: tuple[float, float]
    eps: float
    amsgrad: bool
    decoupled_weight_decay: bool

    @property
    def _names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def read(self, p: nn.Parameter, state: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
        means = [state[name].detach().numpy() if state else np.zeros(p.shape, _of(p)) for name in self._names]
        return [np.array(float(state["step"]) if state else 0.0), *means]

    def write(self, p: nn.Parameter, state: dict[str, Any], values: list[np.ndarray[Any, Any]]) -> None:
        if not float(values[0]):
            return
        taken = state.get("step")
        dtype = torch.get_default_dtype() if taken is None else taken.dtype
        state["step"] = torch.tensor(float(values[0]), dtype=dtype)
        for name, value in zip(self._names, values[1:], strict=True):
            state[name] = _kept(state.get(name), p, value)

    def step(self, p: Array, g: Array, kept: Values, rate: Array) -> tuple[Array, Values]:
        count, m, v = kept[0] + 1.0, kept[1], kept[2]
        first, second = self.betas
        if self.weight_decay and self.decoupled_weight_decay:
            p = p * (1.0 - rate * self.weight_decay).astype(p.dtype)
        g = self.slope(p, g, decay=not self.decoupled_weight_decay)
        m = m + (g - m) * (1.0 - first)
        v = v * second + g * g * (1.0 - second)
        largest = jnp.maximum(kept[3], v) if self.amsgrad else v
        size, root = -rate / (1.0 - first**count), jnp.sqrt(1.0 - second**count)
        below = jnp.sqrt(largest) / root.astype(p.dtype) + self.eps
        return p + m * size.astype(p.dtype) / below, (count, m, v, *((largest,) if self.amsgrad else ()))

    def gradient(self, before: Any, after: Any, kept: Any, rate: float) -> np.ndarray[Any, Any]:
        found = np.asarray(kept[1]) / before.dtype.type(1.0 - self.betas[0])
        return self.plain(before, found, not self.decoupled_weight_decay)


_RULES: dict[type[torch.optim.Optimizer], type[Rule]] = {
    torch.optim.SGD: Sgd,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
}


def rules_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, Rule] | None:
    """How each parameter is stepped; None for an optimizer that only torch can step."""
    kind = _RULES.get(type(optimizer))
    hooked = any(vars(optimizer).get(name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    if kind is None or hooked or "step" in vars(optimizer) or _hooked_everywhere():
        return None
    found: dict[nn.Parameter, Rule] = {}
    for group in optimizer.param_groups:
        options = {f.name: group[f.name] for f in fields(kind)}
        tensors = any(isinstance(value, Tensor) for value in (*options.values(), *options.get("betas", ())))
        if tensors or group.get("differentiable") or group.get("capturable"):
            return None
        found |= dict.fromkeys(group["params"], kind(**options))
    return found if not any(p.is_complex() for p in found) else None


def _hooked_everywhere() -> bool:
    from torch.optim import optimizer

    return bool(optimizer._global_optimizer_pre_hooks or optimizer._global_optimizer_post_hooks)


def rates_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, float]:
    """The rate of each parameter as it is now."""
    return {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}


def _of(p: Tensor) -> Any:
    return p.detach().numpy().dtype


def _kept(before: Tensor | None, p: Tensor, value: np.ndarray[Any, Any]) -> Tensor:
    """The value where torch keeps it."""
    place = torch.empty_like(p, requires_grad=False) if before is None else before
    place.numpy()[...] = value
    return place
