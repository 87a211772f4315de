"""A small model with a large vocabulary."""

import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50_000, 128)
        self.layer = torch.nn.Linear(128, 128)
        self.lm_head = torch.nn.Linear(128, 50_000, bias=False)

    def forward(self, ids):
        return self.lm_head(self.layer(self.embedding(ids)).relu())


model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    ids = torch.randint(50_000, (4, 512), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(ids)
    F.cross_entropy(logits.view(-1, 50_000).float(), ids.view(-1)).backward()
    del logits
    optimizer.step()
    optimizer.zero_grad()
