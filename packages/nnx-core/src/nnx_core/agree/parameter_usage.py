"""Let the ranks agree on the parameters that a step used.

Ranks may use different parameters in one step: hard routing, a branch per sample, a head per task.
A parameter that some rank used has a gradient, which is zero on the others. One that no rank used has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import all_reduce

from nnx_base.ranks import engine_group, is_distributed
from nnx_core.agree.announced_waits import wait_for_collective


def used_anywhere(flags: Sequence[bool]) -> list[bool]:
    """Which of these are set on at least one rank. Collective, over host memory, one byte each.

    Args:
        flags: True for each parameter that this rank used, in an order that is the same on every rank.

    Example:
        >>> used_anywhere([True, False])
        [True, False]
    """
    return asked_anywhere(flags)()


def asked_anywhere(flags: Sequence[bool]) -> Callable[[], list[bool]]:
    """Ask as `used_anywhere` does, without waiting for the other ranks.

    Args:
        flags: The flags that `used_anywhere` takes.

    Returns:
        A function that waits for the answer, and gives it as often as it is called.
    """
    if not is_distributed() or not flags:
        return lambda: list(flags)
    shared = torch.tensor(flags, dtype=torch.uint8)
    work = all_reduce(shared, op=dist.ReduceOp.MAX, group=engine_group(), async_op=True)

    @cache
    def answer() -> list[bool]:
        wait_for_collective(work, "the comparison of used parameters")
        return [bool(flag) for flag in shared.tolist()]

    return answer
