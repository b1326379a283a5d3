# %% [markdown]
# # 10. Your device in the loop
#
# You have a system that settles: a circuit on a bench, a chip, an array of oscillators. It can be written to, left to
# settle and read. That is all that EP needs, so it trains the system itself and not a model of it. Here it is connected
# in twenty lines, and the doctor says whether it does what it claims.

# %%
import numpy as np
import torch
import eqprop
from eqprop.physical import Abilities, Machine, Reading

torch.set_num_threads(1)

# %% [markdown]
# ## The device
#
# This class stands for your hardware. Training sees its four functions and nothing else: voltages come in millivolts,
# with noise, and what happens inside is the device's own affair. It has 36 inputs, 24 neurons and 3 outputs.


# %%
class Chip:
    def __init__(self, noise=0.02):
        self.noise, self.source = noise, np.random.default_rng(0)

    def load(self, to_outputs, to_neurons, output_bias, neuron_bias):
        self.W, self.V, self.b, self.c = to_outputs, to_neurons, output_bias, neuron_bias

    def apply(self, volts, target=None, strength=0.0):
        self.x, self.target, self.strength = volts, target, strength

    def wait(self, microseconds):
        outputs, neurons = np.zeros((len(self.x), 3)), np.zeros((len(self.x), 24))
        for _ in range(microseconds):
            pull = 0.0 if self.target is None else self.strength * (self.target - outputs)
            outputs, neurons = (
                np.tanh(neurons @ self.W.T + self.b + pull),
                np.tanh(outputs @ self.W + self.x @ self.V.T + self.c),
            )
        self.volts = outputs, neurons

    def read(self):
        return [1000.0 * v + self.noise * self.source.standard_normal(v.shape) for v in self.volts]


# %% [markdown]
# ## The machine: twenty lines
#
# A `Machine` says how weights are written and how a mini-batch settles. It is given the network that it is meant to be:
# this gives names and first values of the weights, and the updates that follow from two readings. The network itself is
# never run. `Abilities` says what the device can do: this one can be pulled either way, and begins from zero each time.


# %%
class Board(Machine):
    abilities = Abilities(signs=(1, -1), continues=False)
    microseconds = 100

    def __init__(self, model, chip):
        super().__init__(model)
        self.chip = chip

    def write(self, theta):
        self.chip.load(*(theta[name].numpy().astype(float) for name in ("W01", "W12", "b0", "b1")))

    def settle(self, x, nudge=None, start=None):
        target = None if nudge is None else nudge.y.numpy()
        self.chip.apply(x.numpy(), target, 0.0 if nudge is None else nudge.beta)
        self.chip.wait(self.microseconds)
        outputs, neurons = self.chip.read()
        return Reading((torch.from_numpy(outputs / 1000).float(), torch.from_numpy(neurons / 1000).float()))


def network():
    net = eqprop.models.Layered((3, 24, 36), activation="tanh", nudge_site="inside", seed=0)
    net.W01.data *= 0.5  # weak feedback settles soon
    return net


board = Board(network(), Chip())

# %% [markdown]
# ## Does it do what it claims?
#
# `eqprop.doctor` writes other weights and nudges to the machine, reads it, and compares with where the network would be
# at rest: is what was read at rest, are these the weights that were written, does the nudge pull the right way, and by
# as much as asked? It allows for the noise it measures. `eqprop doctor` does the same with `--machine FILE.py:CLASS`.

# %%
images = eqprop.data.mnist()
few = images.train_y < 3
digits = torch.nn.functional.avg_pool2d(images.floats(images.train_x[few]).view(-1, 1, 28, 28)[..., 2:26, 2:26], 4)
x, labels = 2.0 * digits.flatten(1)[:1300], images.train_y[few][:1300]
y = eqprop.data.one_hot(labels, 3)
cost, ep = eqprop.SquaredError(), eqprop.EP(T=1, K=1, beta=0.2, nudging="symmetric")

diagnosis = eqprop.doctor(board, cost, x[:20], y[:20], ep)
print(diagnosis.verdict)
print(f"The noise: {diagnosis.passed['noise']}. The price: {diagnosis.passed['work']}.")

# %%
assert diagnosis.healthy

# %% [markdown]
# ## Training it
#
# As any model. T and K mean nothing to a machine; `work` counts what was asked of it, which is what matters where a
# settle costs time and a write costs a device's life. The doctor's questions are in it.


# %%
def train(machine, iterations=150, rate=0.1):
    optimizer = torch.optim.SGD(machine.parameters(), lr=rate)
    for n in range(iterations):
        rows = slice(20 * n % 1000, 20 * n % 1000 + 20)
        optimizer.zero_grad()
        ep.backward(machine, cost, x[rows], y[rows])
        optimizer.step()
    answers = eqprop.relax(machine, x[1000:], 1).state[0].argmax(1)
    return 100.0 * float((answers != labels[1000:]).float().mean())


error = train(board)
print(f"error on 300 images that it has not seen: {error:.1f} %")
print(f"work: {board.work}")

# %%
assert error < 8.0
assert board.work.writes >= 150

# %% [markdown]
# The same from the command line, with a folder that resumes, errors per epoch and the work in its log:
#
# ```bash
# eqprop train my.toml --machine board.py:MyBoard --epochs 3
# ```
#
# ## Machines that lie
#
# Devices do, mostly by accident. This one is read too early; this one has its nudge wired the wrong way round; this one
# clips what is written to it and does not say so. Each of them trains to something, and each is named.


# %%
class Hurried(Board):
    microseconds = 2


class WrongWay(Board):
    def settle(self, x, nudge=None, start=None):
        turned = None if nudge is None else eqprop.Nudge(nudge.cost, nudge.y, -nudge.beta)
        return super().settle(x, turned, start)


class Clipping(Board):
    def write(self, theta):
        super().write({name: value.clamp(-0.3, 0.3) for name, value in theta.items()})


found = {}
for kind in (Hurried, WrongWay, Clipping):
    diagnosis = eqprop.doctor(kind(network(), Chip()), cost, x[:20], y[:20], ep)
    found[kind.__name__] = diagnosis.cause
    print(f"{kind.__name__}: {diagnosis.verdict}\n")

# %%
assert found == {"Hurried": "machine-rest", "WrongWay": "machine-nudge", "Clipping": "machine-weights"}

# %% [markdown]
# ## A session without the device
#
# The bench is not always free, and a test must not need it. `Recorded` keeps every question and answer, `Replay` gives
# them again, and says so if a question differs.

# %%
import tempfile
from pathlib import Path

from eqprop.physical import Recorded, Replay

recorded = Recorded(Board(network(), Chip()))
first = train(recorded, iterations=10)
with tempfile.TemporaryDirectory() as folder:
    path = recorded.save(Path(folder) / "session.npz")
    again = train(Replay(network(), path, recorded.abilities), iterations=10)
print(f"with the device {first:.1f} %, replayed {again:.1f} %")

# %%
assert first == again

# %% [markdown]
# How good such a device must be is the subject of the [next page](11_how_good.md).
