# %% [markdown]
# # 7. CIFAR-10
#
# The field measures equilibrium propagation on CIFAR-10: 32 × 32 colour images of ten classes. This tutorial looks at
# the nets that are used for it, trains a small one on a CPU, and gives the commands that train the large ones on a
# GPU.
#
# !!! note "What was run where"
#     Cells marked **stored** show the output of trainings made once, on one CPU thread; the file that holds them names
#     the commit and the machine, and a test compares every number with the stored metrics. All other cells run when
#     this page is built. The **GPU commands were not run** for this page, and no result is given for them.
#
# ## The nets
#
# Every experiment is a named set of settings. The two large ones have four convolutions and hundreds of steps:

# %%
from eqprop.run.session import build_model
import json
from pathlib import Path

import torch
import eqprop
from eqprop import papers

torch.set_num_threads(1)
for name in ("cifar10-laborieux-2021", "cifar10-scellier-2023", "cifar10-small"):
    e = papers.find(name)
    weights = sum(p.numel() for p in build_model(e, 0).parameters())
    print(f"{name}: {e.model}, {weights / 1e6:.2f} million parameters")
    phases, nudge = e.phases, e.model.nudge_site
    about = f"T = {phases.T}, K = {phases.K}, beta = {phases.beta:g}; {phases.schedule}, nudge {nudge}"
    print(f"    {e.estimator.kind}, {about}")

# %% [markdown]
# All of them nudge symmetrically, once towards the target and once away from it: one-sided nudging fails on such nets,
# as Laborieux et al. found. The net of Scellier et al. updates its layers in [sweeps](../sweeps.md), and so does the
# small one.
#
# ## Does it settle, and is the gradient right?
#
# Ask before you train; it takes seconds and needs no data. Two random images will do:

# %%
small = papers.find("cifar10-small")
net = build_model(small, 0).double()
source = torch.Generator().manual_seed(0)
x = torch.randn(2, 3, 32, 32, generator=source, dtype=torch.float64) / 3
y = eqprop.data.one_hot(torch.tensor([3, 5]), 10).double()
cost = eqprop.SquaredError()
exact = eqprop.RBP(T=200, K=200, schedule=small.phases.schedule).gradient(net, cost, x, y)[1]


def cosines(beta):
    ep = eqprop.EP(small.phases.T, small.phases.K, schedule=small.phases.schedule, beta=beta, nudging="symmetric")
    free, found = ep.gradient(net, cost, x, y)
    pairs = {name: (found[p].flatten(), exact[p].flatten()) for name, p in net.named_parameters()}
    return free, {name: float(torch.cosine_similarity(*pair, 0)) for name, pair in pairs.items()}


free, trained = cosines(small.phases.beta)
_, careful = cosines(0.01)
print(f"largest residual after T = {small.phases.T}: {float(free.residual.max()):.0e}")
print("cosine of EP's gradient with the exact one, from the output to the input:")
for name in ("W01", "W12", "W23", "W3x"):
    print(f"    {name}: {trained[name]:.4f} at beta = {small.phases.beta}, {careful[name]:.4f} at beta = 0.01")

# %%
assert float(free.residual.max()) < 1e-5
assert 0.9 < min(trained.values()) < 0.99
assert min(careful.values()) > 0.999

# %% [markdown]
# It settles, and for a small beta EP's gradient is the exact one. At the beta of the training it is a good
# approximation, best near the output. The exact gradient is taken with the same schedule: nets with max-pooling have
# several steady states, and synchronous steps end in another one.
#
# ## Train the small one on a CPU
#
# The data is downloaded once (`pip install "eqprop[download]"`), or read from a folder with the six binary files:
# `--data FOLDER`. Five epochs of 5,000 images, and the same net's *feed-forward twin* by backprop as a yardstick:


# %%
STORED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def stored(command):
    """The output of a command as it was stored."""
    print(f"$ {command}\n{STORED['outputs'][command]}")


print(f"stored: commit {STORED['commit'][:7]}, {STORED['machine']}\n")
stored("eqprop train cifar10-small --threads 1 --out runs/small")
stored("eqprop train cifar10-small --threads 1 --estimator backprop --out runs/twin")

# %% [markdown]
# Errors are percentages of 2,000 test images; by chance they are 90 %. Both nets have learnt little in so short a
# training; what matters is that EP follows backprop. From the stored metrics (`results/cifar10`), with two
# more seeds:

# %%
import matplotlib.pyplot as plt

results = Path(__file__).parents[2] / "results/cifar10"
rows = [json.loads((results / f"{row}.json").read_text(encoding="utf-8")) for row in ("small", "small-twin")]
curves = {name: own for row in rows for name, own in row["estimators"].items()}
fig, axes = plt.subplots(figsize=(5, 3), layout="constrained")
for (name, own), style in zip(curves.items(), ("C0o-", "C1s--"), strict=True):
    for trial in own["trials"]:
        label = name if trial["seed"] == 0 else None
        axes.plot(range(1, small.optimizer.epochs + 1), trial["test_error"], style, label=label)
axes.set(xlabel="epoch", ylabel="test error, %", xticks=range(1, small.optimizer.epochs + 1))
axes.legend()
for name, own in curves.items():
    print(f"stored: {name}: test error {own['test_error_mean']:.2f} ± {own['test_error_std']:.2f} %, three seeds")

# %%
trials = [trial for own in curves.values() for trial in own["trials"]]
assert all(trial["test_error"][-1] < 75 for trial in trials), "by chance it is 90 %"
assert all(trial["train_error"][-1] < trial["train_error"][0] for trial in trials)

# %% [markdown]
# Look at the result: measure the error again from the weights, ask the doctor, and write the page. The doctor tries
# the first learning rate on the trained net, and finds it too large there; by then the training had lowered it along a
# cosine to almost nothing, so this is no cause for concern.

# %%
for command in ("eqprop evaluate runs/small", "eqprop doctor runs/small", "eqprop report runs"):
    stored(command)

# %% [markdown]
# ## Train the large ones on a GPU
#
# The same commands; `--device cuda` is all that changes. None of them was run for this page.
#
# ```bash
# eqprop train cifar10-scellier-2023 --device cuda --out runs/scellier         # float32, 100 epochs
# eqprop train cifar10-scellier-2023 --device cuda --preset fast --out runs/fast   # 58 epochs, 16-bit products
# eqprop train cifar10-laborieux-2021 --device cuda --out runs/laborieux       # T = 250, 120 epochs; the paper: 11.7 %
# torchrun --standalone --nproc-per-node 8 -m -- eqprop train cifar10-scellier-2023 --device cuda --out runs/eight
# eqprop resume runs/scellier                                                  # after a stop: the same bits
# eqprop reproduce cifar10 --device cuda --engine compiled --minutes 9 --out cifar10   # all published rows, in pieces
# ```
#
# Before the first long run, spend a minute on `--epochs 1 --samples 1280` and read the line it prints: iterations per
# second, and the time that is left. `eqprop doctor runs/scellier` works on the checkpoint of a run that has not
# ended.
#
# More: [all settings of such a training](../cifar10.md), [precision](../howto/precision.md), [several
# GPUs](../howto/several-gpus.md). Next: [your own connection, estimator and logger](8_extend.md).
