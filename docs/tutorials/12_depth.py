# %% [markdown]
# # 12. Depth: why your deep net does not learn
#
# A plain chain of ten layers does not learn by EP, it is said, unless residual connections shorten it. What fails is
# not the method but the arithmetic, at three places that can be told apart:
#
# - **drift**: the free phase is not quite at rest; what still moves is taken for an effect of the nudge;
# - **rounding**: the effect of the nudge on the first layers is smaller than the last digit of their states;
# - **the optimizer's epsilon**: the updates of the first layers are smaller than what Adam adds to their size.
#
# This page shows each in numbers, layer by layer, and then what fixes them: computing the nudged phase on the
# *difference* of the states. It needs a minute.

# %%
import os
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
import eqprop
from eqprop import EP, RBP, Phase
from eqprop.cost import Problem
from eqprop.models import Dense, Network

torch.set_num_threads(1)
short = "EQPROP_SHORT" in os.environ
images = eqprop.data.mnist()
x, y = images.train_x[:50], eqprop.data.one_hot(images.train_y[:50], 10)
cost = eqprop.SquaredError()


def chain(depth, gain=0.1):
    names = [f"s{n}" for n in range(depth)]
    links = [Dense(b, a, feedback_gain=gain) for a, b in pairwise(names)]
    return Network(
        784,
        {"s0": 10, **dict.fromkeys(names[1:], 64)},
        [Dense("x", names[-1]), *links],
        activation="tanh",
        bias=False,
        nudge_site="inside",
        init="glorot",
        seed=0,
    )


net = chain(10)
print(net)

# %% [markdown]
# Signals go forward with gain 1 and back with gain 0.1, as in the nets of Liu et al. (2025), so that the chain settles
# in tens of steps. With different gains no energy stands behind the net, and EP's update is one-sided: each weight
# learns by the move of the layer it leads to, $\Delta W = d_{n}\, s_{n+1}^T$, where $d$ is how far the nudge has moved
# the state. A layer's $d$ shrinks to a tenth per hop, so its update is divided by what is left of it
# (`net.update_scales`): one learning rate serves all layers.

# %%
weights = [name for name, _ in net.named_parameters()]
problem = Problem(net, cost, x, y)
wide = problem.double()
rest = eqprop.relax(wide.model, wide.x, Phase(2000, stop="settled", still=1e-15))
exact = RBP(0, 200, stop="settled").estimate(wide, rest)[1]


def cosines(form, T, dtype=torch.float32, beta=0.1):
    of = problem if dtype == torch.float32 else wide
    ep = EP(T, 20, beta=beta, form=form, checked=False)
    update = ep.estimate(of, eqprop.relax(of.model, of.x, T))[1]
    return [float(torch.cosine_similarity(update[n].double().flatten(), exact[n].flatten(), dim=0)) for n in weights]


rows = {
    "plain, T = 30, float32": cosines("plain", 30),
    "plain, T = 30, float64": cosines("plain", 30, torch.float64),
    "plain, T = 300, float32": cosines("plain", 300),
    "plain, T = 300, float64": cosines("plain", 300, torch.float64),
    "difference, T = 30, float32": cosines("difference", 30),
}
print(f"cosine with the exact gradient    {'  '.join(weights)}")
for name, found in rows.items():
    print(f"{name:32s} " + " ".join(f"{c:5.2f}" for c in found))

# %%
fig, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
styles = ("C1o-", "C1s--", "C0o-", "C0s--", "C2^-")
for (name, found), style in zip(rows.items(), styles, strict=True):
    axes.plot(range(len(weights)), found, style, label=name)
axes.set(xlabel="weights, from the output (W01) to the input (W9x)", ylabel="cosine with exact gradient")
axes.set_xticks(range(len(weights)), weights)
axes.axhline(0, color="0.6", lw=0.8)
axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

# %% [markdown]
# Read it from below:
#
# - After 30 steps, more digits do not help: the orange lines are the same. That is **drift**. The net is near rest, but
#   what it still moves by is larger than what the nudge moves in the layers far from it.
# - After 300 steps the net is at rest, and float64 has it right everywhere (dashed blue). In float32 the first layers
#   are noise: **rounding**. Their states differ by less than the last of seven digits.
# - The **difference form** is right in every layer, in float32, after 30 steps.

# %%
assert abs(rows["plain, T = 30, float64"][-1] - rows["plain, T = 30, float32"][-1]) < 0.1, "drift: no matter of digits"
assert rows["plain, T = 30, float32"][-1] < 0.5
assert rows["plain, T = 300, float64"][-1] > 0.95
assert min(rows["plain, T = 300, float32"]) < 0.7, "rounding"
assert min(rows["difference, T = 30, float32"]) > 0.95

# %% [markdown]
# ## The difference form
#
# Plain EP runs a nudged state $s^\beta$ and subtracts the free one. The difference form runs the difference itself,
# from $d_0 = 0$:
#
# $$d_{t+1} = F(x, s_* + d_t;\ \beta) - F(x, s_*),$$
#
# and computes the right side without subtracting nearly equal numbers. For a layer with the input $a$ at $s_*$, the
# change $e = W d$ of that input is computed first, and each activation gives $\sigma(a + e) - \sigma(a)$ by a formula:
# of tanh it is $t (1 - s^2)/(1 + s t)$ with $s = \tanh a$, $t = \tanh e$. What $s_*$ lacks to be at rest, $F(x,
# s_*) - s_*$, does not occur in it, so nothing drifts. Ask for it by `EP(..., form="difference")`, or `--form
# difference`.
#
# A model without such formulas (a Phi or a transition of your own) runs this one phase in float64 instead.
#
# ## The third cause: epsilon
#
# Adam divides an update by its size plus $\epsilon = 10^{-8}$. This is what is left of a signal in each layer;
# undivided, the updates of the first ones would fall below that:

# %%
print("  ".join(f"{name} {left:.0e}" for name, left in zip(net.layer_names, net.update_scales, strict=True)))

# %% [markdown]
# Divided, they are all of one size. To show the fault, take the loss in other units, a billionth of it, and ask the
# doctor, which looks at the optimizer too:

# %%
faint = eqprop.FunctionCost(lambda s, target: 1e-9 * 0.5 * (s[0] - target).square().sum(-1))
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
found = eqprop.doctor(net, faint, x, y, EP(T=60, K=20, beta=0.1, form="difference"), rates=adam)
print(found.verdict)

# %%
assert found.cause == "epsilon"

# %% [markdown]
# The remedies it names: scale the updates (which nets with gains do by themselves), a smaller epsilon, or an optimizer
# that takes signs, `eqprop.Lion`, which needs no scale at all. Training warns of it too.
#
# Of the plain form the doctor says the other two:

# %%
print(eqprop.doctor(net, cost, x, y, EP(T=30, K=20, beta=0.1)).verdict)
print()
mended = eqprop.doctor(net, cost, x, y, EP(T=30, K=20, beta=0.1, form="difference"))
print(mended.verdict)

# %%
assert mended.healthy

# %% [markdown]
# ## It learns
#
# The experiment `deep-10` is such a chain with a softmax readout. A short training on a part of MNIST, in both forms:

# %%
import tempfile

errors = {}
for form in ("plain", "difference"):
    result = eqprop.train(
        "deep-10",
        tempfile.mkdtemp() + "/run",
        form=form,
        samples=2000 if short else 5000,
        test_samples=500 if short else 2000,
        epochs=2 if short else 6,
        batch=100,
        rates={"*": 0.002},
        threads=1,
    )
    errors[form] = result.test_error("ep")
    print(f"{form:10s} {errors[form]:4.1f} % test error")

# %%
assert errors["difference"] < errors["plain"]

# %% [markdown]
# Whole trainings, of ten and of twenty layers beside their feed-forward twins by backprop, are in the
# [zoo](../zoo.md#deep-10); `eqprop train deep-10` repeats one in minutes.
#
# ## What this is, and what it is not
#
# As the feedback gain goes to 0, the free phase becomes a forward pass, and the difference becomes the errors of
# backprop, sent back through the transposed weights. At 0.1 it is still near to that, at 0.3 no longer, and at gain 1,
# where an energy stands behind the net and feedback is as strong as the input, EP does something else. (Where 3000
# steps are named, the net was not at rest after them.)

# %%
print("gain  steps to rest   cosine with backprop, W01 ... W9x")
near = {}
for gain in (0.01, 0.1, 0.3, 1.0):
    one = chain(10, gain).double()
    p = Problem(one, cost, wide.x, wide.y)
    free = eqprop.relax(one, p.x, Phase(3000, stop="settled", still=1e-13))
    ep = EP(0, 200, beta=1e-4, form="difference", checked=False).estimate(p, free)[1]
    names = {q: n for n, q in one.named_parameters()}
    twin = {names[q]: g for q, g in eqprop.estimators.Backprop().gradient(one, cost, p.x, p.y)[1].items()}
    near[gain] = [float(torch.cosine_similarity(ep[n].flatten(), twin[n].flatten(), dim=0)) for n in weights]
    print(f"{gain:4g} {free.steps:10d}       " + " ".join(f"{c:5.2f}" for c in near[gain]))

# %%
assert min(near[0.01]) > 0.99
assert min(near[1.0]) < min(near[0.1]) < min(near[0.01])

# %% [markdown]
# So depth by small feedback is bought with nearness to backprop. What stays EP's own is that errors travel through the
# same neurons by the same dynamics, in one more phase. `eqprop gdu` and the doctor say of such nets that their update
# is no gradient of an energy.
#
# Next: [does it settle?](13_settle.md)
