"""Small nets, batches and measures that the tests of the core share. Everything in float64 unless told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eqprop import BPTT, EP, Dynamics, Phase, Processes, Relaxation, SquaredError, from_transition, limit_steps, relax
from eqprop.estimators import Step
from eqprop.models import Convolutional, Layered, Toy
from eqprop.models.network import GraphNet
from eqprop.state import State
from helpers.tolerances import STEADY

F64 = torch.float64
LONG = 4000
"""Steps after which every net here has settled; with stop="settled" most need a tenth."""


def random_like(shape: tuple[int, ...], seed: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, generator=source, dtype=F64)


def batch(model: Dynamics, samples: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1] and one-hot targets for a model that knows its input's shape."""
    assert model.input_shape is not None
    x = random_like((samples, *model.input_shape), seed, 0.0)
    outputs = model.init_state(x)[0].shape[-1]
    labels = torch.randint(outputs, (samples,), generator=torch.Generator().manual_seed(seed + 1))
    return x, torch.nn.functional.one_hot(labels, outputs).to(F64)


def toy(**options: Any) -> Toy:
    chosen: dict[str, Any] = {"eps": 0.7, "seed": 0, "dtype": F64} | options
    return Toy((3, 6, 4), **chosen)


def energy_based(depth: int, activation: Any = "tanh", **options: Any) -> Layered:
    sizes = (3, *[5] * (depth - 1), 4)
    chosen: dict[str, Any] = {"eps": 0.7, "init": "default", "seed": 0, "dtype": F64} | options
    return Layered(sizes, "energy-based", activation, **chosen)


def prototypical(depth: int, activation: Any = "tanh", **options: Any) -> Layered:
    sizes = (3, *[5] * (depth - 1), 4)
    chosen: dict[str, Any] = {"init": "default", "seed": 0, "dtype": F64} | options
    return Layered(sizes, "prototypical", activation, **chosen)


def convolutional(**options: Any) -> Convolutional:
    sizes: dict[str, Any] = {"input_shape": (1, 10, 10), "channels": (3, 2), "flat": (3,), "kernel": 3}
    return Convolutional(**sizes | {"seed": 0, "dtype": F64} | options)


def gradient_nets() -> dict[str, Dynamics]:
    """Nets with F = dPhi/ds and no clip, where the theorem is exact."""
    layered = {
        f"EB depth {depth} {sigma}": energy_based(depth, sigma)
        for depth in (1, 2, 3, 4)
        for sigma in ("tanh", "sigmoid")
    }
    return {"toy": toy(), "toy without biases": toy(bias=False), **layered}


def prototypical_nets() -> dict[str, Layered]:
    return {f"P depth {d} {sigma}": prototypical(d, sigma) for d in (1, 2, 3, 4) for sigma in ("tanh", "sigmoid")}


def asymmetric(coupling: float = 1.0) -> Dynamics:
    """F(x, s) = tanh(A s + V x) / 2 with A not symmetric: no primitive has it for a derivative."""

    def transition(x: Tensor, s: State, theta: Any) -> State:
        s0, s1 = s
        drive = x @ theta["V"].T
        return 0.5 * torch.tanh(s1 @ theta["A"].T), 0.5 * torch.tanh(coupling * s0 @ theta["B"].T + drive)

    parameters = {"A": random_like((2, 4), 1), "B": random_like((4, 2), 2), "V": random_like((4, 3), 3)}
    model = from_transition(transition, parameters, layers=(2, 4))
    model.input_shape = (3,)
    return model


def settle(model: Dynamics, x: Tensor, keep: int = 0) -> Relaxation:
    """The steady state, checked to be one, with `keep` states before it."""
    free = relax(model, x, Phase(LONG, stop="settled", still=1e-15), keep=keep)
    assert float(free.residual.max()) < STEADY
    return free


def bptt_processes(model: Dynamics, x: Tensor, y: Tensor, free: Relaxation, K: int) -> Processes:
    return BPTT(T=LONG, K=K).processes(model, SquaredError(), x, y, free)


def ep_processes(model: Dynamics, x: Tensor, y: Tensor, free: Relaxation, K: int, beta: float) -> Processes:
    return EP(T=LONG, K=K, beta=beta).processes(model, SquaredError(), x, y, free)


def limit_processes(model: Dynamics, x: Tensor, y: Tensor, free: Relaxation, K: int) -> Processes:
    return gather(limit_steps(model, SquaredError(), x, y, free, K))


def gather(steps: Iterable[Step]) -> Processes:
    taken = list(steps)
    neurons = tuple(torch.stack(layer) for layer in zip(*(step.neurons for step in taken), strict=True))
    synapses = {name: torch.stack([step.synapses[name] for step in taken]) for name in taken[0].synapses}
    return Processes(neurons, synapses, {})


def groups(processes: Processes) -> dict[str, Tensor]:
    """Every layer and parameter by name, (K, ...)."""
    return {f"s{n}": layer for n, layer in enumerate(processes.neurons)} | processes.synapses


def gap(delta: Processes, nabla: Processes) -> dict[str, float]:
    """max over steps and elements of |Delta + nabla|, group by group."""
    one, other = groups(delta), groups(nabla)
    assert one.keys() == other.keys()
    return {name: float((one[name] + other[name]).abs().max()) for name in one}


def relative_gap(delta: Processes, nabla: Processes) -> dict[str, float]:
    sizes = {name: float(value.abs().max()) for name, value in groups(nabla).items()}
    return {name: value / sizes[name] for name, value in gap(delta, nabla).items()}


def sums(processes: Processes) -> dict[str, Tensor]:
    return {name: value.sum(0) for name, value in processes.synapses.items()}


def named(model: Dynamics, grads: dict[torch.nn.Parameter, Tensor]) -> dict[str, Tensor]:
    return {name: grads[p] for name, p in model.named_parameters() if p in grads}


def at_rest(free: Relaxation, K: int) -> Relaxation:
    """The same end with K copies of it as its trail, as if the phase had rested there."""
    return replace(free, trail=(free.state,) * K)


def pooled_net(input_shape: tuple[int, int, int], sides: int) -> GraphNet:
    """Four maps, pooled by 4, and ten linear outputs, in two groups."""
    return GraphNet(
        input_shape=input_shape,
        layers={"s0": 10, "s1": (4, sides, sides)},
        connections=(
            {"kind": "dense", "pre": "s1", "post": "s0"},
            {"kind": "conv", "pre": "x", "post": "s1", "kernel": 3, "padding": 1, "pool": 4},
        ),
        activation={"s0": "identity", "*": "hard-sigmoid"},
        groups=(("s1",), ("s0",)),
    )
