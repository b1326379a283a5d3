# %% [markdown]
# # 4. Why does my EP not learn?
#
# Five networks that do not learn, as they come up in practice. Each is shown to the doctor, which names the cause, the
# number that shows it and the remedy; each is then repaired and shown again.
#
# `eqprop.doctor` takes what training takes: a model, a cost, a mini-batch and the estimator. It changes nothing.

# %%
import torch
import eqprop
from eqprop import EP
from eqprop.models import Layered

torch.set_num_threads(1)
cost = eqprop.SquaredError()
source = torch.Generator().manual_seed(0)
x = torch.rand(8, 4, generator=source, dtype=torch.float64)
y = 0.6 * torch.rand(8, 2, generator=source, dtype=torch.float64)


def ask(model, ep):
    found = eqprop.doctor(model, cost, x, y, ep)
    print(found.verdict)
    return found


# %% [markdown]
# ## 1. The free phase is too short
#
# A step that goes down an energy by $\epsilon = 0.03$ needs hundreds of steps to come to rest. Ten are not enough: what
# EP takes for the effect of the nudge is then mostly the network still moving by itself.

# %%
slow = Layered((2, 6, 4), "energy-based", "tanh", eps=0.03, init="default", seed=0, dtype=torch.float64)
sick = ask(slow, EP(T=10, K=300, beta=0.05))

# %%
assert sick.cause == "T"
T = sick.finding.change["T"]
mended = ask(slow, EP(T=T, K=300, beta=0.05))

# %%
assert mended.healthy

# %% [markdown]
# ## 2. The state goes back and forth
#
# Neurons that inhibit each other and are all updated at once: all are off, so all switch on, so all switch off. The
# residual (how far one more step moves the state) never falls, whatever T is. Updating the layers in turn does not help
# within a layer, but a smaller step does.


# %%
def inhibition(x, s, theta):
    o, h = s
    lateral = 0.5 * (h.sum(-1).square() - h.square().sum(-1))
    return (o * (h @ theta["A"].T)).sum(-1) + (h * (x @ theta["B"].T + 1.0)).sum(-1) - lateral


def gate(v):
    return torch.sigmoid(4 * v - 2)


theta = {
    "A": 0.3 * torch.randn(2, 6, generator=source, dtype=torch.float64),
    "B": 0.3 * torch.randn(6, 4, generator=source, dtype=torch.float64),
}
restless = eqprop.from_primitive(inhibition, theta, layers=(2, 6), squash=gate)
sick = ask(restless, EP(T=300, K=30, beta=0.05))

# %%
assert sick.cause == "two-cycle"


# %% [markdown]
# Mended: the same couplings as an energy, whose step is small.


# %%
def inhibiting_energy(x, s, theta):
    squares = 0.5 * sum(v.square().sum(-1) for v in s)
    return squares - inhibition(x, tuple(torch.sigmoid(4 * v - 2) for v in s), theta)


calm = eqprop.from_energy(inhibiting_energy, theta, layers=(2, 6), eps=0.2)
mended = ask(calm, EP(T=500, K=100, beta=0.05))

# %%
assert mended.healthy

# %% [markdown]
# ## 3. Weights that are not tied
#
# EP needs a symmetric network: the weight from $h$ to $o$ is the weight from $o$ to $h$. A network with feedback
# weights of its own settles nicely and still learns nothing of use. No T, K or beta cures that.


# %%
def untied(x, s, theta):
    o, h = s
    return torch.tanh(h @ theta["W"].T), torch.tanh(o @ theta["feedback"].T + x @ theta["V"].T)


def tied(x, s, theta):
    o, h = s
    return torch.tanh(h @ theta["W"].T), torch.tanh(o @ theta["W"] + x @ theta["V"].T)


def unit(rows, columns):
    W = torch.randn(rows, columns, generator=source, dtype=torch.float64)
    return 0.9 * W / torch.linalg.matrix_norm(W, 2)


theta = {"W": unit(2, 6), "feedback": unit(6, 2), "V": unit(6, 4)}
ep = EP(T=500, K=100, beta=0.01)
sick = ask(eqprop.from_transition(untied, theta, layers=(2, 6)), ep)

# %%
assert sick.cause == "asymmetric"
theta.pop("feedback")
mended = ask(eqprop.from_transition(tied, theta, layers=(2, 6)), ep)

# %%
assert mended.healthy

# %% [markdown]
# ## 4. The nudge is too strong
#
# EP's update is a derivative along $\beta$, taken as a difference. A large $\beta$ pulls the outputs far away from the
# state at which the derivative is wanted.

# %%
quick = Layered((2, 6, 4), "energy-based", "tanh", eps=0.2, init="default", seed=1, dtype=torch.float64)
sick = ask(quick, EP(T=300, K=100, beta=6.0))

# %%
assert sick.cause == "beta"
mended = ask(quick, EP(T=300, K=100, beta=sick.finding.change["beta"]))

# %%
assert mended.healthy

# %% [markdown]
# ## 5. The second phase is too short
#
# A nudge travels one layer per step. With three hidden layers and $K = 2$ it never reaches the first weights, which
# stay as they were drawn.

# %%
deep = Layered((2, 5, 5, 5, 4), "prototypical", "tanh", init="glorot", seed=0, dtype=torch.float64)
sick = ask(deep, EP(T=300, K=2, beta=0.02))

# %%
assert sick.cause == "K"
mended = ask(deep, EP(T=300, K=sick.finding.change["K"], beta=0.02))

# %%
assert mended.healthy

# %% [markdown]
# ## In a run
#
# `eqprop doctor RUN` examines the network of a run folder with its own T, K, beta and rates, and `eqprop doctor
# FILE.py:build` one of your own. The [page on the doctor](../doctor.md) goes from symptoms to causes and lists
# every question it asks. How to choose T, K and beta in the first
# place is the subject of the [next tutorial](5_choosing.md).
