"""The ranks belong to one world, as those of a loop under torchrun do."""

import torch

torch.distributed.init_process_group("gloo")
