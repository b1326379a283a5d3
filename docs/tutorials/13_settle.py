# %% [markdown]
# # 13. Does it settle?
#
# EP speaks of a net at rest. Whether a net comes to rest, how fast, and what to do if it does not, is decided by the
# eigenvalues of one matrix: the Jacobian $J$ of a step at the free state. `eqprop.stability` finds them by products
# with $J$ and says what follows.
#
# Take a step as $s + \epsilon f(s)$. To an eigenvalue $a + ib$ of the flow $f$ belongs the eigenvalue
# $\lambda = 1 + \epsilon (a + ib)$ of the step, and a small push along it is multiplied by $\lambda$ at every step:
#
# - all $|\lambda| < 1$: the net **settles**, and the largest says how fast;
# - some $|\lambda| > 1$ though all $a < 0$: the **step is too large**; it settles for every
#   $\epsilon < -2a/(a^2 + b^2)$;
# - some $a > 0$: it **grows**, or with $b \ne 0$ **oscillates**, at any step. Only other weights help.
#
# Needs half a minute.

# %%
import math
import os

import matplotlib.pyplot as plt
import torch
import eqprop
from eqprop import Phase
from eqprop.models import Layered

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
short = "EQPROP_SHORT" in os.environ
source = torch.Generator().manual_seed(0)
x = torch.rand(4, 6, generator=source)

# %% [markdown]
# ## Three nets
#
# Steps down an energy of our own; the same with a step that is too large; and rotations past a Hopf bifurcation, where
# one neuron of a pair excites the other and is inhibited by it.

# %%
root = torch.rand(6, 6, generator=source) - 0.5
theta = {"A": 2.0 * root @ root.T + torch.diag(0.5 + 3.0 * torch.rand(6, generator=source))}


def energy(x, s, theta):
    bowl = 0.5 * torch.einsum("bi,ij,bj->b", s[0], theta["A"], s[0])
    return bowl + torch.log(torch.cosh(s[0])).sum(-1) - (x * s[0]).sum(-1)


def downhill(eps):
    return eqprop.from_energy(energy, theta, (6,), eps, input_shape=(6,))


def rotations(gain):
    turn = torch.tensor([[math.cos(0.8), -math.sin(0.8)], [math.sin(0.8), math.cos(0.8)]])
    R = gain * torch.block_diag(turn, turn, turn)

    def step(x, s, theta):
        return (s[0] + 0.2 * (torch.tanh(s[0] @ theta["R"].T + 0.1 * x) - s[0]),)

    return eqprop.from_transition(step, {"R": R}, (6,), input_shape=(6,), start=lambda x: 0.1 + 0.0 * x)


nets = {"an energy, eps 0.2": downhill(0.2), "the same, eps 0.5": downhill(0.5), "rotations": rotations(2.0)}
found = {name: eqprop.stability(net, x) for name, net in nets.items()}
for name, one in found.items():
    print(f"{name}: {one}")

# %%
fig, axes = plt.subplots(1, 3, figsize=(8, 2.9), layout="constrained")
circle = torch.linspace(0, 2 * math.pi, 200)
for ax, (name, one) in zip(axes, found.items(), strict=True):
    ax.plot(circle.cos(), circle.sin(), color="0.6", lw=1)
    inside = one.eigenvalues.abs() < 1
    for chosen, color in ((inside, "C0"), (~inside, "C3")):
        ax.plot(one.eigenvalues[chosen].real, one.eigenvalues[chosen].imag, "o", ms=4, color=color)
    ax.set(title=f"{name}\n{one.verdict}", xlabel="real part of $\\lambda$")
    ax.set(aspect="equal", xlim=(-2.4, 1.4), ylim=(-1.2, 1.2))
    ax.title.set_fontsize(9)
axes[0].set_ylabel("imaginary part")

# %%
verdicts = [one.verdict for one in found.values()]
assert verdicts == ["settles", "step too large", "oscillates"]

# %% [markdown]
# Eigenvalues within the circle belong to pushes that die away. Those of the net with the large step have left it at
# $-1$: its state goes back and forth. Those of the rotations left it away from the real axis: its state goes round.
#
# ## The prediction, measured
#
# How many steps until a push has fallen to a millionth, and below which step the hasty net settles:

# %%
calm = downhill(0.2)
rest = eqprop.relax(calm, x, Phase(5000, stop="settled", still=1e-15)).state
push = tuple(1e-6 * torch.randn(v.shape, generator=source) for v in rest)
s = tuple(v + p for v, p in zip(rest, push, strict=True))
drive, n = calm.drive(x), 0
with torch.no_grad():
    while max(float((v - w).abs().max()) for v, w in zip(s, rest, strict=True)) > 1e-12:
        s, n = calm.step(drive, s), n + 1
print(f"said: {found['an energy, eps 0.2'].steps:.0f} steps; measured: {n}")
assert 0.7 * n < found["an energy, eps 0.2"].steps < 1.5 * n


# %%
def settles(eps):
    return bool((eqprop.relax(downhill(eps), x, Phase(2000, checked=False)).residual < 1e-8).all())


low, high = 0.2, 0.6
while high - low > 0.001:
    middle = 0.5 * (low + high)
    low, high = (middle, high) if settles(middle) else (low, middle)
limit = found["the same, eps 0.5"].limit
print(f"said: below eps = {limit:.3f}; measured: {0.5 * (low + high):.3f}")
assert abs(0.5 * (low + high) / limit - 1) < 0.03

# %% [markdown]
# ## While it learns
#
# A net that settles at its first weights may stop doing so as they grow; EP then learns from states that go round, and
# the error rises. A training can watch for that, and keep the net at rest (all off by default, and a net that stays
# below the bound keeps every bit):
#
# | setting | what it does |
# |---|---|
# | `--keep-at-rest radius=0.95` | caps the weights between neurons where $\max|\lambda|$ rises above that |
# | `--keep-at-rest longest=400` | lets T grow while free phases end with a larger residual than asked for, up to that |
# | `--keep-at-rest slower=true` | halves the rates meanwhile |
# | `--homeostasis 0.1` | a penalty on the size of $J$, estimated with one random vector per step |
# | `--beta auto` | follows the beta at which drift, rounding and bending together are least |
#
# By hand, `eqprop.keep_at_rest(model, x)` does the first. The rotations need it:

# %%
net = rotations(2.0)
for param in net.parameters():
    param.requires_grad_(True)
for look in range(6):
    radius = eqprop.keep_at_rest(net, x, radius_below=0.95)
    print(f"look {look}: radius {radius:.3f}, weights of size {float(next(net.parameters()).detach().norm()):.2f}")
print(eqprop.stability(net, x))
assert eqprop.stability(net, x).verdict == "settles"

# %% [markdown]
# ## Which beta, where the rest is not perfect
#
# In the plain form a residual $r$ enters EP's update as $r/\beta$, and $\beta$ itself bends it by $c\,\beta$ (one-sided
# nudging). The best $\beta$ lies between and grows as $\sqrt r$. `eqprop.best_beta` finds it from a hundred samples:

# %%
from eqprop import EP
from eqprop.cost import Problem

net = Layered((3, 12, 6), "energy-based", "tanh", eps=0.2, init="default", seed=1)
y = torch.rand(4, 3, generator=source)
problem = Problem(net, eqprop.SquaredError(), x, y)
print("  T   residual   one-sided: beta, error     difference form: beta, error")
for T in (20, 40, 80, 160):
    residual = float(eqprop.relax(net, x, T).residual.max())
    plain = eqprop.best_beta(problem, EP(T, 60))
    moved = eqprop.best_beta(problem, EP(T, 60, form="difference"))
    print(f"{T:4d}   {residual:.1e}   {plain.beta:9.2g}  {plain.error:8.1%}   {moved.beta:17.2g}  {moved.error:8.1%}")

# %%
assert plain.beta < 0.1, "a net nearly at rest allows a small beta"

# %% [markdown]
# With both phases of symmetric nudging the drift is the same and cancels; then rounding, or the resolution of a
# machine, is weighed against $\beta^2$, and the best $\beta$ grows as the third root of it. In the difference form
# nothing is divided by $\beta$ that does not belong to it: any $\beta$ small enough will do, and a smaller one costs
# nothing. Measured exponents are on the [page on deep nets](../depth.md#which-beta).
#
# The doctor asks the same questions of any net of yours: [why does my EP not learn?](4_not_learning.md)
