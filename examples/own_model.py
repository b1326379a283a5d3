"""Your own model: all it takes is a scalar function of the state.

The model below has what the built-in ones lack: connections between hidden neurons, and a shortcut from the input to
the output. It is written twice, as a class (its primitive Phi) and as a function (its energy E), checked against BPTT
step by step, and trained with EP on a problem that no net without a hidden layer can solve.

    python examples/own_model.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import eqprop

EPS = 0.5


class Lateral(eqprop.PrimitiveDynamics):
    """Phi = 1/2 |s|^2 - eps E, with E as in `energy`; the dynamics s_{t+1} = dPhi/ds follow from it."""

    def __init__(self, outputs: int, hidden: int, inputs: int, seed: int = 0) -> None:
        super().__init__()
        self.input_shape, self.sizes = (inputs,), (outputs, hidden)
        source = torch.Generator().manual_seed(seed)
        shapes = {"W": (outputs, hidden), "A": (hidden, hidden), "U": (outputs, inputs), "V": (hidden, inputs)}
        for name, shape in {**shapes, "b": (hidden,)}.items():
            draw = torch.rand(shape, generator=source, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(draw - 0.5))

    def init_state(self, x: Tensor) -> eqprop.State:
        return tuple(x.new_zeros(len(x), n) for n in self.sizes)

    def primitive(self, x: Tensor, s: eqprop.State) -> Tensor:
        squares = s[0].square().sum(-1) + s[1].square().sum(-1)
        return 0.5 * squares - EPS * energy(x, s, dict(self.named_parameters()))


def energy(x: Tensor, s: eqprop.State, theta: Mapping[str, Tensor]) -> Tensor:
    """E = 1/2 |s|^2 - r0.W.r1 - r1.A.r1/2 - r0.U.x - r1.(V.x + b), r = tanh(s): one value per sample."""
    r0, r1 = torch.tanh(s[0]), torch.tanh(s[1])
    to_output = r1 @ theta["W"].T + x @ theta["U"].T
    to_hidden = 0.5 * r1 @ theta["A"].T + x @ theta["V"].T + theta["b"]
    leak = 0.5 * (s[0].square().sum(-1) + s[1].square().sum(-1))
    return leak - (r0 * to_output).sum(-1) - (r1 * to_hidden).sum(-1)


def by_function(model: Lateral) -> eqprop.PrimitiveDynamics:
    """The same model built from its energy: a function, parameters by name, layer sizes and the step."""
    return eqprop.from_energy(energy, dict(model.named_parameters()), layers=model.sizes, eps=EPS)


def two_bits() -> tuple[Tensor, Tensor]:
    """Exclusive or on inputs of plus and minus one."""
    x = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    return x, -0.5 * x[:, :1] * x[:, 1:]


def check(model: Lateral, x: Tensor, y: Tensor) -> None:
    """Compare EP's updates in the limit beta -> 0 with the gradients of BPTT, step by step."""
    cost, T, K = eqprop.SquaredError(), 200, 20
    free = eqprop.relax(model, x, T, keep=K)
    print(f"steady state: largest residual {float(free.residual.max()):.1e} after {free.steps} steps")
    limit = eqprop.limit_steps(model, cost, x, y, free, K)
    worst = 0.0
    for delta, nabla in zip(limit, eqprop.BPTT(T, K).steps(model, cost, x, y, free), strict=True):
        gaps = [(a + b).abs().max() for a, b in zip(delta.neurons, nabla.neurons, strict=True)]
        gaps += [(update + nabla.synapses[name]).abs().max() for name, update in delta.synapses.items()]
        worst = max(worst, float(torch.stack(gaps).max()))
    print(f"EP against BPTT: largest |Delta + nabla| over {K} steps {worst:.1e}")
    twin = eqprop.relax(by_function(model), x, T)
    gap = max(float((a - b).abs().max()) for a, b in zip(free.state, twin.state, strict=True))
    print(f"class against function: largest difference of the steady states {gap:.1e}")


def train(model: Lateral, x: Tensor, y: Tensor, iterations: int = 60) -> None:
    cost, ep = eqprop.SquaredError(), eqprop.EP(T=25, K=10, beta=0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for iteration in range(iterations + 1):
        optimizer.zero_grad()
        free = ep.backward(model, cost, x, y)
        if iteration % 20 == 0:
            loss = float(cost(free.state, y, {}).mean())
            right = int((free.state[0].sign() == y.sign()).sum())
            print(f"iteration {iteration:2d}: loss {loss:.5f}, {right} of {len(x)} right")
        optimizer.step()


if __name__ == "__main__":
    inputs, targets = two_bits()
    model = Lateral(outputs=1, hidden=8, inputs=2)
    check(model, inputs, targets)
    train(model, inputs, targets)
