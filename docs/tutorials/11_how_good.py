# %% [markdown]
# # 11. How good must a device be?
#
# Devices have noise, few bits, limits, weights that differ from what was written, and some that are missing. EP takes
# the difference of two readings that lie close together, so it is fair to ask what is left of it. Here the same small
# net is trained on devices that differ in one or two such faults, and two things are measured of each: the error after
# training, and the cosine of its gradient with the exact one of a perfect net with the same weights.

# %%
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import eqprop
from eqprop.physical import Imperfections, Simulated
from eqprop.report.sweep import sweep_figure

torch.set_num_threads(1)
short = "EQPROP_SHORT" in os.environ

# %% [markdown]
# ## A device is a layer around a model
#
# `Simulated` puts imperfections around any model, or around any [machine](10_device.md). All zero is the perfect
# device, bit for bit. What is fixed for a device, such as its mismatch, is drawn once from its seed.

# %%
net = eqprop.models.Layered((2, 4, 3), seed=0)
device = Simulated(net, Imperfections(weight_bits=3, weight_limit=1.0, mismatch=0.1, missing=0.2, seed=7))
eqprop.relax(device, torch.rand(1, 3), 10)  # which writes the weights
print("asked for:", [round(w, 3) for w in net.W01[0].tolist()])
print("holds:    ", [round(w, 3) for w in device.held.W01[0].tolist()])

# %% [markdown]
# ## One axis: noise of readings
#
# `eqprop.sweep` trains a point of each value from the same weights and mini-batches. On the command line:
#
# ```bash
# eqprop sweep P-1h --noise 0:0.02:5 --weight-bits 3,4,6,8,10 --samples 2000 --epochs 5
# ```
#
# Here it is a net of 64 hidden neurons on five digits at 7 x 7 pixels, so that this page builds in seconds.

# %%
folder = Path(tempfile.mkdtemp())
images = eqprop.data.mnist()
n, tested = (400, 100) if short else (1500, 500)


def small(stored, labels, count):
    few = labels < 5
    pixels = images.floats(stored[few][:count]).view(-1, 1, 28, 28)
    return torch.nn.functional.avg_pool2d(3.0 * pixels, 4).flatten(1).numpy(), labels[few][:count].numpy()


x, y = small(images.train_x, images.train_y, n)
x_test, y_test = small(images.test_x, images.test_y, tested)
np.savez(folder / "digits.npz", x=x, y=y, x_test=x_test, y_test=y_test)
(folder / "small.toml").write_text("""
[small]
model = { sizes = [5, 64, 49], activation = "tanh", nudge_site = "inside" }
phases = { T = 40, K = 15, beta = 0.1 }
estimator = "ep-symmetric"
optimizer = { kind = "SGD", rates = { "*" = 0.05 }, batch = 10, epochs = 3 }
""")


def sweep(name, axes, **settings):
    shared = {"data": str(folder / "digits.npz"), "seed": 0, "jobs": 1, **settings}
    return eqprop.sweep(str(folder / "small.toml"), axes, folder / name, **shared)


def column(found, key):
    return [p["errors"][0] if key == "error" else p["cosines"][0]["all"] for p in found["points"]]


noisy = sweep("noise", {"read_noise": [0.0, 0.003, 0.01, 0.03, 0.1]})
for point in noisy["points"]:
    print(point["at"], f"error {point['errors'][0]:.1f} %, cosine {point['cosines'][0]['all']:.3f}")
sweep_figure(noisy)

# %%
cosines = column(noisy, "cosine")
assert cosines[0] > 0.9
assert column(noisy, "error")[-1] > column(noisy, "error")[0] + 5.0

# %% [markdown]
# The noise of a reading of 0.03 on a scale of 0 to 1 sounds harmless. But the signal is the *difference* that a nudge
# of 0.1 makes, which is far smaller than the voltages themselves. (The cosine of each point is taken at its own trained
# weights, so the cosines do not fall evenly.)
#
# ## The remedy: nudge harder
#
# The noise of the estimate falls as $1/\beta$; its bias grows as $\beta^2$ (symmetric nudging). So the best nudge of a
# noisy device is a stronger one than that of a simulation. At a noise of 0.03:

# %%
harder = {b: sweep(f"beta-{b}", {"read_noise": [0.03]}, beta=b) for b in (0.1, 0.3, 0.6)}
for b, found in harder.items():
    print(f"beta {b}: error {column(found, 'error')[0]:.1f} %, cosine {column(found, 'cosine')[0]:.3f}")

# %%
assert short or column(harder[0.3], "error")[0] < column(harder[0.1], "error")[0] - 4.0

# %% [markdown]
# ## Bits of weights: where are they kept?
#
# Few bits in the *device* do little harm, if the weights that are trained are kept outside in full and only rounded
# when they are written. If the device's own weights are all there is (`on_grid`), an update below half a step of the
# grid is lost, and most are.

# %%
bits = [2, 4, 6, 8, 10]
outside = sweep("outside", {"weight_bits": bits}, imperfections={"weight_limit": 1.0})
inside = sweep("inside", {"weight_bits": bits}, imperfections={"weight_limit": 1.0, "on_grid": True})
print("bits     ", *(f"{b:6d}" for b in bits))
print("outside, %", *(f"{e:6.1f}" for e in column(outside, "error")))
print("inside, % ", *(f"{e:6.1f}" for e in column(inside, "error")))

# %%
assert column(outside, "error")[1] < column(inside, "error")[1] - 4.0

# %% [markdown]
# ## Two axes
#
# With two axes the picture is a table: noise of every neuron at every step, and the share of weights that are missing.
# Training works around what is missing. The device follows the gradient of the net that it *is*; the cosine is taken
# with that of the whole net, another one, and is small without harm. Error and cosine answer different questions.

# %%
both = sweep("both", {"state_noise": [0.0, 0.005, 0.02], "missing": [0.0, 0.2, 0.5]})
sweep_figure(both)
# %%
errors = np.array(column(both, "error")).reshape(3, 3)
print(f"half of the weights missing: {errors[0, 2]:.1f} %; noise of 0.02: {errors[2, 0]:.1f} %")

# %%
assert short or errors[0, 2] < errors[2, 0] - 2.0

# %% [markdown]
# Results for trained nets are on [Physical networks](../physical.md). The same questions can be asked of your own net
# (`eqprop sweep my.py:build ...`) and around your own machine (`--machine board.py:MyBoard --read-noise 0:0.1:5`).
