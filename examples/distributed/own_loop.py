"""A training loop of your own in several processes: three lines more than in one.

    python own_loop.py                              # one process, no process group
    torchrun --standalone --nproc-per-node 2 own_loop.py

Both print the same losses, up to the order of float sums.
"""

import torch

import eqprop

ranks = eqprop.distributed.join()  # 1. reads torchrun's environment

draw = torch.Generator().manual_seed(0)
x = torch.rand(400, 20, generator=draw, dtype=torch.float64)
y = eqprop.data.one_hot(x[:, :4].argmax(-1), 4, torch.float64)

torch.manual_seed(0)  # the same initial weights in every process
model = eqprop.models.Layered(sizes=(4, 32, 20), setting="prototypical", activation="hard-sigmoid").double()
cost, ep = eqprop.SquaredError(), eqprop.EP(T=20, K=8, beta=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    total = torch.zeros(1, dtype=torch.float64)
    for rows in torch.randperm(400, generator=draw).view(-1, 20):
        rows = ranks.share(rows)  # 2. this process's part of the mini-batch
        optimizer.zero_grad()
        free = ep.backward(model, cost, x[rows], y[rows])
        eqprop.distributed.average_gradients(model)  # 3. over all processes
        optimizer.step()
        total += cost(free.state, y[rows], dict(model.named_parameters())).sum()
    loss = ranks.total(total).item() / 400
    if ranks.leads:
        print(f"epoch {epoch}: mean loss {loss:.10f}")
