"""An engine of one rank: takes each version between two of its own steps."""

import torch

from weightd.rollout_hooks import Receiver

model = torch.nn.Linear(4, 3).requires_grad_(False)

with Receiver(model, run="quickstart", engine="E0", k=0, size=1) as receiver:
    for _ in range(3):
        version = receiver.receive()
        print(f"serving {version}: bias {model.bias.tolist()}")
