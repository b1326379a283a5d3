# %% [markdown]
# # 2. Theorem 1 with your own eyes
#
# The paper's theorem: if a network rests at a steady state at the end of its free phase, then each step of EP's nudged
# phase changes every weight by **minus the gradient** that backpropagation through time (BPTT) computes for the
# corresponding step back in time. The paper calls this *gradient-descending updates*, GDU.
#
# Take the paper's toy model: 10 inputs, 50 hidden neurons, 5 outputs, and a step that goes down an energy.

# %%
import torch
import eqprop

torch.set_num_threads(1)
model = eqprop.models.Toy((5, 50, 10), "tanh", eps=0.08, init="default", seed=0, dtype=torch.float64)
source = torch.Generator().manual_seed(0)
x = torch.rand(1, 10, generator=source, dtype=torch.float64)
y = torch.nn.functional.one_hot(torch.tensor([2]), 5).double()
cost, T, K = eqprop.SquaredError(), 2000, 80

# %% [markdown]
# Run the free phase and look at the state at its end. The *residual* is how far one more step would move it.

# %%
free = eqprop.relax(model, x, T, keep=K)
print(f"residual {float(free.residual.max()):.1e}, settled: {bool(free.settled.all())}")

# %%
assert float(free.residual.max()) < 1e-12

# %% [markdown]
# Now both processes, step by step: EP's updates $\Delta(t)$ from the nudged phase, and BPTT's gradients $\nabla(t)$.

# %%
import matplotlib.pyplot as plt

updates = eqprop.EP(T, K, beta=0.01).processes(model, cost, x, y, free)
gradients = eqprop.BPTT(T, K).processes(model, cost, x, y, free)
name = next(iter(updates.synapses))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for n in range(4):
    (line,) = left.plot(-gradients.neurons[0][:, 0, n], lw=1)
    left.plot(updates.neurons[0][:, 0, n], "--", color=line.get_color(), lw=2.5, alpha=0.6)
    (line,) = right.plot(-gradients.synapses[name][:, n, n], lw=1)
    right.plot(updates.synapses[name][:, n, n], "--", color=line.get_color(), lw=2.5, alpha=0.6)
left.set(title="output neurons", xlabel="t")
right.set(title=f"synapses of {name}", xlabel="t")

# %% [markdown]
# Solid: minus BPTT's gradients. Dashed: EP's updates. They lie on each other; how close depends on $\beta$.


# %%
def distance(beta):
    found = eqprop.EP(T, K, beta=beta).processes(model, cost, x, y, free).synapses[name]
    return float((found + gradients.synapses[name]).norm() / gradients.synapses[name].norm())


errors = {beta: distance(beta) for beta in (0.1, 0.01, 0.001)}
for beta, error in errors.items():
    print(f"beta {beta:5g}: relative distance {error:.1e}")

# %%
assert errors[0.001] < 1e-2
assert 5 < errors[0.1] / errors[0.01] < 20, "the error is of the order of beta"

# %% [markdown]
# ## All of it in one call
#
# `gdu.compare` does this for every layer and every weight and says what is left between the two, and why.

# %%
report = eqprop.gdu.compare(model, cost, x, y, T=T, K=K, beta=0.001)
print(report.budget.verdict)

# %% [markdown]
# For a thesis: `eqprop.report(report, "toy")` draws it as PDF and PNG in `toy/figures`, beside the numbers as JSON.
#
# On the command line it is `eqprop gdu toy` (with `--out toy` for the figures), or `eqprop gdu my_model.py:build` for a
# model of your own. When the answer is no, ask [the doctor](../doctor.md).
