# %% [markdown]
# # 6. Table 1: train, stop, resume, report
#
# The paper's Table 1 is six networks trained on MNIST by EP and by BPTT. Each row is an *experiment*: a named set of
# settings with its source. This tutorial runs the first row, P-1h (prototypical, one hidden layer of 512 neurons), from
# beginning to end on a few images, stops it halfway, resumes it and writes the page. In full it is one command, and
# takes [minutes to hours](../table1.md):
#
# ```bash
# eqprop reproduce table1 --rows P-1h --trials 5 --out table1
# ```

# %%
from eqprop import papers

experiment = papers.find("P-1h")
phases, optimizer = experiment.phases, experiment.optimizer
print(f"T = {phases.T}, K = {phases.K}, beta = {phases.beta}, {optimizer.epochs} epochs")
print(f"learning rates {dict(optimizer.rates)}, batch {optimizer.batch}")
print("the paper's test error by EP:", experiment.results["ep"].test, "%")

# %% [markdown]
# ## Train
#
# `eqprop.train` takes an experiment by name; options change single settings. The run goes to a folder.

# %%
import os
import tempfile
from pathlib import Path

import torch
import eqprop

samples, epochs = (100, 3) if "EQPROP_SHORT" in os.environ else (400, 6)
images = eqprop.data.mnist()
data = (images.train_x[:samples], images.train_y[:samples], images.test_x[:500], images.test_y[:500])
options = {"data": data, "epochs": epochs, "estimators": ("ep", "bptt"), "threads": 1}
runs = Path(tempfile.mkdtemp())
whole = eqprop.train("P-1h", runs / "whole", **options)
for estimator in ("ep", "bptt"):
    print(f"{estimator}: test error {whole.test_error(estimator):.1f} % after {epochs} epochs on {samples} images")
print("in the folder:", ", ".join(sorted(p.name for p in (runs / "whole").iterdir() if not p.name.startswith("."))))

# %%
assert max(whole.test_error(estimator) for estimator in ("ep", "bptt")) < (85 if epochs == 3 else 50)

# %% [markdown]
# ## Stop
#
# Ctrl-C finishes the iteration, saves, and raises `Stopped`. Here a watch, which receives every event of a run, presses
# it after the second epoch.

# %%
import signal

from eqprop.run import Stopped


class Impatient(eqprop.Watch):
    def epoch(self, lines, progress):
        if lines[0]["epoch"] == 2:
            signal.raise_signal(signal.SIGINT)


stopped = False
try:
    eqprop.train("P-1h", runs / "stopped", watch=Impatient(), **options)
except Stopped as message:
    stopped = True
    print(str(message).replace(str(runs), "runs"))

# %%
assert stopped

# %% [markdown]
# ## Resume
#
# The folder knows the experiment, its settings and where it was. Only the data is given again, since it was ours; its
# fingerprint is compared.

# %%
resumed = eqprop.resume(runs / "stopped", data=data)


def weights(folder):
    return dict(eqprop.load(folder, estimator="ep").model.named_parameters())


first, second = weights(runs / "whole"), weights(runs / "stopped")
equal = all(torch.equal(first[name], second[name]) for name in first)
print("weights equal to those of the undisturbed run, bit for bit:", equal)

# %%
assert equal
assert resumed.test_error("bptt") == whole.test_error("bptt")

# %% [markdown]
# On the command line: `eqprop train P-1h --out runs/p1h`, Ctrl-C, `eqprop resume runs/p1h`.
#
# ## Report
#
# One page for all run folders in a folder: the table beside the paper's results, curves, settings, versions and seeds.
# It is one file that needs no network.

# %%
written = eqprop.report(runs)
page = written.page.read_text(encoding="utf-8")
print(f"{written.page.name}, {len(page) // 1024} KiB; {written.csv.name}; {written.latex.name}")

# %%
assert "P-1h" in page
assert "http://" not in page.replace("http://www.w3.org", "")

# %% [markdown]
# A result counts as reproduced when its mean is within two of the paper's standard deviations, on the paper's data
# and at full length; so this one does not. [The full results](../table1.md), and [what is not reproduced, and
# why](../table1-notes.md). Next: [extend it from outside](8_extend.md).
