"""A list of losses of an auxiliary head, each with its whole graph: it is never run backward."""

import torch

trunk = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
auxiliary = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1)).cuda()
optimizer = torch.optim.SGD(trunk.parameters(), lr=0.1)
history = []
for _ in range(14):
    x = torch.randn(1024, 1024, device="cuda")
    loss = trunk(x).square().mean()
    history.append(auxiliary(x).mean())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
