"""Strategies that do not notice different values in a parameter on different ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from faults import EVERYTHING, Fault, fault
from nnx_tiny.backend import TinyBackend


class TakesRankZerosCopies(TinyBackend):
    """Overwrites the weights of all ranks with those of rank 0 after each step."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = step(*args, **kwargs)
        for parameter in self.copies:
            dist.broadcast(parameter.detach(), 0)
        return result

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.copies = list(module.parameters()) if self.context.world_size > 1 else []
        return super().run_step(module, step, *args, **kwargs)


_CAUGHT = (
    *("memory_bank_per_rank", "memory_bank_per_rank_while_accumulating", "running_sum_per_rank"),
    *("memory_bank_per_rank_in_manual_optimization", "embedding_max_norm_per_rank"),
    "bias_written_per_rank",
)
_ENGINES = {
    **dict.fromkeys(("CopiesOfDeepSpeed", "CopiesOfOSS", "CopiesOfSharded"), "embedding_max_norm_per_rank"),
    **dict.fromkeys(("PersistentOfDeepSpeed", "PartitionsOfDeepSpeed"), "running_sum_per_rank"),
    **dict.fromkeys(("UnitsOfFairscale", "UnitsOfFSDP"), "memory_bank_per_rank"),
    "UnguardedPartitionsOfDeepSpeed": "weights_read_between_steps",
}
"""By engine of `user_patterns_engines`, which misses user reads or writes, the check that it fails."""

FAULTS = [
    *(fault(f"{check}: TakesRankZerosCopies", TakesRankZerosCopies, check, *EVERYTHING) for check in _CAUGHT),
    *(
        Fault(
            name=f"{check}: {broken}",
            target=f"faults.user_patterns_engines:{broken}",
            caught_by=check,
            also=EVERYTHING,
        )
        for broken, check in _ENGINES.items()
    ),
]
