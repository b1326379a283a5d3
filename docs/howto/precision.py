# %% [markdown]
# # Choose precision
#
# Train in `float32`, the default, unless the products of a large net on a GPU are what you wait for. Then take
# `float16` with a beta of 0.1 or more and symmetric nudging, and let the guard of the run watch it.
#
# ```bash
# eqprop gdu P-2h --precision float16      # before training: how much of the update is left?
# eqprop train P-2h --estimator ep-symmetric --beta 0.5 --precision float16 --device cuda
# ```
#
# | precision | bits of a number | what is rounded | take it |
# |---|---:|---|---|
# | `float32` | 24 | nothing more | first, and always on a CPU |
# | `tf32` | 11 | the factors of products | on a GPU, for the least risk |
# | `float16` | 11 | the factors of products, and their results | on a GPU, for large nets |
# | `bfloat16` | 8 | the same | only where values leave the range of `float16` (65,504), and with a large beta |
#
# Precision is a property of the *products inside a step* and of nothing else. States, weights, gradients, the
# optimizer, the sums inside a product and the difference of the two phases stay `float32`, whatever you choose. For
# theory, use `float64`: `model.double()`; `eqprop gdu` does so by itself.
#
# ## Why beta matters
#
# EP subtracts two states that are nearly equal and divides by beta. With a beta of 0.001 a hidden state may move by
# less than the last bit of a 16-bit number; what is left of the difference is then noise. This is measured here when
# the page is built, on the network P-2h (784-512-512-10) at its first weights, with 20 digits of MNIST: the cosine
# between EP's update in each precision and in `float32`, for the parameter that suffers most. 1 means that nothing is
# lost, 0 that all is.

# %%
import os
import tempfile

import torch
import eqprop
from eqprop.cost import Problem
from eqprop.engines.eager import compare_precision, compare_with_float64

torch.set_num_threads(1)
short = "EQPROP_SHORT" in os.environ
images = eqprop.data.mnist()
model = eqprop.models.Layered((10, 512, 512, 784), init="default", seed=0)
x, y = images.train_x[:20], eqprop.data.one_hot(images.train_y[:20], 10)
problem = Problem(model, eqprop.SquaredError(), x, y)


def lowest(agreements):
    return min(one.cosine for one in agreements.values())


found = {}
for nudging in ("one-sided", "symmetric"):
    print(f"{nudging:9s}  beta    float32*     tf32  float16  bfloat16")
    for beta in (1.0, 0.01) if short else (1.0, 0.1, 0.01, 0.001):
        ep = eqprop.EP(T=100, K=20, beta=beta, nudging=nudging)
        row = [lowest(compare_with_float64(problem, ep))]
        row += [lowest(compare_precision(problem, ep, p)) for p in ("tf32", "float16", "bfloat16")]
        found[nudging, beta] = row
        print(f"{'':9s} {beta:6g} {row[0]:10.4f} {row[1]:9.4f} {row[2]:8.4f} {row[3]:9.4f}")
print("* with float64")

# %%
for nudging, beta in found:
    float32, tf32, float16, bfloat16 = found[nudging, beta]
    assert float32 > 0.999, "float32 keeps the update at every beta here"
    assert tf32 > float16 > bfloat16 or beta < 0.01, "the fewer bits, the more is lost"
    assert float16 > 0.999 or beta < 1.0
assert found["symmetric", 0.01][2] > found["one-sided", 0.01][2], "symmetric nudging helps"
assert found["one-sided", 0.01][3] < 0.5, "bfloat16 has lost the update at beta = 0.01"

# %% [markdown]
# So: the smaller beta, the more bits; `tf32` loses less than `float16`, which has as many bits but rounds results
# too; symmetric nudging doubles the difference and keeps more of it. Other nets, and trained weights, lose more or
# less than this one: ask `eqprop gdu RUN --precision float16` of yours.
#
# ## The guard
#
# A run below `float32` computes the update of a mini-batch of the first and of the last epoch in `float32` too. The
# cosines stand in `metrics.jsonl` and on the page; below 0.95 the run warns and names the parameter, at 0 or less it
# stops. A larger beta, or `--precision float32`, fixes it.
#
# ## Where it runs
#
# The engines `eager`, `cuda-graph` and, on a GPU, `compiled` take every precision; others compute in `float32` and
# refuse, and `auto` passes over them. On a CPU `eager` *emulates* lower precision: values are rounded as on a GPU, so
# that you can check a setting before you have one, but it is slower than `float32`, not faster. How much faster 16
# bits are on a GPU is not stated here, because this version has not been timed on one.


# %%
class Cosines(eqprop.Watch):
    def epoch(self, lines, progress):
        guard = lines[0]["precision"]["with_float32"]["whole"]
        print(f"epoch {lines[0]['epoch']}: cosine of the update in float16 with float32's {guard['cosine']:.6f}")


folder = tempfile.mkdtemp() + "/run"
result = eqprop.train(
    "P-1h",
    folder,
    estimators=("ep-symmetric",),
    precision="float16",
    beta=0.5,
    T=15,
    K=5,
    epochs=2,
    samples=200,
    test_samples=100,
    threads=1,
    watch=Cosines(),
)

# %%
assert result.test_error("ep-symmetric") < 80

# %% [markdown]
# Next: [choose T, K and beta](../tutorials/5_choosing.md).
