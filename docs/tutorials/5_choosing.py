# %% [markdown]
# # 5. Choosing T, K and beta
#
# EP has three numbers of its own. Each can be read off a curve, for your network and your data, before any training:
#
# - **T**, the steps of the free phase: until the *residual*, how far one more step moves the state, is small;
# - **K**, the steps of the nudged phase: until the updates have reached the last layer and died out;
# - **beta**, the strength of the nudge: as small as rounding and unrest allow, or larger with symmetric nudging.
#
# The network here has two hidden layers, and looks at ten MNIST images.

# %%
import matplotlib.pyplot as plt
import torch
import eqprop

torch.set_num_threads(1)
images = eqprop.data.mnist()
x = images.train_x[:10].double()
y = eqprop.data.one_hot(images.train_y[:10], 10).double()
cost = eqprop.SquaredError()
model = eqprop.models.Layered((10, 32, 32, 784), activation="tanh", init="default", seed=0, dtype=torch.float64)

# %% [markdown]
# ## T: the residual
#
# Run free phases of several lengths and look at the residual at their ends.

# %%
lengths = (2, 5, 10, 20, 40, 80, 160, 320, 640)
residuals = [eqprop.relax(model, x, T).residual for T in lengths]
for T, residual in zip(lengths, residuals, strict=True):
    print(f"T = {T:3d}: median {float(residual.median()):.1e}, worst {float(residual.max()):.1e}")

# %%
fig, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.semilogy(lengths, [float(r.median()) for r in residuals], "o-", label="median sample")
axes.semilogy(lengths, [float(r.max()) for r in residuals], "s--", label="worst sample")
axes.set(xlabel="T", ylabel="residual")
axes.legend()

# %%
worst = [float(r.max()) for r in residuals]
T = next(n for n, r in zip(lengths, worst, strict=True) if r < 1e-3)
print(f"T = {T} is the first at which no neuron moves by 0.001 in a step")
assert worst[0] > 0.01
assert worst[-1] < 1e-9

# %% [markdown]
# Near its rest a network forgets where it came from by the same factor at every step: the line becomes straight. A
# residual of 0.001 is enough to train with; the theorem, which speaks of a state at rest, wants it far below what the
# nudge moves.
#
# ## K: how long the updates last
#
# The nudge enters at the output and travels one layer per step. BPTT's gradients show, without any beta, when each
# weight gets its share:

# %%
K = 30
free = eqprop.relax(model, x, 640, keep=K)
gradients = eqprop.BPTT(640, K).processes(model, cost, x, y, free).synapses
weights = [name for name in gradients if name.startswith("W")]
sizes = {name: gradients[name].flatten(1).norm(dim=1) for name in weights}
fig, axes = plt.subplots(figsize=(5, 3), layout="constrained")
for name in weights:
    axes.plot(sizes[name] / sizes[name].max(), label=name)
axes.set(xlabel="t", ylabel="size of the gradient, largest = 1")
axes.legend()
first = {name: int((size > 0).nonzero()[0]) for name, size in sizes.items()}
last = {name: int((size > 0.1 * size.max()).nonzero()[-1]) + 1 for name, size in sizes.items()}
for name in weights:
    print(f"{name}: first gradient at t = {first[name]}, below a tenth of the largest from t = {last[name]} on")

# %%
assert list(first.values()) == [0, 1, 2], "one layer per step"
assert max(last.values()) < K

# %% [markdown]
# K is the largest of the last column. Weights far from the output set it: a K that suits `W01` gives `W23` only part of
# its update.
#
# ## beta: two errors
#
# The smaller beta, the closer the difference is to a derivative; but differences of nearly equal numbers lose digits.
# Against the exact limit $\beta \to 0$, which `eqprop.limit_steps` takes by automatic differentiation, in the two
# precisions of floating-point numbers:

# %%
import copy

K = max(last.values())


def gradient(beta, dtype, nudging):
    net = copy.deepcopy(model).to(dtype)
    ep = eqprop.EP(640, K, beta=beta, nudging=nudging)
    grads = ep.gradient(net, cost, x.to(dtype), y.to(dtype))[1]
    return grads[net.get_parameter("W23")].double()


free = eqprop.relax(model, x, 640, keep=K)
exact = -sum(step.synapses["W23"] for step in eqprop.limit_steps(model, cost, x, y, free, K))
betas = [10.0**-n for n in range(5)]
errors = {
    (dtype, nudging): [float((gradient(b, dtype, nudging) - exact).norm() / exact.norm()) for b in betas]
    for dtype in (torch.float32, torch.float64)
    for nudging in ("one-sided", "symmetric")
}
fig, axes = plt.subplots(figsize=(5, 3), layout="constrained")
for (dtype, nudging), found in errors.items():
    style = ("o" if nudging == "one-sided" else "s") + ("-" if dtype == torch.float64 else "--")
    axes.loglog(betas, found, style, label=f"{nudging}, {str(dtype)[6:]}")
axes.set(xlabel="beta", ylabel="relative error of W23's gradient")
axes.legend()
for (dtype, nudging), found in errors.items():
    print(f"{str(dtype)[6:]}, {nudging:9s}: " + "  ".join(f"{b:g}: {e:.0e}" for b, e in zip(betas, found, strict=True)))

# %%
one, two = errors[torch.float64, "one-sided"], errors[torch.float64, "symmetric"]
assert 5 < one[1] / one[2] < 20, "one-sided: of the order of beta"
assert 50 < two[1] / two[2] < 200, "symmetric: of the order of beta squared"
assert errors[torch.float32, "symmetric"][-1] > errors[torch.float32, "symmetric"][-2], "rounding wins in the end"

# %% [markdown]
# In `float64` the error falls with beta, and faster with symmetric nudging. In `float32`, in which networks are
# trained, it rises again below some beta. Between 0.01 and 0.5 is the usual place; with a free phase that has not
# quite settled, larger is safer.
#
# ## Let it be done for you
#
# `eqprop tune` reads the same three curves, on held-out training samples and for your network, then finds the learning
# rates by short trainings and looks at the curves again at trained weights:
#
# ```bash
# eqprop tune P-1h              # writes tuned/P-1h/tuned.toml, each decision with its reason
# eqprop train tuned/P-1h/tuned.toml
# ```
#
# [How it decides](../tune.md), with measured results. Next: [train, stop, resume, report](6_table1.md).
