"""Strategies that do not notice that the ranks have written different values into a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from faults import EVERYTHING, Fault, fault
from nnx_tiny.backend import TinyBackend


class TakesRankZerosCopies(TinyBackend):
    """Makes the weights of all ranks those of rank 0 after each step."""

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
    *("bank_written_by_ranks", "bank_written_by_ranks_while_accumulating", "sums_kept_by_ranks"),
    *("bank_written_by_ranks_in_manual_optimization", "rows_renormalized_by_ranks"),
    "bias_written_by_ranks",
)
_ENGINES = {
    **dict.fromkeys(("CopiesOfDeepSpeed", "CopiesOfOSS", "CopiesOfSharded"), "rows_renormalized_by_ranks"),
    **dict.fromkeys(("PersistentOfDeepSpeed", "PartitionsOfDeepSpeed"), "sums_kept_by_ranks"),
    **dict.fromkeys(("UnitsOfFairscale", "UnitsOfFSDP"), "bank_written_by_ranks"),
    "UnguardedPartitionsOfDeepSpeed": "weights_read_between_steps",
}
"""Engines in `habits_engines` that do not see what user code reads or writes, and a check that each fails."""

FAULTS = [
    *(fault(f"{check}: TakesRankZerosCopies", TakesRankZerosCopies, check, *EVERYTHING) for check in _CAUGHT),
    *(
        Fault(
            name=f"{check}: {broken}",
            target=f"faults.habits_engines:{broken}",
            caught_by=check,
            also=EVERYTHING,
        )
        for broken, check in _ENGINES.items()
    ),
]
