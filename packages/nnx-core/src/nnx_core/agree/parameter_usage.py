"""Find the parameters that a step used on any rank.

Ranks may use different parameters in one step: hard routing, a branch per sample, a head per task. If any
rank used a parameter, all ranks get a gradient, which is zero on the others. Otherwise it has none.
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
    """Return which flags are set on at least one rank. Collective on CPU tensors, one byte per flag.

    Args:
        flags: True for each parameter that this rank used, in the same order on every rank.

    Example:
        >>> used_anywhere([True, False])
        [True, False]
    """
    return asked_anywhere(flags)()


def asked_anywhere(flags: Sequence[bool]) -> Callable[[], list[bool]]:
    """Start `used_anywhere` without waiting for the other ranks.

    Args:
        flags: The flags that `used_anywhere` takes.

    Returns:
        A function that waits for the flags of all ranks and returns them; it may be called several times.
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
