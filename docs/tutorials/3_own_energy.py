# %% [markdown]
# # 3. Your own energy in ten lines
#
# A model is a function: the energy $E(x, s)$ of its state. Everything else (the step, EP, BPTT, the checks, training)
# follows from it by automatic differentiation. Here is a Hopfield-like energy with something no model of the package
# has: the outputs inhibit each other.
#
# $$E = \tfrac12\|o\|^2 + \tfrac12\|h\|^2 - r(o)^\top W\, r(h) - r(h)^\top V x - b^\top r(o)
# + \tfrac{c}{2}\left(\sum_i r(o_i)\right)^2, \qquad r = \tanh$$

# %%
import torch
import eqprop

torch.set_num_threads(1)


def energy(x, s, theta):  # x (B, inputs), s one (B, n) per layer, output first; returns (B,)
    o, h = s
    r, q = torch.tanh(o), torch.tanh(h)
    squares = 0.5 * (o.square().sum(-1) + h.square().sum(-1))
    wires = (r * (q @ theta["W"].T)).sum(-1) + (q * (x @ theta["V"].T)).sum(-1) + r @ theta["b"]
    return squares - wires + 0.5 * theta["c"] * r.sum(-1).square()


def build(seed, inputs=49, hidden=64, outputs=10, dtype=torch.float32):
    source = torch.Generator().manual_seed(seed)
    W = torch.randn(outputs, hidden, generator=source, dtype=dtype) * 0.5 / hidden**0.5
    V = torch.randn(hidden, inputs, generator=source, dtype=dtype) / inputs**0.5
    theta = {"W": W, "V": V, "b": torch.zeros(outputs, dtype=dtype), "c": torch.tensor(0.1, dtype=dtype)}
    return eqprop.from_energy(energy, theta, layers=(outputs, hidden), eps=0.3, input_shape=(inputs,))


# %% [markdown]
# A step goes down the energy, $s \leftarrow s - \epsilon\,\partial E/\partial s$. The strength $c$ of the inhibition is
# a parameter like any other: it will be learned.
#
# ## Check it
#
# Before training: does it settle, and does EP compute its gradient? In double precision, on a few samples:

# %%
model = build(0, dtype=torch.float64)
source = torch.Generator().manual_seed(1)
x = torch.rand(4, 49, generator=source, dtype=torch.float64)
y = eqprop.data.one_hot(torch.tensor([3, 1, 4, 1]), 10).double()
cost = eqprop.SquaredError()
report = eqprop.gdu.compare(model, cost, x, y, T=200, K=20, beta=1e-3)
print(report.verdict)

# %%
assert report.verdict.startswith("The GDU property holds")

# %% [markdown]
# The doctor asks more: whether the targets can be reached, whether the nudge arrives everywhere, and whether a few
# steps at your learning rate lower the loss.

# %%
ep = eqprop.EP(T=25, K=10, beta=0.1, nudging="symmetric")
diagnosis = eqprop.doctor(model, cost, x, y, ep, rates=0.1)
print(diagnosis)

# %%
assert diagnosis.healthy

# %% [markdown]
# ## Train it on your own arrays
#
# Any arrays will do: samples, class numbers, and the same for the test. These are a few hundred MNIST images, reduced
# to 7 x 7 pixels.

# %%
import os
import numpy as np

short = "EQPROP_SHORT" in os.environ
samples, epochs = (200, 4) if short else (500, 15)
mnist = eqprop.data.mnist()


def small(images):
    return torch.nn.functional.avg_pool2d(images.view(-1, 1, 28, 28), 4).flatten(1).numpy()


x_train, y_train = small(mnist.train_x[:samples]), mnist.train_y[:samples].numpy()
x_test, y_test = small(mnist.test_x[:500]), mnist.test_y[:500].numpy()
data = eqprop.data.from_arrays(x_train, y_train, x_test, y_test, name="small digits")
print(type(x_train).__name__, x_train.shape, x_train.dtype, "labels", np.unique(y_train))

# %% [markdown]
# `eqprop.train` takes the function that builds the model, and the rest as options. It writes a run folder with the
# settings, seeds, metrics and weights.

# %%
import tempfile

folder = tempfile.mkdtemp() + "/own"
result = eqprop.train(
    build,
    folder,
    data=data,
    estimators=("ep-symmetric",),
    T=25,
    K=10,
    beta=0.1,
    epochs=epochs,
    batch=20,
    rates={"*": 0.1, "c": 0.001},
)
error = result.test_error("ep-symmetric")
trained = eqprop.load(folder, model=build)
print(f"test error {error:.1f} %, by chance 90 %; c was 0.1, now {trained.model.get_parameter('c').item():.3f}")

# %%
assert error < (60 if short else 30)

# %% [markdown]
# The same file works on the command line: `eqprop gdu FILE.py:build`, `eqprop doctor FILE.py:build`, `eqprop train
# FILE.py:build` (see [training](../training.md#your-own-data)). If your net does not learn so well, read the
# [next tutorial](4_not_learning.md).
