"""Train a prototypical net with one hidden layer on MNIST by equilibrium propagation.

python examples/quickstart.py
"""

import torch

import eqprop

torch.manual_seed(0)
images = eqprop.data.mnist()
targets = eqprop.data.one_hot(images.train_y, 10)
model = eqprop.models.Layered(sizes=(10, 512, 784), setting="prototypical", activation="sigmoid")
cost = eqprop.SquaredError()
ep = eqprop.EP(T=30, K=10, beta=0.1)  # or eqprop.BPTT(T=30, K=10), or eqprop.RBP(T=30, K=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

order = torch.randperm(len(targets))[:2000].view(100, 20)
loss = 0.0
for iteration, rows in enumerate(order, start=1):
    x, y = images.train_x[rows], targets[rows]
    optimizer.zero_grad()
    free = ep.backward(model, cost, x, y)
    optimizer.step()
    loss += float(cost(free.state, y, {}).mean())
    if iteration % 20 == 0:
        print(f"iterations {iteration - 19:3d}-{iteration:3d}: mean loss {loss / 20:.3f}")
        loss = 0.0

free = eqprop.relax(model, images.test_x[:1000], 30)
wrong = (free.state[0].argmax(1) != images.test_y[:1000]).sum()
print(f"test error on 1000 images after 2000 training images: {float(wrong) / 10:.1f} %")
