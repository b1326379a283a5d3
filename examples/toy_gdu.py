"""The paper's toy model: compare EP's updates with BPTT's gradients, step by step.

5 outputs, 50 hidden and 10 input neurons, tanh, eps = 0.08, T = 5000 free steps, K = 80 steps compared, one random
input and a one-hot target, float64. The theorem says Delta(beta, t) -> -nabla(t) as beta -> 0 for every neuron and
synapse and every t < K.

    python examples/toy_gdu.py
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

import eqprop
from eqprop.estimators import Step

T, K, BETA, EPS, SEED = 5000, 80, 0.01, 0.08, 0


def processes(steps: Iterable[Step]) -> dict[str, Tensor]:
    """The process of every layer and synapse group by name, as (K, elements)."""
    taken = list(steps)
    layers = {f"s{n}": [step.neurons[n] for step in taken] for n in range(len(taken[0].neurons))}
    weights = {name: [step.synapses[name] for step in taken] for name in taken[0].synapses}
    return {name: torch.stack(values).flatten(1) for name, values in (layers | weights).items()}


def relative_errors(delta: Tensor, nabla: Tensor) -> Tensor:
    """|Delta + nabla| / max(|Delta|, |nabla|) with norms over time, one value per element  [exp:rmse]."""
    return (delta + nabla).norm(dim=0) / torch.maximum(delta.norm(dim=0), nabla.norm(dim=0))


def report(nabla: dict[str, Tensor], compared: dict[str, dict[str, Tensor]]) -> Table:
    title = "Relative error between Delta EP and -nabla BPTT, over each group"
    table = Table(title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in ("group", "size", *(text for name in compared for text in (f"{name}\nmax", "\nmean"))):
        table.add_column(heading, justify="right", no_wrap=True)
    for group, back in nabla.items():
        errors = [relative_errors(delta[group], back) for delta in compared.values()]
        figures = [f"{value:.1e}" for e in errors for value in (float(e.max()), float(e.mean()))]
        table.add_row(group, str(back.shape[1]), *figures)
    return table


def main() -> None:
    started = time.perf_counter()
    model = eqprop.models.Toy((5, 50, 10), "tanh", eps=EPS, bias=False, seed=SEED, dtype=torch.float64)
    source = torch.Generator().manual_seed(SEED)
    x = torch.rand(1, 10, generator=source, dtype=torch.float64)
    y = eqprop.data.one_hot(torch.randint(5, (1,), generator=source), 5, torch.float64)
    cost = eqprop.SquaredError()
    free = eqprop.relax(model, x, T, keep=K)

    nabla = processes(eqprop.BPTT(T, K).steps(model, cost, x, y, free))
    compared = {"beta -> 0": processes(eqprop.limit_steps(model, cost, x, y, free, K))}
    for beta in (BETA / 10, BETA):
        compared = {f"beta {beta}": processes(eqprop.EP(T, K, beta=beta).steps(model, cost, x, y, free)), **compared}
    console = Console()
    console.print(f"Toy model 10-50-5, tanh, eps {EPS}, T {T}, K {K}, seed {SEED}, float64")
    console.print(f"steady state: residual {float(free.residual.max()):.1e} after {free.steps} steps")
    console.print(report(nabla, compared))
    console.print(f"{time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
