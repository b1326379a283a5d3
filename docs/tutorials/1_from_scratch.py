# %% [markdown]
# # 1. Equilibrium propagation from scratch
#
# Forty lines of numpy train a network by equilibrium propagation (EP). Then the library does the same, and the
# numbers agree to rounding.
#
# The network has an input $x$, eight hidden neurons $h$ and two outputs $o$. It is described by one scalar function of
# its state, the *primitive*
#
# $$\Phi(x, s) = o^\top W h + h^\top V x,$$
#
# and a step moves the state to $s \leftarrow \tanh(\partial\Phi/\partial s)$. EP runs it twice:
#
# 1. **Free phase**: $T$ steps, until the state rests at $s_*$.
# 2. **Nudged phase**: $K$ more steps, in which the outputs are pulled towards the target $y$ with strength $\beta$.
#
# The difference of the two states gives the gradient, with no backward pass:
# $\Delta W = \frac{1}{\beta}\left(o^\beta h^{\beta\top} - o_* h_*^\top\right)$.

# %%
import numpy as np

rng = np.random.default_rng(0)
W, V = 0.3 * rng.standard_normal((2, 8)), 0.3 * rng.standard_normal((8, 4))
x = rng.uniform(size=(20, 4))  # twenty samples
y = np.stack([x[:, 0] * x[:, 1], x[:, 2] - x[:, 3]], axis=1) * 0.8
T, K, beta = 60, 20, 0.01


def step(o, h, nudge):
    """One step of all neurons at once; the nudge stands outside of tanh, as in the paper."""
    return np.tanh(h @ W.T) - nudge * (o - y), np.tanh(o @ W + x @ V.T)


def ep():
    """The gradient of the loss by two phases."""
    o, h = np.zeros((20, 2)), np.zeros((20, 8))
    for _ in range(T):
        o, h = step(o, h, 0.0)
    free_o, free_h = o, h
    for _ in range(K):
        o, h = step(o, h, beta)
    grad_W = -(o.T @ h - free_o.T @ free_h) / (beta * len(x))
    grad_V = -(h.T @ x - free_h.T @ x) / (beta * len(x))
    return grad_W, grad_V, 0.5 * ((free_o - y) ** 2).sum(1).mean()


first_W, first_V = W.copy(), V.copy()
losses = []
for _ in range(200):
    grad_W, grad_V, loss = ep()
    losses.append(loss)
    W, V = W - 0.5 * grad_W, V - 0.5 * grad_V
print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after 200 steps")

# %%
assert losses[-1] < 0.2 * losses[0]

# %% [markdown]
# ## The same with the library
#
# A model is its primitive; the two derivatives follow by automatic differentiation. `EP(...).backward` fills `.grad`,
# so any optimizer of `torch.optim` takes it from there.

# %%
import torch
import eqprop


def phi(x, s, theta):
    o, h = s
    return ((h @ theta["W"].T) * o).sum(-1) + ((x @ theta["V"].T) * h).sum(-1)


weights = {"W": torch.tensor(first_W), "V": torch.tensor(first_V)}
model = eqprop.from_primitive(phi, weights, layers=(2, 8), squash=torch.tanh)
cost, estimator = eqprop.SquaredError(), eqprop.EP(T=T, K=K, beta=beta)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(200):
    optimizer.zero_grad()
    estimator.backward(model, cost, torch.tensor(x), torch.tensor(y))
    optimizer.step()
gap = np.abs(model.get_parameter("W").detach().numpy() - W).max()
print(f"largest difference of a trained weight: {gap:.1e}")

# %%
assert gap < 1e-8

# %% [markdown]
# ## Is it the right gradient?
#
# Change one word: `EP` becomes `BPTT`, backpropagation through time. At the first weights:


# %%
def cosines(nudge_site):
    fresh = eqprop.from_primitive(phi, weights, layers=(2, 8), squash=torch.tanh, nudge_site=nudge_site)
    exact = eqprop.BPTT(T=T, K=K).gradient(fresh, cost, torch.tensor(x), torch.tensor(y))[1]
    found = estimator.gradient(fresh, cost, torch.tensor(x), torch.tensor(y))[1]
    return {
        n: float(torch.cosine_similarity(found[p].flatten(), exact[p].flatten(), 0))
        for n, p in fresh.named_parameters()
    }


outside, inside = cosines("outside"), cosines("inside")
for name in ("W", "V"):
    print(f"{name}: cosine with BPTT {outside[name]:.4f}; with the nudge inside of tanh {inside[name]:.4f}")

# %%
assert 0.97 < min(outside.values()) < 0.99
assert min(inside.values()) > 0.999

# %% [markdown]
# With the nudge outside of $\tanh$, as the paper has it, the two are close but not equal: BPTT sees the slope of
# $\tanh$ at the outputs, the nudge does not. Inside they agree up to terms of the order of $\beta$
# ([why](../beyond.md)).

# %% [markdown]
# Why do the two agree at all? That is the theorem of the [next tutorial](2_theorem.md).
