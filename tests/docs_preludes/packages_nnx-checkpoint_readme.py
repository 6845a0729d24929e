"""The ranks are in one world, as those of a loop under torchrun are."""

import torch

torch.distributed.init_process_group("gloo")
