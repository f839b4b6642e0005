"""A trainer of one rank: three steps, three versions."""

import torch

from weightd.trainer_hooks import Publisher

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with Publisher(model, run="quickstart", rank=0, world=1, engines={"E0": 1}) as publisher:
    for step in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        version = publisher.publish(label=f"step {step}")
        print(f"published {version}: bias {model.bias.tolist()}")
    publisher.wait(version)
