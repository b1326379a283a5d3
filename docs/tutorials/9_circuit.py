# %% [markdown]
# # 9. From a circuit to a trained circuit
#
# Resistors learn. A net of resistors and diodes comes to rest where it dissipates least, and that is an energy; so EP
# trains it by two measurements of voltages. Here a circuit is built, solved by eqprop and by **ngspice** (which knows
# nothing of energies), trained by both, and tried with diodes that can be bought.

# %%
import shutil

import matplotlib.pyplot as plt
import torch
import eqprop
from eqprop import EP, spice
from eqprop.physical.resistive import Resistive

torch.set_num_threads(1)
has_ngspice = shutil.which("ngspice") is not None
if not has_ngspice:
    print("ngspice is not installed here (apt install ngspice): what it would measure is left out.")

# %% [markdown]
# ## The circuit
#
# Nodes in layers, a resistor of conductance $g_{ij} \ge 0$ between any two nodes of neighbouring layers. Each pixel
# enters twice, as the voltages $\pm$ gain $x$, since conductances have no sign. In the hidden layer diodes hold the
# first half of the nodes at 0 V or above and the second half at 0 V or below: without them all would be linear. At rest
#
# $$E(x, v) = \tfrac12 \sum_{ij} g_{ij} (v_i - v_j)^2 - \sum_i b_i v_i$$
#
# is least (Kirchhoff's current law is $\partial E/\partial v = 0$). Given the other layers, each node's best voltage is
# the mean of its neighbours', weighted by conductance and cut by its diode. That is one update of `Resistive`, and
# sweeping over the layers a few times is all of the free phase.

# %%
tiny = Resistive((1, 2, 2), gain=5.0, seed=5, dtype=torch.float64)
x = torch.tensor([0.2, 0.9], dtype=torch.float64)
print(spice.netlist(tiny, x, eqprop.Nudge(eqprop.SquaredError(), torch.ones(1, 1).double(), 0.05)))

# %% [markdown]
# That is the circuit as ngspice takes it, one element per line: a conductance of 1 is a resistor of 1000 ohms. The last
# two lines are **the nudge, which is a resistor too**: $1/\beta$ from the output to a source at the target. With a
# negative $\beta$ it is a negative resistance, which takes current away; it must not outweigh what the node has, or
# there is no minimum any more. eqprop says what the limit is and refuses a larger beta.

# %%
print(f"the least conductance that an output sees: {tiny.least_conductance:.3f}")
try:
    tiny.check_nudge(1.0)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Is it what ngspice finds?
#
# A net for three digits at 7 x 7 pixels: 98 sources, 32 hidden nodes, 3 outputs.

# %%
images = eqprop.data.mnist()
few = images.train_y < 3
pixels = images.floats(images.train_x[few]).view(-1, 1, 28, 28)
x, labels = torch.nn.functional.avg_pool2d(pixels, 4).flatten(1)[:2000], images.train_y[few][:2000]
y = eqprop.data.one_hot(labels, 3)
train, test = slice(0, 1600), slice(1600, 2000)
cost, beta = eqprop.SquaredError(), 0.25


def network():
    return Resistive((3, 32, 49), gain=20.0, seed=0)


net = network()
if has_ngspice:
    checked = spice.check(net, x[:2], y[:2], beta)
    print(checked)
    assert max(checked.free.own, checked.nudged.own) < 1e-3

# %% [markdown]
# ## Training
#
# EP's update of a conductance needs the two voltages at its ends and nothing else:
#
# $$\Delta g_{ij} \propto -\frac{1}{2\beta}\Big[\tfrac12 (v_i - v_j)^2\Big]_{-\beta}^{+\beta}$$
#
# A step may make a conductance negative; `constrain` puts it back to 0.


# %%
def teach(machine, ep, iterations, batch=4, rate=0.05, note=None):
    optimizer = torch.optim.SGD(machine.parameters(), lr=rate)
    for n in range(iterations):
        rows = torch.arange(n * batch, n * batch + batch) % 1600
        optimizer.zero_grad()
        ep.backward(machine, cost, x[rows], y[rows])
        optimizer.step()
        machine.constrain()


def error(machine, T=8, rows=test):
    outputs = eqprop.relax(machine, x[rows], eqprop.Phase(T, "sweeps")).state[0]
    return 100.0 * float((outputs.argmax(1) != labels[rows]).float().mean())


ep = EP(T=8, K=8, beta=beta, nudging="symmetric", schedule="sweeps-same")
before = error(net)
teach(net, ep, 800)
after = error(net)
print(f"error on 400 images that it has not seen: {before:.1f} % before, {after:.1f} % after 800 iterations")

# %%
assert after < 6.0

# %% [markdown]
# ## ngspice as the network
#
# Nothing above needed eqprop's solver: a `Machine` that settles by itself will do. `Spice` is one whose every phase is
# an operating point that ngspice finds. The same twenty iterations, by both:

# %%
if has_ngspice:
    ours, theirs = network(), network()
    teach(ours, EP(T=200, K=200, beta=beta, nudging="symmetric", schedule="sweeps-same"), 20)
    machine = spice.Spice(theirs, lumped=True)
    teach(machine, EP(T=1, K=1, beta=beta, nudging="symmetric"), 20)
    start = dict(network().named_parameters())
    with torch.no_grad():
        apart = {
            name: float((p - theirs.get_parameter(name)).norm() / (p - start[name]).norm())
            for name, p in ours.named_parameters()
        }
    print("after 20 iterations the weights differ, as a share of how far they moved, by")
    print("  " + ", ".join(f"{name} {share:.1e}" for name, share in apart.items()))
    print(f"work of ngspice: {machine.work}")
    assert max(apart.values()) < 2e-3

# %% [markdown]
# ## Diodes that can be bought
#
# So far diodes were ideal. A real one (here ngspice's model of a 1N4148) lets some current through before and takes
# some tenths of a volt to conduct. How much does the trained net suffer, which was trained without it?

# %%
if has_ngspice:
    real = spice.Spice(net, diodes="real", lumped=True)
    v = eqprop.relax(real, x[test][:60], 1).state
    w = eqprop.relax(net, x[test][:60], eqprop.Phase(200, "sweeps")).state
    figure, ax = plt.subplots(figsize=(4.2, 3.4), layout="constrained")
    for layer, name in ((1, "hidden"), (0, "output")):
        ax.plot(w[layer].flatten(), v[layer].flatten(), ".", markersize=2, label=name)
    ax.axline((0, 0), slope=1, color="grey", linewidth=0.8)
    ax.set_xlabel("ideal diodes, volts (eqprop)")
    ax.set_ylabel("1N4148, volts (ngspice)")
    ax.legend(frameon=False)
    off = float((v[1] - w[1]).abs().max())
    wrong = [float((s[0].argmax(1) != labels[test][:60]).float().mean()) for s in (w, v)]
    print(f"hidden nodes are off by up to {off:.2f} V")
    print(f"wrong of 60 images: {60 * wrong[0]:.0f} with ideal diodes, {60 * wrong[1]:.0f} with real ones")
    assert 0.1 < off < 1.5

# %% [markdown]
# `eqprop train drn-xs` trains the deep resistive nets of the literature; [Physical networks](../physical.md) has what
# was measured. Replace `Spice` by [your own bench](10_device.md).
