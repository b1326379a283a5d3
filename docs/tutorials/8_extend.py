# %% [markdown]
# # 8. Your own connection, estimator and logger
#
# Parts of your own work like those of the package, from outside: in `eqprop.train`, in the laboratory, in files and on
# reports. Three of them here, used together in one training.

# %%
import torch
import eqprop

torch.set_num_threads(1)

# %% [markdown]
# ## A connection
#
# A network is a graph: layers joined by connections, each of which adds $\langle \mathrm{post}, A(\mathrm{pre})\rangle$
# to the primitive. Give $A$ and its weights; the feedback and the weight gradient follow by automatic differentiation.
# This one has weights that stay between -1 and 1, as those of a device may.

# %%
from dataclasses import dataclass

from eqprop.models import Connection, Dense, Network
from eqprop.models.connections import Weight


@dataclass(frozen=True)
class Bounded(Connection):
    """A(pre) = tanh(W) pre."""

    def weights(self, pre, post):
        return {"W": Weight((*post, *pre), fan_in=pre[0], fan_out=post[0])}

    def forward(self, pre, theta):
        return pre @ torch.tanh(theta["W"]).mT


def build(seed, dtype=torch.float32):
    wires = [Bounded("x", "h"), Dense("h", "out")]
    return Network(49, {"out": 10, "h": 32}, wires, "tanh", nudge_site="inside", seed=seed, dtype=dtype)


net = build(0, torch.float64)
source = torch.Generator().manual_seed(0)
x = torch.rand(5, 49, generator=source, dtype=torch.float64)
y = eqprop.data.one_hot(torch.arange(5), 10).double()
cost = eqprop.SquaredError()
diagnosis = eqprop.doctor(net, cost, x, y, eqprop.EP(T=200, K=30, beta=0.01))
print(diagnosis.verdict)

# %%
assert diagnosis.healthy

# %% [markdown]
# ## An estimator
#
# EP's error is of the order of $\beta$. Richardson's extrapolation takes it at $\beta$ and at $\beta/2$ and cancels
# that order: $2\,g(\beta/2) - g(\beta)$. An estimator is a frozen value with two functions: `estimate`, the gradient
# from the end of a free phase, and `steps`, the same as a process over time.

# %%
from eqprop.estimators.base import Step


@dataclass(frozen=True)
class Richardson(eqprop.Estimator):
    """2 g(beta/2) - g(beta), g the gradient of one-sided EP."""

    orientation = -1  # its steps sum to minus the gradient, as EP's do
    beta: float = 0.1

    def parts(self):
        return [eqprop.EP(self.T, self.K, beta=b) for b in (self.beta, self.beta / 2)]

    def estimate(self, problem, free):
        whole, half = (ep.estimate(problem, free)[1] for ep in self.parts())
        return free, {name: 2 * half[name] - g for name, g in whole.items()}

    def steps(self, model, cost, x, y, free):
        processes = [ep.steps(model, cost, x, y, free) for ep in self.parts()]
        for whole, half in zip(*processes, strict=True):
            neurons = tuple(2 * b - a for a, b in zip(whole.neurons, half.neurons, strict=True))
            yield Step(neurons, {name: 2 * half.synapses[name] - g for name, g in whole.synapses.items()})


# %% [markdown]
# Does it do what it should? Against the exact gradient, halving beta should quarter its error, and halve EP's.


# %%
def error(estimator):
    exact = eqprop.RBP(T=400, K=400).gradient(net, cost, x, y)[1]
    found = estimator.gradient(net, cost, x, y)[1]
    return max(float((found[p] - g).norm() / g.norm()) for p, g in exact.items())


ratios = {}
for kind in (eqprop.EP, Richardson):
    large, small = (error(kind(T=400, K=400, beta=beta)) for beta in (0.1, 0.05))
    ratios[kind] = large / small
    print(f"{kind.__name__:10s} error {large:.1e} at beta 0.1, {small:.1e} at 0.05")

# %%
assert 1.7 < ratios[eqprop.EP] < 2.4
assert 3.2 < ratios[Richardson] < 5.0

# %% [markdown]
# Registered by a call, it has a name wherever estimators are named. A package of yours does the same with an entry
# point of the group `eqprop.estimator`. The function receives the experiment and takes from it what it needs.

# %%
eqprop.register("estimator", "richardson", lambda e: Richardson(e.phases.T, e.phases.K, beta=e.phases.beta))

# %% [markdown]
# ## A logger
#
# A `Watch` receives every event of a run. This one keeps a line per epoch.

# %%
import os
import tempfile


class Diary(eqprop.Watch):
    def __init__(self):
        self.lines = []

    def epoch(self, lines, progress):
        mean = sum(line["test_error"] for line in lines) / len(lines)
        self.lines.append(
            f"epoch {lines[0]['epoch']}: test error {mean:.1f} %, residual {lines[0]['residual_mean']:.0e}"
        )


# %% [markdown]
# ## All three

# %%
samples, epochs = (200, 2) if "EQPROP_SHORT" in os.environ else (500, 6)
mnist = eqprop.data.mnist()
train_x, test_x = (
    torch.nn.functional.avg_pool2d(v.view(-1, 1, 28, 28), 4).flatten(1) for v in (mnist.train_x, mnist.test_x[:500])
)
data = (train_x[:samples], mnist.train_y[:samples], test_x, mnist.test_y[:500])
diary = Diary()
result = eqprop.train(
    build,
    tempfile.mkdtemp() + "/run",
    data=data,
    estimators=("richardson",),
    T=30,
    K=10,
    beta=0.2,
    epochs=epochs,
    batch=20,
    rates={"*": 0.02},
    watch=diary,
)
print("\n".join(diary.lines))

# %%
assert len(diary.lines) == epochs
assert result.test_error("richardson") < (75 if "EQPROP_SHORT" in os.environ else 40)

# %% [markdown]
# What else can be registered (engines, models, costs, activations, data sets), and how a package does it:
# [extend it](../howto/extend.md). Connections that files can ask for: [nets as graphs](../graphs.md).
