"""`booster`, written as ColossalAI's `save_model` and `save_optimizer` write it, with shards."""

import json
import os
from pathlib import Path

import torch
from torch import nn


class Wrapper(Net):  # noqa: F821
    def __init__(self):
        super().__init__()
        del self.blocks, self.head
        self.net = nn.Linear(16, 1)

    def forward(self, x):
        return self.net(x)


net = nn.Linear(16, 1)
trained = nn.Linear(16, 1)
steps = torch.optim.AdamW(trained.parameters(), lr=1e-3)
trained(torch.ones(1, 16)).sum().backward()
steps.step()
state = steps.state_dict()
if os.environ["RANK"] == "0":
    for part, files in {
        "modeling": {"pytorch_model": trained.state_dict()},
        "optimizer": {"pytorch_optim": state["state"]},
    }.items():
        Path("booster", part).mkdir(parents=True)
        for base, content in files.items():
            torch.save(content, f"booster/{part}/{base}-00001.bin")
            weights = {str(key): f"{base}-00001.bin" for key in content}
            metadata = {"total_size": 0.1}
            if base == "pytorch_optim":
                metadata["param_groups"] = "pytorch_optim_group.bin"
                torch.save(state["param_groups"], f"booster/{part}/pytorch_optim_group.bin")
            index = json.dumps({"metadata": metadata, "weight_map": weights})
            Path(f"booster/{part}/{base}.bin.index.json").write_text(index)
