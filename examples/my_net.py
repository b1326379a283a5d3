"""Your own network, to copy and change: an energy, its sizes, its data.

eqprop doctor examples/my_net.py:build
eqprop train examples/my_net.py:build --epochs 2 --out runs/mine
eqprop report runs/mine --model examples/my_net.py:build
"""

import torch

import eqprop

HIDDEN, OUTPUTS, INPUTS = 128, 10, 784


def energy(x, s, theta):
    """A Hopfield energy E(x, s): one value per sample; s[0] is the output, s[1] the hidden layer.

    x       inputs, (B, INPUTS)
    s       the state: a tensor (B, n) per layer
    theta   the parameters of `build` by name, which are learned
    """
    out, hidden = s
    leak = 0.5 * (out**2).sum(-1) + 0.5 * (hidden**2).sum(-1)  # what pulls every neuron to 0
    first = (hidden * (x @ theta["V"] + theta["c"])).sum(-1)
    second = (out * (hidden @ theta["W"] + theta["b"])).sum(-1)
    return leak - first - second


def build(seed):
    """The model, its cost and its data. Draws from torch are seeded, so `seed` is not needed here."""
    theta = {
        "V": torch.randn(INPUTS, HIDDEN) / INPUTS**0.5,
        "W": torch.randn(HIDDEN, OUTPUTS) / HIDDEN**0.5,
        "c": torch.zeros(HIDDEN),
        "b": torch.zeros(OUTPUTS),
    }
    # A step goes down the energy by eps, and every neuron stays between 0 and 1.
    model = eqprop.from_energy(energy, theta, layers=(OUTPUTS, HIDDEN), eps=0.5, project=lambda v: v.clamp(0, 1))
    return model, eqprop.SquaredError(), "mnist"
